"""What finished runs have come to: one table and one plot; and what the folder of a single run holds."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxfl.errors import JaxflError
from jaxfl.runs import store
from jaxfl.runs.config import experiment
from jaxfl.runs.plot import draw_curves
from jaxfl.runs.table import Table, as_csv, as_latex, as_markdown, tabulate


class Loaded(NamedTuple):
    """A run as its folder holds it.

    Args:
      config: method, label, options, models, environment.
      metrics: a record per round so far, see `jaxfl.runs.result.records`.
      result: see `jaxfl.runs.result.result`; None of a run that has not finished.
    """

    config: dict
    metrics: list[dict]
    result: dict | None


def load(folder: Path) -> Loaded:
    """Read a run, finished or still going on.

    Raises:
      JaxflError: if the folder holds no run, or its files are damaged.
    """
    config = store.read_config(folder)
    if not store.holds(folder, store.RESULT):
        return Loaded(config, store.read_metrics(folder), None)
    result, metrics = store.read_finished(folder)
    return Loaded(config, metrics, result)


def report(folders: Sequence[Path], out: Path, show: Sequence[str] = ()) -> Table:
    """Tabulate and plot finished runs.

    Args:
      folders: run folders, or folders that contain some.
      out: where table.csv, .md, .tex and curves.png are written.
      show: further columns, see `jaxfl.runs.table.tabulate`.

    Raises:
      JaxflError: if a folder has no finished run, a run is damaged, two are the same but for their folders,
        or the table cannot be written.
    """
    runs = {folder: load(folder) for folder in store.finished_in(list(folders))}
    labels = _labels([run.config for run in runs.values()])
    results, metrics, folder_of = [], {}, {}
    for (folder, run), label in zip(runs.items(), labels, strict=True):
        results.append((label, run.result))
        metrics.setdefault(label, []).append(run.metrics)
        same = folder_of.setdefault((label, run.result["seed"]), folder)
        if same != folder:
            raise JaxflError(f"{folder} and {same} are both {label} with one seed; report one of them.")
    table = tabulate(results, show)
    forms = {"table.csv": as_csv, "table.md": as_markdown, "table.tex": as_latex}
    store.write_texts(out, {name: form(table) for name, form in forms.items()})
    store.write_pictures(out, {"curves.png": partial(draw_curves, metrics)})
    return table


def _labels(configs: list[dict]) -> list[str]:
    """The runs' labels, with the options that tell runs of one label apart: only seeds are averaged."""
    experiments = [experiment(config) for config in configs]
    # Seeds of one another share the label of the first.
    first = [configs[experiments.index(of_run)]["label"] for of_run in experiments]
    labels = []
    for label, of_run in zip(first, experiments, strict=True):
        alike = [other for other, its in zip(experiments, first, strict=True) if its == label]
        told = [
            f"{name}={value}"
            for name, value in of_run.items()
            if any(other.get(name) != value for other in alike)
        ]
        labels.append(",".join([label, *told]))
    return labels
