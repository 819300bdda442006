"""Sim-pFD and TopK-pFD: clients learn from those who say alike things of public images.

Beikmohammadi et al. (MNFL), section 5.1, and KT-pFL's code (Zhang et al. 2021, arXiv:2111.02862). The rounds
are those of `jaxfl.mechanisms.exchange`; the teachers' weights are computed from the round's soft predictions
s_n, flattened, instead of learned:

    cos_nm = <s_n, s_m> / |s_n| |s_m|
    Sim-pFD     C[n, m] = (cos_nm - min_k cos_nk) / sum_m (cos_nm - min_k cos_nk)
    TopK-pFD    C[n, m] = 1/K for the K clients most like n, itself among them

The minimum is subtracted as in KT-pFL's code: predictions are never negative, so that plain cosines are
nearly equal (`weights="plain"`). K = 5 is the paper's; its code takes those above the median.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxfl.authoring import Algorithm, Method, options, within
from jaxfl.data.federation import NOBODY
from jaxfl.mechanisms.exchange import Exchange, exchanging
from jaxfl.mechanisms.learned_matrix import BIBTEX
from jaxfl.mechanisms.mixing import products, row_stochastic


@options
class SimPFD(Exchange):
    """Options of Sim-pFD."""

    weights: Literal["min-max", "plain"] = "min-max"
    """Whether a client's least cosine is taken off its row before that is normalised."""


@options
class TopKPFD(Exchange):
    """Options of TopK-pFD."""

    neighbours: int = within("[1, inf)", 5)
    """K, how many clients teach one; all that take part where there are fewer."""


def cosines(s, present):
    """cos_nm (k, k) of predictions s (k, R, outputs), -1 for those who are not present."""
    length = jnp.sqrt(jnp.square(s).sum((1, 2)))
    cosine = products(s, s) / jnp.maximum(length[:, None] * length[None], 1e-8)
    return jnp.where(present[None], cosine, -1)


def build_sim(config: SimPFD) -> Algorithm:
    """Weights by cosine."""

    def weigh(matrix, i, s, hyper):
        present = i != NOBODY
        cosine = cosines(s, present)
        if config.weights == "min-max":
            cosine = cosine - jnp.min(cosine, 1, keepdims=True, where=present[None], initial=1)
        return row_stochastic(jnp.where(present[None], cosine, 0), i, i)

    return exchanging(config, weigh=weigh)


def build_topk(config: TopKPFD) -> Algorithm:
    """Equal weights of the nearest."""

    def weigh(matrix, i, s, hyper):
        present = i != NOBODY
        # Oneself first, whatever rounding says of the cosine with oneself.
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
    needs=lambda config: {"public"},
)

topk_pfd = Method(
    "topk-pfd",
    build_topk,
    TopKPFD,
    "clients of any architecture learn from the K whose predictions on public images are most alike",
    "Beikmohammadi et al.; KT-pFL, Zhang et al. 2021, arXiv:2111.02862",
    BIBTEX,
    needs=lambda config: {"public"},
)
