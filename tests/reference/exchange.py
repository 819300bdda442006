"""Methods whose clients exchange predictions on the round's public images (`cohort.public`).

The state is {"own": {client: weights}, "matrix": (N, N)}; C[n, m] is the weight of client m in the teacher
of n.
"""

import numpy as np
from scipy.special import xlogy

from reference import nets
from reference.training import descend, log_softmax, plain_loss, softmax


def soft_predictions(logits, options):
    """Return softmax(logits / T), (R, classes), which most methods exchange."""
    return softmax(logits / options.temperature)


def exchanged(state, clients, cohort, options, weigh, say=soft_predictions, distance=None):
    """Train alone, exchange predictions, and learn from the teacher.

    Args:
      state: before the round.
      clients: see the package.
      cohort: of the round.
      options: of the method.
      weigh: ``{client: s} -> C`` (N, N); only the entries of clients that are present count.
      say: ``(logits, options) -> s``.
      distance: ``(logits, t, options) -> (value, gradient)``, means over images; by default KL.

    Returns:
      {client: weights} of all, {client: loss}, {client: s}, C, {client: its teacher's scores of `cohort.x`}.
    """
    models, losses, present = dict(state["own"]), {}, list(cohort.draws)
    for i, draw in cohort.draws.items():
        models[i], losses[i] = descend(models[i], plain_loss(clients[i]), draw["train"], options)
    s = {i: say(nets.logits(clients[i].net, models[i], cohort.public), options) for i in present}
    matrix = weigh(s)
    said = {i: say(nets.logits(clients[i].net, models[i], cohort.x), options) for i in present}
    teachers = {i: mixture(matrix, i, said) for i in present}
    for i, draw in cohort.draws.items():
        loss = taught(clients[i], cohort.public, mixture(matrix, i, s), distance or divergence, options)
        orders = draw["distill"]
        models[i], _ = descend(
            models[i], loss, orders, options, lr=options.distill_lr, batch_size=options.public_batch
        )
    return models, losses, s, matrix, teachers


def mixture(matrix, n, known):
    """Return client n's teacher: the arrays of present clients, {client: array}, weighted by its row of C.

    If that row has become 0, a client is its own teacher.
    """
    total = sum(matrix[n, m] for m in known)
    if total == 0:
        return known[n]
    return sum(matrix[n, m] / total * of_client for m, of_client in known.items())


def taught(client, x, teacher, distance, options):
    """Return the loss of learning from a teacher, as `descend` takes it."""

    def loss(weights, rows):
        z, through_body = client.net(weights, x[rows], True)
        logits, through_head = nets.classify(weights, z)
        value, dlogits = distance(logits, teacher[rows], options)
        dz, of_head = through_head(dlogits)
        return value, through_body(dz)[1] | of_head

    return loss


def divergence(logits, t, options):
    """Return weighted KL(t || softmax(logits / T)) and its gradient."""
    log_p = log_softmax(logits / options.temperature)
    value = options.kl_weight * (xlogy(t, t) - t * log_p).sum(1).mean()
    return value, options.kl_weight * (np.exp(log_p) - t) / options.temperature / len(t)


def absolute_error(logits, t, options):
    """Return |logits - t|, averaged over images and classes, and its gradient."""
    return np.abs(logits - t).mean(), np.sign(logits - t) / t.size
