"""The commands from Python: options as keyword arguments, named as on the command line."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxfl.config.asked import make
from jaxfl.config.command_options import (
    ChangedCode,
    Columns,
    Continuation,
    Evaluation,
    Limit,
    Output,
    Part,
    RunFolder,
    Seeds,
    View,
)
from jaxfl.config.values import as_path
from jaxfl.core.protocol import Method
from jaxfl.deployed import load as runs_by_folder
from jaxfl.deployed.load import Loaded
from jaxfl.errors import JaxflError
from jaxfl.folder import several_runs, store
from jaxfl.grid import compare as comparing
from jaxfl.grid import comparison
from jaxfl.grid import run as runs
from jaxfl.grid.comparison import Comparison
from jaxfl.grid.plan import labels_to_train
from jaxfl.grid.resolve import resolve, resolve_run
from jaxfl.machine.start import cpu_devices, start
from jaxfl.results import report as reports
from jaxfl.results.table import Table
from jaxfl.runs.init_from import final_arrays
from jaxfl.runs.interrupt import heeded
from jaxfl.runs.observer import Terms
from jaxfl.terminal import print_result, print_table, shown


def run(
    method: str | Method,
    *,
    run_dir: str | Path | None = None,
    log: str | Callable | Sequence[str | Callable] = (),
    max_seconds: float | None = None,
    quiet: bool = False,
    **options,
) -> Loaded:
    """Train one method, as ``jaxfl run`` does.

    Args:
      method: a name, a choice such as ``"compfl,kd=false"``, or a `Method` of your own. A run of the last
        kind cannot be resumed, unless the method is named as ``"path/to/my.py:object"``.
      run_dir: a new folder for the results; by default runs/NAME-DATASET.
      log: further places for metrics: ``"tensorboard"``, ``"wandb"``, a function of your own
        ``(folder, record)``, which gets every line of metrics.jsonl, or several in a list.
      max_seconds: seconds; a run that would take longer is saved before, after the first `eval_every` rounds
        at the earliest, and raises `Interrupted`, a KeyboardInterrupt that says how to go on.
      quiet: whether to print nothing: no federation, bar, result or folder.
      **options: options of the run, see `jaxfl.config.setup.Setup`, and of the method's configuration.

    Returns:
      The run, as `load` opens its folder.

    Raises:
      JaxflError: if an option is unknown, of another type or out of range, or something is missing.
    """
    _start(options.get("devices"))
    variant, setup = resolve_run(method, options)
    where, limit = _stated("jaxfl.run", RunFolder, Limit, run_dir=run_dir, max_seconds=max_seconds)
    with heeded(), shown(quiet) as observer:
        terms = Terms(_logs(log), False, limit.max_seconds, observer)
        folder, result = runs.run(variant, setup, where.run_dir, terms)
    if not quiet:
        print_result(result, folder)
    return dataclasses.replace(runs_by_folder.load(folder), variant=None if variant.name else variant)


def compare(
    *methods: str | Method,
    seeds: int = 1,
    partition_seeds: int = 1,
    run_dir: str | Path | None = None,
    hide: str | Sequence[str] = (),
    tune: str | Sequence[str] = (),
    select: str = "last",
    against: str | None = None,
    log: str | Callable | Sequence[str | Callable] = (),
    part: str = "1/1",
    changed_code: bool = False,
    max_seconds: float | None = None,
    quiet: bool = False,
    **options,
) -> Comparison:
    """Train several methods on one federation, as ``jaxfl compare`` does.

    Args:
      *methods: as for `run`.
      seeds: number of repetitions, with seed, seed + 1, ...
      partition_seeds: number of repetitions of all that, with partition_seed, partition_seed + 1, ...
      run_dir: a new folder, or that of a comparison to continue; by default runs/compare-DATASET.
      hide: usual columns that the table is to leave out, one or a list of those of ``jaxfl report --help``.
      tune: "lr", or several options: of the methods that differ only in these, the table has the one that is
        best on validation rows.
      select: the evaluation that its accuracies are of: "last", or the best one on "validation" rows.
      against: one of the methods: a further column says how much more accurate the others are, seed by seed.
      log: as for `run`.
      part: "2/8" trains every eighth method from the second on, for one of eight processes that share
        `run_dir`; the table has what all of them have finished.
      changed_code: whether runs go on, and finished ones are kept, if your own files have changed since.
      max_seconds: as for `run`.
      quiet: as for `run`.
      **options: options of all runs, see `jaxfl.config.setup.Setup`, and those that all methods have, see
        `jaxfl.core.training.Training`; any other option applies to the methods that have it.

    Returns:
      Its folder, the table, the runs by label and seed, and why some have failed: the others go on.

    Raises:
      JaxflError: if an option is unknown, of another type or out of range, or something is missing.
    """
    if not methods:
        raise JaxflError('Name the methods to compare: jaxfl.compare("fedavg", "fedper").')
    _start(options.get("devices"), run_dir)
    variants, setup = resolve("jaxfl.compare", methods, options)
    seeding, where, columns, which, limit, code = _stated(
        "jaxfl.compare",
        *(Seeds, RunFolder, Columns, Part, Limit, ChangedCode),
        seeds=seeds,
        partition_seeds=partition_seeds,
        part=part,
        run_dir=run_dir,
        against=against,
        hide=hide,
        tune=tune,
        select=select,
        max_seconds=max_seconds,
        changed_code=changed_code,
    )
    with heeded(), shown(quiet) as observer:
        terms = Terms(_logs(log), code.changed_code, limit.max_seconds, observer)
        only = labels_to_train(variants, which.part, where.run_dir)
        made = comparing.compare(variants, setup, seeding, columns, where.run_dir, terms, only=only)
    return _printed(made, quiet)


def _printed(made: Comparison, quiet: bool) -> Comparison:
    if made.table and not quiet:
        print_table(made.table, made.folder, ", and a folder per run")
    return made


def resume(
    run_dir: str | Path,
    *,
    log: str | Callable | Sequence[str | Callable] = (),
    rounds: int | None = None,
    devices: int | None = None,
    data_dir: str | Path | None = None,
    changed_code: bool = False,
    max_seconds: float | None = None,
    quiet: bool = False,
) -> Loaded | Comparison:
    """Continue a run from its last checkpoint, as ``jaxfl resume`` does; a finished one is returned as it is.

    Args:
      run_dir: the folder of a run, or of a comparison, all of whose runs go on.
      log: as for `run`.
      rounds: rounds of the whole run, if more than it was begun for.
      devices: number of devices that share the clients from now on, if not as many as so far.
      data_dir: where tensorflow-datasets keeps its data from now on, if that has changed.
      changed_code: whether to go on if your own files have changed since.
      max_seconds: as for `run`.
      quiet: as for `run`.

    Returns:
      The run, as `load` opens its folder, or what `compare` returns.

    Raises:
      JaxflError: if the folder holds no run, or one that cannot be continued, or that another process runs.
    """
    _start(devices, run_dir)
    folder = as_path(run_dir)
    given = {"rounds": rounds, "devices": devices, "data_dir": data_dir, "changed_code": changed_code}
    subjects = (Continuation, Limit, ChangedCode)
    changed, limit, code = _stated("jaxfl.resume", *subjects, **given, max_seconds=max_seconds)
    with heeded(), shown(quiet) as observer:
        terms = Terms(_logs(log), code.changed_code, limit.max_seconds, observer)
        if store.holds(folder, store.COMMAND):
            return _printed(comparing.resume(folder, changed, terms), quiet)
        result = runs.resume(folder, changed, terms)
    if not quiet:
        print_result(result, folder)
    return runs_by_folder.load(folder, changed_code)


def report(
    *run_dirs: str | Path,
    show: str | Sequence[str] = (),
    hide: str | Sequence[str] = (),
    tune: str | Sequence[str] = (),
    select: str = "last",
    target: float | Sequence[float] = (),
    against: str | None = None,
    out: str | Path | None = None,
    pictures: str = "png",
) -> Table:
    """Tabulate and plot finished runs, as ``jaxfl report`` does.

    Args:
      *run_dirs: folders of runs, or folders that contain some.
      show: further scores as columns, one or a list of those of ``jaxfl list scores``.
      hide: usual columns to leave out, one or a list of those of ``jaxfl report --help``.
      tune: options of which only the best on validation rows are shown, as in `compare`.
      select: the evaluation that the accuracies are of: "last", or the best one on "validation" rows.
      target: accuracies: further columns say what runs spent to reach them.
      against: a row of the table: a further column says how much more accurate the others are, seed by seed.
      out: where the table and the curves are written; by default the folder if it is one, else a new one,
        runs/report, runs/report-2, ...
      pictures: their format: "png", "pdf" or "svg".

    Returns:
      The table; as text it is Markdown.

    Raises:
      JaxflError: if a folder holds no finished run, or a damaged one, or `against` is in no row.
    """
    if not run_dirs:
        raise JaxflError('Name the run folders: jaxfl.report("runs/fedavg-digits").')
    folders = [as_path(run_dir) for run_dir in run_dirs]
    given = {"target": target, "out": out, "against": against, "pictures": pictures}
    given |= {"show": show, "hide": hide, "tune": tune, "select": select}
    view, to = _stated("jaxfl.report", View, Output, **given)
    return reports.report(folders, to.out or several_runs.report_folder(folders), view, pictures=to.pictures)


def load(
    run_dir: str | Path, changed_code: bool = False, round: int | Literal["best"] | None = None
) -> Loaded | Comparison:
    """Open a run, finished or still going on, or a comparison.

    Args:
      run_dir: the folder.
      changed_code: whether models are made if your own files have changed since.
      round: the round whose models are meant, by default that of the last checkpoint; "best" is that of the
        best accuracy on validation rows. A run keeps its last `keep_checkpoints`.

    Returns:
      For a run a `Loaded`: accuracies and losses as arrays, ``models[3].predict(images)``, what the method
      knows of clients, the configuration. For a comparison what `compare` returns, with its runs by label and
      seed: ``load("runs/compare-digits").runs["fedper", 0]``. Its ``.against("fedper")`` is the table with a
      column that says how much more accurate the others are.

    Raises:
      JaxflError: if the folder holds neither, or its files are damaged.
    """
    folder = as_path(run_dir)
    code, when = _stated("jaxfl.load", ChangedCode, Evaluation, changed_code=changed_code, round=round)
    several = not store.holds(folder, store.CONFIG) and several_runs.runs_in(folder)
    opened = comparison.load if several else runs_by_folder.load
    return opened(folder, code.changed_code, when.round)


def final_weights(run_dir: str | Path) -> dict[str, np.ndarray]:
    """Return the weights that a run's clients deploy after its newest checkpoint, as `init_from` takes them.

    ``numpy.savez("experts.npz", **jaxfl.final_weights("runs/fedavg"))`` makes a file that it takes, too.

    Returns:
      Arrays by their names, which are paths, see `jaxfl.models.named`: ``lenet5/params/conv1/conv/kernel``.

    Raises:
      JaxflError: if the folder holds no run, or one without a checkpoint that can be read, or its data or its
        method are missing.
    """
    return final_arrays(as_path(run_dir))


def _start(devices: Any, run_dir: str | Path | None = None) -> None:
    """Let JAX start with a device for every core, as the command does, or as many as a run needs."""
    before = several_runs.devices_below(as_path(run_dir)) if run_dir else None
    start(cpu_devices(devices if isinstance(devices, int) else None, before))


def _stated(whose: str, *subjects: type, **options) -> list[Any]:
    """Return an instance of each class of a command's options, see `jaxfl.config.command_options`."""
    return [make(subject, whose, options) for subject in subjects]


def _logs(log: Any) -> tuple[str | Callable, ...]:
    if isinstance(log, str | Callable):
        return (log,)
    if not isinstance(log, Sequence) or not all(isinstance(each, str | Callable) for each in log):
        raise JaxflError(f"--log must be one name or function or a list of them, not {log!r}.")
    return tuple(log)
