"""FedPer: a shared extractor under personal heads, trained jointly.

Arivazhagan et al. 2019, arXiv:1912.00818, Algorithms 1-2. theta is the extractor, phi_i client i's head:

    (theta_i, phi_i) <- LocalSGD(theta, phi_i)
    theta            <- sum_i n_i theta_i / sum_i n_i
"""

from jaxfl.authoring import Algorithm, FineTuning, Method, fine_tuning, head, options, sharing


@options
class FedPer(FineTuning):
    """Options of FedPer."""


def build(config: FedPer) -> Algorithm:
    """Keep the head."""
    return sharing(config, keep=head, tune=fine_tuning(config))


fedper = Method(
    "fedper",
    build,
    FedPer,
    "a shared extractor, personal heads, trained jointly",
    "Arivazhagan et al. 2019, arXiv:1912.00818",
    """@article{arivazhagan2019federated,
  title={Federated Learning with Personalization Layers},
  author={Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and Choudhary, Sunav},
  journal={arXiv:1912.00818}, year={2019}}""",
)
