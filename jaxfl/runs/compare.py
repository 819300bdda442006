"""Several methods on one federation: same partition, cohorts and initial weights, several seeds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxfl.errors import JaxflError
from jaxfl.experiment import Data, Setup
from jaxfl.runs import store, table
from jaxfl.runs.plot import draw_curves
from jaxfl.runs.run import Chosen, start


def compare(
    folder: Path,
    methods: list[Chosen],
    setup: Setup,
    data: Data,
    seeds: list[int],
    watch: Callable[[str, int, list[dict]], None],
) -> table.Table:
    """Run every method with every seed, in a folder each, and write one table and one plot.

    Args:
      folder: for all runs; must not exist, or be empty.
      methods: with distinct labels.
      setup: the options of every run but for the seed.
      data: from `prepare` with the same setup.
      seeds: of the runs; a method's programs are compiled once for all of them.
      watch: called with label, seed and new metrics.

    Raises:
      JaxflError: if the folder is not free, a label is used twice, or a run diverges.
    """
    labels = [chosen.label for chosen in methods]
    if len(set(labels)) < len(labels):
        raise JaxflError(f"A method is named twice in {', '.join(labels)}; name it once.")
    store.create(folder)
    for seed in seeds:
        for chosen in methods:
            start(
                folder / _file_name(chosen.label) / f"seed-{seed}",
                chosen,
                dataclasses.replace(setup, seed=seed),
                data,
                lambda new, label=chosen.label, seed=seed: watch(label, seed, new),
            )
    return report([folder], folder)


def report(folders: list[Path], out: Path) -> table.Table:
    """Tabulate and plot finished runs.

    Args:
      folders: run folders, or folders that contain some.
      out: where table.csv, .md, .tex and curves.png are written.

    Raises:
      JaxflError: if a folder has no finished run.
    """
    finished = {}  # a set in order: a run that is named twice counts once
    for folder in folders:
        found = {path.resolve().parent: None for path in folder.rglob(store.RESULT)}
        if not found:
            raise JaxflError(f"There is no finished run in {folder}.")
        finished |= found
    runs = sorted(finished, key=lambda run: (run / store.RESULT).stat().st_mtime)
    results, metrics = [], {}
    for run, label in zip(runs, _labels([store.read_config(run) for run in runs]), strict=True):
        results.append((label, store.read_json(run / store.RESULT)))
        metrics.setdefault(label, []).append(store.read_metrics(run))
    made = table.tabulate(results)
    with store.writing(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / "table.csv").write_text(table.as_csv(made))
        (out / "table.md").write_text(table.as_markdown(made))
        (out / "table.tex").write_text(table.as_latex(made))
    draw_curves(metrics, out / "curves.png")
    return made


def _labels(configs: list[dict]) -> list[str]:
    """The runs' labels, with the options that tell runs of one label apart: only seeds are averaged."""
    labels = []
    for config in configs:
        options = config["options"]
        alike = [other["options"] for other in configs if other["label"] == config["label"]]
        told = [
            f"{name}={value}"
            for name, value in options.items()
            if name != "seed" and any(other.get(name) != value for other in alike)
        ]
        labels.append(",".join([config["label"], *told]))
    return labels


def _file_name(label: str) -> str:
    return "".join(mark if mark.isalnum() or mark in "-_=." else "-" for mark in label)
