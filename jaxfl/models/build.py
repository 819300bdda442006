"""Shared by the factories of the zoo: checks of their options, and building a model from blocks."""

import dataclasses
import math
from typing import Literal

from jaxfl.errors import JaxflError, nearest
from jaxfl.models.blocks import AdaptiveMean, ConvBlock, DenseBlock, Linear, Resize
from jaxfl.models.model import Block, Model

Shape = tuple[int, int, int]  # (H, W, C) of images
NormName = Literal["batch", "none"]
USUAL = {  # what options mean in all networks whose docstrings do not say it
    "width": "factor on the hidden channels and features.",
    "norm": '"batch" has BatchNorm after the convolutions, "none" has none.',
    "stem": '"cifar" is a 3x3 convolution, usual for 32x32 images; "imagenet" is the paper\'s 7x7 one and '
    "3x3 max pooling, both with stride 2.",
    "dropout": "probability of dropping a feature, at least 0 and below 1.",
    "features": "how many the classifier gets; by default the network's own.",
}


def choice(option: str, value: str, known: tuple[str, ...]) -> str:
    """Return `value` if it is one of `known`; `JaxflError` names the nearest of these, or all."""
    if value in known:
        return value
    raise JaxflError(f"There is no {option} {value!r}; {nearest(str(value), known)}")


def has_norm(norm: NormName) -> bool:
    """Return whether the option `norm` asks for BatchNorm; `JaxflError` if it is not "batch" or "none"."""
    return choice("norm", norm, ("batch", "none")) == "batch"


def probability(option: str, value: float) -> float:
    """Return `value`, a probability of dropout; `JaxflError` if it does not lie in [0, 1)."""
    if 0 <= value < 1:
        return value
    raise JaxflError(f"{option} is {value}; give a probability of at least 0 and below 1.")


def scaled(width: float, count: int) -> int:
    """Return `count` channels or features times `width`, rounded up; `JaxflError` unless it is positive."""
    if not 0 < width < math.inf:
        raise JaxflError(f"width is {width}; give a positive factor, 1.0 for the original network.")
    return max(1, math.ceil(round(width * count, 6)))  # 0.1 * 30 is 3.0000000000000004


def network(name: str, body: list[Block], *, shape: Shape, classes: int, minimum: int = 1) -> Model:
    """Complete a body to a model: classifier last and, for images below `minimum` pixels, resizing first.

    The last block of the body returns (B, d).

    Raises:
      JaxflError: if `shape` is not three positive numbers, `classes` is not positive, or the body convolves
        images of one pixel, which are vectors.
    """
    if len(shape) != 3 or min(shape) < 1:
        instead = "; tokens need a network that embeds them: --models gru" if len(shape) == 1 else ""
        raise JaxflError(
            f"{name} takes images of shape (height, width, channels), not {tuple(shape)}{instead}."
        )
    if classes < 1:
        raise JaxflError(f"{name} cannot have {classes} classes; give at least one.")
    blocks, note = [*body, Block("classifier", Linear(classes))], ""
    height, width = max(shape[0], minimum), max(shape[1], minimum)
    if (height, width) != tuple(shape[:2]):
        blocks.insert(0, Block("input", Resize(height, width)))
        note = (
            f"{name} takes images of at least {minimum}x{minimum}; "
            f"{shape[0]}x{shape[1]} images are resized to {height}x{width}."
        )
    model = Model(name, tuple(blocks), tuple(shape), classes, note)
    if tuple(shape[:2]) == (1, 1) and model.convolution_count:
        raise JaxflError(
            f"{name} convolves images, but the data are vectors of {shape[2]} features; take networks "
            "without convolutions: --models mlp."
        )
    return model


def with_features(model: Model, features: int) -> Model:
    """Return the model with `features` features before its classifier, which is built for them.

    If the body returns another number, a block "adapter" ends it: more are averaged (see `AdaptiveMean`),
    fewer are mapped by a linear layer that trains with the rest.

    Raises:
      JaxflError: if `features` is not positive, or the body returns maps.
    """
    if features < 1:
        raise JaxflError(f"features is {features}; {model.name} needs at least one.")
    if len(model.head.shape) != 1:
        raise JaxflError(
            f"{model.name} gives maps of shape {model.head.shape} to its last block, but features={features} "
            "needs vectors; flatten or pool in the block before it."
        )
    (found,), name = model.head.shape, f"{model.name},features={features}"
    if found == features:
        return dataclasses.replace(model, name=name)
    adapter, how = (AdaptiveMean, "averaged") if found > features else (Linear, "mapped")
    blocks = (*model.blocks[:-1], Block("adapter", adapter(features)), model.blocks[-1])
    note = f"{model.note} Its {found} features are {how} to {features}.".strip()
    return dataclasses.replace(model, name=name, blocks=blocks, note=note)


def plain_cnn(
    name: str, convs: list[ConvBlock], denses: list[DenseBlock], *, shape: Shape, classes: int
) -> Model:
    """Return the model conv1, conv2, ..., fc1, fc2, ..., classifier.

    Raises:
      JaxflError: as `network`.
    """
    body = [Block(f"conv{i}", module) for i, module in enumerate(convs, 1)]
    body += [Block(f"fc{i}", module) for i, module in enumerate(denses, 1)]
    return network(name, body, shape=shape, classes=classes, minimum=smallest(convs))


def smallest(convs: list[ConvBlock]) -> int:
    """Return the least height and width, in pixels, of which the convolutions leave one pixel."""
    side = 1
    for block in reversed(convs):
        side = (side * block.pool - 1) * block.stride + block.kernel
        side = max(1, side - 2 * block.padding)
    return side
