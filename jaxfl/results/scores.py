"""Scores of a run over clients, architectures and classes, from what is counted of clients' predictions."""

import math
from collections.abc import Callable, Collection
from typing import Any, cast

import jax
import numpy as np

from jaxfl.core.score import Score
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.folder.records import Accuracy, OfCohort
from jaxfl.results.measures import CONFUSION
from jaxfl.tasks import Task


def needs_rows(task: Task, show: Collection[str]) -> bool:
    """Return whether something that is to be shown needs every row's answer, not only counts."""
    confused = CONFUSION in show and task.confusion is not None
    return confused or any(metric.of != "counts" for metric in task.metrics if metric.name in show)


def accuracy(
    scores: PerGroup, federation: Federation, show: Collection[str] = (), likely: PerGroup = ()
) -> Accuracy:
    """Return scores on clients' own test rows, shares as fractions; newcomers and attackers do not count.

    Args:
      scores: for each group the `Score` of all its clients.
      federation: the clients.
      show: names of further scores; those that are not of the task are left out.
      likely: per group (test, validation), see `jaxfl.core.score.likelihoods`, of all its clients; if
        something `needs_rows`.
    """
    order = np.argsort(np.concatenate([np.asarray(group.id) for group in federation.groups]))
    task, counted, every = federation.task, federation.counted, _joined(scores)
    known, each = _these(every, counted), task.each(every.test)
    ends = np.cumsum([len(group.id) for group in federation.groups])[:-1]
    of_groups = zip(federation.models, np.split(each, ends), np.split(counted, ends), strict=True)
    clients = _rows(task.rows, likely, federation) if likely and task.rows else []

    def by_id(values):
        return np.where(counted, values, math.nan)[order]

    def asked(metric):
        if metric.of == "counts":
            return by_id(metric.compute(every.test))
        return by_id([metric.compute(of[metric.of]) if metric.of in of else math.nan for of in clients])

    recorded = {metric: metric.compute(every.test) for metric in task.metrics if metric.recorded}
    shown = {m.name: asked(m) for m in task.metrics if m.name in show and not m.recorded}
    found: dict[str, Any] = {"task": task.name, "mean": float(each[counted].mean())}
    found |= {name: _or_none(value) for name, value in _over_clients(task, known).items()}
    found |= {m.key: _mean(values[counted]) for m, values in recorded.items() if "mean" in m.recorded}
    found["per_client"] = _listed(by_id(each))
    for metric, values in recorded.items():
        if "per_client" in metric.recorded:
            found[f"{metric.key}_per_client"] = _listed(by_id(values))
    found["per_group"] = {model.name: _mean(own[here]) for model, own, here in of_groups}
    if task.per_output:
        found["per_class"] = _listed(task.per_output(known.test))
    if shown:
        found["scores"] = {
            name: {"mean": _mean(values), "per_client": _listed(values)} for name, values in shown.items()
        }
    if CONFUSION in show and task.confusion:
        found[CONFUSION] = task.confusion([of["test"] for of in clients if "test" in of]).tolist()
    return cast(Accuracy, found)


def success(scores: PerGroup, federation: Federation) -> float | None:
    """Return the share of rows that a backdoor turns, the mean over clients that count and have such rows."""
    counts = _joined(scores).test
    right, rows = counts.right.sum(1), counts.rows.sum(1)
    tried = federation.counted & (rows > 0)
    return float((right[tried] / rows[tried]).mean()) if tried.any() else None


def _over_clients(task: Task, score: Score) -> dict[str, float]:
    """Return what is said of the scores of some clients besides their mean, NaN without a value."""
    each = task.each(score.test)
    upwards = np.array(sorted(each, key=task.gain))
    validated = task.each(_these(score, np.asarray(score.validation_rows) > 0).validation)
    return {
        "std": each.std(),
        task.worst: upwards[0],
        "worst_tenth": upwards[: max(1, len(upwards) // 10)].mean(),
        "pooled": task.pooled(score.test),
        "validation": validated.mean() if len(validated) else math.nan,
    }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _listed(values: np.ndarray) -> list[float | None]:
    return [*map(_or_none, values)]


def _mean(values: np.ndarray) -> float | None:
    """Return the mean of the values that there are, None without any."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else None


def _rows(of_rows: Callable, likely: PerGroup, federation: Federation) -> list[dict[str, Any]]:
    """Return the rows of each client in the order of groups, by `Metric.of`; none of who does not count."""
    labels, clients = np.asarray(federation.labels), []
    for group, of_group in zip(federation.groups, likely, strict=True):
        lists = (group.test_rows, group.test_size), (group.validation_rows, group.validation_size)
        for i, relabel in enumerate(np.asarray(group.relabel)):
            of_client = {}
            for name, (rows, sizes), logs in zip(("test", "validation"), lists, of_group, strict=True):
                if size := int(sizes[i]):
                    truth = labels[np.asarray(rows[i])[:size]]
                    of_client[name] = of_rows(truth, relabel, logs[i][:size])
            clients.append(of_client)
    return [
        of_client if counts else {} for of_client, counts in zip(clients, federation.counted, strict=True)
    ]


# ---- of some clients


def cohort_accuracy(task: Task, scores: PerGroup, present: list[np.ndarray]) -> OfCohort:
    """Return the test score of the clients present, masks (k_g,): mean over them, and pooled over rows."""
    counts = _present(scores, present).test
    return {"mean": float(task.each(counts).mean()), "pooled": float(task.pooled(counts))}


def client_accuracies(task: Task, scores: PerGroup, present: list[np.ndarray]) -> list[float]:
    """Return the test score of each client present, in the order of places."""
    return task.each(_present(scores, present).test).tolist()


def teacher_accuracy(task: Task, teacher: PerGroup, own: PerGroup | None, present: list[np.ndarray]) -> dict:
    """Return the score of what teaches the clients present, on their own test rows.

    Args:
      task: what is scored.
      teacher: its scores, per group; not finite of a client that has no teacher.
      own: those of the clients' own models, None if unknown.
      present: masks (k_g,).

    Returns:
      {"teacher": mean over those that have one, pooled, and lead, by how much the mean over them is better
      than that of their own models}, or {} if none has.
    """
    taught = [here & of_group.finite for here, of_group in zip(present, teacher, strict=True)]
    if not any(of_group.any() for of_group in taught):
        return {}
    found = cohort_accuracy(task, teacher, taught)
    lead = {}
    if own:
        lead["lead"] = task.gain(found["mean"]) - task.gain(cohort_accuracy(task, own, taught)["mean"])
    return {"teacher": {**found, **lead}}


def _present(scores: PerGroup, present: list[np.ndarray]) -> Score:
    """Return the score of the clients present, see `_joined`."""
    return _these(_joined(scores), np.concatenate(present))


def _these(score: Score, which: np.ndarray) -> Score:
    return jax.tree.map(lambda leaf: leaf[which], score)


def _joined(scores: PerGroup) -> Score:
    """Concatenate the scores of all groups' clients; the leaves are NumPy arrays of int64 or float64."""

    def joined(*leaves):
        found = np.concatenate(leaves)
        return found.astype(float if found.dtype.kind == "f" else np.int64)

    return jax.tree.map(joined, *scores)
