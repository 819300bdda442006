"""DP-SGD: the gradient of every row is clipped alone, and noise is added to the sum.

Abadi et al. 2016, arXiv:1607.00133, Algorithm 1. l_i is the loss of row i of a client's n rows, B the batch
size, C the clip norm and z the noise multiplier. In every step

    L <- each row on its own with probability q = min(1, B / n)                        (Poisson sampling)
    g <- (sum_{i in L} clip(grad l_i, C) + N(0, (z C)^2)) / (q n)
    w <- the optimiser's step along g

L may hold no row, or more than B, so the sum is taken over as many batches of B rows as L fills. There are as
many steps as batches in plain training. Here the accountant of `jaxfl.mechanisms.wire` counts them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxfl.core import flops
from jaxfl.core.batches import Epochs, batches_per_epoch, batches_per_phase
from jaxfl.core.examples import Examples
from jaxfl.core.streams import NOISE
from jaxfl.errors import JaxflError


def noisy_descent(
    loss: Callable,
    params: Any,
    optimizer: optax.GradientTransformation,
    key,
    examples: Examples,
    *,
    epochs: Epochs,
    batch_size: int,
) -> tuple[Any, jax.Array, jax.Array]:
    """Minimise a mean over rows by noisy steps.

    Args:
      loss: ``(params, batch, key) -> value``; batches have one row.
      params: any tree of floats.
      optimizer: any Optax optimiser, new.
      key: only for this phase.
      examples: a client's rows, with `Examples.privacy`.
      epochs: passes over the rows, see `jaxfl.core.training.fit`.
      batch_size: B.

    Returns:
      The new params, the mean loss of a row over all steps, and the number of steps () int32.
    """
    privacy, n = examples.privacy, examples.size
    steps = batches_per_phase(epochs, batches_per_epoch(n, batch_size, skip_single_row=False))
    rows = jnp.clip(n, 1, batch_size).astype(float)  # q n, of a step on average
    batch_size = min(batch_size, examples.capacity)  # longer ones hold only padding
    places = jnp.arange(batch_size, dtype=jnp.int32)

    def of_row(params, row, number, key):
        """Return a row's loss, 0 of padding."""
        alone = jax.tree.map(lambda leaf: leaf[None], row)
        return jnp.where(row.mask, loss(params, alone, jax.random.fold_in(key, number)), 0)

    def of_batch(params, batch, key):
        """Return the sum of the rows' losses, and that of their clipped gradients.

        A gradient is computed twice, for its norm and as a part of the sum: all of a batch are never stored.
        """

        def norm(row, number):
            return optax.tree.norm(jax.grad(of_row)(params, row, number, key))

        def clipped(params):
            losses = jax.vmap(of_row, (None, 0, 0, None))(params, batch, places, key)
            return (shares * losses).sum(), losses.sum()

        norms = jax.vmap(norm)(batch, places)
        shares = jnp.minimum(1, privacy.clip / jnp.where(norms > 0, norms, 1))
        (_, value), gradient = jax.value_and_grad(clipped, has_aux=True)(params)
        return value, gradient

    of_batch = jax.jit(of_batch, inline=True)  # traced once, for its operations and the loop
    batch = jax.eval_shape(lambda: examples.take(places, places < n, key))
    operations = flops.of(of_batch, params, batch, key) / batch_size
    flops.add(operations * rows * steps.astype(float), noisy_steps=steps)

    def step(t, carried):
        params, opt_state, so_far = carried
        step_key = jax.random.fold_in(key, t)
        size, order = poisson_sample(step_key, n, examples.capacity, batch_size)

        def add(b, total):
            place, batch_key = b * batch_size + places, jax.random.fold_in(step_key, b)
            batch = examples.take(order.at[place].get(mode="clip"), place < size, batch_key)
            return jax.tree.map(jnp.add, total, of_batch(params, batch, batch_key))

        nothing = jnp.zeros_like(so_far), jax.tree.map(jnp.zeros_like, params)
        batches = (size + batch_size - 1) // batch_size
        value, total = jax.lax.fori_loop(jnp.zeros_like(batches), batches, add, nothing)
        noise = optax.tree.random_like(jax.random.fold_in(step_key, NOISE), params)
        scale = privacy.noise * privacy.clip
        gradient = jax.tree.map(lambda g, drawn: (g + scale * drawn) / rows, total, noise)
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
            change, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, change), opt_state, so_far + value / rows

    start = params, optimizer.init(params), jnp.zeros((), jnp.result_type(float))
    params, _, total = jax.lax.fori_loop(jnp.zeros_like(steps), steps, step, start)
    return params, total / jnp.maximum(steps, 1).astype(total.dtype), steps


def require_alone(stats: Any, counted: bool) -> None:
    """Refuse training that more than the noisy steps of single rows would learn from.

    The network's statistics are by block; `counted` says whether rows are taken in the accountant's batches,
    and only for gradients.

    Raises:
      JaxflError: saying what learns more.
    """
    for block, leaves in stats.items():
        if jax.tree.leaves(leaves):
            raise JaxflError(
                f"--privacy rows protects rows one by one, but BatchNorm (in the block {block!r}) normalises "
                "them together; build the network with norm=none, or take another."
            )
    if not counted:
        raise JaxflError(
            "--privacy rows protects steps on batches of --batch-size, but the method also observes its "
            "rows, or takes batches of another size; leave it out."
        )


def poisson_sample(key, n, capacity: int, batch_size: int) -> tuple[jax.Array, jax.Array]:
    """Draw each of n () int32 rows on its own with probability min(1, batch_size / n).

    Returns:
      How many are drawn, () int32, and places of rows (capacity,) int32, first of those drawn.
    """
    real = jnp.arange(capacity, dtype=jnp.int32) < n
    drawn = real & (jax.random.uniform(key, (capacity,)) < batch_size / n.astype(float))
    return drawn.sum(dtype=jnp.int32), jnp.argsort(~drawn, stable=True).astype(jnp.int32)
