"""The three MobileNets for small images: the stem has stride 1, and V2's second stage too."""

import functools
from typing import Any

import flax.linen as nn
import jax

from jaxfl.models.blocks import Activation, Conv, ConvBlock, DenseBlock, DepthwiseConv, Linear, chain
from jaxfl.models.build import NormName, Shape, has_norm, network, scaled
from jaxfl.models.conv import axis, spatial_mean, to_images, to_maps
from jaxfl.models.model import Block, Model


class Separable(nn.Module):
    """3x3 depthwise and 1x1 convolution, each [+ norm] + ReLU [+ global average pooling with `mean`]."""

    features: int
    stride: int = 1
    norm: bool = True
    mean: bool = False

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to (B, H', W', features), or to (B, features) with `mean`."""
        norm: dict[str, Any] = {"norm": self.norm, "bias": not self.norm}
        steps = (
            (DepthwiseConv(3, self.stride, name="depthwise", **norm), nn.relu),
            (Conv(self.features, 1, name="pointwise", **norm), nn.relu),
        )
        x = chain(self, to_maps(x), *steps, train=train, mask=mask)
        return spatial_mean(x) if self.mean else to_images(x)


class InvertedResidual(nn.Module):
    """1x1 convolution to `expanded` channels, depthwise convolution, 1x1 convolution without activation.

    Sandler et al. 2018, figure 3; Howard et al. 2019, figure 4. Without `expanded` the first convolution is
    left out. With `squeezed` a gate of that many features follows the second one. The input is added where
    the shape stays the same.
    """

    features: int
    expanded: int
    kernel: int = 3
    stride: int = 1
    squeezed: int = 0
    activation: Activation = nn.relu6
    norm: bool = True

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to (B, H', W', features)."""
        norm: dict[str, Any] = {"norm": self.norm, "bias": not self.norm}
        run = functools.partial(chain, self, train=train, mask=mask)
        x = y = to_maps(x)
        if self.expanded:
            y = run(y, (Conv(self.expanded, 1, name="expand", **norm), self.activation))
        y = run(y, (DepthwiseConv(self.kernel, self.stride, name="depthwise", **norm), self.activation))
        if self.squeezed:
            y = SqueezeExcite(self.squeezed, name="gate")(y, train=train, mask=mask)
        y = run(y, (Conv(self.features, 1, name="project", **norm), jax.nn.identity))
        return to_images(x + y if x.shape == y.shape else y)


class SqueezeExcite(nn.Module):
    """Gate that scales channels of maps by a function of their means (Hu et al. 2018, arXiv:1709.01507)."""

    features: int

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Return maps of the same shape."""
        y = nn.relu(Linear(self.features, name="squeeze")(spatial_mean(x), train=train, mask=mask))
        y = Linear(x.shape[axis("C")], name="excite")(y, train=train, mask=mask)
        return x * to_maps(nn.hard_sigmoid(y)[:, None, None])


def mobilenet_v1(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "batch") -> Model:
    """A stem and 13 depthwise separable convolutions, 32 to 1024 channels (Howard et al. 2017).

    arXiv:1704.04861, table 1.
    """
    batch = has_norm(norm)
    layers = [
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        *[(512, 1)] * 5,
        (1024, 2),
        (1024, 1),
    ]
    body = [Block("stem", ConvBlock(scaled(width, 32), 3, 1, norm=batch, bias=not batch))]
    body += [
        Block(f"separable{i}", Separable(scaled(width, channels), stride, batch, mean=i == len(layers)))
        for i, (channels, stride) in enumerate(layers, 1)
    ]
    return network("mobilenet_v1", body, shape=shape, classes=classes)


def mobilenet_v2(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "batch") -> Model:
    """A stem, 17 inverted residuals of 16 to 320 channels, a 1x1 convolution (Sandler et al. 2018).

    arXiv:1801.04381, table 2. A change of width has no shortcut, as in the paper.
    """
    batch = has_norm(norm)
    conv = functools.partial(ConvBlock, norm=batch, bias=not batch, activation=nn.relu6)
    stages = [
        # expansion, channels, blocks, stride of the first
        (0, 16, 1, 1),
        (6, 24, 2, 1),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]
    modules, entering = [], scaled(width, 32)
    body = [Block("stem", conv(entering, 3, 1))]
    for expansion, channels, blocks, stride in stages:
        features = scaled(width, channels)
        for i in range(blocks):
            expanded = expansion * entering
            modules.append(InvertedResidual(features, expanded, 3, 1 if i else stride, norm=batch))
            entering = features
    body += [Block(f"residual{i}", module) for i, module in enumerate(modules, 1)]
    body.append(Block("conv", conv(scaled(width, 1280), 1, mean=True)))
    return network("mobilenet_v2", body, shape=shape, classes=classes)


def mobilenet_v3(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "batch") -> Model:
    """V3-Small: a stem, 11 inverted residuals, most with a gate, hard swish (Howard et al. 2019).

    arXiv:1905.02244, table 2. The gates have a quarter of the expanded channels, rounded to the next multiple
    of eight, as in the authors' code.
    """
    batch, relu, swish = has_norm(norm), nn.relu, nn.hard_swish
    conv = functools.partial(ConvBlock, norm=batch, bias=not batch, activation=swish)
    layers = [
        # kernel, expanded channels, gate, channels, activation, stride
        (3, 0, 8, 16, relu, 2),
        (3, 72, 0, 24, relu, 2),
        (3, 88, 0, 24, relu, 1),
        (5, 96, 24, 40, swish, 2),
        (5, 240, 64, 40, swish, 1),
        (5, 240, 64, 40, swish, 1),
        (5, 120, 32, 48, swish, 1),
        (5, 144, 40, 48, swish, 1),
        (5, 288, 72, 96, swish, 2),
        (5, 576, 144, 96, swish, 1),
        (5, 576, 144, 96, swish, 1),
    ]
    body = [Block("stem", conv(scaled(width, 16), 3, 1))]
    for i, (kernel, expanded, squeezed, channels, activation, stride) in enumerate(layers, 1):
        expanded, squeezed = (scaled(width, count) if count else 0 for count in (expanded, squeezed))
        module = InvertedResidual(
            scaled(width, channels), expanded, kernel, stride, squeezed, activation, norm=batch
        )
        body.append(Block(f"residual{i}", module))
    body += [
        Block("conv", conv(scaled(width, 576), 1, mean=True)),
        Block("fc1", DenseBlock(scaled(width, 1024), activation=swish)),
    ]
    return network("mobilenet_v3", body, shape=shape, classes=classes)
