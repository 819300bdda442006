"""SCAFFOLD (Karimireddy et al. 2020, arXiv:1910.06378, Algorithm 1, option II)."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from conftest import assert_same
from reference import nets, sharing
from reference.training import descend, plain_loss

from jaxfl.algorithms.sharing.scaffold import Scaffold, variate
from jaxfl.models.model import Weights
from methods import recording
from methods.cases import Case, Comparison, local_statistics


def start(clients, initial, options):
    """Start as FedAvg, with all control variates 0."""
    zero = [{name: 0 * w for name, w in parameters(weights).items()} for weights in initial]
    return sharing.begun(clients, initial, lambda name: False, options) | {
        "c": dict(enumerate(zero)),
        "c_i": {i: zero[client.group] for i, client in enumerate(clients)},
    }


def step(state, clients, cohort, options):
    """y_i <- K steps along g - c_i + c; c_i <- c_i - c + (x - y_i) / (a eta_l); both differences averaged."""
    c_i, trained, losses, changes = dict(state["c_i"]), {}, {}, {}
    for i, draw in cohort.draws.items():
        x, c, steps = sharing.model(state, clients, i), state["c"][clients[i].group], []
        loss = corrected(plain_loss(clients[i]), c, c_i[i], steps)
        trained[i], losses[i] = descend(x, loss, draw["train"], options)
        a = moved_by(len(steps), options.momentum)
        changes[i] = {
            name: (x[name] - trained[i][name]) / (a * options.lr) - c[name] if steps else 0 * c[name]
            for name in c
        }
        c_i[i] = {name: c_i[i][name] + changes[i][name] for name in c}

    shared, variates, personal = {}, {}, dict(state["personal"])
    for i, weights in trained.items():
        personal[i], _ = sharing.divide(weights, lambda name: False, options)
    for g, x in state["shared"].items():
        present = [i for i in trained if clients[i].group == g]
        everybody = sum(client.group == g for client in clients)
        rate = {name: 1 if nets.is_statistic(name) else options.server_lr for name in x}
        moved = {name: mean([trained[i][name] - x[name] for i in present]) for name in x}
        shared[g] = {name: x[name] + rate[name] * moved[name] for name in x}
        c = state["c"][g]
        variates[g] = {
            name: c[name] + len(present) / everybody * mean([changes[i][name] for i in present]) for name in c
        }
    return {"shared": shared, "personal": personal, "c": variates, "c_i": c_i}, losses


def moved_by(steps, momentum):
    """Return how far that many gradients of 1 move a client, in learning rates."""
    velocity = moved = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        moved += velocity
    return moved


def variates_are_mean_gradients():
    """Under momentum, too, a client remembers a constant gradient."""
    weights = Weights({"w": jnp.array([3.0, -2.0])}, {})
    hyper = Scaffold(lr=jnp.float32(0.1), momentum=jnp.float32(0.9), weight_decay=jnp.float32(0))
    zero, gradient, steps = {"w": jnp.zeros(2)}, jnp.array([0.5, -1.0]), 7
    after = Weights({"w": weights.params["w"] - 0.1 * moved_by(steps, 0.9) * gradient}, {})
    participant = SimpleNamespace(hyper=hyper, broadcast=zero, memory=zero, received=weights)
    remembered, _ = variate(participant, SimpleNamespace(steps=jnp.int32(steps), weights=after))
    assert_same(remembered, {"w": gradient}, tolerance=1e-5)


def corrected(plain, c, c_i, steps):
    """Return the loss with the gradient g - c_i + c; a list grows by one in every step."""

    def loss(weights, rows):
        steps.append(None)
        value, gradients = plain(weights, rows)
        return value, gradients | {name: gradients[name] - c_i[name] + c[name] for name in c}

    return loss


def parameters(weights):
    """Return all but the running statistics, which have no control variate."""
    return {name: w for name, w in weights.items() if not nets.is_statistic(name)}


def mean(values):
    """Return the mean over clients, or 0 if none is present."""
    return np.mean(values, axis=0) if values else 0.0


def view(state, federation, t):
    """Return the model, and the control variates of server and clients."""
    return recording.sharing(state, federation, t) | {
        "c": recording.by_group(state.server),
        "c_i": recording.by_client(state.memory, federation),
    }


scaffold = Case(
    "scaffold",
    start,
    step,
    sharing.scores,
    view=view,
    traffic=lambda model, models, t: 2 * model.size,
    comparisons={
        "": Comparison({"server_lr": 0.8}, mistakes=[("server_lr", 0.81), ("lr", 0.051), ("momentum", 0.51)]),
        "local statistics": local_statistics(server_lr=0.8),
    },
    reductions=(variates_are_mean_gradients,),
)
