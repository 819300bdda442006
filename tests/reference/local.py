"""Local training: every client alone, in the rounds in which it is drawn."""

from reference import nets
from reference.training import plain_loss, sgd


def start(clients, initial):
    """Every client has a copy of its architecture's initial model."""
    return {"personal": {i: initial[client.group] for i, client in enumerate(clients)}}


def step(state, clients, cohort, options):
    """w_i <- SGD(w_i)."""
    models, losses = dict(state["personal"]), {}
    for i, draw in cohort.draws.items():
        loss = plain_loss(clients[i])
        models[i], losses[i] = sgd(models[i], loss, draw["train"], options)
    return {"personal": models}, losses


def scores(state, clients, draws, options, x):
    """A client has nothing but its own model."""
    own = [nets.logits(client.net, state["personal"][i], x) for i, client in enumerate(clients)]
    return {"received": own, "deployed": own}
