"""Reports on finished runs: a table and pictures."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from jaxfl.config import choices
from jaxfl.config.command_options import View
from jaxfl.folder import several_runs, store
from jaxfl.folder.records import Result
from jaxfl.machine import files
from jaxfl.results import notes as said
from jaxfl.results.frame import Frame, by_case, read
from jaxfl.results.measures import CONFUSION, class_names, task_of_all, usual_columns
from jaxfl.results.paired import label_of
from jaxfl.results.pivot import pivot
from jaxfl.results.table import Table, confusion_csv, written
from jaxfl.results.target import check_targets
from jaxfl.results.tuned import best, check_tuned, differing


def report(
    folders: Sequence[Path], out: Path, view: View, notes: Sequence[str] = (), pictures: str = "png"
) -> Table:
    """Tabulate and plot finished runs, in some folders or below.

    The runs need not have been given the targets of the view. `notes` are further sentences under the table.

    Raises:
      JaxflError: if a target is no accuracy, a folder has no finished run, a run is damaged, two differ only
        in their folders, `against` is in no row, or the table cannot be written.
    """
    from jaxfl.results import curves, drawings  # here, so that commands without plots do not wait for them

    frame = read(folders, view.target, view.select)
    check_targets(view.target, task_of_all([run.result for run in frame]))
    table = tabulate(frame, view, [*_left_out(folders), *notes])
    shown = by_case(best(frame, view.tune)[0])
    metrics = {label: [run.metrics for run in runs.values()] for (label, _), runs in shown.items()}
    results = {label: [run.result for run in runs.values()] for (label, _), runs in shown.items()}
    words, matrices = class_names([*itertools.chain(*results.values())]), _confused(results, view.show)
    confused = confusion_csv(matrices, words) if matrices else None
    files.write_texts(out, {**written(table, "table"), "confusion.csv": confused})
    drawn = {
        "curves": curves.draw_curves,
        "loss": curves.draw_loss,
        "architectures": curves.draw_architectures,
        "metrics": partial(curves.draw_metrics, shown=view.show, class_names=words),
        "bytes": curves.draw_bytes,
        "confusion": lambda _: drawings.draw_confusion(matrices, words),
    }
    files.write_pictures(out, {f"{name}.{pictures}": partial(draw, metrics) for name, draw in drawn.items()})
    return table


def tabulate(frame: Frame, view: View, notes: Sequence[str] = ()) -> Table:
    """Return the table of some runs: a row for each label, a column for each measure.

    The arguments, and what they raise, are those of `report`.
    """
    runs, tune = said.on_runs(frame, select=view.select), view.tune
    check_tuned(tune, itertools.chain(*(choices.split(run.method)[1] for run in frame if tune)))
    frame, tuned = best(frame, tune)
    measures = usual_columns([run.result for run in frame], view.show, view.hide)
    against = view.against and label_of(view.against, [run.method for run in frame])
    table = pivot(
        frame,
        measures,
        lambda method, _, measure: (method, measure.title),
        judged=measures[:1],
        against=against,
        minus="minus {1}",
    )
    return table._replace(notes=(*runs, *tuned, *table.notes, *notes))


def table_of(folder: Path, against: str | None = None) -> Table | None:
    """Return the table of the finished runs in a folder, as `report` makes it; None if there are none.

    Its targets are those that the runs were given, and its accuracies of the evaluation that a comparison in
    the folder chose when it ended.

    Raises:
      JaxflError: if a run is damaged, two differ only in their folders, or `against` is in no row.
    """
    if not several_runs.finished_below(folder):
        return None
    asked = [
        store.read_config(run)["options"].get("target", ()) for run in several_runs.finished_in([folder])
    ]
    end, targets = several_runs.end_of(folder), list(dict.fromkeys(itertools.chain(*asked)))
    select = end.get("select", "last")
    frame = read([folder], targets, select)
    tune = differing(end.get("tune", ()), (run.method for run in frame))
    return tabulate(frame, View(tune=tune, select=select, against=against), _left_out([folder]))


def _left_out(folders: Sequence[Path]) -> list[str]:
    unfinished = several_runs.unfinished_in(folders)
    number = "1 run has" if len(unfinished) == 1 else f"{len(unfinished)} runs have"
    return [f"Left out: {number} not finished; the first is {unfinished[0]}."] if unfinished else []


def _confused(results: Mapping[str, Sequence[Result]], show: Sequence[str]) -> dict[str, list[list[float]]]:
    """Return the confusion matrix of each label, the mean over its runs, if they are to be shown."""
    found = {
        label: [result["accuracy"][CONFUSION] for result in own if CONFUSION in result["accuracy"]]
        for label, own in results.items()
        if CONFUSION in show
    }
    return {label: np.mean(own, axis=0).tolist() for label, own in found.items() if own}
