"""LeNet5 with BatchNorm, the network of FedCMD.

Chen et al., "Towards optimal customized architecture for heterogeneous federated learning with
contrastive cloud-edge model decoupling" (FedCMD).
"""

from jaxfl.errors import JaxflError
from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import NormName, Shape, has_norm, plain_cnn, scaled
from jaxfl.models.model import Model


def lenet5(
    *, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "batch", depth: int = 3
) -> Model:
    """Two 5x5 convolutions of 6 and 16 channels, dense layers of 120 and 84 (depth 4: and 64).

    FedCMD's tables XI (depth 3), XII (depth 2) and XIII (depth 4). The convolutions keep their bias before
    BatchNorm. The tables print three input channels for the second convolution and a single pooling; their
    dense layers fit six channels and two poolings.

    Args:
      depth: number of dense layers including the classifier: 2, 3 (the main variant) or 4.
    """
    if depth not in (2, 3, 4):
        raise JaxflError(f"depth is {depth}; lenet5 has 2, 3 or 4 dense layers.")
    convs = [ConvBlock(scaled(width, c), 5, pool=2, norm=has_norm(norm)) for c in (6, 16)]
    denses = [DenseBlock(scaled(width, features)) for features in (120, 84, 64)[: depth - 1]]
    return plain_cnn("lenet5", convs, denses, shape=shape, classes=classes)
