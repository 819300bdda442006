"""Data sets as they were decoded: reading thousands of images takes seconds, which one command pays for all.

A data set is one `.npz` file in the user's cache folder, under a name of its own, with the state of the files
that it was read from. If that has changed, or the file is damaged, the data are read anew.
"""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfl.data import npz
from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError
from jaxfl.machine.files import cache_folder, replacing

LEAST = 1.0  # seconds of reading from which on a data set is kept
COLUMN = "column/"  # begins the names of arrays that are columns


class How(NamedTuple):
    """How a data set is read, see `jaxfl.data.readers.load`."""

    name: str  # of the source, as it was asked for
    key: str  # all that decides what is read, besides the content of files
    data_dir: Path | None  # folder of tensorflow-datasets' sets
    labelled: bool  # whether images must have labels
    task: str  # what labels are


def kept(how: How, files: Iterable[Path], read: Callable[[], Source]) -> Source:
    """Return the source that `read` makes of some files, which is read from them only if they have changed.

    If there are no files, nothing is kept.
    """
    path = cache_folder() / "data" / f"{hashlib.sha256(how.key.encode()).hexdigest()[:32]}.npz"
    now = _state(files)
    if now is None:
        return read()
    with contextlib.suppress(JaxflError, OSError):  # none is there, or it is damaged
        arrays = npz.read(path, ["state"])
        if arrays["state"] == now:
            return _from(how.name, arrays)
    begun = time.perf_counter()
    source = read()
    if time.perf_counter() - begun >= LEAST:
        _keep(path, source, now)
    return source


def _state(files: Iterable[Path]) -> str | None:
    """Return names, sizes and times of files, and the code that reads them, as a hash; None without files."""
    found = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(json.dumps(found).encode() + code).hexdigest() if found else None


def _keep(path: Path, source: Source, now: str) -> None:
    """Write a source, unless its disk has no place for it."""
    fields = {key: value for key, value in source._asdict().items() if key not in ("name", "columns")}
    arrays = fields | {"state": now} | {COLUMN + key: values for key, values in source.columns.items()}
    begun = path.with_name(f"{uuid.uuid4()}.part")  # of this process alone
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, begun) as file:
            packed: Any = {key: np.asarray(value) for key, value in arrays.items() if value is not None}
            np.savez(file, **packed)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(begun)


def _from(name: str, arrays: dict[str, np.ndarray]) -> Source:
    columns = {key.removeprefix(COLUMN): arrays[key] for key in arrays if key.startswith(COLUMN)}
    fields: dict[str, Any] = {key: arrays[key] for key in Source._fields if key in arrays}
    fields |= {key: value.item() for key, value in fields.items() if not value.ndim}
    fields |= {key: tuple(map(str, fields[key])) for key in ("class_names", "words", "features")}
    return Source(name, **fields, columns=columns)
