"""FedRep: a shared extractor under personal heads, trained in turn.

Collins et al. 2021, arXiv:2102.07078, Algorithm 1. theta is the extractor, phi_i client i's head, n_i the
number of its training rows:

    phi_i   <- SGD over phi_i for E_h epochs       theta fixed, its BatchNorm in evaluation mode
    theta_i <- SGD over theta for E epochs         phi_i fixed
    theta   <- sum_i n_i theta_i / sum_i n_i

The paper's mean is uniform; here clients are weighted by their rows. The paper trains the head for long and
the body briefly (in its code one epoch). Here the default is the reverse: one epoch of the head, then as many
of the body as in other methods, so that all bodies of a comparison see as much data. FedCMD's comparison has
the paper's balance, five epochs in all, of which the body gets the last: ``head_epochs=4,epochs=1``.
"""

from jaxfl.authoring import (
    Algorithm,
    FineTuning,
    Method,
    Phase,
    fine_tuning,
    head,
    local_training,
    options,
    sharing,
    within,
)


@options
class FedRep(FineTuning):
    """Options of FedRep."""

    head_epochs: int = within("[1, inf)", 1)
    """E_h, epochs of the head, before the body trains for `epochs`."""


def build(config: FedRep) -> Algorithm:
    """Keep the head; train it, then the body."""

    def phases(model):
        return Phase(model.head.names, config.head_epochs), Phase(model.body.names, config.length)

    train = local_training(config, phases=phases)
    return sharing(config, keep=head, train=train, tune=fine_tuning(config))


fedrep = Method(
    "fedrep",
    build,
    FedRep,
    "a shared extractor, personal heads, trained in turn",
    "Collins et al. 2021, arXiv:2102.07078",
    """@inproceedings{collins2021exploiting,
  title={Exploiting Shared Representations for Personalized Federated Learning},
  author={Collins, Liam and Hassani, Hamed and Mokhtari, Aryan and Shakkottai, Sanjay},
  booktitle={ICML}, year={2021}}""",
)
