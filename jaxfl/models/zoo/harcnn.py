"""A convolutional network for windows of a signal, of activity recognition."""

import flax.linen as nn
import jax.numpy as jnp

from jaxfl.errors import JaxflError
from jaxfl.models.blocks import Conv, DenseBlock, chain
from jaxfl.models.build import Shape, network, scaled
from jaxfl.models.conv import axis, pooled_along, to_images, to_maps
from jaxfl.models.model import Block, Model


class SignalBlock(nn.Module):
    """Convolution along the steps + ReLU + max pooling of pairs of steps."""

    features: int
    kernel: int

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map windows (B, 1, T, C) to (B, 1, T', features), T' = (T - kernel + 1) // 2."""
        layer = Conv(self.features, (1, self.kernel), name="conv")
        x = chain(self, to_maps(x), (layer, nn.relu), train=train, mask=mask)
        return to_images(pooled_along(axis("W"), jnp.maximum, x, 2, 2))


def harcnn(*, shape: Shape, classes: int, width: float = 1.0, kernel: int = 9) -> Model:
    """Two convolutions along the steps, of 32 and 64 channels, dense layers of 1024 and 512, a classifier.

    The network of PFLlib and HtFLlib for human activity recognition (Zhang et al. 2023, arXiv:2312.04992).

    Args:
      kernel: number of steps that a convolution sees.
    """
    if len(shape) != 3 or shape[0] != 1:
        raise JaxflError(
            f"harcnn takes windows of a signal, (1, T, C), not examples of shape {tuple(shape)}."
        )
    if kernel < 1:
        raise JaxflError(f"kernel is {kernel}; harcnn needs one of at least one step.")
    if shape[1] < (least := 3 * kernel + 1):
        raise JaxflError(
            f"harcnn takes windows of at least {least} steps, but these have {shape[1]}; give it a smaller "
            f"kernel, now {kernel}: harcnn,kernel={max(1, (shape[1] - 1) // 3)}."
        )
    body = [Block(f"conv{i}", SignalBlock(scaled(width, n), kernel)) for i, n in ((1, 32), (2, 64))]
    body += [Block(f"fc{i}", DenseBlock(scaled(width, n))) for i, n in ((1, 1024), (2, 512))]
    return network("harcnn", body, shape=shape, classes=classes)
