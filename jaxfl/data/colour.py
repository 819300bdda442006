"""Colours of images whose last axis is the channels."""

import jax
import jax.numpy as jnp
import numpy as np

LUMA = np.array([0.299, 0.587, 0.114])  # of red, green and blue in grey (ITU-R BT.601)


def grey(images):
    """Turn (..., C) into (..., 1): the luma of red, green and blue, or the mean of any other channels."""
    if images.shape[-1] != len(LUMA):
        return images.mean(-1, keepdims=True)
    return (images @ LUMA.astype(images.dtype))[..., None]


def jittered(image: jax.Array, light, contrast, saturation) -> jax.Array:
    """Change an image (H, W, C) in brightness, contrast and saturation: () factors of each, 1 for none."""
    bright = image * light
    contrasted = _from(grey(bright).mean(), bright, contrast)
    return _from(grey(contrasted), contrasted, saturation)


def _from(other, image, factor):
    return other + factor * (image - other)


def with_hue(images: jax.Array, turn) -> jax.Array:
    """Move the hue of red, green and blue (..., 3), of any range, by a share () of the circle of hues.

    Saturation and value (HSV) stay.
    """
    red, green, blue = jnp.moveaxis(images, -1, 0)
    value = images.max(-1)
    chroma = value - images.min(-1)
    over = jnp.where(chroma > 0, chroma, 1)
    hue = jnp.where(
        value == red,
        (green - blue) / over,
        jnp.where(value == green, 2 + (blue - red) / over, 4 + (red - green) / over),
    )  # in sixths of the circle

    def channel(shift):
        place = (hue + 6 * turn + shift) % 6
        return value - chroma * jnp.clip(jnp.minimum(place, 4 - place), 0, 1)

    return jnp.stack([channel(5), channel(3), channel(1)], -1)
