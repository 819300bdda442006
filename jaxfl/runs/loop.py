"""The loop of a run: compute a chunk of rounds, write it down, and so on to the result."""

import dataclasses
import importlib
import itertools
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jaxfl.config.options import floats
from jaxfl.config.setup import MachineOptions
from jaxfl.core import memory
from jaxfl.core.engine import Chunk, first_infinite, join, newcomers_in_places, simulate
from jaxfl.core.job import Job
from jaxfl.core.rounds import Programs
from jaxfl.errors import JaxflError
from jaxfl.folder import checkpoint, store
from jaxfl.folder.owner import require_owned
from jaxfl.folder.records import Code, Config, Privacy, Result, Round
from jaxfl.folder.variant import Variant
from jaxfl.machine import files
from jaxfl.machine.processes import on_first_process
from jaxfl.results import clients
from jaxfl.results.measures import CONFUSION
from jaxfl.results.result import joined, records, result
from jaxfl.results.table import confusion_csv
from jaxfl.results.target import stops
from jaxfl.runs.interrupt import Interrupted, deferred, reason


class Run(NamedTuple):
    """A run whose folder exists and that can go on."""

    folder: Path
    config: Config
    variant: Variant
    machine: MachineOptions  # options that say how often it is saved
    code: Code  # the code that computes it now, see `jaxfl.folder.code`
    watch: Callable  # called with the metrics of every round as they come
    metrics: list[Round]  # records of all rounds so far; the list grows as the run goes on
    state: Any = None  # state after these rounds; None before the first one
    new: bool = False  # whether its folder has just been made
    taken_over: int | None = None
    """Number of rounds that another code has computed, if this process's takes over."""

    @property
    def done(self) -> int:
        """Number of rounds so far."""
        return len(self.metrics)


def compilation(programs: Programs) -> tuple[int, float]:
    """Return the number of compiled programs and the seconds so far, which earlier runs may have shared."""
    return programs.compilations, programs.seconds


def proceed(
    job: Job,
    runs: Sequence[Run],
    spent: tuple[int, float],
    profile: Path | None = None,
    since: float | None = None,
) -> list[Result | JaxflError]:
    """Run all runs of a job to the end.

    Seconds of compilation count for the first run that reports; those of training are divided evenly.

    Args:
      job: the job; on a CPU, each of several runs has the same bits as alone.
      runs: runs in the order of the job, all at the same round.
      spent: `compilation` before anything was compiled for them.
      profile: folder for a trace of the second chunk of rounds, or of the only one.
      since: when the work for a single run began, by `time.perf_counter`; its result then has the seconds
        that no record has (data, models, pictures) as "rest".

    Returns:
      For each run its result, or the error that ended it while the others
      went on: its loss is no longer finite, or its folder cannot be written. A method that refuses the data
      or its options ends all. What was computed before stays in the folder; without any, a new folder is
      removed.

    Raises:
      Interrupted: if stopped early, after the rounds in progress are saved; see `jaxfl.runs.interrupt`.
    """
    # While programs are compiled.
    Thread(target=importlib.import_module, args=["jaxfl.results.curves"]).start()
    compilations, seconds = spent
    done = runs[0].done
    ended, outcomes = _train(job, runs, seconds, profile), []
    for i, run in enumerate(runs):
        if i in ended:
            outcomes.append(ended[i])
            if run.new and not store.read_metrics(run.folder):
                on_first_process(shutil.rmtree)(run.folder, ignore_errors=True)
            continue
        compiled_by_now, _ = compilation(job.programs)
        try:
            outcomes.append(_conclude(job, run, compiled_by_now - compilations, done, since))
            compilations = compiled_by_now
        except JaxflError as error:
            outcomes.append(error)
    return outcomes


def _train(job, runs, seconds, profile) -> dict[int, JaxflError]:
    """Compute and write down all rounds; return the errors of runs that end early, by their numbers.

    `seconds` were compiled before.
    """
    ended, done = {}, runs[0].done
    going = {i: run for i, run in enumerate(runs) if not stops(run.config, run.metrics)}
    if not going:  # they were stopped between their last round and their result
        return ended
    writing = 0.0  # the longest, in seconds
    wrote = dict.fromkeys(going, 0.0)  # seconds of writing of each run since its last record
    try:
        chunks = simulate(job, done, [run.state for run in runs] if done else None)
        if profile:
            chunks = _profiled(chunks, profile, at=int(job.rounds > job.eval_every))
        with memory.explained(job.federation), deferred() as request:
            asked = time.perf_counter()
            for of_runs in chunks:
                computed, compiled = time.perf_counter(), job.programs.seconds
                spent, seconds = compiled - seconds, compiled
                # Time to write this chunk, compute the next one and write that.
                request.measured(computed - asked - spent + 2 * writing)
                stop = request.made
                for i, run in list(going.items()):
                    where, options = (job.federation, job.cohorts[i]), run.config["options"]
                    asked_for = options.get("deadline"), options.get("show", ())
                    new = records(of_runs[i], *where, spent, job.client_devices, len(runs), *asked_for)
                    new[-1]["seconds"]["write"] = wrote[i]
                    if (guaranteed := job.accounting[i]) and "accuracy" in new[-1]:
                        new[-1]["privacy"] = cast(Privacy, guaranteed(new[-1]["round"]))
                    spent, begun = 0.0, time.perf_counter()
                    try:
                        _write(job, i, run, of_runs[i], new, stop)
                        wrote[i] = time.perf_counter() - begun
                    except JaxflError as error:
                        ended[i] = error
                    if i in ended or stops(run.config, run.metrics):
                        del going[i]
                seconds = job.programs.seconds  # what joining has compiled is in its record
                of_runs.clear()  # the next rounds need the memory
                if not going:
                    break
                first = next(iter(going.values()))
                if stop and first.done < job.rounds:
                    raise Interrupted(
                        f"{first.variant.label} has stopped after round {first.done} of {job.rounds}"
                        f"{reason(stop)}; continue with `jaxfl resume {shlex.quote(str(first.folder))}`.",
                        stop,
                    )
                asked = time.perf_counter()
                writing = max(writing, asked - computed)
    except JaxflError as error:
        return dict.fromkeys(going, error) | ended
    return ended


def _profiled(chunks: Iterator[dict[int, Chunk]], folder: Path, at: int) -> Iterator[dict[int, Chunk]]:
    """Yield the same chunks; number `at`, from 0, is traced into a folder, including its evaluation.

    The first one compiles, so a later one shows the steady state. The trace is for TensorBoard's profile
    plugin, XProf or Perfetto.
    """
    files.writes(Path.mkdir)(folder, parents=True, exist_ok=True)
    yield from itertools.islice(chunks, at)
    on_first_process(jax.profiler.start_trace)(folder)
    try:
        traced = list(itertools.islice(chunks, 1))
    finally:
        on_first_process(jax.profiler.stop_trace)()
    yield from traced
    yield from chunks


def _write(job: Job, i: int, run: Run, chunk: Chunk, new: list[Round], stop: int) -> None:
    """Write down a chunk of the job's run number `i`, and a checkpoint if one is due; then tell watchers.

    Raises:
      JaxflError: if the run has diverged.
    """
    ends = run.done + len(new) == job.rounds or stops(run.config, [*run.metrics, *new])
    diverged = chunk.diverged
    if ends and np.concatenate(job.federation.newcomers).any() and not diverged:
        diverged = _let_join(job, i, chunk.state, run.done + len(new) - 1, new[-1])
    _record(job, run, new)
    due = stop or ends or run.done % (run.machine.checkpoint_every or job.eval_every) == 0
    if due and not diverged:
        # Before the checkpoint: a resume writes nothing of earlier rounds.
        for kind, arrays in _about_clients(job, chunk.state).items():
            store.write_about_clients(run.folder, kind, run.done, job.federation.fetch(arrays))
        mark = store.fingerprint(run.config)
        checkpoint.save(run.folder, run.done, chunk.state, mark, run.machine.keep_checkpoints)
    run.watch(new)  # last: a log may load the models that its records are about
    if diverged:
        raise _divergence(run, *diverged)


def _record(job: Job, run: Run, new: list[Round]) -> None:
    """Append new records to the run's metrics, the first with its code and devices if these have changed."""
    require_owned(run.folder)
    if run.done == run.taken_over:
        new[0]["code"] = run.code
        store.keep_code(run.folder, run.done + 1, run.code)
    if job.federation.devices != _devices(run.config, run.metrics):
        new[0]["devices"] = job.federation.devices
    store.append_metrics(run.folder, new)
    run.metrics.extend(new)


def _divergence(run: Run, round_: int, client: int, what: str) -> JaxflError:
    """Return the error of a run whose loss or predictions are not finite, see `Chunk.diverged`."""
    own = ", ".join(Path(file).name for file in run.code["files"])
    return JaxflError(
        f"{run.variant.label}: the {what} of client {client} {'is' if what == 'loss' else 'are'} not "
        f"finite in round {round_ + 1}; lower --lr (now {run.variant.config.lr}){_changed(run.variant)}"
        f"{own and f', or see what {own} computes'}{f'; earlier rounds are in {run.folder}' * (round_ > 0)}."
    )


def _changed(variant: Variant) -> str:
    """Name the method's floats, apart from lr, that are not the defaults: one of them may be the cause."""
    config = variant.config
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    changed = [
        f"--{name.replace('_', '-')} (now {getattr(config, name)})"
        for name in floats(type(config))
        if name != "lr" and getattr(config, name) not in (None, defaults[name])
    ]
    return f", or look at {', '.join(changed)}" if changed else ""


def _devices(config: Config, metrics: list[Round]) -> int | None:
    """Return how many devices shared the clients in the last of some rounds; None if unknown."""
    begun_on = config["begun_on"] if "begun_on" in config else config["options"].get("devices")
    return next((record["devices"] for record in reversed(metrics) if "devices" in record), begun_on)


def _let_join(job: Job, i: int, state, last: int, record: Round) -> tuple[int, int, str] | None:
    """Add what newcomers get to the record of a run's last round; return what is not finite, as a `Chunk`."""
    begun, (_, compiled) = time.perf_counter(), compilation(job.programs)
    report, cohort = join(job, i, state, last), newcomers_in_places(job, last)
    diverged = first_infinite(report, cohort, job.federation)
    if not diverged:
        record["newcomers"] = joined(report, cohort, job.federation)
    compiling = compilation(job.programs)[1] - compiled
    record["seconds"]["compile"] += compiling
    record["seconds"]["evaluate"] += time.perf_counter() - begun - compiling
    return diverged


def _about_clients(job: Job, state) -> dict[str, dict]:
    """Return what a method knows about clients, by the kinds of `store.ABOUT_CLIENTS` and by name."""
    known = {}
    if job.programs.algorithm.matrices:
        known["matrices"] = job.programs.algorithm.matrices(state)
    if job.programs.algorithm.embeddings:
        names = (model.name for model in job.federation.models)
        known["embeddings"] = dict(zip(names, job.programs.algorithm.embeddings(state), strict=True))
    return known


def _conclude(job: Job, run: Run, compilations: int, before: int, since: float | None) -> Result:
    """Write the result and the pictures of a run whose rounds are done, and return the result.

    `compilations` programs were compiled for it, and other processes have computed the rounds `before`; all
    else is as in `proceed`.
    """
    from jaxfl.data.pictures import draw  # here, so that the first rounds do not wait for it
    from jaxfl.results import curves, drawings

    folder, metrics, method = run.folder, run.metrics, run.variant.method
    summary, rows = result(run.config, metrics, compilations), job.federation.rows_per_class()
    words = summary["class_names"]
    pictures = {
        "partition.png": partial(draw, rows, run.config["options"]["partition"], words),
        "curves.png": partial(curves.draw_curves, {run.variant.label: [metrics]}),
        "loss.png": partial(curves.draw_loss, {run.variant.label: [metrics]}),
        "architectures.png": partial(curves.draw_architectures, {run.variant.label: [metrics]}),
        "findings.png": partial(drawings.draw_findings, metrics),
    }
    if summary["findings"]:
        pictures |= {name: partial(of, summary["findings"]) for name, of in method.pictures.items()}
    ends = np.cumsum([len(group.id) for group in job.federation.groups])[:-1]
    of_groups = np.split(rows, ends)  # by the labels of the data, not by outputs
    counts = {group.model.name: own for group, own in zip(job.federation.groups, of_groups, strict=True)}
    if job.programs.algorithm.matrices:
        matrices = store.read_about_clients(folder, "matrices", run.done)
        pictures["matrices.png"] = partial(drawings.draw_matrices, matrices, rows)
    if job.programs.algorithm.embeddings:
        embeddings = store.read_about_clients(folder, "embeddings", run.done)
        pictures["embeddings.png"] = partial(drawings.draw_embeddings, embeddings, counts, words)
    if job.federation.links.size:
        named = [group.model.name for group in job.federation.groups for _ in group.id]
        pictures["topology.png"] = partial(drawings.draw_topology, np.asarray(job.federation.links), named)
    texts = {}
    if counts_of_classes := summary["accuracy"].get(CONFUSION):
        tables = {run.variant.label: counts_of_classes}
        pictures["confusion.png"] = partial(drawings.draw_confusion, tables, words)
        texts["confusion.csv"] = confusion_csv(tables, words)
    files.write_pictures(folder, pictures)
    names = store.read_partition(folder).names
    table = clients.as_csv(metrics, job.federation, names, job.client_devices)
    files.write_texts(folder, texts | {"clients.csv": table})
    if since is not None:
        timed = itertools.chain(*(record.get("seconds", {}).values() for record in metrics[before:]))
        summary["seconds"]["rest"] = time.perf_counter() - since - sum(timed)
    files.write_json(folder / store.RESULT, summary)
    return summary
