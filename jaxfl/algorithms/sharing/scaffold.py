"""SCAFFOLD: FedAvg with control variates against the drift of clients.

Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", arXiv:1910.06378,
Algorithm 1 with option II. x is the global model, y_i client i's; c and c_i are the control variates of the
server and of client i (0 at the start). K is the number of the client's steps, N the number of clients, S
the cohort:

    y_i  <- K steps of LocalSGD along g_i(y) - c_i + c, from y_i = x
    c_i' <- c_i - c + (x - y_i) / (a eta_l)
    x    <- x + eta_g mean_S (y_i - x),     c <- c + |S|/N mean_S (c_i' - c_i)

Means are uniform, per architecture. A client sends both differences and receives x and c: twice FedAvg's
bytes, except for BatchNorm's statistics, which are averaged with the model and have no control variate.

(x - y_i) / (a eta_l) is meant to be a mean of the gradients that moved y_i. Under plain SGD, the paper's
case, a = K. With momentum beta a gradient moves y_i by eta_l (1 + beta + beta^2 + ...), one term for each
step from its own on, and a is the sum over all steps, as in FedNova (arXiv:2007.07481). With K in its place
c_i would oscillate ever more widely. Weight decay counts as part of the gradient. eta_l is `lr`, eta_g
`server_lr`, beta `momentum`.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxfl import fl


@fl.options
class Scaffold(fl.Training):
    """Options of SCAFFOLD."""

    optimizer: Literal["sgd"] = "sgd"
    """Of clients; what adam's steps are made of is no mean of gradients."""
    server_lr: float = fl.within("(0, inf)", 1.0)
    """eta_g, the server's learning rate."""


def zeros(model: fl.Model, x: fl.Weights, hyper: Scaffold):
    """A control variate before the first round."""
    return jax.tree.map(jnp.zeros_like, x.params)


def corrected(participant: fl.Participant, blocks):
    """Gradients g - c_i + c."""
    c, c_i = participant.broadcast, participant.memory
    return optax.stateless(lambda g, params: jax.tree.map(lambda g, c_i, c: g - c_i + c, g, c_i, c))


def variate(participant: fl.Participant, trained: fl.Trained):
    """Return c_i', and c_i' - c_i for the server; a client without a step keeps its c_i."""
    steps, lr, beta = trained.steps, participant.hyper.lr, participant.hyper.momentum

    def moved(step, so_far):  # summed step by step: the closed form cancels where beta is near 1
        velocity, a = so_far
        velocity = beta * velocity + 1
        return velocity, a + velocity

    nothing = jnp.zeros_like(lr)
    _, a = jax.lax.fori_loop(0, jnp.maximum(steps, 1), moved, (nothing, nothing))
    change = jax.tree.map(
        lambda c, x, y: jnp.where(steps > 0, (x - y) / (a * lr) - c, 0),
        participant.broadcast,
        participant.received.params,
        trained.weights.params,
    )
    return optax.tree.add(participant.memory, change), change


def aggregate(x: fl.Weights, c, means: fl.Means, hyper: Scaffold):
    """Update the server's x and c."""
    y, change, share = means.shared, means.message, means.participation
    params = jax.tree.map(lambda x, y: x + hyper.server_lr * (y - x), x.params, y.params)
    return y._replace(params=params), jax.tree.map(lambda c, d: c + share * d, c, change)


def build(config: Scaffold):
    """FedAvg with a memory of clients and server."""
    memory = fl.Memory(
        zeros, zeros, broadcast=lambda c: c, update=variate, aggregate=aggregate, by_rows=False
    )
    return fl.sharing(config, train=fl.local_training(config, correction=corrected), memory=memory)


scaffold = fl.Method("scaffold", build, Scaffold)
