"""Several runs as one program: those of a comparison that differ in their seeds and in rates alone.

Repeated seeds are such runs, and so is a grid over learning rates or a method's own numbers. Each keeps its
own folder, as if it ran alone. They run one after another where the program of them all would not fit in
memory, and where a part of a round is outside of it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxfl.core import memory
from jaxfl.core.cohorts import align
from jaxfl.core.engine import compiled_together
from jaxfl.errors import JaxflError
from jaxfl.runs import store
from jaxfl.runs.interrupt import Interrupted, deferred
from jaxfl.runs.prepare import Data, Setup, prepare
from jaxfl.runs.run import Chosen, begin, cohorts_of, compilation, fitted, proceed, reopen


class Unfinished(NamedTuple):
    """A run that is to be started or continued.

    Args:
      chosen: the method.
      setup: the options of the run.
      done: rounds behind which it goes on; 0 for a new one.
    """

    chosen: Chosen
    setup: Setup
    done: int


Runs = dict[Path, Unfinished]  # by their folders


def batches(runs: Runs) -> list[Runs]:
    """Divide runs into those that share their programs, their round and all options but the seed."""
    found = {}
    for folder, run in runs.items():
        alike = run.chosen.programs.rounds, dataclasses.replace(run.setup, seed=0), run.done
        found.setdefault(alike, {})[folder] = run
    return list(found.values())


def run_batch(
    runs: Runs,
    earlier: Sequence[Runs],
    data: Data,
    watch: Callable[[str, int, list[dict]], None],
    say: Callable[[str], None],
) -> list[str]:
    """Start or continue a batch, and run it to its end.

    Args:
      runs: one of `batches`, none of them finished.
      earlier: those before it.
      data: from `prepare` with the same setup, for runs that have not begun.
      watch: called with label, seed and new metrics.
      say: called with a sentence on how several runs are run, and why.

    Returns:
      For every run that does not finish the sentence that says why not.

    Raises:
      Interrupted: after a Ctrl-C, when the rounds in progress are saved.
    """
    (chosen, given, _), *_ = runs.values()
    begun = [folder for folder in runs if store.holds(folder, store.CONFIG)]
    spent = compilation(chosen)
    try:
        if begun:
            data = prepare(given, begun[0] / store.PARTITION)
        setup, data = fitted(chosen, given, data)
        fitting = {
            folder: run._replace(setup=dataclasses.replace(setup, seed=run.setup.seed))
            for folder, run in runs.items()
        }
        size, how = _together(list(fitting.values()), data)
    except JaxflError as error:
        return [str(error)] * len(runs)
    apart = _apart(runs, earlier)
    if len(runs) > 1 or apart:
        labels = " ".join(dict.fromkeys(run.chosen.label for run in runs.values()))
        number = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
        say(f"{labels}: {number} {how}{apart}")
    failures = []
    with deferred() as asked:
        for first in range(0, len(runs), size):
            if asked.to_stop:
                raise Interrupted
            ready = []
            for folder, run in itertools.islice(fitting.items(), first, first + size):
                open_ = reopen if folder in begun else begin
                follow = partial(watch, run.chosen.label, run.setup.seed)
                try:
                    ready.append(open_(folder, run.chosen, run.setup, data, follow))
                except JaxflError as error:
                    failures.append(str(error))
            # A damaged checkpoint may have taken some of them further back.
            ready.sort(key=lambda run: run.done)
            for _, alike in itertools.groupby(ready, key=lambda run: run.done):
                outcomes = proceed(list(alike), spent)
                failures += [str(outcome) for outcome in outcomes if isinstance(outcome, JaxflError)]
                spent = compilation(chosen)
    return failures


def _together(runs: list[Unfinished], data: Data) -> tuple[int, str]:
    """How many of some runs are one program, and that in words, with the reason if these are not all."""
    if len(runs) == 1:
        return 1, "alone"
    chosen, setup, _ = runs[0]
    if chosen.programs.host:
        return 1, "one after another, because the server's step is outside of the compiled program"
    cohorts = [cohorts_of(run.setup, data.federation) for run in runs]

    def needed(number):
        together = compiled_together(
            chosen.programs,
            data.federation,
            chosen.config,
            align(cohorts[:number], data.federation),
            [jax.random.key(setup.seed)] * number,
            eval_every=setup.eval_every,
            score_cohort=setup.score_cohort,
        )
        return memory.peak_bytes(together)

    size = memory.most_that_fit(len(runs), needed, memory.available_to_several(data.federation))
    if size == len(runs):
        return size, "as one program"
    if size == 1:
        return size, "one after another, because two do not fit in memory together"
    return size, f"as programs of {size}, because more do not fit in memory together"


def _apart(runs: Runs, earlier: Sequence[Runs]) -> str:
    """What keeps a batch from being one program with an earlier one of its method, in words."""
    own = next(iter(runs.values()))
    for batch in earlier:
        other = next(iter(batch.values()))
        if other.chosen.method == own.chosen.method:
            pairs = [(name, value, _shared_by(other)[name]) for name, value in _shared_by(own).items()]
            names = [name for name, *pair in pairs if pair[0] != pair[1] and None not in pair]
            return f" (other {', '.join(names)} than {other.chosen.label})" if names else ""
    return ""


def _shared_by(run: Unfinished) -> dict[str, Any]:
    """What runs of one program share: all options but the seed and rates, None where not chosen yet."""
    without_rates = jax.tree.map(lambda rate: None, run.chosen.config)
    return {"round": run.done} | vars(dataclasses.replace(run.setup, seed=0)) | vars(without_rates)
