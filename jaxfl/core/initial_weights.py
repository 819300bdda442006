"""Initial weights: the same for every method with the same key, or given ones."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfl.core import tree
from jaxfl.core.client_map import one_or_all
from jaxfl.core.drawn import drawn
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.models.model import Model, Weights


@one_or_all()
def initial_weights(key, federation: Federation) -> PerGroup:
    """Return one model per architecture, the same for every method with the same key.

    It is freshly initialised, except the blocks that are given, see `Federation.initial`.
    """
    numbered = zip(federation.numbers, federation.models, strict=True)
    fresh = tuple(drawn(model, jax.random.fold_in(key, g)) for g, model in numbered)
    if federation.initial is None:
        return fresh
    return tuple(
        Weights(*(own | jax.tree.map(jnp.asarray, some) for own, some in zip(w, given.shared, strict=True)))
        for w, given in zip(fresh, federation.initial, strict=True)
    )


@one_or_all("weights")
def each_client(key, weights: PerGroup, federation: Federation) -> PerGroup:
    """Return the initial weights of every client for a part of its model: per group leaves (n_g, ...).

    Args:
      key: that of the `initial_weights`.
      weights: per group this part of the `initial_weights`. All clients of an architecture have the same,
        except what `Federation.initial` gives for single clients; or each has its own draw, if
        `Federation.apart`.
      federation: the clients.
    """

    def of_group(g, w):
        alike = federation.of_each(w, g)
        given = federation.initial[g].own if federation.initial else None
        own = drawn_apart(key, alike, federation, g) if federation.apart else tree.by_path(given)

        def of_leaf(path, alike):
            found = own.get(tree.names(path))
            return alike if found is None or found.shape != alike.shape else jnp.asarray(found)

        return jax.tree.map_with_path(of_leaf, alike)

    return tuple(of_group(g, w) for g, w in enumerate(weights))


def drawn_apart(key, alike, federation: Federation, g: int) -> dict:
    """Return the leaves of a part of models (n_g, ...), by path, drawn for each client of a group."""
    model, leaves = federation.models[g], tree.by_path(federation.form(alike))
    paths = tuple(path for path in tree.by_path(model.form) if path in leaves)
    draw = _drawing(model, paths, tuple(leaves[path].sharding for path in paths))
    found = draw(jax.random.fold_in(key, federation.numbers[g]), federation.groups[g].id)
    return dict(zip(paths, found, strict=True))


@functools.cache
def _drawing(model: Model, paths: tuple, where: tuple) -> Callable:
    """Return ``(key, ids) -> leaves``, a program of which each device computes its own part."""

    def of_client(key, i):
        leaves = tree.by_path(model.init(jax.random.fold_in(key, i)))
        return tuple(leaves[path] for path in paths)

    return jax.jit(jax.vmap(of_client, (None, 0)), out_shardings=where)
