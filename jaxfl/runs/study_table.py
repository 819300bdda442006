"""Tables of studies: methods and settings along rows and columns."""

import csv
import io
import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxfl.runs.measures import Measure, known_measures, measure
from jaxfl.runs.paired import UNPAIRED, Draw, notes_on, paired
from jaxfl.runs.result import OTHER_DATA, SELECTED
from jaxfl.runs.study_file import (
    METHOD,
    SHOW,
    Study,
    options_along,
    planned,
    setting_name,
    settings,
    to_target,
    value_text,
)
from jaxfl.runs.table import Cell, Table, cell, notes_on_absent, notes_on_empty

MOST_NAMED = 6  # cells in a note that lists some
NOTHING = Cell(math.nan, None)


class Cells(NamedTuple):
    """The results of a study so far.

    Args:
      study: the study.
      results: results by setting (a text of its values) and choice of a method, then by seed and partition
        seed; with the entries targets, see `jaxfl.runs.target`, absent, see `jaxfl.runs.table.absent`, and
        data and rows, see `jaxfl.runs.store.checksums`.
    """

    study: Study
    results: dict[tuple[str, str], dict[Draw, dict]]


def tabulate(cells: Cells) -> Table:
    """Return a study's table: a column for each value of `columns`, a row for each combination of the others.

    If several things are shown, they are one more axis. If the study compares methods `against` one of
    them, columns of differences follow these. The best method of every setting stands out.
    """
    study, measures = cells.study, measures_of(cells.study)
    place = partial(_place, study, {name: what.title for name, what in measures.items()})
    rows, differences, unlike, best = {}, {}, {}, set()
    for setting, (name, (_, value, of_clients, better)) in itertools.product(
        settings(study), measures.items()
    ):
        of_setting = {}
        for choice in study.methods:
            if not (of_seeds := cells.results.get((setting_name(setting), choice))):
                continue
            row, column = place(setting | {METHOD: choice, SHOW: name})
            of_setting[row, column] = cell([value(result) for result in of_seeds.values()])
            rivals = cells.results.get((setting_name(setting), study.against))
            if rivals and choice != study.against:
                cell_of = f"{choice} {setting_name(setting)}".rstrip()
                label = f"{cell_of} {name * (len(measures) > 1)}".rstrip()
                alike = {
                    draw: result
                    for draw, result in rivals.items()
                    if _on_same_rows(result, of_seeds.get(draw))
                }
                if (rivals.keys() - alike.keys()) & of_seeds.keys():
                    unlike[cell_of] = None
                differences[label] = paired(of_seeds, alike, value, of_clients)
                rows.setdefault(row, {})[_minus(column, study)] = differences[label]
        for (row, column), entry in of_setting.items():
            rows.setdefault(row, {})[column] = entry
        known = [entry.mean for entry in of_setting.values() if not math.isnan(entry.mean)]
        if better and len(known) > 1:
            best |= {where for where, entry in of_setting.items() if entry.mean == better(known)}
    values = {METHOD: study.methods, SHOW: study.show, **study.axes}[study.columns]
    columns = [place({study.columns: value})[1] for value in values]
    nothing = dict.fromkeys(columns, NOTHING) | {_minus(column, study): UNPAIRED for column in columns}
    nothing = {
        name: empty for name, empty in nothing.items() if any(name in of_row for of_row in rows.values())
    }
    order = dict.fromkeys(
        place(setting | {METHOD: choice, SHOW: name})[0]
        for choice, setting, name in itertools.product(study.methods, settings(study), study.show)
    )
    body = [(row, [*(nothing | rows[row]).values()]) for row in order if row in rows]
    standing_out = [
        (i, j) for i, (row, _) in enumerate(body) for j, column in enumerate(nothing) if (row, column) in best
    ]
    rival = study.names.get(study.against, study.against)
    notes = (*_notes(cells), *notes_on(rival, differences))
    if unlike:
        notes += (f"Minus {rival}: runs on other rows are not paired: {_listed([*unlike])}.",)
    return Table([*nothing], body, notes, standing_out, "setting" if study.columns == METHOD else METHOD)


def _on_same_rows(result: dict, other: dict | None) -> bool:
    return other is not None and all(result[name] == other[name] for name in ("data", "rows"))


def _minus(column: str, study: Study) -> str:
    return f"{column} minus {study.names.get(study.against, study.against)}"


def _notes(cells: Cells) -> list[str]:
    """Return what a table shows and over how many runs, what it lacks, and what concerns its clients."""
    study, measures = cells.study, measures_of(cells.study)
    expected = study.seeds * study.partition_seeds
    incomplete, missed, found = (
        [],
        [],
        [of_run for of_seeds in cells.results.values() for of_run in of_seeds.values()],
    )
    for choice, setting in itertools.product(study.methods, settings(study)):
        of_seeds = cells.results.get((setting_name(setting), choice), {})
        label = f"{choice} {setting_name(setting)}".rstrip()
        if len(of_seeds) < expected:
            incomplete.append(f"{label} has {len(of_seeds)} of {expected}")
        for name, (_, value, *_) in measures.items() if of_seeds else ():
            reached = int(np.isfinite([value(result) for result in of_seeds.values()]).sum())
            if to_target(name) and 0 < reached < len(of_seeds):
                missed.append(f"{label} in {reached} of {len(of_seeds)} runs")
    over = f"{expected} runs"
    if study.partition_seeds > 1:
        over = f"{study.partition_seeds} partitions with {study.seeds} seed{'s' * (study.seeds > 1)} each"
    spread = f", mean and sample standard deviation over {over}" if expected > 1 else ""
    shown = "; ".join(what.title for what in measures.values())
    notes = [f"{study.title}: {shown}{spread}."] + ([f"Claim: {study.claim}"] if study.claim else [])
    notes += [SELECTED] if study.select == "validation" else []
    missing = expected * len(settings(study)) * len(study.methods) - len(found)
    notes += [f"{missing} of its runs are missing: {_listed(incomplete)}."] if missing else []
    notes += [f"The target is reached by {_listed([*dict.fromkeys(missed)])}."] if missed else []
    notes += notes_on_absent([result["absent"] for result in found])
    if "dataset" not in options_along(study.axes) and len({result["data"] for result in found}) > 1:
        notes.append(OTHER_DATA)
    validated = [what for name, what in measures.items() if name == "validation"]
    return notes + notes_on_empty(validated, found)


def as_runs(cells: Cells) -> str:
    """Return CSV text with a row for each run: its method, setting and seeds, and all that a study can show.

    Accuracies are in percent, and empty where a run has no such value.
    """
    study, out = cells.study, io.StringIO()
    measures = {name: what.value for name, what in known_measures().items()}
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([METHOD, *study.axes, "seed", "partition_seed", *measures])
    for choice, setting in itertools.product(study.methods, settings(study)):
        where = [choice, *(value_text(value) for value in setting.values())]
        for draw, result in sorted(cells.results.get((setting_name(setting), choice), {}).items()):
            values = [value(result) for value in measures.values()]
            writer.writerow(
                [*where, *draw, *("" if math.isnan(number) else f"{number:.6g}" for number in values)]
            )
    return out.getvalue()


def measures_of(study: Study) -> dict[str, Measure]:
    """Return what the table shows, by name; titles name the target, unless an axis changes it."""
    _, setup = planned(study, settings(study)[0])
    target = None if "target" in options_along(study.axes) else next(iter(setup.run.target), None)
    measures = {name: measure(name, target) for name in study.show}
    return {name: what._replace(title=study.names.get(name, what.title)) for name, what in measures.items()}


def _place(study: Study, titles: Mapping[str, str], where: Mapping[str, Any]) -> tuple[str, str]:
    """Return the row and the column of what is shown of a method in a setting, by the values of all axes.

    Args:
      study: the study.
      titles: of what it shows, by name.
      where: the method, the values of axes and the name of what is shown.
    """

    def words(name):
        if name == SHOW:
            return titles[where[name]]
        text = where[name] if name == METHOD else setting_name({name: where[name]})
        return study.names.get(text, text)

    axes = [name for name in study.axes if name in where and name != study.columns]
    method = words(METHOD) if METHOD in where and study.columns != METHOD else ""
    what = words(SHOW) if SHOW in where and len(study.show) > 1 and study.columns != SHOW else ""
    row = " ".join(filter(None, (method, ",".join(map(words, axes)), what))) or study.title
    return row, words(study.columns)


def _listed(sentences: list[str]) -> str:
    """Join the first few of some sentences, and say how many more there are."""
    more = len(sentences) - MOST_NAMED
    return "; ".join(sentences[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
