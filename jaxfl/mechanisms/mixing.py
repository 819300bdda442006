"""Row mixing: a separate aggregate for each client instead of one mean for all.

A matrix over pairs of clients gives client n the mixture ``sum_m C[n, m] x_m`` of what the clients m hold:
parameters, statistics or predictions. Matrices are indexed by client ids across all groups, or by the places
of one architecture's clients. What clients hold is in the order of a cohort's places, group after group.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.core import tree
from jaxfl.core.client_map import everyone, one_or_all, per_group
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.data.federation import NOBODY, Client, Federation, PerGroup

EPS = 1e-8  # smallest norm that a cosine divides by


def among(federation: Federation, cohort: Cohort) -> Cohort:
    """Return the clients to mix: the cohort, or all but newcomers if clients are scored in parts or join."""
    return everyone(federation, cohort) if cohort.among_all else cohort


@one_or_all()
def ids(federation: Federation, cohort: Cohort) -> PerGroup:
    """Return a cohort's client ids per group, (k_g,) int32; in empty places an id that no client has."""
    return per_group(ids_of, federation.groups, cohort.groups)


def ids_of(group: Client, slots: Slots) -> jax.Array:
    """Return the ids of some clients of a group, (k,) int32; in empty places an id that no client has."""
    return group.id.at[slots.index].get(mode="fill", fill_value=NOBODY)


def places(slots: Slots) -> jax.Array:
    """Return the places of some clients in their group, (k,) int32, which index its matrices (n, n).

    In empty places it is a number that no client has.
    """
    return jnp.where(slots.mask, slots.index, NOBODY)


def pairs(matrix, rows, columns):
    """Return a matrix's (N, N) entries (k, m) for pairs of ids (k,) and (m,); 0 where a place is empty."""
    return matrix.at[rows[:, None], columns[None]].get(mode="fill", fill_value=0)


def put_pairs(matrix, rows, columns, new):
    """Return a matrix (N, N) with new entries (k, m) for pairs of ids; empty places change nothing."""
    return matrix.at[rows[:, None], columns[None]].set(new, mode="drop")


def row_stochastic(weights, rows, columns):
    """Divide each row by its sum: (k, m).

    A row of zeros gives weight 1 to the client itself or, if that is not among the columns, equal weights to
    all columns that are not empty.

    Args:
      weights: (k, m).
      rows: (k,) ids; the row of an empty place has no meaning.
      columns: (m,) ids, in any order, `NOBODY` where a place is empty.
    """
    oneself = rows[:, None] == columns[None]
    alone = jnp.where(oneself.any(1, keepdims=True), oneself, columns != NOBODY).astype(weights.dtype)
    weights = jnp.where(weights.any(1, keepdims=True), weights, alone)
    total = weights.sum(1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def uniform(present):
    """Return equal weights of all present clients (k,), the same in every row: (k, k)."""
    share = present.astype(float) / jnp.maximum(present.sum(), 1).astype(float)
    return jnp.broadcast_to(share, (len(present), len(present)))


def split(joined: jax.Array, cohort: Cohort) -> PerGroup:
    """Undo a concatenation of the groups: (K, ...) -> per group (k_g, ...)."""
    ends = np.cumsum([len(slots.mask) for slots in cohort.groups])
    return tuple(jnp.split(joined, ends[:-1].tolist()))


def products(one: Any, other: Any):
    """Return inner products of all pairs of clients, over all leaves: (k, ...), (m, ...) -> (k, m)."""

    def of_leaf(a, b):
        return jnp.matmul(a.reshape(len(a), -1), b.reshape(len(b), -1).T, precision="highest")

    return sum(jax.tree.leaves(jax.tree.map(of_leaf, one, other)))


def squared_distances(one: Any, other: Any):
    """Return squared Euclidean distances of client pairs over all leaves: (k, ...), (m, ...) -> (k, m)."""
    # The common part would cancel, and the digits of small distances with it. The larger stack is never
    # copied: its inner products with the centre are subtracted.
    clients = len(jax.tree.leaves(other)[0])
    centre = tree.weighted_sum(jnp.full((1, clients), 1 / clients), other)
    one = jax.tree.map(jnp.subtract, one, centre)
    squares = jax.vmap(functools.partial(optax.tree.norm, squared=True))
    inner = products(one, other) - products(one, centre)
    lengths = squares(one)[:, None] + squares(jax.tree.map(jnp.subtract, other, centre))[None]
    return jnp.maximum(lengths - 2 * inner, 0)


def cosine_of_units(one: Any, other: Any):
    """Return the cosine of each output unit's weights, averaged over units, for all pairs of clients.

    Args:
      one: parameters of a layer, (k, ...). Its kernels are (k, ..., units); several are averaged. Biases
        are ignored.
      other: the same layer's parameters of other clients, (m, ...).

    Returns:
      (k, m). A unit whose weights are all 0 has cosine 0 with any other.
    """

    def directions(kernel):
        """Return kernels (k, ..., units) as vectors of length 1."""
        flat = kernel.reshape(len(kernel), -1, kernel.shape[-1])
        return flat / jnp.maximum(jnp.linalg.norm(flat, axis=1, keepdims=True), EPS)

    kernels = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    cosines = [products(directions(a), directions(b)) / a.shape[-1] for a, b in kernels if a.ndim > 2]
    return tree.total(cosines) / len(cosines)


def project_on_simplex(rows, mass, present):
    """Project the present entries (k,) of every row (k, k) on {c >= 0, sum c = mass} (Euclidean).

    Args:
      rows: rows to project; absent entries become 0.
      mass: (k,), each row's sum. A row of mass 0 becomes 0.
      present: (k,) bool, which entries count.
    """

    def of_row(row, mass):
        row = jnp.where(present, row, -1e6)  # so far below that the projection is 0 there
        with jax.numpy_dtype_promotion("standard"):  # Optax divides floats by integers
            projected = optax.projections.projection_simplex(row, jnp.where(mass > 0, mass, 1))
        return jnp.where(present & (mass > 0), projected, 0)

    return jax.vmap(of_row)(rows, mass)
