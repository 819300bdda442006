"""Random views of images, for learning without labels.

Chen et al. 2020, "A simple framework for contrastive learning of visual representations" (SimCLR),
arXiv:2002.05709, appendix A, as the authors of pFedClub use it for small images: horizontal flip (probability
0.5), a crop of 80 to 100 % of the area, colour jitter of strength 0.5 (0.8), grey (0.2).
"""

import jax
import jax.numpy as jnp

LUMA = (0.299, 0.587, 0.114)


def view(key, images: jax.Array) -> jax.Array:
    """One random view of each image (B, H, W, C) with values in [0, 1]; grey images have no saturation."""
    keys = jax.random.split(key, len(images))
    return jax.vmap(_view)(keys, images)


def _view(key, image):
    flip, crop, jitter, light, contrast, saturation, jitters, grey = jax.random.split(key, 8)
    image = jnp.where(jax.random.bernoulli(flip), image[:, ::-1], image)
    image = _cropped(crop, image)

    def factor(key):  # of strength 0.5: between 1 - 0.8 / 2 and 1 + 0.8 / 2
        return jax.random.uniform(key, (), image.dtype, 0.6, 1.4)

    jittered = image * factor(light)
    jittered = _towards(_grey(jittered).mean(), jittered, factor(contrast))
    jittered = jnp.clip(_towards(_grey(jittered), jittered, factor(saturation)), 0, 1)
    image = jnp.where(jax.random.bernoulli(jitters, 0.8), jittered, image)
    grey_image = jnp.broadcast_to(_grey(image), image.shape)
    return jnp.where(jax.random.bernoulli(grey, 0.2), grey_image, image)


def _cropped(key, image):
    """A square share of 80 to 100 % of the area, resized to the whole."""
    area, place = jax.random.split(key)
    height, width, channels = image.shape
    side = jnp.sqrt(jax.random.uniform(area, (), image.dtype, 0.8, 1.0))
    corner = (
        jax.random.uniform(place, (2,), image.dtype) * (1 - side) * jnp.asarray((height, width), image.dtype)
    )
    scale = jnp.stack([1 / side, 1 / side])
    return jax.image.scale_and_translate(image, image.shape, (0, 1), scale, -corner / side, "linear")


def _grey(image):
    """(H, W, C) -> (H, W, 1); the mean of channels that are not red, green and blue."""
    if image.shape[-1] != len(LUMA):
        return image.mean(-1, keepdims=True)
    return jnp.tensordot(image, jnp.asarray(LUMA, image.dtype), 1)[..., None]


def _towards(grey, image, factor):
    return grey + factor * (image - grey)
