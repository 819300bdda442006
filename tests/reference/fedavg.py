"""FedAvg (McMahan et al. 2017, arXiv:1602.05629, Algorithm 1), one model per architecture."""

from reference import nets
from reference.training import average, plain_loss, sgd


def start(clients, initial):
    """The server has the initial models."""
    return {"shared": dict(enumerate(initial))}


def step(state, clients, cohort, options):
    """w_i <- SGD(w); w <- sum_i n_i w_i / sum_i n_i."""
    models = state["shared"]
    sent, losses = [], {}
    for i, draw in cohort.draws.items():
        client = clients[i]
        received = models[client.group]
        model, losses[i] = sgd(received, plain_loss(client), draw["train"], options)
        sent.append((client.group, client.size, model))
    return {"shared": average(models, sent)}, losses


def scores(state, clients, draws, options, x):
    """Everybody uses the newest model of its architecture."""
    newest = [nets.logits(client.net, state["shared"][client.group], x) for client in clients]
    return {"received": newest, "deployed": newest}
