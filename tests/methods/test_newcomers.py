"""Clients who never trained: they change nothing for the others, and train when they join."""

import jax
import numpy as np
import pytest
from conftest import SIZES, assert_same, long, tiny_partition, tiny_source

from jaxfl.data.federation import federate, set_apart
from methods.rounds import TRAINING, initial, mlp, one_round, run

NEWCOMER = len(SIZES) - 1
OPTIONS = {
    "fedcmd": {"base": "stored", "personal": "classifier", "selection_rounds": 0},
    "mnfl": {"matrix_lr": 1.0},
    "mnfl-homogeneous": {"matrix_lr": 1.0},
}


def clients(number):
    """So many clients of one architecture."""
    source = tiny_source()
    return federate(source, tiny_partition(source, SIZES[:number]), [(mlp(), number)])


def with_a_newcomer():
    """All five, of which the last one is set apart."""
    return set_apart(clients(len(SIZES)), [np.arange(len(SIZES)) == NEWCOMER])


@pytest.mark.parametrize("name", ["fedamp", *map(long, ("fedcmd", "mnfl", "mnfl-homogeneous", "scaffold"))])
def test_others_train_as_if_it_were_not_there(name):
    options = TRAINING | OPTIONS.get(name, {})
    rounds = [range(NEWCOMER), (0, 2)]
    for (state, info), (expected, same) in zip(
        run(name, with_a_newcomer(), rounds, **options),
        run(name, clients(NEWCOMER), rounds, **options),
        strict=True,
    ):
        assert_same(info.loss[0][:NEWCOMER], same.loss[0], tolerance=1e-6)
        if name == "scaffold":
            assert_same(state.shared, expected.shared, tolerance=1e-6)
            continue
        (ours,) = jax.tree.map(lambda leaf: leaf[:NEWCOMER], state.weights)
        assert_same(ours, expected.weights[0], tolerance=1e-6)
        if name == "fedcmd":
            assert_same(state.shared, expected.shared, tolerance=1e-6)
        elif name != "fedamp":
            assert_same(state.matrix[:NEWCOMER, :NEWCOMER], expected.matrix, tolerance=1e-6)
            assert_same(info.findings, same.findings, tolerance=1e-6)


def test_under_the_schedule_of_all_it_trains_when_it_joins():
    federation, options = with_a_newcomer(), TRAINING | {"local_schedule": "all"}
    before = initial("local", federation, **options).kept
    for present, moves in ((0, 2), [*range(NEWCOMER)]), ((NEWCOMER,), [NEWCOMER]):
        state = initial("local", federation, **options)
        after, _ = one_round("local", state, federation, 0, present, **options)
        distances = jax.tree.map(
            lambda a, b: np.abs(a - b).reshape(len(SIZES), -1).max(1), after.kept, before
        )
        moved = np.max(jax.tree.leaves(distances), axis=0) > 0
        assert np.flatnonzero(moved).tolist() == moves
