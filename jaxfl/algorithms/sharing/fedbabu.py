"""FedBABU: the head is never trained in the federation; fine-tuned before use.

Oh et al. 2022, arXiv:2106.06042, Algorithm 1. phi_0 is one random head, the same for all clients, n_i the
number of client i's training rows:

    theta_i <- SGD over theta with head phi_0, E epochs
    theta   <- sum_i n_i theta_i / sum_i n_i
    before use: (theta_i', phi_i') <- SGD over (theta, phi_0) for ft_epochs epochs

The received model still has the random head, so a low `received` accuracy is expected. phi_0 is one draw also
with `--initial own`.
"""

import dataclasses

from jaxfl import fl


@fl.options
class FedBABU(fl.FineTuned):
    """Options of FedBABU."""


def build(config: FedBABU) -> fl.Algorithm:
    """Keep the head, and train only the body."""

    def phases(model):
        return (fl.Phase(model.body.names, config.length),)

    train = fl.local_training(config, phases=phases)
    algorithm = fl.sharing(config, keep=fl.head, train=train, tune=fl.fine_tuning(config))

    def init(key, federation, hyper):
        return algorithm.init(key, dataclasses.replace(federation, apart=False), hyper)

    return algorithm._replace(init=init)


fedbabu = fl.Method("fedbabu", build, FedBABU)
