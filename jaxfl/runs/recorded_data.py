"""What a run's configuration says of its data: shape, moments, and a checksum to know them again by."""

import hashlib
from pathlib import Path

import numpy as np

from jaxfl.data.federation import Federation
from jaxfl.data.normalisation import Moments
from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError
from jaxfl.folder.records import DataSet


def require_same_images(run: Path, then: DataSet, source: Source) -> None:
    """Refuse images of another shape, with other values or in another order than `images_of` a run says.

    Of a run begun before there were checksums only the shape is known.
    """
    shape, now = list(source.images.shape[1:]), _checksum(source.images)
    if then["shape"] != shape or then.get("checksum", now) != now:
        raise JaxflError(
            f"{run} was computed on other images than {source.name} has now, or on the same in another "
            "order; restore those, or start a new run."
        )


def require_same_public(run: Path, then: DataSet, number: int, others: str) -> None:
    """Refuse public images of another number than a run says, or others of another set.

    `others` is the checksum of those of another set; "" if there are none.
    """
    if then["public"] != number:
        raise JaxflError(
            f"{run} was begun with {then['public']} public images, and there are {number} now; restore the "
            "former ones, or start a new run."
        )
    if then.get("public_checksum", others) != others:
        raise JaxflError(
            f"{run} was begun with other public images, or other labels of them, than --public names now; "
            "restore the former ones, or start a new run."
        )


def _checksum(images: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()


def recorded_moments(images: DataSet) -> Moments:
    """Return the moments by which a run normalises its images, as `images_of` describes them."""
    of_each = len(images["mean"]) == np.prod(images["shape"])  # value on its own, not of each channel
    shape = (1, *images["shape"]) if of_each else (1, 1, 1, -1)
    mean, std = (np.reshape(images[name], shape) for name in ("mean", "std"))
    target = images.get("target")
    return Moments(mean, std, target and (np.array(target["mean"]), np.array(target["std"])))


def images_of(source: Source, federation: Federation, others: str = "") -> DataSet:
    """Describe a run's images for its configuration, so that predictions need no data set.

    `others` is that of `require_same_public`.
    """
    images = source.images
    found: DataSet = {
        "shape": list(images.shape[1:]),
        "dtype": str(images.dtype),
        "mean": np.ravel(federation.mean).tolist(),
        "std": np.ravel(federation.std).tolist(),
        "public": len(federation.public),
        "public_checksum": others,
        "class_names": list(source.class_names),
        "checksum": _checksum(images),
        "task": federation.task.name,
        "vocabulary": source.vocabulary,
    }
    if federation.target:
        mean, std = (np.asarray(array).tolist() for array in federation.target)
        found["target"] = {"mean": mean, "std": std}
    return found
