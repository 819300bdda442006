"""The convolutional network of the FedAvg paper."""

from typing import Literal

from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import NormName, Shape, choice, has_norm, plain_cnn, scaled
from jaxfl.models.model import Model


def mcmahan(
    *,
    shape: Shape,
    classes: int,
    width: float = 1.0,
    norm: NormName = "none",
    padding: Literal["auto", "same", "valid"] = "auto",
) -> Model:
    """Two 5x5 convolutions of 32 and 64 channels, a dense layer of 512 (McMahan et al. 2017).

    arXiv:1602.05629, section 3. The paper's network for 28x28 images pads ("same"); its usual
    reproductions on 32x32 images do not ("valid").

    Args:
      padding: "auto" is "valid" for images of at least 32x32 and "same" for smaller ones.
    """
    choice("padding", padding, ("auto", "same", "valid"))
    if padding == "auto":
        padding = "valid" if min(shape[:2], default=0) >= 32 else "same"
    pixels, batch = {"same": 2, "valid": 0}[padding], has_norm(norm)
    convs = [
        ConvBlock(scaled(width, channels), 5, pixels, pool=2, norm=batch, bias=not batch)
        for channels in (32, 64)
    ]
    denses = [DenseBlock(scaled(width, 512))]
    return plain_cnn("mcmahan", convs, denses, shape=shape, classes=classes)
