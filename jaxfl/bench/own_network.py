"""Networks of the zoo as their users would write them in Flax, for the workloads `own`.

ResNet-9 and ResNet-18 are in Linen, the vision transformer is in NNX.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jaxfl.models import Model
from jaxfl.models.own import from_linen, from_nnx

Shape = tuple[int, int, int]


class Conv(nn.Module):
    """A convolution, BatchNorm, an activation [and max pooling]."""

    channels: int
    pool: int = 1
    side: int = 3
    stride: int = 1
    activation: Callable = nn.relu

    @nn.compact
    def __call__(self, x, train: bool):
        """Map (B, H, W, C) to (B, H / stride / pool, W / stride / pool, channels)."""
        sides, strides, pool = ((size, size) for size in (self.side, self.stride, self.pool))
        x = nn.Conv(self.channels, sides, strides, self.side // 2, use_bias=False)(x)
        x = self.activation(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return x if self.pool == 1 else nn.max_pool(x, pool, pool)


class Residual(nn.Module):
    """Two convolutions whose output is added to their input."""

    channels: int

    @nn.compact
    def __call__(self, x, train: bool):
        """Map (B, H, W, C) to the same shape."""
        return x + Conv(self.channels)(Conv(self.channels)(x, train), train)


class ResNet9(nn.Module):
    """Four convolutions and two residual pairs, the widths times `width`."""

    classes: int
    width: float

    @nn.compact
    def __call__(self, x, train: bool):
        """Return logits (B, classes) of images (B, H, W, C)."""
        first, second, third, fourth = (int(self.width * channels) for channels in (64, 128, 256, 512))
        x = Conv(second, pool=2)(Conv(first)(x, train), train)
        x = Conv(third, pool=2)(Residual(second)(x, train), train)
        x = Residual(fourth)(Conv(fourth, pool=2)(x, train), train)
        return nn.Dense(self.classes)(jnp.max(x, (1, 2)))


class Basic(nn.Module):
    """Two convolutions and a shortcut, which is a convolution of 1x1 if there is a stride."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x, train: bool):
        """Map (B, H, W, C) to (B, H / stride, W / stride, channels)."""
        y = Conv(self.channels, stride=self.stride)(x, train)
        y = Conv(self.channels, activation=lambda x: x)(y, train)
        if self.stride > 1:
            x = Conv(self.channels, side=1, stride=self.stride, activation=lambda x: x)(x, train)
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """ResNet-18 for images of 32 pixels."""

    classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        """Return logits (B, classes) of images (B, H, W, C)."""
        x = Conv(64)(x, train)
        for channels in (64, 128, 256, 512):
            x = Basic(channels, 1 if channels == 64 else 2)(x, train)
            x = Basic(channels, 1)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


class Encoder(nnx.Module):
    """Attention and a perceptron of two layers, each after a LayerNorm and with a shortcut."""

    def __init__(self, features: int, heads: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, features, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(features, rngs=rngs)
        self.mlp1 = nnx.Linear(features, 4 * features, rngs=rngs)
        self.mlp2 = nnx.Linear(4 * features, features, rngs=rngs)

    def __call__(self, x):
        """Map tokens (B, T, d) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp2(jax.nn.gelu(self.mlp1(self.norm2(x)), approximate=False))


class ViT(nnx.Module):
    """A vision transformer with patches of 4 pixels, 192 features and 3 heads."""

    def __init__(self, shape: Shape, classes: int, depth: int, rngs: nnx.Rngs):
        height, width, channels = shape
        self.patches = nnx.Conv(channels, 192, (4, 4), (4, 4), padding="VALID", rngs=rngs)
        place = (height // 4 * (width // 4), 192)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), place))
        self.encoders = nnx.List([Encoder(192, 3, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(192, rngs=rngs)
        self.head = nnx.Linear(192, classes, rngs=rngs)

    def __call__(self, x):
        """Return logits (B, classes) of images (B, H, W, C)."""
        x = self.patches(x).reshape(len(x), -1, 192) + self.position[None]
        for encoder in self.encoders:
            x = encoder(x)
        return self.head(self.norm(x).mean(1))


def resnet9(shape: Shape, classes: int, width: float = 1.0) -> Model:
    """Return the network for images (H, W, C)."""
    return from_linen("resnet9-linen", ResNet9(classes, width), shape, classes)


def resnet18(shape: Shape, classes: int) -> Model:
    """Return the network for images (H, W, C)."""
    return from_linen("resnet18-linen", ResNet18(classes), shape, classes)


def vit(shape: Shape, classes: int, depth: int = 12) -> Model:
    """Return the network for images (H, W, C)."""
    return from_nnx("vit-nnx", lambda rngs: ViT(shape, classes, depth, rngs), shape, classes)
