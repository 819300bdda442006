"""LG-FedAvg: local representations, a global head.

Liang et al. 2020, arXiv:2001.01523, Algorithm 1. theta_i is client i's extractor, n_i the number of its
training rows, phi the shared head:

    (theta_i, phi_i) <- LocalSGD(theta_i, phi)
    phi              <- sum_i n_i phi_i / sum_i n_i

The authors start from a FedAvg checkpoint and keep each client's best model on test data; we start from the
common initial weights and keep the last model.
"""

from jaxfl.authoring import Algorithm, FineTuning, Method, body, fine_tuning, options, sharing


@options
class LGFedAvg(FineTuning):
    """Options of LG-FedAvg."""


def build(config: LGFedAvg) -> Algorithm:
    """Keep the extractor."""
    return sharing(config, keep=body, tune=fine_tuning(config))


lg_fedavg = Method(
    "lg-fedavg",
    build,
    LGFedAvg,
    "local extractors, one global head",
    "Liang et al. 2020, arXiv:2001.01523",
    """@article{liang2020think,
  title={Think Locally, Act Globally: Federated Learning with Local and Global Representations},
  author={Liang, Paul Pu and Liu, Terrance and Ziyin, Liu and Allen, Nicholas B. and Auerbach, Randy P. and
          Brent, David and Salakhutdinov, Ruslan and Morency, Louis-Philippe},
  journal={arXiv:2001.01523}, year={2020}}""",
)
