"""FedRoD (Chen and Chao 2022, arXiv:2107.00778, section 4, linear personal head).

The personal head P is one more part of a client's weights, beside the generic head G.
"""

import numpy as np

from reference import nets
from reference.training import average, cross_entropy, sgd

personal_head = nets.dense("personal")


def start(clients, initial):
    """The server has extractors and generic heads; P starts as a copy of the initial G."""
    copies = [
        {name.replace(nets.HEAD, "personal"): leaf for name, leaf in nets.head(weights).items()}
        for weights in initial
    ]
    return {
        "shared": dict(enumerate(initial)),
        "personal": {i: copies[client.group] for i, client in enumerate(clients)},
    }


def step(state, clients, cohort, options):
    """(f, G, P_i) <- SGD over both losses; f, G <- sum_i n_i (f_i, G_i) / sum_i n_i."""
    models, heads = state["shared"], dict(state["personal"])
    sent, losses = [], {}
    for i, draw in cohort.draws.items():
        client = clients[i]
        generic = models[client.group]
        loss = two_losses(client, options.gamma)
        model, losses[i] = sgd(generic | heads[i], loss, draw["train"], options)
        heads[i] = {name: model[name] for name in heads[i]}
        sent.append((client.group, client.size, {name: model[name] for name in generic}))
    return {"shared": average(models, sent), "personal": heads}, losses


def two_losses(client, gamma):
    """CE(G(z) + gamma log n_c) for f and G, plus CE(G(z) + P(z)) for P alone.

    A class of which the client has no rows has log 0 = -inf and so no part in the first softmax.
    """

    def loss(weights, rows):
        y = client.y[rows]
        z, through_body = client.net(weights, client.x[rows])
        generic, through_generic = nets.classify(weights, z)
        residual, through_personal = personal_head(weights, z)
        with np.errstate(divide="ignore"):
            prior = gamma * np.log(np.bincount(client.y, minlength=generic.shape[1]))
        value_g, dgeneric = cross_entropy(generic + prior, y)
        value_p, dresidual = cross_entropy(generic + residual, y)
        dz, of_generic = through_generic(dgeneric)
        _, of_personal = through_personal(dresidual)  # nothing of it flows on to z or G
        return value_g + value_p, through_body(dz)[1] | of_generic | of_personal

    return loss


def scores(state, clients, draws, options, x):
    """G(z) + P_i(z), with the newest f and G."""
    both = []
    for i, client in enumerate(clients):
        weights = state["shared"][client.group] | state["personal"][i]
        z, _ = client.net(weights, x)
        both.append(nets.classify(weights, z)[0] + personal_head(weights, z)[0])
    return {"received": both, "deployed": both}
