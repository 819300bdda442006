"""Rotation of images about their centre."""

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates


def turned(image: jax.Array, angle) -> jax.Array:
    """Rotate an image (H, W, C) of floats by () radians: bilinear, and zeros move in."""
    height, width = image.shape[:2]
    y, x = (jnp.arange(side, dtype=image.dtype) - (side - 1) / 2 for side in (height, width))
    y, x = jnp.meshgrid(y, x, indexing="ij")
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    places = [cosine * y + sine * x + (height - 1) / 2, cosine * x - sine * y + (width - 1) / 2]
    return jax.vmap(lambda channel: map_coordinates(channel, places, order=1), -1, -1)(image)
