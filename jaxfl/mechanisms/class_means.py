"""Class means: what a client's images of a class look like to an extractor, and heads made of them."""

import jax
import jax.numpy as jnp

from jaxfl.core.examples import sweep
from jaxfl.data.federation import Client, Federation
from jaxfl.models.model import Model, Weights


def features(model: Model, weights: Weights, rows, size, federation: Federation):
    """Z = f(x) of some images (m,) in evaluation mode: (m, d), 0 from `size` on."""
    return sweep(
        lambda x: model.body.apply(weights.params, weights.stats, x, train=False)[0], rows, size, federation
    )


def outputs(client: Client, federation: Federation):
    """The outputs (m,) int32 that the labels of a client's training rows mean."""
    return client.relabel[federation.labels[client.rows]]


def class_means(z, y, size, classes: int):
    """Mean features of each class.

    Args:
      z: (m, d) features, padded.
      y: (m,) int32 outputs.
      size: () int32, how many are real.
      classes: C.

    Returns:
      (C, d), 0 for a class without examples; and (C,), how many it has.
    """
    real = jnp.arange(len(y), dtype=jnp.int32) < size
    member = jax.nn.one_hot(jnp.where(real, y, -1), classes, dtype=z.dtype)  # (m, C)
    count = member.sum(0)
    return (member.T @ z) / jnp.maximum(count, 1)[:, None], count


def prototype_head(means):
    """A linear head {"kernel": (d, C), "bias": (C,)} whose rows are class means (C, d) of length 1."""
    length = jnp.linalg.norm(means, axis=1, keepdims=True)
    kernel = (means / jnp.where(length > 0, length, 1)).T
    return {"kernel": kernel, "bias": jnp.zeros(len(means), means.dtype)}
