"""What can be read off a run's result: its scores and its costs, by the names of `--show` and of studies."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxfl.errors import JaxflError, nearest
from jaxfl.runs.row_scores import CONFUSION, ROW_SCORES

PER_CLASS = "per-class"  # not one measure but one for each class


class Measure(NamedTuple):
    """A value by which results are compared.

    Args:
      title: its name in words, with its unit.
      value: returns it for a result, NaN if that has none.
      of_clients: returns it for every client by id, None for newcomers; None if clients have no such value.
      better: returns the best of some values; None if none is best.
      missing: why a run may have no value, and what to do, for a note.
    """

    title: str
    value: Callable[[dict], float]
    of_clients: Callable[[dict], list[float | None]] | None = None
    better: Callable[[Sequence[float]], float] | None = None
    missing: str = ""


# ---- scores: entries of "accuracy" and "received", see `jaxfl.runs.scores.accuracy`


def percent(share: float | None) -> float:
    """Return a share in percent, NaN for None."""
    return math.nan if share is None else 100 * share


def _of_deployed(title: str, entry: str, better: Callable = max) -> Measure:
    return Measure(title, lambda result: percent(result["accuracy"][entry]), None, better)


def _mean_of(moment: str, title: str) -> Measure:
    return Measure(
        title,
        lambda result: percent(result[moment]["mean"]),
        lambda result: [percent(share) for share in result[moment]["per_client"]],
        max,
    )


def _of_rows(name: str, title: str, better: Callable) -> Measure:
    def shown(share):
        return percent(share) if title.endswith("%") else math.nan if share is None else share

    def of(result):
        nothing = {"mean": None, "per_client": [None] * len(result["accuracy"]["per_client"])}
        return result["accuracy"].get("scores", {}).get(name, nothing)

    return Measure(
        title,
        lambda result: shown(of(result)["mean"]),
        lambda result: [shown(value) for value in of(result)["per_client"]],
        better,
        f"no run has a value; runs that begin with --show {name} do, where clients have rows for it",
    )


MEANS = {
    "accuracy": _mean_of("accuracy", "accuracy, mean over clients %"),
    "received": _mean_of("received", "received %"),
}
SCORES = {  # of the deployed models, beside the mean over clients
    "std": _of_deployed("std over clients %", "std", min),
    "lowest": _of_deployed("lowest client %", "lowest"),
    "worst-tenth": _of_deployed("worst tenth %", "worst_tenth"),
    "pooled": _of_deployed("pooled %", "pooled"),
    "macro-f1": _of_deployed("macro F1 %", "macro_f1"),
    "validation": _of_deployed("validation %", "validation")._replace(
        missing="no run has validation rows; clients hold some out with --validation-fraction"
    ),
    **{name: _of_rows(name, score.title, score.better) for name, score in ROW_SCORES.items()},
}


def _of_cohort(title: str, moment: str, entry: str, who: str) -> Measure:
    def value(result):
        return percent(result.get("cohort", {}).get(moment, {}).get(entry))

    missing = f"no run has scores of {who}; --score-cohort takes them where a method tells"
    return Measure(title, value, None, max, missing)


COHORT = {  # of the clients of a round, mean of the last ten rounds
    "trained": _of_cohort("trained %", "trained", "mean", "models right after training"),
    "teacher": _of_cohort("teacher %", "teacher", "mean", "what teaches clients"),
    "teacher-lead": _of_cohort("teacher's lead %", "teacher", "lead", "what teaches clients"),
}


def names_of_classes(results: Sequence[dict]) -> list[str]:
    """Return the words or numbers of the classes, as many as any of some results has."""
    classes = max(len(result["accuracy"]["per_class"]) for result in results)
    first, *others = (result.get("class_names", []) for result in results)
    named = len(first) == classes and all(other == first for other in others)
    return first if named else [*map(str, range(classes))]


def of_classes(results: Sequence[dict]) -> list[Measure]:
    """Return the accuracy on each class."""

    def of_class(c):
        def value(result):
            known = result["accuracy"]["per_class"]
            return percent(known[c]) if c < len(known) else math.nan

        return Measure(f"class {names[c]} %", value)

    names = names_of_classes(results)
    return list(map(of_class, range(len(names))))


# ---- costs

COSTS = {
    "flops": Measure("GFLOP", lambda result: result["flops"] / 1e9),
    "lost": Measure("lost answers", lambda result: result.get("lost_answers") or 0),
}
TRAFFIC = Measure("MB sent and received", lambda result: (result["bytes_up"] + result["bytes_down"]) / 1e6)
SPENT = {  # until a target is reached: unit, scale, and entries of the target in a result
    "rounds": ("rounds", 1, ("round",)),
    "megabytes": ("MB", 1e6, ("bytes_up", "bytes_down")),
    "flops": ("GFLOP", 1e9, ("flops",)),
    "simulated-seconds": ("simulated s", 1, ("simulated_seconds",)),
}


def until(name: str, target: str | None, words: str) -> Measure:
    """Return what is spent until a target is reached.

    Args:
      name: one of `SPENT`.
      target: the target as a result names it, such as "0.6"; None for the only one that a result has.
      words: the target in the title.
    """
    unit, scale, entries = SPENT[name]

    def value(result):
        targets = result.get("targets", {})
        only = next(iter(targets)) if len(targets) == 1 else None
        found = targets.get(only if target is None else target, {})
        amounts = [found.get(entry) for entry in entries]
        return math.nan if None in amounts else sum(amounts, 0.0) / scale

    return Measure(f"{unit} to {words}", value, None, min)


# ---- by name

SHOWN = (*SCORES, PER_CLASS, CONFUSION, *COHORT, *COSTS)  # on request


def check_columns(show: Sequence[str]) -> None:
    """Refuse unknown columns.

    Raises:
      JaxflError: naming the first one, and a similar known one.
    """
    for name in show:
        if name not in SHOWN:
            raise JaxflError(f"There is no column {name!r}; {nearest(name, SHOWN)}")


def columns(name: str, results: Sequence[dict]) -> list[Measure]:
    """Return the columns of a name in `SHOWN`."""
    if name == CONFUSION:
        return []  # it is a picture
    return of_classes(results) if name == PER_CLASS else [(SCORES | COHORT | COSTS)[name]]


def known_measures(target: float | None = None) -> dict[str, Measure]:
    """Return all that a study can show, by name.

    Args:
      target: the only target of its runs, for titles; None if there are several or none.
    """
    words = "the target" if target is None else f"{100 * target:g} %"
    spent = {f"{name}-to-target": until(name, None, words) for name in SPENT}
    return MEANS | SCORES | COHORT | COSTS | {"megabytes": TRAFFIC} | spent


def titles() -> dict[str, str]:
    """Return what can be shown on request, by name, in words."""
    known = {name: what.title for name, what in known_measures().items()}
    known |= {PER_CLASS: "the accuracy on each class", CONFUSION: "which classes are taken for which"}
    return {name: known[name] for name in SHOWN}


def measure(name: str, target: float | None = None) -> Measure:
    """Return one of `known_measures`.

    Raises:
      JaxflError: if the name is unknown.
    """
    known = known_measures(target)
    if name not in known:
        raise JaxflError(f"A study cannot show {name!r}; {nearest(name, known)}")
    return known[name]
