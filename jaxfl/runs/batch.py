"""Several runs as one program: those of a comparison that differ in their seeds and in rates alone.

Repeated seeds are such runs, and so is a grid over learning rates or a method's own numbers. Each keeps its
own folder, as if it ran alone. They run one after another where the program of them all would not fit in
memory, and where a part of a round is outside of it.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax

from jaxfl import memory
from jaxfl.cohorts import join
from jaxfl.engine import compiled_together
from jaxfl.errors import JaxflError
from jaxfl.experiment import Data, Setup, prepare
from jaxfl.runs import store
from jaxfl.runs.run import Chosen, begin, cohorts_of, compilation, fitted, proceed, reopen

Runs = dict[Path, tuple[Chosen, Setup]]  # by their folders


def batches(runs: Runs) -> list[Runs]:
    """Divide runs into those that share their programs and all options but the seed, in their order."""
    found = {}
    for folder, (chosen, setup) in runs.items():
        alike = chosen.programs.rounds, dataclasses.replace(setup, seed=0)
        found.setdefault(alike, {})[folder] = chosen, setup
    return list(found.values())


def run_batch(
    runs: Runs, data: Data, watch: Callable[[str, int, list[dict]], None], say: Callable[[str], None]
) -> list[str]:
    """Start or continue a batch, and run it to its end.

    Args:
      runs: one of `batches`, none of them finished.
      data: from `prepare` with the same setup, for runs that have not begun.
      watch: called with label, seed and new metrics.
      say: called with a sentence on how several runs are run, and why.

    Returns:
      For every run that does not finish the sentence that says why not.

    Raises:
      Interrupted: after a Ctrl-C, when the rounds in progress are saved.
    """
    chosen, setup = next(iter(runs.values()))
    begun = [folder for folder in runs if store.holds(folder, store.CONFIG)]
    spent = compilation(chosen)
    try:
        if begun:
            data = prepare(setup, begun[0] / store.PARTITION)
        setup, data = fitted(chosen, setup, data)
        runs = {
            folder: (chosen, dataclasses.replace(setup, seed=its_own.seed))
            for folder, (chosen, its_own) in runs.items()
        }
        size, how = _together(runs, data)
    except JaxflError as error:
        return [str(error)] * len(runs)
    if len(runs) > 1:
        say(f"{' '.join(dict.fromkeys(chosen.label for chosen, _ in runs.values()))}: {len(runs)} runs {how}")
    failures = []
    for first in range(0, len(runs), size):
        ready = []
        for folder, (chosen, setup) in itertools.islice(runs.items(), first, first + size):
            open_ = reopen if folder in begun else begin
            try:
                ready.append(open_(folder, chosen, setup, data, partial(watch, chosen.label, setup.seed)))
            except JaxflError as error:
                failures.append(str(error))
        ready.sort(key=lambda run: run.done)
        for _, alike in itertools.groupby(ready, key=lambda run: run.done):
            outcomes = proceed(list(alike), spent)
            failures += [str(outcome) for outcome in outcomes if isinstance(outcome, JaxflError)]
            spent = compilation(chosen)
    return failures


def _together(runs: Runs, data: Data) -> tuple[int, str]:
    """How many of some runs are one program, and that in words, with the reason if these are not all."""
    chosen, setup = next(iter(runs.values()))
    if chosen.programs.host:
        return 1, "one after another, because the server's step is outside of the compiled program"
    cohorts = [cohorts_of(its_own, data.federation) for _, its_own in runs.values()]

    def needed(number):
        together = compiled_together(
            chosen.programs,
            data.federation,
            chosen.config,
            join(cohorts[:number], data.federation),
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
