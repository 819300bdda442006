"""The numbers of rows and optimiser steps of rounds, for methods whose local training is known here.

Operations need no such table: the engine counts them for any method, see `jaxfl.core.flops`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core.batches import batches_per_epoch
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.models.model import Model


class Phase(NamedTuple):
    """A part of a client's round, like `jaxfl.mechanisms.sharing.Phase`, but always of whole epochs."""

    blocks: tuple[str, ...]  # names of the blocks that train
    epochs: int  # passes over the client's rows
    personal: bool = False  # whether a personal model trains, pulled towards the global one (Ditto)


def _jointly(config: Any, model: Model) -> tuple[Phase, ...]:
    return (Phase(model.names, config.epochs),)


def _fedrep(config: Any, model: Model) -> tuple[Phase, ...]:
    return Phase(model.head.names, config.head_epochs), Phase(model.body.names, config.epochs)


def _ditto(config: Any, model: Model) -> tuple[Phase, ...]:
    own = Phase(model.names, config.personal_epochs or config.epochs, personal=True)
    return own, *_jointly(config, model)


# Method -> the phases of a client's round. The PyTorch loop knows these methods.
PHASES: dict[str, Callable[[Any, Model], tuple[Phase, ...]]] = {
    "fedavg": _jointly,
    "fedper": _jointly,
    "fedrep": _fedrep,
    "ditto": _ditto,
}


# Options of local training that neither the table nor the PyTorch loop knows, with their usual values.
UNCOUNTED = {"steps": None, "optimizer": "sgd", "augment": (), "clip_norm": None}


def require_counted(label: str, config: Any) -> None:
    """Refuse options of local training that the table of phases and the PyTorch loop do not know.

    Raises:
      JaxflError: naming the first one.
    """
    strange = [name for name, usual in UNCOUNTED.items() if getattr(config, name) != usual]
    strange += [
        name for name in ("epochs", "head_epochs", "personal_epochs") if (getattr(config, name, 0) or 0) % 1
    ]
    if strange:
        raise JaxflError(
            f"{label}: jaxfl bench counts whole epochs of plain SGD for this method; leave {strange[0]} out."
        )


def work(federation: Federation, cohorts: PerGroup, phases: PerGroup, batch_size: int) -> tuple[int, int]:
    """Return the training rows of some rounds, each as often as it is used, and clients' optimiser steps.

    Cohorts are per group `Slots` with leaves (rounds, k_g), phases per group those of a client's round.
    """
    samples = steps = 0
    for group, slots, of_group in zip(federation.groups, cohorts, phases, strict=True):
        sizes = np.asarray(group.size, np.int64)[slots.index[slots.mask]]
        for phase in of_group:
            skip = not group.model.needing_two_rows.isdisjoint(phase.blocks)
            samples += phase.epochs * int(sizes.sum())
            steps += phase.epochs * int(batches_per_epoch(sizes, batch_size, skip).sum())
    return samples, steps
