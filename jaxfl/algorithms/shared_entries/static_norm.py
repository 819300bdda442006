"""Static batch normalisation, without running statistics (Diao et al. 2021, "HeteroFL").

In training each batch is normalised by its own statistics, and none are stored. Before a network is used, its
norms gather statistics over some images: the mean of the mini-batches' means and of their variances, each
mini-batch normalised by its own. Mini-batches are weighted by their rows; in the authors' code they are
weighted uniformly, even a short last one.
"""

import jax
import jax.numpy as jnp

from jaxfl import fl

BATCH = 64  # images
FAR = 2.0**64  # a start beyond all statistics: rounding hides neither them nor a batch's share


def unknown(model: fl.Model) -> dict:
    """Return placeholder statistics for training, where norms use those of the batch."""
    return jax.tree.map(jnp.zeros_like, model.form.stats)


def rows_of_all(group: fl.Client):
    """Return the training rows of all clients of an architecture (n m,), and the number of real ones ().

    Newcomers' rows do not count. Rows are sorted, so that the order of clients does not matter.
    """
    size = jnp.where(group.newcomer, 0, group.size)
    real = jnp.arange(group.rows.shape[1], dtype=jnp.int32)[None] < size[:, None]
    rows = jnp.where(real, group.rows, group.rows.max())
    return jnp.sort(rows, axis=None), size.sum(dtype=jnp.int32)


def gathered(model: fl.Model, params, rows, size, federation: fl.Federation, key) -> dict:
    """Gather the statistics of a network's norms, as in `Weights.stats`, over the first `size` () rows (m,).

    Without any row, means are 0 and variances 1. The key is for the order of mini-batches, and for dropout
    within normalising blocks.
    """
    nothing, dtype = unknown(model), federation.mean.dtype
    norms = tuple(block for block, stats in nothing.items() if jax.tree.leaves(stats))
    if not norms:
        return nothing

    def of_batch(batch, key):
        def moved(start):
            stats = jax.tree.map(lambda leaf: leaf + start, nothing)
            return model.apply(params, stats, batch.x, train=norms, key=key, mask=batch.mask)[1]

        # A norm returns only running statistics. A batch with statistics b moves these by the norm's share s:
        # from 0 to s b, from FAR to (1 - s) FAR + s b. The difference gives s, and with it b.
        both = jax.vmap(moved)(jnp.array([0, FAR], dtype))
        return jax.tree.map(lambda leaf: leaf[0] / (1 - (leaf[1] - leaf[0]) / FAR), both)

    def update(carry, batch, key):
        total, count = carry
        n = batch.mask.sum().astype(dtype)
        total = jax.tree.map(lambda leaf, found: leaf + n * found, total, of_batch(batch, key))
        return (total, count + n), jnp.zeros((), dtype)

    images = fl.server_rows(rows, size, federation)
    carry = nothing, jnp.zeros((), dtype)
    total, count = fl.fit(update, carry, key, images, epochs=1, batch_size=BATCH, phase=None).carry

    def mean(path, leaf):
        without = 1.0 if fl.tree.names(path)[-1] == "var" else 0.0
        return jnp.where(count > 0, leaf / jnp.maximum(count, 1), without)

    return jax.tree.map_with_path(mean, total)
