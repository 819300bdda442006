"""Loops and branches around client maps: those of `jax.lax`, with their operations counted.

The operations inside a loop or a branch are known only there, so they leave it as an extra result and are
added up here (see `jaxfl.core.flops`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfl.core import flops

SERVER = -1  # owner of operations that no group's clients compute; JAX sorts keys, and None has no order


def scan(f: Callable, carry: Any, xs: Any = None, length: int | None = None) -> tuple[Any, Any]:
    """Run `jax.lax.scan`: ``f(carry, x) -> (carry, y)`` over the leading axis of `xs`."""

    def counted(carry, x):
        (carry, y), operations = _collected(f, carry, x)
        return carry, (y, operations)

    carry, (ys, operations) = jax.lax.scan(counted, carry, xs, length)
    _add(jax.tree.map(lambda leaf: leaf.sum(0), operations))
    return carry, ys


def fori_loop(lower, upper, f: Callable, carry: Any) -> Any:
    """Run `jax.lax.fori_loop`: ``f(i, carry) -> carry`` for i from `lower` to, not including, `upper`."""
    _, shapes = jax.eval_shape(lambda i, carry: _collected(f, i, carry), lower, carry)
    nothing = jax.tree.map(jnp.zeros_like, shapes)

    def counted(i, carried):
        carry, so_far = carried
        carry, operations = _collected(f, i, carry)
        return carry, jax.tree.map(jnp.add, so_far, operations)

    carry, operations = jax.lax.fori_loop(lower, upper, counted, (carry, nothing))
    _add(operations)
    return carry


def cond(condition, if_true: Callable, if_false: Callable, *operands: Any) -> Any:
    """Run `jax.lax.cond`: one of two functions of the operands; only the one that runs is counted."""
    branches = if_true, if_false
    shapes = {}
    for branch in branches:
        shapes |= jax.eval_shape(lambda *args, f=branch: _collected(f, *args)[1], *operands)

    def counted(f):
        def branch(*operands):
            outputs, operations = _collected(f, *operands)
            return outputs, jax.tree.map(jnp.zeros_like, shapes) | operations

        return branch

    outputs, operations = jax.lax.cond(condition, *map(counted, branches), *operands)
    _add(operations)
    return outputs


def _collected(f: Callable, *args: Any) -> tuple[Any, dict[int, jax.Array]]:
    """Return a function's outputs, and its operations by group; those without a group are `SERVER`'s."""
    with flops.collect() as amounts:
        outputs = f(*args)
    total = {}
    for group, amount in amounts:
        owner = SERVER if group is None else group
        total[owner] = total.get(owner, 0) + jnp.asarray(amount).astype(float)
    return outputs, total


def _add(operations: dict[int, jax.Array]) -> None:
    for owner, amount in operations.items():
        flops.pass_on(amount, group=None if owner == SERVER else owner)
