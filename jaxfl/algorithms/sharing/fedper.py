"""FedPer: a shared extractor, personal heads, trained jointly.

Arivazhagan et al. 2019, arXiv:1912.00818, Algorithms 1-2. theta is the extractor, phi_i client i's head, n_i
the number of its training rows:

    (theta_i, phi_i) <- LocalSGD(theta, phi_i)
    theta            <- sum_i n_i theta_i / sum_i n_i

With ``share="prefix"`` clients of all architectures share one theta: the first layers that all extractors
have in common. The layers after them are personal. This is our reading of FedPer in DraftFed's comparison on
mixed ResNets, which does not say where its "base layers" end.
"""

import functools
from typing import Literal

from jaxfl import fl


@fl.options
class FedPer(fl.FineTuning):
    """Options of FedPer."""

    share: Literal["body", "prefix"] = "body"
    """The extractor, within each architecture, or its first layers, those that all architectures share."""


def build(config: FedPer) -> fl.Algorithm:
    """Keep the head, or all layers except the common ones."""
    method = functools.partial(fl.sharing, config, tune=fl.fine_tuning(config))
    return method(keep=fl.head) if config.share == "body" else fl.shared_entries.first_layers(config, method)


fedper = fl.Method("fedper", build, FedPer)
