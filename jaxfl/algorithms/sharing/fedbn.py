"""FedBN: FedAvg in which clients keep their batch normalisation layers.

Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
arXiv:2102.07623, Algorithm 1. b_i are scales, biases and running statistics of client i's BatchNorm layers, w
all other weights, n_i the number of client i's training rows:

    (w_i, b_i) <- LocalSGD(w, b_i)
    w          <- sum_i n_i w_i / sum_i n_i

The paper's mean is uniform (``weighting=uniform``); here clients are weighted by their rows, as in FedAvg. In
networks with LayerNorm instead (``vit``), b_i are its scales and biases. A network without normalisation
layers keeps nothing: there FedBN is FedAvg.
"""

from jaxfl import fl


@fl.options
class FedBN(fl.ServerSteps):
    """Options of FedBN."""


def build(config: FedBN) -> fl.Algorithm:
    """Keep the normalisation layers."""
    return fl.sharing(config, keep=fl.norms, memory=fl.server_steps(config))


fedbn = fl.Method("fedbn", build, FedBN)
