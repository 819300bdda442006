"""Sim-pFD: clients of any architecture teach each other on public images, by how alike their predictions are.

Beikmohammadi et al. (MNFL), section 5.1, and KT-pFL's code (Zhang et al. 2021, arXiv:2111.02862). The rounds
are those of `jaxfl.mechanisms.exchange`. The teachers' weights are not learned but computed from the round's
flattened soft predictions s_n:

    cos_nm  = <s_n, s_m> / |s_n| |s_m|
    C[n, m] = (cos_nm - min_k cos_nk) / sum_m (cos_nm - min_k cos_nk)

The minimum is subtracted as in KT-pFL's code, because probabilities are never negative and so plain cosines
are nearly equal (``weights="plain"``). Those of targets may be negative, and count as 0 then.
"""

from typing import Literal

import jax.numpy as jnp

from jaxfl import fl


@fl.options
class SimPFD(fl.Exchange):
    """Options of Sim-pFD."""

    weights: Literal["min-max", "plain"] = "min-max"
    """Whether a row's smallest cosine is subtracted before the row is normalised."""


def cosines(s, present):
    """Return cos_nm (k, k) of predictions s (k, R, outputs), -1 for absent clients m."""
    length = jnp.sqrt(jnp.square(s).sum(tuple(range(1, s.ndim))))
    cosine = fl.mixing.products(s, s) / jnp.maximum(length[:, None] * length[None], fl.mixing.EPS)
    return jnp.where(present[None], cosine, -1)


def build(config: SimPFD) -> fl.Algorithm:
    """Exchange predictions with weights by cosine."""

    def weigh(matrix, i, s, hyper):
        present = i != fl.NOBODY
        cosine = cosines(s, present)
        if config.weights == "min-max":
            cosine = cosine - jnp.min(cosine, 1, keepdims=True, where=present[None], initial=1)
        return fl.mixing.row_stochastic(jnp.maximum(cosine, 0), i, i)

    return fl.exchanging(config, weigh=weigh)


sim_pfd = fl.Method("sim-pfd", build, SimPFD, needs=("public",))
