"""Scores of a run over clients, architectures and classes, from the rows that clients' models get right."""

from typing import Any

import jax
import numpy as np

from jaxfl.data.federation import Federation, PerGroup


def accuracy(scores: PerGroup, federation: Federation) -> dict:
    """Return the scores of all clients except newcomers on their own test rows, as fractions.

    Args:
      scores: for each group, the `Score` of all its clients.
      federation: the clients.

    Returns:
      mean, std: over clients; lowest: of the worst client; worst_tenth: mean over the worst tenth of them (at
      least one); pooled: over all rows; macro_f1: mean over clients of `macro_f1`; per_client,
      macro_f1_per_client: by id, None for newcomers; per_class: over all rows of each class of the data set,
      None without rows; per_group: mean over the clients of each architecture, newcomers left out;
      validation: mean over clients on validation rows, None without such rows.
    """
    ids = np.concatenate([np.asarray(group.id) for group in federation.groups])
    counted = ~np.concatenate(federation.newcomers)
    every = _joined(scores)
    of_client = every.right.sum(1) / every.rows.sum(1)
    f1 = macro_f1(every.right, every.rows, every.predicted)
    order = np.argsort(ids)
    known = of_client[counted]
    validates = counted & (every.validation_rows > 0)
    validation = every.validated[validates] / every.validation_rows[validates]
    ends = np.cumsum([len(group.id) for group in federation.groups])[:-1]
    of_groups = zip(federation.models, np.split(of_client, ends), np.split(counted, ends), strict=True)
    of_class, class_rows = every.right[counted].sum(0), every.rows[counted].sum(0)
    return {
        "mean": float(known.mean()),
        "std": float(known.std()),
        "lowest": float(known.min()),
        "worst_tenth": float(np.sort(known)[: max(1, len(known) // 10)].mean()),
        "pooled": float(of_class.sum() / class_rows.sum()),
        "macro_f1": float(f1[counted].mean()),
        "per_client": _by_id(of_client, counted, order),
        "macro_f1_per_client": _by_id(f1, counted, order),
        "per_class": [
            int(of_class[c]) / int(class_rows[c]) if class_rows[c] else None for c in range(len(of_class))
        ],
        "per_group": {model.name: float(shares[present].mean()) for model, shares, present in of_groups},
        "validation": float(validation.mean()) if validates.any() else None,
    }


def of_present(scores: PerGroup, present: list[np.ndarray]) -> dict:
    """Return the test accuracy of the clients present, masks (k_g,): mean over them, and pooled over rows."""
    right, rows = _of(scores, present)
    return {"mean": float((right / rows).mean()), "pooled": float(right.sum() / rows.sum())}


def each_present(scores: PerGroup, present: list[np.ndarray]) -> list[float]:
    """Return the test accuracy of each client present, in the order of places."""
    right, rows = _of(scores, present)
    return (right / rows).tolist()


def of_teachers(teacher: PerGroup, own: PerGroup | None, present: list[np.ndarray]) -> dict:
    """Return the accuracy of what teaches the clients present, on their own test rows.

    Args:
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
    found = of_present(teacher, taught)
    lead = {"lead": found["mean"] - of_present(own, taught)["mean"]} if own else {}
    return {"teacher": found | lead}


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


def _of(scores: PerGroup, present: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the correct test rows, and all test rows, of each client present."""
    every, answered = _joined(scores), np.concatenate(present)
    return every.right[answered].sum(1), every.rows[answered].sum(1)


def _joined(scores: PerGroup) -> Any:
    """Concatenate the `Score` of all groups' clients; its leaves are NumPy arrays of int64."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves).astype(np.int64), *scores)


def _by_id(values: np.ndarray, counted: np.ndarray, order: np.ndarray) -> list[float | None]:
    return [
        value if known else None for value, known in zip(values[order].tolist(), counted[order], strict=True)
    ]
