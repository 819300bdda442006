"""Random changes of training images, drawn anew for every mini-batch.

A transform is ``(key, images (B, H, W, C)) -> images`` of the same shape, on raw values, before they are
normalised.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


def crop(key, images):
    """Every image moved by up to an eighth of its height (4 of 32 pixels) each way, zeros moving in."""
    margin = max(1, images.shape[1] // 8)
    padded = jnp.pad(images, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    corners = jax.random.randint(key, (len(images), 2), 0, 2 * margin + 1, jnp.int32)

    def cut(image, corner):
        return jax.lax.dynamic_slice(image, (corner[0], corner[1], jnp.int32(0)), images.shape[1:])

    return jax.vmap(cut)(padded, corners)


def flip(key, images):
    """Every image mirrored from left to right with probability 1/2."""
    mirrored = jax.random.bernoulli(key, shape=(len(images), 1, 1, 1))
    return jnp.where(mirrored, images[:, :, ::-1], images)


TRANSFORMS = {"crop": crop, "flip": flip}


def augmentation(names: Sequence[str]) -> Callable:
    """Several transforms of `TRANSFORMS`, one after the other, each with a key of its own."""

    def transform(key, images):
        for number, name in enumerate(names):
            images = TRANSFORMS[name](jax.random.fold_in(key, number), images)
        return images

    return transform
