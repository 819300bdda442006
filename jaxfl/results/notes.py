"""The notes under a table: what runs it is of, what they lack, and what is not comparable."""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from jaxfl.folder.records import Result
from jaxfl.machine.texts import few, span
from jaxfl.results.frame import Case, Frame, by_case, words
from jaxfl.results.measures import Measure
from jaxfl.results.paired import CONFIDENCE, Difference

MOST_LISTED = 6  # cases in a note
MOST_NAMED = 10  # clients in a note
SELECTED = "Scores are those at the evaluation with the best score on validation rows."
OTHER_DATA = "These runs have different data: their accuracies are not comparable."
OTHER_ROWS = "These runs have different partitions: their accuracies are comparable on average only."


def on_runs(
    frame: Frame,
    cases: Collection[Case] = (),
    repetitions: tuple[int, int] | None = None,
    select: str = "last",
    one_data: bool = True,
) -> list[str]:
    """Return notes on what runs there are.

    Args:
      frame: the runs.
      cases: methods in settings that should have some; by default those that have.
      repetitions: how many seeds and partitions each should have; by default the most that any has.
      select: the evaluation that accuracies are of, see `jaxfl.results.result.selected`.
      one_data: whether all runs should have the same data, and not only those of a setting.
    """
    found = by_case(frame)
    draws = {case: [*found.get(case, {})] for case in cases or found}
    seeds, partitions = repetitions or (
        max(len(set(numbers)) for numbers in each)
        for each in zip(*(zip(*own, strict=True) for own in draws.values()), strict=True)
    )
    expected = seeds * partitions
    lacking = {case: expected - len(own) for case, own in draws.items() if len(own) < expected}
    notes = []
    if expected > 1:
        over = f"{seeds} seeds"
        if partitions > 1:
            over = f"{partitions} partitions with {seeds} seed{'s' * (seeds > 1)} each"
        most = "up to " * bool(lacking)
        notes.append(f"Mean and sample standard deviation over {most}{over}.")
    if lacking:
        has = [f"{words(case)} has {len(draws[case])} of {expected}" for case in lacking]
        notes.append(f"{sum(lacking.values())} of the runs are missing: {listed(has)}.")
    if select != "last":
        joined = any("newcomers" in run.result for run in frame)
        notes += [SELECTED, *(["Newcomers' accuracies are those at the end."] if joined else [])]
    data, rows = defaultdict(set), defaultdict(set)
    for run in frame:
        of_data, of_rows = run.sums
        data[() if one_data else run.setting].add(of_data)
        rows[run.setting, run.draw[1] if partitions > 1 else 0].add(of_rows)
    for sums, note in (data, OTHER_DATA), (rows, OTHER_ROWS):
        if any(len(of_these) > 1 for of_these in sums.values()):
            return [*notes, note]
    return notes


def on_measures(frame: Frame, measures: Sequence[Measure]) -> list[str]:
    """Return notes on what is shown of some runs, and what of it cannot be seen in a table."""
    results = {words(case): [run.result for run in runs.values()] for case, runs in by_case(frame).items()}
    partly = {}
    for measure, (label, own) in itertools.product(measures, results.items()):
        known = sum(not math.isnan(measure.value(result)) for result in own)
        if 0 < known < len(own):
            goal = f"{measure.goal[:1].upper()}{measure.goal[1:]} is reached by"
            of_runs = partly.setdefault(goal if measure.goal else f"{measure.title} is known of", {})
            of_runs[f"{label} in {known} of {len(own)} runs"] = None
    notes = list(dict.fromkeys(measure.note for measure in measures if measure.note))
    notes += [f"{says} {listed([*of_runs])}." for says, of_runs in partly.items()]
    if any(measure.name == "newcomers" for measure in measures):
        notes += [
            f"{label} sends newcomers nothing: before joining they have their initial weights."
            for label, own in results.items()
            if any(map(_sends_nothing, own))
        ]
    notes += on_untrained([run.untrained for run in frame]) + on_code(results)
    return notes + [
        f"{measure.title}: {measure.missing}."
        for measure in measures
        if measure.missing and all(math.isnan(measure.value(run.result)) for run in frame)
    ]


def _sends_nothing(result: Result) -> bool:
    joined = result.get("newcomers")
    return joined is not None and joined["bytes_down"] == joined["bytes_up"] == 0


def on_untrained(untrained: Sequence[tuple[list[int], int]]) -> list[str]:
    """Return a note if clients that are scored have trained in no round, see `jaxfl.results.frame.Entry`."""
    every = sorted({client for missing, _ in untrained for client in missing})
    if not every:
        return []
    number, clients = (
        span(numbers)
        for numbers in zip(*((len(missing), known) for missing, known in untrained), strict=True)
    )
    named = few(map(str, every), MOST_NAMED)
    if len(every) > max(len(missing) for missing, _ in untrained):
        named = f"in one run or another {named}"
    return [
        f"{number} of {clients} clients have trained in no round of their run (by id {named}): no round drew "
        "them, their answers were lost, or they had no batch to train on, such as a single row under "
        "BatchNorm. Unless their method trains others than a round's clients, what they keep is as it began, "
        "and their accuracies count."
    ]


def on_code(results: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return notes on runs that ended with different code: jaxfl, or the user's own files of a label."""
    codes = {label: [result["code"][-1] for result in own] for label, own in results.items()}
    packages = {code["package"] for ends in codes.values() for code in ends}
    notes = ["These runs were computed by different versions of jaxfl."] if len(packages) > 1 else []
    for label, ends in codes.items():
        own = [sorted((Path(path).name, then or "") for path, then in code["files"].items()) for code in ends]
        if any(files != own[0] for files in own):
            notes.append(f"The runs of {label} were computed by different versions of your code.")
    return notes


def on_differences(against: str, differences: Mapping[str, Difference]) -> list[str]:
    """Return notes on the differences by label: what their pairs are, in a note for each kind."""
    counts, labels = {}, {}
    for label, difference in differences.items():
        if difference.pairs and not math.isnan(difference.mean):
            counts.setdefault(difference.of, set()).add(difference.pairs)
            labels.setdefault(difference.of, []).append(label)
    forms = {
        "seeds": "over {} seeds.",
        "partitions": "over {} partitions, each with the mean over its seeds.",
        "clients": "over {} clients of one seed; it does not cover other seeds.",
    }
    notes = []
    for of, numbers in counts.items():
        if (number := span(numbers)) == "1":
            notes.append(f"Minus {against}: the difference of one pair has no interval.")
            continue
        whose = f" ({'; '.join(labels[of])})" if len(counts) > 1 else ""
        notes.append(
            f"Minus {against}{whose}: the mean of paired differences and its {100 * CONFIDENCE:g} % "
            f"interval, Student's t {forms[of].format(number)}"
        )
    return notes


def listed(sentences: Sequence[str]) -> str:
    """Join the first few of some sentences, and say how many more there are."""
    more = len(sentences) - MOST_LISTED
    return "; ".join(sentences[:MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")
