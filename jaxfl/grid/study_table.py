"""Tables of studies: methods and settings along rows and columns."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from jaxfl.grid.study_file import (
    METHOD,
    SHOW,
    Study,
    options_along,
    planned,
    setting_name,
    settings,
    untuned,
    value_text,
)
from jaxfl.machine.texts import as_csv
from jaxfl.results.frame import Case, Frame, Setting, by_case
from jaxfl.results.measures import Measure, known_measures, measure, task_of_all
from jaxfl.results.notes import on_runs
from jaxfl.results.pivot import pivot
from jaxfl.results.table import Table
from jaxfl.results.tuned import best
from jaxfl.tasks import CLASSES, Task


def tabulate(study: Study, frame: Frame) -> Table:
    """Return a study's table: a column for each value of `columns`, a row for each combination of the others.

    If several things are shown, they are one more axis. If the study compares methods `against` one of
    them, columns of differences follow these. The best method of every setting stands out.
    """
    measures = measures_of(study, frame)
    several, one_data = len(measures) > 1, "dataset" not in options_along(study.axes)
    lines = [f"{study.title}: {'; '.join(what.title for what in measures)}."]
    lines += [f"{word}: {text}" for word, text in (("Claim", study.claim), ("Power", study.power)) if text]
    lines += on_runs(frame, cases(study), (study.seeds, study.partition_seeds), study.select, one_data)
    shown, (frame, tuned) = without_tuned(study), best(frame, study.tune)

    def place(method: str, setting: Mapping[str, str], what: Measure) -> tuple[str, str]:
        """Return the row, made of the values of all axes but that of the columns, and the column."""
        words = {axis: study.names.get(value, value) for axis, value in setting.items()}
        words |= {METHOD: study.names.get(method, method), SHOW: what.title}
        column = words.pop(study.columns)
        axes = ",".join(words[axis] for axis in setting if axis in words)
        parts = words.get(METHOD), axes, words.get(SHOW) if several else None
        return " ".join(filter(None, parts)) or study.title, column

    table = pivot(
        frame,
        measures,
        place,
        judged=measures,
        cases=cases(shown),
        against=study.against,
        rival=study.names.get(study.against, study.against),
        of_rows="setting" if study.columns == METHOD else METHOD,
    )
    return table._replace(notes=(*lines, *tuned, *table.notes))


def without_tuned(study: Study) -> Study:
    """Return a study of whose methods and axes nothing is left to tune."""
    axes = {axis: values for axis, values in study.axes.items() if axis not in study.tune}
    return study._replace(methods=tuple(untuned(study)), axes=axes, tune=())


def cases(study: Study) -> list[Case]:
    """Return every method in every setting, method by method."""
    return [*itertools.product(study.methods, map(in_words, settings(study)))]


def in_words(setting: Mapping[str, Any]) -> Setting:
    """Return a setting with its values in words."""
    return tuple((axis, setting_name({axis: value})) for axis, value in setting.items())


def measures_of(study: Study, frame: Frame) -> list[Measure]:
    """Return what the table of some runs shows; titles name the target, unless an axis changes it."""
    _, setup = planned(study, settings(study)[0])
    target = None if "target" in options_along(study.axes) else next(iter(setup.run.target), None)
    measures = [measure(name, target, _task(frame)) for name in study.show]
    return [what._replace(title=study.names.get(what.name, what.title)) for what in measures]


def _task(frame: Frame) -> Task:
    """Return the task of the runs, that of classes without any."""
    return task_of_all([run.result for run in frame]) if frame else CLASSES


def as_runs(study: Study, frame: Frame) -> str:
    """Return CSV text with a row for each run: its method, setting and seeds, and all that a study can show.

    Accuracies are in percent, and empty where a run has no such value.
    """
    found, measures = by_case(frame), known_measures(task=_task(frame))
    rows: list[list] = [[METHOD, *study.axes, "seed", "partition_seed", *measures]]
    for method, setting in itertools.product(study.methods, settings(study)):
        for draw, run in sorted(found.get((method, in_words(setting)), {}).items()):
            values = [what.value(run.result) for what in measures.values()]
            numbers = ["" if math.isnan(number) else f"{number:.6g}" for number in values]
            rows.append([method, *map(value_text, setting.values()), *draw, *numbers])
    return as_csv(rows)
