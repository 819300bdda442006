"""Ditto: FedAvg, and personal models pulled towards the global one.

Li et al. 2021, arXiv:2012.04221, Algorithm 1. w is the global model, v_i client i's personal one, n_i the
number of its training rows:

    v_i <- SGD over CE(v_i) + lam/2 ||v_i - w||^2, E_p epochs at personal_lr; w as received
    w_i <- LocalSGD(w), E epochs
    w   <- sum_i n_i w_i / sum_i n_i

lam is the paper's lambda. v_i starts from the initial w and moves only when client i takes part. A client
receives w and deploys v_i. The reported loss is that of w_i.
"""

import dataclasses
from typing import Any, NamedTuple

from jaxfl import fl


@fl.options
class Ditto(fl.Averaging):
    """Options of Ditto."""

    lam: float = fl.within("[0, inf)", 1.0)
    """lambda, the pull towards the global model; at 0 the personal models train as in Local."""
    personal_epochs: int | None = fl.within("[1, inf)", None)
    """E_p, epochs of the personal model per round; by default E."""
    personal_lr: float | None = fl.client_rate("(0, inf)", None)
    """Learning rate of the personal model; by default lr."""


class State(NamedTuple):
    """FedAvg's state, and the personal models v (n, ...)."""

    fedavg: Any
    personal: fl.Weights


def build(config: Ditto) -> fl.Algorithm:
    """Build FedAvg for w, and proximal local training for v."""
    fedavg = fl.sharing(config)

    def init(key, federation, hyper):
        return State(fedavg.init(key, federation, hyper), fl.own_models.start(key, federation))

    def receive(key, state, federation, cohort):
        return fedavg.receive(key, state.fedavg, federation, cohort)

    def step(key, state, federation, cohort):
        hyper = state.fedavg.hyper
        if hyper.personal_lr is not None:
            hyper = dataclasses.replace(hyper, lr=hyper.personal_lr)  # of v; FedAvg's state has that of w

        def client(key, client, w, v):
            return fl.descend(
                fl.proximal(client.model, w, hyper.lam),
                v,
                key,
                fl.own_rows(client, hyper),
                hyper,
                epochs=config.personal_epochs,
                phase=1,  # FedAvg's is 0
            ).weights

        own = fl.gather(state.personal, cohort)
        trained = fl.map_clients(client, key, federation, cohort, state.fedavg.shared, own)
        averaged, info = fedavg.step(key, state.fedavg, federation, cohort)
        heard = fl.wire.without(federation, cohort, info.idle)
        state = State(averaged, fl.scatter(state.personal, heard, trained))
        return state, info._replace(trained=fl.own_models.predictor(trained))

    def personal(key, state, federation, cohort):
        return fl.own_models.of_cohort(state.personal, cohort)

    return fl.each_architecture(fl.Algorithm(init, receive, step, personal, wire=fedavg.wire))


ditto = fl.Method("ditto", build, Ditto)
