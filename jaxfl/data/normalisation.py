"""How images are normalised: by the mean and the spread of each channel of a source's training images."""

import numpy as np

from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError


def moments(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel, (1, 1, 1, C) float64; 1 where a channel never changes."""
    parts = np.array_split(images, -(-len(images) // 1024))  # as float64, all would not fit in memory
    count = images.size // images.shape[-1]

    def total(f):
        return sum(f(part.astype(np.float64)).sum((0, 1, 2), keepdims=True) for part in parts)

    mean = total(lambda part: part) / count
    std = np.sqrt(total(lambda part: np.square(part - mean)) / count)
    return mean, np.where(std > 0, std, 1)


def training_moments(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Those of a source's training images.

    Raises:
      JaxflError: if there are none.
    """
    if not source.train.any():
        raise JaxflError(f"{source.name} has no training images, by which images are normalised.")
    return moments(source.images[source.train])


def normalised(images, mean, std):
    """What networks are given for images (B, H, W, C) in raw units; mean and std are (1, 1, 1, C)."""
    return (images.astype(mean.dtype) - mean) / std
