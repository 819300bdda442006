"""Several methods on one federation: same partition, cohorts and initial weights, several seeds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxfl.errors import JaxflError, writing
from jaxfl.machine.processes import agree, by_first
from jaxfl.runs import checkpoint, store, table
from jaxfl.runs.batch import Unfinished, batches, run_batch
from jaxfl.runs.interrupt import Interrupted, deferred
from jaxfl.runs.plot import draw_curves
from jaxfl.runs.prepare import Data, Setup
from jaxfl.runs.run import Chosen, described, restore


def plan(
    folder: Path, methods: list[Chosen], setup: Setup, seeds: list[int]
) -> dict[Path, tuple[Chosen, Setup]]:
    """The runs of a comparison: every method with every seed, in a folder each.

    Args:
      folder: new, or of an earlier comparison with the same options, which is continued.
      methods: to compare.
      setup: the options of every run but for the seed.
      seeds: of the runs.

    Raises:
      JaxflError: if a method is named twice, or the folder holds anything else.
    """
    for i, chosen in enumerate(methods):
        for other in methods[:i]:
            same = (chosen.method, chosen.config) == (other.method, other.config)
            if same or chosen.label == other.label:
                raise JaxflError(f"{chosen.label} is named twice; name every method once.")
    planned = {
        folder / _file_name(chosen.label) / f"seed-{seed}": (chosen, dataclasses.replace(setup, seed=seed))
        for seed in seeds
        for chosen in methods
    }
    begun = runs_in(folder)
    if not begun:
        store.check_free(folder)
    for run in begun:
        config = store.experiment(store.read_config(run))
        if run not in planned or config != store.experiment(described(*planned[run])):
            raise JaxflError(
                f"{run} is not a run of this comparison: its method or options differ; choose another "
                "--run-dir, or repeat the command that began it."
            )
    return planned


@by_first
def runs_in(folder: Path) -> list[Path]:
    """The folders of a comparison's runs, finished or not."""
    with writing(folder):
        return [path.parent for path in sorted(folder.glob(f"*/seed-*/{store.CONFIG}"))]


def compare(
    folder: Path,
    planned: dict[Path, tuple[Chosen, Setup]],
    data: Data,
    watch: Callable[[str, int, list[dict]], None],
    say: Callable[[str], None],
) -> tuple[table.Table | None, list[str]]:
    """Start or continue all runs, and write one table and one plot of those that finish.

    Args:
      folder: for all of them.
      planned: by `plan`; those that differ in seeds and rates alone are one program where they can be.
      data: from `prepare` with the same setup.
      watch: called with label, seed and new metrics.
      say: called with a sentence on how several runs are run, and why.

    Returns:
      The table, None if no run has finished; and for every other run the sentence that says why not.

    Raises:
      JaxflError: if another process was given something else to compare, a finished run is damaged, or the
        table cannot be written.
      Interrupted: after a Ctrl-C, when the rounds in progress are saved.
    """
    agree("options", [(run.absolute(), described(*chosen)) for run, chosen in planned.items()])
    failures, unfinished = [], {}
    for run, (chosen, setup) in planned.items():
        if store.holds(run, store.RESULT):
            _, metrics = store.read_finished(run)
            watch(chosen.label, setup.seed, metrics)
            continue
        try:
            done = 0
            if store.holds(run, store.CONFIG):
                setup, _ = restore(run, store.read_config(run))  # with what was chosen for its machine
                done = max(checkpoint.saved(run, len(store.read_metrics(run))), default=0)
            unfinished[run] = Unfinished(chosen, setup, done)
        except JaxflError as error:
            failures.append(str(error))
    with deferred() as asked:
        try:
            parts = batches(unfinished)
            for i, runs in enumerate(parts):
                if asked.to_stop:
                    raise Interrupted
                failures += run_batch(runs, parts[:i], data, watch, say)
        except Interrupted:
            finished = sum(store.holds(run, store.RESULT) for run in planned)
            raise Interrupted(
                f"The comparison in {folder} has stopped with {finished} of {len(planned)} runs finished; "
                f"repeat the command, with --run-dir {folder}, to continue."
            ) from None
    return report([folder], folder) if len(failures) < len(planned) else None, failures


@by_first
def report(folders: list[Path], out: Path) -> table.Table:
    """Tabulate and plot finished runs.

    Args:
      folders: run folders, or folders that contain some.
      out: where table.csv, .md, .tex and curves.png are written.

    Raises:
      JaxflError: if a folder has no finished run, a run is damaged, two are the same but for their folders,
        or the table cannot be written.
    """
    finished = {}  # a set in order: a run that is named twice counts once
    for folder in folders:
        found = {path.parent.resolve(): None for path in folder.rglob(store.RESULT)}
        if not found:
            raise JaxflError(f"There is no finished run in {folder}.")
        finished |= found
    runs = sorted(finished, key=lambda run: (run / store.RESULT).stat().st_mtime)
    results, metrics, folder_of = [], {}, {}
    for run, label in zip(runs, _labels([store.read_config(run) for run in runs]), strict=True):
        result, of_run = store.read_finished(run)
        results.append((label, result))
        metrics.setdefault(label, []).append(of_run)
        same = folder_of.setdefault((label, result["seed"]), run)
        if same != run:
            raise JaxflError(f"{run} and {same} are both {label} with one seed; report one of them.")
    made = table.tabulate(results)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / "table.csv").write_text(table.as_csv(made))
        (out / "table.md").write_text(table.as_markdown(made))
        (out / "table.tex").write_text(table.as_latex(made))
    draw_curves(metrics, out / "curves.png")
    return made


def _labels(configs: list[dict]) -> list[str]:
    """The runs' labels, with the options that tell runs of one label apart: only seeds are averaged."""
    experiments = [store.experiment(config) for config in configs]
    # Seeds of one another share the label of the first.
    first = [configs[experiments.index(experiment)]["label"] for experiment in experiments]
    labels = []
    for label, experiment in zip(first, experiments, strict=True):
        alike = [other for other, its in zip(experiments, first, strict=True) if its == label]
        told = [
            f"{name}={value}"
            for name, value in experiment.items()
            if any(other.get(name) != value for other in alike)
        ]
        labels.append(",".join([label, *told]))
    return labels


def _file_name(label: str) -> str:
    return "".join(mark if mark.isalnum() or mark in "-_=." else "-" for mark in label)
