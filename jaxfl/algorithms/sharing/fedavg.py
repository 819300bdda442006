"""FedAvg: one global model, the weighted mean of local ones.

McMahan et al. 2017, arXiv:1602.05629, Algorithm 1. With n_i training rows on client i of the cohort S_t, and
LocalSGD for E epochs over them with the training optimizer (`jaxfl.core.training`):

    w_i <- LocalSGD(w)
    w   <- sum_i n_i w_i / sum_i n_i

FedOpt (FedAvgM, FedAdam, FedYogi) is FedAvg with a `server_optimizer`, see `jaxfl.mechanisms.server_steps`.
"""

from jaxfl import fl


@fl.options
class FedAvg(fl.ServerSteps):
    """Options of FedAvg."""


def build(config: FedAvg) -> fl.Algorithm:
    """Share all leaves."""
    return fl.sharing(config, memory=fl.server_steps(config))


fedavg = fl.Method("fedavg", build, FedAvg)
