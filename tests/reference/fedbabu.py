"""FedBABU (Oh et al. 2022, arXiv:2106.06042, Algorithm 1): a random head until fine-tuning."""

from reference import fedper, nets
from reference.training import average, plain_loss, sgd

start = fedper.start


def step(state, clients, cohort, options):
    """theta_i <- SGD over theta, under the initial head; theta <- sum_i n_i theta_i / sum_i n_i."""
    bodies, heads = state["shared"], state["personal"]
    sent, losses = [], {}
    for i, draw in cohort.draws.items():
        client = clients[i]
        model, losses[i] = sgd(
            bodies[client.group] | heads[i],
            plain_loss(client),
            draw["train"],
            options,
            trains=lambda name: not nets.in_head(name),
        )
        sent.append((client.group, client.size, nets.body(model)))
    return {"shared": average(bodies, sent), "personal": heads}, losses


def scores(state, clients, draws, options, x):
    """Deployed is a copy of the received model that was fine-tuned as a whole."""
    received, deployed = [], []
    for i, client in enumerate(clients):
        newest = state["shared"][client.group] | state["personal"][i]
        tuned, _ = sgd(newest, plain_loss(client), draws[i]["tune"], options)
        received.append(nets.logits(client.net, newest, x))
        deployed.append(nets.logits(client.net, tuned, x))
    return {"received": received, "deployed": deployed}
