"""What a run spends until it first reaches a target score, and where it stops, from only its metrics."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from jaxfl.errors import JaxflError
from jaxfl.folder.records import Config, Round, Target
from jaxfl.tasks import Task, task_of

SPENT = ("bytes_up", "bytes_down", "flops", "simulated_seconds")
ROUNDING = 1e-9  # by which share a mean of fractions may miss its exact value


def check_targets(targets: Sequence[float], task: Task) -> None:
    """Refuse targets that no score of the task can be."""
    for target in targets:
        if task.percent and not 0 < target <= 1:
            raise JaxflError(f"--target takes accuracies in (0, 1], such as 0.7, but one is {target:g}.")
        if not 0 < target < np.inf:
            raise JaxflError(f"--target takes a {task.title} above 0, but one is {target:g}.")


def by_target(metrics: list[Round], targets: Sequence[float]) -> dict[str, Target]:
    """Find the first evaluation at which the clients' mean accuracy reaches each target.

    Returns:
      By the target's text its round, and bytes_up, bytes_down, flops and simulated_seconds of all rounds up
      to it. All are None if it is not reached, the last one also if clients' devices are unknown.
    """
    return {str(target): _spent(metrics, _reaching(metrics, target)) for target in targets}


def stops(config: Config, metrics: list[Round]) -> str:
    """Return why a run of this configuration ends here, before its last round; nothing if it does not."""
    options, patience = config["options"], config["options"].get("patience")
    if config.get("beyond_target", False):  # it has been made longer
        return ""
    if options.get("stop_at_target", False) and all(_reaching(metrics, goal) for goal in options["target"]):
        return "all targets were reached"
    if patience and (worse := _evaluations_since_best(metrics)) >= patience:
        return f"the last {worse} evaluations were not better than the best one before"
    return ""


def _evaluations_since_best(metrics: list[Round]) -> int:
    """Return how many evaluations followed the best one: by validation rows, without any by training loss.

    That loss is the mean over the rounds since the evaluation before.
    """
    values = gains(metrics)
    if values is None:
        ends = [0, *(record["round"] for record in metrics if "accuracy" in record)]
        values = [-_mean_loss(metrics[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    return len(values) - 1 - int(np.argmax(values)) if values else 0


def gains(metrics: list[Round]) -> list[float] | None:
    """Return the score on validation rows at every evaluation, so that more is better.

    None if clients have no such rows.
    """
    scored = [record["accuracy"] for record in metrics if "accuracy" in record]
    values = [score["validation"] for score in scored]
    if None in values:
        return None
    return [task_of(score).gain(cast(float, value)) for score, value in zip(scored, values, strict=True)]


def _mean_loss(records: list[Round]) -> float:
    known = [record["loss"] for record in records if record["loss"] is not None]
    return float(np.mean(known)) if known else np.inf


def _reaching(metrics: list[Round], target: float) -> int | None:
    """Return the first round whose score reaches the target, None if there is none."""
    for record in metrics:
        if "accuracy" in record:
            gain = task_of(record["accuracy"]).gain
            if gain(record["accuracy"]["mean"]) >= gain(target) - ROUNDING * target:
                return record["round"]
    return None


def _spent(metrics: list[Round], rounds: int | None) -> Target:
    def total(name: str) -> Any:
        return sum(record[name] for record in metrics[:rounds]) if rounds and name in metrics[0] else None

    return cast(Target, {"round": rounds} | {name: total(name) for name in SPENT})
