"""Runs of like blocks as one loop, so that the time to compile a network does not grow with its depth.

Blocks are alike if they have the same module and the same input, as most of a ResNet stage have. A module
that `extends`, such as DenseNet's layer, puts out its input with more channels after it; what it says there
are the layers in it that see this input. A run of these is computed on maps that have all channels from the
start. Those that are still to come are zeros, and so are the weights that meet them.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

SHORTEST = 3  # blocks; a loop of two saves little, and its stacked weights are a copy
LONGEST = 8  # extending blocks; every one computes with the channels of the last


class Outline(NamedTuple):
    """What a block looks like.

    Attributes:
        variables: Shapes and dtypes of its parameters and statistics, as Flax has them.
        output: Shape of what it puts out for one example.
        convolutions: How many taps it has.
    """

    variables: dict
    output: tuple[int, ...]
    convolutions: int


@functools.cache
def outline(module: nn.Module, shape: tuple[int, ...], dtype: jnp.dtype) -> Outline:
    """Traces a block once for all models that have it.

    Args:
        module: Of the block.
        shape: Of one example that it takes.
        dtype: JAX's default float dtype.
    """
    x = jax.ShapeDtypeStruct((1, *shape), dtype)
    call = functools.partial(module.apply, train=False, mask=None, mutable=["intermediates"])
    start = functools.partial(module.lazy_init, train=False, mask=None)
    variables = jax.eval_shape(lambda key: start(key, x), jax.random.key(0))
    y, new = jax.eval_shape(call, variables, x)
    return Outline(variables, y.shape[1:], len(new.get("intermediates", {}).get("taps", ())))


def runs(
    modules: Sequence[nn.Module], shapes: Sequence[tuple[int, ...]], apart: Sequence[Hashable]
) -> list[list[int]]:
    """Divides the places of blocks, in order, into those to loop over; most stand alone.

    Args:
        modules: Of the blocks.
        shapes: Of one example that each takes.
        apart: Blocks are in one run only where these are equal.
    """

    def likeness(i: int):
        return modules[i], shapes[i][:-1] if _extends(modules[i]) else shapes[i], apart[i]

    found = []
    for (module, *_), like in itertools.groupby(range(len(modules)), likeness):
        places = list(like)
        most = LONGEST if _extends(module) else len(places)
        for start in range(0, len(places), most):
            run = places[start : start + most]
            found += [run] if len(run) >= SHORTEST else [[i] for i in run]
    return found


def _extends(module: nn.Module) -> bool:
    return bool(getattr(module, "extends", ()))


def loop(
    call: Callable[[dict, jax.Array | None, jax.Array], tuple[jax.Array, dict, tuple]],
    variables: Sequence[dict],
    keys: Sequence[jax.Array | None],
    growth: int,
    x: jax.Array,
) -> tuple[jax.Array, list[dict]]:
    """Applies the blocks of a run, one after the other.

    Args:
        call: `(variables, key, x) -> (output, statistics, ())`, the same for all.
        variables: Of each block.
        keys: For the dropout of each block.
        growth: Channels that each block adds.
        x: What the first block takes.

    Returns:
        What the last block puts out, and the statistics of each.
    """
    channels = [x.shape[-1] + growth * i for i in range(len(variables))]  # that each block takes
    most = channels[-1]

    def block(x, inputs):
        variables, key, own = inputs
        y, stats, _ = call(variables, key, x[..., :most])
        if growth:
            y = lax.dynamic_update_slice_in_dim(x, y[..., most:], own, axis=-1)
        return y, stats

    largest = jax.tree.map(jnp.shape, variables[-1])
    padded = [jax.tree.map(_padded, own, largest) for own in variables]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *zip(padded, keys, strict=True))
    x = _padded(x, (*x.shape[:-1], most + growth))
    x, stats = lax.scan(block, x, (*stacked, jnp.asarray(channels, jnp.int32)))
    return x, [
        jax.tree.map(functools.partial(_cut, i), stats, own["batch_stats"]) for i, own in enumerate(variables)
    ]


def _cut(i: int, stacked: jax.Array, like: jax.Array) -> jax.Array:
    return stacked[i][tuple(slice(size) for size in like.shape)]


def _padded(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.pad(leaf, [(0, new - old) for old, new in zip(leaf.shape, shape, strict=True)])
