"""Scores that need every row's answer: they are computed where `--show` asks for them, as scikit-learn does.

A new one is an entry in `ROW_SCORES`: options, records, tables, studies, pictures and logs ask this table.
"""

import csv
import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxfl.data.federation import Federation, PerGroup

NOTHING: Any = 0  # the precision of a class that is not predicted, and the recall of one without rows
CONFUSION = "confusion"  # of all clients' rows: a matrix, which has no column


class Rows(NamedTuple):
    """Some rows of a client, and what its model says of them.

    Args:
      truth: (m,) int, classes as the data set numbers them.
      logs: (m, C) float64, logarithms of their probabilities; -inf of a class that the client does not know.
      predicted: (m,) int, the most likely classes; -1 for an output that stands for none.
    """

    truth: np.ndarray
    logs: np.ndarray
    predicted: np.ndarray


class RowScore(NamedTuple):
    """A score of a client, whose mean over clients is that of a run.

    Args:
      title: in words, with its unit: shares are recorded as fractions and shown in %.
      value: returns it for a client's rows, NaN without a value.
      better: returns the better ones of several values.
      validates: whether it is of validation rows, not of test rows.
    """

    title: str
    value: Callable[[Rows], float]
    better: Callable = max
    validates: bool = False


def auc(rows: Rows) -> float:
    """Return the area under the ROC curve of each class against the rest, as a mean over a client's classes.

    A class counts if the client has rows of it and of another one. With all classes there, this is
    scikit-learn's `roc_auc_score(multi_class="ovr")`; with two classes whose probabilities sum to 1 it is
    that of either.
    """
    from sklearn.metrics import roc_auc_score  # here and below: it takes a second to load

    classes = np.unique(rows.truth)
    if len(classes) < 2:
        return math.nan
    return float(np.mean([roc_auc_score(rows.truth == c, np.exp(rows.logs[:, c])) for c in classes]))


def precision(rows: Rows) -> float:
    """Return the mean over classes that a client has rows of or predicts; 0 where it predicts none."""
    from sklearn.metrics import precision_score

    return float(precision_score(rows.truth, rows.predicted, average="macro", zero_division=NOTHING))


def recall(rows: Rows) -> float:
    """Return the mean over classes that a client has rows of or predicts; 0 where it has none."""
    from sklearn.metrics import recall_score

    return float(recall_score(rows.truth, rows.predicted, average="macro", zero_division=NOTHING))


def log_loss(rows: Rows) -> float:
    """Return the cross-entropy; probabilities below the smallest step of float64 count as that step."""
    own = np.take_along_axis(rows.logs, rows.truth[:, None], 1)
    return float(-np.maximum(own, np.log(np.finfo(float).eps)).mean())


ROW_SCORES = {
    "auc": RowScore("AUC %", auc),
    "precision": RowScore("macro precision %", precision),
    "recall": RowScore("macro recall %", recall),
    "loss": RowScore("test loss", log_loss, min),
    "validation-loss": RowScore("validation loss", log_loss, min, validates=True),
}


def asked(show: Collection[str]) -> bool:
    """Return whether a score that is to be shown needs every row's answer."""
    return not (ROW_SCORES.keys() | {CONFUSION}).isdisjoint(show)


def of_rows(likely: PerGroup, federation: Federation, show: Collection[str]) -> dict:
    """Return the scores that `show` asks for, of all clients except newcomers.

    Args:
      likely: per group (test, validation), see `jaxfl.core.score.likelihoods`, of all its clients.
      federation: the clients.
      show: names; those that are not in `ROW_SCORES` are left out.

    Returns:
      scores: {name: {mean over the clients that have a value, per_client by id}}, None without a value; and
      confusion, if asked for: (C, C + 1), the number of all clients' test rows of a class (row) that their
      models take for a class (column), in the last column for none.
    """
    clients = list(_clients(likely, federation))
    scores = {}
    for name in ROW_SCORES.keys() & {*show}:
        score, values = ROW_SCORES[name], [math.nan] * federation.clients
        for client, parts in clients:
            rows = parts[score.validates]
            values[client] = score.value(rows) if len(rows.truth) else math.nan
        known = [value for value in values if not math.isnan(value)]
        mean = float(np.mean(known)) if known else None
        scores[name] = {"mean": mean, "per_client": [None if math.isnan(v) else v for v in values]}
    found: dict = {"scores": scores}
    if CONFUSION in show:
        classes = federation.groups[0].relabel.shape[1]
        counts = np.zeros((classes, classes + 1), int)
        for _, (test, _) in clients:
            np.add.at(counts, (test.truth, test.predicted), 1)
        found[CONFUSION] = counts.tolist()
    return found


def confusion_csv(matrices: Mapping[str, Sequence[Sequence[float]]], class_names: Sequence[str] = ()) -> str:
    """Return CSV text of confusion matrices by method: a row per class, a column for what it is taken for."""
    classes = len(next(iter(matrices.values())))
    names, out = list(class_names) or [*range(classes)], io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "class", *(f"as {name}" for name in names), "as none"])
    for label, matrix in matrices.items():
        writer.writerows([label, name, *counts] for name, counts in zip(names, matrix, strict=True))
    return out.getvalue()


def _clients(likely: PerGroup, federation: Federation) -> Iterator[tuple[int, list[Rows]]]:
    """Yield every client that is no newcomer, with its test and its validation rows."""
    labels = np.asarray(federation.labels)
    for group, of_group, apart in zip(federation.groups, likely, federation.newcomers, strict=True):
        lists = (group.test_rows, group.test_size), (group.validation_rows, group.validation_size)
        for i in np.flatnonzero(~apart):
            relabel = np.asarray(group.relabel[i])
            parts = [
                _rows(labels[np.asarray(rows[i])[: int(size[i])]], relabel, logs[i])
                for (rows, size), logs in zip(lists, of_group, strict=True)
            ]
            yield int(group.id[i]), parts


def _rows(truth: np.ndarray, relabel: np.ndarray, logs: np.ndarray) -> Rows:
    """Return rows by the data set's classes, from logarithms (padded, outputs) by the client's outputs."""
    logs = logs[: len(truth)].astype(float)
    known = np.flatnonzero(relabel >= 0)
    of_output = np.full(logs.shape[1], -1)
    of_output[relabel[known]] = known
    of_classes = np.full((len(truth), len(relabel)), -np.inf)
    of_classes[:, known] = logs[:, relabel[known]]
    return Rows(truth, of_classes, of_output[logs.argmax(1)])
