"""Reading tables: CSV or Parquet files with named columns, one of which is what is to be predicted."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.config import choices
from jaxfl.config.options import Option
from jaxfl.config.values import as_path
from jaxfl.data.sources import Source, from_arrays
from jaxfl.errors import JaxflError, nearest
from jaxfl.machine.packages import optional

SUFFIXES = ".csv", ".parquet"
OPTIONS = {name: Option(name, str) for name in ("target", "client", "without", "missing")}
MOST_WORDS = 1000  # different ones in a column; more are a text, or names


def takes(name: str) -> bool:
    """Return whether a name is that of a table: its path, and options after a comma."""
    return name.partition(",")[0].endswith(SUFFIXES)


def absolute(name: str) -> str:
    """Return the name of the same table in every directory."""
    path, options = choices.split(name)
    return choices.join(str(as_path(path).resolve()), options)


def read_source(name: str, task: str = "auto") -> Source:
    """Read a table as vectors: numbers as they are, a 0 or 1 for each word of a column of words.

    Args:
      name: ``path.csv,target=COLUMN``; ``client=COLUMN`` says whose a row is, and is no feature;
        ``without=A+B`` leaves columns out; ``missing=drop`` leaves out rows with an empty field. A column
        ``split`` with only the words train and test says which rows are for testing.
      task: see `from_arrays`.

    Raises:
      JaxflError: if pandas is not installed, the file cannot be read, a column or value is missing, or
        `from_arrays` refuses what it holds.
    """
    path, given = choices.split(name)
    options = choices.convert(path, OPTIONS, given)
    frame = _frame(as_path(path))
    left_out = [column for column in options.get("without", "").split("+") if column]
    named = [options[key] for key in ("target", "client") if key in options] + left_out
    for column in named:
        if column not in frame.columns:
            raise JaxflError(f"{path} has no column {column!r}; {nearest(column, map(str, frame.columns))}")
    if "target" not in options:
        raise JaxflError(
            f"{path}: write which column is to be predicted, {path},target=COLUMN; it has "
            f"{', '.join(map(str, frame.columns))}."
        )
    frame = frame.drop(columns=left_out)
    empty = frame.isna().any(axis=1).to_numpy()
    if empty.any():
        if options.get("missing") != "drop":
            lacking = [str(column) for column in frame.columns if frame[column].isna().any()]
            raise JaxflError(
                f"{path}: {empty.sum()} of {len(frame)} rows have an empty field ({', '.join(lacking)}); "
                f"leave them out by {name},missing=drop, or the columns by without=."
            )
        frame = frame[~empty]
    columns = {str(column): _plain(path, str(column), frame[column]) for column in frame.columns}
    labels, client = columns.pop(options["target"]), options.get("client")
    split = columns.get("split")
    train = None
    if split is not None and np.isin(split, ("train", "test")).all():
        train = columns.pop("split") == "train"
    features = [_features(path, column, values) for column, values in columns.items() if column != client]
    if not features:
        raise JaxflError(f"{path} has no column besides {' and '.join(named)}; give it features.")
    others = {column: values for column, values in columns.items() if values.dtype.kind in "biuU"}
    if client:
        others["client"] = columns[client]
    numbered: dict[str, Any] = {"classes": 0}
    if labels.dtype.kind in "biu" and task != "regression":
        values, labels = np.unique(labels, return_inverse=True)
        numbered = {"classes": len(values), "class_names": [*map(str, values)]}
    x = np.concatenate(features, 1).astype(np.float32)
    return from_arrays(name, x, labels, train, columns=others, task=task, **numbered)


def _frame(path: Path) -> Any:
    """Return the table of a file as a frame of pandas."""
    pandas = optional("pandas", "pandas", "A table")
    try:
        return pandas.read_parquet(path) if path.suffix == ".parquet" else pandas.read_csv(path)
    except FileNotFoundError:
        raise JaxflError(f"There is no file {path}.") from None
    except (OSError, ValueError, ImportError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise JaxflError(f"{path} cannot be read as a table ({first}); correct it.") from None


def _plain(path: str, column: str, values: Any) -> np.ndarray:
    """Return a column as numbers or words.

    Raises:
      JaxflError: if most of its values are numbers, and some are words.
    """
    import pandas

    if (array := values.to_numpy()).dtype.kind in "biuf":
        return array
    words, numbers = values.astype(str).to_numpy(str), np.asarray(pandas.to_numeric(values, errors="coerce"))
    wrong = np.isnan(numbers)
    if not wrong.any():  # a row that was left out had a word
        return numbers
    if 2 * wrong.sum() < len(wrong):
        raise JaxflError(
            f"{path}: the column {column} has numbers, but in {wrong.sum()} of {len(wrong)} rows words, the "
            f"first is {str(words[wrong][0])!r}; correct it, or leave it out by without={column}."
        )
    return words


def _features(path: str, column: str, values: np.ndarray) -> np.ndarray:
    """Return a column as features (N, k)."""
    if values.dtype.kind != "U":
        return values[:, None].astype(float)
    words, which = np.unique(values, return_inverse=True)
    if len(words) > MOST_WORDS:
        raise JaxflError(
            f"{path}: the column {column} has {len(words)} different words, which would be as many features; "
            f"leave it out by without={column}."
        )
    return np.eye(len(words))[which]
