"""LeNet as it is used today, one of the four networks of MNFL's heterogeneous federation."""

from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import NormName, Shape, has_norm, plain_cnn, scaled
from jaxfl.models.model import Model


def lenet(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none") -> Model:
    """Two 5x5 convolutions of 6 and 16 channels, dense layers of 120 and 84 (LeCun et al. 1998).

    "Gradient-based learning applied to document recognition", Proceedings of the IEEE 86(11), with
    ReLU and max pooling.
    """
    batch = has_norm(norm)
    convs = [ConvBlock(scaled(width, c), 5, pool=2, norm=batch, bias=not batch) for c in (6, 16)]
    denses = [DenseBlock(scaled(width, features)) for features in (120, 84)]
    return plain_cnn("lenet", convs, denses, shape=shape, classes=classes)
