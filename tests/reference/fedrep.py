"""FedRep (Collins et al. 2021, arXiv:2102.07078, Algorithm 1): own heads, trained first."""

from reference import fedper, nets
from reference.training import average, plain_loss, sgd

start = fedper.start


def step(state, clients, cohort, options):
    """phi_i <- SGD over phi_i; theta_i <- SGD over theta; theta <- sum_i n_i theta_i / sum_i n_i.

    The loss is that of the second phase, in which what is shared is trained.
    """
    bodies, heads = state["shared"], dict(state["personal"])
    sent, losses = [], {}
    for i, draw in cohort.draws.items():
        client = clients[i]
        loss = plain_loss(client)
        model = bodies[client.group] | heads[i]
        model, _ = sgd(model, loss, draw["head"], options, trains=nets.in_head)
        heads[i] = nets.head(model)
        model, losses[i] = sgd(model, loss, draw["body"], options, trains=lambda name: not nets.in_head(name))
        sent.append((client.group, client.size, nets.body(model)))
    return {"shared": average(bodies, sent), "personal": heads}, losses


scores = fedper.scores
