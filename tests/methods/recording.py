"""Recorded draws of jaxfl's clients, and jaxfl's states in the form of the references."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from conftest import PUBLIC, SIZES
from scipy.linalg import block_diag

from jaxfl.core.batches import batch_order
from jaxfl.registry import METHODS

# ---- what a client draws from its key in a round


def phases(**epochs: str) -> Callable:
    """Return orders for local phases 0, 1, ..., each given as name="the option with its epochs"."""

    def draw(key, client, models, options):
        return {
            name: orders(jax.random.fold_in(key, number), client.size, epochs_of(options, option))
            for number, (name, option) in enumerate(epochs.items())
        }

    return draw


def epochs_of(options, option: str) -> int:
    """Return an option that is a number of epochs; None stands for `epochs`."""
    epochs = getattr(options, option)
    return options.epochs if epochs is None else epochs


def orders(key, size: int, epochs: int):
    """Return the order of a list's rows in each epoch of a local phase, (epochs, size)."""
    return np.asarray(padded_orders(key, np.int32(size), epochs))[:, :size]


@functools.partial(jax.jit, static_argnums=2)
def padded_orders(key, size, epochs: int):
    """Return the same for lists of any size as one program; padding comes after the rows."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(epochs, dtype=jnp.int32))
    return jax.vmap(lambda epoch: batch_order(epoch, size, max(*SIZES, PUBLIC)))(keys)


# ---- jaxfl's state after round t, in the form of the references' states


def sharing(state, federation, t):
    """Return shared leaves by group and kept leaves by client."""
    return {"shared": by_group(state.shared), "personal": by_client(state.kept, federation)}


def global_and_personal(state, federation, t):
    """Return global models by group and personal ones by client."""
    return {"shared": by_group(state.shared), "personal": by_client(state.personal, federation)}


def own_models(state, federation, t):
    """Return the clients' own models."""
    return {"own": by_client(state.weights, federation)}


@functools.cache
def matrices(name):
    """Return ``state -> the matrices over pairs of clients that users see``."""
    return jax.jit(METHODS[name].build(METHODS[name].config()).matrices)


def of_pairs(blocks):
    """Turn a matrix over pairs of clients per group into one over all, 0 between groups."""
    return block_diag(*blocks)


def by_group(trees):
    """Turn a tree per group into {group: tree}."""
    return dict(enumerate(trees))


def by_client(trees, federation):
    """Turn a tree per group, with leaves (n_g, ...), into {client: tree}."""
    return {
        int(i): at(tree, row)
        for group, tree in zip(federation.groups, trees, strict=True)
        for row, i in enumerate(np.asarray(group.id))
    }


def at(tree, position):
    """Take one entry of every leaf's first axis."""
    return jax.tree.map(lambda leaf: leaf[position], tree)
