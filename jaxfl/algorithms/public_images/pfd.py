"""Sim-pFD and TopK-pFD: clients learn from those with similar predictions on public images.

Beikmohammadi et al. (MNFL), section 5.1, and KT-pFL's code (Zhang et al. 2021, arXiv:2111.02862). The rounds
are those of `jaxfl.mechanisms.exchange`. The teachers' weights are not learned but computed from the round's
flattened soft predictions s_n:

    cos_nm = <s_n, s_m> / |s_n| |s_m|
    Sim-pFD     C[n, m] = (cos_nm - min_k cos_nk) / sum_m (cos_nm - min_k cos_nk)
    TopK-pFD    C[n, m] = 1/K for the K clients most like n, itself among them

The minimum is subtracted as in KT-pFL's code, because predictions are never negative and so plain cosines are
nearly equal (``weights="plain"``). K = 5 is the paper's; the code takes the clients above the median.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxfl.authoring import Algorithm, Method, options, within
from jaxfl.data.federation import NOBODY
from jaxfl.mechanisms.exchange import Exchange, exchanging
from jaxfl.mechanisms.learned_matrix import BIBTEX
from jaxfl.mechanisms.mixing import EPS, products, row_stochastic


@options
class SimPFD(Exchange):
    """Options of Sim-pFD."""

    weights: Literal["min-max", "plain"] = "min-max"
    """Whether a row's smallest cosine is subtracted before the row is normalised."""


@options
class TopKPFD(Exchange):
    """Options of TopK-pFD."""

    neighbours: int = within("[1, inf)", 5)
    """K, number of clients that teach one; all that take part if there are fewer."""


def cosines(s, present):
    """Return cos_nm (k, k) of predictions s (k, R, outputs), -1 for absent clients m."""
    length = jnp.sqrt(jnp.square(s).sum((1, 2)))
    cosine = products(s, s) / jnp.maximum(length[:, None] * length[None], EPS)
    return jnp.where(present[None], cosine, -1)


def build_sim(config: SimPFD) -> Algorithm:
    """Exchange predictions with weights by cosine."""

    def weigh(matrix, i, s, hyper):
        present = i != NOBODY
        cosine = cosines(s, present)
        if config.weights == "min-max":
            cosine = cosine - jnp.min(cosine, 1, keepdims=True, where=present[None], initial=1)
        return row_stochastic(jnp.where(present[None], cosine, 0), i, i)

    return exchanging(config, weigh=weigh)


def build_topk(config: TopKPFD) -> Algorithm:
    """Exchange predictions with equal weights for the nearest clients."""

    def weigh(matrix, i, s, hyper):
        present = i != NOBODY
        # The client itself comes first, even if rounding makes its own cosine smaller than another's.
        cosine = jnp.where(jnp.eye(len(i), dtype=bool), 2, cosines(s, present))
        _, nearest = jax.lax.top_k(cosine, min(config.neighbours, len(i)))
        chosen = jax.nn.one_hot(nearest, len(i), dtype=s.dtype).sum(1)
        return row_stochastic(jnp.where(present[None], chosen, 0), i, i)

    return exchanging(config, weigh=weigh)


sim_pfd = Method(
    "sim-pfd",
    build_sim,
    SimPFD,
    "clients of any architecture teach each other on public images, by how alike their predictions are",
    "Beikmohammadi et al.; KT-pFL, Zhang et al. 2021, arXiv:2111.02862",
    BIBTEX,
    needs=("public",),
)

topk_pfd = Method(
    "topk-pfd",
    build_topk,
    TopKPFD,
    "clients of any architecture learn from the K whose predictions on public images are most alike",
    "Beikmohammadi et al.; KT-pFL, Zhang et al. 2021, arXiv:2111.02862",
    BIBTEX,
    needs=("public",),
)
