"""Layers that fit the output of one block to the input of the next.

A stitching layer is ReLU(W^T X + b) (pFedClub, section 3.2.3). It is placed where the shapes of two
neighbours differ. Every pixel of maps is one X, after resizing to the next block's height and width. Before a
dense block, maps become one X: their means or, up to 4x4, all their pixels. Before a convolution, a vector is
repeated at every pixel. A model that does not put out logits ends with one without ReLU.

The paper leaves the layer's form open. The other form here is that of pFedHR's code: W^T X + b without ReLU,
from all numbers of one side to all of the other. Such a layer often has more weights than the models.
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
      source: shape of its input for one example, (h, w, c) or (d,).
      target: shape of its output for one example.
      relu: False for the logits at the end, and for dense layers.
      dense: whether every number of the target depends on every number of the source.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    relu: bool = True
    dense: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of W."""
        if self.dense:
            return math.prod(self.source), math.prod(self.target)
        maps = len(self.source) == 3
        if maps and len(self.target) == 1 and max(self.source[:2]) <= FLATTENED:
            return math.prod(self.source), self.target[-1]
        return self.source[-1], self.target[-1]

    @property
    def size(self) -> int:
        """The number of parameters."""
        return (self.shape[0] + 1) * self.shape[1]


def between(source: tuple[int, ...], target: tuple[int, ...], vector: bool) -> Stitch | None:
    """Return the layer that fits one shape to another; None if they are the same to the next block.

    Args:
      source: shape of the output of the block before.
      target: shape of the input of the next block in its own model.
      vector: whether the next block takes maps as vectors.
    """
    one_pixel = source[-1:] == (math.prod(source),) == (math.prod(target),) == target[-1:]
    if source == target or vector and one_pixel:
        return None
    return Stitch(source, (math.prod(target),) if vector else target)


def initial(key, stitch: Stitch) -> dict:
    """Draw weights {"kernel": (i, o), "bias": (o,)} as for any linear layer."""
    kernel, bias = jax.random.split(key)
    draw, dtype = uniform(stitch.shape[0]), jnp.result_type(float)
    return {"kernel": draw(kernel, stitch.shape, dtype), "bias": draw(bias, stitch.shape[1:], dtype)}


def apply(stitch: Stitch, weights: dict, x: jax.Array) -> jax.Array:
    """Apply a stitching layer: (B, *source) -> (B, *target)."""
    maps = x.ndim == 4 and len(stitch.target) == 3 and not stitch.dense
    height, width = stitch.target[:2] if maps else (1, 1)
    if stitch.dense:
        x = x.reshape(len(x), -1)
    elif maps:  # the layer treats pixels alike, so it is applied where there are the fewest
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
