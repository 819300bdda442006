"""FedMD: clients of any architecture learn from the mean of all predictions on public images.

Li and Wang 2019, "FedMD: Heterogenous Federated Learning via Model Distillation", arXiv:1910.03581,
Algorithm 1. s_m are client m's predictions on the round's public images D_r, S_t the cohort:

    before the first round    w_n <- LocalSGD on labelled public images, then on its own rows
    in every round            w_n <- LocalSGD(w_n)
                              t    =  mean_m s_m                     m in S_t
                              w_n <- SGD over the distance of f(w_n, D_r) from t

The paper exchanges class scores and measures |f - t| (``signal="logit"``); MNFL compares soft predictions by
KL, which is the default. The paper's round begins with the second half of ours. Unless public labels are
known to mean what the clients' do (held-out images, or ``labels=true``), clients do not train before the
rounds.
"""

from typing import Literal

import jax.numpy as jnp

from jaxfl.authoring import (
    Algorithm,
    Info,
    Method,
    cohort_rows,
    cross_entropy,
    descend,
    gather,
    map_clients,
    options,
    own_rows,
    per_group,
    public_images,
    public_rows,
    scatter,
    sent_down,
    sent_up,
    within,
)
from jaxfl.data.federation import NOBODY
from jaxfl.mechanisms.exchange import LOGITS, SOFT_PREDICTIONS, Exchange, exchanging
from jaxfl.mechanisms.mixing import uniform


@options
class FedMD(Exchange):
    """Options of FedMD."""

    signal: Literal["prob", "logit"] = "prob"
    """Signal that clients exchange: soft predictions, compared by KL, or logits, by |difference|, which needs
    neither `temperature` nor `kl_weight`."""
    transfer_epochs: int | None = within("[0, inf)", None)
    """Epochs on public images before the first round, and then as many on own rows; by default E."""


def build(config: FedMD) -> Algorithm:
    """Exchange predictions with equal weights."""
    epochs = config.length if config.transfer_epochs is None else config.transfer_epochs

    def weigh(matrix, i, s, hyper):
        return uniform(i != NOBODY)

    def transfer(key, state, federation, cohort):
        """Train before the first round; clients already have the public images."""
        public_images.require(federation)
        hyper = state.hyper

        def client(key, client, nothing, w):
            plain, batch = cross_entropy(client.model), config.public_batch
            known = public_rows(federation.public, federation, client)
            rows = own_rows(client, federation, hyper)
            w = descend(plain, w, key, known, hyper, epochs=epochs, batch_size=batch).weights
            return descend(plain, w, key, rows, hyper, epochs=epochs, phase=1).weights

        weights = state.weights
        if federation.labelled:
            trained = map_clients(client, key, federation, cohort, own=gather(weights, cohort))
            weights = scatter(weights, cohort, trained)
        nothing = (0,) * len(weights)
        loss = per_group(jnp.zeros_like, cohort_rows(federation, cohort))
        info = Info(loss, sent_up(cohort, nothing), sent_down(cohort, nothing))
        return state._replace(weights=weights), info

    signal = SOFT_PREDICTIONS if config.signal == "prob" else LOGITS
    return exchanging(config, weigh=weigh, signal=signal, prepare=transfer if epochs else None)


fedmd = Method(
    "fedmd",
    build,
    FedMD,
    "clients of any architecture learn from the mean of all predictions on public images",
    "Li and Wang 2019, arXiv:1910.03581",
    """@article{li2019fedmd,
  title={{FedMD}: Heterogenous Federated Learning via Model Distillation},
  author={Li, Daliang and Wang, Junpu},
  journal={arXiv:1910.03581}, year={2019}}""",
    needs=("public",),
)
