"""Pruning in Hermes: masks over the entries of a network, which only shrink.

A mask is a tree of bools in the form of the weights, True where an entry is held. Pruning removes a share of
what is left of every layer except the classifier, but never the last of it: single weights with the least
|w|, or whole channels whose kernels have the least L1 norm (Li et al. 2017, arXiv:1608.08710).

A channel takes with it all that no signal passes any more: its kernel, bias and norm, and the inputs that
other layers have only from it. For that it need not be known how networks join their channels (in a row, by
sums, side by side, flattened): with positive weights and without biases an entry has a gradient of exactly 0
if and only if nothing passes it (Tanaka et al. 2020, "SynFlow", arXiv:2006.05467).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxfl import fl

Mask = fl.Weights  # of bools
FAINT = 1e-6  # size of the signal, far from where an activation saturates


def whole(weights: fl.Weights) -> Mask:
    """Return the full mask."""
    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, bool), weights)


def only(held: Mask, weights: fl.Weights) -> fl.Weights:
    """Return the held weights, 0 elsewhere."""
    return jax.tree.map(lambda held, w: jnp.where(held, w, 0), held, weights)


def scalars(mask: Any) -> jax.Array:
    """Return the number of held entries of a mask or of a part of it, () int32."""
    return fl.tree.total([jnp.int32(0), *(held.sum(dtype=jnp.int32) for held in jax.tree.leaves(mask))])


def kernels(model: fl.Model, weights: Any, granularity: str) -> dict[str, Any]:
    """Return the leaves of weights or a mask that are pruned, by the names of their paths.

    A depthwise convolution (three axes) has the channels of the layer before it, and none of its own.

    Raises:
      JaxflError: if channels are to be pruned and a layer's weights are not a kernel.
    """
    named = fl.tree.by_path(weights.params)
    for path, leaf in named.items():
        if granularity == "channel" and leaf.ndim in (2, 4) and path[-1] != "kernel":
            raise fl.JaxflError(
                f"Hermes prunes channels, the last axis of a kernel, but {'/'.join(path)} of {model.name} is "
                "not a kernel; take --granularity weight."
            )
    return {
        "/".join(path): leaf
        for path, leaf in named.items()
        if path[0] not in model.head.names
        and leaf.ndim > 1
        and path[-1] not in ("bias", "position")  # an attention layer's biases have two axes
        and not (granularity == "channel" and leaf.ndim == 3)
    }


def bits(model: fl.Model, weights: fl.Weights, granularity: str) -> int:
    """Return the bits of a mask: one per channel, or weight, that can be pruned."""
    found = kernels(model, weights, granularity).values()
    return sum(leaf.shape[-1] if granularity == "channel" else leaf.size for leaf in found)


def pruned(model: fl.Model, held: Mask, weights: fl.Weights, share, granularity: str) -> Mask:
    """Return the mask after a client has pruned, by the size of its weights.

    Of what is left in each layer a share goes, () in [0, 1], rounded to a whole number. 0 changes nothing.
    """
    chosen = kernels(model, weights, granularity)

    def of_leaf(path, held):
        name = "/".join(fl.tree.names(path))
        if name not in chosen:
            return held
        if granularity == "weight":
            return largest(held, jnp.abs(chosen[name]), share)
        inputs = range(held.ndim - 1)
        stay = largest(held.any(inputs), jnp.abs(chosen[name]).sum(inputs), share)
        return held & jnp.broadcast_to(stay, held.shape)

    less = held._replace(params=jax.tree.map_with_path(of_leaf, held.params))
    return less if granularity == "weight" else connected(model, held, less)


def largest(held, size, share):
    """Return the mask of the held entries that stay when a share () of them goes, of the least size first."""
    order = jnp.argsort(jnp.where(held, size, jnp.inf).reshape(-1))
    left = held.sum(dtype=jnp.int32)
    gone = jnp.round(share * left.astype(share.dtype)).astype(jnp.int32)
    stays = jnp.arange(held.size, dtype=jnp.int32) >= jnp.minimum(gone, left - 1)
    return held & jnp.zeros(held.size, bool).at[order].set(stays).reshape(held.shape)


def connected(model: fl.Model, before: Mask, after: Mask) -> Mask:
    """Return mask `after` without the entries that a signal passes only in mask `before`."""
    both = jax.tree.map(lambda *masks: jnp.stack(masks), before.params, after.params)
    passed = jax.vmap(lambda params: signal(model, after._replace(params=params)))(both)
    cut = jax.tree.map(lambda passed: passed[0] & ~passed[1], passed)
    params = jax.tree.map(lambda held, cut: held & ~cut, after.params, cut)
    alive = {}  # the channels of each layer and norm that have anything besides a bias
    for path, held in jax.tree.leaves_with_path(params):
        if fl.tree.names(path)[-1] != "bias":
            found = held.any(range(held.ndim - 1))
            alive[layer(path, held)] = alive.get(layer(path, held), False) | found

    def with_its_layer(path, held):
        return held & alive.get(layer(path, held), True) if held.ndim == 1 else held

    return fl.Weights(*(jax.tree.map_with_path(with_its_layer, part) for part in (params, after.stats)))


def layer(path, leaf) -> tuple:
    """Return a key that biases, scales and statistics of the same layer and channel count share."""
    return fl.tree.names(path)[:-1], leaf.shape[-1:]


def signal(model: fl.Model, held: Mask) -> dict:
    """Return the mask of held parameters that pass a signal from image to score; biases never do.

    All places (h, w) of a convolution's kernel pass it if one of them does: which ones do depends on padding
    and on ties in pooling, not on channels.
    """
    dtype = jnp.result_type(float)

    def positive(path, held):
        if fl.tree.names(path)[-1] == "bias":
            return jnp.zeros(held.shape, dtype)
        return held.astype(dtype) / math.prod(held.shape[:-1])  # the mean of a layer's inputs

    def variance(path, held):
        return jnp.full(held.shape, fl.tree.names(path)[-1] == "var", dtype)

    params = jax.tree.map_with_path(positive, held.params)
    stats = jax.tree.map_with_path(variance, held.stats)
    x = jnp.full((1, *model.shape), FAINT, dtype)
    gradient = jax.grad(lambda params: model.apply(params, stats, x, train=False)[0].sum())(params)

    def passing(held, slope):
        places = tuple(range(held.ndim - 2))
        return held & (held & (slope != 0)).any(places, keepdims=True)

    return jax.tree.map(passing, held.params, gradient)
