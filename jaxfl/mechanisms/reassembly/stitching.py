"""Layers that fit the output of one block to the input of the next.

A stitching layer is ReLU(W^T X + b) (pFedClub, section 3.2.3). It stands where the shapes of two
neighbours differ: of maps every pixel is one X, after resizing to the next block's height and width; before a
dense block maps become one X, their means or, up to 4x4, all their pixels; before a convolution a vector
is repeated at every pixel. At the end of a model that does not put out logits stands one without
ReLU.

The paper leaves the layer's form open. The other form here is that of pFedHR's code: W^T X + b without ReLU,
from all numbers of one side to all of the other. Such a layer often holds more weights than the models.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.models.blocks import uniform
from jaxfl.models.maps import resize

FLATTENED = 4  # pixels, the largest height and width of maps that are flattened


class Stitch(NamedTuple):
    """A stitching layer without its weights.

    Args:
      source: shape of one example that it takes, (h, w, c) or (d,).
      target: shape that it gives, without the batch.
      relu: False for the logits at the end, and for dense layers.
      dense: whether every number of the source weighs in every number of the target.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    relu: bool = True
    dense: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of W."""
        if self.dense:
            return math.prod(self.source), math.prod(self.target)
        maps = len(self.source) == 3
        if maps and len(self.target) == 1 and max(self.source[:2]) <= FLATTENED:
            return math.prod(self.source), self.target[-1]
        return self.source[-1], self.target[-1]

    @property
    def size(self) -> int:
        """Parameters."""
        return (self.shape[0] + 1) * self.shape[1]


def between(source: tuple[int, ...], target: tuple[int, ...], vector: bool) -> Stitch | None:
    """The layer that fits one shape to another; None where they are the same to the next block.

    Args:
      source: what the block before puts out.
      target: what the next block takes in its own model.
      vector: whether the next block takes maps as vectors.
    """
    one_pixel = source[-1:] == (math.prod(source),) == (math.prod(target),) == target[-1:]
    if source == target or vector and one_pixel:
        return None
    return Stitch(source, (math.prod(target),) if vector else target)


def initial(key, stitch: Stitch) -> dict:
    """Weights {"kernel": (i, o), "bias": (o,)} as of any linear layer."""
    kernel, bias = jax.random.split(key)
    draw, dtype = uniform(stitch.shape[0]), jnp.result_type(float)
    return {"kernel": draw(kernel, stitch.shape, dtype), "bias": draw(bias, stitch.shape[1:], dtype)}


def apply(stitch: Stitch, weights: dict, x: jax.Array) -> jax.Array:
    """(B, *source) -> (B, *target)."""
    maps = x.ndim == 4 and len(stitch.target) == 3 and not stitch.dense
    height, width = stitch.target[:2] if maps else (1, 1)
    if stitch.dense:
        x = x.reshape(len(x), -1)
    elif maps:  # pixels are alike to the layer: it comes where there are the fewest
        x = resize(x, min(height, x.shape[1]), min(width, x.shape[2]))
    elif x.ndim == 4:
        x = x.reshape(len(x), -1) if stitch.shape[0] > x.shape[-1] else x.mean((1, 2))
    kernel, bias = weights["kernel"], weights["bias"]
    y = jnp.tensordot(x, kernel, 1, precision="highest") + bias.reshape(*(1,) * (x.ndim - 1), -1)
    y = jax.nn.relu(y) if stitch.relu else y
    if stitch.dense:
        return y.reshape(len(y), *stitch.target)
    if maps:
        return resize(y, height, width, up="nearest")
    if len(stitch.target) == 3:
        y = jnp.broadcast_to(y[:, None, None], (len(y), *stitch.target))
    return y
