"""The engine: chunks of rounds, and scores between them. It knows no method.

A chunk of `eval_every` rounds is one program, see `jaxfl.core.rounds`; evaluation, logging and checkpoints
happen between chunks.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import host_state, window
from jaxfl.core.advance import advance, cohort_of, one_round, run_of
from jaxfl.core.cohorts import all_clients, by_client, in_parts, these_clients
from jaxfl.core.job import Job, conditions_of, of_rounds, together, traced
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Cohort
from jaxfl.core.rounds import Conditions, Programs, Report
from jaxfl.core.streams import Streams, streams
from jaxfl.data.federation import Federation, PerGroup


class Chunk(NamedTuple):
    """Results of consecutive rounds of a run.

    Args:
      first: number of the first round, from 0.
      state: after the last round. It is donated to the next chunk, or written in place: copy it to keep it.
      reports: one per round, with NumPy leaves.
      scores: {"personal": ..., "received": ...}: per group `Score` with leaves (n_g, ...), with `Job.likely`
        also "likely", see `jaxfl.core.score.likelihoods`, and with a backdoor "attacked"; None where the
        rounds diverged.
      train_seconds, evaluate_seconds: without compilation of the programs of rounds and scores; everything
        within a round is training, also what a host step compiles.
      diverged: None, or (round, client id, what) of the first "loss" or "predictions" that are not finite;
        `reports` ends there.
      preparation: report of the phase before the first round, in the first chunk of a new run. Leaves (k_g,)
        are (n_g,) here, for all clients in their order, without `idle`.
    """

    first: int
    state: Any
    reports: list[Report]
    scores: dict[str, PerGroup] | None
    train_seconds: float
    evaluate_seconds: float
    diverged: tuple[int, int, str] | None = None
    preparation: Report | None = None


def simulate(job: Job, start: int = 0, states: Sequence[Any] | None = None) -> Iterator[dict[int, Chunk]]:
    """Run a federated method, chunk by chunk. A single run gets no axis of runs.

    Args:
      job: what to run.
      start: first round; a multiple of `eval_every` or the end of the job.
      states: each run's state at `start`; None for new runs. Its arrays may be donated or written in place.

    Yields:
      A `Chunk` for each run by its number, after every `eval_every` rounds and after the last one. A run that
      has diverged is left out from then on; what is still computed for it is discarded. Several runs divide
      the seconds of training equally.
    """
    programs, federation, runs = job.programs, job.federation, len(job.keys)
    if start >= job.rounds:  # a run killed while its pictures were drawn: nothing is left to compile for
        return
    begin(job, start)  # while the initial weights are drawn
    if states is None:
        before, preparations, seconds = zip(*(_begin(job, i) for i in range(runs)), strict=True)
    else:
        before, preparations, seconds = states, [None] * runs, [0.0] * runs
    if runs > 1:  # on the host, where stacking them needs no compilation
        before = federation.fetch(before)
    keys, state = _streams(job), _at_rest(job, together(before))
    del before  # the rounds need the memory
    going = range(runs)
    for first in range(start, job.rounds, job.eval_every):
        end, passed = min(first + job.eval_every, job.rounds), _stopwatch(programs)
        state, reports = advance(job, first, end, keys, state)
        trained, chunks = passed() / runs, {}
        for i in going:
            its_own = (
                state if runs == 1 else federation.place(programs.of_run(state, federation, np.int32(i)))
            )
            score_key = run_of(keys.scores, i, runs)
            chunk = _scored(job, i, score_key, first, its_own, reports[i], trained)
            if first == start:
                spent = seconds[i] + chunk.train_seconds
                chunk = chunk._replace(preparation=preparations[i], train_seconds=spent)
            chunks[i] = chunk
        going = [i for i in going if not chunks[i].diverged]
        yield chunks
        if not going:
            return


def _begin(job: Job, i: int) -> tuple[Any, Report | None, float]:
    """Return a run's state before its first round, and its preparation's report and seconds."""
    programs, federation, key = job.programs, job.federation, job.keys[i]
    if job.on_host:
        hyper, init_key = traced(job.configs[i]), streams(key).init
        return host_state.initial(programs.algorithm.init, init_key, federation, hyper), None, 0.0
    state, report, seconds = initial_state(programs, federation, job.configs[i], key), None, 0.0
    if programs.prepare:
        passed, cohort = _stopwatch(programs), _members(job)
        of_phase = federation.replicate(streams(key).prepare)
        state = federation.place(state)
        state, report = programs.prepare(of_phase, state, federation, cohort)
        report, seconds = _of_clients(jax.device_get(report), cohort, federation), passed()
    # Copied, because an array that occurs twice cannot be donated; one by one, because two states may not fit
    # in memory.
    leaves, structure = jax.tree.flatten(state)
    del state
    for number in range(len(leaves)):
        leaves[number] = _copy(leaves[number])
    return jax.tree.unflatten(structure, leaves), report, seconds


def _copy(leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf, may_alias=False)  # without a program for each shape


def initial_state(programs: Programs, federation: Federation, config: Any, run_key) -> Any:
    """Return a run's state before its preparation and its rounds."""
    return programs.algorithm.init(streams(run_key).init, federation, traced(config))


def _members(job: Job) -> Cohort:
    """Return all clients except newcomers, before the first round."""
    return these_clients(job.federation, [~apart for apart in job.federation.newcomers], job.rounds)


def _streams(job: Job) -> Streams:
    """Return the streams of a run, or of several with a leading axis."""
    of_runs = together([streams(key) for key in job.keys], jnp.stack)
    rounds, scores = job.federation.replicate((of_runs.rounds, of_runs.scores))
    return of_runs._replace(rounds=rounds, scores=scores)


def _at_rest(job: Job, state: Any) -> Any:
    """Put a state where it is kept between rounds: on the devices, or the clients' part in host memory."""
    if not job.on_host:
        return job.federation.place(state, len(job.keys) > 1)
    if isinstance(state, host_state.OnHost):
        return state
    return host_state.taken_over(
        job.programs.algorithm.init, job.keys[0], job.federation, traced(job.configs[0]), state
    )


def _stopwatch(programs: Programs) -> Callable[[], float]:
    """Return a function that returns the seconds since this call, without those of compilation."""
    begun, compiled = time.perf_counter(), programs.seconds
    return lambda: time.perf_counter() - begun - (programs.seconds - compiled)


def _scored(job: Job, i: int, key, first: int, state, reports, train_seconds: float) -> Chunk:
    """Return the `Chunk` of rounds from their state and reports: look for divergence, score all clients."""
    federation = job.federation
    diverged = _first_infinite_loss(reports, first, job.cohorts[i], federation)
    if diverged:
        done = reports[: diverged[0] - first + 1]
        return Chunk(first, host_state.all_of(state), done, None, train_seconds, 0.0, diverged)
    last, passed = first + len(reports) - 1, _stopwatch(job.programs)
    scores = evaluate(job.programs, federation, state, key, last, job.rounds, job.likely)
    diverged = _first_infinite_score(scores["personal"], last, federation)
    scores = None if diverged else scores
    return Chunk(first, host_state.all_of(state), reports, scores, train_seconds, passed(), diverged)


def evaluate(
    programs: Programs,
    federation: Federation,
    state: Any,
    key,
    last: int,
    rounds: int,
    likely: bool = False,
) -> dict[str, PerGroup]:
    """Score all clients after round `last`, see `Chunk.scores`."""
    key, same = jax.random.fold_in(key, last), programs.personal is programs.received

    def scored(*arguments):
        received = programs.received(key, *arguments)
        found = {"received": received}
        found["personal"] = received if same else programs.personal(key, *arguments)
        if likely:
            found["likely"] = programs.likely(key, *arguments)
        if federation.wire and federation.wire.has_backdoor:
            found["attacked"] = programs.attacked(key, *arguments)
        return jax.device_get(found)

    parts = in_parts(federation, last, rounds)
    found = [scored(*host_state.seen(state, federation, part)) for part in parts]

    def of_group(moment, g):
        of_parts = zip(parts, found, strict=True)
        return by_client([(part.groups[g], scores[moment][g]) for part, scores in of_parts])

    def of_all(moment):
        return tuple(of_group(moment, g) for g in range(len(federation.groups)))

    return {moment: of_all(moment) for moment in found[0]}


def join(job: Job, i: int, state: Any, last: int) -> Report:
    """Let all newcomers of run `i` take part in one more round, without the other clients.

    Methods see the extra round with the number of the last one that was run, from 0. The state after that one
    is not changed, and the state after the extra round is discarded.

    Returns:
      The round's report, with NumPy leaves and scores as under `Job.score_cohort`. Places are those of
      `newcomers_in_places`.
    """
    alone, run_keys = job._replace(keys=job.keys[i : i + 1], score_cohort=True), streams(job.keys[i])
    rounds, host, scores = job.federation.replicate(jax.random.split(run_keys.join, 3))
    keys = run_keys._replace(rounds=rounds, host=host, scores=scores)
    state = jax.tree.map(lambda leaf: _copy(leaf) if isinstance(leaf, jax.Array) else leaf, state)
    state = _at_rest(alone, state)
    state, federation, cohort = host_state.seen(state, job.federation, newcomers_in_places(job, last))
    cohort = jax.tree.map(lambda leaf: np.asarray(leaf)[None], cohort)
    rate = job.conditions[i].rate if job.conditions else None
    conditions = Conditions(None if rate is None else rate[last : last + 1])  # no answer is lost here
    _, report = one_round(alone, keys, state, federation, cohort, conditions)
    return report


def newcomers_in_places(job: Job, last: int) -> Cohort:
    """Return the newcomers as the cohort of one more round with the number `last`."""
    return these_clients(job.federation, job.federation.newcomers, job.rounds, last, among_all=True)


def begin(job: Job, start: int = 0) -> None:
    """Start compiling the programs of a job in other threads; nothing runs."""
    for program, shapes in _needed(job, start):
        program.begin(*shapes)


def compiled(job: Job) -> list[jax.stages.Compiled]:
    """Return the executables of a new job, for several runs only that of their rounds; nothing runs."""
    return [program.compile(*shapes) for program, shapes in _needed(job, 0)]


def _needed(job: Job, start: int) -> Iterator[tuple[Program, tuple]]:
    """Yield the programs of a job that begins with round `start`, and the shapes of their arguments.

    For several runs only the program of their rounds. The slowest to compile comes first.
    """
    programs, federation, runs = job.programs, job.federation, len(job.keys)
    key = federation.replicate(together(job.keys, jnp.stack))
    score_key = key if job.score_cohort else None

    def state_of(federation):
        state = jax.eval_shape(programs.algorithm.init, job.keys[0], federation, traced(job.configs[0]))
        axis = () if runs == 1 else (runs,)
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(axis + leaf.shape, leaf.dtype), state)
        return federation.form(state, runs > 1)

    if job.on_host:
        start = min(start, job.rounds - 1)
        of_cohort = window.around(federation, cohort_of(job, start))
        in_rounds = window.round_on(of_cohort, conditions_of(job, start, start + 1))
    else:
        end = min(job.rounds, start + (job.eval_every if programs.algorithm.host is None else 1))
        cohorts = together([of_rounds(of_run, start, end) for of_run in job.cohorts])
        in_rounds = federation, cohorts, conditions_of(job, start, end)
    trained, cohorts, conditions = in_rounds
    program, state = programs.rounds if runs == 1 else programs.rounds_of_runs, state_of(trained)
    yield program, (key, state, trained, cohorts, score_key, conditions)
    if runs > 1:
        return
    part = in_parts(federation, 0, job.rounds)[0]
    scored = state, federation, part
    if job.on_host:
        of_part = window.around(federation, part)
        scored = state_of(of_part.federation), of_part.federation, of_part.cohort
    yield programs.received, (key, *scored)
    yield programs.personal, (key, *scored)
    if programs.prepare and start == 0:
        yield programs.prepare, (key, state, federation, _members(job))


def depends_on_length(job: Job, rounds: int) -> bool:
    """Return whether rounds differ in a run of `rounds` rounds: programs are traced for both lengths."""
    programs, federation, key = job.programs, job.federation, job.keys[0]
    state = jax.eval_shape(programs.algorithm.init, key, federation, traced(job.configs[0]))
    everyone, first = all_clients(federation, job.rounds), of_rounds(job.cohorts[0], 0, 1)
    calls = [(programs.rounds, first), (programs.received, everyone), (programs.personal, everyone)]
    calls += [(programs.prepare, everyone)] if programs.prepare else []

    def text(program, cohort, length):
        return program.jaxpr_text(key, state, federation, dataclasses.replace(cohort, rounds=length))

    return any(text(*call, job.rounds) != text(*call, rounds) for call in calls)


def _of_clients(report: Report, cohort: Cohort, federation: Federation) -> Report:
    """Reorder a report from places to all clients in their order, with zeros for clients without a place."""

    def of_group(slots, group, counts):
        def ordered(leaf):
            of_clients = np.zeros(len(group.id), leaf.dtype)
            of_clients[slots.index[slots.mask]] = leaf[slots.mask]
            return of_clients

        return jax.tree.map(ordered, counts)

    info, where = report.info, (cohort.groups, federation.groups)
    loss, up, down = (tuple(map(of_group, *where, counts)) for counts in (info.loss, info.up, info.down))
    return report._replace(info=info._replace(loss=loss, up=up, down=down, idle=None))


def _first_infinite_loss(reports, first, cohorts, federation) -> tuple[int, int, str] | None:
    for t, report in enumerate(reports, first):
        lost = report.lost or [False] * len(cohorts)
        for loss, gone, slots, group in zip(report.info.loss, lost, cohorts, federation.groups, strict=True):
            bad = slots.mask[t] & ~np.isfinite(loss) & ~np.asarray(gone)
            if bad.any():
                return t, int(group.id[slots.index[t][bad][0]]), "loss"
    return None


def _first_infinite_score(scores, last, federation) -> tuple[int, int, str] | None:
    for of_group, group in zip(scores, federation.groups, strict=True):
        if not of_group.finite.all():
            return last, int(group.id[np.argmin(of_group.finite)]), "predictions"
    return None


def first_infinite(report: Report, cohort: Cohort, federation: Federation) -> tuple[int, int, str] | None:
    """Return what is not finite in a round with scores, see `Chunk.diverged`."""
    for g, (slots, group) in enumerate(zip(cohort.groups, federation.groups, strict=True)):
        finite = {
            "loss": np.isfinite(report.info.loss[g]),
            "predictions": report.scores["personal"][g].finite,
        }
        for what, of_places in finite.items():
            if (bad := slots.mask & ~of_places).any():
                return int(cohort.round), int(group.id[slots.index[bad][0]]), what
    return None
