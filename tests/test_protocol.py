"""What every registered method promises, as one table.

A method is built from rates that are NaN; its real rates come with `init`. So a rate that is read at
build time, where a change would recompile, shows as NaN in the results.
"""

import dataclasses
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl import tree
from jaxfl.engine import Program, programs
from jaxfl.registry import METHODS
from jaxfl.training import Training
from jaxfl.types import Algorithm, Cohort, Info, Slots

OPTIONS = {"epochs": 2, "batch_size": 3}
ROUNDS = 3
CLIENTS = (3, 2)  # of each group; every cohort has as many places, so a method compiles once
EVERYONE = ((0, 1, 2), (0, 1))
SOME = ((2, 0), (1,))
ONLY_SMALLER = ((0, 1, 2), ())

ARGUMENTS = {
    "init": ("key", "federation", "hyper"),
    "receive": ("key", "state", "federation", "cohort"),
    "step": ("key", "state", "federation", "cohort"),
    "personal": ("key", "state", "federation", "cohort"),
    "host": ("key", "state", "federation", "cohort"),
}

# Scalars that one client sends, and receives, in the first round. A client of CompFL trains its own
# expert, before distillation starts, if it never explores.
TRAFFIC = {
    "local": lambda model: 0,
    "fedavg": lambda model: model.size,
    "fedavg-ft": lambda model: model.size,
    "lg-fedavg": lambda model: model.head.size,
    "fedper": lambda model: model.body.size,
    "fedrep": lambda model: model.body.size,
    "fedbabu": lambda model: model.body.size,
    "ditto": lambda model: model.size,
    "fedrod": lambda model: model.size,
    "compfl": lambda model: model.body.size,
}
WITHOUT_EXPLORATION = {"compfl": {"eps": 0.0}}

# With two architectures there is one teacher, whose weight is 1 at any temperature.
WITHOUT_EFFECT = {"compfl": {"tau"}}


class Round(NamedTuple):
    """All that a method computes in a round; the logits, (k_g, images, outputs), are those after it."""

    state: Any
    info: Info
    received: tuple
    personal: tuple


class Case(NamedTuple):
    """A method, compiled, with its clients apart from each other: one round has been run."""

    name: str
    algorithm: Algorithm
    play: Program  # (key, state, federation, cohort) -> Round
    state: Any
    stacked: Any  # the state's tree with True where a leaf has an entry per client


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs are compiled many times and run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", params=METHODS.values(), ids=METHODS)
def case(request, federation):
    method = request.param
    config = method.config(**OPTIONS)
    algorithm = method.build(jax.tree.map(lambda rate: math.nan, config))
    hyper = jax.tree.map(jnp.float32, config)

    doubled = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), federation.groups)
    doubled = dataclasses.replace(federation, groups=doubled)
    once = jax.eval_shape(algorithm.init, jax.random.key(0), federation, hyper)
    twice = jax.eval_shape(algorithm.init, jax.random.key(0), doubled, hyper)

    play = Program(whole_round(algorithm))
    start = algorithm.init(jax.random.key(0), federation, hyper)
    state = play(jax.random.key(1), start, federation, cohort(EVERYONE)).state
    stacked = jax.tree.map(lambda a, b: a.shape != b.shape, once, twice)
    return Case(method.name, algorithm, play, state, stacked)


def whole_round(algorithm):
    def logits(predictors, federation, cohort):
        x = federation.inputs(jnp.arange(40, 44))
        return tuple(
            jax.lax.map(
                lambda one: predictor.predict(model, predictor.shared, one[1], x),  # noqa: B023
                (slots.index, predictor.stacked),
            )
            for model, predictor, slots in zip(
                federation.models, predictors, cohort.groups, strict=True
            )
        )

    def play(key, state, federation, cohort):
        state, info = algorithm.step(key, state, federation, cohort)
        received = algorithm.receive(key, state, federation, cohort)
        personal = algorithm.personal(key, state, federation, cohort)
        return Round(
            state,
            info,
            logits(received, federation, cohort),
            logits(personal, federation, cohort),
        )

    return play


def cohort(present, t=0, places=CLIENTS):
    """The round's cohort with these clients of each group."""

    def slots(positions, clients, places):
        empty = places - len(positions)
        index = np.array([*positions, *[clients] * empty], np.int32)
        return Slots(index, np.arange(places) < len(positions))

    return Cohort(np.int32(t), tuple(map(slots, present, CLIENTS, places)), rounds=ROUNDS)


def with_rates(state, **rates):
    """The state with some of its method's rates replaced."""
    rates = {name: jnp.float32(rate) for name, rate in rates.items()}

    def is_options(node):
        return isinstance(node, Training)

    return jax.tree.map(
        lambda node: dataclasses.replace(node, **rates) if is_options(node) else node,
        state,
        is_leaf=is_options,
    )


def rates(state):
    """The method's rates, {name: value}."""
    (options,) = (
        node
        for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Training))
        if isinstance(node, Training)
    )
    return {tree.names(path)[0]: rate for path, rate in jax.tree.leaves_with_path(options)}


def group_of(path):
    """The group to which a leaf belongs: whatever differs per group is a tuple over the groups."""
    return next(
        (entry.idx for entry in path if isinstance(entry, jax.tree_util.SequenceKey)), None
    )


def assert_equal(actual, expected):
    """Bit for bit, structure, shapes and dtypes included."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), actual, expected)


def assert_close(actual, expected, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


def differs(one, other):
    return any(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def test_arguments_have_their_names_and_order(case):
    for name, function in case.algorithm._asdict().items():
        if function is not None:
            assert tuple(inspect.signature(function).parameters) == ARGUMENTS[name]


def test_a_round_keeps_the_form_of_the_state_and_reports_each_place(case, federation):
    places = (2, 1)
    some = cohort(SOME, places=places)
    state, info = jax.eval_shape(case.algorithm.step, jax.random.key(2), case.state, federation, some)
    like = jax.eval_shape(lambda state: state, case.state)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    assert jax.tree.leaves(state) == jax.tree.leaves(like)
    assert [loss.shape for loss in info.loss] == [(k,) for k in places]
    for traffic in info.up, info.down:
        assert [(leaf.shape, leaf.dtype) for leaf in traffic] == [((k,), jnp.int32) for k in places]


def test_everything_is_finite(case, federation):
    for present in EVERYONE, SOME, ONLY_SMALLER:
        done = case.play(jax.random.key(2), case.state, federation, cohort(present))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(done))


def test_three_scanned_rounds_are_three_rounds_whatever_the_padding(case, federation):
    key = jax.random.key(2)
    cohorts = [cohort(present, t) for t, present in enumerate((SOME, ONLY_SMALLER, EVERYONE))]
    state, infos = case.state, []
    for t, of_round in enumerate(cohorts):
        state, info, *_ = case.play(jax.random.fold_in(key, t), state, federation, of_round)
        infos.append(info)

    def pad(rows):
        return jnp.pad(rows, ((0, 0), (0, 2)), constant_values=50)

    padded = dataclasses.replace(
        federation,
        groups=tuple(
            dataclasses.replace(
                group,
                rows=pad(group.rows),
                validation_rows=pad(group.validation_rows),
                test_rows=pad(group.test_rows),
            )
            for group in federation.groups
        ),
    )
    rounds = programs(case.algorithm).rounds
    donated = jax.tree.map(jnp.copy, case.state)
    stack = jax.tree.map(lambda *leaves: np.stack(leaves), *cohorts)
    scanned, reported = rounds(key, donated, padded, stack)
    assert_equal(scanned, state)
    assert_equal(reported, jax.tree.map(lambda *leaves: np.stack(leaves), *infos))


def test_absent_clients_keep_their_state(case, federation):
    new = case.play(jax.random.key(2), case.state, federation, cohort(SOME)).state
    absent = [sorted(set(range(n)) - set(some)) for n, some in zip(CLIENTS, SOME, strict=True)]

    def entries(state):
        return jax.tree.map_with_path(
            lambda path, stacked, leaf: leaf[np.array(absent[group_of(path)])] if stacked else None,
            case.stacked,
            state,
        )

    assert_equal(entries(new), entries(case.state))


def test_an_architecture_with_nobody_present_stays_as_it_was(case, federation):
    """The larger one: clients of CompFL may train smaller experts than their own."""
    assert federation.models[0].size < federation.models[1].size
    new = case.play(jax.random.key(2), case.state, federation, cohort(ONLY_SMALLER)).state

    def larger(state):
        return jax.tree.map_with_path(
            lambda path, leaf: leaf if group_of(path) == 1 else None, state
        )

    assert jax.tree.leaves(larger(new))
    assert_equal(larger(new), larger(case.state))


def test_the_key_decides(case, federation):
    def play(seed):
        return case.play(jax.random.key(seed), case.state, federation, cohort(EVERYONE))

    assert_equal(play(2), play(2))
    assert differs(play(2).state, play(3).state)


def test_the_order_of_the_clients_does_not_matter(case, federation):
    orders = ((2, 0, 1), (1, 0))

    def reorder(values, stacked):
        return jax.tree.map_with_path(
            lambda path, mark, leaf: leaf[np.array(orders[group_of(path)])] if mark else leaf,
            stacked,
            values,
        )

    groups = federation.groups
    reordered = dataclasses.replace(
        federation, groups=reorder(groups, jax.tree.map(lambda leaf: True, groups))
    )
    key, everyone = jax.random.key(2), cohort(EVERYONE)
    done = case.play(key, case.state, federation, everyone)
    other = case.play(key, reorder(case.state, case.stacked), reordered, everyone)
    per_client = jax.tree.map(lambda leaf: True, done)._replace(state=case.stacked)
    assert_close(other, reorder(done, per_client), rtol=1e-6, atol=1e-6)


def test_a_client_computes_the_same_alone_and_beside_others(case, federation):
    """Two at once: the second group side by side, the first in two parts."""
    two = dataclasses.replace(federation, clients_at_once=2)
    key, everyone = jax.random.key(2), cohort(EVERYONE)
    together = Program(whole_round(case.algorithm))(key, case.state, two, everyone)
    alone = case.play(key, case.state, federation, everyone)
    assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_every_rate_has_an_effect_without_a_new_compilation(case, federation):
    def final(state):
        for t in range(ROUNDS):
            round_key = jax.random.fold_in(jax.random.key(2), t)
            state, _, *logits = case.play(round_key, state, federation, cohort(EVERYONE, t))
        return with_rates(state, **rates(case.state)), logits

    expected = final(case.state)
    effective = {
        name
        for name, rate in rates(case.state).items()
        if differs(final(with_rates(case.state, **{name: 0.5 * rate + 0.45})), expected)
    }
    assert effective == rates(case.state).keys() - WITHOUT_EFFECT.get(case.name, set())
    assert case.play.compilations == 1


def test_traffic_is_counted_in_scalars_of_clients_that_take_part(case, federation):
    state = with_rates(case.state, **WITHOUT_EXPLORATION.get(case.name, {}))
    info = case.play(jax.random.key(2), state, federation, cohort(SOME)).info
    for model, some, up, down in zip(federation.models, SOME, info.up, info.down, strict=True):
        expected = [TRAFFIC[case.name](model)] * len(some) + [0] * (len(up) - len(some))
        assert up.tolist() == down.tolist() == expected
