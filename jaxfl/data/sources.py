"""Labelled examples in memory, which `from_arrays` checks and brings into order for every reader."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxfl.data.vocabulary import cut_by, encoded
from jaxfl.errors import JaxflError, nearest
from jaxfl.tasks import CLASSES, Task, meant, require_classes, strata, task_for

MOST_CLASSES = 100_000  # more are a slip: every client has an entry for each


class Source(NamedTuple):
    """Labelled images in memory, the training images first, then the test images.

    Vectors are images of a single pixel, whose channels are the features: (N, 1, 1, d). Tokens are (N, T)
    int32, -1 after the end of a row.

    Attributes:
      name: name by which it was loaded.
      images: (N, H, W, C), uint8, or float32 for all other types; tokens (N, T) int32.
      labels: (N,) int32 in 0..classes-1; of other tasks targets of a regression (N, classes) float32, several
        labels (N, classes) bool, or following tokens (N, T) int32.
      train: (N,) bool, True where the source calls the row a training row.
      classes: number of classes, one may have no rows; of other tasks the number of outputs.
      columns: further values of every row, (N,) integers or words by name, such as its owner or device.
      numbers: (N,) int, number of every row where it came from, before training images were put first, and
        others perhaps left out; None where that is the same.
      divided: whether the data themselves say which rows are for testing; if not, `train` leaves a fixed
        fifth out.
      class_names: a word for each class, or none.
      vocabulary: number of different tokens, 0, 1, 2, ...; 0 if the rows are no tokens.
      words: what each token stands for, if they are those of a text.
      tokenizer: content of the file of the tokenizer that cut this text, "" without one.
      pieces: without one, what words are: a name in `jaxfl.data.vocabulary.PIECES`.
      features: names of a vector's features, if it is a row of a table.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    train: np.ndarray
    classes: int
    columns: Mapping[str, np.ndarray] = MappingProxyType({})
    numbers: np.ndarray | None = None
    divided: bool = True
    class_names: tuple[str, ...] = ()
    vocabulary: int = 0
    words: tuple[str, ...] = ()
    tokenizer: str = ""
    pieces: str = "words"
    features: tuple[str, ...] = ()

    @property
    def task(self) -> Task:
        """What labels are."""
        return task_for(self.labels)

    def encoded(self, texts: Sequence[str]) -> np.ndarray:
        """Return texts as tokens (N, T), cut, numbered and ended like the rows of the data.

        Raises:
          JaxflError: if the data are not a text.
        """
        if not self.words:
            raise JaxflError(f"{self.name} is no text, so it has no words to encode others by.")
        cut, _ = cut_by(self.pieces, self.tokenizer)
        return encoded([*map(cut, texts)], self.words, self.images.shape[1])


def of_vectors(shape: Sequence[int]) -> bool:
    """Return whether shape (H, W, C) is that of vectors: a single pixel, whose channels are the features."""
    return tuple(shape[:2]) == (1, 1) and len(shape) == 3


def kind_of(shape: Sequence[int]) -> str:
    """Return in words what examples of a shape are: images, vectors, windows of a signal, or tokens."""
    if len(shape) == 1:
        return "tokens"
    if of_vectors(shape):
        return "vectors"
    return f"windows of {max(shape[:2])} steps" if 1 in shape[:2] else "images"


def numbers(source: Source) -> np.ndarray:
    """Return the number of every row where it came from, (N,)."""
    return np.arange(len(source.labels)) if source.numbers is None else source.numbers


def column(source: Source, name: str) -> np.ndarray:
    """Return a column of the data, (N,); "row", if the data have none, is the number of each row in them.

    Raises:
      JaxflError: if there is no such column, or some rows have no value in it.
    """
    if name == "row" and name not in source.columns:
        return numbers(source)
    if name not in source.columns:
        raise JaxflError(
            f"{source.name} has no column {name!r} of integers or words; {nearest(name, source.columns)}"
        )
    require_everywhere(source.name, name, source.columns[name])
    return source.columns[name]


def require_everywhere(name: str, column: str, values: np.ndarray) -> None:
    """Refuse words (N,) of which some are empty: rows without a value."""
    if values.dtype.kind in "SU" and (without := np.flatnonzero(values == values.dtype.type())).size:
        raise JaxflError(
            f"{name}: {len(without)} of {len(values)} rows have no {column!r}, the first is row "
            f"{without[0]}; leave these rows out, or choose another column."
        )


def of_classes(source: Source, chosen: str) -> Source:
    """Return the rows of some classes, such as "0-4+8", numbered anew from 0 in their order.

    Classes whose names are numbers, such as the labels 1 to 4 of a table, are meant by these.

    Raises:
      JaxflError: if this is not such a text, or names a class twice or one that is not there.
    """
    require_classes(source.task, f"{source.name}: classes={chosen}")
    try:
        wanted = numbered(chosen)
    except JaxflError as error:
        raise JaxflError(f"{source.name}: {error}") from None
    known = [*range(source.classes)]
    if source.class_names and all(map(str.isdecimal, source.class_names)):
        known = [*map(int, source.class_names)]
    if missing := [number for number in wanted if number not in known]:
        raise JaxflError(
            f"{source.name}: classes={chosen}: there is no class {missing[-1]}; the last is {max(known)}."
        )
    classes = sorted(map(known.index, wanted))
    rows = np.isin(source.labels, classes)
    if not source.train[rows].any():
        raise JaxflError(f"{source.name}: classes={chosen}: there are no training images of these.")
    return source._replace(
        images=source.images[rows],
        labels=np.searchsorted(classes, source.labels[rows]).astype(np.int32),
        train=source.train[rows],
        classes=len(classes),
        columns={name: values[rows] for name, values in source.columns.items()},
        numbers=numbers(source)[rows],
        class_names=tuple(source.class_names[c] for c in classes) if source.class_names else (),
    )


def numbered(chosen: str) -> list[int]:
    """Return the numbers that a text such as "0-4+8" names, in ascending order.

    Raises:
      JaxflError: if it is not such a text, or names a class twice.
    """
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(\+\d{1,6}(-\d{1,6})?)*", chosen, re.ASCII):
        raise JaxflError(f"classes={chosen}: write numbers and ranges, such as 0-4+8.")
    ends = [list(map(int, part.split("-"))) for part in chosen.split("+")]
    classes = sorted(number for end in ends for number in range(end[0], end[-1] + 1))
    if len(set(classes)) < len(classes) or any(end[0] > end[-1] for end in ends):
        raise JaxflError(f"classes={chosen}: write each range upwards and each class once.")
    return classes


def from_arrays(
    name: str,
    images: np.ndarray,
    labels: Any,
    train: np.ndarray | None,
    classes: int,
    columns: Mapping[str, np.ndarray] = MappingProxyType({}),
    numbers: np.ndarray | None = None,
    divided: bool = True,
    class_names: Sequence[str] = (),
    vocabulary: int = 0,
    words: Sequence[str] = (),
    tokenizer: str = "",
    pieces: str = "words",
    features: Sequence[str] = (),
    task: str = "auto",
    windows: bool = False,
) -> Source:
    """Check arrays of any origin and bring them into the types and order of a source.

    Args:
      name: name of the source.
      images: (N, H, W) or (N, H, W, C), uint8 or float; or vectors (N, d), integers (as float32) or float;
        or, with a vocabulary, tokens (N, T).
      labels: (N,) integers in 0..classes-1; or words, which are numbered in their order and name the classes;
        or for a regression floats (N,) or (N, targets); or several labels (N, k), 0 or 1; or None, where the
        next token is the label.
      train: (N,) bool, True for a training row; None sets a fixed stratified fifth aside for testing, which
        may have no row of a small class.
      classes: number of classes; other tasks do not read it.
      columns: further values of every row, (N,) integers or words by name.
      numbers: (N,) int, number of every row where it came from; None where these are 0, 1, 2, ...
      divided: whether the data say themselves which rows are for testing, and `train` was not made up.
      class_names: a word for each class, or none.
      vocabulary: number of different tokens, if the rows are tokens.
      words: what each token stands for, in place of their number; names the classes of a next token.
      tokenizer: content of the file of the tokenizer that cut the text, if there is one.
      pieces: without one, what words are, see `Source`.
      features: names of a vector's features, or none.
      task: a name in `TASKS`; "auto" says it by the labels' type, see `jaxfl.tasks.meant`.
      windows: whether images are known to be windows of a signal, (N, 1, T, C).

    Raises:
      JaxflError: if types, shapes or values are not as described.
    """
    vocabulary, words = len(words) or vocabulary, tuple(words)
    images = _array(name, "images", images)
    if vocabulary:
        images = _checked_tokens(name, images, vocabulary)
    else:
        images = _checked_images(name, images, windows)
    labels = labels if labels is None else _array(name, "labels", labels)
    found = meant(name, labels, task)
    if found.every_token:
        labels, classes, class_names = None, vocabulary, words or class_names
    elif labels is None:
        raise JaxflError(f"{name} has no labels, which --task {found.name} needs; give each row its label.")
    elif found is CLASSES and labels.dtype.kind in "SU" and labels.ndim == 1:
        require_everywhere(name, "labels", labels)
        known, labels = np.unique(labels.astype(str), return_inverse=True)
        class_names, classes = known.tolist(), len(known)
    if not isinstance(classes, int | np.integer) or classes > MOST_CLASSES:
        raise JaxflError(
            f"{name}: classes must be the number of classes, at most {MOST_CLASSES:,}, but is {classes!r}."
        )
    labels, classes = found.read(name, labels, images, int(classes))
    if class_names and len(class_names) != classes:
        raise JaxflError(f"{name} names {len(class_names)} of {classes} {found.outputs}; name all of them.")
    if train is None:
        train, divided = ~stratified_fifth(strata(labels)), False
    elif (train := _array(name, "train", train)).dtype != bool or train.shape != labels.shape[:1]:
        raise JaxflError(
            f'{name}: split (train of a Source) must say "train" or "test", or True for training, once '
            "per label."
        )
    if not isinstance(columns, Mapping):
        raise JaxflError(f"{name}: columns of a Source must be a dict of arrays by name, not {columns!r}.")
    if numbers is None:
        numbers = np.arange(len(labels))
    elif np.shape(numbers) != labels.shape[:1]:
        raise JaxflError(
            f"{name}: numbers of a Source say where each of its {len(labels)} rows came from, but have shape "
            f"{np.shape(numbers)}; cut them like labels, or write numbers=None."
        )
    order = np.argsort(~train, kind="stable")
    columns = {key: _checked_column(name, key, values, len(labels))[order] for key, values in columns.items()}
    came_from = np.asarray(numbers)[order]
    moved = None if np.array_equal(came_from, np.arange(len(labels))) else came_from
    class_names = tuple(map(str, class_names))
    arrays = images[order], labels[order], train[order]
    rest = vocabulary, words, tokenizer, pieces, tuple(features)
    return Source(name, *arrays, classes, columns, moved, divided, class_names, *rest)


def _array(name: str, what: str, values) -> np.ndarray:
    if np.ma.is_masked(values):
        raise JaxflError(
            f"{name}: {what}: values are masked, which would be used all the same; leave these rows out."
        )
    try:
        array = np.asarray(values)
    except ValueError:  # of nested lists
        raise JaxflError(f"{name}: {what}: lists of different lengths; give one array.") from None
    words = array.dtype == object and all(isinstance(value, str) for value in array.flat)  # of pandas
    return array.astype(str) if words else array


def _checked_images(name: str, images: np.ndarray, windows: bool) -> np.ndarray:
    if images.ndim == 2:
        whole = images.dtype.kind in "biu" and images.dtype != np.uint8  # as tables have them
        images = images[:, None, None].astype(np.float32 if whole else images.dtype)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.size == 0:
        raise JaxflError(
            f"{name}: images have shape {images.shape}, not (N, H, W), (N, H, W, C) or, for vectors, (N, d), "
            "with at least one of each."
        )
    channels, sides = images.shape[1], images.shape[2:]
    # Small windows of a signal, (N, 1, T, C), are no grey images unless they are square.
    window = channels == 1 and sides[0] != sides[1]
    least = 16 if window else max(5, 2 * channels)
    signal = windows or (window and images.dtype.kind == "f")
    if channels in (1, 3, 4) and not signal and min(sides) >= least and max(sides) <= 2 * min(sides):
        raise JaxflError(
            f"{name}: images have shape {images.shape}, which would be {images.shape[3]} channels, but looks "
            "like (N, C, H, W); store images.transpose(0, 2, 3, 1)."
        )
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f":
        raise JaxflError(f"{name}: images are {images.dtype}; store them as uint8 or float.")
    with np.errstate(over="ignore"):  # values beyond float32 become infinite and are refused
        images = images.astype(np.float32)
    if not np.isfinite(images).all():
        raise JaxflError(f"{name} has NaN or infinite values (as float32) among its examples; replace them.")
    return images


def _checked_tokens(name: str, tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    if tokens.ndim != 2 or not tokens.size or tokens.dtype.kind not in "iu":
        raise JaxflError(
            f"{name}: tokens are {tokens.dtype} of shape {tokens.shape}, not whole numbers (N, T) with at "
            "least one of each."
        )
    if vocabulary > MOST_CLASSES:
        raise JaxflError(
            f"{name}: tokens run up to {vocabulary - 1:,}; a vocabulary has at most {MOST_CLASSES:,}."
        )
    if tokens.max() >= vocabulary or tokens.min() < -1:
        raise JaxflError(
            f"{name}: tokens run from {tokens.min()} to {tokens.max()}, but a vocabulary of {vocabulary} has "
            f"0 to {vocabulary - 1}, and -1 after the end of a row."
        )
    real = tokens >= 0
    if (wrong := ~real[:, 0] | (np.diff(real.astype(int), axis=1) > 0).any(1)).any():
        raise JaxflError(
            f"{name}: {wrong.sum()} of {len(tokens)} rows have no token, or have some after a -1, the first "
            f"is row {wrong.argmax()}; leave out empty texts, and put -1 only at the end."
        )
    return tokens.astype(np.int32)


def _checked_column(name: str, key: str, values: np.ndarray, rows: int) -> np.ndarray:
    values = _array(name, f"the column {key}", values)
    if values.shape != (rows,) or values.dtype.kind not in "biuSU":
        raise JaxflError(
            f"{name}: the column {key} is {values.dtype} of shape {values.shape}; give each of {rows} rows "
            "an integer or a word, or leave it out."
        )
    return values


def stratified_fifth(labels: np.ndarray) -> np.ndarray:
    """Return a fixed fifth of the rows, (N,) bool, with a fifth of each class."""
    from sklearn.model_selection import train_test_split

    rows = np.arange(len(labels))
    try:
        _, test = train_test_split(rows, test_size=0.2, stratify=labels, random_state=0)
    except ValueError:  # a class has a single row, or a fifth of all rows is not one of each class
        order = np.random.default_rng(0).permutation(rows)
        by_class = [order[labels[order] == c] for c in np.unique(labels)]
        test = np.concatenate([of_class[: len(of_class) // 5] for of_class in by_class])
    return np.isin(rows, test)
