"""What a run has spent when it first reaches a target accuracy, by its metrics alone."""

from collections.abc import Sequence

from jaxfl.errors import JaxflError

SPENT = ("bytes_up", "bytes_down", "flops", "simulated_seconds")
ROUNDING = 1e-9  # a mean of fractions may miss the number that it is


def check_targets(targets: Sequence[float]) -> None:
    """Refuse what is no accuracy.

    Raises:
      JaxflError: naming the first one outside of (0, 1].
    """
    for target in targets:
        if not 0 < target <= 1:
            raise JaxflError(f"--target takes accuracies in (0, 1], such as 0.7, but one is {target:g}.")


def by_target(metrics: list[dict], targets: Sequence[float]) -> dict[str, dict]:
    """For each target the first evaluation at which the clients' mean accuracy reaches it.

    Returns:
      By the target's text its round, and bytes_up, bytes_down, flops and simulated_seconds of all rounds up
      to it. All are None where it is not reached, the last one also where clients' devices are unknown.
    """
    return {str(target): _spent(metrics, _reaching(metrics, target)) for target in targets}


def reached(metrics: list[dict], targets: Sequence[float]) -> bool:
    """Whether a run has reached all targets."""
    return all(_reaching(metrics, target) for target in targets)


def stops(config: dict, metrics: list[dict]) -> bool:
    """Whether a run of this configuration ends here, at its target."""
    options = config["options"]
    wanted = options.get("stop_at_target", False) and not config.get("beyond_target", False)
    return wanted and reached(metrics, options["target"])


def _reaching(metrics: list[dict], target: float) -> int | None:
    """The first round that is scored at least like this."""
    means = ((record["round"], record["accuracy"]["mean"]) for record in metrics if "accuracy" in record)
    return next((number for number, mean in means if mean >= target - ROUNDING), None)


def _spent(metrics: list[dict], rounds: int | None) -> dict:
    spent = dict.fromkeys(SPENT)
    if rounds:
        spent |= {
            name: sum(record[name] for record in metrics[:rounds]) for name in SPENT if name in metrics[0]
        }
    return {"round": rounds} | spent
