"""Random views of images, for learning without labels.

Chen et al. 2020, "A simple framework for contrastive learning of visual representations" (SimCLR),
arXiv:2002.05709, appendix A, as the authors of pFedClub use it for small images: horizontal flip (probability
0.5), a crop of 80 to 100 % of the area, colour jitter of strength 0.5 (0.8), grey (0.2). The jitter
changes brightness, contrast and saturation by factors between 1 - 0.8 / 2 and 1 + 0.8 / 2, and the hue by up
to 0.2 / 2 of its circle. Crops are square and the jitter's changes have one order; in the authors' code both
vary.
"""

import jax
import jax.numpy as jnp

from jaxfl.data.colour import grey, jittered, with_hue


def view(key, images: jax.Array) -> jax.Array:
    """Draw a view of each image (B, H, W, C) with values in [0, 1]; only three channels have a hue."""
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
