"""The Flax modules that networks are made of; every block is called `(x, *, train, mask)`.

`train` is False in evaluation mode; `mask (B,)` marks the real rows of a padded batch (None: all). A block
takes and returns images (B, H, W, C) or features (B, d); inside, convolutions work on maps (see
`jaxfl.models.conv`). Layers are initialised as in PyTorch: kernels and biases uniform in +-1/sqrt(fan_in) (He
et al. 2015, arXiv:1502.01852, with a = sqrt 5), the setting that the papers' learning rates assume.
Parameters have JAX's default float dtype at the time of initialisation.

Every convolution on a block's main path has a *tap*: its output, after the norm if one follows directly,
before activation, pooling and the sum with a shortcut (Liao et al. 2023, "DraftFed",
doi:10.1109/TMC.2023.3283557, section III.B). A convolution in a shortcut has none. Blocks leave their taps
with `leave_tap`; `Model.apply_with_taps` returns those asked for.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxfl.models.conv import (
    along,
    axis,
    conv,
    depthwise_conv,
    max_pool,
    spatial_mean,
    to_images,
    to_maps,
)
from jaxfl.models.maps import resize

Activation = Callable[[jax.Array], jax.Array]
CONVOLVED, DENSE = "convolved", "dense"  # what layers leave, see `leave_output`
BATCH_EPSILON, LAYER_EPSILON = 1e-5, 1e-6  # added to the variance by BatchNorm, and by LayerNorm


def uniform(fan_in: int) -> nn.initializers.Initializer:
    """Return an initialiser that draws from U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = 1 / math.sqrt(fan_in)

    def draw(key, shape, dtype):
        # Drawn flat: XLA compiles a draw of several axes ten times slower, and the numbers are the same.
        return jax.random.uniform(key, (math.prod(shape),), dtype, -bound, bound).reshape(shape)

    return draw


def leave_tap(block: nn.Module, maps: jax.Array) -> None:
    """Store maps, as images, in the collection "intermediates": the tap of the block's next convolution."""
    block.sow("intermediates", "taps", to_images(maps))


def leave_output(layer: nn.Module, name: str, y: jax.Array) -> None:
    """Store a layer's output, before norm and activation, in the collection "intermediates"."""
    layer.sow("intermediates", name, to_images(y) if y.ndim == 4 else y)


class Resize(nn.Module):
    """Bilinear resizing to (height, width), the input adapter for images that are too small."""

    height: int
    width: int

    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to (B, height, width, C)."""
        batch, _, _, channels = x.shape
        return jax.image.resize(x, (batch, self.height, self.width, channels), "bilinear")


class AdaptiveMean(nn.Module):
    """Adaptive average pooling of features, without parameters, as PyTorch's `adaptive_avg_pool1d`."""

    features: int
    uncut = "averages other features in each width"  # see `jaxfl.models.slices`

    def __call__(self, x, *, train, mask):
        """Map (B, d) to (B, n), d >= n; i is the mean from floor(i d / n) up to ceil((i + 1) d / n)."""
        return resize(x[:, :, None, None], self.features, 1)[:, :, 0, 0]


class Norm(nn.Module):
    """Batch normalisation of maps or of features (B, d) (Ioffe & Szegedy 2015, arXiv:1502.03167).

    The running statistics move by a tenth in each training step. As in Flax, the running variance is that of
    the batch, over m values; the paper and PyTorch have m / (m - 1) of it. A batch without a real row would
    give NaN; `jaxfl.core.training.fit` runs none.
    """

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Normalise each channel, in training by the statistics of the rows that `mask` marks."""
        norm = nn.BatchNorm(
            axis=axis("C") if x.ndim == 4 else 1,
            momentum=0.9,
            epsilon=BATCH_EPSILON,
            param_dtype=jnp.result_type(float),
            use_fast_variance=False,
            force_float32_reductions=False,
        )
        nn.share_scope(self, norm)
        if mask is not None:
            mask = along("B", mask) if x.ndim == 4 else mask[:, None]
        # Statistics need more digits than a reduced precision has.
        y = norm(x.astype(jnp.result_type(float)), use_running_average=not train, mask=mask)
        return y.astype(x.dtype)


class Linear(nn.Module):
    """Affine map of the last axis, (B, d) to (B, features)."""

    features: int

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Return x @ kernel + bias."""
        dtype, start = jnp.result_type(float), uniform(x.shape[-1])
        kernel = self.param("kernel", start, (x.shape[-1], self.features), dtype)
        bias = self.param("bias", start, (self.features,), dtype)
        return x @ kernel + bias[None]


class Conv(nn.Module):
    """Convolution [+ norm], from maps of any number of channels to maps of `features`."""

    features: int
    kernel: int | tuple[int, int]  # height and width, if they differ
    stride: int = 1
    padding: int = 0
    norm: bool = False
    bias: bool = True

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the kernel."""
        return self.kernel if isinstance(self.kernel, tuple) else (self.kernel, self.kernel)

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Return the convolution of the maps, normalised if `norm`."""
        dtype = jnp.result_type(float)
        shape = (*self.size, x.shape[axis("C")], self.features)
        start = uniform(math.prod(shape[:3]))
        x = conv(x, self.param("kernel", start, shape, dtype), self.stride, self.padding)
        return _convolved(self, x, start, train, mask)


class DepthwiseConv(nn.Module):
    """Convolution of each channel of maps separately [+ norm]; the padding keeps the size at stride 1."""

    kernel: int
    stride: int = 1
    norm: bool = False
    bias: bool = True

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Return the convolution of the maps, normalised if `norm`."""
        dtype, channels = jnp.result_type(float), x.shape[axis("C")]
        start = uniform(self.kernel**2)
        kernel = self.param("kernel", start, (self.kernel, self.kernel, channels), dtype)
        x = depthwise_conv(x, kernel, self.stride, self.kernel // 2)
        return _convolved(self, x, start, train, mask)


def _convolved(layer: Conv | DepthwiseConv, x, start, train, mask) -> jax.Array:
    """Return maps after a layer's bias and norm, if it has these; without the norm they are its output."""
    if layer.bias:
        x = x + along("C", layer.param("bias", start, (x.shape[axis("C")],), jnp.result_type(float)))
    leave_output(layer, CONVOLVED, x)
    return Norm(name="norm")(x, train=train, mask=mask) if layer.norm else x


def chain(block: nn.Module, x: jax.Array, *steps: tuple[nn.Module, Activation], train, mask) -> jax.Array:
    """Apply a block's convolutions to maps, each with its activation, and store their taps."""
    for layer, activation in steps:
        x = layer(x, train=train, mask=mask)
        leave_tap(block, x)
        x = activation(x)
    return x


class ConvBlock(nn.Module):
    """Convolution [+ norm] + activation [+ max pooling by `pool`] [+ dropout of whole channels].

    With `mean`, global average pooling comes before the dropout. Dropout: Tompson et al. 2015,
    arXiv:1411.4280.
    """

    features: int
    kernel: int
    padding: int = 0
    pool: int = 1
    norm: bool = False
    bias: bool = True
    activation: Activation = nn.relu
    stride: int = 1
    dropout: float = 0.0
    mean: bool = False

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to (B, H', W', features), or to (B, features) with `mean`."""
        layer = Conv(self.features, self.kernel, self.stride, self.padding, self.norm, self.bias, name="conv")
        x = chain(self, to_maps(x), (layer, self.activation), train=train, mask=mask)
        if self.pool > 1:
            x = max_pool(x, self.pool)
        x = spatial_mean(x) if self.mean else to_images(x)
        return nn.Dropout(self.dropout, range(1, x.ndim - 1), deterministic=not train)(x)


class DenseBlock(nn.Module):
    """Flattening [+ dropout] + linear [+ norm] + activation [+ dropout]."""

    features: int
    norm: bool = False
    dropout: float = 0.0
    activation: Activation = nn.relu
    input_dropout: float = 0.0

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, ...) to (B, features)."""
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(self.input_dropout, deterministic=not train, name="input_dropout")(x)
        x = Linear(self.features, name="linear")(x, train=train, mask=mask)
        leave_output(self, DENSE, x)
        if self.norm:
            x = Norm(name="norm")(x, train=train, mask=mask)
        return nn.Dropout(self.dropout, deterministic=not train)(self.activation(x))


class BasicBlock(nn.Module):
    """ResNet's two-convolution block (He et al. 2016, arXiv:1512.03385, figure 2 and section 4.2).

    The shortcut has a 1x1 convolution where the stride or the width changes. The network's last block applies
    `pool` at its end.
    """

    features: int
    stride: int = 1
    norm: bool = True
    pool: Callable[[jax.Array], jax.Array] | None = None

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to (B, H', W', features), or to (B, features) with a global `pool`."""
        kernels = (self.features, 3, self.stride), (self.features, 3, 1)
        return _residual(self, x, kernels, train, mask)


class Bottleneck(nn.Module):
    """ResNet's three-convolution block (He et al. 2016, arXiv:1512.03385, figure 5).

    1x1 to `features`, 3x3, and 1x1 to four times as many. The 3x3 convolution has the stride, as in
    torchvision and most reproductions; in the paper the first one has it. Shortcut and `pool` are as in
    `BasicBlock`.
    """

    features: int
    stride: int = 1
    norm: bool = True
    pool: Callable[[jax.Array], jax.Array] | None = None

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to (B, H', W', 4 features), or to (B, 4 features) with a global `pool`."""
        kernels = (self.features, 1, 1), (self.features, 3, self.stride), (4 * self.features, 1, 1)
        return _residual(self, x, kernels, train, mask)


def _residual(block: BasicBlock | Bottleneck, x, kernels, train, mask) -> jax.Array:
    """Apply a ResNet's convolutions, each (features, kernel, stride), and add the shortcut."""
    layer = functools.partial(Conv, norm=block.norm, bias=not block.norm)
    y = x = to_maps(x)
    for i, (features, kernel, stride) in enumerate(kernels, 1):
        y = nn.relu(y) if i > 1 else y
        y = layer(features, kernel, stride, kernel // 2, name=f"conv{i}")(y, train=train, mask=mask)
        leave_tap(block, y)
    if block.stride != 1 or x.shape[axis("C")] != features:
        x = layer(features, 1, block.stride, name="shortcut")(x, train=train, mask=mask)
    y = nn.relu(x + y)
    return block.pool(y) if block.pool else to_images(y)


class ResidualPair(nn.Module):
    """The residual block of ResNet-9: x plus two times (convolution [+ norm] + ReLU) of x."""

    norm: bool = True
    pool: Callable[[jax.Array], jax.Array] | None = None

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to the same shape, or to (B, C) with a global `pool`."""
        x = y = to_maps(x)
        for name in ("conv1", "conv2"):
            layer = Conv(x.shape[axis("C")], 3, 1, 1, self.norm, not self.norm, name=name)
            y = layer(y, train=train, mask=mask)
            leave_tap(self, y)
            y = nn.relu(y)
        return self.pool(x + y) if self.pool else to_images(x + y)
