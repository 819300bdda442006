"""FedRep: a shared extractor, personal heads, trained in turn.

Collins et al. 2021, arXiv:2102.07078, Algorithm 1. theta is the extractor, phi_i client i's head, n_i the
number of its training rows:

    phi_i   <- SGD over phi_i for E_h epochs       theta fixed, its BatchNorm in evaluation mode
    theta_i <- SGD over theta for E epochs         phi_i fixed
    theta   <- sum_i n_i theta_i / sum_i n_i

The paper's mean is uniform (``weighting=uniform``); here clients are weighted by their rows. The paper trains
the head for long and the body briefly (in its code one epoch). Here the default is the reverse: one epoch of
the head, then as many of the body as in other methods, so that all bodies of a comparison see as much data.
FedCMD's comparison has the paper's balance, five epochs in all, of which the body gets the last:
``head_epochs=4,epochs=1``.
"""

from jaxfl import fl


@fl.options
class FedRep(fl.FineTuning):
    """Options of FedRep."""

    head_epochs: int = fl.within("[1, inf)", 1)
    """E_h, epochs of the head, before the body trains for `epochs`."""


def build(config: FedRep) -> fl.Algorithm:
    """Keep the head; train it, then the body."""

    def phases(model):
        return fl.Phase(model.head.names, config.head_epochs), fl.Phase(model.body.names, config.length)

    train = fl.local_training(config, phases=phases)
    return fl.sharing(config, keep=fl.head, train=train, tune=fl.fine_tuning(config))


fedrep = fl.Method("fedrep", build, FedRep)
