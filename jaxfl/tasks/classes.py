"""Classes: one of several for each row; accuracy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.errors import JaxflError
from jaxfl.tasks import class_rows
from jaxfl.tasks.task import Metric, Task, ratio


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
    f1 = ratio(2 * right, either, 0.0)
    astray = predicted.sum(1) < rows.sum(1)  # one class more that is only predicted
    return f1.sum(1) / ((either > 0).sum(1) + astray)


def balanced(counts: Any) -> np.ndarray:
    """Return each client's mean recall over the classes that it has rows of, (n,), as in scikit-learn."""
    recalls = counts.right / np.maximum(counts.rows, 1)
    return recalls.sum(1) / (counts.rows > 0).sum(1)


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
    each=lambda counts: counts.right.sum(1) / counts.rows.sum(1),
    pooled=lambda counts: counts.right.sum() / counts.rows.sum(),
    metrics=(
        Metric("macro-f1", "macro F1", lambda counts: macro_f1(*counts), recorded=("mean", "per_client")),
        Metric("balanced", "balanced accuracy", balanced),
        Metric("auc", "AUC", class_rows.auc, "test"),
        Metric("precision", "macro precision", class_rows.precision, "test"),
        Metric("recall", "macro recall", class_rows.recall, "test"),
        Metric("loss", "test loss", class_rows.log_loss, "test", min, percent=False),
        Metric("ece", "calibration error", class_rows.calibration_error, "test", min),
        Metric("validation-loss", "validation loss", class_rows.log_loss, "validation", min, percent=False),
    ),
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
    per_output=lambda counts: ratio(counts.right.sum(0), counts.rows.sum(0)),
    rows=class_rows.rows_of,
    confusion=class_rows.confusion,
)
