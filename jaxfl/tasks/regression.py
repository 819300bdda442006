"""Regression: k targets, whose scores are means over them, as in scikit-learn; RMSE, MAE and R^2."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.errors import JaxflError
from jaxfl.tasks.task import Metric, Task

TENTHS = 10
MOST_LOST = 1e-3  # of numbers as float32, in their standard deviation


class Sums(NamedTuple):
    """Sums over k clients' rows, per standardised target (k, targets).

    Args:
      squared: of squared errors.
      absolute: of absolute errors.
      spread: of squared distances of the targets from their mean on the client; 0 if they do not differ.
      unit: the targets' standard deviation, in which all these are.
      rows: (k,) int32, number of rows.
    """

    squared: jax.Array
    absolute: jax.Array
    spread: jax.Array
    unit: jax.Array
    rows: jax.Array


def _sum_errors(labels, relabel, std, outputs, real) -> Sums:
    """Sum up errors of standardised targets."""
    real, count, away = real[..., None], real.sum(1, dtype=jnp.int32), outputs - labels
    squared, absolute = (sizes.sum(1, where=real) for sizes in (jnp.square(away), jnp.abs(away)))
    unit = jnp.broadcast_to(std[None], squared.shape)
    return Sums(squared, absolute, jax.vmap(_spread)(labels, real), unit, count)


def _spread(y, real):
    """Return the sum of squared distances of targets (m, k) from their mean, (k,), over the real rows (m, 1).

    Exactly 0 if they do not differ: of a rounded mean they have distances.
    """
    least, most = (of(y, 0, where=real, initial=end) for of, end in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf)))
    mean = y.sum(0, where=real, keepdims=True) / jnp.maximum(real.sum(), 1).astype(y.dtype)
    return jnp.where(most > least, jnp.square(y - mean).sum(0, where=real), 0)


def _explained(outputs, y, size):
    """Return R^2 of the first `size` rows, the mean over targets; 0 where the targets do not differ."""
    real = (jnp.arange(len(y), dtype=jnp.int32) < size)[:, None]
    spread = _spread(y, real)
    squared = jnp.square(outputs - y).sum(0, where=real)
    return jnp.where(spread > 0, 1 - squared / jnp.where(spread > 0, spread, 1), 0).mean()


def rmse(sums: Any) -> np.ndarray:
    """Return each client's root mean squared error, (n,)."""
    return (sums.unit * np.sqrt(sums.squared / sums.rows[:, None])).mean(1)


def mae(sums: Any) -> np.ndarray:
    """Return each client's mean absolute error, (n,)."""
    return (sums.unit * sums.absolute / sums.rows[:, None]).mean(1)


def r2(sums: Any) -> np.ndarray:
    """Return each client's R^2, (n,); NaN for a single row, of which it says nothing.

    If the targets of a client do not differ, it is 1 without any error and else 0.
    """
    constant = sums.spread == 0
    ratio = np.divide(sums.squared, sums.spread, out=(sums.squared > 0).astype(float), where=~constant)
    return np.where(sums.rows > 1, (1 - ratio).mean(1), np.nan)


def read(name: str, labels: np.ndarray, examples: np.ndarray, outputs: int) -> tuple[np.ndarray, int]:
    """Return targets (N, k) float32, see `Task.read`."""
    rows = len(examples)
    if labels.dtype.kind not in "biuf":
        raise JaxflError(f"{name}: labels are {labels.dtype}, but --task regression takes numbers.")
    if labels.ndim not in (1, 2) or labels.shape[0] != rows or not labels.size:
        raise JaxflError(
            f"{name}: labels have shape {labels.shape}, not ({rows},) or ({rows}, targets), numbers per row."
        )
    given = labels.reshape(rows, -1).astype(float)
    with np.errstate(over="ignore"):  # values beyond float32 become infinite and are refused
        labels = given.astype(np.float32)
    if wrong := (~np.isfinite(labels)).any(1).sum():
        raise JaxflError(
            f"{name}: {wrong} of {rows} rows have NaN or an infinite value (as float32) as their label; "
            "leave them out."
        )
    if lost := lost_as_float32(given):
        raise JaxflError(
            f"{name}: as float32 targets lose up to {lost:.3g}, too much beside their deviation; "
            "subtract a number from all, such as the least."
        )
    return labels, labels.shape[1]


def lost_as_float32(given: np.ndarray) -> float:
    """Return how much columns (N, k) lose at most, 0 if that is little beside the deviation of each."""
    with np.errstate(over="ignore", invalid="ignore"):  # of values beyond float32, which lose all; infinite
        lost = np.abs(given.astype(np.float32) - given).max(0, where=np.ptp(given, 0) > 0, initial=0)
        return float(lost.max(initial=0, where=lost > MOST_LOST * given.std(0)))


def tenths(targets: np.ndarray) -> np.ndarray:
    """Return the tenth in which each row's first target lies, (N,) int32."""
    first = targets[:, 0]
    ends = np.unique(np.quantile(first, np.arange(1, TENTHS) / TENTHS))
    return np.unique(np.searchsorted(ends, first, "right"), return_inverse=True)[1].astype(np.int32)


def chance(targets: np.ndarray) -> str:
    """Return the error of always saying the mean, in words."""
    known = targets.astype(float)
    mean, std = (", ".join(f"{value:.6g}" for value in of) for of in (known.mean(0), known.std(0)))
    return f"Targets have mean {mean} and deviation {std}, the RMSE of always saying the mean."


REGRESSION = Task(
    name="regression",
    what="one or several numbers",
    outputs="targets",
    form=("f", 2),
    read=read,
    strata=tenths,
    aim=lambda labels, relabel: labels,
    losses=lambda outputs, y: jnp.square(outputs - y).mean(1),
    answer=lambda outputs, labels: outputs.astype(jnp.result_type(float)),
    label=lambda outputs, classes, target: outputs * target[1] + target[0],
    count=_sum_errors,
    each=rmse,
    pooled=lambda sums: float((sums.unit[0] * np.sqrt(sums.squared.sum(0) / sums.rows.sum())).mean()),
    metrics=(
        Metric("mae", "MAE", mae, better=min, percent=False, recorded=("mean",)),
        Metric("r2", "R2", r2, percent=False, recorded=("mean", "per_client")),
    ),
    title="RMSE",
    percent=False,
    better=min,
    quality=_explained,
    soft=lambda outputs, temperature=1: outputs,
    apart=lambda outputs, soft, temperature=1: jnp.square(outputs - soft).mean(1),
    hub="regression",
    says="Output k is target k, as (target - mean) / std with mean {mean} and std {std}.",
    code='mean, std = map(np.array, about["target"].values())\ntargets = np.asarray(scores) * std + mean',
    chance=chance,
)
