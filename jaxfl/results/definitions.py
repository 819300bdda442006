"""What scores are: functions of what is counted of clients' predictions, or of one client's rows.

Counts are what `jaxfl.tasks.Task.scored` returns, of n clients.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from jaxfl.tasks import Task

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


def worst_tenth(task: Task, counts: Any) -> float:
    """Return the mean score of the worst tenth of the clients, at least one."""
    every = np.array(sorted(task.each(counts), key=task.gain))
    return every[: max(1, len(every) // 10)].mean()


def validation(task: Task, counts: Any) -> float:
    """Return the mean score on validation rows of the clients that have some, NaN if none has."""
    having = counts.validation_rows > 0
    return task.validated(counts)[having].mean() if having.any() else math.nan


def balanced(counts: Any) -> np.ndarray:
    """Return each client's mean recall over the classes that it has rows of, (n,), as in scikit-learn."""
    recalls = counts.right / np.maximum(counts.rows, 1)
    return recalls.sum(1) / (counts.rows > 0).sum(1)


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
