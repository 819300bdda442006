"""Normalisation of images, and of targets, by the mean and spread of those that clients train on."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError
from jaxfl.tasks import REGRESSION

Pair = tuple[np.ndarray, np.ndarray]  # mean and standard deviation


class Moments(NamedTuple):
    """What a run normalises by, in raw units."""

    mean: np.ndarray  # (1, 1, 1, C), of the channels of images, or (1, H, W, C), of each value on its own
    std: np.ndarray  # the same
    target: Pair | None = None  # mean and deviation (k,) of the targets; None for classes


def training_moments(source: Source, train: Sequence[np.ndarray], normalise: str = "auto") -> Moments:
    """Return the moments of the rows that clients train on, each counted once.

    No other row has an effect on them: neither those for validation and testing, nor public or unused ones.

    Raises:
      JaxflError: if tokens are to be normalised.
    """
    if source.vocabulary and normalise in ("channel", "feature"):
        raise JaxflError(
            f"--normalise {normalise}: {source.name} holds tokens, which are no amounts; leave it out."
        )
    rows = np.unique(np.concatenate(train))
    target = None
    if source.task is REGRESSION:
        known = source.labels[rows].astype(float)
        target = known.mean(0), np.where(np.ptp(known, 0) > 0, known.std(0), 1)
    return Moments(*moments(source.images, rows, normalise), target)


def moments(images: np.ndarray, rows: np.ndarray, normalise: str = "auto") -> Pair:
    """Return mean and standard deviation of some images as float64; 1 where values are constant.

    Args:
      images: (N, H, W, C), or tokens (N, T), which have 0 and 1: they are not normalised.
      rows: those that count.
      normalise: "channel" and "auto" are of each channel, "feature" of each value on its own; "none" is 0
        and 1.
    """
    if normalise == "none" or images.dtype == np.int32:
        channels = 1 if images.dtype == np.int32 else images.shape[-1]
        return np.zeros((1, 1, 1, channels)), np.ones((1, 1, 1, channels))
    if normalise == "feature":
        flat, shape = images.reshape(len(images), 1, 1, -1), (1, *images.shape[1:])
        mean, std = moments(flat, rows)
        return mean.reshape(shape), std.reshape(shape)
    few = np.array_split(rows, -(-len(rows) // 1024))  # as float64, all would not fit in memory
    mean, variance = (_of_bytes if images.dtype == np.uint8 else _of_numbers)(images, few)
    return mean, np.where(variance > 0, np.sqrt(variance), 1)


def _of_bytes(images: np.ndarray, few: list[np.ndarray]) -> Pair:
    """Return mean and variance from the counts of each value, so that no image becomes float64."""

    def occurrences(rows):
        return [np.bincount(images[rows, ..., c].ravel(), minlength=256) for c in range(images.shape[-1])]

    times = np.sum([occurrences(rows) for rows in few], 0).T  # (256, C)
    values = np.arange(256.0)[:, None]
    mean = np.average(np.broadcast_to(values, times.shape), 0, times)
    variance = np.average(np.square(values - mean), 0, times)
    return mean[None, None, None], variance[None, None, None]


def _of_numbers(images: np.ndarray, few: list[np.ndarray]) -> Pair:
    count = sum(map(len, few)) * np.prod(images.shape[1:3])

    def average(f):
        of_few = [f(images[rows].astype(np.float64)).sum((0, 1, 2), keepdims=True) for rows in few]
        return np.sum(of_few, 0) / count

    mean = average(lambda some: some)
    return mean, average(lambda some: np.square(some - mean))


def normalised(images, mean, std):
    """Normalise images (B, H, W, C) in raw units for networks, and leave tokens (B, T) int32 as they are.

    mean and std are (1, 1, 1, C).
    """
    if images.dtype == np.int32:
        return images
    return (images.astype(mean.dtype) - mean) / std
