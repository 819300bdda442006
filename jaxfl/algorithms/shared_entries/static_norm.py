"""Static batch normalisation, without running statistics (Diao et al. 2021, "HeteroFL", section 3.3).

In training a batch is normalised by itself, and nothing is remembered. Before a network is used it gathers
what its norms see of some images: the mean over mini-batches, each normalised by itself, of their means and
of their variances. A batch counts by its rows; in the authors' code all count alike, also a short last one.
"""

import jax
import jax.numpy as jnp

from jaxfl.authoring import Client, Federation, Model, fit, server_rows, tree

BATCH = 64  # images
FAR = 2.0**64  # a start beyond all statistics, so that rounding hides neither these nor the share of a batch


def unknown(model: Model) -> dict:
    """Statistics that nothing reads, in their form: for training, where the batch's own count."""
    return jax.tree.map(jnp.zeros_like, model.form.stats)


def rows_of_all(group: Client):
    """The training rows of all clients of an architecture as one list (n m,), and how many are real, ().

    Newcomers' are not. They are sorted: the order of clients does not matter.
    """
    size = jnp.where(group.newcomer, 0, group.size)
    real = jnp.arange(group.rows.shape[1], dtype=jnp.int32)[None] < size[:, None]
    rows = jnp.where(real, group.rows, group.rows.max())
    return jnp.sort(rows, axis=None), size.sum(dtype=jnp.int32)


def gathered(model: Model, params, rows, size, federation: Federation, key) -> dict:
    """The statistics of a network's norms over some images.

    Args:
      model: the network.
      params: its parameters.
      rows: (m,) int32, of the images.
      size: () int32, how many are real; without any, means are 0 and variances 1.
      federation: the images.
      key: for the order of mini-batches, and for dropout within blocks that normalise.

    Returns:
      In the form of `Weights.stats`.
    """
    nothing, dtype = unknown(model), federation.mean.dtype
    norms = tuple(block for block, stats in nothing.items() if jax.tree.leaves(stats))
    if not norms:
        return nothing

    def of_batch(batch, key):
        def moved(start):
            stats = jax.tree.map(lambda leaf: leaf + start, nothing)
            return model.apply(params, stats, batch.x, train=norms, key=key, mask=batch.mask)[1]

        # A norm only tells running statistics, which a batch with statistics b moves by a share s that is its
        # own: from 0 to s b, from FAR to (1 - s) FAR + s b. The difference gives s, and with it b.
        both = jax.vmap(moved)(jnp.array([0, FAR], dtype))
        return jax.tree.map(lambda leaf: leaf[0] / (1 - (leaf[1] - leaf[0]) / FAR), both)

    def update(carry, batch, key):
        total, count = carry
        n = batch.mask.sum().astype(dtype)
        total = jax.tree.map(lambda leaf, found: leaf + n * found, total, of_batch(batch, key))
        return (total, count + n), jnp.zeros((), dtype)

    images = server_rows(rows, size, federation)
    carry = nothing, jnp.zeros((), dtype)
    total, count = fit(
        update, carry, key, images, epochs=1, batch_size=BATCH, skip_single_row=True, phase=None
    ).carry

    def mean(path, leaf):
        without = 1.0 if tree.names(path)[-1] == "var" else 0.0
        return jnp.where(count > 0, leaf / jnp.maximum(count, 1), without)

    return jax.tree.map_with_path(mean, total)
