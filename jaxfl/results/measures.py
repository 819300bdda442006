"""What runs are compared by: scores of clients' models and costs, by the names of `--show` and of studies.

Tables, studies, pictures and logs ask these. Scores are those of tasks; a new cost is one entry in `COSTS`.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxfl.errors import JaxflError, nearest
from jaxfl.tasks import CLASSES, TASKS, Task, task_of
from jaxfl.tasks.task import Metric

PER_CLASS = "per-class"  # not one measure but one for each class
ONLY = "*"  # in a path the only entry there
CONFUSION = "confusion"  # of all clients' rows: a matrix, which has no column


class Measure(NamedTuple):
    """A column by which results are compared."""

    name: str  # its name in `--show` and in studies
    title: str  # its name in words, with its unit
    paths: Sequence[tuple]  # where results have it, entry by entry; of several the sum
    better: Callable[..., float] | None = None  # returns the best of some values; None if none is best
    percent: bool = False  # whether it is a share, shown in percent
    unit: float = 1  # what any other value is divided by
    absent: float = math.nan  # its value where a result has none
    missing: str = ""  # why a run may have no value, and what to do, for a note
    note: str = ""  # what it is, for a note, if the title does not say that
    goal: str = ""  # the target until which it counts, in words; runs that miss it have no value

    def value(self, result: Mapping[str, Any]) -> float:
        """Return it for a result, or for a record with scores; NaN if that has none."""
        amounts = [_at(result, path) for path in self.paths]
        return self.absent if None in amounts else self._shown(sum(amounts))

    def clients(self, result: Mapping[str, Any]) -> list[float]:
        """Return it for every client by id, NaN for newcomers; nothing if clients have no such value."""
        (*moment, last), *_ = self.paths
        each = _at(result, (*moment, "per_client")) if last == "mean" else None
        return [math.nan if value is None else self._shown(value) for value in each or ()]

    def _shown(self, value: float) -> float:
        return 100 * value if self.percent else value / self.unit


def _at(found: Any, path: Sequence) -> Any:
    """Return what is at the end of a path through dictionaries and lists, None if it ends before."""
    for entry in path:
        if entry == ONLY:
            found = next(iter(found.values())) if found and len(found) == 1 else None
        elif isinstance(found, dict):
            found = found.get(entry)
        else:
            found = found[entry] if found and entry < len(found) else None
    return found


def by_name(*measures: Measure) -> dict[str, Measure]:
    """Return measures by their names."""
    return {measure.name: measure for measure in measures}


# ---- scores


def _score(name: str, title: str, path: Sequence, better: Callable | None, percent: bool, **more) -> Measure:
    """Return a score, whose title ends in its unit."""
    return Measure(name, f"{title} %" if percent else title, [(*path,)], better, percent, **more)


def _of_metric(metric: Metric) -> Measure:
    path, missing = ("accuracy", metric.key), ""
    if not metric.recorded:
        path, asked = ("accuracy", "scores", metric.name, "mean"), f"--show {metric.name}"
        missing = f"no run has a value; runs that begin with {asked} do, where clients have rows for it"
    return _score(metric.name, metric.title, path, metric.better, metric.percent, missing=missing)


def _further(task: Task) -> dict[str, Measure]:
    """Return the scores of a task's deployed models, besides their mean: over clients, and its metrics."""
    worst, better, percent = task.worst, task.better, task.percent
    without = "no run has validation rows; clients hold some out with --validation-fraction"
    return by_name(
        _score("std", "std over clients", ("accuracy", "std"), min, percent),
        _score(worst, f"{worst} client", ("accuracy", worst), better, percent),
        _score("worst-tenth", "worst tenth", ("accuracy", "worst_tenth"), better, percent),
        _score("pooled", "pooled", ("accuracy", "pooled"), better, percent),
        _score("validation", "validation", ("accuracy", "validation"), better, percent, missing=without),
        *map(_of_metric, task.metrics),
    )


SCORES_OF = {task.name: _further(task) for task in TASKS.values()}
# Their names; those of several tasks are of classes here.
SCORES = functools.reduce(operator.or_, reversed(SCORES_OF.values()))

RECEIVED = "received: the models that clients start a round from, scored before they train."
TEN = "Right after training and of teachers: means over the clients of each of the last ten rounds."
SCORED = "no run has scores of {}; --score-cohort takes them where a method tells"


def means(task: Task) -> dict[str, Measure]:
    """Return the scores that are means over clients."""
    how = task.better, task.percent
    return by_name(
        _score("accuracy", f"{task.title}, mean over clients", ("accuracy", "mean"), *how),
        _score("received", "received", ("received", "mean"), *how, note=RECEIVED),
    )


def scores(task: Task) -> dict[str, Measure]:
    """Return all scores besides means, of which those of other tasks have no value."""
    none = f"it is no score of {task.name}"
    return {name: of._replace(missing=none) for name, of in SCORES.items()} | SCORES_OF[task.name]


def of_newcomers(task: Task) -> list[Measure]:
    """Return the scores of newcomers before and after they join."""
    return [
        _score("newcomers", f"newcomers {word}", ("newcomers", moment, "mean"), None, task.percent)
        for word, moment in (("received", "received"), ("joined", "personal"))
    ]


def of_cohort(task: Task) -> dict[str, Measure]:
    """Return the scores of the clients of a round."""

    def score(name, title, moment, entry, whose, better=task.better):
        path, missing = ("cohort", moment, entry), SCORED.format(whose)
        return _score(name, title, path, better, task.percent, missing=missing, note=TEN)

    return by_name(
        score("trained", "trained", "trained", "mean", "models right after training"),
        score("teacher", "teacher", "teacher", "mean", "what teaches clients"),
        score("teacher-lead", "teacher's lead", "teacher", "lead", "what teaches clients", max),
    )


def class_names(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the words or numbers of the classes, as many as any of some results has."""
    classes = max(len(result["accuracy"].get("per_class", ())) for result in results)
    first, *others = (result.get("class_names", []) for result in results)
    named = len(first) == classes and all(other == first for other in others)
    return first if named else [*map(str, range(classes))]


def task_of_all(results: Sequence[Mapping[str, Any]]) -> Task:
    """Return the task of some results.

    Raises:
      JaxflError: if they have different ones, which no table compares.
    """
    first, *others = dict.fromkeys(task_of(result["accuracy"]) for result in results)
    if others:
        raise JaxflError(
            f"Some runs are of {first.name} and some of {others[0].name}, whose scores cannot be compared; "
            "report them apart."
        )
    return first


# ---- costs

EPSILON = Measure(
    "epsilon",
    "epsilon",
    [("privacy", "epsilon")],
    min,
    missing="no run has a value; --privacy with noise gives one",
    note="epsilon: whatever the delta of --privacy; with gaussian of what clients send, not of what they "
    "keep and deploy, with rows of both (docs/wire.md).",
)
ATTACK_SUCCESS = Measure(
    "attack-success",
    "attack success %",
    [("attack_success",)],
    percent=True,
    missing="no run has a value; --attack backdoor gives one",
    note="attack success: the mean over honest clients of the share of their test rows of other classes that "
    "their models take for the target once they have the trigger.",
)
COSTS = by_name(
    Measure("flops", "GFLOP", [("flops",)], unit=1e9),
    Measure("lost", "lost answers", [("lost_answers",)], absent=0),
    EPSILON,
    ATTACK_SUCCESS,
)
TRAFFIC = Measure("megabytes", "MB sent and received", [("bytes_up",), ("bytes_down",)], unit=1e6)
BOTH_WAYS = [
    Measure("megabytes", "MB up", [("bytes_up",)], unit=1e6),
    Measure("megabytes", "MB down", [("bytes_down",)], unit=1e6),
]
SIMULATED = Measure("simulated-seconds", "simulated s", [("simulated_seconds",)])
SPENT = {  # until a target is reached: title, unit, and entries of the target in a result
    "rounds": ("rounds", 1, ("round",)),
    "megabytes": ("MB", 1e6, ("bytes_up", "bytes_down")),
    "flops": ("GFLOP", 1e9, ("flops",)),
    "simulated-seconds": ("simulated s", 1, ("simulated_seconds",)),
}


def _until(name: str, target: str, words: str) -> Measure:
    """Return what is spent, one of `SPENT`, until a target is reached, which results name so, or `ONLY`."""
    title, unit, entries = SPENT[name]
    paths = [("targets", target, entry) for entry in entries]
    return Measure(f"{name}-to-target", f"{title} to {words}", paths, min, unit=unit, goal=words)


# ---- by name

SHOWN = (*SCORES, PER_CLASS, CONFUSION, *of_cohort(CLASSES), *COSTS)  # on request


def check_columns(show: Sequence[str]) -> None:
    """Refuse unknown columns."""
    for name in show:
        if name not in SHOWN:
            raise JaxflError(f"There is no column {name!r}; {nearest(name, SHOWN)}")


def columns(name: str, results: Sequence[Mapping[str, Any]]) -> list[Measure]:
    """Return the columns of a name in `SHOWN`."""
    if name == CONFUSION:
        return []  # it is a picture
    if name == PER_CLASS:
        classes = enumerate(class_names(results))
        return [
            _score(name, f"class {word}", ("accuracy", "per_class", c), None, True) for c, word in classes
        ]
    task = task_of_all(results)
    return [(scores(task) | of_cohort(task) | COSTS)[name]]


def usual_columns(
    results: Sequence[Mapping[str, Any]], show: Sequence[str], hide: Collection[str]
) -> list[Measure]:
    """Return what a table of runs shows: further columns of `SHOWN`, and the usual ones but those to hide.

    Returns:
      Accuracies in percent, or the scores of another task: of the deployed models, of those models per
      architecture if there are several, of the models as received before local training, and of newcomers'
      models as received and after joining; the megabytes (1e6 bytes) sent and received in the run; if
      clients' devices are known, the simulated seconds of the run; and for each target of the results what
      was spent until it was reached.

    Raises:
      JaxflError: if there is no such column, or runs have different tasks.
    """
    check_columns(show)
    task = task_of_all(results)
    timed = any(result["simulated_seconds"] for result in results)
    lossy = any(result.get("lost_answers") for result in results) and "lost" not in show
    growing = any(result.get("newcomers") for result in results)
    unasked = {"flops"} - {*show} | ({"simulated-seconds"} if not timed else set())
    targets = dict.fromkeys(target for result in results for target in result.get("targets", {}))
    architectures = dict.fromkeys(name for result in results for name in result["accuracy"]["per_group"])
    usual = {
        "architectures": [
            Measure("architectures", name, [("accuracy", "per_group", name)], percent=task.percent)
            for name in architectures
            if len(architectures) > 1
        ],
        "received": [means(task)["received"]],
        "wire": [
            measure
            for measure in (EPSILON, ATTACK_SUCCESS)
            if measure.name not in show and not all(math.isnan(measure.value(result)) for result in results)
        ],
        "lost": [COSTS["lost"]] if lossy else [],
        "newcomers": of_newcomers(task) if growing else [],
        "megabytes": BOTH_WAYS,
        "simulated-seconds": [SIMULATED] if timed else [],
        "targets": [
            _until(name, target, task.goal(float(target)))
            for target in targets
            for name in SPENT
            if name not in unasked
        ],
    }
    asked = [column for name in show for column in columns(name, results)]
    kept = itertools.chain(*(these for name, these in usual.items() if name not in hide))
    own = _score("accuracy", task.title, ("accuracy", "mean"), task.better, task.percent)
    return [own, *asked, *kept]


def known_measures(target: float | None = None, task: Task = CLASSES) -> dict[str, Measure]:
    """Return all that a study can show, by name, in the units of its task.

    Titles name the target, unless there are several or none.
    """
    words = "the target" if target is None else task.goal(target)
    spent = by_name(TRAFFIC, *(_until(name, ONLY, words) for name in SPENT))
    return means(task) | scores(task) | of_cohort(task) | COSTS | spent


def titles() -> dict[str, str]:
    """Return what can be shown on request, by name, in words."""
    known = {name: what.title for name, what in known_measures().items()}
    known |= {PER_CLASS: "the accuracy on each class", CONFUSION: "which classes are taken for which"}
    return {name: known[name] for name in SHOWN}


def measure(name: str, target: float | None = None, task: Task = CLASSES) -> Measure:
    """Return one of `known_measures`.

    Raises:
      JaxflError: if the name is unknown.
    """
    known = known_measures(target, task)
    if name not in known:
        raise JaxflError(f"A study cannot show {name!r}; {nearest(name, known)}")
    return known[name]
