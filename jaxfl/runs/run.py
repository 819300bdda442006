"""One run, from configuration to result: simulate, write down, save."""

import contextlib
import dataclasses
import functools
import platform
import subprocess
import typing
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl import memory, registry
from jaxfl.cohorts import balance, draw_cohorts
from jaxfl.data import partition as partitions
from jaxfl.data.federation import Federation
from jaxfl.engine import Programs, compiled, programs, simulate, traced
from jaxfl.errors import JaxflError
from jaxfl.experiment import Data, Setup, absolute, prepare
from jaxfl.options import Unread, alternatives, check
from jaxfl.processes import agree
from jaxfl.runs import checkpoint, store
from jaxfl.runs.plot import draw_assemblies, draw_curves, draw_findings, draw_matrices
from jaxfl.runs.profile import profiled
from jaxfl.runs.result import records, result
from jaxfl.training import Training
from jaxfl.types import Method, PerGroup


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
    name, given = registry.split(registry.absolute(choice)) if choice else (None, {})
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
    """
    agree(described(chosen, setup))
    store.check_free(folder)
    spent = _spent(chosen)
    data = _as_many_as_fit(chosen, setup, data)
    made = store.create(folder)
    setup = dataclasses.replace(  # what was chosen for this machine, for a resume to use again
        setup,
        clients_at_once=data.federation.clients_at_once,
        devices=data.federation.devices,
        convolution=data.models[0][0].convolution,
    )
    config = described(chosen, setup) | {
        "models": [
            {"name": model.name, "clients": count, "parameters": model.size, "note": model.note}
            for model, count in data.models
        ],
        "environment": environment(),
    }
    partitions.save(data.partition, data.source, folder / store.PARTITION)
    store.write_json(folder / store.CONFIG, config)
    try:
        return _continue(folder, config, chosen, setup, data, watch, spent, done=0, profile=profile)
    except JaxflError:
        if not store.read_metrics(folder):
            store.discard(folder, made)
        raise


def described(chosen: Chosen, setup: Setup) -> dict:
    """What was chosen, as a run's configuration holds it: paths are absolute."""
    return {
        "method": chosen.name,
        "label": chosen.label,
        "options": _plain(absolute(setup)) | _plain(chosen.config),
    }


def resume(folder: Path, watch: Callable) -> dict:
    """Continue a run from the last checkpoint up to which its metrics are complete.

    A finished run returns its result at once.

    Raises:
      JaxflError: if the folder holds no run, or one whose method cannot be found again, or a checkpoint is
        damaged or foreign.
    """
    config = store.read_config(folder)
    if store.holds(folder, store.RESULT):
        watch(store.read_metrics(folder))
        return store.read_json(folder / store.RESULT)
    setup, chosen = restore(folder, config)
    data = prepare(setup, folder / store.PARTITION)
    written = len(store.read_metrics(folder))
    done = max((rounds for rounds in checkpoint.saved(folder) if rounds <= written), default=0)
    return _continue(folder, config, chosen, setup, data, watch, _spent(chosen), done)


def restore(folder: Path, config: dict) -> tuple[Setup, Chosen]:
    """The setup and the method that a run's configuration describes."""
    if config["method"] is None:
        raise JaxflError(
            f"{folder} was made from Python with a method of its own ({config['label']}); name it as "
            "path/to/file.py:object to resume it."
        )
    method, _ = registry.method(config["method"])
    options = dict(config["options"])
    try:
        setup = _restored(Setup, {field.name: options.pop(field.name) for field in dataclasses.fields(Setup)})
        chosen = choose(config["method"], method, _restored(method.config, options))
    except (KeyError, TypeError) as error:
        raise JaxflError(
            f"{folder / store.CONFIG} does not fit this version of jaxfl ({error}); the run was made by "
            f"jaxfl {config['environment']['jaxfl']}."
        ) from None
    return setup, chosen._replace(label=config["label"])


def _as_many_as_fit(chosen: Chosen, setup: Setup, data: Data) -> Data:
    """The same data with fewer clients side by side, where the device's memory asks for it."""
    federation, limit = data.federation, memory.available(data.federation)
    if limit is None or setup.clients_at_once is not None:
        return data

    def needed(federation):
        programs, cohorts = chosen.programs, _cohorts(setup, federation)
        settings = {"eval_every": setup.eval_every, "score_cohort": setup.score_cohort}
        key = jax.random.key(setup.seed)
        runs = compiled(programs, federation, chosen.config, cohorts, key, **settings)
        return max(map(memory.peak_bytes, runs))

    fitting = memory.as_many_as_fit(federation, needed, limit)
    if fitting.clients_at_once < federation.clients_at_once:
        warnings.warn(
            f"{chosen.label}: {federation.clients_at_once} clients side by side do not fit in a device's "
            f"memory; --clients-at-once is {fitting.clients_at_once}.",
            stacklevel=3,
        )
    return data._replace(federation=fitting)


def _cohorts(setup: Setup, federation: Federation) -> PerGroup:
    counts = [len(group.id) for group in federation.groups]
    drawn = draw_cohorts(counts, setup.participation, setup.rounds, setup.seed)
    return balance(drawn, [np.asarray(group.size) for group in federation.groups], federation)


def _spent(chosen: Chosen) -> tuple[int, float]:
    """Programs and seconds of compilation so far: earlier runs may have shared them."""
    return chosen.programs.compilations, chosen.programs.seconds


def _continue(folder, config, chosen, setup, data, watch, spent, done, profile=None) -> dict:
    mark = store.fingerprint(config)
    key = jax.random.key(setup.seed)
    cohorts = _cohorts(setup, data.federation)
    metrics = store.keep_metrics(folder, done)
    checkpoint.keep(folder, done)
    state = None
    if done:
        like = jax.eval_shape(chosen.programs.init, key, data.federation, traced(chosen.config))
        state = checkpoint.load(folder, done, like, mark)
    compilations, seconds = spent
    chunks = simulate(
        chosen.programs,
        data.federation,
        chosen.config,
        cohorts,
        key,
        eval_every=setup.eval_every,
        start=done,
        state=state,
        score_cohort=setup.score_cohort,
    )
    chunks = memory.enough(chunks, data.federation)
    if profile:
        chunks = profiled(chunks, profile, at=int(setup.rounds > setup.eval_every))
    for chunk in chunks:
        now = chosen.programs.seconds
        new = records(chunk, data.federation, cohorts, now - seconds, data.devices)
        seconds = now
        store.append_metrics(folder, new)
        metrics += new
        watch(new)
        if chunk.diverged:
            round_, client = chunk.diverged
            raise JaxflError(
                f"{chosen.label}: the loss or the predictions of client {client} are not finite in round "
                f"{round_ + 1}; lower --lr (now {chosen.config.lr}); what came before is in {folder}."
            )
        rounds = new[-1]["round"]
        if rounds == setup.rounds or rounds % (setup.checkpoint_every or setup.eval_every) == 0:
            if chosen.programs.matrices:  # first: a resume writes nothing of the rounds before its checkpoint
                store.write_matrices(folder, rounds, jax.device_get(chosen.programs.matrices(chunk.state)))
            checkpoint.save(folder, rounds, chunk.state, mark)
    summary = result(config, metrics, chosen.programs.compilations - compilations)
    draw_curves({chosen.label: [metrics]}, folder / "curves.png")
    draw_findings(metrics, folder / "findings.png")
    if "assembled" in (metrics[-1].get("findings") or {}):
        draw_assemblies(metrics[-1]["findings"]["assembled"], folder / "assembled.png")
    if chosen.programs.matrices:
        counts = np.concatenate([group.class_counts for group in data.federation.groups])
        draw_matrices(store.read_matrices(folder, setup.rounds), counts, folder / "matrices.png")
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
