"""A job of the engine: runs that share one program, and the inputs of their rounds."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.protocol import Cohort, Slots
from jaxfl.core.rounds import Conditions, Programs
from jaxfl.data.federation import Federation, PerGroup


class Job(NamedTuple):
    """One run, or several in one program that differ only in seeds and rates."""

    programs: Programs  # of the algorithm; with a host step, the job has a single run
    federation: Federation  # clients and data
    configs: Sequence[Any]  # the method's configuration for each run
    cohorts: Sequence[tuple[Slots, ...]]
    """For each run, per group `Slots` with leaves (rounds, k_g), see `draw_cohorts`. Several runs have
    equally many places, see `align`."""
    keys: Sequence[jax.Array]  # one per run
    eval_every: int  # rounds per chunk
    score_cohort: bool = False  # whether each round's cohort is scored, see `jaxfl.core.rounds.Report`
    likely: bool = False  # whether evaluations tell how likely clients' models find each output, row by row
    conditions: Sequence[Conditions] = ()  # one per run; none by default
    on_host: bool = False
    """Whether clients' state is in host memory, see `jaxfl.core.host_state`; only for a single run whose
    method has no host step and no phase before the first round."""
    accounting: Sequence[Callable[[int], Any] | None] = ()
    """For each run, ``rounds done -> what differential privacy guarantees``, see
    `jaxfl.mechanisms.wire.accounting`; None without."""
    client_devices: PerGroup | None = None
    """How fast the clients are, if known, see `jaxfl.runs.architectures.client_devices`."""

    @property
    def rounds(self) -> int:
        """Number of rounds of every run."""
        return self.cohorts[0][0].mask.shape[0]


def traced(hyper: Any) -> Any:
    """Return a configuration, or another tree, with its floats as arrays."""
    return jax.tree.map(lambda rate: jnp.asarray(rate, jnp.result_type(float)), hyper)


def of_rounds(cohorts: tuple[Slots, ...], first: int, end: int) -> Cohort:
    """Return rounds first..end-1 as one `Cohort` whose leaves have a leading axis."""
    return Cohort(
        np.arange(first, end, dtype=np.int32),
        jax.tree.map(lambda leaf: leaf[first:end], cohorts),
        rounds=cohorts[0].mask.shape[0],
    )


def conditions_of(job: Job, first: int, end: int) -> Conditions:
    """Return the conditions of rounds first..end-1, for several runs with a leading axis."""

    def of_run(conditions):
        rate, dropped = jax.tree.map(lambda leaf: leaf[first:end], (conditions.rate, conditions.dropped))
        return Conditions(rate, dropped, conditions.deadline)

    return together(list(map(of_run, job.conditions or [Conditions()] * len(job.keys))))


def together(trees: Sequence[Any], stack: Callable = np.stack) -> Any:
    """Stack the trees of several runs along a leading axis; leave that of a single run as it is."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *leaves: stack(leaves), *trees)
