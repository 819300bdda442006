"""Small convolutional networks for CompFL, including its two experts of unequal size.

Xu et al., "Cooperative multiple model training for personalized federated learning over
heterogeneous devices" (CompFL).
"""

import flax.linen as nn

from jaxfl.models.blocks import Activation, ConvBlock, DenseBlock
from jaxfl.models.build import NormName, has_norm, plain_cnn, scaled
from jaxfl.models.model import Model


def cifar_small(
    *,
    shape: tuple[int, int, int],
    classes: int,
    width: float = 1.0,
    norm: NormName = "none",
) -> Model:
    """Convolutions of 16, 32 and 64 channels, a dense layer of 128, leaky ReLU (slope 0.01).

    Args:
      shape: (H, W, C) of the images.
      classes: number of classes.
      width: factor on the hidden channels and features.
      norm: "batch" adds BatchNorm after the convolutions.

    Raises:
      JaxflError: if an argument is out of range.
    """
    convs = _convs([(5, 0, 16), (5, 1, 32), (3, 1, 64)], width, norm, nn.leaky_relu)
    denses = [DenseBlock(scaled(width, 128), activation=nn.leaky_relu)]
    return plain_cnn("cifar_small", convs, denses, shape=shape, classes=classes)


def fmnist_small(
    *,
    shape: tuple[int, int, int],
    classes: int,
    width: float = 1.0,
    norm: NormName = "none",
) -> Model:
    """The small Fashion-MNIST expert: convolutions of 16 and 32 channels, a dense layer of 128.

    The paper gives only the number of layers; the sizes follow its first author's code.

    Args:
      shape: (H, W, C) of the images.
      classes: number of classes.
      width: factor on the hidden channels and features.
      norm: "batch" adds BatchNorm after the convolutions.

    Raises:
      JaxflError: if an argument is out of range.
    """
    convs = _convs([(5, 0, 16), (5, 1, 32)], width, norm, nn.relu)
    denses = [DenseBlock(scaled(width, 128))]
    return plain_cnn("fmnist_small", convs, denses, shape=shape, classes=classes)


def fmnist_large(
    *,
    shape: tuple[int, int, int],
    classes: int,
    width: float = 1.0,
    norm: NormName = "none",
) -> Model:
    """The large Fashion-MNIST expert: convolutions of 32, 64 and 128, dense layers of 256 and 128.

    The paper says that it has more layers than the small one; the sizes are ours.

    Args:
      shape: (H, W, C) of the images.
      classes: number of classes.
      width: factor on the hidden channels and features.
      norm: "batch" adds BatchNorm after the convolutions.

    Raises:
      JaxflError: if an argument is out of range.
    """
    convs = _convs([(3, 1, 32), (3, 1, 64), (3, 1, 128)], width, norm, nn.relu)
    denses = [DenseBlock(scaled(width, features)) for features in (256, 128)]
    return plain_cnn("fmnist_large", convs, denses, shape=shape, classes=classes)


def _convs(
    layers: list[tuple[int, int, int]], width: float, norm: NormName, activation: Activation
) -> list[ConvBlock]:
    """Return a block with 2x2 max pooling for each (kernel, padding, channels)."""
    batch = has_norm(norm)
    return [
        ConvBlock(scaled(width, channels), kernel, padding, 2, batch, not batch, activation)
        for kernel, padding, channels in layers
    ]
