"""The four convolutional networks of pFedClub, which takes their blocks apart and assembles them anew.

Wang et al. 2024, "Controllable heterogeneous model aggregation for personalized federated learning"
(pFedClub), appendix B, for 32x32 colour images. It gives kernels, poolings and order; the widths are
from its authors' code.
"""

from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import NormName, Shape, has_norm, plain_cnn, probability, scaled
from jaxfl.models.model import Model


def cnn1(
    *, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none", dropout: float = 0.5
) -> Model:
    """Two 5x5 convolutions of 10 and 64 channels, a dense layer of 50, dropout before the head."""
    convs = _convs([(5, 0, 2, 10), (5, 0, 2, 64)], width, norm)
    denses = [DenseBlock(scaled(width, 50), dropout=probability("dropout", dropout))]
    return plain_cnn("cnn1", convs, denses, shape=shape, classes=classes)


def cnn2(
    *, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none", dropout: float = 0.5
) -> Model:
    """Like cnn1, with a third 5x5 convolution of 128 channels."""
    convs = _convs([(5, 0, 2, 10), (5, 0, 2, 64), (5, 0, 1, 128)], width, norm)
    denses = [DenseBlock(scaled(width, 50), dropout=probability("dropout", dropout))]
    return plain_cnn("cnn2", convs, denses, shape=shape, classes=classes)


def cnn3(
    *, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none", dropout: float = 0.25
) -> Model:
    """Five 5x5 convolutions of 6 to 128 channels, dense layers of 1024, 128 and 64.

    The convolutions pad ("same"): without it, a 32x32 image would be too small for the paper's poolings.

    Args:
      dropout: probability of dropping a feature after the first dense layer, at least 0 and below 1.
    """
    layers = [(5, 2, 2, 6), (5, 2, 2, 16), (5, 2, 1, 32), (5, 2, 2, 64), (5, 2, 1, 128)]
    first, *others = (scaled(width, features) for features in (1024, 128, 64))
    denses = [DenseBlock(first, dropout=probability("dropout", dropout)), *map(DenseBlock, others)]
    return plain_cnn("cnn3", _convs(layers, width, norm), denses, shape=shape, classes=classes)


def cnn4(
    *,
    shape: Shape,
    classes: int,
    width: float = 1.0,
    norm: NormName = "batch",
    dropout: float = 0.1,
    channel_dropout: float = 0.05,
) -> Model:
    """Six 3x3 convolutions of 32 to 256 channels, dense layers of 1024, 512 and 256.

    The first, third and fifth convolution have BatchNorm; all keep their bias. The kernels are the
    code's; the paper prints 5x5 for the first and the fourth.

    Args:
      dropout: probability of dropping a feature after the first dense layer, at least 0 and below 1.
      channel_dropout: probability of dropping a channel after the fourth convolution, at least 0 and below 1.
    """
    batch = has_norm(norm)
    layers = [
        # channels, BatchNorm, pooling, dropout of channels
        (32, batch, 1, 0.0),
        (64, False, 2, 0.0),
        (128, batch, 1, 0.0),
        (128, False, 2, probability("channel_dropout", channel_dropout)),
        (256, batch, 1, 0.0),
        (256, False, 2, 0.0),
    ]
    convs = [
        ConvBlock(scaled(width, channels), 3, 1, pool, normed, dropout=rate)
        for channels, normed, pool, rate in layers
    ]
    first, *others = (scaled(width, features) for features in (1024, 512, 256))
    denses = [DenseBlock(first, dropout=probability("dropout", dropout)), *map(DenseBlock, others)]
    return plain_cnn("cnn4", convs, denses, shape=shape, classes=classes)


def _convs(layers: list[tuple[int, int, int, int]], width: float, norm: NormName) -> list[ConvBlock]:
    """Return a block for each (kernel, padding, pooling, channels)."""
    batch = has_norm(norm)
    return [
        ConvBlock(scaled(width, channels), kernel, padding, pool, batch, not batch)
        for kernel, padding, pool, channels in layers
    ]
