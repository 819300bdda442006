"""Scores of classes that need every row's answer, not only counts."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

NOTHING: Any = 0  # the precision of a class that is not predicted, and the recall of one without rows
BINS = 15  # of the calibration error, as in the paper


class Rows(NamedTuple):
    """Some rows of a client, and what its model says of them.

    Args:
      truth: (m,) int, classes as the data set numbers them.
      logs: (m, C) float64, logarithms of their probabilities; -inf of a class that the client does not know.
      predicted: (m,) int, the most likely classes; -1 for an output that stands for none.
      confidence: (m,) float64, the probabilities of these outputs.
    """

    truth: np.ndarray
    logs: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray


def rows_of(truth: np.ndarray, relabel: np.ndarray, logs: np.ndarray) -> Rows:
    """Return rows by the data set's classes, from logarithms (m, outputs) by the client's outputs."""
    logs = logs.astype(float)
    known = np.flatnonzero(relabel >= 0)
    by_output = np.full(logs.shape[1], -1)
    by_output[relabel[known]] = known
    by_class = np.full((len(truth), len(relabel)), -np.inf)
    by_class[:, known] = logs[:, relabel[known]]
    return Rows(truth, by_class, by_output[logs.argmax(1)], np.exp(logs.max(1)))


def confusion(clients: Sequence[Rows]) -> np.ndarray:
    """Return how many rows of a class are taken for a class, (C, C + 1), in the last column for none."""
    classes = clients[0].logs.shape[1]
    matrix = np.zeros((classes, classes + 1), int)
    for rows in clients:
        np.add.at(matrix, (rows.truth, rows.predicted), 1)
    return matrix


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


def calibration_error(rows: Rows) -> float:
    """Return the expected calibration error (Guo et al. 2017, eq. 3, arXiv:1706.04599), a share.

    Rows are put into `BINS` bins (b/15, (b+1)/15] by their confidence. It is the mean over bins, weighted by
    rows, of how far a bin's accuracy is from its mean confidence. Outputs that stand for no class are wrong.
    """
    bins = np.ceil(BINS * rows.confidence).astype(int)
    excess = np.bincount(bins, rows.confidence - (rows.predicted == rows.truth))
    return float(np.abs(excess).sum() / len(bins))
