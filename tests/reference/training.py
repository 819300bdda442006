"""Clients, local SGD and the server's average: what the references share."""

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
    """

    group: int
    net: Callable
    x: np.ndarray
    y: np.ndarray
    x_validation: np.ndarray
    y_validation: np.ndarray

    @property
    def size(self):
        """n, training images."""
        return len(self.y)


class Cohort(NamedTuple):
    """A round.

    Args:
      t: its number, from 0.
      rounds: how many the run has.
      draws: {client: what it draws}, for the clients that take part.
      public: public images (R, H, W, C), normalised, of a method that takes some.
    """

    t: int
    rounds: int
    draws: dict
    public: np.ndarray | None = None


def sgd(weights, loss, orders, options, lr=None, batch_size=None, trains=lambda name: True):
    """Mini-batch SGD with momentum and weight decay, the velocity starting at 0.

        v <- momentum v + (gradient + weight_decay w);  w <- w - lr v

    Args:
      weights: where to start.
      loss: ``(weights, rows) -> (value, gradients)``, the mean over some rows.
      orders: per epoch, a permutation of the rows, cut into batches; the last may be smaller.
      options: lr, momentum, weight_decay and batch_size.
      lr: in place of ``options.lr``.
      batch_size: in place of ``options.batch_size``.
      trains: which leaves move, by name.

    Returns:
      The trained weights, and the mean loss over all batches.
    """
    lr = options.lr if lr is None else lr
    batch_size = options.batch_size if batch_size is None else batch_size
    weights = dict(weights)
    velocity = {name: np.zeros_like(w) for name, w in weights.items() if trains(name)}
    values = []
    for order in orders:
        for first in range(0, len(order), batch_size):
            value, gradients = loss(weights, order[first : first + batch_size])
            values.append(value)
            for name, v in velocity.items():
                decayed = gradients[name] + options.weight_decay * weights[name]
                velocity[name] = options.momentum * v + decayed
                weights[name] = weights[name] - lr * velocity[name]
    return weights, np.mean(values)


def plain_loss(client):
    """The client's cross-entropy, as `sgd` takes it."""

    def loss(weights, rows):
        z, through_body = client.net(weights, client.x[rows])
        scores, through_head = nets.classify(weights, z)
        value, dscores = cross_entropy(scores, client.y[rows])
        dz, of_head = through_head(dscores)
        return value, through_body(dz)[1] | of_head

    return loss


def cross_entropy(scores, y):
    """Mean softmax cross-entropy of logits (B, classes), and its gradient with respect to them."""
    rows = np.arange(len(y))
    gradient = softmax(scores)
    value = -log_softmax(scores)[rows, y].mean()
    gradient[rows, y] -= 1
    return value, gradient / len(y)


def softmax(scores):
    """Probabilities over the last axis."""
    return np.exp(log_softmax(scores))


def log_softmax(scores):
    """Their logarithms."""
    scores = scores - scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def average(before, sent):
    """The server's sum_i n_i w_i / sum_i n_i, for every architecture on its own.

    Args:
      before: {architecture: weights}; they stay where nobody sent any.
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
