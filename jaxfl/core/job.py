"""A job of the engine: runs that are one program, and what their rounds are given."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.protocol import Cohort, Slots
from jaxfl.core.rounds import Conditions, Programs
from jaxfl.data.federation import Federation


class Job(NamedTuple):
    """One run, or several that are one program: they differ in their seeds and in rates alone.

    Args:
      programs: of the algorithm; one with a host step takes a single run.
      federation: clients and data.
      configs: of each run the method's configuration.
      cohorts: of each run per group `Slots` with leaves (rounds, k_g), see `draw_cohorts`; those of several
        runs in equally many places, see `align`.
      keys: of each run.
      eval_every: rounds of a chunk.
      score_cohort: whether each round's cohort is scored: before training, right after it, and at the end of
        the round.
      conditions: of each run what its rounds meet; nothing by default.
      on_host: whether what clients have lies in the host's memory, see `jaxfl.core.host_state`; for a single
        run whose method has no host step and no phase before the first round.
    """

    programs: Programs
    federation: Federation
    configs: Sequence[Any]
    cohorts: Sequence[tuple[Slots, ...]]
    keys: Sequence[jax.Array]
    eval_every: int
    score_cohort: bool = False
    conditions: Sequence[Conditions] = ()
    on_host: bool = False

    @property
    def rounds(self) -> int:
        """Of every run."""
        return self.cohorts[0][0].mask.shape[0]


def traced(hyper: Any) -> Any:
    """A configuration, or another tree, with its floats as arrays."""
    return jax.tree.map(lambda rate: jnp.asarray(rate, jnp.result_type(float)), hyper)


def of_rounds(cohorts: tuple[Slots, ...], first: int, end: int) -> Cohort:
    """Rounds first..end-1 as one `Cohort` whose leaves have a leading axis."""
    return Cohort(
        np.arange(first, end, dtype=np.int32),
        jax.tree.map(lambda leaf: leaf[first:end], cohorts),
        rounds=cohorts[0].mask.shape[0],
    )


def conditions_of(job: Job, first: int, end: int) -> Conditions:
    """What rounds first..end-1 meet; of several runs with a leading axis."""

    def of_run(its):
        rate, dropped = jax.tree.map(lambda leaf: leaf[first:end], (its.rate, its.dropped))
        return Conditions(rate, dropped, its.deadline)

    return together(list(map(of_run, job.conditions or [Conditions()] * len(job.keys))))


def together(trees: Sequence[Any], stack: Callable = np.stack) -> Any:
    """Trees of several runs as one with a leading axis; that of a single run as it is."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *leaves: stack(leaves), *trees)
