"""Reading tables: CSV or Parquet files with named columns, one of which is what is to be predicted."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxfl.config import choices
from jaxfl.config.options import Option
from jaxfl.config.values import as_path
from jaxfl.data import text
from jaxfl.data.sources import Source, from_arrays, stratified_fifth
from jaxfl.errors import JaxflError, nearest
from jaxfl.machine.packages import optional
from jaxfl.tasks import REGRESSION, meant

SUFFIXES = ".csv", ".parquet"
OPTIONS = {
    **{name: Option(name, str) for name in ("target", "client", "without", "missing", "columns", "text")},
    "tokens": Option("tokens", Literal[*text.PIECES], "words"),
    "length": Option("length", int, 64),
}
MOST_WORDS = 1000  # different ones in a column; more are a text, or names


def takes(name: str) -> bool:
    """Return whether a name is that of a table: its path, and options after a comma."""
    return name.partition(",")[0].endswith(SUFFIXES)


def absolute(name: str) -> str:
    """Return the name of the same table in every directory."""
    path, options = choices.split(name)
    return choices.join(str(as_path(path).resolve()), options)


def read_source(name: str, task: str = "auto") -> Source:
    """Read a table as vectors, or a column of text as tokens.

    Numbers are features as they are; a column of words becomes a 0 or 1 for each word that it has in training
    rows.

    Args:
      name: ``path.csv,target=COLUMN``, or of several targets or labels ``target=A+B``; ``client=COLUMN`` says
        whose a row is, and is no feature; ``without=A+B`` leaves columns out; ``missing=drop`` leaves out
        rows with an empty field; ``columns=A+B+C`` names the columns of a file without a line of names. A
        column ``split`` with only the words train and test says which rows are for testing. With ``text=A+B``
        rows are the first ``length=64`` tokens of these columns, joined: words and punctuation marks in lower
        case, or ``tokens=characters``. The vocabulary has the 10,000 most frequent ones of training rows.
        Without a target, the next token is to be predicted.
      task: see `from_arrays`.

    Raises:
      JaxflError: if pandas is not installed, the file cannot be read, a column or value is missing, or
        `from_arrays` refuses what it holds.
    """
    path, given = choices.split(name)
    options = choices.convert(path, OPTIONS, given)
    frame = _frame(as_path(path), _listed(options, "columns"))
    left_out, texts = _listed(options, "without"), _listed(options, "text")
    targets, client = _listed(options, "target"), options.get("client")
    named = [*targets, *([client] if client else []), *left_out, *texts]
    for column in named:
        if column not in frame.columns:
            raise JaxflError(f"{path} has no column {column!r}; {nearest(column, map(str, frame.columns))}")
    if not targets and not texts:
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
    joined = [" ".join(map(str, row)) for row in zip(*(columns.pop(column) for column in texts), strict=True)]
    labels, numbered = _labels({target: columns.pop(target) for target in targets}, task)
    split = columns.get("split")
    divided = split is not None and bool(np.isin(split, ("train", "test")).all())
    if divided:
        train = columns.pop("split") == "train"
    else:
        train = ~stratified_fifth(_strata(path, labels, numbered["classes"], len(frame), task))
    others = {column: values for column, values in columns.items() if values.dtype.kind in "biuU"}
    if client:
        others["client"] = columns[client]
    if texts:
        x, numbered["vocabulary"] = _tokens(path, joined, train, options)
    else:
        of = {column: values for column, values in columns.items() if column != client}
        if not of:
            raise JaxflError(f"{path} has no column besides {' and '.join(named)}; give it features.")
        every = [_features(path, column, values, train) for column, values in of.items()]
        x = np.concatenate(every, 1).astype(np.float32)
    return from_arrays(name, x, labels, train, columns=others, divided=divided, task=task, **numbered)


def _listed(options: dict[str, Any], key: str) -> list[str]:
    """Return the columns that an option names."""
    return [column for column in options.get(key, "").split("+") if column]


def _labels(columns: dict[str, np.ndarray], task: str) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Return the labels in some columns, None without any, and the number and the names of classes."""
    if not columns:
        return None, {"classes": 0}
    if len(columns) > 1:
        return np.stack([*columns.values()], 1), {"classes": 0, "class_names": [*columns]}
    (labels,) = columns.values()
    if labels.dtype.kind == "f" or task == REGRESSION.name:
        return labels, {"classes": 0}
    values, labels = np.unique(labels, return_inverse=True)
    return labels, {"classes": len(values), "class_names": [*map(str, values)]}


def _strata(path: str, labels: np.ndarray | None, classes: int, rows: int, task: str) -> np.ndarray:
    """Return by what a fixed fifth of the rows is set apart, see `Task.strata`."""
    found = meant(path, labels, task)
    if found.every_token or labels is None:
        return np.zeros(rows, int)
    return found.strata(found.read(path, labels, labels, classes)[0])


def _tokens(path: str, rows: list[str], train: np.ndarray, options: dict) -> tuple[np.ndarray, int]:
    """Return rows of text as tokens (N, T), and the size of their vocabulary."""
    pieces = [text.PIECES[options.get("tokens", "words")](row) for row in rows]
    if empty := sum(not row for row in pieces):
        raise JaxflError(f"{path}: {empty} of {len(rows)} rows have an empty text; leave them out.")
    words = text.vocabulary(row for row, trains in zip(pieces, train, strict=True) if trains)
    length = text.require_length(path, options.get("length", 64))
    return text.encoded(pieces, words, length), len(words)


def _frame(path: Path, names: list[str]) -> Any:
    """Return the table of a file as a frame of pandas; names are those of its columns, if it has none."""
    pandas = optional("pandas", "pandas", "A table")
    try:
        if path.suffix == ".parquet":
            return pandas.read_parquet(path)
        return pandas.read_csv(path, names=names) if names else pandas.read_csv(path)
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


def _features(path: str, column: str, values: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return a column as features (N, k); words that no training row has are 0 everywhere."""
    if values.dtype.kind != "U":
        return values[:, None].astype(float)
    words = np.unique(values[train])
    if len(words) > MOST_WORDS:
        raise JaxflError(
            f"{path}: the column {column} has {len(words)} different words, which would be as many features; "
            f"leave it out by without={column}, or read it by text={column}."
        )
    return (values[:, None] == words[None]).astype(float)
