"""Feature maps of one network in the shape of another's."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np


def resize(
    maps: jax.Array, height: int, width: int, up: Literal["linear", "nearest"] = "linear"
) -> jax.Array:
    """Resizes images (B, H, W, C) to (B, height, width, C): means of areas where they shrink.

    Args:
        maps: What to resize.
        height: In pixels.
        width: In pixels.
        up: How an axis grows, with half-pixel centres.
    """
    # An axis that stays is left alone: a product with the matrix of ones would cost as much as any.
    if height != maps.shape[1]:
        rows = _weights(maps.shape[1], height, up).astype(maps.dtype)
        maps = jnp.einsum("bhwc,yh->bywc", maps, rows, precision="highest")
    if width != maps.shape[2]:
        columns = _weights(maps.shape[2], width, up).astype(maps.dtype)
        maps = jnp.einsum("bhwc,xw->bhxc", maps, columns, precision="highest")
    return maps


def match(maps: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    """Maps (B, H, W, C) in another shape (H', W', C'): resized, surplus channels cut off, missing ones zero.

    Linear in `maps` (DraftFed, eq. 7).
    """
    height, width, channels = shape
    kept = resize(maps[..., :channels], height, width)
    return jnp.pad(kept, [(0, 0)] * 3 + [(0, channels - kept.shape[-1])])


def _weights(size: int, new: int, up: str) -> np.ndarray:
    """The matrix (new, size) that resizes one axis."""
    if new > size:
        with jax.ensure_compile_time_eval():
            return np.asarray(jax.image.resize(jnp.eye(size), (new, size), up))
    starts = np.arange(new) * size // new
    ends = -(-np.arange(1, new + 1) * size // new)
    inside = (np.arange(size) >= starts[:, None]) & (np.arange(size) < ends[:, None])
    return inside / inside.sum(1, keepdims=True)
