"""Initial weights from elsewhere: of `--init-from` a run's final models, or the arrays of a file.

What fits is kept with the new run, as named arrays (see `jaxfl.models.named`): a resume asks nobody else.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxfl.config.setup import Setup
from jaxfl.core.final_weights import final_weights
from jaxfl.data import npz
from jaxfl.data.federation import Federation
from jaxfl.errors import JaxflError
from jaxfl.machine import files
from jaxfl.machine.processes import agree, on_first_process
from jaxfl.models.named import Arrays, ClientWeights, by_architecture, fit, named
from jaxfl.runs import checkpoint, store
from jaxfl.runs.config import restore
from jaxfl.runs.job import at_rest, form_of_state
from jaxfl.runs.observer import Observer
from jaxfl.runs.prepare import Data, prepare


class Given(NamedTuple):
    """The arrays of one architecture, and the place that has them."""

    arrays: Arrays
    place: Path


def start_from(data: Data, setup: Setup, saved: Path | None, observer: Observer) -> Data:
    """The data whose federation starts from the weights that `--init-from` names; see `started`."""
    federation, sentences = started(data.federation, setup, saved, observer)
    return data._replace(federation=federation, starts=sentences)


def started(
    federation: Federation, setup: Setup, saved: Path | None, observer: Observer
) -> tuple[Federation, tuple[str, ...]]:
    """The federation that starts from the weights that `--init-from` names; the same without it.

    Args:
      federation: of the run.
      setup: its options.
      saved: folder of a run that has begun with them and keeps them.
      observer: is told which architecture starts from where, and which blocks start fresh.

    Returns:
      It, and what the observer is told.

    Raises:
      JaxflError: if there are no such weights, they are damaged or not finite, or no block takes them.
    """
    if not setup.run.init_from:
        return federation, ()
    places = [saved / store.INITIAL] if saved else [*map(Path, setup.run.init_from)]
    # Each architecture from the first place that has it.
    given = {name: Given(its, place) for place in places[::-1] for name, its in _arrays(place).items()}
    starts, sentences, tell = [], [], []
    for model, group in zip(federation.models, federation.groups, strict=True):
        found, ids = _of_architecture(given, model.name), np.asarray(group.id).tolist()
        weights, misfits = fit(found.arrays if found else Arrays({}, {}, []), model, ids)
        starts.append(weights)
        sentences.append(_sentence(model.name, given, found, weights, misfits))
        tell.append(observer.warned if misfits else observer.said)
    if not any(weights.shared.params for weights in starts):
        raise JaxflError(f"--init-from: nothing fits. {' '.join(sentences)}")
    agree("initial weights", starts)
    if not saved:
        for say, sentence in zip(tell, sentences, strict=True):
            say(sentence)
    return dataclasses.replace(federation, initial=tuple(starts)), tuple(sentences)


def kept(data: Data) -> dict[str, np.ndarray]:
    """What a run keeps of its initial weights, as named arrays; nothing where all are fresh."""
    federation, arrays = data.federation, {}
    for model, group, models in zip(
        federation.models, federation.groups, federation.initial or (), strict=bool(federation.initial)
    ):
        arrays |= named(model.name, models, np.asarray(group.id).tolist())
    return arrays


def final_arrays(folder: Path) -> dict[str, np.ndarray]:
    """What the clients of a run deploy after its newest checkpoint, as named arrays.

    All processes compute it together.

    Raises:
      JaxflError: if it has no checkpoint that can be read, or its data or its method are not at hand.
    """
    config = store.read_config(folder)
    setup, variant = restore(folder, config)
    federation = prepare(setup.replace(devices=None, clients_at_once=None), folder).federation
    like = partial(form_of_state, variant, setup, federation)
    written, mark = len(store.read_metrics(folder)), store.fingerprint(config)
    done, state = checkpoint.newest(folder, written, like, mark)
    if not done:
        raise JaxflError("it has no checkpoint yet; wait for its first one, or name another run.")
    key, rounds = jax.random.key(setup.run.seed), setup.run.rounds
    state = at_rest(variant, setup, federation, state)
    models = final_weights(variant.algorithm, federation, state, key, done, rounds)
    arrays = {}
    for model, group, of_group in zip(federation.models, federation.groups, models, strict=True):
        arrays |= named(model.name, of_group, np.asarray(group.id).tolist())
    return arrays


def _arrays(place: Path) -> dict[str, Arrays]:
    """What a run or a file holds, by architecture."""
    try:
        if files.reads(Path.is_dir)(place):
            return by_architecture(final_arrays(place))
        if place.suffix == ".npz":
            return by_architecture(on_first_process(npz.read)(place, required=()))
        raise JaxflError("it is neither the folder of a run nor an .npz file of arrays.")
    except JaxflError as error:
        raise JaxflError(f"--init-from {place}: {error}") from error


def _of_architecture(given: dict[str, Given], name: str) -> Given | None:
    """What an architecture is given: by its name, or by its name without options if that is one's alone."""
    base, _, _ = name.partition(",")
    alike = [found for other, found in given.items() if other.partition(",")[0] == base]
    if name in given:
        return given[name]
    return alike[0] if len(alike) == 1 else given.get("")


def _sentence(
    name: str, given: dict[str, Given], found: Given | None, weights: ClientWeights, misfits: dict[str, str]
) -> str:
    """What an architecture starts from, and what of it starts fresh."""
    fresh = ", ".join(f"{block} ({why})" for block, why in misfits.items())
    if found is None:
        places = " and ".join(str(place) for place in dict.fromkeys(place for _, place in given.values()))
        return f"{name} starts fresh: in {places} there is only {', '.join(given)}."
    if not weights.shared.params:
        return f"{name} starts fresh: {found.place} does not fit in {fresh}."
    own = ", clients from models of their own" if jax.tree.leaves(weights.own) else ""
    return f"{name} starts from {found.place}{own}" + (f"; fresh are {fresh}." if fresh else ".")
