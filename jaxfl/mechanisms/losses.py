"""Losses that several methods minimise, as `jaxfl.core.training.descend` takes them."""

from collections.abc import Callable, Collection

import jax.numpy as jnp
import optax

from jaxfl.core.training import forward, mean, task_loss
from jaxfl.models.model import Model, Weights


def proximal(model: Model, towards: Weights, mu, blocks: Collection[str] | None = None) -> Callable:
    """Return the loss CE(w) + mu/2 ||w - towards||^2, over the parameters (FedProx, Ditto).

    Args:
      model: the client's model.
      towards: weights towards which the model is pulled.
      mu: strength of the pull, ().
      blocks: names of the blocks that train; by default all.
    """
    plain = task_loss(model, blocks)

    def loss(w, batch, key):
        value, stats = plain(w, batch, key)
        away = optax.tree.sub(w.params, towards.params)
        return value + mu / 2 * optax.tree.norm(away, squared=True), stats

    return loss


def distillation(model: Model, teacher, temperature, weight) -> Callable:
    """Return the loss weight * KL(teacher || softmax(f(x) / T)), the mean over a mini-batch.

    A task without classes has its own distance in place of KL, see `jaxfl.tasks.Task.apart`.

    Args:
      model: the student.
      teacher: (R, outputs), predictions (`Task.soft`) at the positions of the examples.
      temperature: T, ().
      weight: factor on the loss, ().
    """

    def loss(w, batch, key):
        logits, stats = forward(model, w, batch, key)
        away = model.task.apart(logits, teacher[batch.position], temperature)
        return weight * mean(away, batch), stats

    return loss


def absolute_error(model: Model, target) -> Callable:
    """Return the loss |f(x) - target|, the mean over outputs and a mini-batch.

    Args:
      model: the student.
      target: (R, outputs), logits at the positions of the examples.
    """

    def loss(w, batch, key):
        logits, stats = forward(model, w, batch, key)
        away = jnp.abs(logits - target[batch.position])
        return mean(away.mean(tuple(range(1, away.ndim))), batch), stats

    return loss
