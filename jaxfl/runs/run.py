"""Runs, from configuration to result: simulate, write down, save. One alone, or several as one program."""

import contextlib
import dataclasses
import functools
import platform
import subprocess
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl import registry
from jaxfl.config import choices
from jaxfl.config.options import Unread, alternatives, check
from jaxfl.core import memory
from jaxfl.core.cohorts import align, balance, draw_cohorts
from jaxfl.core.engine import Chunk, Programs, compiled, programs, simulate, simulate_together, traced
from jaxfl.core.protocol import Method
from jaxfl.core.training import Training
from jaxfl.data import partition as partitions
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.machine.processes import agree, by_first
from jaxfl.runs import checkpoint, store
from jaxfl.runs.interrupt import Interrupted, deferred
from jaxfl.runs.plot import draw_assemblies, draw_curves, draw_findings, draw_matrices
from jaxfl.runs.prepare import Data, Setup, absolute, prepare
from jaxfl.runs.profile import profiled
from jaxfl.runs.result import records, result


class Chosen(NamedTuple):
    """A method with its options, ready to run.

    Args:
      name: what finds the method again: ``fedper``, ``/path/to/my.py:my_method``, or None for an object.
      label: in tables: the method's name, and the options that tell it from others.
      method: the method.
      config: its options.
      programs: its compiled programs, shared by runs with other seeds or other rates.
    """

    name: str | None
    label: str
    method: Method
    config: Any
    programs: Programs


class Ready(NamedTuple):
    """A run whose folder is there and that can go on.

    Args:
      folder: of the run.
      config: that the folder holds.
      chosen: the method.
      setup: the options of the run.
      data: from `prepare` with the same setup.
      watch: called with the metrics of every round as they come.
      metrics: of all rounds so far; the list grows as the run goes on.
      state: after these rounds; None before the first one.
      made: the outermost folder that was made for it, None if it had begun before.
    """

    folder: Path
    config: dict
    chosen: Chosen
    setup: Setup
    data: Data
    watch: Callable
    metrics: list[dict]
    state: Any = None
    made: Path | None = None

    @property
    def done(self) -> int:
        """Rounds so far."""
        return len(self.metrics)


def choose(choice: str | None, method: Method, config: Any) -> Chosen:
    """Check a method's options, label it and prepare its programs.

    Args:
      choice: as the user named the method, None for an object. Options given in it are in the label, as are
        those of the method's own that are not the default.
      method: what it names.
      config: all options.

    Raises:
      JaxflError: if an option is of another type or out of range.
    """
    check(method.name, config)
    name, given = choices.split(choices.absolute(choice)) if choice else (None, {})
    common = {field.name for field in dataclasses.fields(Training)}
    told = [
        f"{field.name}={str(getattr(config, field.name)).lower()}"
        for field in dataclasses.fields(config)
        if field.name in given or (field.name not in common and getattr(config, field.name) != field.default)
    ]
    return Chosen(name, ",".join([method.name, *told]), method, config, _programs(method.build, config))


def _programs(build: Callable, config: Any) -> Programs:
    """A method's programs: the same for all configurations that differ in rates alone."""
    return _programs_without_rates(build, jax.tree.structure(config))


@functools.lru_cache(maxsize=16)
def _programs_without_rates(build: Callable, options: Any) -> Programs:
    return programs(build(jax.tree.unflatten(options, [Unread()] * options.num_leaves)))


def start(
    folder: Path, chosen: Chosen, setup: Setup, data: Data, watch: Callable, profile: Path | None = None
) -> dict:
    """Begin a new run in a new folder and run it to its end.

    Args:
      folder: must not exist, or be empty.
      chosen: the method.
      setup: the options of the run.
      data: from `prepare` with the same setup.
      watch: called with the metrics of every round as they come.
      profile: a folder for a trace of the second chunk of rounds, or of the only one.

    Returns:
      The result, see `jaxfl.runs.result.result`.

    Raises:
      JaxflError: if the folder is not free, the method refuses the data or its options, or the loss is no
        longer finite. What was computed before stays in the folder; if nothing was, the folder goes.
      Interrupted: after a Ctrl-C, when the rounds in progress are saved.
    """
    agree("options", (described(chosen, setup), folder.absolute(), profile))
    store.check_free(folder)
    spent = compilation(chosen)
    setup, data = fitted(chosen, setup, data)
    return _only(proceed([begin(folder, chosen, setup, data, watch)], spent, profile))


def begin(folder: Path, chosen: Chosen, setup: Setup, data: Data, watch: Callable) -> Ready:
    """Make the folder of a new run.

    Args:
      folder: must not exist, or be empty.
      chosen: the method.
      setup: the options of the run, as `fitted` returns them.
      data: likewise.
      watch: called with the metrics of every round as they come.

    Raises:
      JaxflError: if the folder is not free or cannot be written.
    """
    config = described(chosen, setup) | {
        "models": [
            {"name": model.name, "clients": count, "parameters": model.size, "note": model.note}
            for model, count in data.models
        ],
        "environment": environment(),
    }
    made = _write_folder(folder, config, data)
    return Ready(folder, config, chosen, setup, data, watch, [], made=made)


@by_first
def _write_folder(folder: Path, config: dict, data: Data) -> Path:
    made = store.create(folder)
    with store.replacing(folder / store.CONFIG) as file:  # at its place last: then the folder is a run
        file.write(store.as_json(config))
        partitions.save(data.partition, data.source, folder / store.PARTITION)
    return made


def described(chosen: Chosen, setup: Setup) -> dict:
    """What was chosen, as a run's configuration holds it: paths are absolute."""
    return {
        "method": chosen.name,
        "label": chosen.label,
        "options": _plain(absolute(setup)) | _plain(chosen.config),
    }


def resume(folder: Path, watch: Callable) -> dict:
    """Continue a run from the newest checkpoint that can be read and up to which its metrics are complete.

    A finished run returns its result at once.

    Raises:
      JaxflError: if the folder holds no run, or one whose method cannot be found again, or checkpoints of
        which none can be read, or one is foreign.
      Interrupted: after a Ctrl-C, when the rounds in progress are saved.
    """
    config = store.read_config(folder)
    if store.holds(folder, store.RESULT):
        found, metrics = store.read_finished(folder)
        watch(metrics)
        return found
    setup, chosen = restore(folder, config)
    data = prepare(setup, folder / store.PARTITION)
    return _only(proceed([reopen(folder, chosen, setup, data, watch)], compilation(chosen)))


def reopen(folder: Path, chosen: Chosen, setup: Setup, data: Data, watch: Callable) -> Ready:
    """Take a run that has begun back to its newest checkpoint.

    Args:
      folder: of the run.
      chosen: the method.
      setup: the options of the run, see `restore`.
      data: from `prepare` with its partition.
      watch: called with the metrics of every round as they come.

    Raises:
      JaxflError: if there are checkpoints and none can be read, or one is foreign.
    """
    config = store.read_config(folder)

    def like():
        return jax.eval_shape(
            chosen.programs.init, jax.random.key(setup.seed), data.federation, traced(chosen.config)
        )

    written, mark = len(store.read_metrics(folder)), store.fingerprint(config)
    done, state = checkpoint.newest(folder, written, like, mark)
    agree("checkpoints", done)
    metrics = store.trim(folder, done)
    checkpoint.trim(folder, done, setup.keep_checkpoints)
    state = jax.device_get(state)  # a run of several waits for the others; the device has other work
    return Ready(folder, config, chosen, setup, data, watch, metrics, state)


def _only(outcomes: list[dict | JaxflError]) -> dict:
    (outcome,) = outcomes
    if isinstance(outcome, JaxflError):
        raise outcome
    return outcome


def restore(folder: Path, config: dict) -> tuple[Setup, Chosen]:
    """The setup and the method that a run's configuration describes.

    Raises:
      JaxflError: if they cannot be found again, or their code is in the run folder, which is data.
    """
    if config["method"] is None:
        raise JaxflError(
            f"{folder} was made from Python with a method of its own ({config['label']}); name it as "
            "path/to/file.py:object to resume it."
        )
    options = dict(config["options"])
    _refuse_code_within(folder, [config["method"], *options.values()])
    method, _ = registry.method(config["method"])
    try:
        setup = _restored(Setup, {field.name: options.pop(field.name) for field in dataclasses.fields(Setup)})
        chosen = choose(config["method"], method, _restored(method.config, options))
    except (KeyError, TypeError) as error:
        raise JaxflError(
            f"{folder / store.CONFIG} does not fit this version of jaxfl ({error}); the run was made by "
            f"jaxfl {config['environment'].get('jaxfl')}."
        ) from None
    return setup, chosen._replace(label=config["label"])


def _refuse_code_within(folder: Path, values: Iterable) -> None:
    """A run folder may come from somebody else: what it holds is read, and never executed."""
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    for text in texts:
        path, py, _ = text.rpartition(".py:") if isinstance(text, str) else ("", "", "")
        if py and (store.inside(Path(path + ".py"), folder) or not Path(path).is_absolute()):
            raise JaxflError(
                f"{folder / store.CONFIG} names code in the run folder itself ({text}), which is not "
                "executed; move that file, and name it by its absolute path."
            )


def fitted(chosen: Chosen, setup: Setup, data: Data) -> tuple[Setup, Data]:
    """The setup with what was chosen for this machine, for a resume to use again, and the data with it.

    Where the device's memory asks for it, fewer clients train side by side.
    """
    data = _as_many_as_fit(chosen, setup, data)
    setup = dataclasses.replace(
        setup,
        clients_at_once=data.federation.clients_at_once,
        devices=data.federation.devices,
        convolution=data.models[0][0].convolution,
    )
    return setup, data


def _as_many_as_fit(chosen: Chosen, setup: Setup, data: Data) -> Data:
    federation, limit = data.federation, memory.available(data.federation)
    if limit is None or setup.clients_at_once is not None:
        return data

    def needed(federation):
        cohorts, key = cohorts_of(setup, federation), jax.random.key(setup.seed)
        settings = {"eval_every": setup.eval_every, "score_cohort": setup.score_cohort}
        executables = compiled(chosen.programs, federation, chosen.config, cohorts, key, **settings)
        return max(map(memory.peak_bytes, executables))

    fitting = memory.as_many_as_fit(federation, needed, limit)
    if fitting.clients_at_once < federation.clients_at_once:
        warnings.warn(
            f"{chosen.label}: {federation.clients_at_once} clients side by side do not fit in a device's "
            f"memory; --clients-at-once is {fitting.clients_at_once}.",
            stacklevel=4,
        )
    return data._replace(federation=fitting)


def cohorts_of(setup: Setup, federation: Federation) -> PerGroup:
    """Who takes part in which round of a run, and in which place: leaves (rounds, k_g)."""
    counts = [len(group.id) for group in federation.groups]
    drawn = draw_cohorts(counts, setup.participation, setup.rounds, setup.seed)
    return balance(drawn, [np.asarray(group.size) for group in federation.groups], federation)


def compilation(chosen: Chosen) -> tuple[int, float]:
    """Programs and seconds of compilation so far: earlier runs may have shared them."""
    return chosen.programs.compilations, chosen.programs.seconds


def proceed(
    runs: Sequence[Ready], spent: tuple[int, float], profile: Path | None = None
) -> list[dict | JaxflError]:
    """Run some runs to their ends, several of them as one program.

    What is compiled counts for the first of them that is there to count it, the seconds of training in equal
    parts for all.

    Args:
      runs: they differ in their seeds and in rates alone, stand at the same round and share their data and
        their programs, see `jaxfl.core.engine.simulate_together`. On a CPU each has the same bits as alone.
      spent: `compilation` before anything was compiled for them.
      profile: a folder for a trace of the second chunk of rounds, or of the only one.

    Returns:
      Of each the result, see `jaxfl.runs.result.result`, or the error that ended it while the others went on:
      its loss is no longer finite, or its folder cannot be written. A method that refuses the data or its
      options ends all. What was computed before stays in the folder; if nothing was, the folder goes.

    Raises:
      Interrupted: after a Ctrl-C, when the rounds in progress are saved.
    """
    compilations, _ = spent
    ended, outcomes = _train(runs, spent, profile), []
    for i, run in enumerate(runs):
        if i in ended:
            outcomes.append(ended[i])
            if run.made and not store.read_metrics(run.folder):
                store.discard(run.folder, run.made)
            continue
        compiled_by_now, _ = compilation(run.chosen)
        try:
            outcomes.append(_conclude(run, compiled_by_now - compilations))
            compilations = compiled_by_now
        except JaxflError as error:
            outcomes.append(error)
    return outcomes


def _train(runs, spent, profile) -> dict[int, JaxflError]:
    """Compute and write down all rounds.

    Returns:
      Of the runs that end early, by their numbers, why.
    """
    chosen, setup, data = runs[0].chosen, runs[0].setup, runs[0].data
    going, ended = dict(enumerate(runs)), {}
    _, seconds = spent
    try:
        cohorts = align([cohorts_of(run.setup, data.federation) for run in runs], data.federation)
        chunks = _chunks(runs, cohorts)
        if profile:
            chunks = profiled(chunks, profile, at=int(setup.rounds > setup.eval_every))
        with memory.explained(data.federation), deferred() as asked:
            for of_runs in chunks:
                stop = asked.to_stop
                for i, run in list(going.items()):
                    _, now = compilation(chosen)
                    new = records(
                        of_runs[i], data.federation, cohorts[i], now - seconds, data.devices, len(runs)
                    )
                    seconds = now
                    try:
                        _write(run, of_runs[i], new, stop)
                    except JaxflError as error:
                        ended[i] = error
                        del going[i]
                of_runs.clear()  # the next rounds need the memory
                if not going:
                    break
                first = next(iter(going.values()))
                if stop and first.done < setup.rounds:
                    raise Interrupted(
                        f"{chosen.label} has stopped after round {first.done} of {setup.rounds}; continue "
                        f"with `jaxfl resume {first.folder}`."
                    )
    except JaxflError as error:
        return dict.fromkeys(going, error) | ended
    return ended


def _chunks(runs, cohorts) -> Iterator[dict[int, Chunk]]:
    """The chunks of all runs, by their numbers. A run alone gets no axis of runs."""
    chosen, setup, federation = runs[0].chosen, runs[0].setup, runs[0].data.federation
    keys = [jax.random.key(run.setup.seed) for run in runs]
    options = {"eval_every": setup.eval_every, "start": runs[0].done, "score_cohort": setup.score_cohort}
    if len(runs) == 1:
        of_run = chosen.programs, federation, chosen.config, cohorts[0], keys[0]
        yield from ({0: chunk} for chunk in simulate(*of_run, state=runs[0].state, **options))
        return
    hypers = [run.chosen.config for run in runs]
    states = [run.state for run in runs] if runs[0].done else None
    of_runs = chosen.programs, federation, hypers, cohorts, keys
    yield from simulate_together(*of_runs, states=states, **options)


def _write(run: Ready, chunk: Chunk, new: list[dict], stop: bool) -> None:
    """Write down a chunk of a run, and a checkpoint where one is due."""
    folder, chosen, setup = run.folder, run.chosen, run.setup
    store.append_metrics(folder, new)
    run.metrics.extend(new)
    run.watch(new)
    if chunk.diverged:
        round_, client = chunk.diverged
        raise JaxflError(
            f"{chosen.label}: the loss or the predictions of client {client} are not finite in round "
            f"{round_ + 1}; lower --lr (now {chosen.config.lr}); what came before is in {folder}."
        )
    if stop or run.done == setup.rounds or run.done % (setup.checkpoint_every or setup.eval_every) == 0:
        if chosen.programs.matrices:  # first: a resume writes nothing of the rounds before its checkpoint
            matrices = jax.device_get(chosen.programs.matrices(chunk.state))
            store.write_matrices(folder, run.done, matrices)
        mark = store.fingerprint(run.config)
        checkpoint.save(folder, run.done, chunk.state, mark, setup.keep_checkpoints)


def _conclude(run: Ready, compilations: int) -> dict:
    """The result of a run whose rounds are done, and its pictures."""
    folder, chosen, metrics = run.folder, run.chosen, run.metrics
    summary = result(run.config, metrics, compilations)
    draw_curves({chosen.label: [metrics]}, folder / "curves.png")
    draw_findings(metrics, folder / "findings.png")
    if "assembled" in (metrics[-1].get("findings") or {}):
        draw_assemblies(metrics[-1]["findings"]["assembled"], folder / "assembled.png")
    if chosen.programs.matrices:
        counts = np.concatenate([group.class_counts for group in run.data.federation.groups])
        draw_matrices(store.read_matrices(folder, run.setup.rounds), counts, folder / "matrices.png")
    store.write_json(folder / store.RESULT, summary)
    return summary


def environment() -> dict:
    """Versions and the device, as a run's folder records them."""
    packages = ("jaxfl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    device = jax.devices()[0]
    return {name: version(name) for name in packages} | {
        "python": platform.python_version(),
        "device": f"{device.platform} {device.device_kind}",
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "git": _revision(),
    }


def _revision() -> str | None:
    """The commit of the checkout that jaxfl runs from, marked if it was changed since; None elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError):
        command = ["git", "--no-optional-locks", "-C", root, *describe]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def _plain(config: Any) -> dict:
    """A dataclass as JSON values; the inverse is `_restored`."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in values.items():
        if isinstance(value, Path):
            values[name] = str(value)
        elif isinstance(value, tuple):
            values[name] = list(value)
    return values


def _restored(cls: type, values: dict) -> Any:
    hints = typing.get_type_hints(cls)
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
        elif isinstance(value, str) and Path in alternatives(hints[name]):
            values[name] = Path(value)
    return cls(**values)
