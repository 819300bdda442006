"""The driver of runs: of a single one, and of all that a comparison or a study plans.

    planned runs, by partition -> data -> shorter ones made longer -> batches -> rounds

Runs that differ only in their seeds and rates are a batch, which is one program: repeated seeds, a grid of
learning rates or of a method's own numbers. Each computes what it would alone. The runs of a batch follow
each other where a joint program would not fit in memory, or where part of a round is outside of the program.
"""

import contextlib
import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxfl.config.setup import MachineOptions, Setup
from jaxfl.core.engine import begin as begin_compiling
from jaxfl.core.programs import compilers
from jaxfl.errors import JaxflError, without_traceback
from jaxfl.folder import checkpoint, store
from jaxfl.folder.config import restore
from jaxfl.folder.owner import owned
from jaxfl.grid.plan import Planned, Runs, has_finished, is_shorter, require_own, sentences
from jaxfl.results.result import NO_VALIDATION
from jaxfl.runs.engine_job import fit_to_machine, form_of_state, job_of, most_together
from jaxfl.runs.init_from import start_from
from jaxfl.runs.interrupt import Interrupted, deferred
from jaxfl.runs.loop import Run, compilation, proceed
from jaxfl.runs.observer import ONLY_WARNINGS, Observer
from jaxfl.runs.open import begin, extend, reopen, require_same_beginning, rounds_kept
from jaxfl.runs.prepare import Data, load_source, prepare

Errors = dict[Path, JaxflError]  # of runs that do not finish, by folder


class Watched(NamedTuple):
    """Whom runs in progress tell what happens."""

    watch: Callable[..., None]
    """Gets a run's folder and its new metrics, with ``kept=True`` if it had finished."""
    observer: Observer  # callbacks for progress reports


def execute(
    runs: Runs,
    told: Watched,
    *,
    beside: Runs | None = None,
    saved: Path | None = None,
    validates: str | None = None,
    prepared: Callable[[], None] = lambda: None,
    profile: Path | None = None,
) -> Errors:
    """Start or continue runs to their end, partition by partition, since data may not fit together.

    Other processes train the runs `beside` these on the same partitions, of which a begun one has saved its
    own. New runs use the partition, links and initial weights of the run `saved`. `validates` names the
    option that needs validation rows, if one does. `prepared` is called whenever data have been prepared, or
    are not needed, before the runs on them begin. `profile` is for a run that is alone, see
    `jaxfl.runs.loop.proceed`.

    Returns:
      The error of every run that does not finish. A run that fails, and a partition that is impossible, do
      not end the others.

    Raises:
      JaxflError: if the data are not available, or no partition is possible.
      Interrupted: if stopped early, after the rounds in progress are saved; see `jaxfl.runs.interrupt`.
    """
    alone = {"profile": profile, "since": time.perf_counter()} if len(runs) == 1 else {}
    by_partition = defaultdict(dict)
    for folder, entry in runs.items():
        by_partition[entry.setup.partition.partition_seed][folder] = entry
    errors, impossible, source, left = {}, 0, None, len(runs)
    with _between(runs) as heed:
        for number, own in by_partition.items():
            heed()
            if all(has_finished(folder, entry) for folder, entry in own.items()):  # no data are needed
                prepared()
                errors |= _unfinished(own, told)[1]
                left -= len(own)
                continue
            # All have the same federation, except that some methods use no links.
            setup = max((run.setup for run in own.values()), key=lambda each: each.run.topology != "none")
            first, source = source is None, source or load_source(setup)
            data = None  # the last partition's data go: the next ones need the memory
            try:
                place = _begun_on(number, own | (beside or {})) or saved
                data = prepare(setup, place, source)
                if validates:
                    require_validation(validates, any(map(len, data.partition.validation)))
                if first:
                    told.observer.prepared(setup, data, left)
                else:
                    told.observer.said(f"partition_seed {number}")
                data = start_from(data, setup, place, told.observer)
                _lengthen(own, data, told.observer.said)
            except JaxflError as error:  # of this partition; others may be possible
                impossible += 1
                # None is left, or another process may not have failed.
                if impossible == len(by_partition) or jax.process_count() > 1:
                    raise
                unfinished = [folder for folder, entry in own.items() if not has_finished(folder, entry)]
                errors |= dict.fromkeys(unfinished, without_traceback(error))
                told.observer.said(f"Left out: partition_seed {number}: {error}")
                left -= len(own)
                continue
            prepared()
            errors |= _run_batches(own, setup, data, told, heed, **alone)
    return errors


def require_validation(option: str, there: bool) -> None:
    """Refuse an option that chooses by validation rows if clients have none."""
    if not there:
        raise JaxflError(f"{option}: {NO_VALIDATION}")


@contextlib.contextmanager
def _between(runs: Runs) -> Iterator[Callable[[], None]]:
    """Yield a function that stops between two of several runs if asked to; one that is alone ends at once.

    The function raises `Interrupted`, without words.
    """
    if len(runs) == 1:
        yield lambda: None
        return
    with deferred() as request:

        def heed():
            if code := request.made:
                raise Interrupted("", code)

        yield heed


def _begun_on(partition_seed: int, runs: Runs) -> Path | None:
    """Return the folder of a begun run, which has saved the partition of this seed; None if there is none."""
    alike = (folder for folder, run in runs.items() if run.setup.partition.partition_seed == partition_seed)
    return next((folder for folder in alike if store.holds(folder, store.CONFIG)), None)


def _unfinished(runs: Runs, told: Watched) -> tuple[Runs, Errors]:
    """Return the runs that have not finished, as they were begun; watch those that have."""
    errors, unfinished = {}, {}
    for folder, entry in runs.items():
        try:
            require_own(folder, entry)
            if store.holds(folder, store.RESULT):
                told.watch(folder, store.read_finished(folder)[1], kept=True)
            else:
                unfinished[folder] = _as_begun(folder, entry)
        except JaxflError as error:
            errors[folder] = error
    return unfinished, errors


def _lengthen(runs: Runs, data: Data, say: Callable[[str], None]) -> None:
    """Let begun runs go on to as many rounds as are planned: all of them, or none if one cannot.

    Raises:
      JaxflError: if one cannot, see `jaxfl.runs.open`, or another process owns one.
    """
    shorter, asked = {}, set()
    for folder, entry in runs.items():
        if store.holds(folder, store.CONFIG) and is_shorter(folder, entry):
            config = store.read_config(folder)
            setup, rounds = restore(folder, config, changed_code=True)[0], entry.setup.run.rounds
            # Asking takes a second, and seeds change nothing.
            if rounds > setup.run.rounds and entry.variant.label not in asked:
                require_same_beginning(folder, entry.variant, setup, data, rounds)
            asked.add(entry.variant.label)
            shorter[folder] = config, rounds, rounds_kept(folder, setup, rounds)
    for folder, longer in shorter.items():
        with owned(folder):
            extend(folder, *longer)
    if shorter and len(runs) > 1:
        config, rounds, _ = longer
        had = config["options"]["rounds"]
        say(f"{len(shorter)} of {len(runs)} runs had {had} rounds, and go on to {rounds}")


def _run_batches(
    runs: Runs, shared: Setup, data: Data, told: Watched, heed: Callable[[], None], **alone: Any
) -> Errors:
    """Run the unfinished ones of the runs on one partition.

    `shared` is the setup with which the data were prepared; `alone` is what `proceed` takes for a run that is
    alone.
    """
    unfinished, errors = _unfinished(runs, told)
    batches = _batches(unfinished)
    hopeless = _refused(batches, data)
    for sentence in sentences(runs, hopeless):
        told.observer.said(f"Left out: {sentence}")
    errors |= hopeless
    batches = [batch for batch in batches if batch.keys().isdisjoint(hopeless)]
    spent = None
    for batch, after in itertools.zip_longest(batches, batches[1:]):
        heed()
        ahead = functools.cache(partial(_compile_ahead, after, shared, data))

        def watch(*news, ahead=ahead, **more):
            ahead()  # this batch trains, so the compiler is free
            told.watch(*news, **more)

        errors |= _run_batch(batch, shared, data, told._replace(watch=watch), heed, spent, **alone)
        spent = ahead()
    return errors


def _compiled_by_now(runs: Runs) -> tuple[int, float]:
    return compilation(next(iter(runs.values())).variant.programs)


def _compile_ahead(runs: Runs | None, shared: Setup, data: Data) -> tuple[int, float] | None:
    """Begin to compile for the runs that follow, if there are some; return what had been compiled before."""
    if runs is None:
        return None
    spent = _compiled_by_now(runs)
    compilers.submit(_compile, runs, shared, data)
    return spent


def _compile(runs: Runs, shared: Setup, data: Data) -> None:
    """Begin to compile for new runs, in another thread than theirs; what is wrong is said at their turn."""
    if jax.process_count() == 1 and not any(store.holds(folder, store.CONFIG) for folder in runs):
        size, _, data = _fitted(runs, shared, data)
        first = itertools.islice(runs.values(), size)
        begin_compiling(job_of([run[:2] for run in first], data.federation))


def _as_begun(folder: Path, entry: Planned) -> Planned:
    """Return a run with the choices for its machine with which it was begun, unless others are asked for.

    Only what is no default counts as asked for. Its scores stay those with which it was begun.
    """
    if not store.holds(folder, store.CONFIG):
        return entry
    changing = "devices", "data_dir", "checkpoint_every", "keep_checkpoints"
    asked = {name: getattr(entry.setup.machine, name) for name in changing}
    # The command has named the files that it names.
    setup, _ = restore(folder, store.read_config(folder), changed_code=True)
    usual = vars(MachineOptions())
    setup = setup.replace(**{name: value for name, value in asked.items() if value != usual[name]})
    done = max(checkpoint.saved(folder, len(store.read_metrics(folder))), default=0)
    return entry._replace(setup=setup, done=done)


def _batches(runs: Runs) -> list[Runs]:
    """Group runs that share their programs, rounds done and all options except the seed."""
    found = {}
    for folder, run in runs.items():
        alike = run.variant.programs.rounds, run.setup.replace(seed=0), run.done
        found.setdefault(alike, {})[folder] = run
    return list(found.values())


def _refused(batches: Sequence[Runs], data: Data) -> Errors:
    """Find the new runs that cannot begin, before any other run is trained.

    Their method refuses the data or its options when it makes its state. What it finds wrong only in its
    rounds ends the run at its turn.
    """
    errors = {}
    for runs in batches if len(batches) > 1 else ():
        entry = next(iter(runs.values()))
        if any(store.holds(folder, store.CONFIG) for folder in runs):
            continue
        try:
            form_of_state(entry.variant, entry.setup, data.federation)
        except JaxflError as error:
            errors |= dict.fromkeys(runs, without_traceback(error))
    return errors


def _fitted(runs: Runs, shared: Setup, data: Data) -> tuple[int, str, Data]:
    """Return how many runs of a batch are one program, why not more, and their data on this machine.

    Raises:
      JaxflError: if they cannot run.
    """
    first = next(iter(runs.values()))
    begun = [folder for folder in runs if store.holds(folder, store.CONFIG)]
    if begun and first.setup.machine != shared.machine:
        data = start_from(prepare(first.setup, begun[0], data.source), first.setup, begun[0], ONLY_WARNINGS)
    data = fit_to_machine(first.variant, first.setup, data)
    return *_together(list(runs.values()), data), data


def _run_batch(
    runs: Runs,
    shared: Setup,
    data: Data,
    told: Watched,
    heed: Callable[[], None],
    spent: tuple[int, float] | None,
    **alone: Any,
) -> Errors:
    """Run a batch of unfinished runs, one of `_batches`, to its end; see `_run_batches`.

    `spent` is what their programs had compiled before any were begun for them ahead; None if none were.
    """
    spent = spent or _compiled_by_now(runs)
    kept = (lambda error: error) if alone else without_traceback
    try:
        size, how, data = _fitted(runs, shared, data)
    except JaxflError as error:
        return dict.fromkeys(runs, kept(error))
    if len(runs) > 1:
        labels = " ".join(dict.fromkeys(run.variant.label for run in runs.values()))
        told.observer.said(f"{labels}: {len(runs)} runs {how}")
    errors = {}
    for start in range(0, len(runs), size):
        heed()
        with contextlib.ExitStack() as held:
            ready = []
            for folder, run in itertools.islice(runs.items(), start, start + size):
                try:
                    held.enter_context(owned(folder))
                    ready += _opened(folder, run, data, partial(told.watch, folder))
                except JaxflError as error:
                    errors[folder] = kept(error)
            # A damaged checkpoint may have set some runs further back than others.
            ready.sort(key=lambda run: run.done)
            for _, alike in itertools.groupby(ready, key=lambda run: run.done):
                alike = list(alike)
                job = job_of([runs[run.folder][:2] for run in alike], data.federation)
                outcomes = proceed(job, alike, spent, **alone)
                for run, outcome in zip(alike, outcomes, strict=True):
                    if isinstance(outcome, JaxflError):
                        errors[run.folder] = kept(outcome)
                spent = _compiled_by_now(runs)
    return errors


def _opened(folder: Path, entry: Planned, data: Data, watch: Callable) -> list[Run]:
    """Return a run that its owner can go on with; none if another process has finished it meanwhile.

    Raises:
      JaxflError: if another process has begun another run there.
    """
    require_own(folder, entry)
    if store.holds(folder, store.RESULT):
        return []
    open_ = reopen if store.holds(folder, store.CONFIG) else begin
    return [open_(folder, entry.variant, entry.setup, data, watch)]


def _together(runs: list[Planned], data: Data) -> tuple[int, str]:
    """Return how many runs are one program, and the same in words, with the reason if not all are."""
    if len(runs) == 1:
        return 1, "alone"
    if runs[0].variant.programs.algorithm.host:
        return 1, "one after another, because the server's step is outside of the compiled program"
    if runs[0].setup.machine.client_state == "host":
        return 1, "one after another, because --client-state host keeps the clients of only one in memory"
    size = most_together([run[:2] for run in runs], data.federation)
    if size == len(runs):
        return size, "as one program"
    if size == 1:
        return size, "one after another, because two do not fit in memory together"
    return size, f"as programs of {size}, because more do not fit in memory together"
