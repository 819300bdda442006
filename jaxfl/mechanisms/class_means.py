"""Class means: the mean features of each class, on one client and over all clients.

z = f_i(x) are the d features that client i's classifier receives; n_ic is the number of its training rows of
class c. If d is the same for all architectures, their means can be averaged:

    z_ic = mean of f_i(x) over client i's rows of class c, in evaluation mode
    g_c  = sum_i n_ic z_ic / sum_i n_ic                             over clients of all architectures
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import tree
from jaxfl.core.client_map import per_group
from jaxfl.core.examples import sweep
from jaxfl.data.federation import Client, Federation, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.mechanisms import wire
from jaxfl.mechanisms.public_images import require_unified
from jaxfl.models.model import Model, Weights
from jaxfl.tasks import require_classes


class ClassMeans(NamedTuple):
    """Class means, and the number of rows of each."""

    z: jax.Array  # (C, d), mean features; 0 for a class without rows
    n: jax.Array  # (C,) float, number of rows

    @property
    def known(self) -> jax.Array:
        """(C,) bool, the classes that have a mean."""
        return self.n > 0


def require(federation: Federation) -> None:
    """Refuse a federation whose clients cannot compare class means.

    Raises:
      JaxflError: if labels are not classes, models have features of different sizes, each client numbers
        its classes differently, or messages are to be private.
    """
    require_classes(federation.task, "A mean of each class")
    wire.require_no_noise(federation, "class means")
    for model in federation.models:
        require_vectors(model)
    shapes = {model.name: model.head.shape for model in federation.models}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} has {'x'.join(map(str, shape))}" for name, shape in shapes.items())
        least = min(shape[-1] for shape in shapes.values())
        raise JaxflError(
            "The method compares mean features of classes and needs the same number from all models: "
            f"{found}; give each of --models the same number, such as features={least} (networks of your own "
            "are built with as many as you write)."
        )
    require_unified(federation, "class means")


def require_vectors(model: Model) -> None:
    """Refuse a head that takes maps: their mean is no feature of a class."""
    if len(shape := model.head.shape) > 1:
        raise JaxflError(
            f"The method takes mean features of classes, but the last block of {model.name} is given maps of "
            f"{'x'.join(map(str, shape))}; flatten or average them in a block before it."
        )


def unknown(federation: Federation) -> ClassMeans:
    """Return class means in which no class has a mean yet."""
    model, dtype = federation.models[0], federation.mean.dtype
    return ClassMeans(jnp.zeros((model.classes, *model.head.shape), dtype), jnp.zeros(model.classes, dtype))


def features(model: Model, weights: Weights, rows, size, federation: Federation):
    """Return the features z = f(x) of images (m,) in evaluation mode: (m, d), 0 from `size` on."""

    def of_batch(x):
        return model.body.apply(weights.params, weights.stats, x, train=False)[0]

    z = sweep(of_batch, rows, size, federation)
    real = jnp.arange(len(rows), dtype=jnp.int32) < size
    return jnp.where(real[:, None], z, 0)


def class_means(z, y, size, classes: int) -> ClassMeans:
    """Return the mean features of each class.

    Args:
      z: (m, d) features, padded.
      y: (m,) int32 outputs.
      size: () int32, number of real rows.
      classes: number of classes, C.
    """
    real = jnp.arange(len(y), dtype=jnp.int32) < size
    member = jax.nn.one_hot(jnp.where(real, y, -1), classes, dtype=z.dtype)  # (m, C)
    count = member.sum(0)
    return ClassMeans(jnp.matmul(member.T, z, precision="highest") / jnp.maximum(count, 1)[:, None], count)


def of_client(key, weights: Weights, client: Client) -> ClassMeans:
    """Return z_ic of a client's training rows as they arrive over the wire; an absent client has none.

    On the wire each mean is a message of its own, and numbers of rows stay.
    """
    z = features(client.model, weights, client.rows, client.size, client.federation)
    outputs = client.federation.outputs(client, client.rows)
    means = class_means(z, outputs, client.size, client.model.classes)
    if client.federation.wire is None:
        return means
    keys = jax.random.split(key, len(means.z))
    return means._replace(z=jax.vmap(lambda key, z: wire.sent(key, client, z))(keys, means.z))


def over_clients(means: PerGroup, before: ClassMeans, uniform: bool) -> ClassMeans:
    """Return g_c over the clients of all groups, whose means are per group (k_g, ...).

    Classes that no client has keep the mean `before`. If `uniform`, all clients that have a class weigh the
    same, not by their rows of it.
    """

    def sums(of_group):
        weight = of_group.known.astype(of_group.n.dtype) if uniform else of_group.n
        z = jnp.einsum("kc,kcd->cd", weight, of_group.z, precision="highest")
        return ClassMeans(z, weight.sum(0))

    z, weight = (tree.total(parts) for parts in zip(*per_group(sums, means), strict=True))
    found = weight > 0
    mean = z / jnp.where(found, weight, 1)[:, None]
    return ClassMeans(jnp.where(found[:, None], mean, before.z), jnp.where(found, weight, before.n))


def up(federation: Federation, means: PerGroup, beside: int) -> PerGroup:
    """Count what clients send up, (k_g,) int32 per group: z_ic (k_g, C, d), and `beside` scalars for each."""

    def of_group(m):
        return m.known.sum(1, dtype=jnp.int32) * (wire.units(federation, m.z[0, 0]) + beside)

    return per_group(of_group, means)


def linear(model: Model) -> bool:
    """Return whether a model's head is {"kernel": (d, C), "bias": (C,)}, as class means make one."""
    (name,) = model.head.names
    features, classes = model.head.shape[-1], model.classes
    leaves = model.form.params[name]
    return len(model.head.shape) == 1 and jax.tree.map(lambda leaf: leaf.shape, leaves) == {
        "kernel": (features, classes),
        "bias": (classes,),
    }


def require_classes_last(model: Model, method: str) -> None:
    """Refuse a head unless the classes are the last axis of its weights, as in a linear layer of Flax.

    If it has as many features as classes, only the name ``kernel`` tells which axis is which.
    """
    (head,) = model.head.names

    def fits(path, leaf) -> bool:
        square = leaf.ndim > 1 and leaf.shape[-2] == leaf.shape[-1]
        return leaf.shape[-1:] == (model.classes,) and (not square or path[-1] == "kernel")

    if not all(fits(*of_leaf) for of_leaf in tree.by_path(model.form.params[head]).items()):
        raise JaxflError(
            f"{method} uses the classes of the classifier, but in the last block {head!r} of {model.name} "
            "the last axis of a leaf is not the classes; end it with a linear layer "
            "(jaxfl.models.blocks.Linear, or Flax's)."
        )


def prototype_head(means):
    """Return a linear head {"kernel": (d, C), "bias": (C,)} of class means (C, d) scaled to length 1."""
    length = jnp.linalg.norm(means, axis=1, keepdims=True)
    kernel = (means / jnp.where(length > 0, length, 1)).T
    return {"kernel": kernel, "bias": jnp.zeros(len(means), means.dtype)}
