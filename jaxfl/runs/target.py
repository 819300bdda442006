"""Costs of a run until it first reaches a target accuracy, from only its metrics."""

from collections.abc import Sequence

from jaxfl.errors import JaxflError

SPENT = ("bytes_up", "bytes_down", "flops", "simulated_seconds")
ROUNDING = 1e-9  # a mean of fractions may miss its exact value


def check_targets(targets: Sequence[float]) -> None:
    """Refuse targets that are not accuracies.

    Raises:
      JaxflError: naming the first one outside of (0, 1].
    """
    for target in targets:
        if not 0 < target <= 1:
            raise JaxflError(f"--target takes accuracies in (0, 1], such as 0.7, but one is {target:g}.")


def by_target(metrics: list[dict], targets: Sequence[float]) -> dict[str, dict]:
    """Find the first evaluation at which the clients' mean accuracy reaches each target.

    Returns:
      By the target's text its round, and bytes_up, bytes_down, flops and simulated_seconds of all rounds up
      to it. All are None if it is not reached, the last one also if clients' devices are unknown.
    """
    return {str(target): _spent(metrics, _reaching(metrics, target)) for target in targets}


def reached(metrics: list[dict], targets: Sequence[float]) -> bool:
    """Return whether a run has reached all targets."""
    return all(_reaching(metrics, target) for target in targets)


def stops(config: dict, metrics: list[dict]) -> bool:
    """Return whether a run of this configuration ends here, at its targets."""
    options = config["options"]
    wanted = options.get("stop_at_target", False) and not config.get("beyond_target", False)
    return wanted and reached(metrics, options["target"])


def _reaching(metrics: list[dict], target: float) -> int | None:
    """Return the first round whose accuracy reaches the target, None if there is none."""
    means = ((record["round"], record["accuracy"]["mean"]) for record in metrics if "accuracy" in record)
    return next((number for number, mean in means if mean >= target - ROUNDING), None)


def _spent(metrics: list[dict], rounds: int | None) -> dict:
    spent = dict.fromkeys(SPENT)
    if rounds:
        spent |= {
            name: sum(record[name] for record in metrics[:rounds]) for name in SPENT if name in metrics[0]
        }
    return {"round": rounds} | spent
