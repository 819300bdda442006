"""Small convolutional networks for CompFL, including its two experts of unequal size.

Xu et al., "Cooperative multiple model training for personalized federated learning over
heterogeneous devices" (CompFL).
"""

import flax.linen as nn

from jaxfl.models.blocks import Activation, ConvBlock, DenseBlock
from jaxfl.models.build import NormName, Shape, has_norm, plain_cnn, scaled
from jaxfl.models.model import Model


def cifar_small(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none") -> Model:
    """Convolutions of 16, 32 and 64 channels, a dense layer of 128, leaky ReLU (slope 0.01)."""
    convs = _convs([(5, 0, 16), (5, 1, 32), (3, 1, 64)], width, norm, nn.leaky_relu)
    denses = [DenseBlock(scaled(width, 128), activation=nn.leaky_relu)]
    return plain_cnn("cifar_small", convs, denses, shape=shape, classes=classes)


def fmnist_small(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none") -> Model:
    """The small Fashion-MNIST expert: convolutions of 16 and 32 channels, a dense layer of 128.

    The paper gives only the number of layers; the sizes follow its first author's code.
    """
    convs = _convs([(5, 0, 16), (5, 1, 32)], width, norm, nn.relu)
    denses = [DenseBlock(scaled(width, 128))]
    return plain_cnn("fmnist_small", convs, denses, shape=shape, classes=classes)


def fmnist_large(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none") -> Model:
    """The large Fashion-MNIST expert: convolutions of 32, 64 and 128, dense layers of 256 and 128.

    The paper says that it has more layers than the small one; the sizes are ours.
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
