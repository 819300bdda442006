"""Scores of a run over clients, architectures and classes, from what is counted of clients' predictions."""

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, cast

import jax
import numpy as np

from jaxfl.data.federation import Federation, PerGroup
from jaxfl.folder.records import Accuracy, OfCohort
from jaxfl.results.measures import CONFUSION, SCORES_OF, Rows
from jaxfl.tasks import CLASSES, Task


def accuracy(
    scores: PerGroup, federation: Federation, show: Collection[str] = (), likely: PerGroup = ()
) -> Accuracy:
    """Return scores on clients' own test rows, shares as fractions; newcomers and attackers do not count.

    Args:
      scores: for each group, what `Task.scored` returns of all its clients.
      federation: the clients.
      show: names of further scores; those that are not of the task are left out.
      likely: per group (test, validation), see `jaxfl.core.score.likelihoods`, of all its clients; needed for
        scores of every row's answer.

    """
    order = np.argsort(np.concatenate([np.asarray(group.id) for group in federation.groups]))
    counted = federation.counted
    every, task = _joined(scores), federation.task
    counts, share = jax.tree.map(lambda leaf: leaf[counted], every), task.each(every)
    ends = np.cumsum([len(group.id) for group in federation.groups])[:-1]
    of_groups = zip(federation.models, np.split(share, ends), np.split(counted, ends), strict=True)
    measures, (further, compute) = SCORES_OF[task.name], task.further

    def by_id(values):
        return [*map(_or_none, np.where(counted, values, math.nan)[order].tolist())]

    found: dict[str, Any] = {"task": task.name, "mean": float(share[counted].mean())}
    for score in measures.values():
        if score.overall:
            ((_, entry),) = score.paths
            found[entry] = _or_none(float(score.overall(counts)))
    found |= {
        "per_client": by_id(share),
        f"{further}_per_client": by_id(compute(every)),
        "per_group": {model.name: float(own[present].mean()) for model, own, present in of_groups},
    }
    if task.per_output:
        found["per_class"] = [*map(_or_none, task.per_output(counts).tolist())]
    clients, each = _answers(likely, federation) if likely and task is CLASSES else [], {}
    for name in filter(show.__contains__, measures):
        if (compute := measures[name].counts) is not None:
            each[name] = by_id(compute(every))
        elif (compute := measures[name].rows) is not None and clients:
            parts = [client[measures[name].validates] for client in clients]
            there = [known and len(part.truth) for known, part in zip(counted, parts, strict=True)]
            each[name] = by_id([compute(p) if t else math.nan for p, t in zip(parts, there, strict=True)])
    if each:
        found["scores"] = {
            name: {"mean": _mean(values), "per_client": values} for name, values in each.items()
        }
    if CONFUSION in show and clients:
        matrix = np.zeros((len(found["per_class"]), len(found["per_class"]) + 1), int)
        for test, _ in itertools.compress(clients, counted):
            np.add.at(matrix, (test.truth, test.predicted), 1)
        found[CONFUSION] = matrix.tolist()
    return cast(Accuracy, found)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _answers(likely: PerGroup, federation: Federation) -> list[tuple[Rows, Rows]]:
    """Return the test and the validation rows of every client, in the order of groups."""
    labels, answers = np.asarray(federation.labels), []
    for group, (of_test, of_validation) in zip(federation.groups, likely, strict=True):
        for i, relabel in enumerate(np.asarray(group.relabel)):
            test, checked = (
                labels[np.asarray(rows[i])[: int(size[i])]]
                for rows, size in (
                    (group.test_rows, group.test_size),
                    (group.validation_rows, group.validation_size),
                )
            )
            answers.append((_rows(test, relabel, of_test[i]), _rows(checked, relabel, of_validation[i])))
    return answers


def _rows(truth: np.ndarray, relabel: np.ndarray, logs: np.ndarray) -> Rows:
    """Return rows by the data set's classes, from logarithms (padded, outputs) by the client's outputs."""
    logs = logs[: len(truth)].astype(float)
    known = np.flatnonzero(relabel >= 0)
    by_output = np.full(logs.shape[1], -1)
    by_output[relabel[known]] = known
    by_class = np.full((len(truth), len(relabel)), -np.inf)
    by_class[:, known] = logs[:, relabel[known]]
    return Rows(truth, by_class, by_output[logs.argmax(1)], np.exp(logs.max(1)))


# ---- of some clients


def cohort_accuracy(task: Task, scores: PerGroup, present: list[np.ndarray]) -> OfCohort:
    """Return the test score of the clients present, masks (k_g,): mean over them, and pooled over rows."""
    here = _present(scores, present)
    return {"mean": float(task.each(here).mean()), "pooled": float(task.pooled(here))}


def client_accuracies(task: Task, scores: PerGroup, present: list[np.ndarray]) -> list[float]:
    """Return the test score of each client present, in the order of places."""
    return task.each(_present(scores, present)).tolist()


def teacher_accuracy(task: Task, teacher: PerGroup, own: PerGroup | None, present: list[np.ndarray]) -> dict:
    """Return the score of what teaches the clients present, on their own test rows.

    Args:
      task: what is scored.
      teacher: its scores, per group; not finite of a client that has no teacher.
      own: those of the clients' own models, None if unknown.
      present: masks (k_g,).

    Returns:
      {"teacher": mean over those that have one, pooled, and lead, the mean over them minus that of their own
      models}, or {} if none has.
    """
    taught = [here & of_group.finite for here, of_group in zip(present, teacher, strict=True)]
    if not any(of_group.any() for of_group in taught):
        return {}
    found = cohort_accuracy(task, teacher, taught)
    lead = {"lead": found["mean"] - cohort_accuracy(task, own, taught)["mean"]} if own else {}
    return {"teacher": {**found, **lead}}


def _present(scores: PerGroup, present: list[np.ndarray]) -> Any:
    """Return the counts of the clients present."""
    here = np.concatenate(present)
    return jax.tree.map(lambda leaf: leaf[here], _joined(scores))


def _joined(scores: PerGroup) -> Any:
    """Concatenate the counts of all groups' clients; the leaves are NumPy arrays of int64 or float64."""

    def joined(*leaves):
        found = np.concatenate(leaves)
        return found.astype(float if found.dtype.kind == "f" else np.int64)

    return jax.tree.map(joined, *scores)
