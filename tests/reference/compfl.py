"""CompFL in server mode (Xu et al. 2024, FedKDD, section 3 and Algorithm 1), no part switched off.

Experts j are architectures, ordered by size; client i owns expert j_i and can run all smaller ones.
theta_j is the server's extractor of expert j, phi_ij client i's head on it.
"""

from typing import NamedTuple

import numpy as np

from reference import nets
from reference.training import average, cross_entropy, log_softmax, sgd, softmax


class Adapted(NamedTuple):
    """One expert on one client: theta_j and the new head, and what the client learns of it.

    Args:
      weights: theta_j and phi_ij.
      anchors: (classes, d), mean feature of each class on the client; 0 where it has no rows.
      accuracy: a_j.
      predictions: (n, classes), probabilities on the client's training rows.
    """

    weights: dict
    anchors: np.ndarray
    accuracy: float
    predictions: np.ndarray


def start(clients, initial):
    """The server has the extractors; every client has initial heads for all that it can run."""
    by_size = sorted(range(len(initial)), key=lambda j: sum(leaf.size for leaf in initial[j].values()))
    return {
        "experts": {j: nets.body(weights) for j, weights in enumerate(initial)},
        "heads": {
            i: {j: nets.head(initial[j]) for j in by_size[: by_size.index(client.group) + 1]}
            for i, client in enumerate(clients)
        },
        "trained": {},  # {client: its own expert as trained in the last round}
    }


def step(state, clients, cohort, options):
    """Adapt, weigh, select, update; then the server averages each expert over who trained it.

    A client's draw has "adapt", an order of rows for each expert that it can run, smallest first;
    "chosen", the place in that list of the one it trains; "train", the orders of its local epochs.
    """
    experts, heads = state["experts"], dict(state["heads"])
    net = {client.group: client.net for client in clients}
    sent, losses, trained = [], {}, {}
    for i, draw in cohort.draws.items():
        client, runnable = clients[i], list(heads[i])
        chosen, warm = runnable[draw["chosen"]], cohort.t >= options.warmup * cohort.rounds
        adapted = {
            j: adapt(client, net[j], experts[j] | heads[i][j], order, options)
            for j, order in zip(runnable, draw["adapt"], strict=True)
            if warm or j in (chosen, client.group)  # others are not downloaded
        }
        teachers = [adapted[j] for j in adapted if j != chosen]
        distil = teachers and warm
        loss = objective(
            client,
            net[chosen],
            adapted[chosen].anchors,
            soft_labels(client.y, teachers, options.tau) if distil else None,
            options,
        )
        model, losses[i] = sgd(adapted[chosen].weights, loss, draw["train"], options)
        heads[i] = heads[i] | {j: nets.head(adapted[j].weights) for j in adapted}
        heads[i][chosen] = nets.head(model)
        sent.append((chosen, client.size, nets.body(model)))
        if chosen == client.group:
            trained[i] = model
    return {"experts": average(experts, sent), "heads": heads, "trained": trained}, losses


def adapt(client, net, weights, order, options):
    """Step 1 and 2: class means, the head from them (eq. 6), and its accuracy."""
    z, _ = net(weights, client.x)
    classes = len(weights[f"{nets.HEAD}/bias"])
    anchors = np.zeros((classes, z.shape[1]))
    for c in set(client.y):
        anchors[c] = z[client.y == c].mean(0)

    if "proto" in options.head_init:
        kernel = np.zeros_like(anchors)
        for c in range(classes):
            if anchors[c].any():
                kernel[c] = anchors[c] / np.linalg.norm(anchors[c])
        prototypes = {f"{nets.HEAD}/kernel": kernel.T, f"{nets.HEAD}/bias": np.zeros(classes)}
        weights = weights | prototypes
    if "ft" in options.head_init:

        def loss(weights, rows):
            scores, back = nets.classify(weights, z[rows])
            value, dscores = cross_entropy(scores, client.y[rows])
            return value, back(dscores)[1]

        weights, _ = sgd(weights, loss, [order], options, lr=options.head_lr, trains=nets.in_head)

    x, y = client.x, client.y
    if options.accuracy_on == "validation":
        x, y = client.x_validation, client.y_validation
    accuracy = np.mean(nets.logits(net, weights, x).argmax(1) == y)
    return Adapted(weights, anchors, accuracy, softmax(nets.classify(weights, z)[0]))


def soft_labels(y, teachers, tau):
    """Targets of eq. 3, (n, classes): half the truth, half the teachers weighted by eq. 7."""
    accuracies = np.array([teacher.accuracy for teacher in teachers])
    scaled = np.ones(len(teachers))
    if np.ptp(accuracies) > 0:
        scaled = (accuracies - accuracies.min()) / np.ptp(accuracies)
    ensemble = sum(
        s * teacher.predictions for s, teacher in zip(softmax(scaled / tau), teachers, strict=True)
    )
    truth = np.eye(ensemble.shape[1])[y]
    return truth / 2 + ensemble / 2


def objective(client, net, anchors, targets, options):
    """Eq. 4: cross-entropy + lam * distance to the anchors (eq. 2) + mu * distillation (eq. 3)."""

    def loss(weights, rows):
        y = client.y[rows]
        z, through_body = net(weights, client.x[rows])
        scores, through_head = nets.classify(weights, z)
        value, dscores = cross_entropy(scores, y)
        if targets is not None:
            divergence, gradient = distillation(scores, targets[rows], options.kd_direction)
            value += options.mu * divergence
            dscores = dscores + options.mu * gradient
        dz, of_head = through_head(dscores)
        away = z - anchors[y]
        scale = len(y) * (z.shape[1] if options.anchor_reduction == "mean" else 1)
        value += options.lam * (away**2).sum() / scale
        dz = dz + options.lam * 2 * away / scale
        return value, through_body(dz)[1] | of_head

    return loss


def distillation(scores, targets, direction):
    """Mean KL(t || p) or, reversed, KL(p || t) with p = softmax(scores); and its gradient."""
    log_p, log_t = log_softmax(scores), np.log(targets)
    p = np.exp(log_p)
    if direction == "forward":
        divergence, gradient = (targets * (log_t - log_p)).sum(1), p - targets
    else:
        divergence = (p * (log_p - log_t)).sum(1)
        gradient = p * (log_p - log_t - divergence[:, None])
    return divergence.mean(), gradient / len(scores)


def scores(state, clients, draws, options, x):
    """Received: the newest own expert, adapted. Deployed: the trained one right after training."""
    received, deployed = [], []
    for i, client in enumerate(clients):
        newest = state["experts"][client.group] | state["heads"][i][client.group]
        newest = adapt(client, client.net, newest, draws[i]["adapt"], options).weights
        received.append(nets.logits(client.net, newest, x))
        own = state["trained"].get(i, newest)
        deployed.append(nets.logits(client.net, own, x))
    return {"received": received, "deployed": deployed}
