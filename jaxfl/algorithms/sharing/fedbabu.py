"""FedBABU: the extractor trains under a head frozen at its initial weights; both are fine-tuned before use.

Oh et al. 2022, arXiv:2106.06042, Algorithm 1. phi_0 is one random head, the same for all clients, n_i the
number of client i's training rows:

    theta_i <- SGD over theta with head phi_0, E epochs
    theta   <- sum_i n_i theta_i / sum_i n_i
    before use: (theta_i', phi_i') <- SGD over (theta, phi_0) for ft_epochs epochs

The received model still has the random head, so a low `received` accuracy is expected.
"""

from jaxfl.authoring import (
    Algorithm,
    FineTuned,
    Method,
    Phase,
    fine_tuning,
    head,
    local_training,
    options,
    sharing,
)


@options
class FedBABU(FineTuned):
    """Options of FedBABU."""


def build(config: FedBABU) -> Algorithm:
    """Keep the head, and train only the body."""

    def phases(model):
        return (Phase(model.body.names, config.length),)

    train = local_training(config, phases=phases)
    return sharing(config, keep=head, train=train, tune=fine_tuning(config))


fedbabu = Method(
    "fedbabu",
    build,
    FedBABU,
    "the head is never trained in the federation; fine-tuned before use",
    "Oh et al. 2022, arXiv:2106.06042",
    """@inproceedings{oh2022fedbabu,
  title={{FedBABU}: Toward Enhanced Representation for Federated Image Classification},
  author={Oh, Jaehoon and Kim, Sangmook and Yun, Se-Young},
  booktitle={ICLR}, year={2022}}""",
)
