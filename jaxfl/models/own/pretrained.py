"""Weights of a network trained elsewhere, by the names of its blocks."""

from typing import Any

import numpy as np

from jaxfl.errors import JaxflError
from jaxfl.models.model import Model
from jaxfl.models.own.chain import Section
from jaxfl.models.own.walk import leaves


def named_arrays(model: Model, *trained: Any) -> dict[str, np.ndarray]:
    """Return the weights of a network trained elsewhere, by the names that `--init-from` reads.

    ``np.savez("pretrained.npz", **named_arrays(model, variables))`` writes a file for it.

    Args:
      model: the same network, from `from_linen`, `from_nnx` or `from_equinox`.
      *trained: Linen's variables, {"params": ..., "batch_stats": ...}; an NNX module; or an Equinox module
        and its state, if it has one.

    Raises:
      JaxflError: if the network has leaves that are missing there.
    """
    sections = {name: module for name, module in model.blocks if isinstance(module, Section)}
    if not sections:
        raise JaxflError(
            f"{model.name} is made of plain functions or of jaxfl's own blocks; name its arrays yourself."
        )
    found = {}
    for kind, part in next(iter(sections.values())).network.given(*trained)._asdict().items():
        for name, section in sections.items():
            own = leaves(section.network)._asdict()[kind].keys() & section.paths
            for path in sorted(own):
                if path not in part:
                    raise JaxflError(
                        f"{model.name} has {'/'.join(path)} among its {kind}, but the given weights lack it."
                    )
                found["/".join((kind, name, *path[section.prefix :]))] = np.asarray(part[path])
    return found
