"""Feature maps of one network in the shape of another's."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np


def resize(
    maps: jax.Array, height: int, width: int, up: Literal["linear", "nearest"] = "linear"
) -> jax.Array:
    """Resize images (B, H, W, C) to (B, height, width, C), by means of areas where they shrink.

    Where an axis grows, `up` is the interpolation, with half-pixel centres.
    """
    # An axis that stays is left alone: a product with the identity matrix would cost as much as any.
    if height != maps.shape[1]:
        rows = _weights(maps.shape[1], height, up).astype(maps.dtype)
        maps = jnp.einsum("bhwc,yh->bywc", maps, rows, precision="highest")
    if width != maps.shape[2]:
        columns = _weights(maps.shape[2], width, up).astype(maps.dtype)
        maps = jnp.einsum("bhwc,xw->bhxc", maps, columns, precision="highest")
    return maps


def match(maps: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    """Bring maps (B, H, W, C) to shape (H', W', C'): resize, drop surplus channels, add channels of zeros.

    Linear in `maps` (DraftFed, eq. 7).
    """
    height, width, channels = shape
    kept = resize(maps[..., :channels], height, width)
    return jnp.pad(kept, [(0, 0)] * 3 + [(0, channels - kept.shape[-1])])


_resized = jax.jit(jax.image.resize, static_argnums=(1, 2))


def _weights(size: int, new: int, up: str) -> np.ndarray:
    """Return the matrix (new, size) that resizes one axis."""
    if new > size:
        with jax.ensure_compile_time_eval():  # as one program, not one for each operation
            return np.asarray(_resized(jnp.eye(size), (new, size), up))
    starts = np.arange(new) * size // new
    ends = -(-np.arange(1, new + 1) * size // new)
    inside = (np.arange(size) >= starts[:, None]) & (np.arange(size) < ends[:, None])
    return inside / inside.sum(1, keepdims=True)
