"""FedPer (Arivazhagan et al. 2019, arXiv:1912.00818, Algorithms 1-2): own heads."""

from reference import nets
from reference.training import average, plain_loss, sgd


def start(clients, initial):
    """The server has the extractors; every client has a copy of the initial head."""
    return {
        "shared": {group: nets.body(weights) for group, weights in enumerate(initial)},
        "personal": {i: nets.head(initial[client.group]) for i, client in enumerate(clients)},
    }


def step(state, clients, cohort, options):
    """(theta_i, phi_i) <- SGD(theta, phi_i); theta <- sum_i n_i theta_i / sum_i n_i."""
    bodies, heads = state["shared"], dict(state["personal"])
    sent, losses = [], {}
    for i, draw in cohort.draws.items():
        client = clients[i]
        model = bodies[client.group] | heads[i]
        model, losses[i] = sgd(model, plain_loss(client), draw["train"], options)
        heads[i] = nets.head(model)
        sent.append((client.group, client.size, nets.body(model)))
    return {"shared": average(bodies, sent), "personal": heads}, losses


def scores(state, clients, draws, options, x):
    """The newest extractor under the client's own head."""
    newest = [
        nets.logits(client.net, state["shared"][client.group] | state["personal"][i], x)
        for i, client in enumerate(clients)
    ]
    return {"received": newest, "deployed": newest}
