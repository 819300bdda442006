"""FedDyn: FedAvg with a dynamic regulariser, which aligns the stationary points of clients and federation.

Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", arXiv:2111.04263, Algorithm 1. w is
the global model as received, S the cohort and N the number of clients of the architecture. g_i is client i's
dual variable (its gradient at the end of its last round, if it had solved its problem) and h the server's
state; both are 0 at the start:

    w_i <- LocalSGD over CE(w_i) - <g_i, w_i> + alpha/2 ||w_i - w||^2
    g_i <- g_i - alpha (w_i - w)
    h   <- h - alpha/N sum_S (w_i - w)
    w   <- mean_S w_i - h / alpha

Means are uniform. The server stores h / alpha, which is also defined for alpha = 0. BatchNorm's statistics
are averaged and have no dual variable. As in the authors' code, gradients are clipped at norm 10
(`clip_norm`). Here the clipped gradient includes alpha w_i; the authors add it afterwards, as weight decay.
g_i stays on its client, so traffic is FedAvg's. The reported loss is the minimised one, which the term with
g_i can make negative.
"""

import jax
import jax.numpy as jnp
import optax

from jaxfl import fl


@fl.options
class FedDyn(fl.Training):
    """Options of FedDyn."""

    alpha: float = fl.within("[0, inf)", 0.01)
    """Strength of the regulariser; as it goes to 0, clients train as in FedAvg."""
    clip_norm: float | None = fl.within("(0, inf)", 10.0)
    """Largest norm of a mini-batch gradient; larger ones are scaled down to it."""


def zeros(model: fl.Model, w: fl.Weights, hyper: FedDyn):
    """Return the initial g_i, or h / alpha."""
    return jax.tree.map(jnp.zeros_like, w.params)


def objective(participant: fl.Participant, blocks):
    """Return the loss CE(w_i) - <g_i, w_i> + alpha/2 ||w_i - w||^2."""
    g_i = participant.memory
    near = fl.proximal(participant.model, participant.received, participant.hyper.alpha, blocks)

    def loss(w_i, batch, key):
        value, stats = near(w_i, batch, key)
        return value - optax.tree.vdot(g_i, w_i.params), stats

    return loss


def dual(participant: fl.Participant, trained: fl.Trained):
    """Return g_i after the round, and no message for the server."""
    alpha, w, w_i = participant.hyper.alpha, participant.received.params, trained.weights.params
    return jax.tree.map(lambda g, w, w_i: g - alpha * (w_i - w), participant.memory, w, w_i), None


def aggregate(w: fl.Weights, h, means: fl.Means, hyper: FedDyn):
    """Update w and the server's h / alpha."""
    mean, share = means.shared, means.participation
    h = jax.tree.map(lambda h, mean, w: h - share * (mean - w), h, mean.params, w.params)
    return mean._replace(params=optax.tree.sub(mean.params, h)), h


def build(config: FedDyn) -> fl.Algorithm:
    """Build FedAvg with another loss and a memory of clients and server."""
    memory = fl.Memory(zeros, zeros, update=dual, aggregate=aggregate, by_rows=False)
    return fl.sharing(config, train=fl.local_training(config, objective=objective), memory=memory)


feddyn = fl.Method("feddyn", build, FedDyn)
