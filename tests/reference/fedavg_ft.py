"""FedAvg-FT (Yu et al. 2020, arXiv:2002.04758): FedAvg, its head fine-tuned before use."""

from reference import fedavg, nets
from reference.training import plain_loss, sgd

start = fedavg.start
step = fedavg.step


def scores(state, clients, draws, options, x):
    """Received is the global model, deployed a copy whose head was trained further."""
    received, deployed = [], []
    for i, client in enumerate(clients):
        newest = state["shared"][client.group]
        tuned, _ = sgd(newest, plain_loss(client), draws[i]["tune"], options, trains=nets.in_head)
        received.append(nets.logits(client.net, newest, x))
        deployed.append(nets.logits(client.net, tuned, x))
    return {"received": received, "deployed": deployed}
