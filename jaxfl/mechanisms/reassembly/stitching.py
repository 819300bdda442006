"""Layers that fit the output of one block to the input of the next.

A stitching layer is ReLU(W^T X + b) (pFedClub, section 3.2.3). Every pixel of maps is one X, after resizing
to the next block's height and width. Before a block that takes a vector, maps become one X: their means or,
up to 4x4, all their pixels. Before a convolution, a vector is repeated at every pixel; before a dense block
that takes maps, it is mapped to all their numbers. A model that does not put out logits ends with a layer
without ReLU.

The paper leaves the layer's form open. The other form here is that of pFedHR's code: W^T X + b without ReLU,
from all numbers of one side to all of the other. Such a layer often has more weights than the models.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve

from jaxfl.models.blocks import uniform
from jaxfl.models.maps import resize

RIDGE = 1e-3  # of the inputs' mean square
FLATTENED = 4  # pixels, the largest height and width of maps that are flattened


class Stitch(NamedTuple):
    """A stitching layer without its weights."""

    source: tuple[int, ...]  # shape of its input for one example, (h, w, c) or (d,)
    target: tuple[int, ...]  # shape of its output for one example
    relu: bool = True  # False for the logits at the end, and for dense layers
    dense: bool = False  # whether every number of the target depends on every number of the source

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


def between(source: tuple[int, ...], target: tuple[int, ...], vector: bool) -> Stitch:
    """Return the layer from one shape to another.

    Args:
      source: shape of the output of the block before.
      target: shape of the input of the next block in its own model.
      vector: whether the next block takes maps as vectors.
    """
    without_pixels = vector and len(source) == 1
    return Stitch(source, (math.prod(target),) if without_pixels else target)


def fits(source: tuple[int, ...], target: tuple[int, ...], vector: bool) -> bool:
    """Return whether two shapes are the same to the next block; arguments as for `between`."""
    one_pixel = source[-1:] == (math.prod(source),) == (math.prod(target),) == target[-1:]
    return source == target or vector and one_pixel


def initial(key, stitch: Stitch) -> dict:
    """Draw weights {"kernel": (i, o), "bias": (o,)} as for any linear layer."""
    kernel, bias = jax.random.split(key)
    draw, dtype = uniform(stitch.shape[0]), jnp.result_type(float)
    return {"kernel": draw(kernel, stitch.shape, dtype), "bias": draw(bias, stitch.shape[1:], dtype)}


@partial(jax.jit, static_argnums=0)
def least_squares(stitch: Stitch, x: jax.Array, y: jax.Array) -> dict:
    """Return the weights of a small layer that comes nearest to the next block's usual input.

    Pan, Cai and Zhuang 2023, "Stitchable Neural Networks", CVPR, section 3.2; with a ridge, as vectors may be
    longer than there are images. Over all X with a 1 for the bias, (N, i), and all Y, (N, o),

        min_W ||X W - Y||^2 + r ||W||^2            r = RIDGE ||X||^2 / i

    Args:
      stitch: the layer.
      x: its input (B, *source).
      y: the next block's input in its own model (B, ...), for the same images.
    """
    x = _taken(stitch, x)
    if x.ndim == 4:
        _, height, width, _ = x.shape
        y = resize(y, height, width)
    elif len(stitch.target) == 3:
        y = y.mean((1, 2))
    x, y = x.reshape(-1, stitch.shape[0]), y.reshape(-1, stitch.shape[1])
    x = jnp.concatenate([x, jnp.ones((len(x), 1), x.dtype)], 1)
    gram, product = (jnp.matmul(x.T, of, precision="highest") for of in (x, y))
    ridge = RIDGE * gram.trace() / len(gram)
    # The normal equations, as a decomposition of X takes ten times as long.
    weights = cho_solve(cho_factor(gram + ridge * jnp.eye(len(gram))), product)
    return {"kernel": weights[:-1], "bias": weights[-1]}


def apply(stitch: Stitch, weights: dict, x: jax.Array) -> jax.Array:
    """Apply a stitching layer: (B, *source) -> (B, *target)."""
    x = _taken(stitch, x)
    kernel, bias = weights["kernel"], weights["bias"]
    y = jnp.tensordot(x, kernel, 1, precision="highest") + bias.reshape(*(1,) * (x.ndim - 1), -1)
    y = jax.nn.relu(y) if stitch.relu else y
    if stitch.dense:
        return y.reshape(len(y), *stitch.target)
    if y.ndim == 4:
        return resize(y, *stitch.target[:2], up="nearest")
    if len(stitch.target) == 3:
        y = jnp.broadcast_to(y[:, None, None], (len(y), *stitch.target))
    return y


def _taken(stitch: Stitch, x: jax.Array) -> jax.Array:
    """Return what W multiplies, vectors or the pixels of maps: (B, *source) -> (B, i) or (B, h, w, i)."""
    if stitch.dense:
        return x.reshape(len(x), -1)
    if x.ndim == 2:
        return x
    if len(stitch.target) == 3:  # the layer treats pixels alike, so it is applied where there are the fewest
        height, width, _ = stitch.target
        return resize(x, min(height, x.shape[1]), min(width, x.shape[2]))
    return x.reshape(len(x), -1) if stitch.shape[0] > x.shape[-1] else x.mean((1, 2))
