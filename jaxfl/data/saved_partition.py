"""A partition as a file, which holds for the data that it was made for."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.data import npz
from jaxfl.data.partition import PARTS, Partition, as_int32, lacks_class
from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError
from jaxfl.machine.files import writes


@writes
def save(path: str | Path, partition: Partition, source: Source) -> None:
    """Write a partition as one compressed ``.npz`` file, whatever the path ends in.

    It holds ``relabel``, ``outputs``, ``public``, a ``checksum`` of the source's labels, for each of train,
    validation and test the rows of all clients in one array (``train``) and the number of each client's
    (``train_sizes``), ``names`` of the clients if they have any, and the ``words`` of a text.

    Raises:
      JaxflError: if it cannot be written.
    """
    arrays: dict[str, Any] = {
        "relabel": partition.relabel,
        "outputs": np.array(partition.outputs),
        "checksum": np.array(checksum(source.labels)),
        "public": partition.public,
    }
    if partition.names:
        arrays["names"] = np.array(partition.names)
    if source.words:
        arrays["words"] = np.array(source.words)
    for part in PARTS:
        rows = getattr(partition, part)
        arrays[part] = np.concatenate(rows)
        arrays[f"{part}_sizes"] = np.array([len(of_client) for of_client in rows])
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: str | Path, source: Source) -> Partition:
    """Read a partition of a source that `save` wrote.

    Raises:
      JaxflError: if the file is missing, damaged, or a partition of other data.
    """
    partition, own = _read(path)
    classes = partition.relabel.shape[1]
    same_classes = classes == source.classes
    if not same_classes or own != checksum(source.labels):
        other = "other labels" if same_classes else f"{classes} classes, not {source.classes}"
        raise JaxflError(
            f"{path} does not fit {source.name}: it is for {other}; load the data that it was made for."
        )
    for part in (*(getattr(partition, name) for name in PARTS), (partition.public,)):
        if max(rows.max(initial=0) for rows in part) >= len(source.labels):
            raise _foreign(path)
    for part in PARTS:
        owners = zip(partition.relabel, getattr(partition, part), strict=True)
        if any(lacks_class(known, source, own) for known, own in owners):
            raise _foreign(path)
    return partition


def read(path: str | Path) -> Partition:
    """Read a partition that `save` wrote, without the data that it divides.

    Raises:
      JaxflError: if the file is missing or damaged.
    """
    return _read(path)[0]


def words(path: str | Path) -> list[str]:
    """Return what each token of a saved partition's data stands for, if these are a text.

    Raises:
      JaxflError: if the file is missing or damaged.
    """
    return npz.read(path, required=()).get("words", np.empty(0, str)).tolist()


def _read(path: str | Path) -> tuple[Partition, int]:
    """Return a partition, and the checksum of the labels of its source."""
    names = [*PARTS, *(f"{part}_sizes" for part in PARTS), "relabel", "outputs", "public", "checksum"]
    arrays = npz.read(path, names)
    if not _well_formed(**{name: arrays[name] for name in names}):
        raise _foreign(path)
    train, validation, test = (
        as_int32(np.split(arrays[part], np.cumsum(arrays[f"{part}_sizes"])[:-1])) for part in PARTS
    )
    relabel, public = arrays["relabel"].astype(np.int32), arrays["public"].astype(np.int32)
    found = arrays.get("names", np.empty(0, str))
    if found.dtype.kind != "U" or found.shape not in ((0,), relabel.shape[:1]):
        raise _foreign(path)
    names = tuple(map(str, found))
    partition = Partition(train, validation, test, relabel, int(arrays["outputs"]), public, names)
    return partition, int(arrays["checksum"])


def _foreign(path: str | Path) -> JaxflError:
    return JaxflError(f"{path} is not a partition that jaxfl saved; divide the data again.")


def _well_formed(relabel, outputs, public, checksum, **rows) -> bool:
    """Return whether the arrays of a file have the kinds, shapes and ranges of a partition."""
    if any(array.dtype.kind not in "iu" for array in (relabel, outputs, public, checksum, *rows.values())):
        return False
    if public.ndim != 1 or public.min(initial=0) < 0:
        return False
    if max(array.max(initial=0) for array in (public, *rows.values())) > np.iinfo(np.int32).max:
        return False
    if relabel.ndim != 2 or relabel.size == 0 or outputs.ndim != 0 or checksum.ndim != 0:
        return False
    if relabel.min() < -1 or not 0 <= relabel.max() < outputs <= relabel.shape[1]:
        return False
    for part in PARTS:
        sizes, numbers = rows[f"{part}_sizes"], rows[part]
        if sizes.shape != relabel.shape[:1] or numbers.shape != (sizes.sum(),):
            return False
        if sizes.min() < (part == "test") or numbers.min(initial=0) < 0:
            return False
    return rows["train_sizes"].any()


def checksum(labels: np.ndarray) -> int:
    """Return a checksum of labels in their order, which distinguishes data."""
    return zlib.crc32(labels.astype(np.float32 if labels.dtype.kind == "f" else np.int32).tobytes())
