"""A small convolutional network with dropout, the CNN1 of pFedClub.

Wang et al., "Controllable heterogeneous model aggregation for personalized federated learning"
(pFedClub).
"""

from jaxfl.errors import JaxflError
from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import NormName, has_norm, plain_cnn, scaled
from jaxfl.models.model import Model


def cnn_dropout(
    *,
    shape: tuple[int, int, int],
    classes: int,
    width: float = 1.0,
    norm: NormName = "none",
    dropout: float = 0.5,
) -> Model:
    """Two 5x5 convolutions of 10 and 64 channels, a dense layer of 50, dropout before the head.

    Args:
        shape: (H, W, C) of the images.
        classes: Number of classes.
        width: Factor on the hidden channels and features.
        norm: "batch" adds BatchNorm after the convolutions.
        dropout: Probability of dropping a feature, at least 0 and below 1.

    Raises:
        JaxflError: If an argument is out of range.
    """
    if not 0 <= dropout < 1:
        raise JaxflError(f"dropout is {dropout}; give a probability from 0 up to, but not, 1.")
    batch = has_norm(norm)
    convs = [ConvBlock(scaled(width, c), 5, pool=2, norm=batch, bias=not batch) for c in (10, 64)]
    denses = [DenseBlock(scaled(width, 50), dropout=dropout)]
    return plain_cnn("cnn_dropout", convs, denses, shape=shape, classes=classes)
