"""pFedDF: FedDF, fine-tuned by each client before use.

Beikmohammadi et al. (MNFL), section 5.1; Lin et al. 2020, arXiv:2006.07242. Rounds are those of `feddf`.
Before use each client fine-tunes a copy of its architecture's model, all layers.
"""

from jaxfl import fl
from jaxfl.algorithms.public_images.feddf import distilled


@fl.options
class PFedDF(fl.ServerDistillation, fl.FineTuned):
    """Options of pFedDF."""


def build(config: PFedDF) -> fl.Algorithm:
    """Build FedDF with fine-tuning before use."""
    return distilled(config, fl.sharing(config, tune=fl.fine_tuning(config)))


pfeddf = fl.Method("pfeddf", build, PFedDF, needs=("public",))
