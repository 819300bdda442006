"""Tasks: what a network's outputs are for. Whatever depends on the task asks this table.

A network maps an example to a row of outputs (B, outputs). The task says what it is to put out for a label,
which loss it has, what its prediction is, what is counted of predictions, which scores follow from the
counts, and how the outputs of two networks are compared. Scores are computed with NumPy, from the counts of n
clients.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.errors import JaxflError


class Task(NamedTuple):
    """A task.

    Args:
      name: its name in `--task`.
      what: what labels are, in words.
      aim: ``(labels (B, ...), relabel) -> y``, what a client's network is to put out; both as a `Federation`
        has them.
      losses: ``(outputs (B, o), y) -> (B,)``, the training loss of each row.
      answer: ``outputs (B, o) -> (B, ...)``, the prediction of which counts are made.
      label: ``(outputs (B, o), classes (o,), target) -> labels``, the prediction in the form of the data's
        labels, with NumPy; classes are those for which outputs stand, target the moments of targets.
      count: ``(labels (k, m, ...), relabel (k, c), std, answers (k, m, ...), real (k, m)) -> counts`` of k
        clients' rows; std is that of the targets, if labels are.
      scored: ``(counts of test rows, of validation rows, (k,) number of these, (k,) finite) -> score``, what
        is known of k clients' predictions; its fields `validation_rows` and `finite` are those of `Score`.
      each: ``score -> (n,)``, the score of each client on its test rows.
      pooled: ``score -> float``, over all test rows, whosever they are.
      validated: ``score -> (n,)``, on validation rows; anything for a client without any.
      further: name and function ``score -> (n,)`` of a second score that every record has of each client.
      title: the score's name.
      percent: whether it is a share, shown in percent; else it is in the labels' unit.
      better: `max` or `min`, which returns the better one of two scores.
      quality: ``(outputs (m, o), y, size) -> ()``, how good the first `size` rows' outputs are, 1 at best;
        0 without rows.
      soft: ``(outputs, temperature=1) -> (..., o)``, the form in which networks tell each other predictions.
      apart: ``(outputs (B, o), soft (B, o), temperature=1) -> (B,)``, how far outputs are from such a
        prediction.
    """

    name: str
    what: str
    aim: Callable
    losses: Callable
    answer: Callable
    label: Callable
    count: Callable
    scored: Callable
    each: Callable
    pooled: Callable
    validated: Callable
    further: tuple[str, Callable]
    title: str
    percent: bool
    better: Callable
    quality: Callable
    soft: Callable
    apart: Callable

    def text(self, value: float) -> str:
        """Return a score in words: ``accuracy 93.1 %`` or ``RMSE 0.412``."""
        return f"{self.title} {100 * value:.1f} %" if self.percent else f"{self.title} {value:.4g}"

    def goal(self, value: float) -> str:
        """Return a score to be reached, in words: ``70 %`` or ``RMSE 0.4``."""
        return f"{100 * value:g} %" if self.percent else f"{self.title} {value:g}"

    def gain(self, value: float) -> float:
        """Return a score so that more is better."""
        return value if self.better is max else -value


def task_of(scores: Mapping[str, Any]) -> Task:
    """Return the task that a record's scores or data name; those of earlier versions are of classes."""
    return TASKS[scores.get("task", CLASSES.name)]


# ---- classes


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


CLASSES = Task(
    name="classes",
    what="one of some classes",
    aim=lambda labels, relabel: relabel[labels],
    losses=optax.softmax_cross_entropy_with_integer_labels,
    answer=lambda outputs: outputs.argmax(1).astype(jnp.int32),
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
)


# ---- regression: k targets, whose scores are means over them, as in scikit-learn


class Sums(NamedTuple):
    """Sums over k clients' rows, per target (k, targets), in the targets' units.

    Args:
      squared: of squared errors.
      absolute: of absolute errors.
      spread: of squared distances of the targets from their mean on the client.
      rows: (k,) int32, number of rows.
    """

    squared: jax.Array
    absolute: jax.Array
    spread: jax.Array
    rows: jax.Array


class Errors(NamedTuple):
    """Sums over a client's rows, see `Sums`: of test rows, and of squared errors on validation rows.

    Args:
      squared: (k, targets).
      absolute: (k, targets).
      spread: (k, targets).
      rows: (k,) int32, number of test rows.
      validated: (k, targets), squared errors on validation rows.
      validation_rows: (k,) int32, number of these.
      finite: (k,) bool, whether all predictions on test rows are finite.
    """

    squared: jax.Array
    absolute: jax.Array
    spread: jax.Array
    rows: jax.Array
    validated: jax.Array
    validation_rows: jax.Array
    finite: jax.Array


def _sum_errors(labels, relabel, std, outputs, real) -> Sums:
    """Sum up errors of standardised targets, in the targets' units."""
    real, count = real[..., None], real.sum(1, dtype=jnp.int32)
    away, middle = (
        outputs - labels,
        labels.sum(1, where=real) / jnp.maximum(count, 1)[:, None].astype(labels.dtype),
    )
    squared, spread = (jnp.square(apart).sum(1, where=real) for apart in (away, labels - middle[:, None]))
    unit = std[None]
    return Sums(unit**2 * squared, unit * jnp.abs(away).sum(1, where=real), unit**2 * spread, count)


def _explained(outputs, y, size):
    """Return R^2 of the first `size` rows, the mean over targets; 0 where the targets do not differ."""
    real = (jnp.arange(len(y), dtype=jnp.int32) < size)[:, None]
    count = jnp.maximum(size, 1).astype(y.dtype)
    spread = jnp.square(y - y.sum(0, where=real, keepdims=True) / count).sum(0, where=real)
    squared = jnp.square(outputs - y).sum(0, where=real)
    return jnp.where(spread > 0, 1 - squared / jnp.where(spread > 0, spread, 1), 0).mean()


def rmse(score: Any) -> np.ndarray:
    """Return each client's root mean squared error, (n,)."""
    return np.sqrt(score.squared / score.rows[:, None]).mean(1)


def mae(score: Any) -> np.ndarray:
    """Return each client's mean absolute error, (n,)."""
    return (score.absolute / score.rows[:, None]).mean(1)


def r2(score: Any) -> np.ndarray:
    """Return each client's R^2, (n,); NaN for a single row, of which it says nothing.

    If the targets of a client do not differ, it is 1 without any error and else 0.
    """
    constant = score.spread == 0
    ratio = np.divide(score.squared, score.spread, out=(score.squared > 0).astype(float), where=~constant)
    return np.where(score.rows > 1, (1 - ratio).mean(1), np.nan)


REGRESSION = Task(
    name="regression",
    what="one or several numbers",
    aim=lambda labels, relabel: labels,
    losses=lambda outputs, y: jnp.square(outputs - y).mean(1),
    answer=lambda outputs: outputs.astype(jnp.result_type(float)),
    label=lambda outputs, classes, target: outputs * target[1] + target[0],
    count=_sum_errors,
    scored=lambda test, validation, rows, finite: Errors(
        test.squared, test.absolute, test.spread, test.rows, validation.squared, rows, finite
    ),
    each=rmse,
    pooled=lambda score: float(np.sqrt(score.squared.sum(0) / score.rows.sum()).mean()),
    validated=lambda score: np.sqrt(score.validated / np.maximum(score.validation_rows, 1)[:, None]).mean(1),
    further=("r2", r2),
    title="RMSE",
    percent=False,
    better=min,
    quality=_explained,
    soft=lambda outputs, temperature=1: outputs,
    apart=lambda outputs, soft, temperature=1: jnp.square(outputs - soft).mean(1),
)

TASKS = {task.name: task for task in (CLASSES, REGRESSION)}


def require_classes(task: Task, why: str) -> None:
    """Refuse a task without classes.

    Args:
      task: the task.
      why: what needs them, the beginning of a sentence.

    Raises:
      JaxflError: if labels are not classes.
    """
    if task is not CLASSES:
        raise JaxflError(f"{why} needs classes, but the labels are for {task.name}: {task.what}.")
