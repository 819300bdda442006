"""Convolution as one matrix product, and max pooling.

XLA's own convolution is slow on CPU inside `lax.scan` and under `jax.vmap` over the weights, which
is where every client of a federation trains; a matrix product is fast in both places.
"""

import functools

import jax
import jax.numpy as jnp


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    """Convolves images with a kernel: patches from shifted slices, times the flattened kernel.

    The slices are concatenated first along the width, then along the height: kw + kh of them give
    the same patches as kh * kw would, and compile in half the time.

    Args:
        x: Images (B, H, W, C).
        kernel: Weights (kh, kw, C, D), of the dtype of `x`.
        stride: Step in both directions, in pixels.
        padding: Zeros added on each of the four sides, in pixels.

    Returns:
        (B, H', W', D) with H' = (H + 2 padding - kh) // stride + 1, and W' likewise.
    """
    kh, kw, channels, features = kernel.shape
    if padding:
        x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    reach_h = (x.shape[1] - kh) // stride * stride + 1
    reach_w = (x.shape[2] - kw) // stride * stride + 1
    x = jnp.concatenate([x[:, :, j : j + reach_w : stride] for j in range(kw)], axis=-1)
    x = jnp.concatenate([x[:, i : i + reach_h : stride] for i in range(kh)], axis=-1)
    return jnp.tensordot(x, kernel.reshape(kh * kw * channels, features), axes=1)


def max_pool(x: jax.Array, window: int = 2) -> jax.Array:
    """Takes the maximum of each of side-by-side windows; a rest too small for one is dropped.

    Args:
        x: Maps (B, H, W, C).
        window: Side of the square window, in pixels.

    Returns:
        (B, H // window, W // window, C).
    """
    batch, height, width, channels = x.shape
    rows, columns = height // window, width // window
    tiles = x[:, : rows * window, : columns * window]
    tiles = tiles.reshape(batch, rows, window, columns, window, channels)
    # Pairwise maxima have a cheaper gradient than one reduction over two axes.
    tiles = functools.reduce(jnp.maximum, (tiles[:, :, i] for i in range(window)))
    return functools.reduce(jnp.maximum, (tiles[:, :, :, j] for j in range(window)))
