"""Reading tables: CSV or Parquet files with named columns, one of which is what is to be predicted."""

import collections
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxfl.config.values import as_path
from jaxfl.data.columns import labels_of, tokens_of, training_rows
from jaxfl.data.kept import How
from jaxfl.data.sources import Source, from_arrays
from jaxfl.data.vocabulary import content_of
from jaxfl.errors import JaxflError, nearest
from jaxfl.machine.packages import optional
from jaxfl.tasks.regression import lost_as_float32

SUFFIXES = ".csv", ".parquet"
NULLABLE: Any = "numpy_nullable"  # a whole number stays one beside an empty field
MOST_WORDS = 1000  # different ones in a column; more are a text, or names


def read_source(
    place: str,
    how: How,
    *,
    target: tuple[str, ...] = (),
    client: str | None = None,
    without: tuple[str, ...] = (),
    missing: Literal["refuse", "drop"] = "refuse",
    columns: tuple[str, ...] = (),
    text: tuple[str, ...] = (),
    tokens: Literal["words", "characters"] = "words",
    length: int = 64,
    tokenizer: Path | None = None,
) -> Source:
    """Read a table as vectors, or columns of text as tokens.

    Numbers are features as they are; a column of words becomes a 0 or 1 for each word that it has in training
    rows. A column ``split`` says which rows are for testing: the words train and test, or True for a training
    row. The vocabulary has the 9,999 most frequent tokens of training texts.

    Args:
      place: path of the file.
      how: how it is read.
      target: column that is to be predicted, or several, A+B; without one it is the next token of a text.
      client: column that says whose a row is, and is no feature.
      without: columns to leave out, A+B.
      missing: what happens to rows with an empty field, or NA, nan, null or None in it: they are refused, or
        dropped.
      columns: names of the columns, A+B+C, of a file without a line of names.
      text: columns that are read as text, A+B, joined.
      tokens: what tokens of a text are: words and punctuation marks in lower case, or characters.
      length: number of tokens of a row, the first ones of its text.
      tokenizer: file of a tokenizer of the package tokenizers, whose ids are the tokens, in place of
        `tokens`; its vocabulary is that of the run.

    Raises:
      JaxflError: if pandas is not installed, the file cannot be read, a column, its name or a value is
        missing, float32 loses too much of a number, or `from_arrays` refuses what it holds.
    """
    frame = _frame(as_path(place), columns)
    named = [*target, *([client] if client else []), *without, *text]
    for column in named:
        if column not in frame.columns:
            raise JaxflError(
                f"{place} has no column {column!r}; {nearest(column, map(str, frame.columns))} If its first "
                "line has no names, give all columns some: columns=A+B."
            )
    if twice := [column for column, times in collections.Counter(named).items() if times > 1]:
        raise JaxflError(f"{how.name} names the column {twice[0]!r} twice; one use of a column is enough.")
    if not target and not text:
        raise JaxflError(
            f"{place}: write which column is to be predicted, {place},target=COLUMN; it has "
            f"{', '.join(map(str, frame.columns))}."
        )
    frame = frame.drop(columns=[*without])
    if unnamed := [column for column in frame.columns if str(column).startswith("Unnamed: ")]:
        raise JaxflError(
            f"{place} has a column without a name, such as the row numbers that pandas writes; leave it out "
            f"by without={unnamed[0]}, or name it."
        )
    empty = frame.isna().any(axis=1).to_numpy()
    if empty.any():
        if missing == "refuse":
            lacking = [str(column) for column in frame.columns if frame[column].isna().any()]
            raise JaxflError(
                f"{place}: {empty.sum()} of {len(frame)} rows have an empty field ({', '.join(lacking)}); "
                f"leave them out by {how.name},missing=drop, or the columns by without=."
            )
        frame = frame[~empty]
    known: dict[str, Any] = {"numbers": np.flatnonzero(~empty)}
    if not len(frame):
        raise JaxflError(f"{place} has no rows to learn from; give it some without empty fields.")
    texts = [frame.pop(column).astype(str).tolist() for column in text]  # an array is as wide as the longest
    values = {str(column): _plain(place, str(column), frame[column]) for column in frame.columns}
    labels, classes = labels_of({column: values.pop(column) for column in target}, how.task)
    known |= classes
    if divided := "split" in values and client != "split":
        split = values.pop("split")
        says = np.full(len(split), split.dtype == bool) | np.isin(split, ("train", "test"))
        if not says.all():
            raise JaxflError(
                f"{place}: the column split has {str(split[~says][0])!r} in place of train or test; write "
                "one of these in every row, rename it, or leave it out by without=split."
            )
        train = split if split.dtype == bool else split == "train"
    else:
        train = training_rows(place, labels, classes["classes"], len(frame), how.task)
    others = {column: each for column, each in values.items() if each.dtype.kind in "biuU"}
    if client:
        others["client"] = values[client]
    if text:
        x, of_text = tokens_of(place, texts, train, tokens, length, content_of(tokenizer))
        known |= of_text
    else:
        of = {column: each for column, each in values.items() if column != client}
        if not of:
            raise JaxflError(f"{place} has no column besides {' and '.join(named)}; give it features.")
        every = [_features(place, column, each, train) for column, each in of.items()]
        known["features"] = [name for names, _ in every for name in names]
        x = np.concatenate([each for _, each in every], 1)
    return from_arrays(how.name, x, labels, train, columns=others, divided=divided, task=how.task, **known)


def _frame(path: Path, names: Sequence[str]) -> Any:
    """Return the table of a file as a frame of pandas; names are those of its columns, if it has none."""
    pandas = optional("pandas", "pandas", "A table")
    try:
        if path.suffix == ".parquet":
            return pandas.read_parquet(path, dtype_backend=NULLABLE)
        with warnings.catch_warnings():  # of rows with more fields than the first line has names
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            header = None if names else "infer"
            frame = pandas.read_csv(path, header=header, index_col=False, dtype_backend=NULLABLE)
    except FileNotFoundError:
        raise JaxflError(f"There is no file {path}.") from None
    except (OSError, ValueError, ImportError, pandas.errors.ParserWarning) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise JaxflError(f"{path} cannot be read as a table ({first}); correct it.") from None
    if not names:
        return frame
    if len(names) != len(frame.columns):
        raise JaxflError(
            f"{path} has {len(frame.columns)} columns, but columns= names {len(names)}; name each of them."
        )
    if len({*names}) < len(names):
        raise JaxflError(f"{path}: columns= gives a name twice; name each column differently.")
    return frame.set_axis([*names], axis=1)


def _plain(path: str, column: str, values: Any) -> np.ndarray:
    """Return a column as numbers or words.

    Raises:
      JaxflError: if most of its values are numbers, and some are words.
    """
    import pandas

    if (array := values.to_numpy()).dtype.kind in "biuf":
        return array
    words = values.astype(str).to_numpy(str)
    if path.endswith(".parquet") and pandas.api.types.infer_dtype(values) in ("string", "categorical"):
        return words  # which may be digits: 01 is not 1
    numbers = np.asarray(pandas.to_numeric(values, errors="coerce"))
    wrong = np.isnan(numbers)
    if not wrong.any():  # a row that was left out had a word
        return numbers
    if 2 * wrong.sum() < len(wrong):
        raise JaxflError(
            f"{path}: the column {column} has numbers, but in {wrong.sum()} of {len(wrong)} rows words, the "
            f"first is {str(words[wrong][0])!r}; correct it, or leave it out by without={column}."
        )
    return words


def _features(path: str, column: str, values: np.ndarray, train: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return a column as features: names, and values (N, k), 0 for words that no training row has."""
    if values.dtype.kind != "U":
        if lost := lost_as_float32(given := values[:, None].astype(float)):
            raise JaxflError(
                f"{path}: as float32 the column {column} loses up to {lost:.3g}, too much beside its "
                f"deviation; subtract a number from all, such as the least, or leave it out by "
                f"without={column}."
            )
        return [column], given
    words = np.unique(values[train])
    if len(words) > MOST_WORDS:
        raise JaxflError(
            f"{path}: the column {column} has {len(words)} different words, which would be as many features; "
            f"leave it out by without={column}, or read it by text={column}."
        )
    return [f"{column}={word}" for word in words], (values[:, None] == words[None]).astype(float)
