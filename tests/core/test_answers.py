"""What rounds meet: answers that are lost, and rates on a schedule. All of it is data of one program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, SHAPE, assert_same, tiny_partition, tiny_source

from jaxfl.core import engine
from jaxfl.core.answers import Ledger, draw_dropouts, lost_answers, spent
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.core.flops import Operations
from jaxfl.core.job import traced
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.core.rounds import Conditions, as_programs
from jaxfl.data.federation import federate
from jaxfl.machine.clock import Deadline, Device, until
from jaxfl.models import zoo
from jaxfl.registry import METHODS
from jaxfl.runs.result import records

CLIENTS, ROUNDS, KEY = (3, 2), 3, jax.random.key(0)
CONFIG = METHODS["fedper"].config(epochs=1, batch_size=4)
NOBODY = tuple(np.zeros((ROUNDS, n), bool) for n in CLIENTS)
SOME = (np.array([[0, 1, 0], [1, 1, 1], [0, 0, 0]], bool), np.array([[1, 0], [1, 1], [0, 1]], bool))


@pytest.fixture(scope="module")
def federation():
    source = tiny_source()
    models = [zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=hidden) for hidden in (5, 4)]
    return federate(source, tiny_partition(source), tuple(zip(models, CLIENTS, strict=True)))


@pytest.fixture(scope="module")
def programs():
    """FedPer: it has state of the server and of the clients."""
    return as_programs(METHODS["fedper"].build(CONFIG))


@pytest.fixture(scope="module")
def play(programs, federation):
    """Rounds one by one: (state, reports) of some cohorts, under some conditions, with some rates."""

    def play(cohorts, conditions=None, rates=(CONFIG.lr,) * ROUNDS):
        state, reports = programs.init(KEY, federation, traced(CONFIG)), []
        for t, rate in enumerate(rates):
            now = slice(t, t + 1)
            of_round = Cohort(np.arange(t, t + 1, dtype=np.int32), tree_at(cohorts, now), ROUNDS)
            met = () if conditions is None else (None, tree_at(conditions, now))
            state = state._replace(hyper=traced(dataclasses.replace(CONFIG, lr=rate)))
            state, report = programs.rounds(KEY, jax.tree.map(jnp.copy, state), federation, of_round, *met)
            reports.append(report)
        state = state._replace(hyper=None)
        return jax.device_get((state, jax.tree.map(lambda *of_rounds: np.concatenate(of_rounds), *reports)))

    return play


def tree_at(tree, rounds):
    """Some rounds of what has an axis of rounds."""
    return jax.tree.map(lambda leaf: leaf[rounds] if leaf.ndim else leaf, tree)


@pytest.fixture(scope="module")
def cohorts():
    """All clients in each round."""
    return draw_cohorts(CLIENTS, 1.0, ROUNDS, seed=3)


def conditions(dropped=NOBODY, rate=(1.0,) * ROUNDS, seconds=1e9):
    """All of the kinds; devices compute an operation and move a byte in a second."""
    deadline = Deadline(seconds, (Device(1.0, 1.0), Device(1.0, 1.0)))
    return Conditions(np.array(rate, np.float32), dropped, traced(deadline))


def without(cohorts, dropped):
    """The cohorts of those who answer, drawn so from the first."""
    return tuple(
        Slots(np.where(gone, len(gone[0]), slots.index).astype(np.int32), slots.mask & ~gone)
        for slots, gone in zip(cohorts, dropped, strict=True)
    )


def test_who_meets_nothing_has_the_same_bits(play, cohorts):
    state, reports = play(cohorts)
    same, others = play(cohorts, conditions())
    assert_same(same, state)
    assert_same(others[:3], reports[:3])
    assert reports.lost is None and not any(of_group.any() for of_group in others.lost)


def test_who_drops_out_is_absent_and_has_worked(programs, play, cohorts):
    state, reports = play(without(cohorts, SOME))
    lossy, told = play(cohorts, conditions(SOME))
    assert_same(lossy, state)
    assert_same(told.lost, SOME)
    _, whole = play(cohorts)
    assert_same(told.info.up, reports.info.up)
    assert_same(told.info.down, whole.info.down)
    assert_same(told.flops, whole.flops)
    assert programs.rounds.compilations == 2  # with conditions and without


def test_where_nobody_answers_nothing_changes(play, cohorts):
    """Neither the models nor what clients remember."""
    gone = tuple(~of_group for of_group in NOBODY)
    first = tuple(np.where(np.arange(ROUNDS)[:, None] == 0, False, of_group) for of_group in gone)
    one, _ = play(without(cohorts, first), conditions(), rates=(CONFIG.lr,))
    assert_same(play(cohorts, conditions(first))[0], one)


def test_who_is_late_is_lost_and_spends_what_time_it_had(federation, play, cohorts):
    _, whole = play(cohorts)
    moved = [4 * (up[0] + down[0]) for up, down in zip(whole.info.up, whole.info.down, strict=True)]
    seconds = np.concatenate(
        [flops[0] + bytes_ for flops, bytes_ in zip(whole.flops.clients, moved, strict=True)]
    )
    slowest = int(np.argmax(seconds))
    deadline = float(np.sort(seconds)[-2:].mean())
    late = tuple(
        np.broadcast_to(of_group, (ROUNDS, len(of_group)))
        for of_group in np.split(np.arange(5) == slowest, [3])
    )
    state, _ = play(without(cohorts, late))
    lossy, told = play(cohorts, conditions(seconds=deadline))
    assert_same(lossy, state)
    assert_same(told.lost, late)
    assert_same(told.info.up, whole.info.up)  # in full: what it gets done is cut off where it is written down
    chunk = engine.Chunk(0, None, [jax.tree.map(lambda leaf: leaf[0], told)], None, 0.0, 0.0)
    devices = {model.name: Device(1.0, 1.0) for model in federation.models}
    (line,) = records(chunk, federation, cohorts, 0.0, devices, deadline=deadline)
    assert line["lost"] == [slowest] and line["simulated_seconds"] == deadline
    spent = [line[f"client_{name}"][slowest] for name in ("flops", "bytes_up", "bytes_down")]
    assert sum(spent) == pytest.approx(deadline, abs=1) and line["client_loss"][slowest] is None
    assert line["flops"] == pytest.approx(sum(line["client_flops"]))


def test_who_needs_all_the_time_that_there_is_answers(federation, cohorts):
    """Messages come as {scalars of one: how many}, or as scalars; a byte takes a second."""
    everyone = Cohort(np.int32(0), tree_at(cohorts, 0), ROUNDS)
    nobody, nothing = tree_at(NOBODY, 0), tuple(np.zeros(n, np.float32) for n in CLIENTS)
    up = {5: np.array([1, 2, 0]), 1: np.array([0, 0, 4])}, np.array([5, 6])
    whole = Ledger(up, tuple(np.zeros(n, np.int32) for n in CLIENTS), Operations(nothing, np.float32(7)))
    done = whole._replace(flops=Operations(nothing, np.float32(3)))  # the server hears the others alone

    @jax.jit
    def settled(whole, done, nobody, everyone):
        late = lost_answers(whole, nobody, conditions(seconds=20.0).deadline, everyone)
        return late, spent(done, whole, late, nobody, federation, everyone).flops.server

    late, of_server = settled(whole, done, nobody, everyone)
    assert [of_group.tolist() for of_group in late] == [[False, True, False], [False, True]]
    assert of_server == 3


def test_rates_follow_their_factors(play, cohorts):
    factors = (1.0, 0.5, 0.25)
    state, _ = play(cohorts, conditions(rate=factors))
    by_hand, _ = play(cohorts, rates=[CONFIG.lr * factor for factor in factors])
    assert_same(state, by_hand)


@pytest.mark.parametrize(
    ("seconds", "done"),
    [(0, (0, 0, 0)), (1.5, (0, 0, 15)), (3, (100, 0, 20)), (4.5, (200, 5, 20)), (99, (200, 30, 20))],
)
def test_a_client_receives_computes_and_sends(seconds, done):
    assert until(seconds, Device(100, 10), 200, 30, 20) == done


def test_dropouts_are_those_of_seed_round_and_client():
    drawn = draw_dropouts((30, 20), 0.3, 40, seed=1)
    assert [of_group.shape for of_group in drawn] == [(40, 30), (40, 20)]
    assert 0.25 < np.concatenate(drawn, 1).mean() < 0.35
    (whole,), longer = draw_dropouts((50,), 0.3, 40, seed=1), draw_dropouts((30, 20), 0.3, 50, seed=1)
    assert_same(np.concatenate(drawn, 1), whole)
    assert_same(tuple(of_group[:40] for of_group in longer), drawn)
    more = draw_dropouts((30, 20), 0.6, 40, seed=1)
    assert all((few <= many).all() for few, many in zip(drawn, more, strict=True))
