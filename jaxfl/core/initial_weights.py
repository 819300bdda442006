"""Initial weights: the same for every method with the same key, or given ones."""

import jax
import jax.numpy as jnp

from jaxfl.core import tree
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.models.model import Model, Weights

_drawn = jax.jit(Model.init, static_argnums=0)  # one program for all leaves, not one for each


def initial_weights(key, federation: Federation) -> PerGroup:
    """Return one model per architecture, the same for every method with the same key.

    It is freshly initialised, except the blocks that are given, see `Federation.initial`.
    """
    fresh = tuple(_drawn(model, jax.random.fold_in(key, g)) for g, model in enumerate(federation.models))
    if federation.initial is None:
        return fresh
    return tuple(
        Weights(*(own | jax.tree.map(jnp.asarray, some) for own, some in zip(w, given.shared, strict=True)))
        for w, given in zip(fresh, federation.initial, strict=True)
    )


def each_client(weights: PerGroup, federation: Federation) -> PerGroup:
    """Return the initial weights of every client for a part of its model: per group leaves (n_g, ...).

    Args:
      weights: per group this part of the `initial_weights`. All clients of an architecture have the same,
        except what `Federation.initial` gives for single clients.
      federation: the clients.
    """

    def of_group(g, w):
        given = federation.initial[g].own if federation.initial else None
        own = tree.by_path(given)

        def of_leaf(path, alike):
            found = own.get(tree.names(path))
            return alike if found is None or found.shape != alike.shape else jnp.asarray(found)

        return jax.tree.map_with_path(of_leaf, federation.of_each(w, g))

    return tuple(of_group(g, w) for g, w in enumerate(weights))
