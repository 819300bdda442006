"""AlexNet for small images, one of the four networks of MNFL's heterogeneous federation."""

from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import NormName, Shape, has_norm, plain_cnn, probability, scaled
from jaxfl.models.model import Model


def alexnet(
    *, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none", dropout: float = 0.5
) -> Model:
    """Five 3x3 convolutions of 64 to 384 channels, two dense layers of 4096, dropout before each.

    Krizhevsky et al. 2012, "ImageNet classification with deep convolutional neural networks", in the
    usual form for 32x32 images: small kernels, stride 2 in the first layer, no response normalisation.

    Args:
      dropout: probability of dropping an input of a dense layer, at least 0 and below 1.
    """
    batch, dropout = has_norm(norm), probability("dropout", dropout)
    convs = [
        ConvBlock(scaled(width, channels), 3, 1, pool, norm=batch, bias=not batch, stride=stride)
        for channels, stride, pool in [(64, 2, 2), (192, 1, 2), (384, 1, 1), (256, 1, 1), (256, 1, 2)]
    ]
    denses = [DenseBlock(scaled(width, 4096), input_dropout=dropout) for _ in range(2)]
    return plain_cnn("alexnet", convs, denses, shape=shape, classes=classes)
