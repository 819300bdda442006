"""Convolution and pooling, with implementations to choose from.

XLA's own convolution is slow on CPU inside `lax.scan`, and becomes a grouped one under `jax.vmap` over
the weights: the two places where the clients of a federation train. A matrix product is fast in both.

Between blocks images are (B, H, W, C). Inside a block they are *maps*: the same numbers in the order of axes
that suits the implementation in use. A block calls `to_maps` first and `to_images` last; where one block
follows another, XLA cancels the two.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

IMAGES = "BHWC"


class Convolution(NamedTuple):
    """An implementation of the convolution."""

    axes: str  # order of the axes of maps
    apply: Callable  # `(maps, kernel, stride) -> maps` without padding; see `conv`


# ---- implementations


def _rows(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Convolve by patches along the width only, then one product for each row of the output.

    With H outermost the kh strips below an output row are one contiguous (kh kw C, W' B) matrix, so patches
    along the height need not be built: they would be kh times larger and leave the cache. The backward pass
    is written by hand, so there is no forward-mode derivative.
    """
    kh, kw, channels, features = kernel.shape
    strips = jnp.concatenate(_shifted(x, kw, stride, 2), axis=1)  # (H, kw C, W', B)
    height, depth, width, batch = strips.shape
    matrix = kernel.reshape(kh * kw * channels, features).T
    # The backward pass is traced after the context in which the network is applied.
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    y: Any = _row_products(strips.reshape(height, depth, width * batch), matrix, stride, precision)
    return y.reshape(-1, features, width, batch)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _row_products(strips: jax.Array, matrix: jax.Array, stride: int, precision: Any) -> jax.Array:
    """y[h] = matrix @ strips[h stride : h stride + kh], flattened: (H, q, m), (D, kh q) -> (H', D, m)."""
    height, depth, width = strips.shape
    features, kh = matrix.shape[0], matrix.shape[1] // depth

    def row(h, y):
        below = lax.dynamic_slice_in_dim(strips, h * stride, kh).reshape(kh * depth, width)
        product = jnp.matmul(matrix, below, precision=precision)
        return lax.dynamic_update_index_in_dim(y, product, h, 0)

    rows = (height - kh) // stride + 1
    return lax.fori_loop(0, rows, row, jnp.zeros((rows, features, width), strips.dtype))


def _row_products_forward(strips, matrix, stride, precision):
    return _row_products(strips, matrix, stride, precision), (strips, matrix)


def _row_products_backward(stride, precision, saved, dy):
    strips, matrix = saved
    depth, width = strips.shape[1:]
    kh = matrix.shape[1] // depth

    def row(h, gradients):
        d_strips, d_matrix = gradients
        below = lax.dynamic_slice_in_dim(strips, h * stride, kh).reshape(kh * depth, width)
        product = lax.dot_general(dy[h], below, (((1,), (1,)), ((), ())), precision=precision)
        d_matrix += product.astype(d_matrix.dtype)
        d_below = jnp.matmul(matrix.T, dy[h], precision=precision).reshape(kh, depth, width)
        d_below += lax.dynamic_slice_in_dim(d_strips, h * stride, kh)
        return lax.dynamic_update_slice_in_dim(d_strips, d_below, h * stride, 0), d_matrix

    # Summed over rows, the weights' gradient needs more digits than a reduced precision has.
    d_matrix = jnp.zeros(matrix.shape, jnp.result_type(float))
    d_strips, d_matrix = lax.fori_loop(0, dy.shape[0], row, (jnp.zeros_like(strips), d_matrix))
    return d_strips, d_matrix.astype(matrix.dtype)


_row_products.defvjp(_row_products_forward, _row_products_backward)


def _patches(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Convolve by all patches, from slices shifted along the width and then the height; then one product."""
    kh, kw, channels, features = kernel.shape
    x = jnp.concatenate(_shifted(x, kw, stride, 2), axis=-1)
    x = jnp.concatenate(_shifted(x, kh, stride, 1), axis=-1)
    return jnp.tensordot(x, kernel.reshape(kh * kw * channels, features), axes=1)


def _plain(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Convolve by XLA's convolution, a grouped one with clients side by side."""
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=layout)


CONVOLUTIONS = {
    "rows": Convolution("HCWB", _rows),
    "patches": Convolution("BHWC", _patches),
    "plain": Convolution("BHWC", _plain),
}


# ---- which one is in use

_chosen = contextvars.ContextVar("convolution", default="patches")


def suited(batch: int, channels: int) -> str:
    """Return the implementation that suits the backend and the shape of maps.

    On a CPU the inner loop runs along the batch for "rows" and along the channels for "patches", and the
    longer of the two is faster; from 16 images on, "rows" is fast enough whatever the channels. Measured from
    10 to 50 images and from 6 to 64 channels, see experiments/bench/README.md.
    """
    return "rows" if jax.default_backend() == "cpu" and batch >= min(channels, 16) else "patches"


@contextlib.contextmanager
def using(name: str):
    """Use this implementation, a key of `CONVOLUTIONS`, for convolutions traced within."""
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def in_use() -> str:
    """Return the name of the implementation in use."""
    return _chosen.get()


def _in_use() -> Convolution:
    return CONVOLUTIONS[_chosen.get()]


# ---- maps


def axes() -> str:
    """Return the order of the axes of maps, of B, H, W, C."""
    return _in_use().axes


def axis(name: str) -> int:
    """Return the place of an axis of maps: one of B, H, W, C."""
    return axes().index(name)


def to_maps(x: jax.Array) -> jax.Array:
    """Turn images (B, H, W, C) into maps."""
    return x.transpose([IMAGES.index(name) for name in _in_use().axes])


def to_images(x: jax.Array) -> jax.Array:
    """Turn maps into images (B, H, W, C)."""
    return x.transpose([axis(name) for name in IMAGES])


def along(name: str, values: jax.Array) -> jax.Array:
    """Reshape values (n,) so that they broadcast along one axis of maps."""
    return values.reshape([-1 if other == name else 1 for other in _in_use().axes])


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    """Convolve maps with a kernel.

    Args:
      x: maps of C channels.
      kernel: weights (kh, kw, C, D), of the dtype of `x`.
      stride: step in both directions, in pixels.
      padding: zeros added on each of the four sides, in pixels.

    Returns:
      Maps of D channels, H' = (H + 2 padding - kh) // stride + 1 pixels high, and W' wide by the same
      formula.
    """
    return _in_use().apply(_padded(x, padding), kernel, stride)


def depthwise_conv(x: jax.Array, kernel: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    """Convolve each channel of maps with its own kernel, out of (kh, kw, C); see `conv`."""
    return _depthwise(_padded(x, padding), kernel, stride, _in_use().axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _depthwise(x: jax.Array, kernel: jax.Array, stride: int, axes: str) -> jax.Array:
    """Do the same without padding, for maps of given axes: the backward pass runs outside `using`."""
    # A matrix product does not help here: every weight meets only one channel.
    kh, kw, channels = kernel.shape
    weights = kernel.reshape(kh * kw, *(channels if name == "C" else 1 for name in axes))
    total: Any = sum(map(jnp.multiply, _windows(x, kernel, stride, axes), weights))
    return total


def _depthwise_forward(x, kernel, stride, axes):
    return _depthwise(x, kernel, stride, axes), (x, kernel)


def _depthwise_backward(stride, axes, saved, dy):
    x, kernel = saved
    others = [place for place, name in enumerate(axes) if name != "C"]
    d_kernel = jnp.stack([(part * dy).sum(others) for part in _windows(x, kernel, stride, axes)])
    # Each pixel of x collects from all outputs that saw it. Adding up padded slices instead, as the
    # automatic derivative does, takes up to three times as long.
    edges = [(0, 0, 0)] * len(axes)
    for place, size in zip((axes.index("H"), axes.index("W")), kernel.shape, strict=False):
        reached = (dy.shape[place] - 1) * stride + 1
        edges[place] = (size - 1, x.shape[place] - reached, stride - 1)
    spread = lax.pad(dy, jnp.zeros((), dy.dtype), edges)
    return _depthwise(spread, kernel[::-1, ::-1], 1, axes), d_kernel.reshape(kernel.shape)


_depthwise.defvjp(_depthwise_forward, _depthwise_backward)


def _windows(x: jax.Array, kernel: jax.Array, stride: int, axes: str) -> list[jax.Array]:
    """Return what each weight of a kernel sees of maps, row by row of the kernel."""
    kh, kw, _ = kernel.shape
    rows = _shifted(x, kh, stride, axes.index("H"))
    return [part for row in rows for part in _shifted(row, kw, stride, axes.index("W"))]


def halves(x: jax.Array) -> list[jax.Array]:
    """Split maps into the first and the second half of their channels."""
    return jnp.split(x, 2, axis("C"))


def interleaved(x: jax.Array, y: jax.Array) -> jax.Array:
    """Join maps of C channels each to maps of 2 C, a channel of `x` and one of `y` in turn."""
    place = axis("C")
    both = jnp.stack((x, y), place + 1)
    return both.reshape(*x.shape[:place], -1, *x.shape[place + 1 :])


def max_pool(x: jax.Array, window: int = 2, stride: int | None = None, padding: int = 0) -> jax.Array:
    """Take the maximum of each window; a rest too small for one is dropped.

    Args:
      x: maps.
      window: side of the square window, in pixels.
      stride: step in both directions, in pixels; by default `window`, so that windows lie side by side.
      padding: pixels of -inf added on each of the four sides.

    Returns:
      Maps of H' = (H + 2 padding - window) // stride + 1 pixels, and W' by the same formula.
    """
    return _pooled(jnp.maximum, _padded(x, padding, -jnp.inf), window, stride or window)


def mean_pool(x: jax.Array, window: int = 2) -> jax.Array:
    """Take the mean of each of adjacent square windows; a rest too small for one is dropped.

    Returns:
      Maps of H // window by W // window pixels.
    """
    return _pooled(jnp.add, x, window, window) / window**2


def spatial_mean(x: jax.Array) -> jax.Array:
    """Apply global average pooling, from maps to (B, C)."""
    return _flat(x.mean(axis=(axis("H"), axis("W"))))


def spatial_max(x: jax.Array) -> jax.Array:
    """Apply global max pooling, from maps to (B, C)."""
    return _flat(x.max(axis=(axis("H"), axis("W"))))


def _flat(x: jax.Array) -> jax.Array:
    return x if axis("B") < axis("C") else x.T


def _padded(x: jax.Array, padding: int, value: float = 0.0) -> jax.Array:
    edges = [(padding, padding) if name in "HW" else (0, 0) for name in _in_use().axes]
    return jnp.pad(x, edges, constant_values=value)


def _pooled(combine: Callable, x: jax.Array, window: int, stride: int) -> jax.Array:
    """Combine windows of maps along the height and then the width."""
    for name in "HW":
        x = pooled_along(axis(name), combine, x, window, stride)
    return x


def pooled_along(place: int, combine: Callable, x: jax.Array, window: int, stride: int) -> jax.Array:
    """Combine windows along one axis; pairwise maxima have a cheaper gradient than one over two axes."""
    parts = _split(x, window, place) if window == stride else _shifted(x, window, stride, place)
    return functools.reduce(combine, parts)


def _shifted(x: jax.Array, size: int, stride: int, place: int) -> list[jax.Array]:
    """Return the slices that a kernel of `size` weights sees along axis `place`, one per weight."""
    reach = max(0, (x.shape[place] - size) // stride * stride + 1)
    return [lax.slice_in_dim(x, i, i + reach, stride, place) for i in range(size)]


def _split(x: jax.Array, size: int, place: int) -> list[jax.Array]:
    """Return the slices of `_shifted` for windows that lie side by side.

    Its gradient is one concatenation. A sum of padded parts, fused with the sum for a bias, made W2 of
    `jaxfl bench` 17 % slower on an H200.
    """
    count = x.shape[place] // size
    whole = lax.slice_in_dim(x, 0, count * size, axis=place)
    windows = whole.reshape(*x.shape[:place], count, size, *x.shape[place + 1 :])
    return [part.squeeze(place + 1) for part in jnp.split(windows, size, place + 1)]
