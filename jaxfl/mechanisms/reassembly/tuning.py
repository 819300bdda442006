"""Training data of assembled networks: public images with their labels, or two random views of each."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.data.colour import grey, jittered, with_hue
from jaxfl.data.federation import Federation
from jaxfl.mechanisms.reassembly.networks import on_one_device
from jaxfl.mechanisms.reassembly.parts import counted
from jaxfl.mechanisms.reassembly.reassembly_options import Reassembly
from jaxfl.tasks import Task


class Images(NamedTuple):
    """The public images D_p.

    Args:
      x: (P, H, W, C), normalised.
      y: (P,) int32.
      mean, std: (1, 1, 1, C), by which they were normalised.
      low, top: (), their least value, or 0 if none is negative, and their largest one.
    """

    x: np.ndarray
    y: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    low: np.ndarray
    top: np.ndarray


def images_of(federation: Federation) -> Images:
    """Return the federation's public images."""
    rows = np.asarray(federation.public)
    arrays = federation.inputs(rows), federation.labels[rows], federation.mean, federation.std
    seen = federation.seen(rows).astype(federation.mean.dtype)
    ends = jnp.minimum(seen.min(), 0), seen.max()
    return Images(*(np.asarray(on_one_device(array)) for array in (*arrays, *ends)))


@functools.cache
def supervised(task: Task) -> Callable:
    """Return the task's mean loss ``(outputs (B, o), y) -> ()``, such as cross-entropy (pFedClub, eq. 2)."""
    return jax.jit(lambda outputs, y: task.losses(outputs, y).mean())


@jax.jit
def contrast(logits, pairs_and_tau):
    """Return the normalised temperature-scaled cross-entropy of logits (2B, C) (pFedClub, eq. 3).

    Args:
      logits: logits of two views of each image.
      pairs_and_tau: (2B,) int32, where two rows with the same number are of one image; (), the temperature.
    """
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        return optax.losses.ntxent(logits, *pairs_and_tau)


class Draw(NamedTuple):
    """The random choices of a batch."""

    places: np.ndarray  # (B,), places of its images
    views: int  # seed of their views; 0 if labels are used


def draws(total: int, options: Reassembly, rng: np.random.Generator) -> list[Draw]:
    """Draw the batches of all epochs over `total` images: `server_batch` each, or all if there are fewer."""
    batch, found = min(options.server_batch, total), []
    for _ in range(options.server_epochs):
        # The last batch is filled up from the start: all have one shape.
        order = np.resize(rng.permutation(total), -(-total // batch) * batch)
        for places in order.reshape(-1, batch):
            found.append(Draw(places, 0 if options.labelled else int(rng.integers(2**31))))
    return found


def objective(
    task: Task, images: Images, options: Reassembly, drawn: Sequence[Draw]
) -> tuple[Callable, Iterator]:
    """Return a loss, and the batches (x, target) that `parts.train` takes.

    They are of P images, with labels perhaps after some parts of a network, as `draws` has drawn them.
    """
    if options.labelled:
        return supervised(task), ((images.x[places], images.y[places]) for places, _ in drawn)
    return contrast, (_pairs_of_views(images, options, *draw) for draw in drawn)


@jax.jit
def two_views(key, images: Images):
    """Draw two views of each image (B, H, W, C), one set after the other: (2B, H, W, C), normalised."""
    values = jnp.clip((images.x * images.std + images.mean - images.low) / (images.top - images.low), 0, 1)
    views = jnp.concatenate([view(one, values) for one in jax.random.split(key)])
    return (views * (images.top - images.low) + images.low - images.mean) / images.std


def _pairs_of_views(images: Images, options: Reassembly, places: np.ndarray, seed: int) -> tuple:
    views = counted(two_views, jax.random.key(seed), images._replace(x=images.x[places]))
    return views, (np.tile(np.arange(len(places), dtype=np.int32), 2), options.tau)


def view(key, images: jax.Array) -> jax.Array:
    """Draw a view of each image (B, H, W, C) with values in [0, 1]; only three channels have a hue.

    Chen et al. 2020, "A simple framework for contrastive learning of visual representations" (SimCLR),
    arXiv:2002.05709, appendix A, as the authors of pFedClub use it for small images: horizontal flip
    (probability 0.5), a crop of 80 to 100 % of the area, colour jitter of strength 0.5 (0.8), grey (0.2). The
    jitter changes brightness, contrast and saturation by factors between 1 - 0.8 / 2 and 1 + 0.8 / 2, and the
    hue by up to 0.2 / 2 of its circle. Crops are square and the jitter's changes have one order; in the
    authors' code both vary.
    """
    keys = jax.random.split(key, len(images))
    return jax.vmap(_view)(keys, images)


def _view(key, image):
    flip, crop, hue, light, contrast, saturation, jitter, decolour = jax.random.split(key, 8)
    image = jnp.where(jax.random.bernoulli(flip), image[:, ::-1], image)
    image = _cropped(crop, image)

    def factor(key):
        return jax.random.uniform(key, (), image.dtype, 0.6, 1.4)

    other = jnp.clip(jittered(image, factor(light), factor(contrast), factor(saturation)), 0, 1)
    if image.shape[-1] == 3:
        other = with_hue(other, jax.random.uniform(hue, (), image.dtype, -0.1, 0.1))
    image = jnp.where(jax.random.bernoulli(jitter, 0.8), other, image)
    return jnp.where(jax.random.bernoulli(decolour, 0.2), grey(image), image)


def _cropped(key, image):
    """Crop a square share of 80 to 100 % of the area, and resize it to the whole."""
    area, place = jax.random.split(key)
    height, width, channels = image.shape
    side = jnp.sqrt(jax.random.uniform(area, (), image.dtype, 0.8, 1.0))
    corner = (
        jax.random.uniform(place, (2,), image.dtype) * (1 - side) * jnp.asarray((height, width), image.dtype)
    )
    scale = jnp.stack([1 / side, 1 / side])
    return jax.image.scale_and_translate(image, image.shape, (0, 1), scale, -corner / side, "linear")
