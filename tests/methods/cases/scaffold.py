"""SCAFFOLD (Karimireddy et al. 2020, arXiv:1910.06378, Algorithm 1, option II)."""

import numpy as np
from reference import nets, sharing
from reference.training import descend, plain_loss

from methods import recording
from methods.cases import Case, Comparison, local_statistics


def start(clients, initial, options):
    """As FedAvg; all control variates are 0."""
    zero = [{name: 0 * w for name, w in parameters(weights).items()} for weights in initial]
    return sharing.begun(clients, initial, lambda name: False, options) | {
        "c": dict(enumerate(zero)),
        "c_i": {i: zero[client.group] for i, client in enumerate(clients)},
    }


def step(state, clients, cohort, options):
    """y_i <- K steps along g - c_i + c; c_i <- c_i - c + (x - y_i) / (K eta_l); both differences averaged."""
    c_i, trained, losses, changes = dict(state["c_i"]), {}, {}, {}
    for i, draw in cohort.draws.items():
        x, c, steps = sharing.model(state, clients, i), state["c"][clients[i].group], []
        loss = corrected(plain_loss(clients[i]), c, c_i[i], steps)
        trained[i], losses[i] = descend(x, loss, draw["train"], options)
        changes[i] = {
            name: (x[name] - trained[i][name]) / (len(steps) * options.lr) - c[name] if steps else 0 * c[name]
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


def corrected(plain, c, c_i, steps):
    """The loss with g - c_i + c for its gradient; a list grows by one in every step."""

    def loss(weights, rows):
        steps.append(None)
        value, gradients = plain(weights, rows)
        return value, gradients | {name: gradients[name] - c_i[name] + c[name] for name in c}

    return loss


def parameters(weights):
    """All but the running statistics, which have no control variate."""
    return {name: w for name, w in weights.items() if not nets.is_statistic(name)}


def mean(values):
    """Over clients; 0 where nobody is present."""
    return np.mean(values, axis=0) if values else 0.0


def view(state, federation, t):
    """The model, and the control variates of server and clients."""
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
        "": Comparison({"server_lr": 0.8}, mistakes=[("server_lr", 0.81), ("lr", 0.051)]),
        "local statistics": local_statistics(server_lr=0.8),
    },
)
