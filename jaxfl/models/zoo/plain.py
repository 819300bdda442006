"""Plain networks: convolutions in a row, dense layers, a classifier, from the papers of several methods.

CompFL: Xu et al. 2024, "Cooperative multiple model training for personalized federated learning over
heterogeneous devices". FedCMD: Chen et al. 2024, "Towards optimal customized architecture for heterogeneous
federated learning with contrastive cloud-edge model decoupling". pFedClub, whose networks are `cnn1` to
`cnn4`: Wang et al. 2024, "Controllable heterogeneous model aggregation for personalized federated learning",
appendix B, for 32x32 colour images. It gives kernels, poolings and order; the widths are from its authors'
code. `lenet` and `alexnet` are two of the four networks of MNFL's heterogeneous federation.
"""

from typing import Literal

import flax.linen as nn

from jaxfl.errors import JaxflError
from jaxfl.models.blocks import Activation, ConvBlock, DenseBlock
from jaxfl.models.build import NormName, Shape, choice, has_norm, plain_cnn, probability, scaled
from jaxfl.models.model import Model


def mlp(
    *, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none", hidden: int = 100
) -> Model:
    """Flatten, hidden layer, ReLU, classifier: 784-100-10 on 28x28 grey images.

    Args:
      hidden: number of hidden features.
    """
    if hidden < 1:
        raise JaxflError(f"hidden is {hidden}; mlp needs at least one hidden feature.")
    layer = DenseBlock(scaled(width, hidden), has_norm(norm))
    return plain_cnn("mlp", [], [layer], shape=shape, classes=classes)


def lenet(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none") -> Model:
    """Two 5x5 convolutions of 6 and 16 channels, dense layers of 120 and 84 (LeCun et al. 1998).

    "Gradient-based learning applied to document recognition", Proceedings of the IEEE 86(11), with
    ReLU and max pooling.
    """
    convs = _convs([(5, 0, 2, 6), (5, 0, 2, 16)], width, norm)
    return plain_cnn("lenet", convs, _denses(width, 120, 84), shape=shape, classes=classes)


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
    denses = _denses(width, *(120, 84, 64)[: depth - 1])
    return plain_cnn("lenet5", convs, denses, shape=shape, classes=classes)


def mcmahan(
    *,
    shape: Shape,
    classes: int,
    width: float = 1.0,
    norm: NormName = "none",
    padding: Literal["auto", "same", "valid"] = "auto",
) -> Model:
    """Two 5x5 convolutions of 32 and 64 channels, a dense layer of 512 (McMahan et al. 2017).

    arXiv:1602.05629, section 3, the network of the FedAvg paper. It pads ("same") 28x28 images; its usual
    reproductions on 32x32 images do not ("valid").

    Args:
      padding: "auto" is "valid" for images of at least 32x32 and "same" for smaller ones.
    """
    choice("padding", padding, ("auto", "same", "valid"))
    if padding == "auto":
        padding = "valid" if min(shape[:2], default=0) >= 32 else "same"
    pixels = {"same": 2, "valid": 0}[padding]
    convs = _convs([(5, pixels, 2, 32), (5, pixels, 2, 64)], width, norm)
    return plain_cnn("mcmahan", convs, _denses(width, 512), shape=shape, classes=classes)


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


def cifar_small(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none") -> Model:
    """Convolutions of 16, 32 and 64 channels, a dense layer of 128, leaky ReLU (slope 0.01).

    Of CompFL.
    """
    convs = _convs([(5, 0, 2, 16), (5, 1, 2, 32), (3, 1, 2, 64)], width, norm, nn.leaky_relu)
    denses = [DenseBlock(scaled(width, 128), activation=nn.leaky_relu)]
    return plain_cnn("cifar_small", convs, denses, shape=shape, classes=classes)


def fmnist_small(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none") -> Model:
    """The small Fashion-MNIST expert: convolutions of 16 and 32 channels, a dense layer of 128.

    Of CompFL, which gives only the number of layers; the sizes follow its first author's code.
    """
    convs = _convs([(5, 0, 2, 16), (5, 1, 2, 32)], width, norm)
    return plain_cnn("fmnist_small", convs, _denses(width, 128), shape=shape, classes=classes)


def fmnist_large(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none") -> Model:
    """The large Fashion-MNIST expert: convolutions of 32, 64 and 128, dense layers of 256 and 128.

    Of CompFL, which says that it has more layers than the small one; the sizes are ours.
    """
    convs = _convs([(3, 1, 2, 32), (3, 1, 2, 64), (3, 1, 2, 128)], width, norm)
    return plain_cnn("fmnist_large", convs, _denses(width, 256, 128), shape=shape, classes=classes)


def cnn1(
    *, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none", dropout: float = 0.5
) -> Model:
    """Two 5x5 convolutions of 10 and 64 channels, a dense layer of 50, dropout before the head."""
    convs = _convs([(5, 0, 2, 10), (5, 0, 2, 64)], width, norm)
    return plain_cnn("cnn1", convs, _denses(width, 50, dropout=dropout), shape=shape, classes=classes)


def cnn2(
    *, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none", dropout: float = 0.5
) -> Model:
    """Like cnn1, with a third 5x5 convolution of 128 channels."""
    convs = _convs([(5, 0, 2, 10), (5, 0, 2, 64), (5, 0, 1, 128)], width, norm)
    return plain_cnn("cnn2", convs, _denses(width, 50, dropout=dropout), shape=shape, classes=classes)


def cnn3(
    *, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none", dropout: float = 0.25
) -> Model:
    """Five 5x5 convolutions of 6 to 128 channels, dense layers of 1024, 128 and 64.

    The convolutions pad ("same"): without it, a 32x32 image would be too small for the paper's poolings.

    Args:
      dropout: probability of dropping a feature after the first dense layer, at least 0 and below 1.
    """
    layers = [(5, 2, 2, 6), (5, 2, 2, 16), (5, 2, 1, 32), (5, 2, 2, 64), (5, 2, 1, 128)]
    convs, denses = _convs(layers, width, norm), _denses(width, 1024, 128, 64, dropout=dropout)
    return plain_cnn("cnn3", convs, denses, shape=shape, classes=classes)


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
    denses = _denses(width, 1024, 512, 256, dropout=dropout)
    return plain_cnn("cnn4", convs, denses, shape=shape, classes=classes)


def _convs(
    layers: list[tuple[int, int, int, int]], width: float, norm: NormName, activation: Activation = nn.relu
) -> list[ConvBlock]:
    """Return a block for each (kernel, padding, pooling, channels)."""
    batch = has_norm(norm)
    return [
        ConvBlock(scaled(width, channels), kernel, padding, pool, batch, not batch, activation)
        for kernel, padding, pool, channels in layers
    ]


def _denses(width: float, *features: int, dropout: float = 0.0) -> list[DenseBlock]:
    """Return a block for each number of features, the first with dropout after it."""
    first, *others = (scaled(width, count) for count in features)
    return [DenseBlock(first, dropout=probability("dropout", dropout)), *map(DenseBlock, others)]
