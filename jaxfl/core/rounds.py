"""The rounds of a method as programs, with their conditions and reports.

A chunk of rounds is one compiled program whose state is donated. The key of round t is
``fold_in(stream, t)``, so the state holds nothing random, and a resumed run repeats the uninterrupted one bit
for bit.
"""

from typing import Any, NamedTuple

import jax

from jaxfl.core import flops, tree
from jaxfl.core.answers import Ledger, answering, anybody, lost_answers, spent
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Algorithm, Info
from jaxfl.core.schedule import at_rate
from jaxfl.core.score import likelihoods, score
from jaxfl.data.federation import PerGroup
from jaxfl.machine.clock import Deadline


class Conditions(NamedTuple):
    """Conditions of a run's rounds that hold for every method; None where there is none."""

    rate: Any = None  # (rounds,) float, factor of clients' learning rates, see `jaxfl.core.schedule`
    dropped: PerGroup | None = None
    """Per group (rounds, n_g) bool, clients that drop out if they take part, see `jaxfl.core.answers`. Given
    whenever answers can be lost, even if only by a deadline."""
    deadline: Deadline | None = None  # how long the server waits for answers


class Report(NamedTuple):
    """Results of a round besides the state."""

    info: Info  # what the algorithm reports, without its predictors
    flops: flops.Operations  # floating-point operations of the step, and of the host step if there is one
    scores: dict[str, PerGroup]
    """Of the round's cohort, on request: per moment ("received" before local training, "trained" right after
    it and "teacher" on the same rows if the method reports them, "personal" at the end) and group a `Score`
    with leaves (k_g,)."""
    lost: PerGroup | None = None
    """Per group (k_g,) bool, the clients of the cohort whose answers are lost; None if none can be. The
    ledger counts them in full, except what clients that drop out would have sent."""


class Programs(NamedTuple):
    """An algorithm's programs. Runs that share them (other seeds, other rates) share the compilations.

    Args:
      algorithm: the algorithm. Its `init` is not compiled as a whole, so that drawing a network is one
        program for all methods.
      prepare: ``(key, state, federation, cohort) -> (state, report)``, the phase before the first round, or
        None.
      rounds: ``(key, state, federation, cohorts, score_key=None, conditions=Conditions()) -> (state,
        reports)``; the state is donated. With a `score_key` every round's cohort is scored.
      rounds_of_runs: ``(keys, states, federation, cohorts, score_keys=None, conditions=Conditions()) ->
        (states, reports)``: `rounds` of several runs as one program; all leaves except the federation's have
        a leading axis.
      of_run: ``(states, federation, i) -> state`` of run i.
      received: ``(key, state, federation, cohort) -> scores`` before local training.
      personal: the same for the models that clients deploy.
      likely: ``(key, state, federation, cohort) -> likelihoods`` of these models on their clients' rows.
      attacked: their scores where a backdoor is tried out, see `jaxfl.mechanisms.wire.attacks`.
    """

    algorithm: Algorithm
    prepare: Program | None
    rounds: Program
    rounds_of_runs: Program
    of_run: Program
    received: Program
    personal: Program
    likely: Program
    attacked: Program

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far."""
        return sum(program.compilations for program in self._compiled)

    @property
    def seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return sum(program.seconds for program in self._compiled)

    @property
    def _compiled(self) -> set[Program]:
        return {entry for entry in self if isinstance(entry, Program)}


def as_programs(algorithm: Algorithm) -> Programs:
    """Return the programs of an algorithm; each is compiled when it is first needed."""

    def scored(predict, by=score):
        def scores(key, state, federation, cohort):
            predictors = predict(key, state, federation, cohort)
            return federation.keep_replicated(by(predictors, key, federation, cohort))

        return scores

    def with_trigger(predictors, key, federation, cohort):
        return score(predictors, key, federation.wire.tried_out(federation), cohort)

    received, personal = scored(algorithm.receive), scored(algorithm.personal)

    def counted(step, key, state, federation, cohort):
        """Run a step; return the new state, the step's report, its predictors by moment, its operations."""
        with flops.collect() as amounts:
            state, info = step(key, state, federation, cohort)
        operations = flops.by_owner(amounts, [len(group.id) for group in federation.groups])
        told = {"trained": info.trained, "teacher": info.teacher}
        return federation.keep_placed(state), info._replace(trained=None, teacher=None), told, operations

    def prepare(key, state, federation, cohort):
        state, info, _, operations = counted(algorithm.prepare, key, state, federation, cohort)
        return state, federation.keep_replicated(Report(info, operations, {}))

    def rounds(key, state, federation, cohorts, score_key=None, conditions=Conditions()):  # noqa: B008
        def one(state, of_round):
            cohort, rate, dropped = of_round
            step = algorithm.step if rate is None else at_rate(algorithm.step, rate)
            round_key = jax.random.fold_in(key, cohort.round)
            if dropped is None:
                return answered(step, round_key, state, federation, cohort, score_key)
            # Only the ledger of this round is used, so the compiler leaves out the training.
            _, info, _, operations = counted(step, round_key, state, federation, cohort)
            whole = Ledger(info.up, info.down, operations)
            lost = lost_answers(whole, dropped, conditions.deadline, cohort)
            who_answers = answering(federation, cohort, lost)
            after, report = answered(step, round_key, state, federation, who_answers, score_key)
            done = Ledger(report.info.up, report.info.down, report.flops)
            up, down, operations = spent(done, whole, lost, dropped, federation, cohort)
            report = Report(report.info._replace(up=up, down=down), operations, report.scores, lost)
            # If nobody answers, the round has not happened.
            after = tree.where(anybody(who_answers), after, state)
            return federation.keep_placed(after), federation.keep_replicated(report)

        state, reports = jax.lax.scan(one, state, (cohorts, conditions.rate, conditions.dropped))
        return federation.keep_placed(state), reports  # the compiler may place it elsewhere

    def answered(step, round_key, state, federation, cohort, score_key):
        """Run a round whose clients all answer."""
        scores = {}
        if score_key is not None:
            of_round = jax.random.fold_in(score_key, cohort.round)
            scores["received"] = received(of_round, state, federation, cohort)
        state, info, told, operations = counted(step, round_key, state, federation, cohort)
        if score_key is not None:
            for moment, predictors in told.items():
                if predictors is not None:
                    scores[moment] = score(predictors, of_round, federation, cohort)
            if not algorithm.host:  # a host step is still to come
                scores["personal"] = personal(of_round, state, federation, cohort)
        return state, federation.keep_replicated(Report(info, operations, scores))

    def rounds_of_runs(keys, states, federation, cohorts, score_keys=None, conditions=Conditions()):  # noqa: B008
        def one(run):
            key, state, cohorts, score_key, conditions = run
            return rounds(key, state, federation, cohorts, score_key, conditions)

        side_by_side = federation.clients_at_once > 1  # runs go side by side as clients do
        states, reports = jax.lax.map(
            one,
            (keys, states, cohorts, score_keys, conditions),
            batch_size=len(keys) if side_by_side else None,
        )
        return federation.keep_placed(states, runs=True), reports

    def of_run(states, federation, i):  # the federation only says for which devices this is compiled
        return jax.tree.map(lambda leaf: leaf[i], states)

    score_received = Program(received)
    same = algorithm.personal is algorithm.receive
    return Programs(
        algorithm=algorithm,
        prepare=Program(prepare) if algorithm.prepare else None,
        rounds=Program(rounds, donate=(1,)),
        rounds_of_runs=Program(rounds_of_runs, donate=(1,)),
        of_run=Program(of_run),
        received=score_received,
        personal=score_received if same else Program(personal),
        likely=Program(scored(algorithm.personal, likelihoods)),
        attacked=Program(scored(algorithm.personal, with_trigger)),
    )
