"""Reading ``.npz`` files written elsewhere: any arrays, and labelled images, vectors or windows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxfl.data.sources import Source, from_arrays
from jaxfl.errors import JaxflError
from jaxfl.tasks import NEXT_TOKEN


def read(path: str | Path, required: Sequence[str]) -> dict[str, np.ndarray]:
    """Return all arrays of an ``.npz`` file by name, without unpickling anything.

    Raises:
      JaxflError: if the file is missing, is not an ``.npz`` of plain arrays, lacks a required array, or its
        arrays do not fit in memory.
    """
    try:
        # Opened here, because numpy leaves a file open whose contents it does not understand.
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file)
    except FileNotFoundError:
        raise JaxflError(f"There is no file {path}.") from None
    except MemoryError:
        raise JaxflError(f"{path} holds more than fits in memory.") from None
    except Exception as error:  # a damaged file can raise any
        raise JaxflError(
            f"{path} is damaged or not an .npz file of plain arrays; write it with numpy.savez, and what "
            "pandas holds as objects, such as words, by .astype(str)."
        ) from error
    missing = [name for name in required if name not in arrays]
    if missing:
        has = ", ".join(arrays) or "nothing"
        raise JaxflError(f"{path} lacks {', '.join(missing)}; it holds {has}; give its arrays these names.")
    return arrays


KINDS = {
    "images": "(N, H, W) or (N, H, W, C)",
    "features": "(N, d)",
    "windows": "(N, T, C)",
    "tokens": "(N, T)",
}
AXES = {"images": (3, 4), "features": (2,), "windows": (3,), "tokens": (2,)}


def read_source(name: str, path: Path, labelled: bool = True, task: str = "auto") -> Source:
    """Read labelled images, vectors, windows of signals or tokens.

    The arrays are ``images`` (N, H, W) or (N, H, W, C), uint8 or float, or in their place ``features``
    (N, d) or ``windows`` (N, T, C), also integers, or ``tokens`` (N, T), whole numbers from 0, with
    ``lengths`` (N,), how many of each row are real, if some are shorter; ``labels`` (N,) that number the
    classes 0, 1, 2, ... without a gap, or are words, or floats (N,) or (N, k) of a regression, or (N, k) with
    a 0 or 1 for each of several; tokens need none, where the next one is to be predicted; and optionally
    ``split`` (N,), either the words "train" and "test" or True for a training row. Every further array (N,)
    of integers or words is a column. Unless images must be `labelled`, all are training rows of class 0 where
    there are no labels. For the task see `from_arrays`.

    Raises:
      JaxflError: if the file cannot be read, lacks an array, or `from_arrays` refuses one.
    """
    arrays = read(path, required=())
    kind, *others = [kind for kind in KINDS if kind in arrays] or ["images"]
    if others:
        raise JaxflError(f"{path} holds {kind} and {' and '.join(others)}; keep the one that is meant.")
    if not labelled and kind in arrays and "labels" not in arrays:
        arrays["labels"] = np.zeros(len(np.atleast_1d(arrays[kind])), int)
        arrays.setdefault("split", np.ones(len(arrays["labels"]), bool))
    follows = kind == "tokens" and task in ("auto", NEXT_TOKEN.name)  # without labels the next token is it
    needed = (kind,) if follows else ("labels", kind)
    if missing := [what for what in needed if what not in arrays]:
        lacks = " and ".join(missing).replace("images", "images, features, windows or tokens")
        raise JaxflError(
            f"{path} lacks {lacks}; it holds {', '.join(arrays) or 'nothing'}; give its arrays these names."
        )
    labels = None if task == NEXT_TOKEN.name else arrays.pop("labels", None)
    examples, split = arrays.pop(kind), arrays.pop("split", None)
    if examples.ndim not in AXES[kind]:
        forms = "; ".join(f"{name} are {form}" for name, form in KINDS.items())
        raise JaxflError(f"{path}: {kind} have shape {examples.shape}; {forms}: give the array its name.")
    if kind == "windows":  # images of a single row
        examples = examples[:, None]
        examples = examples.astype(np.float32) if examples.dtype.kind in "biu" else examples
    vocabulary = 0
    if kind == "tokens":
        if "lengths" in arrays:
            examples = _ended(path, examples, arrays.pop("lengths"))
        vocabulary = int(examples.max(initial=0)) + 1 if examples.dtype.kind in "iu" else 1
    elif "lengths" in arrays:
        raise JaxflError(
            f"{path}: lengths are for tokens; give all {kind} one length, or cut them into more."
        )
    if split is not None and np.isin(split, ("train", "test")).all():
        split = split == "train"
    columns = {
        key: values for key, values in arrays.items() if values.ndim == 1 and values.dtype.kind in "biuSU"
    }
    classes = 0 if labels is None else len(np.unique(labels))
    known = {"vocabulary": vocabulary, "task": task, "windows": kind == "windows"}
    return from_arrays(name, examples, labels, split, classes, columns, **known)


def _ended(path: Path, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return tokens (N, T) with -1 after the first ones of each row, as many as lengths (N,) say."""
    rows, longest = tokens.shape
    if lengths.shape != (rows,) or lengths.dtype.kind not in "iu":
        raise JaxflError(
            f"{path}: lengths are {lengths.dtype} of shape {lengths.shape}; give each of {rows} rows of "
            "tokens a whole number."
        )
    if not (empty := lengths < 1).any() and lengths.max() <= longest:
        real = np.arange(longest) < lengths[:, None]
        whole = tokens.astype(int) if tokens.dtype.kind == "u" else tokens  # which has a -1
        return np.where(real, whole, -1)
    raise JaxflError(
        f"{path}: lengths run from {lengths.min()} to {lengths.max()}, but a row has 1 to {longest} tokens; "
        + (f"leave out the {empty.sum()} empty texts." if empty.any() else "correct them.")
    )
