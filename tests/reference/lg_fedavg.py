"""LG-FedAvg (Liang et al. 2020, arXiv:2001.01523, Algorithm 1): local extractors, a global head."""

from reference import nets
from reference.training import average, plain_loss, sgd


def start(clients, initial):
    """The server has the heads; every client has a copy of the initial extractor."""
    return {
        "shared": {group: nets.head(weights) for group, weights in enumerate(initial)},
        "personal": {i: nets.body(initial[client.group]) for i, client in enumerate(clients)},
    }


def step(state, clients, cohort, options):
    """(theta_i, phi_i) <- SGD(theta_i, phi); phi <- sum_i n_i phi_i / sum_i n_i."""
    heads, bodies = state["shared"], dict(state["personal"])
    sent, losses = [], {}
    for i, draw in cohort.draws.items():
        client = clients[i]
        model = bodies[i] | heads[client.group]
        model, losses[i] = sgd(model, plain_loss(client), draw["train"], options)
        bodies[i] = nets.body(model)
        sent.append((client.group, client.size, nets.head(model)))
    return {"shared": average(heads, sent), "personal": bodies}, losses


def scores(state, clients, draws, options, x):
    """The client's own extractor under the newest head."""
    newest = [
        nets.logits(client.net, state["personal"][i] | state["shared"][client.group], x)
        for i, client in enumerate(clients)
    ]
    return {"received": newest, "deployed": newest}
