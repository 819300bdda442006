"""FedCMD's layers: models assembled around a personal layer, and the similarity of personal layers.

The personal blocks are a traced mask, (blocks,) bool, or one such row per client. Blocks before the first
personal one are the global model's, personal blocks the client's own, and the others are mixed (Chen et al.
2024, eqs. 7-8).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfl import fl


def assemble(
    model: fl.Model, shared: fl.Weights, own: fl.Weights, pool: fl.Weights, personal, weights
) -> fl.Weights:
    """Assemble the models (k, ...) that clients start from.

    Blocks that are `personal` (blocks,) are the clients' `own` (k, ...), those before them are those of the
    global model `shared`, and others of the `pool` (m, ...), mixed by `weights` (k, m), whose rows sum to 1.
    """
    first = jnp.where(personal.any(), personal.argmax(), len(model.names))

    def of_block(b, before, after):
        repeated = fl.tree.repeat(before, len(weights))
        return fl.tree.where(b > first, fl.tree.weighted_sum(weights, after), repeated)

    return with_personal(model, _by_block(model, of_block, shared, pool), own, personal)


def with_personal(model: fl.Model, w: fl.Weights, own: fl.Weights, personal) -> fl.Weights:
    """Return a model, or several, with the personal blocks (blocks,) of `own`, which has the same shapes."""
    return _by_block(model, lambda b, others, mine: fl.tree.where(personal[b], mine, others), w, own)


def _by_block(model: fl.Model, f: Callable, one: fl.Weights, other: fl.Weights) -> fl.Weights:
    """Return ``f(number of the block, its leaves of one, its leaves of other)`` for every block."""

    def of(one, other):
        return {name: f(b, one[name], other[name]) for b, name in enumerate(model.names)}

    return fl.Weights(of(one.params, other.params), of(one.stats, other.stats))


def each_by_its_layers(f: Callable, personal, *own):
    """Return ``f(personal (blocks,), *own (k, ...)) -> (k, ...)``; `personal` may be (k, blocks)."""
    if personal.ndim == 1:
        return f(personal, *own)

    def of_one(personal, *own):
        alone = jax.tree.map(lambda leaf: leaf[None], own)
        return jax.tree.map(lambda leaf: leaf[0], f(personal, *alone))

    return jax.vmap(of_one)(personal, *own)


def mixing_weights(phi, i, j, tail: str):
    """Return the weights of eq. 7, Phi_ij / sum_j Phi_ij with Phi_ii = 1, or their softmax over j.

    Phi (k, m) is of the clients in places i (k,) and j (m,) of the group. Places `fl.NOBODY` have weight 0.
    """
    same = i[:, None] == j[None]
    real = jnp.broadcast_to(j != fl.NOBODY, same.shape)
    phi = jnp.where(real, jnp.where(same, 1, phi), 0)
    return (
        jax.nn.softmax(phi, axis=1, where=real) if tail == "softmax" else fl.mixing.row_stochastic(phi, i, j)
    )


def cosine(model: fl.Model, one: fl.Weights, other: fl.Weights, personal):
    """Return the cosine of the flattened personal layers, eq. 8: weights (k, ...), (m, ...) -> (k, m)."""

    def total(of_block):
        return _over_personal(model, one, personal, of_block)

    def squares(w):
        def of_block(name):
            return fl.tree.total(
                (leaf.reshape(len(leaf), -1) ** 2).sum(1) for leaf in jax.tree.leaves(w.params[name])
            )

        return total(of_block)

    dots = total(lambda name: fl.mixing.products(one.params[name], other.params[name]))
    return dots / jnp.maximum(jnp.sqrt(squares(one)[:, None] * squares(other)[None]), fl.mixing.EPS)


def cosine_of_outputs(model: fl.Model, one: fl.Weights, other: fl.Weights, personal):
    """Return the mean over output units of the cosine of their weights: (k, ...), (m, ...) -> (k, m)."""

    def of_block(name):
        return fl.mixing.cosine_of_units(one.params[name], other.params[name])

    layers = jnp.maximum(personal.sum(), 1)
    total = _over_personal(model, one, personal, of_block)
    return total / layers.astype(total.dtype)


def _over_personal(model: fl.Model, weights: fl.Weights, personal, of_block: Callable):
    """Sum a function of the block's name over the personal blocks.

    All blocks are computed, which costs little. If a branch skipped the others, XLA would have devices
    exchange their parts inside it, where two CPU devices may wait for each other for ever.

    Blocks without parameters, such as resizing, have nothing to compare.
    """

    def counted(b, name):
        value = of_block(name)
        return jnp.where(personal[b], value, jnp.zeros_like(value))

    return fl.tree.total(counted(b, name) for b, name in enumerate(model.names) if weights.params[name])
