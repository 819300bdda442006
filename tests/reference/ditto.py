"""Ditto (Li et al. 2021, arXiv:2012.04221, Algorithm 1): FedAvg and personal models."""

from reference import nets
from reference.training import average, plain_loss, sgd


def start(clients, initial):
    """The server has the initial models, and so has every client as its personal one."""
    return {
        "shared": dict(enumerate(initial)),
        "personal": {i: initial[client.group] for i, client in enumerate(clients)},
    }


def step(state, clients, cohort, options):
    """w_i <- SGD(w); v_i <- SGD over CE(v_i) + lam/2 ||v_i - w||^2; w <- sum_i n_i w_i / sum_i n_i.

    The pull is towards the w that was received. The loss is that of w_i.
    """
    models, personal = state["shared"], dict(state["personal"])
    sent, losses = [], {}
    for i, draw in cohort.draws.items():
        client = clients[i]
        w, loss = models[client.group], plain_loss(client)
        trained, losses[i] = sgd(w, loss, draw["train"], options)
        sent.append((client.group, client.size, trained))
        pulled = proximal(loss, w, options.lam)
        personal[i], _ = sgd(personal[i], pulled, draw["personal"], options)
    return {"shared": average(models, sent), "personal": personal}, losses


def proximal(plain, w, lam):
    """A loss plus lam/2 ||v - w||^2."""

    def loss(v, rows):
        value, gradients = plain(v, rows)
        distance = sum(((v[name] - w[name]) ** 2).sum() for name in v)
        pull = {name: gradients[name] + lam * (v[name] - w[name]) for name in v}
        return value + lam / 2 * distance, pull

    return loss


def scores(state, clients, draws, options, x):
    """Received is the global model, deployed the personal one."""
    return {
        "received": [nets.logits(c.net, state["shared"][c.group], x) for c in clients],
        "deployed": [nets.logits(c.net, state["personal"][i], x) for i, c in enumerate(clients)],
    }
