"""What every registered method promises, as one table: a new method is checked as soon as it has a row.

A method is built from rates that are NaN; its real rates come with `init`. So a rate that is read while
building, where a change would recompile, shows as NaN in the results.
"""

import dataclasses
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, PUBLIC, SHORT, arrays_of, comparable
from jax.sharding import AxisType

from jaxfl import cli
from jaxfl.core import tree
from jaxfl.core.check import check, checked
from jaxfl.core.engine import programs, traced
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Algorithm, Cohort, Info, Slots
from jaxfl.core.training import Training
from jaxfl.registry import METHODS
from jaxfl.runs import store

pytestmark = pytest.mark.usefixtures("quick_compilation")

OPTIONS = {"epochs": 2, "batch_size": 3}
TOLERANCE = 1e-6  # absolute and relative, where the order of sums changes
ROUNDS = 3
CLIENTS = (3, 2)  # of each group; every cohort has as many places, so a method compiles once
EVERYONE = ((0, 1, 2), (0, 1))
SOME = ((1, 0), (0,))
ONLY_SMALLER = ((0, 1, 2), ())
DEALT = ([0, 1, 2], [4, 6])  # of eight places on four devices: two clients side by side, three alone

ARGUMENTS = {
    "init": ["key", "federation", "hyper"],
    "receive": ["key", "state", "federation", "cohort"],
    "step": ["key", "state", "federation", "cohort"],
    "personal": ["key", "state", "federation", "cohort"],
    "host": ["key", "state", "federation", "cohort"],
    "matrices": ["state"],
    "prepare": ["key", "state", "federation", "cohort"],
}

# Scalars that a client of this model sends, and receives if that is another number, in the first round.
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
    "fedcmd": lambda model: (model.size + 1, model.size),
    "mnfl": lambda model: (2 * PUBLIC * CLASSES, PUBLIC * CLASSES + PUBLIC),
    "mnfl-homogeneous": lambda model: model.size,
    "draftfed": lambda model: drafts(model),
    "pfedclub": lambda model: (model.size, 0),  # nobody has a teacher before the server's first step
    "pfedclub-plus": lambda model: (model.size, 0),
}


def drafts(model):
    """Of the tests' two networks one has convolutions: (8, 8) and (4, 4) pixels."""
    first, last = (model.blocks[i].module for i in (0, 1))
    logits = PUBLIC * CLASSES
    if not model.convolutions:
        return logits
    return logits + PUBLIC * (64 * first.features + 16 * last.features)


TRAFFIC_RATES = {"compfl": {"eps": 0.0}}  # every client then trains its own expert

# Of two architectures one is the only teacher: its weight is 1 at any temperature.
# The step towards a teacher belongs to another transfer than the default.
# pFedClub's server computes outside of the step.
OF_SERVER = {"server_lr", "tau", "lam"}
WITHOUT_EFFECT = {
    "compfl": {"tau"},
    "mnfl-homogeneous": {"transfer_lr"},
    "pfedclub": OF_SERVER,
    "pfedclub-plus": OF_SERVER | {"eta"},
}


class Round(NamedTuple):
    """All that a method computes in a round; the logits after it, per group (k_g, images, outputs)."""

    state: Any
    info: Info
    received: tuple
    personal: tuple


class Case(NamedTuple):
    """A method whose clients are apart from each other, because one round has been run."""

    name: str
    algorithm: Algorithm
    play: Program  # (key, state, federation, cohort) -> Round
    state: Any
    stacked: Any  # the state's tree, True where a leaf has one entry per client


@pytest.fixture(scope="module", params=METHODS.values(), ids=METHODS)
def case(request, federation):
    method = request.param
    config = method.config(**OPTIONS, **SHORT.get(method.name, {}))
    algorithm = method.build(jax.tree.map(lambda rate: math.nan, config))

    def start(federation):
        return algorithm.init(jax.random.key(0), federation, traced(config))

    # Whatever grows with the number of clients has one entry per client.
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), federation.groups)
    shapes = jax.eval_shape(start, federation)
    doubled = jax.eval_shape(start, dataclasses.replace(federation, groups=twice))
    stacked = jax.tree.map(lambda one, other: one.shape != other.shape, shapes, doubled)

    play = Program(whole_round(algorithm))
    state = play(jax.random.key(1), start(federation), federation, cohort(EVERYONE)).state
    return Case(method.name, algorithm, play, state, stacked)


def whole_round(algorithm):
    """The function ``(key, state, federation, cohort) -> Round`` of an algorithm."""

    def logits(predictors, federation, cohort):
        x = federation.inputs(jnp.arange(40, 44))
        return tuple(
            jax.lax.map(
                lambda one: predictor.predict(model, predictor.shared, one[1], x),  # noqa: B023
                (slots.index, predictor.stacked),
            )
            for model, predictor, slots in zip(federation.models, predictors, cohort.groups, strict=True)
        )

    def play(key, state, federation, cohort):
        state, info = algorithm.step(key, state, federation, cohort)
        received, personal = (
            logits(predictors(key, state, federation, cohort), federation, cohort)
            for predictors in (algorithm.receive, algorithm.personal)
        )
        return Round(state, info, received, personal)

    return play


def cohort(present, t=0, places=CLIENTS):
    """Round t with these clients of each group, by position."""

    def slots(present, clients, places):
        index = [*present] + [clients] * (places - len(present))
        return Slots(np.array(index, np.int32), np.arange(places) < len(present))

    return Cohort(np.int32(t), tuple(map(slots, present, CLIENTS, places)), rounds=ROUNDS)


def is_options(node):
    return isinstance(node, Training)


def rates(state):
    """The rates that a state carries, {name: value}."""
    (options,) = filter(is_options, jax.tree.leaves(state, is_leaf=is_options))
    return {tree.names(path)[0]: rate for path, rate in jax.tree.leaves_with_path(options)}


def with_rates(state, rates):
    """The state with other values of some rates."""
    return jax.tree.map(
        lambda node: dataclasses.replace(node, **traced(rates)) if is_options(node) else node,
        state,
        is_leaf=is_options,
    )


def group_of(path):
    """Whose leaf it is: whatever differs per group is a tuple with one entry per group."""
    places = (entry.idx for entry in path if isinstance(entry, jax.tree_util.SequenceKey))
    return next(places, None)


def assert_equal(actual, expected):
    """Compare two trees bit for bit, dtypes and structure included."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), actual, expected)


def assert_close(actual, expected, tolerance):
    """Compare two trees up to rounding."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


def differ(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return not all(np.array_equal(a, b) for a, b in pairs)


def test_arguments_have_their_names_and_order(case):
    for name, function in case.algorithm._asdict().items():
        if function is not None:
            assert list(inspect.signature(function).parameters) == ARGUMENTS[name]


def test_the_check_of_own_methods_lets_it_pass(case, federation):
    hyper = traced(METHODS[case.name].config(**OPTIONS, **SHORT.get(case.name, {})))
    check(checked(case.algorithm, METHODS[case.name].build), federation, hyper, ROUNDS)


def test_a_round_keeps_the_form_of_the_state_and_reports_per_place(case, federation):
    places = (2, 1)
    arguments = case.state, federation, cohort(SOME, places=places)
    state, info = jax.eval_shape(case.algorithm.step, jax.random.key(2), *arguments)
    before = jax.eval_shape(lambda state: state, case.state)
    assert jax.tree.structure(state) == jax.tree.structure(before)
    assert jax.tree.leaves(state) == jax.tree.leaves(before)
    assert [loss.shape for loss in info.loss] == [(k,) for k in places]
    for counts in info.up, info.down:
        assert [(leaf.shape, leaf.dtype) for leaf in counts] == [((k,), jnp.int32) for k in places]


def test_everything_is_finite(case, federation):
    for present in EVERYONE, SOME, ONLY_SMALLER:
        done = case.play(jax.random.key(2), case.state, federation, cohort(present))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(done))


def test_absent_clients_keep_their_state(case, federation):
    absent = [np.setdiff1d(range(n), some) for n, some in zip(CLIENTS, SOME, strict=True)]
    ids = np.concatenate([group.id[places] for group, places in zip(federation.groups, absent, strict=True)])

    def of_leaf(path, stacked, leaf):
        if not stacked:
            return None
        if group_of(path) is None:  # a matrix over pairs of clients
            return leaf[ids], leaf[:, ids]
        return leaf[absent[group_of(path)]]

    def theirs(state):
        return jax.tree.map_with_path(of_leaf, case.stacked, state)

    new = case.play(jax.random.key(2), case.state, federation, cohort(SOME)).state
    assert_equal(theirs(new), theirs(case.state))


def test_an_architecture_without_a_client_present_keeps_its_state(case, federation):
    """The larger one: a client may train another architecture if it is smaller than its own."""
    smaller, larger = federation.models
    assert smaller.size < larger.size

    def of_larger(state):
        return [leaf for path, leaf in jax.tree.leaves_with_path(state) if group_of(path) == 1]

    new = case.play(jax.random.key(2), case.state, federation, cohort(ONLY_SMALLER)).state
    assert of_larger(new)
    assert_equal(of_larger(new), of_larger(case.state))


def test_the_key_decides(case, federation):
    def play(seed):
        return case.play(jax.random.key(seed), case.state, federation, cohort(EVERYONE))

    assert_equal(play(2), play(2))
    assert differ(play(2).state, play(3).state)


def test_the_order_of_clients_does_not_matter(case, federation):
    orders = (np.array([2, 0, 1]), np.array([1, 0]))

    def reorder(values, stacked):
        def of_leaf(path, mark, leaf):  # a matrix over pairs of clients goes by their ids
            return leaf[orders[group_of(path)]] if mark and group_of(path) is not None else leaf

        return jax.tree.map_with_path(of_leaf, stacked, values)

    everything = jax.tree.map(lambda leaf: True, federation.groups)
    reordered = dataclasses.replace(federation, groups=reorder(federation.groups, everything))
    key, everyone = jax.random.key(2), cohort(EVERYONE)
    done = case.play(key, case.state, federation, everyone)
    other = case.play(key, reorder(case.state, case.stacked), reordered, everyone)
    stacked = jax.tree.map(lambda leaf: True, done)._replace(state=case.stacked)
    assert_close(other, reorder(done, stacked), tolerance=1e-6)


def test_rounds_may_be_scanned_and_clients_padded_side_by_side_and_on_four_devices(case, federation):
    """Against one round after another on one device, up to the tolerance that docs/devices.md states."""
    key = jax.random.key(2)
    cohorts = [cohort(present, t) for t, present in enumerate((SOME, ONLY_SMALLER, EVERYONE))]
    state, infos = case.state, []
    for t, of_round in enumerate(cohorts):
        state, info, *_ = case.play(jax.random.fold_in(key, t), state, federation, of_round)
        infos.append(info._replace(trained=None))

    def widen(group):
        names = ("rows", "validation_rows", "test_rows")
        rows = {name: getattr(group, name) for name in names}
        extra = ((0, 0), (0, OPTIONS["batch_size"]))  # one more batch, if padding counted
        wide = jax.tree.map(lambda r: jnp.pad(r, extra, constant_values=50), rows)
        return dataclasses.replace(group, **wide)

    def deal(slots, places):
        index, mask = np.full(8, len(slots.mask), np.int32), np.zeros(8, bool)
        index[places], mask[places] = slots
        return Slots(index, mask)

    def of_places(leaves):
        return tuple(leaf[:, places] for leaf, places in zip(leaves, DEALT, strict=True))

    mesh = jax.make_mesh((4,), ("clients",), axis_types=(AxisType.Auto,))
    groups = tuple(map(widen, federation.groups))
    other = dataclasses.replace(federation, groups=groups, clients_at_once=2, mesh=mesh)
    other = other.replicate(other)
    copy = jax.tree.map(jnp.copy, case.state)  # the engine's programs consume the state
    key, copy = other.replicate((key, copy))
    dealt = [dataclasses.replace(one, groups=tuple(map(deal, one.groups, DEALT))) for one in cohorts]
    stack = jax.tree.map(lambda *leaves: np.stack(leaves), *dealt)
    scanned, reports = programs(case.algorithm).rounds(key, copy, other, stack)
    assert_close(scanned, state, TOLERANCE)
    info = reports.info
    info = info._replace(loss=of_places(info.loss), up=of_places(info.up), down=of_places(info.down))
    assert_close(info, jax.tree.map(lambda *leaves: np.stack(leaves), *infos), TOLERANCE)


def test_every_rate_has_an_effect_and_none_recompiles(case, federation):
    def outcome(state):
        for t in range(ROUNDS):
            round_key = jax.random.fold_in(jax.random.key(2), t)
            done = case.play(round_key, state, federation, cohort(EVERYONE, t))
            state = done.state
        return done._replace(state=with_rates(state, rates(case.state)))

    usual = outcome(case.state)
    effective = {
        name
        for name, rate in rates(case.state).items()
        if differ(outcome(with_rates(case.state, {name: 0.45 + 0.5 * rate})), usual)
    }
    assert effective == rates(case.state).keys() - WITHOUT_EFFECT.get(case.name, set())
    assert case.play.compilations == 1


def test_traffic_is_counted_in_scalars_for_clients_that_are_present(case, federation):
    state = with_rates(case.state, TRAFFIC_RATES.get(case.name, {}))
    info = case.play(jax.random.key(2), state, federation, cohort(SOME)).info
    for g, model in enumerate(federation.models):
        present, absent = len(SOME[g]), CLIENTS[g] - len(SOME[g])
        expected = TRAFFIC[case.name](model)
        up, down = expected if isinstance(expected, tuple) else (expected, expected)
        assert info.up[g].tolist() == present * [up] + absent * [0]
        assert info.down[g].tolist() == present * [down] + absent * [0]


# ---- the command, with several devices


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "fedavg" else pytest.mark.long) for name in METHODS],
)
def test_a_run_on_four_devices_is_that_on_one(name, dataset, tmp_path):
    """All that it writes, and its last checkpoint, up to the tolerance that docs/devices.md states."""
    choice = ",".join([name, *(f"{option}={value}" for option, value in SHORT.get(name, {}).items())])
    for devices in "14":
        cli.main(
            f"run {choice} {' '.join(dataset)} --partition quantity,min_samples=4 --clients 12 "
            "--participation 0.9 --models mlp,hidden=4 mcmahan,width=0.06,padding=same "
            f"--epochs 2 --rounds 3 --eval-every 3 --devices {devices} --run-dir {tmp_path / devices}".split()
        )
    one, four = (outcome(tmp_path / devices) for devices in "14")
    jax.tree.map(assert_alike, four, one)


def outcome(folder):
    """Metrics, result and the arrays of the last checkpoint of a finished run."""
    result, metrics = store.read_finished(folder)
    lines = [comparable(line) for line in metrics]
    for line in lines:  # its clients, in the order of their places on the devices
        order = np.argsort(line["clients"])
        of_clients = [key for key in line if key.startswith("client")]
        line.update({key: np.array(line[key])[order] for key in of_clients})
    return lines, comparable(result), arrays_of(folder / store.CHECKPOINTS / str(len(lines)))


def assert_alike(actual, expected):
    """Compare two leaves: words, or numbers up to rounding."""
    if isinstance(expected, str):
        assert actual == expected
    else:
        np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
