"""What runs are compared by: scores of clients' models and costs, by the names of `--show` and of studies.

A new one is one entry in a table below: records, tables, studies, pictures and logs ask these.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxfl.errors import JaxflError, nearest
from jaxfl.results import definitions
from jaxfl.results.definitions import Rows
from jaxfl.tasks import CLASSES, LABELS, NEXT_TOKEN, REGRESSION, Task, labels, task_of
from jaxfl.tasks.classes import macro_f1
from jaxfl.tasks.next_token import token_accuracy
from jaxfl.tasks.regression import mae, r2

PER_CLASS = "per-class"  # not one measure but one for each class
ONLY = "*"  # in a path the only entry there
CONFUSION = "confusion"  # of all clients' rows: a matrix, which has no column


class Measure(NamedTuple):
    """A value by which results are compared.

    Args:
      name: its name in `--show` and in studies.
      title: its name in words, with its unit.
      paths: where results have it, entry by entry; of several the sum.
      better: returns the best of some values; None if none is best.
      unit: what it is divided by; None for a share, which is shown in percent.
      absent: its value where a result has none.
      missing: why a run may have no value, and what to do, for a note.
      note: what it is, for a note, if the title does not say that.
      goal: the target until which it counts, in words; runs that miss it have no value.
      overall: returns a score of all clients except newcomers, NaN without a value; every record has it.
      counts: returns (n,), the score of each client, NaN without a value; where `--show` asks for it.
      rows: returns the score of one client, NaN without a value; where `--show` asks for it.
      validates: whether `rows` are validation rows, not test rows.
    """

    name: str
    title: str
    paths: Sequence[tuple]
    better: Callable[..., float] | None = None
    unit: float | None = None
    absent: float = math.nan
    missing: str = ""
    note: str = ""
    goal: str = ""
    overall: Callable[[Any], float] | None = None
    counts: Callable[[Any], np.ndarray] | None = None
    rows: Callable[[Rows], float] | None = None
    validates: bool = False

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
        return 100 * value if self.unit is None else value / self.unit


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


# ---- scores: those of counts are in every record, or as those of rows where `--show` asks for them


def _score(name: str, title: str, better: Callable = max, missing: str = "", **how: Any) -> Measure:
    """Return a score of the deployed models; `how` it is computed is `overall`, `counts` or `rows`."""
    if not title.endswith("%"):
        how = {"unit": 1} | how
    if "overall" in how:
        return Measure(name, title, [("accuracy", name.replace("-", "_"))], better, missing=missing, **how)
    missing = f"no run has a value; runs that begin with --show {name} do, where clients have rows for it"
    return Measure(name, title, [("accuracy", "scores", name, "mean")], better, missing=missing, **how)


def _of_clients(task: Task, worst: str) -> list[Measure]:
    """Return scores that follow from the task's own score of each client; `worst` names the worst one."""
    unit, better = " %" if task.percent else "", task.better
    worst_client = min if better is max else max
    without = "no run has validation rows; clients hold some out with --validation-fraction"
    return [
        _score("std", f"std over clients{unit}", min, overall=lambda counts: task.each(counts).std()),
        _score(
            worst, f"{worst} client{unit}", better, overall=lambda counts: worst_client(task.each(counts))
        ),
        _score("worst-tenth", f"worst tenth{unit}", better, overall=partial(definitions.worst_tenth, task)),
        _score("pooled", f"pooled{unit}", better, overall=task.pooled),
        _score(
            "validation", f"validation{unit}", better, without, overall=partial(definitions.validation, task)
        ),
    ]


SCORES_OF = {  # by task
    "classes": by_name(
        *_of_clients(CLASSES, "lowest"),
        _score("macro-f1", "macro F1 %", overall=lambda counts: macro_f1(*counts[:3]).mean()),
        _score("balanced", "balanced accuracy %", counts=definitions.balanced),
        _score("auc", "AUC %", rows=definitions.auc),
        _score("precision", "macro precision %", rows=definitions.precision),
        _score("recall", "macro recall %", rows=definitions.recall),
        _score("loss", "test loss", min, rows=definitions.log_loss),
        _score("ece", "calibration error %", min, rows=definitions.calibration_error),
        _score("validation-loss", "validation loss", min, rows=definitions.log_loss, validates=True),
    ),
    "regression": by_name(
        *_of_clients(REGRESSION, "worst"),
        _score("mae", "MAE", min, overall=lambda counts: mae(counts).mean()),
        _score("r2", "R2", overall=lambda counts: _mean(r2(counts))),
    ),
    "labels": by_name(
        *_of_clients(LABELS, "lowest"),
        _score("macro-f1", "macro F1 %", overall=lambda counts: _mean(labels.macro_f1(counts))),
    ),
    "next-token": by_name(
        *_of_clients(NEXT_TOKEN, "worst"),
        _score("token-accuracy", "token accuracy %", overall=lambda counts: token_accuracy(counts).mean()),
    ),
}


def _mean(values: np.ndarray) -> float:
    """Return the mean of the clients that have a value, NaN if none has."""
    known = values[~np.isnan(values)]
    return known.mean() if len(known) else math.nan


# Their names; those of several tasks are of classes here.
SCORES = functools.reduce(operator.or_, reversed(SCORES_OF.values()))


def needs_rows(show: Collection[str]) -> bool:
    """Return whether something that is to be shown needs every row's answer."""
    return CONFUSION in show or any(score.rows for name, score in SCORES.items() if name in show)


# ---- further accuracies

RECEIVED = "received: the models that clients start a round from, scored before they train."
MEANS = by_name(  # over clients
    Measure("accuracy", "accuracy, mean over clients %", [("accuracy", "mean")], max),
    Measure("received", "received %", [("received", "mean")], max, note=RECEIVED),
)
NEWCOMERS = [
    Measure("newcomers", "newcomers received %", [("newcomers", "received", "mean")]),
    Measure("newcomers", "newcomers joined %", [("newcomers", "personal", "mean")]),
]
TEN = "Right after training and of teachers: means over the clients of each of the last ten rounds."
SCORED = "no run has scores of {}; --score-cohort takes them where a method tells"


def _cohort(name: str, title: str, moment: str, entry: str, whose: str) -> Measure:
    return Measure(name, title, [("cohort", moment, entry)], max, missing=SCORED.format(whose), note=TEN)


COHORT = by_name(  # of the clients of a round
    _cohort("trained", "trained %", "trained", "mean", "models right after training"),
    _cohort("teacher", "teacher %", "teacher", "mean", "what teaches clients"),
    _cohort("teacher-lead", "teacher's lead %", "teacher", "lead", "what teaches clients"),
)


def class_names(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the words or numbers of the classes, as many as any of some results has."""
    classes = max(len(result["accuracy"].get("per_class", ())) for result in results)
    first, *others = (result.get("class_names", []) for result in results)
    named = len(first) == classes and all(other == first for other in others)
    return first if named else [*map(str, range(classes))]


def in_units_of(task: Task, what: Measure) -> Measure:
    """Return an accuracy as the score of another task: its title, its unit, and which way is better."""
    title = what.title.replace("accuracy", task.title)
    if task.percent:
        return what._replace(title=title)
    title = title.removesuffix(" %")
    return what._replace(title=title, unit=1, better=what.better and task.better)


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
    unit=1,
    missing="no run has a value; --privacy with noise gives one",
    note="epsilon: of what clients send, whatever the delta of --privacy; what a client keeps and deploys is "
    "not covered (docs/wire.md).",
)
ATTACK_SUCCESS = Measure(
    "attack-success",
    "attack success %",
    [("attack_success",)],
    missing="no run has a value; --attack backdoor gives one",
    note="attack success: the share of honest clients' test rows of other classes that their models take for "
    "the target once they have the trigger.",
)
COSTS = by_name(
    Measure("flops", "GFLOP", [("flops",)], unit=1e9),
    Measure("lost", "lost answers", [("lost_answers",)], unit=1, absent=0),
    EPSILON,
    ATTACK_SUCCESS,
)
TRAFFIC = Measure("megabytes", "MB sent and received", [("bytes_up",), ("bytes_down",)], unit=1e6)
BOTH_WAYS = [
    Measure("megabytes", "MB up", [("bytes_up",)], unit=1e6),
    Measure("megabytes", "MB down", [("bytes_down",)], unit=1e6),
]
SIMULATED = Measure("simulated-seconds", "simulated s", [("simulated_seconds",)], unit=1)
SPENT = {  # until a target is reached: title, unit, and entries of the target in a result
    "rounds": ("rounds", 1, ("round",)),
    "megabytes": ("MB", 1e6, ("bytes_up", "bytes_down")),
    "flops": ("GFLOP", 1e9, ("flops",)),
    "simulated-seconds": ("simulated s", 1, ("simulated_seconds",)),
}


def _until(name: str, target: str, words: str) -> Measure:
    """Return what is spent until a target is reached.

    Args:
      name: one of `SPENT`.
      target: the target as a result names it, such as "0.6", or `ONLY`.
      words: the target in the title.
    """
    title, unit, entries = SPENT[name]
    paths = [("targets", target, entry) for entry in entries]
    return Measure(f"{name}-to-target", f"{title} to {words}", paths, min, unit, goal=words)


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


def columns(name: str, results: Sequence[Mapping[str, Any]]) -> list[Measure]:
    """Return the columns of a name in `SHOWN`."""
    if name == CONFUSION:
        return []  # it is a picture
    if name == PER_CLASS:
        classes = enumerate(class_names(results))
        return [Measure(name, f"class {word} %", [("accuracy", "per_class", c)]) for c, word in classes]
    task = task_of_all(results)
    if name in SCORES and name not in SCORES_OF[task.name]:
        return [SCORES[name]._replace(missing=f"it is no score of {task.name}")]
    cohort = {name: in_units_of(task, what) for name, what in COHORT.items()}
    return [(SCORES_OF[task.name] | cohort | COSTS)[name]]


def usual_columns(
    results: Sequence[Mapping[str, Any]], show: Sequence[str], hide: Collection[str]
) -> list[Measure]:
    """Return what a table of runs shows.

    Args:
      results: of all runs.
      show: further columns, of `SHOWN`.
      hide: usual columns to leave out, of `jaxfl.config.command_options.Columns`.

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
    in_units = partial(in_units_of, task := task_of_all(results))
    timed = any(result["simulated_seconds"] for result in results)
    lossy = any(result.get("lost_answers") for result in results) and "lost" not in show
    growing = any(result.get("newcomers") for result in results)
    unasked = {"flops"} - {*show} | ({"simulated-seconds"} if not timed else set())
    targets = dict.fromkeys(target for result in results for target in result.get("targets", {}))
    architectures = dict.fromkeys(name for result in results for name in result["accuracy"]["per_group"])
    usual = {
        "architectures": [
            in_units(Measure("architectures", name, [("accuracy", "per_group", name)]))
            for name in architectures
            if len(architectures) > 1
        ],
        "received": [in_units(MEANS["received"])],
        "wire": [
            measure
            for measure in (EPSILON, ATTACK_SUCCESS)
            if measure.name not in show and not all(math.isnan(measure.value(result)) for result in results)
        ],
        "lost": [COSTS["lost"]] if lossy else [],
        "newcomers": [*map(in_units, NEWCOMERS)] if growing else [],
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
    return [in_units(MEANS["accuracy"]._replace(title="accuracy %")), *asked, *kept]


def known_measures(target: float | None = None, task: Task = CLASSES) -> dict[str, Measure]:
    """Return all that a study can show, by name.

    Args:
      target: the only target of its runs, for titles; None if there are several or none.
      task: of its runs, whose units measures have.
    """
    words = "the target" if target is None else task.goal(target)
    means, cohort = ({name: in_units_of(task, of[name]) for name in of} for of in (MEANS, COHORT))
    spent = by_name(TRAFFIC, *(_until(name, ONLY, words) for name in SPENT))
    return means | SCORES | SCORES_OF[task.name] | cohort | COSTS | spent


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
