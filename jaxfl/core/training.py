"""Local training: one client, its real batches, and an update folded over them.

`fit` is the loop that every method shares: it folds ``update(carry, batch, key)`` over the client's
batches, exactly as many as its own rows make, so unequal clients need no padded steps. It reports what that
costs (see `jaxfl.core.flops`), as `sweep` does. `descend` is the
update that most methods use: minimise a loss by an optax optimiser over some of the model's blocks.
"""

from collections.abc import Callable, Collection
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxfl.config.options import options, within
from jaxfl.core import flops
from jaxfl.data.federation import Batch, Client, Federation, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.models.model import Model, Weights


@options
class Training:
    """Local training, the same for every method. Float fields are traced: a change does not recompile."""

    epochs: int = within("[1, inf)", 5)
    """E, passes over a client's rows in a round."""
    batch_size: int = within("[1, inf)", 10)
    """B, rows of a mini-batch; the last one of an epoch holds the remainder."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Made afresh for each client in each round."""
    lr: float = within("(0, inf)", 0.05)
    """Learning rate."""
    momentum: float = within("[0, 1)", 0.5)
    """Momentum of sgd."""
    weight_decay: float = within("[0, inf)", 5e-4)
    """Added to the gradient as weight_decay * w (sgd, adam) or decoupled (adamw)."""
    bn_stats: Literal["aggregate", "local"] = "aggregate"
    """BatchNorm's running statistics: averaged with their layer, or never sent."""


OPTIMIZERS = {
    "sgd": lambda hyper: optax.chain(
        optax.add_decayed_weights(hyper.weight_decay), optax.sgd(hyper.lr, hyper.momentum)
    ),
    "adam": lambda hyper: optax.chain(optax.add_decayed_weights(hyper.weight_decay), optax.adam(hyper.lr)),
    "adamw": lambda hyper: optax.adamw(hyper.lr, weight_decay=hyper.weight_decay),
}


def batch_order(key, size, capacity: int):
    """The order of a client's rows in one epoch: its first `size` entries are a permutation.

    Args:
      key: ``fold_in(key of the local phase, epoch)``.
      size: () int32, real rows. The order does not depend on the capacity.
      capacity: length of the padded list of rows.

    Returns:
      (capacity,) int32.
    """
    bits = jax.random.bits(key, (capacity,), jnp.uint32) >> 1
    padding = jnp.uint32(2**32 - 1)
    real = jnp.arange(capacity, dtype=jnp.int32) < size
    return jnp.argsort(jnp.where(real, bits, padding)).astype(jnp.int32)


def batches(size, batch_size: int, pairs: bool):
    """Batches in an epoch of `size` rows: ceil(size / batch_size).

    With `pairs` a last batch of a single row is left out, as BatchNorm finds no variance in it.
    """
    count = (size + batch_size - 1) // batch_size
    return count - (size % batch_size == 1).astype(count.dtype) if pairs else count


def fit(
    update: Callable,
    carry,
    key,
    client: Client,
    federation: Federation,
    *,
    epochs: int,
    batch_size: int,
    pairs: bool = False,
):
    """Fold an update over a client's mini-batches, epoch after epoch.

    Args:
      update: ``(carry, batch, key) -> (carry, loss)``.
      carry: what the update changes.
      key: of this client and local phase; epoch e is ordered by ``batch_order(fold_in(key, e), ...)``.
      client: whose rows; a client of size 0 runs no batch.
      federation: the images.
      epochs: passes over the rows.
      batch_size: rows of a mini-batch.
      pairs: whether an update needs at least two rows.

    Returns:
      The carry, and the mean loss over all batches (0 if there was none).
    """
    capacity = client.rows.shape[0]
    steps = batches(client.size, batch_size, pairs)
    places = jnp.arange(batch_size, dtype=jnp.int32)
    update = jax.jit(update, inline=True)  # traced once, for its operations and for the loop
    batch = jax.eval_shape(lambda: federation.batch(client, places, places < client.size))
    rows = epochs * jnp.minimum(client.size, steps * batch_size)
    flops.add(flops.of(update, carry, batch, key) / batch_size * rows.astype(float))

    def epoch(e, carried):
        epoch_key = jax.random.fold_in(key, e)
        order = batch_order(epoch_key, client.size, capacity)

        def step(b, carried):
            carry, total = carried
            place = b * batch_size + places
            position = order.at[place].get(mode="clip")
            batch = federation.batch(client, position, place < client.size)
            carry, loss = update(carry, batch, jax.random.fold_in(epoch_key, b))
            return carry, total + loss

        return jax.lax.fori_loop(jnp.zeros_like(steps), steps, step, carried)

    zero = jnp.zeros((), federation.mean.dtype)
    carry, total = jax.lax.fori_loop(0, epochs, epoch, (carry, zero))
    return carry, total / jnp.maximum(steps * epochs, 1).astype(total.dtype)


def descend(
    loss: Callable,
    weights: Weights,
    key,
    client: Client,
    federation: Federation,
    hyper: Training,
    *,
    blocks: Collection[str],
    epochs: int,
) -> tuple[Weights, jax.Array]:
    """Minimise a loss over some blocks by mini-batch steps of a fresh optimiser.

    Blocks that are not named keep their parameters to the bit: neither gradient nor weight decay sees them.

    Args:
      loss: ``(weights, batch, key) -> (value, stats)``, the mean over the batch's real rows.
      weights: where to start.
      key: of this client and local phase.
      client: whose rows.
      federation: the images.
      hyper: optimiser, its rates and the batch size.
      blocks: names of the blocks that train.
      epochs: passes over the rows.

    Returns:
      The trained weights and the mean loss over all batches.

    Raises:
      JaxflError: if blocks with BatchNorm are to train on batches of one row.
    """
    normalises = any(jax.tree.leaves(weights.stats.get(name)) for name in blocks)
    if normalises and hyper.batch_size == 1:
        raise JaxflError(
            f"{client.model.name} has BatchNorm, which needs batches of two rows or more; raise "
            '--batch-size, or build it with norm="none".'
        )
    optimizer = OPTIMIZERS[hyper.optimizer](hyper)
    frozen = {name: leaves for name, leaves in weights.params.items() if name not in blocks}
    free = {name: leaves for name, leaves in weights.params.items() if name in blocks}

    def update(carry, batch, key):
        free, stats, moments = carry

        def objective(free):
            return loss(Weights(frozen | free, stats), batch, key)

        (value, stats), gradient = jax.value_and_grad(objective, has_aux=True)(free)
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
            step, moments = optimizer.update(gradient, moments, free)
        return (optax.apply_updates(free, step), stats, moments), value

    start = (free, weights.stats, optimizer.init(free))
    (free, stats, _), value = fit(
        update,
        start,
        key,
        client,
        federation,
        epochs=epochs,
        batch_size=hyper.batch_size,
        pairs=normalises,
    )
    return Weights(frozen | free, stats), value


def mean(values, batch: Batch):
    """Mean of per-row values (B,) over the batch's real rows."""
    mask = batch.mask.astype(values.dtype)
    return jnp.sum(values * mask) / jnp.maximum(mask.sum(), 1)


def cross_entropy(model: Model, blocks: Collection[str]) -> Callable:
    """The loss of plain training: softmax cross-entropy, with `blocks` in training mode."""

    def loss(weights, batch, key):
        logits, stats = model.apply(
            weights.params, weights.stats, batch.x, train=tuple(blocks), key=key, mask=batch.mask
        )
        return mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch.y), batch), stats

    return loss


def sweep(f: Callable, rows, size, federation: Federation, batch_size: int = 64):
    """Apply a function to a client's images in order, batch by batch, without training.

    Args:
      f: ``x (B, H, W, C) -> pytree of (B, ...)``.
      rows: (m,) int32, padded.
      size: () int32, how many are real; only batches with a real row run.
      federation: the images.
      batch_size: images at a time.

    Returns:
      The outputs as leaves (m, ...), zero where no batch ran.
    """
    m = rows.shape[0]
    batch_size = max(1, min(batch_size, m))
    rows = jnp.pad(rows, (0, max(-m % batch_size, batch_size - m)))
    f = jax.jit(f, inline=True)  # traced once, for its operations, its shapes and the loop
    x = jax.eval_shape(federation.inputs, rows[:batch_size])
    flops.add(flops.of(f, x) / batch_size * size.astype(float))
    example = jax.eval_shape(f, x)
    filled = jax.tree.map(lambda leaf: jnp.zeros((rows.shape[0], *leaf.shape[1:]), leaf.dtype), example)

    def step(b, filled):
        start = b * batch_size
        outputs = f(federation.inputs(jax.lax.dynamic_slice_in_dim(rows, start, batch_size)))
        return jax.tree.map(
            lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new, start, 0),
            filled,
            outputs,
        )

    if m > 0:  # otherwise no client has such rows, and the loop need not be compiled
        steps = (size + batch_size - 1) // batch_size
        filled = jax.lax.fori_loop(jnp.zeros_like(steps), steps, step, filled)
    return jax.tree.map(lambda leaf: leaf[:m], filled)


def correct(scores, labels, size):
    """How many of the first `size` rows a predictor gets right: scores (m, C), labels (m,) -> () int32."""
    real = jnp.arange(len(labels), dtype=jnp.int32) < size
    right = scores.argmax(1).astype(labels.dtype) == labels
    return (right & real).sum(dtype=jnp.int32)


def initial_weights(key, federation: Federation) -> PerGroup:
    """One freshly initialised model per architecture, the same for every method with the same key."""
    return tuple(model.init(jax.random.fold_in(key, g)) for g, model in enumerate(federation.models))
