"""The engine: rounds scanned in chunks, scores between chunks. It knows no method.

A chunk of `eval_every` rounds is one compiled program whose state is donated; evaluation, logging and
checkpoints happen between chunks. The key of round t is ``fold_in(stream, t)``, so nothing random sits in
the state and a resumed run repeats the undisturbed one bit for bit.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import flops
from jaxfl.core.cohorts import balance
from jaxfl.core.evaluate import score
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Algorithm, Cohort, Info, Slots
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.machine.processes import agree

CLIENTS_PER_SCORING = 256  # of each group; bounds the memory of personal models built at once


class Report(NamedTuple):
    """What a round leaves behind beside the state.

    Args:
      info: what the algorithm reports.
      flops: floating-point operations in the step, floats (n_g,) of each group's clients, and last a () of
        what it computes outside of the client map; see `jaxfl.core.flops`. Host steps are not counted.
      received: per group `Score` with leaves (k_g,), of the round's cohort before its training; None unless
        asked for.
      personal: the same after it.
    """

    info: Info
    flops: tuple
    received: PerGroup | None
    personal: PerGroup | None


class Programs(NamedTuple):
    """An algorithm's programs. Runs that share them (other seeds, other rates) share the compilations.

    Args:
      init: ``(key, federation, hyper) -> state``; not compiled as a whole: its few draws are then compiled
        once for all methods.
      rounds: ``(key, state, federation, cohorts, score_key=None) -> (state, reports)``; the state is donated.
        With a `score_key` every round's cohort is scored.
      rounds_of_runs: ``(keys, states, federation, cohorts, score_keys=None) -> (states, reports)``: `rounds`
        of several runs as one program; all leaves but the federation's have a leading axis.
      of_run: ``(states, i) -> state`` of one of them.
      received: ``(key, state, federation, cohort) -> scores`` before local training.
      personal: the same of what clients deploy.
      host: the algorithm's host step or None.
      matrices: what the algorithm knows about pairs of clients, ``state -> {name: (N, N)}``, or None.
    """

    init: Callable
    rounds: Program
    rounds_of_runs: Program
    of_run: Program
    received: Program
    personal: Program
    host: Callable | None
    matrices: Callable | None

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return sum(program.compilations for program in self._compiled)

    @property
    def seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return sum(program.seconds for program in self._compiled)

    @property
    def _compiled(self) -> set[Program]:
        return {self.rounds, self.rounds_of_runs, self.of_run, self.received, self.personal}


def programs(algorithm: Algorithm) -> Programs:
    """Prepare an algorithm for `simulate`."""

    def received(key, state, federation, cohort):
        predictors = algorithm.receive(key, state, federation, cohort)
        return federation.keep_replicated(score(predictors, key, federation, cohort))

    def personal(key, state, federation, cohort):
        predictors = algorithm.personal(key, state, federation, cohort)
        return federation.keep_replicated(score(predictors, key, federation, cohort))

    def rounds(key, state, federation, cohorts, score_key=None):
        def one(state, cohort):
            def scored(scores, state):
                if score_key is None:
                    return None
                return scores(jax.random.fold_in(score_key, cohort.round), state, federation, cohort)

            before = scored(received, state)
            with flops.collect() as amounts:
                round_key = jax.random.fold_in(key, cohort.round)
                state, info = algorithm.step(round_key, state, federation, cohort)
            state = federation.keep_replicated(state)  # it leaves a round as it came
            operations = flops.by_group(amounts, [len(group.id) for group in federation.groups])
            after = None if algorithm.host else scored(personal, state)  # a host step is still to come
            return state, federation.keep_replicated(
                Report(info._replace(trained=None), operations, before, after)
            )

        return jax.lax.scan(one, state, cohorts)

    def rounds_of_runs(keys, states, federation, cohorts, score_keys=None):
        def one(run):
            key, state, cohorts, score_key = run
            return rounds(key, state, federation, cohorts, score_key)

        side_by_side = federation.clients_at_once > 1  # runs go as clients do
        return jax.lax.map(
            one, (keys, states, cohorts, score_keys), batch_size=len(keys) if side_by_side else None
        )

    def of_run(states, i):
        return jax.tree.map(lambda leaf: leaf[i], states)

    score_received = Program(received)
    same = algorithm.personal is algorithm.receive
    return Programs(
        init=algorithm.init,
        rounds=Program(rounds, donate=(1,)),
        rounds_of_runs=Program(rounds_of_runs, donate=(1,)),
        of_run=Program(of_run),
        received=score_received,
        personal=score_received if same else Program(personal),
        host=algorithm.host,
        matrices=algorithm.matrices,
    )


class Chunk(NamedTuple):
    """What some rounds did.

    Args:
      first: number of the first round, from 0.
      state: after the last round. It is donated to the next chunk: copy it to keep it.
      reports: of every round, with NumPy leaves.
      scores: {"personal": ..., "received": ...}: per group `Score` with leaves (n_g,); None where the
        rounds diverged.
      train_seconds, evaluate_seconds: without compilation; what happens within a round is training.
      diverged: None, or (round, client id) of the first loss or prediction that is not finite; `reports`
        ends there.
    """

    first: int
    state: Any
    reports: list[Report]
    scores: dict[str, PerGroup] | None
    train_seconds: float
    evaluate_seconds: float
    diverged: tuple[int, int] | None = None


def simulate(
    programs: Programs,
    federation: Federation,
    hyper: Any,
    cohorts: tuple[Slots, ...],
    key: jax.Array,
    *,
    eval_every: int,
    start: int = 0,
    state: Any = None,
    score_cohort: bool = False,
) -> Iterator[Chunk]:
    """Run a federated method, chunk by chunk.

    Args:
      programs: of the algorithm.
      federation: clients and data.
      hyper: the method's configuration.
      cohorts: per group `Slots` with leaves (rounds, k_g), see `draw_cohorts`.
      key: of the run.
      eval_every: rounds of a chunk.
      start: first round; a multiple of `eval_every` or the end of the run.
      state: the state at `start`; None for a new run.
      score_cohort: score the cohort of every round, before and after its training.

    Yields:
      A `Chunk` after every `eval_every` rounds and after the last one.
    """
    init_key, round_key, host_key, score_key = jax.random.split(key, 4)
    rounds = cohorts[0].mask.shape[0]
    if state is None:
        state = _initial(programs, federation, hyper, init_key)
    round_key, score_key, state = federation.replicate((round_key, score_key, state))
    cohort_key = score_key if score_cohort else None
    for first in range(start, rounds, eval_every):
        end = min(first + eval_every, rounds)
        begun, compiled = time.perf_counter(), programs.seconds
        if programs.host is None:
            chunk = _of_rounds(cohorts, first, end)
            state, reports = programs.rounds(round_key, state, federation, chunk, cohort_key)
            reports = _per_round(jax.device_get(reports))
        else:
            reports = []
            for t in range(first, end):
                cohort = _of_rounds(cohorts, t, t + 1)
                state, report = programs.rounds(round_key, state, federation, cohort, cohort_key)
                (report,) = _per_round(jax.device_get(report))
                cohort = jax.tree.map(lambda leaf: leaf[0], cohort)
                host_round_key = jax.random.fold_in(host_key, t)
                state, more = programs.host(host_round_key, state, federation, cohort)
                state = federation.replicate(state)
                agree("results of the server's step", state)
                report = report._replace(info=_with_host(report.info, more))
                if score_cohort:  # the round ends only now
                    of_round = jax.random.fold_in(score_key, t)
                    scores = jax.device_get(programs.personal(of_round, state, federation, cohort))
                    report = report._replace(personal=scores)
                reports.append(report)
        trained = time.perf_counter() - begun - (programs.seconds - compiled)
        chunk = _scored(programs, federation, cohorts, score_key, first, state, reports, trained)
        yield chunk
        if chunk.diverged:
            return


def simulate_together(
    programs: Programs,
    federation: Federation,
    hypers: Sequence[Any],
    cohorts: Sequence[tuple[Slots, ...]],
    keys: Sequence[jax.Array],
    *,
    eval_every: int,
    start: int = 0,
    states: Sequence[Any] | None = None,
    score_cohort: bool = False,
) -> Iterator[dict[int, Chunk]]:
    """Run a federated method several times as one program, chunk by chunk; per run as `simulate` does.

    Args:
      programs: of the algorithm, which has no host step.
      federation: clients and data.
      hypers: of each run the method's configuration; they differ in rates alone.
      cohorts: of each run, all in equally many places, see `jaxfl.core.cohorts.align`.
      keys: of the runs.
      eval_every: rounds of a chunk.
      start: first round; a multiple of `eval_every` or the end of the runs.
      states: of each run the state at `start`; None for new runs.
      score_cohort: score the cohort of every round, before and after its training.

    Yields:
      A `Chunk` of each run by its number, after every `eval_every` rounds and after the last one. A run that
      has diverged is left out from then on; what is computed for it still is nobody's. Each counts an equal
      part of the seconds of training.
    """
    streams = [jax.random.split(key, 4) for key in keys]
    init_keys, round_keys, _, score_keys = (jnp.stack(of_runs) for of_runs in zip(*streams, strict=True))
    rounds = cohorts[0][0].mask.shape[0]
    if states is None:
        made = zip(hypers, init_keys, strict=True)
        states = [_initial(programs, federation, hyper, key) for hyper, key in made]
    states = _stacked(list(map(jax.device_get, states)))  # on the host, where nothing is compiled for it
    round_keys, score_keys, states = federation.replicate((round_keys, score_keys, states))
    cohort_keys = score_keys if score_cohort else None
    going = range(len(keys))
    for first in range(start, rounds, eval_every):
        end = min(first + eval_every, rounds)
        begun, compiled = time.perf_counter(), programs.seconds
        chunk = _stacked([_of_rounds(of_run, first, end) for of_run in cohorts])
        states, reports = programs.rounds_of_runs(round_keys, states, federation, chunk, cohort_keys)
        reports = jax.device_get(reports)
        trained = (time.perf_counter() - begun - (programs.seconds - compiled)) / len(keys)
        chunks = {}
        for i in going:
            state = federation.replicate(programs.of_run(states, np.int32(i)))
            of_run = _per_round(jax.tree.map(lambda leaf, i=i: leaf[i], reports))
            chunks[i] = _scored(
                programs, federation, cohorts[i], score_keys[i], first, state, of_run, trained
            )
        going = [i for i in going if not chunks[i].diverged]
        yield chunks
        if not going:
            return


def _initial(programs: Programs, federation: Federation, hyper: Any, key: jax.Array) -> Any:
    # Copied, because an array that stands in two places cannot be donated.
    return jax.tree.map(jnp.copy, programs.init(key, federation, traced(hyper)))


def _scored(programs, federation, cohorts, score_key, first, state, reports, trained) -> Chunk:
    """What rounds did whose state and reports are here: whether they diverged, and how all clients score."""
    diverged = _first_infinite_loss(reports, first, cohorts, federation)
    if diverged:
        return Chunk(first, state, reports[: diverged[0] - first + 1], None, trained, 0.0, diverged)
    last, rounds = first + len(reports) - 1, cohorts[0].mask.shape[0]
    begun, compiled = time.perf_counter(), programs.seconds
    scores = evaluate(programs, federation, state, score_key, last, rounds)
    evaluated = time.perf_counter() - begun - (programs.seconds - compiled)
    diverged = _first_infinite_score(scores["personal"], last, federation)
    return Chunk(first, state, reports, None if diverged else scores, trained, evaluated, diverged)


def compiled(
    programs: Programs,
    federation: Federation,
    hyper: Any,
    cohorts: tuple[Slots, ...],
    key: jax.Array,
    *,
    eval_every: int,
    score_cohort: bool = False,
) -> list[jax.stages.Compiled]:
    """The executables of a run that `simulate` begins with the same arguments; nothing runs."""
    state = _shapes(programs, federation, hyper, key)
    key, rounds = federation.replicate(key), cohorts[0].mask.shape[0]
    chunk = _of_rounds(cohorts, 0, min(rounds, eval_every if programs.host is None else 1))
    part = _everyone_in_parts(federation, 0, rounds)[0]
    return [
        programs.rounds.compile(key, state, federation, chunk, key if score_cohort else None),
        programs.received.compile(key, state, federation, part),
        programs.personal.compile(key, state, federation, part),
    ]


def compiled_together(
    programs: Programs,
    federation: Federation,
    hyper: Any,
    cohorts: Sequence[tuple[Slots, ...]],
    keys: Sequence[jax.Array],
    *,
    eval_every: int,
    score_cohort: bool = False,
) -> jax.stages.Compiled:
    """The executable of several runs' rounds as `simulate_together` has it; `hyper` is of any of the runs."""
    states = _shapes(programs, federation, hyper, keys[0], (len(keys),))
    stacked, rounds = federation.replicate(jnp.stack(keys)), cohorts[0][0].mask.shape[0]
    chunk = _stacked([_of_rounds(of_run, 0, min(rounds, eval_every)) for of_run in cohorts])
    return programs.rounds_of_runs.compile(
        stacked, states, federation, chunk, stacked if score_cohort else None
    )


def _shapes(programs: Programs, federation: Federation, hyper: Any, key: jax.Array, runs=()) -> Any:
    """Of a state, perhaps with a leading axis of runs, where all devices hold it."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            runs + leaf.shape, leaf.dtype, sharding=federation.replicated_sharding
        ),
        jax.eval_shape(programs.init, key, federation, traced(hyper)),
    )


def traced(hyper: Any) -> Any:
    """A configuration with its float fields as arrays."""
    return jax.tree.map(lambda rate: jnp.asarray(rate, jnp.result_type(float)), hyper)


def evaluate(
    programs: Programs, federation: Federation, state: Any, key, last: int, rounds: int
) -> dict[str, PerGroup]:
    """Score all clients after round `last`; see `Chunk.scores`."""
    key = jax.random.fold_in(key, last)
    parts = _everyone_in_parts(federation, last, rounds)

    def scores(program):
        of_parts = [jax.device_get(program(key, state, federation, part)) for part in parts]
        return tuple(
            _joined([(part.groups[g], of_part[g]) for part, of_part in zip(parts, of_parts, strict=True)])
            for g in range(len(federation.groups))
        )

    received = scores(programs.received)
    same = programs.personal is programs.received
    return {"personal": received if same else scores(programs.personal), "received": received}


def _of_rounds(cohorts: tuple[Slots, ...], first: int, end: int) -> Cohort:
    """Rounds first..end-1 as one `Cohort` whose leaves have a leading axis."""
    return Cohort(
        np.arange(first, end, dtype=np.int32),
        jax.tree.map(lambda leaf: leaf[first:end], cohorts),
        rounds=cohorts[0].mask.shape[0],
    )


def _stacked(trees: Sequence[Any]) -> Any:
    """Trees of NumPy arrays as one with a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _per_round(reports: Report) -> list[Report]:
    rounds = len(reports.info.loss[0])
    return [jax.tree.map(lambda leaf: leaf[t], reports) for t in range(rounds)]  # noqa: B023


def _everyone_in_parts(federation: Federation, last: int, rounds: int) -> list[Cohort]:
    """All clients as cohorts of one shape, of at most `CLIENTS_PER_SCORING` clients per group."""
    number = max(-(-len(group.size) // CLIENTS_PER_SCORING) for group in federation.groups)

    def slots(group):
        count = len(group.size)
        index = np.arange(number * min(count, CLIENTS_PER_SCORING), dtype=np.int32).reshape(number, -1)
        return Slots(np.minimum(index, np.int32(count)), index < count)

    work = [np.asarray(group.test_size) for group in federation.groups]
    parts = balance([slots(group) for group in federation.groups], work, federation)
    return [
        Cohort(np.int32(last), jax.tree.map(lambda leaf, part=part: leaf[part], parts), rounds, part=True)
        for part in range(number)
    ]


def _joined(parts: list[tuple]) -> Any:
    """Leaves (places,) of several parts, each with its `Slots`, as leaves (n_g,) in the order of clients."""
    slots, trees = zip(*parts, strict=True)
    taken = np.concatenate([of_part.mask for of_part in slots])
    order = np.argsort(np.concatenate([of_part.index for of_part in slots])[taken])
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[taken][order], *trees)


def _with_host(info: Info, more: Info) -> Info:
    """A round's report with what its host step sent and found."""
    return info._replace(
        up=jax.tree.map(np.add, info.up, jax.device_get(more.up)),
        down=jax.tree.map(np.add, info.down, jax.device_get(more.down)),
        findings=info.findings | more.findings,
    )


def _first_infinite_loss(reports, first, cohorts, federation) -> tuple[int, int] | None:
    for t, report in enumerate(reports, first):
        for loss, slots, group in zip(report.info.loss, cohorts, federation.groups, strict=True):
            bad = slots.mask[t] & ~np.isfinite(loss)
            if bad.any():
                return t, int(group.id[slots.index[t][bad][0]])
    return None


def _first_infinite_score(scores, last, federation) -> tuple[int, int] | None:
    for of_group, group in zip(scores, federation.groups, strict=True):
        if not of_group.finite.all():
            return last, int(group.id[np.argmin(of_group.finite)])
    return None
