"""FedBN: FedAvg in which clients keep their batch normalisation layers.

Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
arXiv:2102.07623, Algorithm 1. b_i are scales, biases and running statistics of client i's BatchNorm layers, w
all other weights, n_i the number of client i's training rows:

    (w_i, b_i) <- LocalSGD(w, b_i)
    w          <- sum_i n_i w_i / sum_i n_i

The paper's mean is uniform; here clients are weighted by their rows, as in FedAvg. In networks with LayerNorm
instead (``vit``), b_i are its scales and biases. A network without normalisation layers keeps nothing: there
FedBN is FedAvg.
"""

from jaxfl.authoring import Algorithm, Method, ServerSteps, norms, options, server_steps, sharing


@options
class FedBN(ServerSteps):
    """Options of FedBN."""


def build(config: FedBN) -> Algorithm:
    """Keep the normalisation layers."""
    return sharing(config, keep=norms, memory=server_steps(config))


fedbn = Method(
    "fedbn",
    build,
    FedBN,
    "FedAvg in which clients keep their batch normalisation layers",
    "Li et al. 2021, arXiv:2102.07623",
    """@inproceedings{li2021fedbn,
  title={{FedBN}: Federated Learning on Non-{IID} Features via Local Batch Normalization},
  author={Li, Xiaoxiao and Jiang, Meirui and Zhang, Xiaofei and Kamp, Michael and Dou, Qi},
  booktitle={ICLR}, year={2021}}""",
)
