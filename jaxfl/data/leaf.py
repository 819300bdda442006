"""Reading LEAF's folder of a data set (Caldas et al. 2018, arXiv:1812.01097): users' rows and the split.

It has train/*.json and test/*.json, perhaps below data/. In each file ``user_data`` is
{user: {"x": rows, "y": labels}}; a row is a vector, or the values of an image one after another.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxfl.config.values import as_path
from jaxfl.data.kept import How, kept
from jaxfl.data.row_lists import parsed
from jaxfl.data.sources import Source, from_arrays
from jaxfl.errors import JaxflError

PREFIX = "leaf:"


def read_source(place: str, how: How, *, shape: str | None = None) -> Source:
    """Read the rows of all users, whom the column ``client`` names; training rows come first.

    Args:
      place: ``leaf:FOLDER``.
      how: how it is read.
      shape: height, width and perhaps channels of rows that are images, such as 28x28 or 84x84x3; without it
        rows are vectors.

    Raises:
      JaxflError: if there are no such files, one is damaged, rows are text or have another shape, or
        `from_arrays` refuses them.
    """
    if shape is not None and not re.fullmatch(r"\d+x\d+(x\d+)?", shape, re.ASCII):
        raise JaxflError(f"{how.name}: write height and width, and perhaps channels, such as shape=28x28.")
    files = _files(as_path(place.removeprefix(PREFIX)))
    sides = [*map(int, shape.split("x"))] if shape else []
    return kept(how, files, lambda: _joined(how.name, files, sides, how.task))


def _files(path: Path) -> list[Path]:
    """Return the files of a folder, those of training rows first."""
    above = path / "data" if (path / "data" / "train").is_dir() else path
    files = {part: sorted((above / part).glob("*.json")) for part in ("train", "test")}
    for part, found in files.items():
        if not found:
            raise JaxflError(
                f"{above / part} has no .json file; LEAF's preprocess.sh -t sample (or user) writes them."
            )
    return [*files["train"], *files["test"]]


def _joined(choice: str, files: Sequence[Path], sides: Sequence[int], task: str) -> Source:
    """Return the rows of all users of some files, images where their sides are given."""
    users = [
        (x, y, user, file.parent.name == "train")
        for file in files
        for user, data in _users(file).items()
        for x, y in [_rows(file, user, data)]
        if len(y)
    ]
    shapes = sorted({x.shape[1:] for x, *_ in users})
    if len(shapes) != 1 or (sides and math.prod(sides) != math.prod(shapes[0])):
        raise JaxflError(
            f"{choice}: the shapes of rows are {', '.join(map(str, shapes)) or 'none'}; all must have one, "
            "of as many numbers as shape= says."
        )
    xs, ys, names, train = zip(*users, strict=True)
    x, y, sizes = np.concatenate(xs), np.concatenate(ys), [*map(len, ys)]
    x = x.reshape(-1, *sides) if sides else x
    classes = int(y.max()) + 1 if y.dtype.kind in "iu" else 0
    columns = {"client": np.repeat(names, sizes)}
    return from_arrays(choice, x, y, np.repeat(train, sizes), classes, columns, task=task)


def _users(file: Path) -> dict:
    content = parsed(file)
    if not (isinstance(content, dict) and isinstance(users := content.get("user_data"), dict)):
        raise JaxflError(f"{file} has no user_data by user; it is not LEAF's.")
    return users


def _rows(file: Path, user: str, data) -> tuple[np.ndarray, np.ndarray]:
    """Return x (n, ...) float32 and y (n,) of a user."""
    try:
        x, y = (np.asarray(data[key]) for key in ("x", "y"))
        if len(x) == len(y) and x.dtype.kind in "iuf":
            with np.errstate(over="ignore"):  # values beyond float32 become infinite and are refused
                return x.astype(np.float32), y
    except (KeyError, TypeError, ValueError):
        pass  # no such lists, or rows of different lengths
    raise JaxflError(
        f"{file}: x of {user} is no list of rows of equally many numbers, one for each entry of y; text, and "
        "images by their files' names, are not read from LEAF."
    )
