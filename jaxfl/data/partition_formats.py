"""Partitions in the forms of other programs, so that a comparison with them uses the same rows.

Rows have their numbers in the data, where training rows mostly are first. FL-bench numbers them the same way;
the partitioners of flwr-datasets number the rows of one split.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import dumps  # only to write
from typing import Any

import numpy as np

from jaxfl.data import plain_pickles
from jaxfl.data.normalisation import Moments
from jaxfl.data.partition import PARTS, Partition, lacks_class, require_everyone
from jaxfl.data.row_lists import parsed, whole_numbers
from jaxfl.data.saved_partition import checksum
from jaxfl.data.shift import Drawn, seen
from jaxfl.data.sources import Source, numbers, of_vectors
from jaxfl.errors import JaxflError, nearest
from jaxfl.machine.files import unreadable, writes
from jaxfl.tasks import require_classes

KEYS = dict(zip(PARTS, ("train", "val", "test"), strict=True))  # of a client's rows, as FL-bench has them


def read(path: Path, source: Source) -> Partition:
    """Read a partition from JSON or from FL-bench's pickle.

    Args:
      path: file that `write_json` or FL-bench wrote, or in its form: an object for each client, ``[{"train":
        [rows], "val": [rows], "test": [rows]}, ...]``, perhaps below ``data_indices``.
      source: data that the rows are of.

    Raises:
      JaxflError: if the file is missing or of another form, or names rows that do not exist.
    """
    found = _lists(path) if path.suffix == ".pkl" else parsed(path)
    about = found if isinstance(found, dict) else {}
    order = np.argsort(numbers(source)).astype(np.int32)  # rows in the order of their numbers
    ascending = numbers(source)[order]
    of_data = checksum(source.labels[order])
    if about.get("checksum", of_data) != of_data:
        raise JaxflError(
            f"{path} does not fit {source.name}: it is for other labels; load the data that it was made for."
        )
    clients = about.get("data_indices", found)
    if not isinstance(clients, list) or not clients or not all(isinstance(one, dict) for one in clients):
        lists = isinstance(found, list) and found and all(isinstance(one, list) for one in found)
        raise JaxflError(
            f"{path} does not list each client's train, val and test; "
            + (
                f"to divide lists of clients' rows, use --partition listed,file={path}."
                if lists
                else 'write [{"train": [rows], "test": [rows]}, ...].'
            )
        )
    for client, entry in enumerate(clients):
        for key in entry:
            if key not in KEYS.values():
                raise JaxflError(f"{path}: client {client} has {key!r}; {nearest(key, KEYS.values())}")
    parts = {
        part: tuple(_rows(path, client.get(key, []), source) for client in clients)
        for part, key in KEYS.items()
    }
    require_everyone("test", parts["test"], f"in {path} move some of its train there")
    if not any(map(len, parts["train"])):
        raise JaxflError(f"{path} has no client with rows in train; fix it.")
    public = _rows(path, about.get("public", []), source)
    for client, own in enumerate(zip(*parts.values(), strict=True)):
        rows, times = np.unique(np.concatenate([*own, public]), return_counts=True)
        if times.max() > 1:
            raise JaxflError(
                f"{path}: client {client} has row {rows[times.argmax()]} twice in train, val, test and "
                "public; list each once."
            )
    _require_untested(path, parts)

    def of_numbers(given):
        return order[np.searchsorted(ascending, given)]

    parts = {part: tuple(map(of_numbers, of_clients)) for part, of_clients in parts.items()}
    public = of_numbers(public)
    names = about.get("names", [])
    if not isinstance(names, list) or len(names) not in (0, len(clients)):
        raise JaxflError(f"{path}: names is not a list of one name for each client; fix it, or leave it out.")
    relabel = np.tile(np.arange(source.classes, dtype=np.int32), (len(clients), 1))
    if "relabel" in about:
        relabel = _numbered(path, about["relabel"], relabel.shape)
        for client, (known, *own) in enumerate(zip(relabel, *parts.values(), strict=True)):
            used = known[known >= 0]
            if lacks_class(known, source, np.concatenate(own)) or len(set(used)) < len(used):
                raise JaxflError(
                    f"{path}: relabel gives client {client} no number for one of its classes, or two classes "
                    "the same number; number its classes from 0."
                )
    train, validation, test = (parts[part] for part in PARTS)
    outputs = int(relabel.max()) + 1
    return Partition(train, validation, test, relabel, outputs, public, tuple(map(str, names)))


def _lists(path: Path) -> Any:
    """Return the value of a pickle, with lists in place of arrays."""
    try:
        with path.open("rb") as stream:
            return plain_pickles.read(path, stream, np.ndarray.tolist)
    except OSError as error:
        raise unreadable(path, error) from error


def _require_untested(path: Path, parts: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Raise `JaxflError` if one client trains on what another is tested on."""
    owner = {
        int(row): client
        for part in ("train", "validation")
        for client, rows in enumerate(parts[part])
        for row in rows
    }
    for client, rows in enumerate(parts["test"]):
        for row in map(int, rows):
            if row in owner:
                raise JaxflError(
                    f"{path}: client {client} is tested on row {row}, which client {owner[row]} has in train "
                    "or val; remove it from one of them."
                )


@writes
def write_json(path: Path, partition: Partition, source: Source) -> None:
    """Write a partition as JSON that `read` reads.

    Raises:
      JaxflError: if it cannot be written.
    """
    content = {
        "dataset": source.name,
        "checksum": checksum(source.labels[np.argsort(numbers(source))]),
        "relabel": partition.relabel.tolist(),
        "public": numbers(source)[partition.public].tolist(),
        "data_indices": _per_client(partition, source),
    } | ({"names": partition.names} if partition.names else {})
    path.write_text(json.dumps(content) + "\n")


@writes
def write_fl_bench(path: Path, partition: Partition, source: Source) -> None:
    """Write a partition as FL-bench's ``partition.pkl``: plain lists, all clients with training rows train.

    Raises:
      JaxflError: if it cannot be written.
    """
    clients = list(range(len(partition.train)))
    trains = [client for client in clients if len(partition.train[client])]
    separation = {"train": trains, "val": clients, "test": clients, "total": len(clients)}
    path.write_bytes(dumps({"separation": separation, "data_indices": _per_client(partition, source)}))


def require(forms: Sequence[str], partition: Partition, source: Source) -> None:
    """Refuse for PFLlib what it does not have: validation rows, tokens, and tasks other than classes."""
    if "pfllib" not in forms:
        return
    require_classes(source.task, "PFLlib's folder of a data set")
    if source.vocabulary:
        raise JaxflError("PFLlib's folder of a data set has images or vectors, but the data are tokens.")
    if any(map(len, partition.validation)):
        raise JaxflError(
            "PFLlib has no validation rows, but the partition has; give --validation-fraction 0."
        )


@writes
def write_pfllib(
    folder: Path, partition: Partition, source: Source, name: str, drawn: Drawn | None, moments: Moments
) -> None:
    """Write clients' data as PFLlib's folder of a data set: config.json, train/0.npz, test/0.npz, ...

    Images are (n, C, H, W), as clients see them and normalised as jaxfl does; vectors are (n, d). Labels are
    the client's own.

    Raises:
      JaxflError: if PFLlib does not have what there is, see `require`, or it cannot be written.
    """
    require(["pfllib"], partition, source)
    mean, std, _ = moments
    sizes = []
    for client, relabel in enumerate(partition.relabel):
        counts = np.zeros(partition.outputs, int)
        for part in ("train", "test"):
            rows = getattr(partition, part)[client]
            x = (seen(drawn, source.images, std, client, rows) - mean.astype(np.float32)) / std
            x = x[:, 0, 0] if of_vectors(x.shape[1:]) else x.transpose(0, 3, 1, 2)
            y = relabel[source.labels[rows]].astype(np.int64)
            counts += np.bincount(y, minlength=partition.outputs)
            path = folder / part / f"{client}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            content: Any = {"x": np.ascontiguousarray(x, np.float32), "y": y}
            np.savez_compressed(path, data=content)
        sizes.append([[int(y), int(counts[y])] for y in np.flatnonzero(counts)])
    config = {
        "num_clients": len(partition.train),
        "num_classes": partition.outputs,
        "non_iid": True,
        "balance": False,
        "partition": name,
        "Size of samples for labels in clients": sizes,
        "alpha": None,
        "batch_size": 10,
    }
    (folder / "config.json").write_text(json.dumps(config) + "\n")


def _per_client(partition: Partition, source: Source) -> list[dict[str, list[int]]]:
    """Return the rows of each client by their numbers in the data."""
    parts, number = zip(*(getattr(partition, part) for part in KEYS), strict=True), numbers(source)
    return [dict(zip(KEYS.values(), (number[rows].tolist() for rows in own), strict=True)) for own in parts]


def _rows(path: Path, value: Any, source: Source) -> np.ndarray:
    """Return (n,) int32, numbers of a source's rows, each once."""
    rows, known = whole_numbers(path, value), numbers(source)
    if len(unknown := rows[~np.isin(rows, known)]):
        raise JaxflError(
            f"{path} names row {unknown.max()}, which {source.name} does not have; its {len(known):,} rows "
            f"have numbers from {known.min()} to {known.max()}."
        )
    return rows.astype(np.int32)


def _numbered(path: Path, relabel: Any, shape: Sequence[int]) -> np.ndarray:
    """Return `relabel` of a file, (clients, classes) int32."""
    with contextlib.suppress(ValueError):  # of lists of unequal length
        found = np.array(relabel)
        fits = found.shape == tuple(shape) and found.dtype.kind == "i"
        if fits and found.min() >= -1 and 0 <= found.max() < shape[1]:
            return found.astype(np.int32)
    raise JaxflError(f"{path}: relabel does not number {shape[1]} classes for each of {shape[0]} clients.")
