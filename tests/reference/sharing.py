"""Methods that share a part of a model: which leaves clients keep, and which are averaged.

The state is {"shared": {architecture: leaves}, "personal": {client: leaves}}.
"""

import numpy as np

from reference import nets
from reference.training import average, descend, plain_loss


def divide(weights, stays, options):
    """Return (kept, shared) leaves; statistics are also kept under bn_stats="local"."""
    local = options.bn_stats == "local"
    kept = {name: w for name, w in weights.items() if stays(name) or (local and nets.is_statistic(name))}
    return kept, {name: w for name, w in weights.items() if name not in kept}


def begun(clients, initial, stays, options):
    """Start with the shared leaves on the server and a copy of the others on every client."""
    parts = [divide(weights, stays, options) for weights in initial]
    return {
        "shared": {group: shared for group, (_, shared) in enumerate(parts)},
        "personal": {i: parts[client.group][0] for i, client in enumerate(clients)},
    }


def model(state, clients, i):
    """Return the model from which client i starts: the newest shared leaves and its own."""
    return state["shared"][clients[i].group] | state["personal"][i]


def averaged(state, clients, trained, stays, options):
    """Return the state after a round in which clients have trained {client: weights}."""
    parts = {i: divide(weights, stays, options) for i, weights in trained.items()}
    sent = [(clients[i].group, weight(clients[i], options), shared) for i, (_, shared) in parts.items()]
    return {
        "shared": average(state["shared"], sent),
        "personal": state["personal"] | {i: kept for i, (kept, _) in parts.items()},
    }


def weight(client, options):
    """Return n_i, or 1 if all clients weigh the same."""
    return 1 if getattr(options, "weighting", "rows") == "uniform" else client.size


def served(state, clients, trained, stays, options):
    """Return the same after a step towards the mean (Reddi et al. 2021, arXiv:2003.00295, Algorithm 2).

    The mean's difference from the model is the gradient of its parameters; running statistics are averaged.
    The server remembers {architecture: {"count", "mu", "nu"}}, for sgd {"trace"}, from its first step on.
    """
    after = averaged(state, clients, trained, stays, options)
    if options.server_optimizer == "none":
        return after
    shared, server = dict(after["shared"]), dict(state.get("server", {}))
    for g in {clients[i].group for i in trained}:
        parameters = {name: x for name, x in state["shared"][g].items() if not nets.is_statistic(name)}
        gradients = {name: x - shared[g][name] for name, x in parameters.items()}
        steps, server[g] = SERVERS[options.server_optimizer](gradients, server.get(g), options)
        shared[g] = shared[g] | {name: x - steps[name] for name, x in parameters.items()}
    return after | {"shared": shared, "server": server}


def server_sgd(gradients, memory, options):
    """Return the step of SGD with momentum, and the velocity."""
    velocity = memory["trace"] if memory else {name: 0 * g for name, g in gradients.items()}
    velocity = {name: options.server_momentum * velocity[name] + g for name, g in gradients.items()}
    return {name: options.server_lr * v for name, v in velocity.items()}, {"trace": velocity}


def adaptive(gradients, memory, options, second, start):
    """Return Adam's step with another rule for the second moments; both moments are bias-corrected."""
    beta, beta_2 = options.server_momentum, 0.99
    at_first = {name: 0 * g + start for name, g in gradients.items()}
    memory = memory or {"count": 0, "mu": at_first, "nu": at_first}
    count = memory["count"] + 1
    mu = {name: beta * memory["mu"][name] + (1 - beta) * g for name, g in gradients.items()}
    nu = {name: second(memory["nu"][name], g**2, 1 - beta_2) for name, g in gradients.items()}

    def step(name):
        return mu[name] / (1 - beta**count) / (np.sqrt(nu[name] / (1 - beta_2**count)) + 1e-3)

    steps = {name: options.server_lr * step(name) for name in gradients}
    return steps, {"count": count, "mu": mu, "nu": nu}


def server_adam(gradients, memory, options):
    """Step as in Kingma and Ba 2015."""
    return adaptive(gradients, memory, options, lambda v, square, rate: v + rate * (square - v), 0.0)


def server_yogi(gradients, memory, options):
    """Step as Zaheer et al. 2018: the second moment moves by the square itself. Optax starts both at 1e-6."""
    return adaptive(
        gradients, memory, options, lambda v, square, rate: v - rate * np.sign(v - square) * square, 1e-6
    )


SERVERS = {"sgd": server_sgd, "adam": server_adam, "yogi": server_yogi}


def trained_jointly(state, clients, cohort, options):
    """Train all blocks at once: {client: weights}, {client: loss}."""
    trained, losses = {}, {}
    for i, draw in cohort.draws.items():
        start = model(state, clients, i)
        trained[i], losses[i] = descend(start, plain_loss(clients[i]), draw["train"], options)
    return trained, losses


def scores(state, clients, draws, options, x):
    """Score the newest shared leaves with the client's own, received and deployed."""
    newest = [nets.logits(client.net, model(state, clients, i), x) for i, client in enumerate(clients)]
    return {"received": newest, "deployed": newest}


def scores_after_tuning(state, clients, draws, options, x):
    """Score the same as received; deployed is a copy whose head, or all of it, was trained further."""
    received, deployed = [], []
    for i, client in enumerate(clients):
        newest, all_of_it = model(state, clients, i), options.ft_part == "all"
        trains = (lambda name: True) if all_of_it else nets.in_head
        loss = plain_loss(client, train=all_of_it)
        tuned, _ = descend(newest, loss, draws[i]["tune"], options, trains=trains)
        received.append(nets.logits(client.net, newest, x))
        deployed.append(nets.logits(client.net, tuned, x))
    return {"received": received, "deployed": deployed}
