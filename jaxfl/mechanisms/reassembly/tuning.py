"""Training data of assembled networks: public images with their labels, or two views of each."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.data.federation import Federation
from jaxfl.mechanisms.reassembly.networks import on_one_device
from jaxfl.mechanisms.reassembly.parts import counted
from jaxfl.mechanisms.reassembly.reassembly_options import Reassembly
from jaxfl.mechanisms.reassembly.views import view
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
