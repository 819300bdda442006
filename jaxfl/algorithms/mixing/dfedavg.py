"""DFedAvg: no server: every client averages with its neighbours.

Sun, Li and Wang 2021, "Decentralized Federated Averaging", arXiv:2104.11375, Algorithm 1. In a round, for
every client i that takes part, with N_i its neighbours that also take part:

    z_i <- LocalSGD(w_i)                      with momentum, E epochs
    w_i <- sum_{l in N_i and i} W_il z_l      W of Metropolis and Hastings, see `jaxfl.mechanisms.topology`

Only clients of the same architecture are neighbours; if these are not connected, each part averages alone.
On a complete graph W is the uniform mean and all clients of an architecture have the same model: FedAvg with
uniform weights, which the paper has as well. A client deploys w_i and starts the next round from it. It sends
z_i to every neighbour; bytes sent are not counted again for the receiver.
"""

from typing import NamedTuple

from jaxfl import fl


@fl.options
class DFedAvg(fl.Training):
    """Options of DFedAvg."""


class State(NamedTuple):
    """DFedAvg's state."""

    hyper: DFedAvg
    weights: fl.Weights  # the clients' models (n, ...)


def build(config: DFedAvg) -> fl.Algorithm:
    """Train, then average with the neighbours."""

    def init(key, federation, hyper):
        fl.topology.require_links(federation)
        return State(hyper, fl.own_models.start(key, federation))

    def step(key, state, federation, cohort):
        own = fl.gather(state.weights, cohort)
        trained, loss = fl.own_models.train(key, federation, cohort, own, state.hyper)
        message = fl.own_models.sent(trained, config.bn_stats)
        averaged, neighbours = fl.topology.gossip(federation, cohort, {0: message}, key)
        averaged = fl.own_models.with_own_stats(averaged[0], trained, config.bn_stats)
        up = fl.wire.up_to(federation, neighbours[0], fl.tree.one(message))
        down = fl.sent_down(cohort, 0)
        state = State(state.hyper, fl.scatter(state.weights, cohort, averaged))
        return state, fl.Info(loss, up, down, trained=fl.own_models.predictor(trained))

    own = fl.own_models.personal
    return fl.each_architecture(fl.Algorithm(init, own, step, own, wire=("rows", "messages")))


dfedavg = fl.Method("dfedavg", build, DFedAvg, needs=("links",))
