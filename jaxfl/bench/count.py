"""How much work a round is: rows, steps and the model's floating-point operations."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import flops
from jaxfl.core.protocol import Phase, Slots
from jaxfl.core.training import batches, cross_entropy
from jaxfl.data.federation import Batch, Federation, PerGroup
from jaxfl.models.model import Model, Weights


class Work(NamedTuple):
    """What some rounds train.

    Args:
      samples: real training rows, each as often as it is used.
      steps: optimiser steps of single clients.
      flops: of the model's matrix products, forward and backward.
    """

    samples: int
    steps: int
    flops: int


def work(federation: Federation, cohorts: PerGroup, phases: PerGroup, batch_size: int) -> Work:
    """The work of some rounds.

    Args:
      federation: the clients.
      cohorts: per group `Slots` with leaves (rounds, k_g).
      phases: per group what a client's round consists of.
      batch_size: rows of a mini-batch.
    """
    total = np.zeros(3, np.int64)
    for group, slots, of_group in zip(federation.groups, cohorts, phases, strict=True):
        sizes = _sizes(group, slots)
        for phase in of_group:
            samples = phase.epochs * sizes.sum()
            pairs = _normalises(group.model, phase)
            steps = phase.epochs * batches(sizes, batch_size, pairs).sum()
            total += [samples, steps, samples * flops_per_sample(group.model, phase.blocks)]
    return Work(*total.tolist())


def _sizes(group, slots: Slots) -> np.ndarray:
    return np.asarray(group.size, np.int64)[slots.index[slots.mask]]


def _normalises(model: Model, phase: Phase) -> bool:
    stats = jax.eval_shape(model.init, jax.random.key(0)).stats
    return any(jax.tree.leaves(stats[name]) for name in phase.blocks)


@functools.cache
def flops_per_sample(model: Model, blocks: tuple[str, ...]) -> int:
    """Floating-point operations of one image's loss and its gradient in `blocks`.

    What counts, see `jaxfl.core.flops.of`.
    """

    def loss(trained, weights, x):
        weights = Weights(weights.params | trained, weights.stats)
        batch = Batch(x, jnp.zeros(1, jnp.int32), jnp.ones(1, bool), jnp.zeros(1, jnp.int32))
        return cross_entropy(model, blocks)(weights, batch, jax.random.key(0))[0]

    weights = jax.eval_shape(model.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((1, *model.shape), jnp.result_type(float))
    trained = {name: weights.params[name] for name in blocks}
    return flops.of(jax.value_and_grad(loss), trained, weights, x)
