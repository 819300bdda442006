"""Tasks: what a network's outputs are for, a file each. Whatever depends on the task asks this table.

A network maps an example to a row of outputs (B, outputs), or for each of its tokens to one (B, T, outputs).
The task says what it is to put out for a label, which loss it has, what its prediction is, what is counted of
predictions, which scores follow from the counts, and how the outputs of two networks are compared. Scores are
computed with NumPy, from the counts of n clients.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfl.errors import JaxflError, nearest
from jaxfl.tasks.classes import CLASSES
from jaxfl.tasks.labels import LABELS
from jaxfl.tasks.next_token import NEXT_TOKEN
from jaxfl.tasks.regression import REGRESSION
from jaxfl.tasks.task import Task

TASKS = {task.name: task for task in (CLASSES, LABELS, REGRESSION, NEXT_TOKEN)}
OF_FORM = {task.form: task for task in TASKS.values()}


def task_of(scores: Mapping[str, Any]) -> Task:
    """Return the task that a record's scores or data name; those of earlier versions are of classes."""
    return TASKS[scores.get("task", CLASSES.name)]


def task_for(labels: np.ndarray) -> Task:
    """Return the task of a source's labels, which their type and number of axes say."""
    return OF_FORM[labels.dtype.kind, labels.ndim]


def strata(labels: np.ndarray) -> np.ndarray:
    """Return the stratum of every row (N,) int32: its class, or what stands for it in another task.

    Whatever is divided by class is divided by these: clients' rows, test rows, public rows.
    """
    return task_for(labels).strata(labels)


def meant(name: str, labels: np.ndarray | None, task: str) -> Task:
    """Return the task that the labels of a data set, None without any, and the user's choice say.

    Raises:
      JaxflError: if they do not say one, or contradict each other.
    """
    if task not in ("auto", *TASKS):
        raise JaxflError(f"There is no task {task!r}; {nearest(task, ['auto', *TASKS])}")
    if task != "auto":
        return TASKS[task]
    if labels is None:
        return NEXT_TOKEN
    if labels.dtype.kind == "f" and (labels == np.round(labels)).all():
        raise JaxflError(
            f"{name}: labels are {labels.dtype}, but all of them whole: write --task regression for numbers, "
            "or store integers 0, 1, 2, ... for classes."
        )
    if labels.dtype.kind == "f":
        return REGRESSION
    several = labels.ndim == 2 and labels.shape[1] > 1 and labels.dtype.kind in "biu"
    if not several or not np.isin(labels, (0, 1)).all():
        return CLASSES
    if (labels.sum(1) == 1).all():
        raise JaxflError(
            f"{name}: each row of labels {labels.shape} has a single 1: make classes of them by .argmax(1), "
            "or write --task labels where a row may have several."
        )
    return LABELS


def require_classes(task: Task, why: str) -> None:
    """Raise `JaxflError` unless labels are classes; `why` begins its sentence with what needs them."""
    if task is not CLASSES:
        raise JaxflError(f"{why} needs classes, but the labels are for {task.name}: {task.what}.")
