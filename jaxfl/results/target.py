"""What a run spends until it first reaches a target score, and where it stops, from only its metrics."""

from collections.abc import Sequence

import numpy as np

from jaxfl.errors import JaxflError
from jaxfl.tasks import Task, task_of

SPENT = ("bytes_up", "bytes_down", "flops", "simulated_seconds")
ROUNDING = 1e-9  # a mean of fractions may miss its exact value


def check_targets(targets: Sequence[float], task: Task) -> None:
    """Refuse targets that no score of the task can be.

    Raises:
      JaxflError: naming the first one.
    """
    for target in targets:
        if task.percent and not 0 < target <= 1:
            raise JaxflError(f"--target takes accuracies in (0, 1], such as 0.7, but one is {target:g}.")
        if not 0 < target < np.inf:
            raise JaxflError(f"--target takes a {task.title} above 0, but one is {target:g}.")


def by_target(metrics: list[dict], targets: Sequence[float]) -> dict[str, dict]:
    """Find the first evaluation at which the clients' mean accuracy reaches each target.

    Returns:
      By the target's text its round, and bytes_up, bytes_down, flops and simulated_seconds of all rounds up
      to it. All are None if it is not reached, the last one also if clients' devices are unknown.
    """
    return {str(target): _spent(metrics, _reaching(metrics, target)) for target in targets}


def stops(config: dict, metrics: list[dict]) -> str:
    """Return why a run of this configuration ends here, before its last round; nothing if it does not."""
    options, patience = config["options"], config["options"].get("patience")
    if config.get("beyond_target", False):  # it has been made longer
        return ""
    if options.get("stop_at_target", False) and all(_reaching(metrics, goal) for goal in options["target"]):
        return "all targets were reached"
    if patience and (worse := _evaluations_since_best(metrics)) >= patience:
        return f"the last {worse} evaluations were not better than the best one before"
    return ""


def _evaluations_since_best(metrics: list[dict]) -> int:
    """Return how many evaluations followed the best one: by validation rows, without any by training loss.

    That loss is the mean over the rounds since the evaluation before.
    """
    scored = [record for record in metrics if "accuracy" in record]
    values = [record["accuracy"]["validation"] for record in scored]
    if None not in values:
        values = [task_of(record["accuracy"]).gain(record["accuracy"]["validation"]) for record in scored]
    else:
        ends = [0, *(record["round"] for record in scored)]
        values = [-_mean_loss(metrics[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    return len(values) - 1 - int(np.argmax(values)) if values else 0


def _mean_loss(records: list[dict]) -> float:
    known = [record["loss"] for record in records if record["loss"] is not None]
    return float(np.mean(known)) if known else np.inf


def _reaching(metrics: list[dict], target: float) -> int | None:
    """Return the first round whose score reaches the target, None if there is none."""
    for record in metrics:
        if "accuracy" in record:
            gain = task_of(record["accuracy"]).gain
            if gain(record["accuracy"]["mean"]) >= gain(target) - ROUNDING:
                return record["round"]
    return None


def _spent(metrics: list[dict], rounds: int | None) -> dict:
    spent = dict.fromkeys(SPENT)
    if rounds:
        spent |= {
            name: sum(record[name] for record in metrics[:rounds]) for name in SPENT if name in metrics[0]
        }
    return {"round": rounds} | spent
