"""Several labels: of k labels each row has some, perhaps none; F1 as in scikit-learn."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.errors import JaxflError
from jaxfl.tasks.task import Metric, Task, ratio


class Found(NamedTuple):
    """Counts of k clients' rows for each of L labels, (k, L) int32.

    Args:
      right: rows that have the label, and are predicted to have it.
      rows: rows that have it.
      predicted: rows that are predicted to have it.
    """

    right: jax.Array
    rows: jax.Array
    predicted: jax.Array


def _count(labels, relabel, std, answers, real) -> Found:
    has, said = ((of.astype(bool) & real[..., None]) for of in (labels, answers))
    return Found(*(which.sum(1, dtype=jnp.int32) for which in (has & said, has, said)))


def micro_f1(found: Any) -> np.ndarray:
    """Return each client's F1 over all labels and rows, (n,); 0 if no row has or is said to have a label."""
    right, rows, predicted = (part.sum(1) for part in found)
    return ratio(2 * right, rows + predicted, 0.0)


def macro_f1(found: Any) -> np.ndarray:
    """Return each client's mean F1 over the labels that its rows have, or are said to have, (n,).

    NaN for a client without any. It is scikit-learn's with ``zero_division=numpy.nan``.
    """
    either = found.rows + found.predicted
    return ratio(ratio(2 * found.right, either, 0.0).sum(1), (either > 0).sum(1))


def average_precision(rows: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the mean over labels that some rows have of the area under precision and recall.

    It is scikit-learn's `average_precision_score`; NaN of a client whose rows have no label.

    Args:
      rows: labels (m, k) bool, and outputs (m, k).
    """
    from sklearn.metrics import average_precision_score  # it takes a second to load

    labels, outputs = (array[:, rows[0].any(0)] for array in rows)
    return float(average_precision_score(labels, outputs)) if labels.size else np.nan


def _quality(outputs, y, size):
    real = (jnp.arange(len(y), dtype=jnp.int32) < size)[:, None]
    has, said = (y > 0) & real, (outputs > 0) & real
    either = has.sum(dtype=jnp.int32) + said.sum(dtype=jnp.int32)
    right = (has & said).sum(dtype=jnp.int32)
    return 2 * right.astype(outputs.dtype) / jnp.maximum(either, 1).astype(outputs.dtype)


def _apart(outputs, soft, temperature=1):
    """Return the mean over labels of the divergence KL(soft || sigmoid(outputs / temperature))."""
    of_label = optax.sigmoid_binary_cross_entropy(outputs / temperature, soft)
    least = jnp.finfo(soft.dtype).tiny
    entropy = sum(-p * jnp.log(jnp.maximum(p, least)) for p in (soft, 1 - soft))
    return (of_label - entropy).mean(1)


def read(name: str, labels: np.ndarray, examples: np.ndarray, outputs: int) -> tuple[np.ndarray, int]:
    """Return labels (N, k) bool, see `Task.read`."""
    rows = len(examples)
    if labels.ndim != 2 or labels.shape[0] != rows or not labels.size:
        raise JaxflError(
            f"{name}: labels have shape {labels.shape}, but --task labels takes ({rows}, k), a 0 or 1 for "
            "each of k labels."
        )
    if labels.dtype.kind not in "biuf" or not np.isin(labels, (0, 1)).all():
        raise JaxflError(f"{name}: --task labels takes a 0 or 1 for each label, but there are other values.")
    return labels.astype(bool), labels.shape[1]


def first(labels: np.ndarray) -> np.ndarray:
    """Return the first label that each row has, (N,) int32; of rows without one a number more."""
    return np.where(labels.any(1), labels.argmax(1), labels.shape[1]).astype(np.int32)


def chance(labels: np.ndarray) -> str:
    """Return the score of saying that each row has all labels, in words."""
    each, share = labels.sum(1).mean(), labels.mean()
    f1 = 2 * share / (1 + share)
    return f"Rows have {each:.3g} labels on average; saying all labels has a micro F1 of {100 * f1:.1f} %."


LABELS = Task(
    name="labels",
    what="some of several labels",
    outputs="labels",
    form=("b", 2),
    read=read,
    strata=first,
    aim=lambda labels, relabel: labels,
    losses=lambda outputs, y: optax.sigmoid_binary_cross_entropy(outputs, y.astype(outputs.dtype)).mean(1),
    answer=lambda outputs, labels: outputs > 0,
    label=lambda outputs, classes, target: outputs > 0,
    count=_count,
    each=micro_f1,
    pooled=lambda counts: micro_f1([part.sum(0)[None] for part in counts])[0],
    metrics=(
        Metric("macro-f1", "macro F1", macro_f1, recorded=("mean", "per_client")),
        Metric("average-precision", "mean average precision", average_precision, "test"),
    ),
    title="micro F1",
    percent=True,
    better=max,
    quality=_quality,
    soft=lambda outputs, temperature=1: jax.nn.sigmoid(outputs / temperature),
    apart=_apart,
    hub="classification",
    says="Output k stands for label k of {dataset}, which a row has where it is above 0.",
    code="labels = np.asarray(scores) > 0",
    chance=chance,
    logs=jax.nn.log_sigmoid,
    rows=lambda labels, relabel, logs: (labels, logs),
    per_output=lambda counts: ratio(2 * counts.right.sum(0), (counts.rows + counts.predicted).sum(0)),
)
