"""The zoo's ResNet-9 as its user would write it in Flax Linen, for the workload `own`."""

import jax.numpy as jnp
from flax import linen as nn

from jaxfl.models import Model
from jaxfl.models.own import from_linen


class Conv(nn.Module):
    """A convolution, BatchNorm, ReLU [and max pooling]."""

    channels: int
    pool: int = 1

    @nn.compact
    def __call__(self, x, train: bool):
        """Map (B, H, W, C) to (B, H / pool, W / pool, channels)."""
        x = nn.Conv(self.channels, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return x if self.pool == 1 else nn.max_pool(x, (self.pool, self.pool), (self.pool, self.pool))


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


def resnet9(shape: tuple[int, int, int], classes: int, width: float = 1.0) -> Model:
    """Return the network for images (H, W, C)."""
    return from_linen("resnet9-linen", ResNet9(classes, width), shape, classes)
