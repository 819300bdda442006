"""MNFL's matrix: who teaches whom, and how the server learns it.

C (N, N) is indexed by client ids; row n holds the weights of client n's teachers, C[n, m] that of client m.
After a round, for clients n and m of the cohort, where n has |D_n| of all clients' |D| training rows,

    C[n, m] <- C[n, m] - eta_3 { lam (|D_n| / |D|) d_nm + 2 rho (C[n, m] - 1/N) }

where d_nm is the derivative of client n's distance from its teacher (Beikmohammadi et al., eq. 7) with
respect to the weight of m in it: C[n, m] if all take part, else C[n, m] divided by the sum of the row over
the cohort. Then the row is projected: its entries become non-negative and keep their sum, which is 1 if all
clients take part. With ``row_norm=clip`` they are clipped at 0 and do not keep their sum. Absent clients'
rows and columns do not change.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxfl.config.options import options, within
from jaxfl.core.training import Training
from jaxfl.data.federation import NOBODY, Federation
from jaxfl.mechanisms.mixing import pairs, project_on_simplex, put_pairs, row_stochastic


@options
class LearnedMatrix(Training):
    """Options of methods that learn who teaches whom."""

    matrix_lr: float | None = within("[0, inf)", None)
    """eta_3, learning rate of the matrix; by default that of the clients (`lr`). 0 leaves it uniform."""
    lam: float = within("[0, inf)", 1.0)
    """lambda, weight of the distance between a client and its teacher."""
    rho: float = within("[0, inf)", 0.7)
    """Pull of the matrix towards equal weights; without it every client ends as its own teacher."""
    row_norm: Literal["simplex", "softmax", "clip"] = "simplex"
    """How a row is normalised after its step: projected on the simplex, softmax(5 row), or clipped at 0."""


def initial(clients: int, participants) -> jax.Array:
    """Return equal weights (N, N) for N clients; those of the participants, not newcomers, sum to 1."""
    return jnp.full((clients, clients), 1 / jnp.maximum(participants, 1.0))


def teachers(matrix, i):
    """Return the weights with which clients i (k,) teach each other: (k, k), rows sum to 1."""
    return row_stochastic(pairs(matrix, i, i), i, i)


def learn(matrix, i, share, gradient, hyper: LearnedMatrix, clients):
    """Take the server's step on the matrix.

    Args:
      matrix: C, (N, N).
      i: (k,) ids of the cohort; in an empty place an id that no client has.
      share: (k,) float, |D_n| / |D|.
      gradient: (k, k), d_nm.
      hyper: learning rate, weights and kind of projection.
      clients: () float, number of clients, N.

    Returns:
      C after the step.
    """
    weights, present = pairs(matrix, i, i), i != NOBODY
    eta_3 = hyper.lr if hyper.matrix_lr is None else hyper.matrix_lr
    new = weights - eta_3 * (hyper.lam * share[:, None] * gradient + 2 * hyper.rho * (weights - 1 / clients))
    mass = weights.sum(1)
    if hyper.row_norm == "simplex":
        new = project_on_simplex(new, mass, present)
    elif hyper.row_norm == "softmax":
        new = mass[:, None] * jax.nn.softmax(5 * new, axis=1, where=present[None])
    else:
        new = jnp.maximum(new, 0)
    return put_pairs(matrix, i, i, new)


def summary(matrix, federation: Federation) -> dict:
    """Return how far the weights are from equal: two entries of a row, averaged over all but newcomers."""
    apart = jnp.concatenate(federation.newcomers)  # (N,), by their ids
    others = jnp.where(jnp.eye(len(matrix), dtype=bool) | apart[None], 0, matrix)
    counts = federation.participants.sum()

    def mean(entries):
        return jnp.where(apart, 0, entries).sum() / jnp.maximum(counts, 1)

    return {"of oneself": mean(jnp.diagonal(matrix)), "of the best other": mean(others.max(1))}


def matrices(state) -> dict:
    """Return who teaches whom, from a state with a `matrix`."""
    return {"teachers": state.matrix}
