"""FedProx: FedAvg in which clients stay near the model that they received.

Li et al. 2020, "Federated Optimization in Heterogeneous Networks", arXiv:1812.06127, Algorithm 2. w^t is the
model as received, n_i the number of client i's training rows:

    w_i <- LocalSGD over CE(w) + mu/2 ||w - w^t||^2
    w   <- sum_i n_i w_i / sum_i n_i

Algorithm 2 samples clients by their rows and weights them uniformly. Here, as in FedAvg, clients are sampled
uniformly and weighted by their rows. Every client trains for E epochs: stragglers and inexact solutions (the
paper's gamma) are not simulated. The paper tries mu in {0.001, 0.01, 0.1, 1}; mu = 0 is FedAvg.
The reported loss contains the term with mu.
"""

from jaxfl.authoring import (
    Algorithm,
    Method,
    ServerSteps,
    local_training,
    options,
    proximal,
    server_steps,
    sharing,
    within,
)


@options
class FedProx(ServerSteps):
    """Options of FedProx."""

    mu: float = within("[0, inf)", 0.01)
    """Pull towards the received model; 0 is FedAvg."""


def build(config: FedProx) -> Algorithm:
    """Build FedAvg with another loss."""

    def objective(participant, blocks):
        """Return the loss CE(w) + mu/2 ||w - w^t||^2."""
        return proximal(participant.model, participant.received, participant.hyper.mu, blocks)

    train = local_training(config, objective=objective)
    return sharing(config, train=train, memory=server_steps(config))


fedprox = Method(
    "fedprox",
    build,
    FedProx,
    "FedAvg in which clients stay near the model that they received",
    "Li et al. 2020, arXiv:1812.06127",
    """@inproceedings{li2020federated,
  title={Federated Optimization in Heterogeneous Networks},
  author={Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and
          Smith, Virginia},
  booktitle={MLSys}, year={2020}}""",
)
