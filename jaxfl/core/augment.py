"""Random changes of training images, drawn anew for every mini-batch.

A transform is ``(key, images (B, H, W, C)) -> images`` of the same shape, on raw values before normalisation:
black is 0. Transforms of colours return floats and do not clip them, because the largest value of a data set
is not known.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxfl.data.colour import jittered, with_hue
from jaxfl.data.rotation import turned


def crop(key, images):
    """Shift every image by up to an eighth of its sides (4 of 32 pixels) each way, padded with zeros.

    The limit is at least one pixel. Along a side of a single pixel, as in windows of a signal, nothing moves.
    """
    margins = [max(1, side // 8) if side > 1 else 0 for side in images.shape[1:3]]
    padded = jnp.pad(images, ((0, 0), *((margin, margin) for margin in margins), (0, 0)))
    places = jnp.array([2 * margin + 1 for margin in margins], jnp.int32)
    corners = jax.random.randint(key, (len(images), 2), 0, places[None], jnp.int32)

    def cut(image, corner):
        return jax.lax.dynamic_slice(image, (corner[0], corner[1], jnp.int32(0)), images.shape[1:])

    return jax.vmap(cut)(padded, corners)


def flip(key, images):
    """Mirror every image from left to right with probability 1/2."""
    mirrored = jax.random.bernoulli(key, shape=(len(images), 1, 1, 1))
    return jnp.where(mirrored, images[:, :, ::-1], images)


def rotate(key, images):
    """Rotate every image about its centre by up to 15 degrees each way, padded with zeros."""
    dtype = jnp.result_type(float)
    angles = jax.random.uniform(key, (len(images),), dtype, -math.pi / 12, math.pi / 12)
    return jax.vmap(turned)(images.astype(dtype), angles)


def cutout(key, images):
    """Set a square of half the height (16 of 32 pixels) to zero in every image, its centre anywhere."""

    def near(key, side):
        centre = side * jax.random.uniform(key)
        return jnp.abs(jnp.arange(side, dtype=centre.dtype) + 0.5 - centre) < images.shape[1] / 4

    def cut(key, image):
        rows, columns = (near(*of) for of in zip(jax.random.split(key), image.shape[:2], strict=True))
        hole = rows[:, None, None] & columns[None, :, None]
        return jnp.where(hole, jnp.zeros((), image.dtype), image)

    return jax.vmap(cut)(jax.random.split(key, len(images)), images)


def colour(key, images):
    """Multiply brightness, contrast and saturation of every image by 0.6 to 1.4 each, and move its hue.

    The hue moves by up to a tenth of its circle. Grey images have neither saturation nor hue.
    """
    images = images.astype(jnp.result_type(float))

    def change(key, image):
        factors, turn = jax.random.split(key)
        image = jittered(image, *jax.random.uniform(factors, (3,), image.dtype, 0.6, 1.4))
        if image.shape[-1] != 3:
            return image
        return with_hue(image, jax.random.uniform(turn, (), image.dtype, -0.1, 0.1))

    return jax.vmap(change)(jax.random.split(key, len(images)), images)


TRANSFORMS = {"crop": crop, "flip": flip, "rotate": rotate, "cutout": cutout, "colour": colour}


def augmentation(names: Sequence[str]) -> Callable:
    """Return several transforms of `TRANSFORMS` as one, applied in order, each with its own key."""

    def transform(key, images):
        for number, name in enumerate(names):
            images = TRANSFORMS[name](jax.random.fold_in(key, number), images)
        return images

    return transform
