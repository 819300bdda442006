"""Densely connected networks with bottlenecks and compression, DenseNet-BC.

Huang et al. 2017, arXiv:1608.06993.
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxfl.models.blocks import Conv, ConvBlock, Norm, leave_tap
from jaxfl.models.build import Shape, network, scaled
from jaxfl.models.conv import axis, mean_pool, spatial_mean, to_images, to_maps
from jaxfl.models.model import Block, Model
from jaxfl.models.zoo.stem import ImageNetStem, StemName, first_block


class DenseLayer(nn.Module):
    """Norm, ReLU, 1x1 convolution to 4 growth; norm, ReLU, 3x3 convolution to growth; joined to the input.

    The network's last layer applies `pool` at its end, after one more norm and ReLU. The tap of the 3x3
    convolution is its own channels, without a norm: the norm of the next layer is over all channels so far.
    The network's last tap is the output of its last norm, over all channels.
    """

    growth: int
    pool: Callable[[jax.Array], jax.Array] | None = None
    extends = ("norm", "conv1")  # layers that see its input, see `jaxfl.models.repeated`

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to (B, H, W, C + growth), or to (B, C + growth) with a global `pool`."""
        x = to_maps(x)
        y = nn.relu(Norm(name="norm")(x, train=train, mask=mask))
        y = Conv(4 * self.growth, 1, norm=True, bias=False, name="conv1")(y, train=train, mask=mask)
        leave_tap(self, y)
        y = nn.relu(y)
        y = Conv(self.growth, 3, padding=1, bias=False, name="conv2")(y, train=train, mask=mask)
        x = jnp.concatenate([x, y], axis("C"))
        if not self.pool:
            leave_tap(self, y)
            return to_images(x)
        x = Norm(name="last_norm")(x, train=train, mask=mask)
        leave_tap(self, x)
        return self.pool(nn.relu(x))


class Transition(nn.Module):
    """Norm, ReLU, 1x1 convolution to half of the channels, 2x2 mean pooling."""

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to (B, H // 2, W // 2, C // 2)."""
        x = to_maps(x)
        half = x.shape[axis("C")] // 2
        x = nn.relu(Norm(name="norm")(x, train=train, mask=mask))
        x = Conv(half, 1, bias=False, name="conv")(x, train=train, mask=mask)
        leave_tap(self, x)
        return to_images(mean_pool(x))


def _densenet(counts: Sequence[int], growth: int, convolutions: int) -> Callable[..., Model]:
    """Return the factory of a network with `counts` layers in its four stages."""
    name = f"densenet{convolutions + 1}"

    def factory(*, shape: Shape, classes: int, width: float = 1.0, stem: StemName = "cifar") -> Model:
        features, added = scaled(width, 2 * growth), scaled(width, growth)
        # The first layer normalises.
        plain = ConvBlock(features, 3, 1, bias=False, activation=jax.nn.identity)
        body = [first_block(stem, cifar=plain, imagenet=ImageNetStem(features))]
        for stage, count in enumerate(counts, 1):
            if stage > 1:
                body.append(Block(f"transition{stage - 1}", Transition()))
            for i in range(1, count + 1):
                pool = spatial_mean if (stage, i) == (4, count) else None
                body.append(Block(f"dense{stage}_{i}", DenseLayer(added, pool)))
        # Three 2x2 poolings; the stem for large images takes a quarter of 29 pixels, rounded up.
        minimum = 29 if stem == "imagenet" else 8
        return network(name, body, shape=shape, classes=classes, minimum=minimum)

    *first, last = counts
    layers = f"{', '.join(map(str, first))} and {last} layers"
    factory.__doc__ = f"""{layers} that add {growth} channels each; {convolutions} convolutions.

    Huang et al. 2017, table 1. Every layer is a block, so that a network can be cut after each of them; its
    output has all channels so far.
    """
    return factory


densenet121 = _densenet((6, 12, 24, 16), 32, 120)
densenet161 = _densenet((6, 12, 36, 24), 48, 160)
densenet169 = _densenet((6, 12, 32, 32), 32, 168)
densenet201 = _densenet((6, 12, 48, 32), 32, 200)
