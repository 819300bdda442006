"""Classes: one of several for each row; accuracy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.errors import JaxflError
from jaxfl.tasks.task import Task


class Counts(NamedTuple):
    """Counts of k clients' rows by their models' answers; C classes as the data set numbers them.

    Args:
      right: (k, C) int32, rows of each class that a client gets right.
      rows: (k, C) int32, rows of each class.
      predicted: (k, C) int32, rows that it predicts as each class.
    """

    right: jax.Array
    rows: jax.Array
    predicted: jax.Array


class Score(NamedTuple):
    """Counts of a client's rows by its predictor's answers; C classes as the data set numbers them.

    Args:
      right: (k, C) int32, test rows of each class that it gets right.
      rows: (k, C) int32, test rows of each class.
      predicted: (k, C) int32, test rows that it predicts as each class.
      validated: (k,) int32, validation rows that it gets right.
      validation_rows: (k,) int32, number of validation rows.
      finite: (k,) bool, whether all scores on test rows are finite, or -inf, the logarithm of 0.
    """

    right: jax.Array
    rows: jax.Array
    predicted: jax.Array
    validated: jax.Array
    validation_rows: jax.Array
    finite: jax.Array


def _count_classes(labels, relabel, std, output, real) -> Counts:
    """Count answers by class."""
    classes = jnp.arange(relabel.shape[1], dtype=jnp.int32)
    is_class = (labels[..., None] == classes[None, None]) & real[..., None]  # (k, m, C)
    is_output = (output[..., None] == relabel[:, None]) & real[..., None]
    return Counts(*(which.sum(1, dtype=jnp.int32) for which in (is_class & is_output, is_class, is_output)))


def count_correct(scores, labels, size):
    """Count the correct predictions of the first `size` rows: scores (m, C), labels (m,) -> () int32."""
    real = jnp.arange(len(labels), dtype=jnp.int32) < size
    right = scores.argmax(1).astype(labels.dtype) == labels
    return (right & real).sum(dtype=jnp.int32)


def shares(score: Any) -> np.ndarray:
    """Return the accuracy of each client, (n,)."""
    return score.right.sum(1) / score.rows.sum(1)


def macro_f1(right: np.ndarray, rows: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Return the mean F1 score of all classes that a client has rows of or predicts, as in scikit-learn.

    Args:
      right: (n, C), rows of each class that a client gets right.
      rows: (n, C), all rows of each class.
      predicted: (n, C), rows predicted as each class.

    Returns:
      (n,), as fractions.

    >>> macro_f1(np.array([[2, 0]]), np.array([[2, 0]]), np.array([[2, 0]]))
    array([1.])
    >>> macro_f1(np.array([[2, 0]]), np.array([[3, 0]]), np.array([[2, 1]]))  # a class that is only predicted
    array([0.4])
    >>> macro_f1(np.array([[2, 0]]), np.array([[3, 0]]), np.array([[2, 0]]))  # or no class of its
    array([0.4])
    """
    either = rows + predicted
    f1 = np.divide(2 * right, either, out=np.zeros(right.shape), where=either > 0)
    astray = predicted.sum(1) < rows.sum(1)  # one class more that is only predicted
    return f1.sum(1) / ((either > 0).sum(1) + astray)


def read(name: str, labels: np.ndarray, examples: np.ndarray, classes: int) -> tuple[np.ndarray, int]:
    """Return classes (N,) int32, see `Task.read`."""
    if labels.dtype.kind == "f":
        raise JaxflError(f"{name}: labels are {labels.dtype}, but --task classes numbers them 0, 1, 2, ...")
    if labels.shape != (len(examples),):
        mend = ".ravel() takes the brackets away"
        if labels.shape != (len(examples), 1):
            mend = "rows of zeros and a one become numbers by .argmax(1); rows of several are --task labels"
        raise JaxflError(
            f"{name}: labels have shape {labels.shape}, not ({len(examples)},), a number per image; {mend}."
        )
    if labels.dtype.kind not in "iu":
        raise JaxflError(f"{name}: labels are {labels.dtype}; number the classes 0, 1, 2, ...")
    if labels.min() < 0 or labels.max() >= classes:
        raise JaxflError(
            f"{name}: labels run from {labels.min()} to {labels.max()}, but {classes} classes must be "
            f"numbered from 0 to {classes - 1}; leave out rows without a label, and number labels with gaps "
            "anew: numpy.unique(labels, return_inverse=True)[1]."
        )
    return labels.astype(np.int32), classes


CLASSES = Task(
    name="classes",
    what="one of some classes",
    outputs="classes",
    form=("i", 1),
    read=read,
    strata=lambda labels: labels,
    aim=lambda labels, relabel: relabel[labels],
    losses=optax.softmax_cross_entropy_with_integer_labels,
    answer=lambda outputs, labels: outputs.argmax(1).astype(jnp.int32),
    label=lambda outputs, classes, target: classes[outputs.argmax(1)],
    count=_count_classes,
    scored=lambda test, validation, rows, finite: Score(
        test.right, test.rows, test.predicted, validation.right.sum(1, dtype=jnp.int32), rows, finite
    ),
    each=shares,
    pooled=lambda score: score.right.sum() / score.rows.sum(),
    validated=lambda score: score.validated / np.maximum(score.validation_rows, 1),
    further=("macro_f1", lambda score: macro_f1(*score[:3])),
    title="accuracy",
    percent=True,
    better=max,
    quality=lambda outputs, y, size: (
        count_correct(outputs, y, size).astype(outputs.dtype) / jnp.maximum(size, 1).astype(outputs.dtype)
    ),
    soft=lambda outputs, temperature=1: jax.nn.softmax(outputs / temperature),
    apart=lambda outputs, soft, temperature=1: optax.kl_divergence(
        jax.nn.log_softmax(outputs / temperature), soft
    ),
    hub="classification",
    says="Output k stands for the class `classes[k]` of {dataset}, listed in the metadata of the file; -1 "
    "means none.",
    code='labels = np.array(about["classes"])[scores.argmax(1)]',
    per_output=lambda score: np.divide(
        score.right.sum(0),
        score.rows.sum(0),
        out=np.full(score.rows.shape[1], np.nan),
        where=score.rows.sum(0) > 0,
    ),
)
