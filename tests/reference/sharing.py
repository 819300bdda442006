"""Methods that share a part of a model: who holds which leaves, and what is averaged.

The state is {"shared": {architecture: leaves}, "personal": {client: leaves}}.
"""

from reference import nets
from reference.training import average, descend, plain_loss


def divide(weights, stays, options):
    """(kept, shared) leaves: what stays by its name, and under bn_stats="local" all statistics."""
    local = options.bn_stats == "local"
    kept = {name: w for name, w in weights.items() if stays(name) or (local and nets.is_statistic(name))}
    return kept, {name: w for name, w in weights.items() if name not in kept}


def begun(clients, initial, stays, options):
    """The state before the first round: the server has the shared leaves, every client a copy of its own."""
    parts = [divide(weights, stays, options) for weights in initial]
    return {
        "shared": {group: shared for group, (_, shared) in enumerate(parts)},
        "personal": {i: parts[client.group][0] for i, client in enumerate(clients)},
    }


def model(state, clients, i):
    """What client i starts from: the newest shared leaves and its own."""
    return state["shared"][clients[i].group] | state["personal"][i]


def averaged(state, clients, trained, stays, options):
    """The state after a round in which clients have trained {client: weights}."""
    parts = {i: divide(weights, stays, options) for i, weights in trained.items()}
    sent = [(clients[i].group, clients[i].size, shared) for i, (_, shared) in parts.items()]
    return {
        "shared": average(state["shared"], sent),
        "personal": state["personal"] | {i: kept for i, (kept, _) in parts.items()},
    }


def trained_jointly(state, clients, cohort, options):
    """All blocks at once: {client: weights}, {client: loss}."""
    trained, losses = {}, {}
    for i, draw in cohort.draws.items():
        start = model(state, clients, i)
        trained[i], losses[i] = descend(start, plain_loss(clients[i]), draw["train"], options)
    return trained, losses


def scores(state, clients, draws, options, x):
    """Received and deployed is the newest model under the client's own leaves."""
    newest = [nets.logits(client.net, model(state, clients, i), x) for i, client in enumerate(clients)]
    return {"received": newest, "deployed": newest}


def scores_after_tuning(state, clients, draws, options, x):
    """The same, but deployed is a copy of which the head or all was trained further."""
    received, deployed = [], []
    for i, client in enumerate(clients):
        newest, all_of_it = model(state, clients, i), options.ft_part == "all"
        trains = (lambda name: True) if all_of_it else nets.in_head
        loss = plain_loss(client, train=all_of_it)
        tuned, _ = descend(newest, loss, draws[i]["tune"], options, trains=trains)
        received.append(nets.logits(client.net, newest, x))
        deployed.append(nets.logits(client.net, tuned, x))
    return {"received": received, "deployed": deployed}
