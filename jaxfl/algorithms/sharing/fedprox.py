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

from jaxfl import fl


@fl.options
class FedProx(fl.ServerSteps):
    """Options of FedProx."""

    mu: float = fl.within("[0, inf)", 0.01)
    """Pull towards the received model; 0 is FedAvg."""


def build(config: FedProx) -> fl.Algorithm:
    """Build FedAvg with another loss."""

    def objective(participant, blocks):
        """Return the loss CE(w) + mu/2 ||w - w^t||^2."""
        return fl.proximal(participant.model, participant.received, participant.hyper.mu, blocks)

    train = fl.local_training(config, objective=objective)
    return fl.sharing(config, train=train, memory=fl.server_steps(config))


fedprox = fl.Method("fedprox", build, FedProx)
