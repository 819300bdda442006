"""Tables of studies: methods and settings along rows and columns."""

import csv
import io
import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxfl.grid.study_file import (
    METHOD,
    SHOW,
    Study,
    options_along,
    planned,
    setting_name,
    settings,
    to_target,
    untuned,
    value_text,
)
from jaxfl.results.measures import Measure, known_measures, measure
from jaxfl.results.paired import UNPAIRED, Difference, Draw, notes_on, paired
from jaxfl.results.result import OTHER_DATA, notes_on_selected
from jaxfl.results.table import (
    Cell,
    Table,
    alike,
    cell,
    notes_on_code,
    notes_on_empty,
    notes_on_untrained,
)
from jaxfl.results.tuned import apart, best_of, notes_on_tuned

MOST_NAMED = 6  # cells in a note that lists some
NOTHING = Cell(math.nan, None)


class Cells(NamedTuple):
    """The results of a study so far.

    Args:
      study: the study.
      results: results by setting (a text of its values) and choice of a method, then by seed and partition
        seed; with the entries targets, see `jaxfl.results.target`, untrained, see `jaxfl.results.table`, and
        data and rows, see `jaxfl.folder.store.checksums`.
    """

    study: Study
    results: dict[tuple[str, str], dict[Draw, dict]]


def tabulate(cells: Cells) -> Table:
    """Return a study's table: a column for each value of `columns`, a row for each combination of the others.

    If several things are shown, they are one more axis. If the study compares methods `against` one of
    them, columns of differences follow these. The best method of every setting stands out.
    """
    everything, (cells, chosen) = cells, tuned(cells)
    study, measures = cells.study, measures_of(cells.study)
    place = partial(_place, study, {name: what.title for name, what in measures.items()})
    rows, differences, unlike, best, of_measures = {}, {}, {}, set(), {}
    for setting, (name, what) in itertools.product(settings(study), measures.items()):
        entries = {}
        for choice in study.methods:
            if not (of_seeds := cells.results.get((setting_name(setting), choice))):
                continue
            row, column = where = place(setting | {METHOD: choice, SHOW: name})
            entries[where] = cell([what.value(result) for result in of_seeds.values()])
            rows.setdefault(row, {})[column] = entries[where]
            if found := _minus_rival(cells, setting, choice, what):
                difference, all_alike = found
                cell_of = f"{choice} {setting_name(setting)}".rstrip()
                differences[f"{cell_of} {name * (len(measures) > 1)}".rstrip()] = difference
                rows[row][_minus(column, study)] = difference
                unlike |= {} if all_alike else {cell_of: None}
        best |= _best(entries, what)
        of_measures.setdefault(name, {}).update(entries)
    for entries in of_measures.values():
        for (row, column), shown in zip(entries, alike([*entries.values()]), strict=True):
            rows[row][column] = shown
    columns = _columns(study, place, rows)
    body = [
        (row, [rows[row].get(column, empty) for column, empty in columns.items()])
        for row in _order(study, place)
        if row in rows
    ]
    standing_out = [
        (i, j) for i, (row, _) in enumerate(body) for j, column in enumerate(columns) if (row, column) in best
    ]
    rival = study.names.get(study.against, study.against)
    notes = (*_notes(everything), *chosen, *notes_on(rival, differences))
    if study.against and (alone := _without_rival(cells)):
        there = f" in {_listed(alone)}" if all(alone) else ""
        notes += (f"Nothing is compared with {rival}{there}: no run of it has finished.",)
    if unlike:
        notes += (f"Minus {rival}: runs on other rows are not paired: {_listed([*unlike])}.",)
    return Table([*columns], body, notes, standing_out, "setting" if study.columns == METHOD else METHOD)


def tuned(cells: Cells) -> tuple[Cells, list[str]]:
    """Return a study whose methods have only the options best on validation rows, and a note on these."""
    study, grid = cells.study, {}
    if not study.tune:
        return cells, []
    for setting, choice in itertools.product(settings(study), study.methods):
        others, own = (
            {axis: value for axis, value in setting.items() if (axis in study.tune) is along}
            for along in (False, True)
        )
        method, options = apart(choice, study.tune)
        if (place := (setting_name(setting), choice)) in cells.results:
            grid[place] = (setting_name(others), method), ",".join(filter(None, (options, setting_name(own))))
    stay = best_of(grid, cells.results)
    kept = {axis: values for axis, values in study.axes.items() if axis not in study.tune}
    shown = Cells(
        study._replace(methods=tuple(untuned(study)), axes=kept, tune=()),
        {method: cells.results[place] for place, method in stay.items()},
    )
    return shown, notes_on_tuned(
        {f"{method} {setting}".rstrip(): grid[place][1] for place, (setting, method) in stay.items()}
    )


def _minus_rival(
    cells: Cells, setting: Mapping[str, Any], choice: str, what: Measure
) -> tuple[Difference, bool] | None:
    """Return a method's difference from its rival in a setting, and whether all draws had the same rows.

    Those on other rows are not paired. None if there is no such rival, or it is the method itself.
    """
    rivals = cells.results.get((setting_name(setting), cells.study.against))
    if not rivals or choice == cells.study.against:
        return None
    of_seeds = cells.results[setting_name(setting), choice]
    alike = {draw: result for draw, result in rivals.items() if _on_same_rows(result, of_seeds.get(draw))}
    all_alike = rivals.keys() & of_seeds.keys() <= alike.keys()
    return paired(of_seeds, alike, what.value, what.of_clients), all_alike


def _without_rival(cells: Cells) -> list[str]:
    """Return the settings in which a method has finished, and the rival has not."""
    found = {}
    for setting, choice in cells.results:
        found.setdefault(setting, set()).add(choice)
    return [setting for setting, choices in found.items() if cells.study.against not in choices]


def _best(entries: Mapping[tuple[str, str], Cell], what: Measure) -> set[tuple[str, str]]:
    """Return where the best of several methods stand."""
    known = [entry.mean for entry in entries.values() if not math.isnan(entry.mean)]
    if what.better is None or len(known) < 2:
        return set()
    return {where for where, entry in entries.items() if entry.mean == what.better(known)}


def _columns(study: Study, place: Callable, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns in which anything stands, values before differences, with what fills their gaps."""
    values = {METHOD: study.methods, SHOW: study.show, **study.axes}[study.columns]
    names = [place({study.columns: value})[1] for value in values]
    fill = dict.fromkeys(names, NOTHING) | {_minus(name, study): UNPAIRED for name in names}
    return {name: empty for name, empty in fill.items() if any(name in of_row for of_row in rows.values())}


def _order(study: Study, place: Callable) -> list[str]:
    """Return the rows of a table, method by method."""
    everything = itertools.product(study.methods, settings(study), study.show)
    rows = (place(setting | {METHOD: choice, SHOW: name})[0] for choice, setting, name in everything)
    return list(dict.fromkeys(rows))


def _on_same_rows(result: dict, other: dict | None) -> bool:
    return other is not None and all(result[name] == other[name] for name in ("data", "rows"))


def _minus(column: str, study: Study) -> str:
    return f"{column} minus {study.names.get(study.against, study.against)}"


def _notes(cells: Cells) -> list[str]:
    """Return what a table shows and over how many runs, what it lacks, and what concerns its clients."""
    study, measures = cells.study, measures_of(cells.study)
    expected = study.seeds * study.partition_seeds
    found = [of_run for of_seeds in cells.results.values() for of_run in of_seeds.values()]
    incomplete, missed, of_labels = [], [], {}
    for choice, setting in itertools.product(study.methods, settings(study)):
        of_seeds = cells.results.get((setting_name(setting), choice), {})
        label = f"{choice} {setting_name(setting)}".rstrip()
        of_labels |= {label: [*of_seeds.values()]} if of_seeds else {}
        if len(of_seeds) < expected:
            incomplete.append(f"{label} has {len(of_seeds)} of {expected}")
        for name, (_, value, *_) in measures.items() if of_seeds else ():
            reached = int(np.isfinite([value(result) for result in of_seeds.values()]).sum())
            if to_target(name) and 0 < reached < len(of_seeds):
                missed.append(f"{label} in {reached} of {len(of_seeds)} runs")
    over = f"{expected} runs"
    if study.partition_seeds > 1:
        over = f"{study.partition_seeds} partitions with {study.seeds} seed{'s' * (study.seeds > 1)} each"
    over = f"up to {over}" if incomplete else over
    spread = f", mean and sample standard deviation over {over}" if expected > 1 else ""
    shown = "; ".join(what.title for what in measures.values())
    notes = [f"{study.title}: {shown}{spread}."] + [
        f"{word}: {text}" for word, text in (("Claim", study.claim), ("Power", study.power)) if text
    ]
    notes += notes_on_selected(study.select, found)
    missing = expected * len(settings(study)) * len(study.methods) - len(found)
    notes += [f"{missing} of its runs are missing: {_listed(incomplete)}."] if missing else []
    notes += [f"The target is reached by {_listed([*dict.fromkeys(missed)])}."] if missed else []
    notes += notes_on_untrained([result["untrained"] for result in found])
    notes += notes_on_code(of_labels)
    if "dataset" not in options_along(study.axes) and len({result["data"] for result in found}) > 1:
        notes.append(OTHER_DATA)
    return notes + notes_on_empty(list(measures.values()), found)


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
