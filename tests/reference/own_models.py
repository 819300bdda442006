"""Methods whose clients have models of their own: the state has {"own": {client: weights}}."""

import numpy as np

from reference import nets


def start(clients, initial, options):
    """Start every client with its own model."""
    return {"own": {i: initial[client.group] for i, client in enumerate(clients)}}


def sent(weights, options):
    """Return what others get of a model: under bn_stats="local" no running statistics."""
    local = options.bn_stats == "local"
    return {name: w for name, w in weights.items() if not (local and nets.is_statistic(name))}


def cosine(one, other):
    """Return the cosine of two arrays, over all their entries; 0 if one of them is 0."""
    return (one * other).sum() / max(np.linalg.norm(one) * np.linalg.norm(other), 1e-8)


def scores(state, clients, draws, options, x):
    """Score own models, which clients deploy; they receive no others."""
    own = [nets.logits(client.net, state["own"][i], x) for i, client in enumerate(clients)]
    return {"received": own, "deployed": own}
