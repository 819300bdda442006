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

from jaxfl import fl


@fl.options
class FedMD(fl.Exchange):
    """Options of FedMD."""

    signal: Literal["prob", "logit"] = "prob"
    """Signal that clients exchange: soft predictions, compared by KL, or logits, by |difference|, which needs
    neither `temperature` nor `kl_weight`."""
    transfer_epochs: int | None = fl.within("[0, inf)", None)
    """Epochs on public images before the first round, and then as many on own rows; by default E."""


def build(config: FedMD) -> fl.Algorithm:
    """Exchange predictions with equal weights."""
    epochs = config.length if config.transfer_epochs is None else config.transfer_epochs

    def weigh(matrix, i, s, hyper):
        return fl.mixing.uniform(i != fl.NOBODY)

    def transfer(key, state, federation, cohort):
        """Train before the first round; clients already have the public images."""
        fl.public_images.require(federation)
        hyper = state.hyper

        def client(key, client, nothing, w):
            plain, batch = fl.task_loss(client.model), config.public_batch
            known = fl.public_rows(federation.public, client)
            rows = fl.own_rows(client, hyper)
            w = fl.descend(plain, w, key, known, hyper, epochs=epochs, batch_size=batch).weights
            return fl.descend(plain, w, key, rows, hyper, epochs=epochs, phase=1).weights

        weights = state.weights
        if federation.labelled:
            trained = fl.map_clients(client, key, federation, cohort, own=fl.gather(weights, cohort))
            weights = fl.scatter(weights, cohort, trained)
        nothing = (0,) * len(weights)
        loss = fl.per_group(jnp.zeros_like, fl.cohort_rows(federation, cohort))
        info = fl.Info(loss, fl.sent_up(cohort, nothing), fl.sent_down(cohort, nothing))
        return state._replace(weights=weights), info

    signal = fl.SOFT_PREDICTIONS if config.signal == "prob" else fl.LOGITS
    return fl.exchanging(config, weigh=weigh, signal=signal, prepare=transfer if epochs else None)


fedmd = fl.Method("fedmd", build, FedMD, needs=("public",))
