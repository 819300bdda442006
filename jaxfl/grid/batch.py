"""Several runs of a comparison as one program, if they differ only in their seeds and rates.

Repeated seeds are such runs, and so is a grid over learning rates or a method's own numbers. Each keeps its
own folder, as if it ran alone. They run one after another where a joint program would not fit in memory, or
where part of a round is outside of the program.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxfl.errors import JaxflError, without_traceback
from jaxfl.folder import store
from jaxfl.folder.owner import Taken, owned
from jaxfl.grid.plan import Planned, Runs, require_own
from jaxfl.runs.engine_job import fit_to_machine, form_of_state, job_of, most_together
from jaxfl.runs.init_from import start_from
from jaxfl.runs.interrupt import Interrupted, deferred
from jaxfl.runs.loop import compilation, proceed
from jaxfl.runs.observer import ONLY_WARNINGS
from jaxfl.runs.prepare import Data, prepare
from jaxfl.runs.run import begin, reopen


def batches(runs: Runs) -> list[Runs]:
    """Group runs that share their programs, rounds done and all options except the seed."""
    found = {}
    for folder, run in runs.items():
        alike = run.variant.programs.rounds, run.setup.replace(seed=0), run.done
        found.setdefault(alike, {})[folder] = run
    return list(found.values())


def refused(parts: Sequence[Runs], data: Data) -> dict[Path, JaxflError]:
    """Find the runs that cannot begin, before any other run is trained.

    Args:
      parts: from `batches`.
      data: from `prepare` with their setup.

    Returns:
      The error of every new run whose method refuses the data or its options when it makes its state. What a
      method finds wrong only in its rounds ends the run at its turn.
    """
    errors = {}
    for runs in parts:
        (variant, setup, _), *_ = runs.values()
        if any(store.holds(folder, store.CONFIG) for folder in runs):
            continue
        try:
            form_of_state(variant, setup, data.federation)
        except JaxflError as error:
            errors |= dict.fromkeys(runs, without_traceback(error))
    return errors


def run_batch(
    runs: Runs,
    earlier: Sequence[Runs],
    data: Data,
    watch: Callable[[Path, list[dict]], None],
    say: Callable[[str], None],
) -> dict[Path, JaxflError]:
    """Start or continue a batch, and run it to its end.

    Args:
      runs: one of `batches`, without finished runs.
      earlier: the batches before it.
      data: from `prepare` with the same setup, for runs that have not begun.
      watch: called with a run's folder and new metrics.
      say: called with a sentence on how several runs are run, and why.

    Returns:
      The error of every run that does not finish; `Taken` if another process owns the run.

    Raises:
      Interrupted: if stopped early, after the rounds in progress are saved; see `jaxfl.runs.interrupt`.
    """
    (variant, given, _), *_ = runs.values()
    begun = [folder for folder in runs if store.holds(folder, store.CONFIG)]
    spent = compilation(variant.programs)
    try:
        if begun:
            data = start_from(prepare(given, begun[0], data.source), given, begun[0], ONLY_WARNINGS)
        setup, data = fit_to_machine(variant, given, data)
        fitting = {
            folder: run._replace(setup=setup.replace(seed=run.setup.run.seed)) for folder, run in runs.items()
        }
        size, how = _together(list(fitting.values()), data)
    except JaxflError as error:
        return dict.fromkeys(runs, without_traceback(error))
    apart = _apart(runs, earlier)
    if len(runs) > 1 or apart:
        labels = " ".join(dict.fromkeys(run.variant.label for run in runs.values()))
        number = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
        say(f"{labels}: {number} {how}{apart}")
    failures = {}
    with deferred() as request:
        for first in range(0, len(runs), size):
            if code := request.made:
                raise Interrupted("", code)
            with contextlib.ExitStack() as held:
                ready = []
                for folder, run in itertools.islice(fitting.items(), first, first + size):
                    try:
                        held.enter_context(owned(folder))
                        open_ = _opening(folder, folder in begun, runs[folder])
                        if open_:
                            ready.append(open_(folder, run.variant, run.setup, data, partial(watch, folder)))
                    except JaxflError as error:
                        failures[folder] = without_traceback(error)
                # A damaged checkpoint may have set some runs further back than others.
                ready.sort(key=lambda run: run.done)
                for _, alike in itertools.groupby(ready, key=lambda run: run.done):
                    alike = list(alike)
                    job = job_of([fitting[run.folder][:2] for run in alike], data.federation)
                    outcomes = proceed(job, alike, data.client_devices, spent)
                    for run, outcome in zip(alike, outcomes, strict=True):
                        if isinstance(outcome, JaxflError):
                            failures[run.folder] = without_traceback(outcome)
                    spent = compilation(variant.programs)
    return failures


def _opening(folder: Path, begun: bool, planned: Planned) -> Callable | None:
    """Return the function that opens a run for its new owner; None if another process has finished it.

    Raises:
      Taken: if another process has begun it meanwhile, perhaps with other devices, and left it.
      JaxflError: if another process has begun another run there.
    """
    if not begun:
        require_own(folder, planned)
    if store.holds(folder, store.RESULT):
        return None
    if store.holds(folder, store.CONFIG) > begun:
        raise Taken(f"Another process has meanwhile begun {folder}; repeat the command to continue it.")
    return reopen if begun else begin


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


def _apart(runs: Runs, earlier: Sequence[Runs]) -> str:
    """Say what keeps a batch from sharing a program with an earlier batch of its method."""
    own = next(iter(runs.values()))
    for batch in earlier:
        other = next(iter(batch.values()))
        if other.variant.method == own.variant.method:
            ours, theirs = _shared_by(own), _shared_by(other)
            chosen = [name for name in ours if ours[name] is not None and theirs[name] is not None]
            names = [name for name in chosen if ours[name] != theirs[name]]
            return f" (other {', '.join(names)} than {other.variant.label})" if names else ""
    return ""


def _shared_by(run: Planned) -> dict[str, Any]:
    """Return what runs of one program share: all options except seed and rates, None if not chosen yet."""
    without_rates = jax.tree.map(lambda rate: None, run.variant.config)
    return {"number of rounds done": run.done} | run.setup.replace(seed=0).flat() | vars(without_rates)
