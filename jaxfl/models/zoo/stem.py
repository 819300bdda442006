"""The first block of residual and dense networks, by the size of the images."""

from typing import Literal

import flax.linen as nn

from jaxfl.models.blocks import Conv, leave_tap
from jaxfl.models.build import choice
from jaxfl.models.conv import max_pool, to_images, to_maps
from jaxfl.models.model import Block

StemName = Literal["cifar", "imagenet"]


class ImageNetStem(nn.Module):
    """7x7 convolution with stride 2 [+ norm] + ReLU + 3x3 max pooling with stride 2."""

    features: int
    norm: bool = True

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to (B, H/4, W/4, features), rounded up."""
        layer = Conv(self.features, 7, 2, 3, self.norm, not self.norm, name="conv")
        x = layer(to_maps(x), train=train, mask=mask)
        leave_tap(self, x)
        return to_images(max_pool(nn.relu(x), window=3, stride=2, padding=1))


def first_block(stem: StemName, imagenet: nn.Module, cifar: nn.Module) -> Block:
    """Return the block "stem" that an option asks for; `JaxflError` if it is not "cifar" or "imagenet"."""
    modules = {"cifar": cifar, "imagenet": imagenet}
    return Block("stem", modules[choice("stem", stem, tuple(modules))])
