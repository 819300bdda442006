"""Rounds of a job: a chunk of them as one program, or one at a time where the host takes part in each.

The host takes part where clients' state is in its memory, see `jaxfl.core.host_state`, and where a method has
a host step.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfl.core import flops, host_state
from jaxfl.core.answers import answering, anybody
from jaxfl.core.job import Job, conditions_of, of_rounds, together
from jaxfl.core.protocol import Cohort, Info, messages
from jaxfl.core.rounds import Conditions, Report
from jaxfl.core.score import score_functions
from jaxfl.core.streams import Streams
from jaxfl.data.federation import Federation
from jaxfl.machine.processes import agree


def advance(job: Job, first: int, end: int, keys: Streams, state: Any) -> tuple[Any, list[list[Report]]]:
    """Play rounds first..end-1 of all runs of a job.

    Keys and state have a leading axis if there are several runs. The state is donated, or written in place.

    Returns:
      The state after the rounds, and for each run one report per round, with NumPy leaves.
    """
    if job.on_host:
        return _in_windows(job, first, end, keys, state)
    if job.programs.algorithm.host:
        return _one_by_one(job, first, end, keys, state)
    runs, cohorts = len(job.keys), together([of_rounds(of_run, first, end) for of_run in job.cohorts])
    conditions = conditions_of(job, first, end)
    state, reports = _program(job, keys)(state, job.federation, cohorts, conditions)
    reports = jax.device_get(reports)
    return state, [_per_round(run_of(reports, i, runs)) for i in range(runs)]


def _program(job: Job, keys: Streams) -> Callable:
    """The compiled rounds, ``(state, federation, cohorts, conditions) -> (state, reports)``."""
    rounds = job.programs.rounds if len(job.keys) == 1 else job.programs.rounds_of_runs
    score_key = keys.scores if job.score_cohort else None

    def play(state, federation, cohorts, conditions):
        return rounds(keys.rounds, state, federation, cohorts, score_key, conditions)

    return play


def _in_windows(
    job: Job, first: int, end: int, keys: Streams, state: host_state.OnHost
) -> tuple[host_state.OnHost, list[list[Report]]]:
    """Play rounds of a single run whose clients' state is in the host's memory, see `advance`."""
    rounds = [(cohort_of(job, t), conditions_of(job, t, t + 1)) for t in range(first, end)]
    play = _program(job, keys)
    state, reports = host_state.rounds_in_windows(play, state, job.federation, rounds)
    return state, [[report for of_round in reports for report in _per_round(of_round)]]


def _one_by_one(job: Job, first: int, end: int, keys: Streams, state: Any) -> tuple[Any, list[list[Report]]]:
    """Play rounds of a single run, each followed by its host step, see `advance`."""
    reports = []
    for t in range(first, end):
        cohort, conditions = of_rounds(job.cohorts[0], t, t + 1), conditions_of(job, t, t + 1)
        state, report = one_round(job, keys, state, job.federation, cohort, conditions)
        reports.append(report)
    return state, [reports]


def one_round(
    job: Job, keys: Streams, state: Any, federation: Federation, cohort: Cohort, conditions: Conditions
) -> tuple[Any, Report]:
    """Play one round of a single run, and its host step if the method has one.

    The state is donated. The federation may be a window. Leaves of the cohort and of the conditions have a
    leading axis of length 1.

    Returns:
      The state after the round, and its report with NumPy leaves.
    """
    state, reports = _program(job, keys)(state, federation, cohort, conditions)
    (report,) = _per_round(jax.device_get(reports))
    if job.programs.algorithm.host is None:
        return state, report
    cohort = jax.tree.map(lambda leaf: leaf[0], cohort)
    if report.lost is not None:
        cohort = jax.device_get(answering(federation, cohort, report.lost))
    if not anybody(cohort):
        return state, report
    return _with_host_step(job, job.programs.algorithm.host, keys, state, cohort, report)


def _with_host_step(
    job: Job, host: Callable, keys: Streams, state: Any, cohort: Cohort, report: Report
) -> tuple[Any, Report]:
    """The state after a round's host step, and the round's report with what the step adds to it."""
    programs, federation = job.programs, job.federation
    host_key = jax.random.fold_in(keys.host, cohort.round)
    (state, more), operations = flops.on_host(host, host_key, federation.replicate(state), federation, cohort)
    agree("results of the server's step", state)
    state = federation.place(state)
    counted = report.flops._replace(server=report.flops.server + operations)
    report = report._replace(info=with_host_info(report.info, more), flops=counted)
    if job.score_cohort:  # the round ends only now
        score_key = jax.random.fold_in(keys.scores, cohort.round)
        scores = {"personal": programs.personal(score_key, state, federation, cohort)}
        if more.teacher is not None:
            scores["teacher"] = score_functions(more.teacher, federation, cohort)
        report = report._replace(scores=report.scores | jax.device_get(scores))
    return state, report


def with_host_info(info: Info, more: Info) -> Info:
    """A round's report with what its host step sent and found."""
    more = jax.device_get(more)
    return info._replace(
        up=tuple(_together(*both) for both in zip(info.up, more.up, strict=True)),
        down=tuple(_together(*both) for both in zip(info.down, more.down, strict=True)),
        findings=info.findings | more.findings,
    )


def _together(counts, others):
    """The counts of a group in two parts of a round, see `Info.up`; of one form they keep it."""
    if not isinstance(counts, dict) and not isinstance(others, dict):
        return np.add(counts, others)
    counts, others = messages(counts), messages(others)
    return {size: counts.get(size, 0) + others.get(size, 0) for size in counts | others}


def cohort_of(job: Job, t: int) -> Cohort:
    """The cohort of one round of a single run."""
    return jax.tree.map(lambda leaf: leaf[0], of_rounds(job.cohorts[0], t, t + 1))


def run_of(tree: Any, i: int, runs: int) -> Any:
    """The part of run `i`, the inverse of `together`."""
    return tree if runs == 1 else jax.tree.map(lambda leaf: leaf[i], tree)


def _per_round(reports: Report) -> list[Report]:
    """One report per round of reports whose leaves have a leading axis of rounds."""
    rounds = len(reports.info.loss[0])
    return [jax.tree.map(lambda leaf: leaf[t], reports) for t in range(rounds)]  # noqa: B023
