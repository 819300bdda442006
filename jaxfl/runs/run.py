"""One run, from its options to its result: begun, repeated, or resumed from only its folder."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxfl.config.options import as_path
from jaxfl.config.setup import Setup
from jaxfl.core.job import Job
from jaxfl.errors import JaxflError
from jaxfl.folder import checkpoint, code, store
from jaxfl.folder.config import described, restore, restore_setup
from jaxfl.folder.moved_paths import moved
from jaxfl.folder.owner import owned
from jaxfl.folder.variant import Variant, own_setup, provided
from jaxfl.machine.environment import environment
from jaxfl.machine.processes import agree
from jaxfl.runs.engine_job import fit_to_machine, job_of, saved_state
from jaxfl.runs.init_from import initial_arrays, start_from
from jaxfl.runs.interrupt import limited
from jaxfl.runs.lengthen import lengthen
from jaxfl.runs.log import Log
from jaxfl.runs.loop import Run, compilation, proceed
from jaxfl.runs.observer import ONLY_WARNINGS, Observer
from jaxfl.runs.prepare import Data, images_of, prepare


def run(
    variant: Variant,
    setup: Setup,
    folder: Path | None = None,
    *,
    log: Sequence[str | Callable] = (),
    profile: Path | None = None,
    saved: Path | None = None,
    max_seconds: float | None = None,
    observer: Observer = ONLY_WARNINGS,
) -> tuple[Path, dict]:
    """Train one method.

    Args:
      variant: the method.
      setup: the run's options.
      folder: folder for its results; by default runs/NAME-DATASET.
      log: further destinations of the metrics, see `Log`.
      profile: folder for a trace of the second chunk of rounds, or of the only one.
      saved: folder of a run whose partition, links and initial weights are used as they are.
      max_seconds: time limit in seconds; the rounds done are saved, see `Interrupted`.
      observer: callbacks for progress reports.

    Returns:
      The folder, and the result, see `jaxfl.results.result.result`.

    Raises:
      JaxflError: if the folder is not free, the data are not available or do not fit, the method refuses
        them or its options, or the loss is no longer finite. What was computed before stays in the folder;
        if nothing was, the folder is removed.
      Interrupted: if stopped early, after the rounds in progress are saved; see `jaxfl.runs.interrupt`.
    """
    since, follow = time.perf_counter(), Log(log)
    setup = provided(setup, [variant])
    folder = folder or store.free_folder(variant.method.name, setup.data.dataset)
    store.check_free(folder)
    agree("options", (described(variant, setup), folder.absolute(), profile))

    def watch(new):
        observer.progressed(f"{variant.label}, seed {setup.run.seed}", new)
        follow(folder, new)

    with limited(max_seconds), follow, owned(folder):
        data = prepare(setup, saved)
        observer.prepared(setup, data, 1)
        data = start_from(data, setup, saved, observer)
        spent = compilation(variant.programs)
        job, begun = start(folder, variant, setup, data, watch)
        return folder, _only(proceed(job, [begun], data.client_devices, spent, profile, since))


def repeat(
    old: Path,
    folder: Path | None = None,
    seed: int | None = None,
    variant: Variant | None = None,
    **options,
) -> tuple[Path, dict]:
    """Repeat an earlier run on its partition, perhaps with another seed or method; the rest is as in `run`.

    The user's own files are used as they are now; the observer is warned of the first that has changed.
    """
    config = store.read_config(old)
    if variant is None:
        setup, variant = restore(old, config)
    else:
        setup = own_setup(restore_setup(old, config), variant)
        setup = setup.replace(clients_at_once=None)  # chosen for the method
    setup = setup if seed is None else setup.replace(seed=seed)
    if config.get("beyond_target", False):
        setup = setup.replace(stop_at_target=False, patience=None)
    if files := code.changed(code.latest(old, config, store.read_metrics(old))):
        options.get("observer", ONLY_WARNINGS).warned(
            f"{files[0]} has changed since {old} was computed (a copy from then is in {old}/code); this run "
            "uses the new version."
        )
    return run(variant, setup, folder, saved=old, **options)


def resume(
    folder: Path,
    *,
    rounds: int | None = None,
    devices: int | None = None,
    data_dir: Path | None = None,
    log: Sequence[str | Callable] = (),
    changed_code: bool = False,
    max_seconds: float | None = None,
    observer: Observer = ONLY_WARNINGS,
) -> dict:
    """Continue a run from its newest readable checkpoint up to which the metrics are complete.

    A finished run returns its result at once. If more rounds are asked for, it goes on, even past the target
    at which it stopped.

    Args:
      folder: the run's folder.
      rounds: number of rounds of the whole run; by default unchanged.
      devices: number of devices that share a round's clients from now on; by default unchanged.
      data_dir: where tensorflow-datasets keeps its data from now on; by default unchanged.
      log: further destinations of the metrics, see `Log`.
      changed_code: whether to go on although the user's own files have changed.
      max_seconds: time limit in seconds; the rounds done are saved, see `Interrupted`.
      observer: callbacks for progress reports.

    Raises:
      JaxflError: if the folder holds no run, another process owns it, its code has changed, its method cannot
        be found again, none of its checkpoints can be read, one belongs to another configuration, or the run
        cannot become as long as asked for.
      Interrupted: if stopped early, after the rounds in progress are saved; see `jaxfl.runs.interrupt`.
    """
    since, data_dir = time.perf_counter(), data_dir and as_path(data_dir).absolute()
    agree("options", (rounds, devices, data_dir, changed_code, folder.absolute()))
    follow, config = Log(log), store.read_config(folder)

    def watch(new, tell=observer.progressed):
        tell(f"{config['label']}, seed {config['options']['seed']}", new)
        follow(folder, new)

    def finished():
        if not store.holds(folder, store.RESULT):
            return None
        found, metrics = store.read_finished(folder)
        if rounds not in (None, found["rounds"]):
            return None
        watch(metrics, observer.kept)
        return found

    def keep_data_dir():  # called when nothing has refused to resume
        if data_dir is not None:
            store.change(folder, "data_dir", str(data_dir))

    with follow, limited(max_seconds):
        if data_dir is None and (found := finished()):  # readable without write access
            return found
        with owned(folder):
            config = store.read_config(folder)  # its owner may just have ended or lengthened it
            if found := finished():
                keep_data_dir()
                return found
            then = code.latest(folder, config, store.read_metrics(folder))
            if not changed_code:
                code.refuse_changed(folder, then)
            setup, variant = restore(folder, config, changed_code)
            setup = setup if devices is None else setup.replace(devices=devices)
            setup = setup if data_dir is None else setup.replace(data_dir=data_dir)
            if not code.same_package(then):
                observer.warned(
                    f"jaxfl has changed since {folder} was computed; its result says from which round on "
                    "this version computes it."
                )
            data = start_from(prepare(setup, folder), setup, folder, observer)
            if rounds is not None and (rounds != setup.run.rounds or store.holds(folder, store.RESULT)):
                setup = lengthen(folder, config, variant, setup, data, rounds)
            keep_data_dir()
            observer.prepared(setup, data, 1)
            spent, job = compilation(variant.programs), job_of([(variant, setup)], data.federation)
            begun = reopen(folder, variant, setup, data, watch)
            return _only(proceed(job, [begun], data.client_devices, spent, None, since))


def start(folder: Path, variant: Variant, setup: Setup, data: Data, watch: Callable) -> tuple[Job, Run]:
    """Begin a new run in a new folder, for `proceed`.

    Args:
      folder: new or empty folder.
      variant: the method.
      setup: the run's options.
      data: from `prepare` with the same setup.
      watch: called with the metrics of every round as they come.

    Raises:
      JaxflError: if the folder is not free or cannot be written, or the method cannot run like this, see
        `fit_to_machine`.
    """
    setup, data = fit_to_machine(variant, setup, data)
    return job_of([(variant, setup)], data.federation), begin(folder, variant, setup, data, watch)


def begin(folder: Path, variant: Variant, setup: Setup, data: Data, watch: Callable) -> Run:
    """Make the folder of a new run.

    Args:
      folder: new or empty folder.
      variant: the method.
      setup: the options of the run, from `fit_to_machine`.
      data: the data, from `fit_to_machine`.
      watch: called with the metrics of every round as they come.

    Raises:
      JaxflError: if the folder is not free or cannot be written.
    """
    config = described(variant, setup)
    now = code.present(config)
    agree("code", now)
    config |= {
        "models": [
            {"name": model.name, "clients": count, "parameters": model.size, "note": model.note}
            for model, count in data.models
        ],
        "data": images_of(data),
        "starts": list(data.starts),
        "environment": environment() | {"folder": str(folder.resolve())},
        "code": now,
    }
    store.begin(folder, config, data.partition, data.source, data.federation.links, initial_arrays(data))
    return Run(folder, config, variant, setup.machine, now, watch, [], new=True)


def reopen(folder: Path, variant: Variant, setup: Setup, data: Data, watch: Callable) -> Run:
    """Reopen a run at its newest checkpoint.

    Args:
      folder: the run's folder.
      variant: the method.
      setup: the options of the run, see `restore`.
      data: from `prepare` with its partition.
      watch: called with the metrics of every round as they come.

    Raises:
      JaxflError: if there are checkpoints and none can be read, or one belongs to another configuration.
    """
    config = store.read_config(folder)
    done, state = saved_state(folder, config, variant, setup, data.federation)
    now = code.present(moved(folder, config, code=True))
    agree("checkpoints", done)
    agree("code", now)
    metrics = store.trim(folder, done)
    taken_over = None if code.same(code.latest(folder, config, metrics), now) else done
    if data.federation.devices != config["options"].get("devices"):
        config = store.change(folder, "devices", data.federation.devices)
    checkpoint.trim(folder, done, setup.machine.keep_checkpoints)
    state = jax.device_get(state)  # a run of several waits, while the device has other work
    return Run(folder, config, variant, setup.machine, now, watch, metrics, state, taken_over=taken_over)


def _only(outcomes: list[dict | JaxflError]) -> dict:
    (outcome,) = outcomes
    if isinstance(outcome, JaxflError):
        raise outcome
    return outcome
