"""Residual networks (He et al. 2016, arXiv:1512.03385)."""

from collections.abc import Callable, Sequence

from jaxfl.models.blocks import BasicBlock, Bottleneck, ConvBlock, ResidualPair
from jaxfl.models.build import NormName, Shape, has_norm, network, scaled
from jaxfl.models.conv import spatial_max, spatial_mean
from jaxfl.models.model import Block, Model
from jaxfl.models.zoo.stem import ImageNetStem, StemName, first_block


def resnet9(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "batch") -> Model:
    """Four 3x3 convolutions and two residual pairs, global max pooling.

    The network of D. Page, "How to train your ResNet" (2018), the fast entry of the DAWNBench
    contest.
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


def _resnet(block: type[BasicBlock | Bottleneck], counts: Sequence[int]) -> Callable[..., Model]:
    """Return the factory of a network with `counts` blocks in its four stages."""
    each, kind = {BasicBlock: (2, "basic blocks"), Bottleneck: (3, "bottlenecks")}[block]
    convolutions = 1 + each * sum(counts)
    name = f"resnet{convolutions + 1}"

    def factory(
        *, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "batch", stem: StemName = "cifar"
    ) -> Model:
        batch, features = has_norm(norm), scaled(width, 64)
        small = ConvBlock(features, 3, 1, norm=batch, bias=not batch)
        body = [first_block(stem, cifar=small, imagenet=ImageNetStem(features, batch))]
        for stage, count in enumerate(counts, 1):
            features = scaled(width, 32 * 2**stage)
            for i in range(1, count + 1):
                stride = 2 if i == 1 and stage > 1 else 1
                pool = spatial_mean if (stage, i) == (4, count) else None
                body.append(Block(f"stage{stage}_{i}", block(features, stride, batch, pool)))
        return network(name, body, shape=shape, classes=classes)

    *first, last = map(str, counts)
    factory.__doc__ = f"""{", ".join(first)} and {last} {kind} in four stages; {convolutions} convolutions.

    He et al. 2016, arXiv:1512.03385, table 1.
    """
    return factory


resnet18 = _resnet(BasicBlock, (2, 2, 2, 2))
resnet50 = _resnet(Bottleneck, (3, 4, 6, 3))
resnet101 = _resnet(Bottleneck, (3, 4, 23, 3))
resnet152 = _resnet(Bottleneck, (3, 8, 36, 3))
