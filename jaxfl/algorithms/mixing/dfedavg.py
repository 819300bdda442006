"""DFedAvg: FedAvg without a server. Clients train their own models and average them with their neighbours.

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

from jaxfl.authoring import (
    Algorithm,
    Info,
    Method,
    PerGroup,
    Training,
    gather,
    options,
    own_models,
    per_group,
    scatter,
    sent_down,
    topology,
    tree,
)


@options
class DFedAvg(Training):
    """Options of DFedAvg."""


class State(NamedTuple):
    """DFedAvg's state.

    Args:
      hyper: the options.
      weights: per group, the clients' models (n_g, ...).
    """

    hyper: DFedAvg
    weights: PerGroup


def build(config: DFedAvg) -> Algorithm:
    """Train, then average with the neighbours."""

    def init(key, federation, hyper):
        topology.require_links(federation)
        return State(hyper, own_models.start(key, federation))

    def step(key, state, federation, cohort):
        own = gather(state.weights, cohort)
        trained, loss = own_models.train(key, federation, cohort, own, state.hyper)
        exchanged = [topology.gossip(federation, cohort, {g: z}) for g, z in enumerate(trained)]
        averaged = tuple(mixed[g] for g, (mixed, _) in enumerate(exchanged))
        averaged = per_group(lambda w, z: own_models.with_own_stats(w, z, config.bn_stats), averaged, trained)
        weights = scatter(state.weights, cohort, averaged)
        sizes = map(tree.scalars, own_models.message(weights, config.bn_stats))
        up = tuple({size: exchanged[g][1][g]} for g, size in enumerate(sizes))
        down = sent_down(cohort, (0,) * len(cohort.groups))
        return State(state.hyper, weights), Info(loss, up, down, trained=own_models.predictors(trained))

    return Algorithm(init, own_models.personal, step, own_models.personal)


dfedavg = Method(
    "dfedavg",
    build,
    DFedAvg,
    "no server: every client averages with its neighbours",
    "Sun et al. 2021, arXiv:2104.11375",
    """@article{sun2023decentralized,
  title={Decentralized Federated Averaging},
  author={Sun, Tao and Li, Dongsheng and Wang, Bao},
  journal={IEEE Transactions on Pattern Analysis and Machine Intelligence},
  volume={45}, number={4}, pages={4289--4301}, year={2023}}""",
    needs=("links",),
)
