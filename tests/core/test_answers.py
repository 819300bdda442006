"""Conditions of rounds: lost answers and scheduled learning rates, all of them data of one program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_same, differ

from core.conftest import CLIENTS, CONFIG
from jaxfl.core import engine
from jaxfl.core.answers import Ledger, draw_dropouts, lost_answers, spent
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.core.flops import Operations
from jaxfl.core.job import traced
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.core.rounds import Conditions
from jaxfl.machine.clock import Deadline, Device, of_clients, until
from jaxfl.results.result import records

ROUNDS, KEY = 3, jax.random.key(0)
DEVICES = of_clients([Device(1.0, 1.0)] * len(CLIENTS), CLIENTS, 0.0, np.random.default_rng(0))
NOBODY = tuple(np.zeros((ROUNDS, n), bool) for n in CLIENTS)
SOME = (np.array([[0, 1, 0], [1, 1, 1], [0, 0, 0]], bool), np.array([[1, 0], [1, 1], [0, 1]], bool))


@pytest.fixture(scope="module")
def play(programs, federation):
    """Return a function that runs rounds one by one: (cohorts, conditions, rates) -> (state, reports)."""

    def play(cohorts, conditions=None, rates=(CONFIG.lr,) * ROUNDS):
        state, reports = programs.algorithm.init(KEY, federation, traced(CONFIG)), []
        for t, rate in enumerate(rates):
            now = slice(t, t + 1)
            of_round = Cohort(np.arange(t, t + 1, dtype=np.int32), tree_at(cohorts, now), ROUNDS)
            met = () if conditions is None else (None, conditions_at(conditions, now))
            state = state._replace(hyper=traced(dataclasses.replace(CONFIG, lr=rate)))
            state, report = programs.rounds(KEY, jax.tree.map(jnp.copy, state), federation, of_round, *met)
            reports.append(report)
        state = state._replace(hyper=None)
        return jax.device_get((state, jax.tree.map(lambda *of_rounds: np.concatenate(of_rounds), *reports)))

    return play


def tree_at(tree, rounds):
    """Return some rounds of all leaves that have an axis of rounds."""
    return jax.tree.map(lambda leaf: leaf[rounds] if leaf.ndim else leaf, tree)


def conditions_at(conditions, rounds):
    """Return the conditions of some rounds."""
    return conditions._replace(**tree_at({n: getattr(conditions, n) for n in ("rate", "dropped")}, rounds))


@pytest.fixture(scope="module")
def cohorts():
    """Return cohorts of all clients in every round."""
    return draw_cohorts(CLIENTS, 1.0, ROUNDS, seed=3)


def conditions(dropped=NOBODY, rate=(1.0,) * ROUNDS, seconds=1e9):
    """Return conditions of every kind; a device takes a second per operation and a second per byte."""
    deadline = Deadline(seconds, DEVICES)
    return Conditions(np.array(rate, np.float32), dropped, traced(deadline))


def without(cohorts, dropped):
    """Return the cohorts without the clients that drop out, as if these had not been drawn."""
    return tuple(
        Slots(np.where(gone, len(gone[0]), slots.index).astype(np.int32), slots.mask & ~gone)
        for slots, gone in zip(cohorts, dropped, strict=True)
    )


def test_conditions_that_lose_no_answer_change_no_bit(play, cohorts):
    state, reports = play(cohorts)
    same, others = play(cohorts, conditions())
    assert_same(same, state)
    assert_same(others[:3], reports[:3])
    assert reports.lost is None and not any(of_group.any() for of_group in others.lost)


def test_dropouts_change_the_state_like_absence_and_their_work_is_counted(programs, play, cohorts):
    state, reports = play(without(cohorts, SOME))
    lossy, told = play(cohorts, conditions(SOME))
    assert_same(lossy, state)
    assert_same(told.lost, SOME)
    _, whole = play(cohorts)
    assert_same(told.info.up, reports.info.up)
    assert_same(told.info.down, whole.info.down)
    assert_same(told.flops, whole.flops)
    assert programs.rounds.compilations == 2  # one with conditions, one without


def test_rounds_that_no_client_answers_change_nothing(play, cohorts):
    """Neither the models nor the clients' state changes."""
    gone = tuple(~of_group for of_group in NOBODY)
    first = tuple(np.where(np.arange(ROUNDS)[:, None] == 0, False, of_group) for of_group in gone)
    one, _ = play(without(cohorts, first), conditions(), rates=(CONFIG.lr,))
    assert_same(play(cohorts, conditions(first))[0], one)


def test_a_late_answer_is_lost_and_its_client_spends_the_time_until_the_deadline(federation, play, cohorts):
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
    assert_same(told.info.up, whole.info.up)  # in full: only the record cuts off what is not done in time
    chunk = engine.Chunk(0, None, [jax.tree.map(lambda leaf: leaf[0], told)], None, 0.0, 0.0)
    (line,) = records(chunk, federation, cohorts, 0.0, DEVICES, deadline=deadline)
    assert line["lost"] == [slowest] and line["simulated_seconds"] == deadline
    spent = [line[f"client_{name}"][slowest] for name in ("flops", "bytes_up", "bytes_down")]
    assert sum(spent) == pytest.approx(deadline, abs=1) and line["client_loss"][slowest] is None
    assert line["flops"] == pytest.approx(sum(line["client_flops"]))


def test_speeds_of_one_architecture_s_clients_spread_around_its_profile():
    """Their logarithms have the given standard deviation, and one speed says nothing about the other."""
    profile, sizes = [Device(1e9, 1e6), Device(1e6, 2.0)], (3000, 5000)
    same = of_clients(profile, sizes, 0.0, np.random.default_rng(1))
    for found, device, n in zip(same, profile, sizes, strict=True):
        assert_same(found, Device(*(np.full(n, speed) for speed in device)))
    spread = of_clients(profile, sizes, 0.5, np.random.default_rng(1))
    for found, device in zip(spread, profile, strict=True):
        logs = np.log(np.array(found) / np.array(device)[:, None])
        np.testing.assert_allclose(np.median(logs, 1), 0, atol=0.03)
        np.testing.assert_allclose(np.cov(logs), [[0.25, 0], [0, 0.25]], atol=0.02)


def test_a_slow_client_is_late_where_the_others_of_its_architecture_are_not(federation, play, cohorts):
    fast, slow = np.full(CLIENTS[0], 1e9), np.array([1e9, 1e-9, 1e9])
    devices = Device(slow, fast), Device(*np.full((2, CLIENTS[1]), 1e9))
    few = conditions()._replace(deadline=traced(Deadline(1.0, devices)))
    late = np.array([[False, True, False]] * ROUNDS), NOBODY[1]
    state, told = play(cohorts, few)
    assert_same(told.lost, late)
    assert_same(state, play(without(cohorts, late))[0])


def test_a_client_that_needs_exactly_the_time_until_the_deadline_answers(federation, cohorts):
    """An answer at the deadline is in time.

    Traffic may be {scalars of a message: number of messages} or scalars; a byte takes a second.
    """
    everyone = Cohort(np.int32(0), tree_at(cohorts, 0), ROUNDS)
    nobody, nothing = tree_at(NOBODY, 0), tuple(np.zeros(n, np.float32) for n in CLIENTS)
    up = {5: np.array([1, 2, 0]), 1: np.array([0, 0, 4])}, np.array([5, 6])
    whole = Ledger(up, tuple(np.zeros(n, np.int32) for n in CLIENTS), Operations(nothing, np.float32(7)))
    done = whole._replace(flops=Operations(nothing, np.float32(3)))  # the server gets only the other answers

    @jax.jit
    def settled(whole, done, nobody, everyone):
        late = lost_answers(whole, nobody, conditions(seconds=20.0).deadline, everyone)
        return late, spent(done, whole, late, nobody, federation, everyone).flops.server

    late, of_server = settled(whole, done, nobody, everyone)
    assert [of_group.tolist() for of_group in late] == [[False, True, False], [False, True]]
    assert of_server == 3


def test_scheduled_factors_multiply_the_learning_rate(play, cohorts):
    factors = (1.0, 0.5, 0.25)
    state, _ = play(cohorts, conditions(rate=factors))
    by_hand, _ = play(cohorts, rates=[CONFIG.lr * factor for factor in factors])
    assert_same(state, by_hand)


@pytest.mark.parametrize(
    ("seconds", "done"),
    [(0, (0, 0, 0)), (1.5, (0, 0, 15)), (3, (100, 0, 20)), (4.5, (200, 5, 20)), (99, (200, 30, 20))],
)
def test_a_client_first_receives_then_computes_then_sends(seconds, done):
    assert until(seconds, Device(100, 10), 200, 30, 20) == done


def test_dropouts_depend_only_on_seed_round_and_client_and_grow_with_the_rate():
    drawn = draw_dropouts((30, 20), 0.3, 40, seed=1)
    assert [of_group.shape for of_group in drawn] == [(40, 30), (40, 20)]
    assert 0.25 < np.concatenate(drawn, 1).mean() < 0.35
    (whole,), longer = draw_dropouts((50,), 0.3, 40, seed=1), draw_dropouts((30, 20), 0.3, 50, seed=1)
    assert_same(np.concatenate(drawn, 1), whole)
    assert_same(tuple(of_group[:40] for of_group in longer), drawn)
    assert len(np.unique(whole, axis=0)) == 40
    assert differ(draw_dropouts((30, 20), 0.3, 40, seed=2), drawn)
    more = draw_dropouts((30, 20), 0.6, 40, seed=1)
    assert all((few <= many).all() for few, many in zip(drawn, more, strict=True))
