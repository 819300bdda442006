"""Terminal output: the federation, a progress bar during runs, and tables at their ends."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from jaxfl.config import choices
from jaxfl.config.command_options import View
from jaxfl.config.setup import Setup
from jaxfl.data import shift
from jaxfl.data.federation import Federation
from jaxfl.data.partition import Partition
from jaxfl.data.partitioners import rule_of_test
from jaxfl.data.sources import Source, column, kind_of, of_vectors
from jaxfl.folder import store
from jaxfl.folder.records import Result, Round
from jaxfl.machine.processes import is_first
from jaxfl.machine.texts import few, span
from jaxfl.mechanisms.wire import accounting_of
from jaxfl.results.frame import finished_run
from jaxfl.results.report import tabulate
from jaxfl.results.table import Table, as_text
from jaxfl.runs.observer import ONLY_WARNINGS, Observer
from jaxfl.runs.prepare import Data
from jaxfl.tasks import CLASSES, task_of


class _Out(Console):
    def on_broken_pipe(self) -> None:
        """Go on silently: the reader, such as head, has seen enough."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Names stay as they are: my.py:moon is no moon, and [1] no style. Into a file or a pipe tables are wider than
# the 80 columns that rich assumes there.
IS_TERMINAL = getattr(sys.stdout, "isatty", lambda: False)()  # a stream may be closed, or a user's own
OUT = _Out(markup=False, emoji=False, soft_wrap=True, width=None if IS_TERMINAL else 120)


def announce(setup: Setup, data: Data) -> None:
    """Describe the federation in a few lines."""
    count, *shape = data.source.images.shape
    form = f"{shape[-1]} features" if of_vectors(shape) else "x".join(map(str, shape))
    task = data.source.task
    form += f", a vocabulary of {data.source.vocabulary:,}" if data.source.vocabulary else ""
    OUT.print(
        f"{setup.data.dataset}: {count} {examples(data.source)} of {form}, {normalised(setup, shape)}; "
        + describe(setup, data.partition, data.source)
    )
    if task.chance:
        OUT.print(task.chance(data.source.labels[np.unique(np.concatenate(data.partition.train))]))
    if data.drawn:
        OUT.print(f"Every client sees {examples(data.source)} of its own: {shift.describe(data.drawn)}.")
    if len(data.federation.public):
        OUT.print(f"{len(data.federation.public)} public {examples(data.source)} ({setup.data.public})")
    for model, count in data.models:
        run = "1 client runs" if count == 1 else f"{count} clients run"
        OUT.print(f"{run} {model.choice} ({model.size:,} parameters). {model.note}".strip())
    if len(data.models) > 1:
        first = data.federation.models[0].choice
        OUT.print(
            f"Weights are shared within an architecture: a method with a global model has "
            f"{len(data.models)}, one for each; --models {first} gives all clients the same."
        )
    for sentence in on_the_wire(setup, data.federation):
        OUT.print(sentence)
    device, federation = jax.devices()[0], data.federation
    OUT.print(
        f"jax {jax.__version__} on {federation.devices} x {device.platform} ({device.device_kind}), "
        f"{federation.clients_at_once} at once on each, convolution {federation.models[0].convolution}"
    )


def on_the_wire(setup: Setup, federation: Federation) -> Iterator[str]:
    """Yield sentences on attackers, on what a robust server holds, and on the privacy to come."""
    wire = federation.wire
    if wire is None:
        return
    if wire.attack is not None and wire.attackers.any():
        yield f"Attackers ({setup.wire.attack}): {few(map(str, np.flatnonzero(wire.attackers)), 20)}."
    if wire.aggregate is not None:
        held = [len(group.id) * 4 * group.model.size / 1e6 for group in federation.groups]
        most = max(held) * setup.run.participation
        yield (
            f"The server ({setup.wire.aggregate}) holds all messages of an architecture at once: about "
            f"{most:.3g} MB if whole models are sent."
        )
    if wire.rows:
        yield (
            f"Privacy: the gradient of every row is clipped to {wire.rows.clip:g}, noise multiplier "
            f"{wire.rows.noise:g}; epsilon is that of the client with the largest."
        )
    if accounting := accounting_of(setup, federation):
        epsilon, rounds = accounting.epsilon(setup.run.rounds), setup.run.rounds
        of_all = ", of a client that takes part in all" if accounting.where == "client" else ""
        yield (
            f"Privacy: noise multiplier {accounting.noise:.4g}; epsilon {epsilon:.4g} at delta "
            f"{accounting.delta:g} after {rounds} rounds{of_all}."
        )


def normalised(setup: Setup, shape: Sequence[int]) -> str:
    """Return how inputs of a shape are normalised, in words."""
    by = setup.data.normalise
    if by == "auto":
        by = {"tokens": "none", "vectors": "feature"}.get(kind_of(shape), "channel")
    return "not normalised" if by == "none" else f"normalised by {by}"


def examples(source: Source) -> str:
    """Return what a source holds, in a word."""
    return {"vectors": "vectors", "tokens": "rows of tokens"}.get(kind_of(source.images.shape[1:]), "images")


def describe(setup: Setup, partition: Partition, source: Source) -> str:
    """Return a line on a partition: its clients, and how much they train on; then what is unusual."""
    rule = rule_of_test(setup.partition)
    apart = [client for client, rows in enumerate(partition.train) if not len(rows)]
    parts = {"training": partition.train, "validation": partition.validation, "test": partition.test}
    kinds = {kind: np.delete([*map(len, rows)], apart).tolist() for kind, rows in parts.items()}
    rows, owners = np.unique(np.concatenate(partition.train), return_counts=True)
    rows_there = np.count_nonzero(source.train) if source.train[rows].all() else len(source.labels)
    number, total = len(kinds["training"]), sum(kinds["training"])
    shared = f", {np.count_nonzero(owners > 1):,} of them on several clients" if total > len(rows) else ""
    clients = "1 client" if number == 1 else f"{number:,} clients"
    *first, last = [f"{span(sizes)} {kind}" for kind, sizes in kinds.items() if any(sizes)]
    line = (
        f"{setup.partition.partition}{'' if rule == 'auto' else f', --test {rule}'}: "
        f"{clients} with {', '.join(first)} and {last} rows each, "
        f"{partition.outputs} outputs; they train on {total:,} rows: {len(rows):,} of "
        f"{rows_there:,} {examples(source)}{shared}"
    )
    return "\n".join([line, *_other_clients(setup, partition, source), *_unusual(partition, source, apart)])


def _other_clients(setup: Setup, partition: Partition, source: Source) -> Iterator[str]:
    """Yield sentences on clients of the data that are none of the federation, unless it draws some."""
    choice = setup.partition.partition
    if choice == "classes" and "client" in source.columns:
        yield "The data name the client of each row; --partition natural,min_samples=1 has these clients."
    if choice.partition(",")[0] == "natural" and setup.partition.clients is None:
        by = choices.split(choice)[1].get("column", "client")
        values = len(np.unique(column(source, by)))
        if left := values - len(partition.train):
            yield f"{left} of {values} values of {by} have fewer than min_samples rows, and are no clients."


def _unusual(partition: Partition, source: Source, apart: list[int]) -> Iterator[str]:
    """Yield sentences on clients `apart`, who have no training rows, and on unusual test rows."""
    names = partition.names or [*map(str, range(len(partition.train)))]
    trained = np.concatenate([*partition.train, *partition.validation])
    mixed = np.count_nonzero(~source.train[trained])
    cut = [name for name, rows in zip(names, partition.test, strict=True) if source.train[rows].any()]
    if apart:
        yield f"Clients without training rows ({few(names[i] for i in apart)}) never train: newcomers."
    if source.divided and mixed:
        yield (
            f"Test rows are cut from what clients have: they train on {mixed:,} of the data's own test rows, "
            "which --test source and split keep apart."
        )
    elif source.divided and cut:
        yield (
            f"Clients without test rows in the data ({few(cut)}) are tested on some of their other rows, on "
            "which they do not train."
        )
    tested = source.labels[np.concatenate(partition.test)]
    if source.task is CLASSES and len(unknown := np.setdiff1d(source.labels[trained], tested)):
        yield f"Nobody is tested on classes without test rows ({few(map(str, unknown))})."


def print_result(result: Result, folder: Path) -> None:
    """Print the result of a run."""
    options = store.read_config(folder)["options"]
    run = finished_run(folder, (result["seed"], 0), result["method"], target=options.get("target", ()))
    OUT.print(as_text(tabulate([run], View(show=options.get("show", ()))), OUT.width))
    if result.get("stopped"):
        OUT.print(f"It has stopped after round {result['rounds']}: {result['stopped']}.")
    seconds = result["seconds"]
    parts = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
    pictures = ", ".join(sorted(path.name for path in folder.glob("*.png")))
    OUT.print(f"{folder}: result.json, metrics.jsonl, clients.csv, {pictures}")
    OUT.print(f"{sum(seconds.values()):.1f} s: {parts}")


@contextlib.contextmanager
def shown(quiet: bool) -> Iterator[Observer]:
    """Yield the observer of runs in progress: a progress bar, or nothing."""
    if quiet:
        yield ONLY_WARNINGS
    else:
        OUT.quiet, bar = not is_first(), Bar()
        try:
            yield bar.observer
        finally:
            if bar.live.is_started:
                bar.stop()


def print_table(table: Table, folder: Path, more: str = "") -> None:
    """Print a table that has been written."""
    OUT.print(as_text(table, OUT.width))
    OUT.print(f"{folder}: table.csv, table.md, table.tex, pictures{more}")


def _speed(rounds: int, seconds: float) -> str:
    """Return rounds per second, or seconds per round if they take longer than one."""
    return f"{rounds / seconds:.1f} rounds/s" if rounds >= seconds else f"{seconds / rounds:.1f} s/round"


class _TimeLeft(ProgressColumn):
    """The time that the remaining rounds take if they are as fast as those since the bar appeared."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        computed, left, elapsed = task.fields["computed"], task.remaining, task.elapsed
        if not computed or left is None or elapsed is None:
            return Text("-:--:--")
        return Text(str(timedelta(seconds=round(elapsed * left / computed))))


class Bar(Progress):
    """A progress bar over all rounds of all runs, in a study those of all settings, with the newest accuracy.

    It appears when the federation is ready.
    """

    def __init__(self):
        super().__init__(
            TextColumn("{task.description}", markup=False),  # labels may have brackets
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds  {task.fields[accuracy]}  {task.fields[speed]}"),
            _TimeLeft(),
            console=OUT,
        )
        self.whole = 0  # rounds of a study
        self.before = 0  # rounds of its earlier settings
        self.done = {}  # rounds of each run
        self.computed = 0  # rounds since the bar appeared
        self.shown = ""  # the run that the bar shows
        self.observer = Observer(
            self._prepared, OUT.print, progressed=self._progressed, kept=self._kept, ahead=self._ahead
        )

    def _ahead(self, rounds: int) -> None:
        self.before += sum(self.done.values())
        self.done.clear()
        self.whole = self.before + rounds
        self._show(total=self.whole)  # some runs of the last setting may have failed, or stopped at a target

    def _prepared(self, setup: Setup, data: Data, runs: int) -> None:
        announce(setup, data)
        if not self.whole:  # partitions that had finished before are not counted
            self.done.clear()
        if not self.task_ids:
            total = self.whole or runs * setup.run.rounds
            self.add_task("", total=total, accuracy="", speed="", computed=0)
        self._show(description="compiling", accuracy="", speed="")
        self.start()

    def _show(self, **fields) -> None:
        for bar in self.task_ids:  # none before the federation is ready
            self.update(bar, completed=self.before + sum(self.done.values()), **fields)

    def _kept(self, run: str, metrics: list[Round]) -> None:
        self.done[run] = metrics[-1]["round"]
        self._show(description=f"{run} is kept")

    def _progressed(self, run: str, new: list[Round]) -> None:
        last = new[-1]
        self.computed += last["round"] - self.done.get(run, new[0]["round"] - 1)
        self.done[run] = last["round"]
        if run != self.shown:
            self.shown = run
            self._show(accuracy="", speed="")
        if "accuracy" in last:
            if (compiling := last["seconds"]["compile"]) >= 0.1:
                self.console.print(f"{run}: compiled in {compiling:.1f} s")
            training = sum(record["seconds"]["train"] for record in new if "seconds" in record)
            score = task_of(last["accuracy"]).text(last["accuracy"]["mean"])
            self._show(accuracy=score, speed=_speed(len(new), max(training, 1e-9)))
        self._show(description=run, computed=self.computed)
