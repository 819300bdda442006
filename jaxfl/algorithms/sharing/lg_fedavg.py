"""LG-FedAvg: local extractors, one global head.

Liang et al. 2020, arXiv:2001.01523, Algorithm 1. theta_i is client i's extractor, n_i the number of its
training rows, phi the shared head:

    (theta_i, phi_i) <- LocalSGD(theta_i, phi)
    phi              <- sum_i n_i phi_i / sum_i n_i

The authors start from a FedAvg checkpoint and keep each client's best model on test data; we start from the
common initial weights and keep the last model.
"""

from jaxfl import fl


@fl.options
class LGFedAvg(fl.FineTuning):
    """Options of LG-FedAvg."""


def build(config: LGFedAvg) -> fl.Algorithm:
    """Keep the extractor."""
    return fl.sharing(config, keep=fl.body, tune=fl.fine_tuning(config))


lg_fedavg = fl.Method("lg-fedavg", build, LGFedAvg)
