"""Which leaves of a model never leave its client, by their paths ``("params", block, ..., leaf)``."""

from collections.abc import Callable

import jax

from jaxfl.core import tree
from jaxfl.errors import JaxflError
from jaxfl.models.model import Model, Weights

Keep = Callable[[Model], Callable[[tuple[str, ...]], bool]]  # whether a leaf stays on its client, by its path


def no_leaf(model: Model) -> Callable:
    """Keep nothing: all is shared."""
    return lambda path: False


def every_leaf(model: Model) -> Callable:
    """Keep all: nothing is shared."""
    return lambda path: True


def head(model: Model) -> Callable:
    """Keep the head."""
    return lambda path: path[1] in model.head.names


def require_plain_head(model: Model) -> None:
    """Refuse a classifier with BatchNorm, for a method that applies the classifier separately."""
    (name,) = model.head.names
    if jax.tree.leaves(model.form.stats.get(name)):
        raise JaxflError(
            f"The method applies the classifier separately, but {model.name} has BatchNorm in its last block "
            f"{name!r}; make that a linear layer."
        )


def body(model: Model) -> Callable:
    """Keep the extractor."""
    return lambda path: path[1] in model.body.names


def norms(model: Model) -> Callable:
    """Keep normalisation layers: statistics, what is of their size beside them, and layers of only vectors.

    The last are such as LayerNorm. A kernel beside statistics, in a layer that does both, is not kept.
    """
    params, stats = map(tree.by_path, model.form)
    axes, room = {}, {}  # by layer: numbers of axes of its parameters, the largest size of a statistic
    for path, leaf in params.items():
        axes.setdefault(path[:-1], set()).add(leaf.ndim)
    for path, leaf in stats.items():
        room[path[:-1]] = max(leaf.size, room.get(path[:-1], 0))

    def keep(path):
        layer = path[1:-1]
        if path[0] == "stats":
            return layer in room
        return params[path[1:]].size <= room[layer] if layer in room else axes[layer] == {1}

    return keep


def separate(weights: Weights, keep: Callable, bn_stats: str) -> tuple[Weights, Weights]:
    """Return (kept, shared) leaves, each with None in the other's places.

    Args:
      weights: weights of a model.
      keep: whether a leaf stays, by its path ``("params" or "stats", block, ..., leaf)``. BatchNorm's running
        statistics are kept or shared as their layer is.
      bn_stats: "local" keeps all running statistics.
    """
    return tree.split(weights, lambda path: keep(path) or (path[0] == "stats" and bn_stats == "local"))
