"""Runs of like blocks as one loop, so that compile time does not grow with a network's depth.

Blocks are alike if they have the same module and the same input shape, as most of a ResNet stage have. A
module that `extends`, such as DenseNet's layer, returns its input with more channels after it; `extends`
names the layers in it that see this input. A run of these is computed on maps that have all channels from the
start. Those still to come are zeros, and so are the weights that meet them.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxfl.models.norms import values_per_channel

SHORTEST = 3  # blocks; a loop of two saves little, and its stacked weights are a copy
LONGEST = 8  # extending blocks; every one computes with the channels of the last


class Outline(NamedTuple):
    """Shapes of a block's variables and output, and its number of taps."""

    variables: dict  # shapes and dtypes of its parameters and statistics, in Flax's form
    output: tuple[int, ...]  # shape of its output for one example
    convolution_count: int  # number of its taps
    needs_two_rows: bool
    """Whether it cannot train on a batch of one row, see `jaxfl.models.norms`. A block with statistics, but
    without a BatchNorm of Flax or Equinox, is taken to need two."""


@functools.cache
def outline(module: nn.Module, shape: tuple[int, ...], dtype: jnp.dtype) -> Outline:
    """Trace a block once for all models that have it."""
    x = jax.ShapeDtypeStruct((1, *shape), dtype)
    call = functools.partial(module.apply, train=False, mask=None, mutable=["intermediates"])
    start = functools.partial(module.lazy_init, train=False, mask=None)
    variables = jax.eval_shape(lambda key: start(key, x), jax.random.key(0))
    with values_per_channel() as values:
        y, new = jax.eval_shape(call, variables, x)
    taps = new.get("intermediates", {}).get("taps", ())
    has_statistics = bool(jax.tree.leaves(variables.get("batch_stats", {})))
    return Outline(variables, y.shape[1:], len(taps), has_statistics and min(values, default=1) == 1)


def runs(
    modules: Sequence[nn.Module], shapes: Sequence[tuple[int, ...]], apart: Sequence[Hashable]
) -> list[list[int]]:
    """Divide the places of blocks, in order, into runs to loop over; most blocks stand alone.

    Blocks share a run only if their modules, input shapes (for one example) and keys `apart` are equal.
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
    """Apply the blocks of a run one after the other; return the last one's output, all their statistics.

    Args:
      call: `(variables, key, x) -> (output, statistics, ())`, the same for all.
      variables: variables of each block.
      keys: dropout key of each block.
      growth: number of channels that each block adds.
      x: input of the first block.
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
