"""Public images from another data set, brought into the form of the clients' own."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxfl.data.colour import grey
from jaxfl.data.generators import OTHER_PUBLIC, generator
from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError
from jaxfl.machine.texts import few


class Public(NamedTuple):
    """Images that the server and all clients see, besides those of the federation's source."""

    images: np.ndarray  # (P, H, W, C) of the source's size and dtype
    labels: np.ndarray  # (P, ...) of the source's type
    labelled: bool  # whether the labels mean what the clients' do; otherwise they are not used
    checksum: str = ""  # of the images as they were read, and of their labels


def adapt(
    other: Source,
    source: Source,
    *,
    seed: int,
    size: int | None = None,
    labels: bool = False,
    owned: np.ndarray | None = None,
) -> Public:
    """Draw public images from another set and give them the size and colours of a source.

    They are resized (bilinear, smoothed where they shrink); a grey image is copied to all channels, and a
    coloured one becomes grey where the source is. Values stay as they are: clients normalise them as they do
    their own.

    Args:
      other: set whose training images are drawn.
      source: data of the clients.
      seed: seed of the draw.
      size: number of images; all by default.
      labels: whether the labels mean the same in both sets.
      owned: rows that clients have; images equal to theirs are not public, whatever their order in `other`,
        also as floats of the same values, or with other channels.

    Raises:
      JaxflError: if there are too few images, or channels, range of values, features or classes do not fit.
    """
    if other.vocabulary or source.vocabulary:
        raise JaxflError(
            f"--public {other.name}: tokens of another set do not mean the same; take --public held-out, "
            "some of the clients' own set."
        )
    rows = generator(seed, OTHER_PUBLIC).permutation(np.flatnonzero(other.train))
    if not len(rows):
        raise JaxflError(f"--public {other.name} has no training images to draw from; take another set.")
    if owned is not None and other.images.shape[1:3] == source.images.shape[1:3]:
        theirs = set(map(_digest, source.images[owned]))
        adapted = (image for part in _parts(rows) for image in _adapted(part, other, source))
        rows = rows[[_digest(image) not in theirs for image in adapted]]
        if not len(rows):
            raise JaxflError(
                f"--public {other.name}: clients have all of its training images; take another set, or "
                "--public held-out."
            )
    if size is not None and not 1 <= size <= len(rows):
        raise JaxflError(
            f"{other.name} has {len(rows)} training images to use as public ones; size= must lie in [1, "
            f"{len(rows)}], but is {size}."
        )
    if labels and (other.task, other.classes) != (source.task, source.classes):
        theirs = source.classes if other.task is source.task else _labels_of(source)
        raise JaxflError(
            f"The public images of {other.name} have {_labels_of(other)} and the clients' "
            f"{theirs}, so their labels do not mean the same; leave out labels=true."
        )
    if labels and _differ(other.class_names, source.class_names):
        raise JaxflError(
            f"The public images of {other.name} and the clients' call their classes differently, so their "
            "labels do not mean the same; leave out labels=true."
        )
    shapes = other.images.shape[1:], source.images.shape[1:]
    if any(1 in shape[:2] for shape in shapes) and shapes[0] != shapes[1]:
        raise JaxflError(
            f"The public examples of {other.name} have shape {shapes[0]} and the clients' {shapes[1]}; use "
            "vectors with the same features, or windows of the same form."
        )
    if _differ(other.features, source.features):
        raise JaxflError(
            f"The features of {other.name} are {few(other.features, 5)}, but the clients' are "
            f"{few(source.features, 5)} (a column of words is one for each word); take --public held-out, "
            "some of the clients' own table."
        )
    (low, top), (least, most) = map(_range, (other.images, source.images))
    span = most - least
    if abs(low - least) > span / 2 or not -span / 2 <= top - most <= span:
        raise JaxflError(
            f"Values run from {low:g} to {top:g} in the public images of {other.name} and from {least:g} to "
            f"{most:g} in {source.name}; bring both to one scale, or take --public held-out, some of the "
            "clients' own set."
        )
    rows = rows[:size]
    images = np.concatenate([_adapted(part, other, source) for part in _parts(rows)])
    known = other.labels[rows]
    if (other.task, other.classes) != (source.task, source.classes):
        known = np.zeros((len(rows), *source.labels.shape[1:]), source.labels.dtype)
    parts = [other.images[part].tobytes() for part in _parts(rows)]
    read = hashlib.sha256(b"".join([*parts, other.labels[rows].tobytes()])).hexdigest()
    return Public(images, known, labels, read)


def _range(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of a scale: 0, or the least if that is below, and the largest value."""
    return min(0.0, float(values.min())), float(values.max())


def _differ(names: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether names are others, where both sets have some."""
    return bool(names and others) and names != others


def _labels_of(source: Source) -> str:
    return f"{source.classes} {source.task.outputs}"


def _parts(rows: np.ndarray) -> list[np.ndarray]:
    """Divide rows, so that only some of their images are floats at a time."""
    return np.array_split(rows, -(-len(rows) // 1024))


def _adapted(rows: np.ndarray, other: Source, source: Source) -> np.ndarray:
    """Return some images of another set with the size, the channels and the dtype of a source."""
    *size, channels = source.images.shape[1:]
    images = _coloured(other.images[rows], channels, other.name)
    if images.shape[1:3] != tuple(size):
        images = np.asarray(jax.image.resize(images, (len(rows), *size, channels), "bilinear"))
    if source.images.dtype == np.uint8:
        images = np.clip(np.round(images), 0, 255)
    return images.astype(source.images.dtype)


def _digest(image: np.ndarray) -> bytes:
    """Return a digest that images of equal values share, and others do not."""
    values = np.ascontiguousarray(image, np.float32) + 0.0  # -0.0 is 0.0
    return hashlib.blake2b(values.data, digest_size=16).digest()


def _coloured(images: np.ndarray, channels: int, name: str) -> np.ndarray:
    images, given = images.astype(np.float32), images.shape[-1]
    if given == channels:
        return images
    if given == 1:
        return np.repeat(images, channels, -1)
    if (given, channels) == (3, 1):
        return grey(images)
    raise JaxflError(
        f"The public images of {name} have {given} channels and the clients' {channels}; convert them, or "
        "take --public held-out, some of the clients' own set."
    )
