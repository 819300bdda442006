"""Columns of rows, of a table or of a data set of Hugging Face, as labels and as tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxfl.data.sources import stratified_fifth
from jaxfl.data.vocabulary import cut_by, encoded, require_length, vocabulary
from jaxfl.errors import JaxflError
from jaxfl.tasks import REGRESSION, meant


def labels_of(columns: Mapping[str, np.ndarray], task: str) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Return the labels in some columns (N,), None without any, and the number and the names of classes.

    Several columns are several targets, or labels. Whole numbers and words are numbered in their order.
    """
    if not columns:
        return None, {"classes": 0}
    if len(columns) > 1:
        return np.stack([*columns.values()], 1), {"classes": 0, "class_names": [*columns]}
    (labels,) = columns.values()
    if labels.dtype.kind == "f" or task == REGRESSION.name:
        return labels, {"classes": 0}
    values, labels = np.unique(labels, return_inverse=True)
    return labels, {"classes": len(values), "class_names": [*map(str, values)]}


def training_rows(place: str, labels: np.ndarray | None, classes: int, rows: int, task: str) -> np.ndarray:
    """Return all rows but a fixed fifth of each stratum, see `Task.strata`, as True (N,)."""
    found = meant(place, labels, task)
    if found.every_token or labels is None:
        return ~stratified_fifth(np.zeros(rows, int))
    return ~stratified_fifth(found.strata(found.read(place, labels, labels, classes)[0]))


def tokens_of(
    place: str,
    columns: Sequence[Sequence[str]],
    train: np.ndarray,
    tokens: str,
    length: int,
    tokenizer: str,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the texts in some columns (N,), joined, as tokens (N, length), and what these stand for.

    A vocabulary is made of the rows in `train` (N,), of `tokens`, a name in `PIECES`, unless there is the
    content of a tokenizer's file.

    Raises:
      JaxflError: if a text is empty, or the length or the tokenizer is of no use.
    """
    cut, words = cut_by(tokens, tokenizer)
    rows = [cut(" ".join(texts)) for texts in zip(*columns, strict=True)]
    if empty := sum(not row for row in rows):
        raise JaxflError(f"{place}: {empty} of {len(rows)} rows have an empty text; leave them out.")
    words = words or vocabulary(row for row, trains in zip(rows, train, strict=True) if trains)
    known = {"words": words, "tokenizer": tokenizer, "pieces": tokens}
    return encoded(rows, words, require_length(place, length)), known
