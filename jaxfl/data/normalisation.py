"""Normalisation of images by mean and spread of each channel of a source's training images."""

import numpy as np

from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError


def moments(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each channel, (1, 1, 1, C) float64; 1 where it is constant."""
    parts = np.array_split(images, -(-len(images) // 1024))  # as float64, all would not fit in memory
    mean, variance = (_of_bytes if images.dtype == np.uint8 else _of_numbers)(parts)
    return mean, np.where(variance > 0, np.sqrt(variance), 1)


def _of_bytes(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance from the counts of each value, so that no image becomes float64."""

    def occurrences(part):
        return np.stack([np.bincount(part[..., c].ravel(), minlength=256) for c in range(part.shape[-1])], -1)

    times = np.sum([occurrences(part) for part in parts], 0)  # (256, C)
    values = np.arange(256.0)[:, None]
    mean = np.average(np.broadcast_to(values, times.shape), 0, times)
    variance = np.average(np.square(values - mean), 0, times)
    return mean[None, None, None], variance[None, None, None]


def _of_numbers(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    count = sum(part.size for part in parts) / parts[0].shape[-1]

    def total(f):
        return sum(f(part.astype(np.float64)).sum((0, 1, 2), keepdims=True) for part in parts)

    mean = total(lambda part: part) / count
    return mean, total(lambda part: np.square(part - mean)) / count


def training_moments(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Return the `moments` of a source's training images.

    Raises:
      JaxflError: if there are none.
    """
    if not source.train.any():
        raise JaxflError(
            f"{source.name} has no training images, which are needed to normalise all images; add some."
        )
    return moments(source.images[source.train])


def normalised(images, mean, std):
    """Normalise images (B, H, W, C) in raw units for networks; mean and std are (1, 1, 1, C)."""
    return (images.astype(mean.dtype) - mean) / std
