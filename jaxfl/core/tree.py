"""Pytrees of client state: parts, places in a stack, and means over clients."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxfl.core.protocol import Slots


def split(tree, keep):
    """Divide a tree by leaf path into (leaves where ``keep(path)``, the others), with None elsewhere.

    Args:
      tree: any pytree.
      keep: function of a path, a tuple of names such as ``("params", "conv1", "kernel")``.
    """
    marks = jax.tree.map_with_path(lambda path, _: bool(keep(names(path))), tree)
    kept = jax.tree.map(lambda mark, leaf: leaf if mark else None, marks, tree)
    rest = jax.tree.map(lambda mark, leaf: None if mark else leaf, marks, tree)
    return kept, rest


def combine(tree, other):
    """Undo `split`: wherever `tree` has None, take `other`."""
    return jax.tree.map(lambda a, b: b if a is None else a, tree, other, is_leaf=lambda leaf: leaf is None)


def like(tree, other):
    """Return the leaves of a tree where `other`, a part of it, has leaves, and None elsewhere.

    Raises:
      ValueError: if `other` has a leaf where the tree has none.

    >>> like({"a": 1, "b": {"c": 2}}, {"b": {"c": 0}})
    {'a': None, 'b': {'c': 2}}
    """
    part, known = (dict(jax.tree.leaves_with_path(each)) for each in (other, tree))
    for path in part.keys() - known.keys():
        where = jax.tree_util.keystr(path)
        raise ValueError(f"tree.like: the other tree has a leaf at {where}, where this one has none")
    return jax.tree.map_with_path(lambda path, leaf: leaf if path in part else None, tree)


def names(path) -> tuple[str, ...]:
    """Return a JAX key path as plain names."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def by_path(tree) -> dict:
    """Return the leaves of a tree, in order, by their paths in plain names.

    >>> by_path({"conv1": {"kernel": 3, "bias": 4}})
    {('conv1', 'bias'): 4, ('conv1', 'kernel'): 3}
    """
    return {names(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def unlike(made, before) -> str:
    """Say which leaf of a tree is the first to differ in form from the tree before; nothing if none does.

    >>> unlike({"a": jnp.zeros(2)}, {"a": jnp.zeros(2, int)})
    "['a'] float32[2], which was int32[2]"
    """

    def form(leaf):
        if leaf is None:
            return "nothing"
        return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__

    trees = [jax.tree.leaves_with_path(each) for each in (made, before)]
    now, then = ({jax.tree_util.keystr(path): leaf for path, leaf in leaves} for leaves in trees)
    for path in then | now:
        is_now, was = form(now.get(path)), form(then.get(path))
        if is_now != was:
            return f"{path} {is_now}, which was {was}"
    return ""


def take(tree, slots: Slots):
    """Take rows ``slots.index`` of every leaf, (n, ...) -> (k, ...); an empty place repeats the last row."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, slots.index, axis=0, mode="clip"), tree)


def put(tree, slots: Slots, new):
    """Write `new` (k, ...) to the rows ``slots.index`` of every leaf; empty places change nothing."""
    return jax.tree.map(lambda leaf, rows: leaf.at[slots.index].set(rows, mode="drop"), tree, new)


def repeat(tree, n: int):
    """Repeat every leaf n times along a new first axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), tree)


def one(stacked):
    """Return shapes and dtypes of one client's entries in a stacked tree: leaves (n, ...) -> (...)."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)


def shares(weights):
    """Divide weights (k,) by their sum; zeros stay zeros."""
    total = weights.sum()
    return weights / jnp.where(total > 0, total, 1)


def weighted_sum(weights, stacked):
    """Return ``sum_m weights[..., m] leaf[m]`` for every leaf: (..., k), (k, ...) -> (..., ...).

    Floats keep their type; whole numbers and flags get that of the weights.
    """

    def of_leaf(leaf):
        leaf = leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(weights.dtype)
        return jnp.tensordot(weights.astype(leaf.dtype), leaf, 1, precision="highest")

    return jax.tree.map(of_leaf, stacked)


def weighted_mean(stacked, weights, old):
    """Return every leaf's (k, ...) mean over the first axis with weights (k,), `old` if all of them are 0."""
    return where(weights.sum() > 0, weighted_sum(shares(weights), stacked), old)


def mean_of_holders(sums, counts, old, least: float = 1):
    """Return the mean of every entry over its holders, for trees of the same shapes.

    Args:
      sums: of the holders' values.
      counts: number of holders, or the sum of their weights.
      old: the value where the count is below `least`.
      least: smallest count with a mean.
    """

    def mean(total, count, before):
        return jnp.where(count >= least, total / jnp.where(count > 0, count, 1), before)

    return jax.tree.map(mean, sums, counts, old)


def where(condition, new, old):
    """Return `new` if `condition`, a () bool or one that fits all leaves, is True, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def where_each(mask, new, old):
    """Return for each client its leaves of `new` or of `old`.

    Args:
      mask: (k,) bool.
      new: leaves (k, ...), or (...) for all clients, taken where `mask` is True.
      old: the same, taken where `mask` is False.
    """

    def of_leaf(a, b):
        return jnp.where(mask.reshape(mask.shape + (1,) * (max(a.ndim, b.ndim) - 1)), a, b)

    return jax.tree.map(of_leaf, new, old)


def total(arrays: Iterable[jax.Array]) -> jax.Array:
    """Sum one array or more, in their order."""
    return functools.reduce(jnp.add, arrays)


def scalars(tree) -> int:
    """Count the scalars in a tree (of one client, not stacked), as the ledger does."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
