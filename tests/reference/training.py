"""Clients, local training and the server's average, which the references share."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from reference import nets


class Client(NamedTuple):
    """One client.

    Args:
      group: number of its architecture.
      net: the features of that architecture, one of `reference.nets`.
      x, y: training images (n, H, W, C), normalised, and their outputs (n,).
      x_validation, y_validation: the same for validation.
      x_public, y_public: the images that all clients see, and their labels in the client's numbering.
    """

    group: int
    net: Callable
    x: np.ndarray
    y: np.ndarray
    x_validation: np.ndarray
    y_validation: np.ndarray
    x_public: np.ndarray
    y_public: np.ndarray

    @property
    def size(self):
        """Return the number of training images, n."""
        return len(self.y)


class Cohort(NamedTuple):
    """A round.

    Args:
      t: its number, from 0.
      rounds: number of rounds of the run.
      draws: {client: what it draws}, for the clients that take part.
      public: public images (R, H, W, C), normalised, for a method that uses some.
      server: what the server draws.
      x: images (n, H, W, C), normalised, of which teachers' scores are compared.
    """

    t: int
    rounds: int
    draws: dict
    public: np.ndarray | None = None
    server: object = None
    x: np.ndarray | None = None


def descend(
    weights,
    loss,
    orders,
    options,
    lr=None,
    batch_size=None,
    optimizer=None,
    trains=lambda name: True,
):
    """Train in mini-batches; the optimiser's memory starts at 0.

    Running statistics are not descended: a loss returns their new values among the gradients. Batches of
    fewer rows than the blocks that train need are left out.

    Args:
      weights: where to start.
      loss: ``(weights, rows) -> (value, gradients)``, the mean over some rows.
      orders: per epoch, a permutation of the rows, cut into batches; the last may be smaller.
      options: optimizer, lr, momentum, weight_decay, clip_norm and batch_size.
      lr: in place of ``options.lr``; a number, or a function of the number of steps taken so far.
      batch_size: in place of ``options.batch_size``.
      optimizer: in place of ``options.optimizer``.
      trains: ``name -> whether the leaf is trained``.

    Returns:
      The trained weights, and the mean loss over all batches; 0 if there was none.
    """
    lr = options.lr if lr is None else lr
    batch_size = options.batch_size if batch_size is None else batch_size
    least = nets.least_rows(filter(trains, weights))
    moved = [name for name in weights if trains(name) and not nets.is_statistic(name)]
    update = OPTIMIZERS[optimizer or options.optimizer](options)
    weights, memory, values = dict(weights), {name: (0.0, 0.0) for name in moved}, []
    for order in orders:
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            if len(rows) < least:
                continue
            value, gradients = loss(weights, rows)
            values.append(value)
            weights |= {name: new for name, new in gradients.items() if nets.is_statistic(name)}
            gradients = clipped({name: gradients[name] for name in moved}, options.clip_norm)
            for name in moved:
                step, memory[name] = update(weights[name], gradients[name], memory[name], len(values))
                rate = lr(len(values) - 1) if callable(lr) else lr
                weights[name] = weights[name] - rate * step
    return weights, np.mean(values) if values else 0.0


def clipped(gradients, greatest):
    """Scale gradients to a norm, over all leaves together, of at most `greatest`; None is no bound."""
    norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
    if greatest is None or norm < greatest:
        return gradients
    return {name: gradient / norm * greatest for name, gradient in gradients.items()}


def sgd(options):
    """Step v <- momentum v + (gradient + weight_decay w)."""

    def update(w, gradient, memory, count):
        velocity = options.momentum * memory[0] + gradient + options.weight_decay * w
        return velocity, (velocity, 0.0)

    return update


def adam(options):
    """Step by Kingma and Ba 2015, Algorithm 1, along gradient + weight_decay w."""

    def update(w, gradient, memory, count):
        return moments(gradient + options.weight_decay * w, memory, count)

    return update


def adamw(options):
    """Step by Loshchilov and Hutter 2019, Algorithm 2: Adam's step + weight_decay w."""

    def update(w, gradient, memory, count):
        step, memory = moments(gradient, memory, count)
        return step + options.weight_decay * w, memory

    return update


def moments(gradient, memory, count):
    """Return Adam's step number `count`, and its new moments."""
    first = 0.9 * memory[0] + 0.1 * gradient
    second = 0.999 * memory[1] + 0.001 * gradient**2
    step = first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.999**count)) + 1e-8)
    return step, (first, second)


def undecayed_adam(options):
    """Step by Adam without weight decay, as servers do."""
    return lambda w, gradient, memory, count: moments(gradient, memory, count)


OPTIMIZERS = {"sgd": sgd, "adam": adam, "adamw": adamw, "undecayed adam": undecayed_adam}


def plain_loss(client, train=True):
    """Return the client's loss, as `descend` takes it; the extractor may be in evaluation mode."""

    def loss(weights, rows):
        z, through_body = client.net(weights, client.x[rows], train)
        scores, through_head = nets.classify(weights, z)
        loss_of = squared_error if client.y.dtype.kind == "f" else cross_entropy
        value, dscores = loss_of(scores, client.y[rows])
        dz, of_head = through_head(dscores)
        return value, through_body(dz)[1] | of_head

    return loss


def squared_error(scores, y):
    """Return the mean squared error of predictions (B, targets), and its gradient with respect to them."""
    return np.square(scores - y).mean(), 2 * (scores - y) / y.size


def cross_entropy(scores, y):
    """Return mean softmax cross-entropy of logits (B, classes), and its gradient with respect to them."""
    rows = np.arange(len(y))
    gradient = softmax(scores)
    value = -log_softmax(scores)[rows, y].mean()
    gradient[rows, y] -= 1
    return value, gradient / len(y)


def softmax(scores):
    """Return probabilities over the last axis."""
    return np.exp(log_softmax(scores))


def log_softmax(scores):
    """Return the logarithms of these probabilities."""
    scores = scores - scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def average(before, sent):
    """Return the server's sum_i n_i w_i / sum_i n_i, for every architecture separately.

    Args:
      before: {architecture: weights}; they stay where no client sent any.
      sent: list of (architecture, n_i, weights).
    """
    after = {}
    for architecture, old in before.items():
        mine = [(n, weights) for receiver, n, weights in sent if receiver == architecture]
        total = sum(n for n, _ in mine)
        after[architecture] = {
            name: sum(n / total * weights[name] for n, weights in mine) if mine else old[name] for name in old
        }
    return after
