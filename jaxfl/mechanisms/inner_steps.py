"""Several steps of a personal model on each mini-batch, before the model that it is tied to follows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxfl.core.loops import scan
from jaxfl.core.training import improve
from jaxfl.models.model import Weights


def inner_steps(
    loss: Callable,
    weights: Any,
    opt_state: Any,
    batch: Any,
    key: jax.Array,
    *,
    steps: int,
    optimizer: optax.GradientTransformation,
) -> tuple[Any, Any, jax.Array]:
    """Minimise a loss by several steps on one mini-batch.

    Args:
      loss: ``(weights, batch, key) -> (value, stats)``; or ``-> (value, stats, number)`` to report another
        number than the value.
      weights: `Weights` to start from; their `params` may be any pytree.
      opt_state: the optimiser's state.
      batch: the mini-batch, passed to the loss.
      key: key of the batch; step k gets ``fold_in(key, k)``.
      steps: number of optimiser steps.
      optimizer: any Optax optimiser.

    Returns:
      The weights, the optimiser's state, and the mean of the reported numbers; 0 for no step.
    """

    def step(carry, k):
        (params, stats), opt_state = carry
        step_key = jax.random.fold_in(key, k)

        def objective(params):
            value, *more = loss(Weights(params, stats), batch, step_key)
            return value, more

        params, opt_state, value, (stats, *reported) = improve(objective, params, opt_state, optimizer)
        return (Weights(params, stats), opt_state), reported[0] if reported else value

    (weights, opt_state), values = scan(step, (weights, opt_state), jnp.arange(steps, dtype=jnp.int32))
    return weights, opt_state, values.sum() / max(steps, 1)
