"""One run, from its options to its result: begun, repeated, or resumed from only its folder."""

from collections.abc import Callable
from pathlib import Path

from jaxfl.config.command_options import Continuation
from jaxfl.config.setup import Setup
from jaxfl.errors import JaxflError
from jaxfl.folder import code, store
from jaxfl.folder.config import described, restore, restore_setup
from jaxfl.folder.owner import owned
from jaxfl.folder.records import Result
from jaxfl.folder.variant import Variant, own_setup, provided
from jaxfl.grid.execute import Watched, execute
from jaxfl.grid.plan import Planned
from jaxfl.machine.processes import agree
from jaxfl.runs.interrupt import limited
from jaxfl.runs.log import Log
from jaxfl.runs.observer import Observer, Terms


def run(
    variant: Variant,
    setup: Setup,
    folder: Path | None,
    terms: Terms,
    *,
    profile: Path | None = None,
    saved: Path | None = None,
) -> tuple[Path, Result]:
    """Train one method; return the folder, and the result, see `jaxfl.results.result.result`.

    `profile` is a folder for a trace of the second chunk of rounds, or of the only one, and `saved` that of a
    run whose partition, links and initial weights are used as they are.

    Raises:
      JaxflError: if the folder is not free, the data are not available or do not fit, the method refuses
        them or its options, or the loss is no longer finite. What was computed before stays in the folder;
        if nothing was, the folder is removed.
      Interrupted: if stopped early, after the rounds in progress are saved; see `jaxfl.runs.interrupt`.
    """
    follow, setup = Log(terms.log), provided(setup, [variant])
    folder = folder or store.free_folder(variant.method.name, setup.data.dataset)
    store.check_free(folder)
    agree("options", (described(variant, setup), folder.absolute(), profile))
    with limited(terms.max_seconds), follow, owned(folder):
        planned = Planned(variant, setup)
        return folder, _alone(folder, planned, follow, terms.observer, saved=saved, profile=profile)


def repeat(
    old: Path,
    folder: Path | None,
    terms: Terms,
    *,
    seed: int | None = None,
    variant: Variant | None = None,
    profile: Path | None = None,
) -> tuple[Path, Result]:
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
        terms.observer.warned(
            f"{files[0]} has changed since {old} was computed (a copy from then is in {old}/code); this run "
            "uses the new version."
        )
    return run(variant, setup, folder, terms, saved=old, profile=profile)


def resume(folder: Path, changed: Continuation, terms: Terms) -> Result:
    """Continue a run from its newest readable checkpoint up to which the metrics are complete.

    A finished run returns its result at once. If more rounds are asked for, it goes on, even past the target
    at which it stopped.

    Raises:
      JaxflError: if the folder holds no run, another process owns it, its code has changed, its method cannot
        be found again, none of its checkpoints can be read, one belongs to another configuration, or the run
        cannot become as long as asked for.
      Interrupted: if stopped early, after the rounds in progress are saved; see `jaxfl.runs.interrupt`.
    """
    rounds, data_dir = changed.rounds, changed.data_dir and changed.data_dir.absolute()
    agree("options", (rounds, changed.devices, data_dir, terms.changed_code, folder.absolute()))
    follow, observer, config = Log(terms.log), terms.observer, store.read_config(folder)

    def finished():
        if not store.holds(folder, store.RESULT):
            return None
        found, metrics = store.read_finished(folder)
        if rounds not in (None, found["rounds"]):
            return None
        _watch(config["label"], config["options"]["seed"], follow, observer)(folder, metrics, kept=True)
        return found

    with follow, limited(terms.max_seconds):
        if data_dir is None and (found := finished()):  # readable without write access
            return found
        with owned(folder):
            config = store.read_config(folder)  # its owner may just have ended or lengthened it
            if found := finished():
                if data_dir is not None:
                    store.change(folder, "data_dir", str(data_dir))
                return found
            then = code.latest(folder, config, store.read_metrics(folder))
            if not terms.changed_code:
                code.refuse_changed(folder, then)
            setup, variant = restore(folder, config, terms.changed_code)
            before, setup = setup.run.rounds, continued(setup, changed)
            if setup.run.rounds < before:
                raise JaxflError(
                    f"{folder} is a run of {before} rounds; --rounds {rounds} cannot make it shorter."
                )
            if not code.same_package(then):
                observer.warned(
                    f"jaxfl has changed since {folder} was computed; its result says from which round on "
                    "this version computes it."
                )
            return _alone(folder, Planned(variant, setup, further=rounds is not None), follow, observer)


def continued(setup: Setup, changed: Continuation) -> Setup:
    """Return the options of a run or a comparison from now on."""
    return setup.replace(**{name: value for name, value in vars(changed).items() if value is not None})


def _alone(folder: Path, entry: Planned, follow: Log, observer: Observer, **how) -> Result:
    """Run a run that is alone to its end, and return its result.

    Raises:
      JaxflError: what `execute` says of it.
    """
    watch = _watch(entry.variant.label, entry.setup.run.seed, follow, observer)
    errors = execute({folder: entry}, Watched(watch, observer), **how)
    for error in errors.values():
        raise error
    return store.read_finished(folder)[0]


def _watch(label: str, seed: int, follow: Log, observer: Observer) -> Callable[..., None]:
    """Return what tells of a run's new metrics, see `Watched`."""

    def watch(folder, new, kept=False):
        (observer.kept if kept else observer.progressed)(f"{label}, seed {seed}", new)
        follow(folder, new)

    return watch
