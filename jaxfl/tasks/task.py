"""What a task is: functions of outputs and labels, and the metrics of these."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import numpy as np


class Metric(NamedTuple):
    """A further score of each client, a share unless `percent` is False.

    Args:
      name: in `--show` and in studies; records have ``_`` in place of ``-``.
      title: in words.
      compute: returns it of what `of` names, NaN without a value: ``counts -> (n,)`` of n clients, or
        ``rows -> float`` of one.
      of: "counts" of test rows, see `Task.count`, or the "test" or "validation" rows, see `Task.rows`.
      better: `max` or `min`, which returns the better one of two values.
      percent: whether it is a share, shown in percent.
      recorded: what every record has: "mean" over the clients with a value, "per_client"; a run records both
        of any other metric that `--show` asks for.
    """

    name: str
    title: str
    compute: Callable
    of: Literal["counts", "test", "validation"] = "counts"
    better: Callable = max
    percent: bool = True
    recorded: tuple[Literal["mean", "per_client"], ...] = ()

    @property
    def key(self) -> str:
        """Its name in records."""
        return self.name.replace("-", "_")


def ratio(part, whole, nothing: float = np.nan) -> np.ndarray:
    """Return part / whole of counts, `nothing` where the whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(part), nothing), where=whole > 0)


class Task(NamedTuple):
    """A task.

    Args:
      name: its name in `--task`.
      what: what labels are, in words.
      outputs: what outputs stand for, in words: "classes".
      form: type and number of axes of a source's labels: ("i", 1).
      read: ``(name, labels, examples (N, ...), outputs) -> (labels (N, ...), outputs)``, the labels of a data
        set in that form and their number of outputs, see `Source`; raises `JaxflError` if they are no such
        labels. `outputs` is that which the data say.
      strata: ``labels -> (N,) int32``, of each row what it is divided by where others are by their class.
      aim: ``(labels (B, ...), relabel) -> y``, what a client's network is to put out; both as a `Federation`
        has them.
      losses: ``(outputs (B, ..., o), y) -> (B,)``, the training loss of each row.
      answer: ``(outputs (B, ..., o), labels (B, ...)) -> (B, ...)``, the predictions of which counts are
        made, or what is counted of them; an array or a tuple of arrays.
      label: ``(outputs (B, ..., o), classes (o,), target) -> labels``, the prediction in the form of the
        data's labels, with NumPy; classes are those for which outputs stand, target the moments of targets.
      count: ``(labels (k, m, ...), relabel (k, c), std, answers (k, m, ...), real (k, m)) -> counts`` of k
        clients' rows, leaves (k, ...); std is that of the targets, if labels are.
      each: ``counts -> (n,)``, the score of each client.
      pooled: ``counts -> float``, over all rows, whosever they are.
      metrics: further scores, in the order of tables.
      title: the score's name.
      percent: whether it is a share, shown in percent; else it is in the labels' unit.
      better: `max` or `min`, which returns the better one of two scores.
      quality: ``(outputs (m, ..., o), y, size) -> ()``, how good the first `size` rows' outputs are, 1 at
        best; 0 without rows.
      soft: ``(outputs, temperature=1) -> (..., o)``, the form in which networks tell each other predictions.
      apart: ``(outputs (B, ..., o), soft, temperature=1) -> (B,)``, how far outputs are from such a
        prediction.
      hub: what Hugging Face calls it, after the kind of inputs: text-classification.
      says: what output k stands for, a sentence in which {dataset}, {mean} and {std} are those of the data.
      code: Python that makes labels of `scores` (B, ..., o).
      per_output: ``counts -> (outputs,)``, the score of all clients' rows by class, NaN without rows; None of
        a task whose outputs are not scored by themselves.
      logs: ``outputs (B, o) -> (B, o)``, logarithms of what they say how likely is; read if there are `rows`.
      rows: ``(labels (m, ...), relabel, logs (m, o)) -> rows`` of one client, which metrics and `confusion`
        take; None of a task whose metrics need only counts.
      confusion: ``rows of each client -> (C, C + 1)``, how many of a class (row) are taken for a class
        (column), in the last column for none.
      chance: ``labels (n, ...) of training rows -> sentence``, the score of what needs no network; None of a
        task of which the number of outputs says it.
      every_token: whether a network has outputs for each token of a row, (B, T, o).
    """

    name: str
    what: str
    outputs: str
    form: tuple[str, int]
    read: Callable
    strata: Callable
    aim: Callable
    losses: Callable
    answer: Callable
    label: Callable
    count: Callable
    each: Callable
    pooled: Callable
    metrics: tuple[Metric, ...]
    title: str
    percent: bool
    better: Callable
    quality: Callable
    soft: Callable
    apart: Callable
    hub: str
    says: str
    code: str
    per_output: Callable | None = None
    logs: Callable = jax.nn.log_softmax
    rows: Callable | None = None
    confusion: Callable | None = None
    chance: Callable | None = None
    every_token: bool = False

    @property
    def worst(self) -> str:
        """What the score of the worst client is called."""
        return "lowest" if self.better is max else "worst"

    def text(self, value: float) -> str:
        """Return a score in words: ``accuracy 93.1 %`` or ``RMSE 0.412``."""
        return f"{self.title} {100 * value:.1f} %" if self.percent else f"{self.title} {value:.4g}"

    def goal(self, value: float) -> str:
        """Return a score to be reached, in words: ``70 %`` or ``RMSE 0.4``."""
        return f"{100 * value:g} %" if self.percent else f"{self.title} {value:g}"

    def gain(self, value: float) -> float:
        """Return a score so that more is better."""
        return value if self.better is max else -value
