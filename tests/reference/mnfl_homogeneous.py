"""MNFL among clients of one architecture (Beikmohammadi et al., the homogeneous variant).

As `reference.mnfl`, but clients exchange their models: a teacher is a mixture of parameters.
"""

import numpy as np

from reference import mnfl, nets
from reference.training import plain_loss, sgd


def start(clients, initial):
    """Own models; all of an architecture teach each other alike."""
    group = np.array([client.group for client in clients])
    same = group[:, None] == group
    return {
        "own": {i: initial[client.group] for i, client in enumerate(clients)},
        "matrix": same / same.sum(1, keepdims=True),
    }


def step(state, clients, cohort, options):
    """Start from the teacher, or from a model pulled towards it; then the server learns the matrix."""
    models, matrix = dict(state["own"]), state["matrix"]
    begun = transferred(state, clients, list(cohort.draws), options)
    losses = {}
    for i, draw in cohort.draws.items():
        models[i], losses[i] = sgd(begun[i], plain_loss(clients[i]), draw["train"], options)

    for g in {client.group for client in clients}:
        present = [i for i in cohort.draws if clients[i].group == g]
        members = sum(client.group == g for client in clients)
        vectors = {i: np.concatenate([leaf.ravel() for leaf in models[i].values()]) for i in present}
        centre = sum(vectors.values()) / max(1, len(present))
        away = {n: mnfl.mixture(matrix, n, vectors) - vectors[n] for n in present}
        slopes = {(n, m): 2 / len(centre) * away[n] @ (vectors[m] - centre) for n in present for m in present}
        matrix = mnfl.learnt(matrix, clients, present, slopes, options, uniform=1 / members)
    return {"own": models, "matrix": matrix}, losses


def transferred(state, clients, present, options):
    """What the clients that are present start from, {client: weights}."""
    begun = {}
    for n in present:
        known = {m: state["own"][m] for m in present if clients[m].group == clients[n].group}
        teacher = {
            name: mnfl.mixture(state["matrix"], n, {m: w[name] for m, w in known.items()})
            for name in state["own"][n]
        }
        begun[n] = teacher if options.transfer == "replace" else state["own"][n]
        for _ in range(options.transfer_steps if options.transfer == "prox" else 0):
            begun[n] = {
                name: w - 2 * options.transfer_lr * (w - teacher[name]) for name, w in begun[n].items()
            }
    return begun


def scores(state, clients, draws, options, x):
    """Received: what a round of all clients would start from. Deployed: the own model."""
    newest = transferred(state, clients, list(range(len(clients))), options)
    return {
        "received": [nets.logits(c.net, newest[i], x) for i, c in enumerate(clients)],
        "deployed": [nets.logits(c.net, state["own"][i], x) for i, c in enumerate(clients)],
    }
