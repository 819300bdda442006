"""Residual networks for small images."""

from jaxfl.models.blocks import BasicBlock, ConvBlock, ResidualPair
from jaxfl.models.build import NormName, has_norm, network, scaled
from jaxfl.models.conv import spatial_max, spatial_mean
from jaxfl.models.model import Block, Model


def resnet9(
    *,
    shape: tuple[int, int, int],
    classes: int,
    width: float = 1.0,
    norm: NormName = "batch",
) -> Model:
    """Four 3x3 convolutions and two residual pairs, global max pooling.

    The network of D. Page, "How to train your ResNet" (2018), the fast entry of the DAWNBench
    contest.

    Args:
        shape: (H, W, C) of the images.
        classes: Number of classes.
        width: Factor on the hidden channels.
        norm: "none" leaves out BatchNorm and gives the convolutions a bias.

    Raises:
        JaxflError: If an argument is out of range.
    """
    batch = has_norm(norm)

    def conv(channels: int, pool: int) -> ConvBlock:
        return ConvBlock(scaled(width, channels), 3, 1, pool, norm=batch, bias=not batch)

    body = [
        Block("conv1", conv(64, pool=1)),
        Block("conv2", conv(128, pool=2)),
        Block("residual1", ResidualPair(batch)),
        Block("conv3", conv(256, pool=2)),
        Block("conv4", conv(512, pool=2)),
        Block("residual2", ResidualPair(batch, pool=spatial_max)),
    ]
    return network("resnet9", body, shape=shape, classes=classes, minimum=8)  # three 2x2 poolings


def resnet18(
    *,
    shape: tuple[int, int, int],
    classes: int,
    width: float = 1.0,
    norm: NormName = "batch",
) -> Model:
    """A 3x3 stem without pooling, four stages of two basic blocks, global average pooling.

    He et al. 2016, arXiv:1512.03385, table 1, with the stem that is usual for 32x32 images.

    Args:
        shape: (H, W, C) of the images.
        classes: Number of classes.
        width: Factor on the hidden channels.
        norm: "none" leaves out BatchNorm and gives the convolutions a bias.

    Raises:
        JaxflError: If an argument is out of range.
    """
    batch = has_norm(norm)
    body = [Block("stem", ConvBlock(scaled(width, 64), 3, 1, norm=batch, bias=not batch))]
    for stage, (channels, stride) in enumerate([(64, 1), (128, 2), (256, 2), (512, 2)], 1):
        features, pool = scaled(width, channels), spatial_mean if stage == 4 else None
        body += [
            Block(f"stage{stage}_1", BasicBlock(features, stride, batch)),
            Block(f"stage{stage}_2", BasicBlock(features, 1, batch, pool)),
        ]
    return network("resnet18", body, shape=shape, classes=classes)
