"""Every method against its plain-NumPy reference, round by round, in double precision.

The references have no keys, padding or devices. What jaxfl draws from a client's key in a round is recorded
and given to them as arrays. jaxfl's rounds are scanned; in a method's first comparison two clients run side
by side, and its lists of rows and cohorts are padded, as for four devices. None of this may change a result.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SIZES, long, tiny_links, tiny_partition, tiny_source, validating
from reference import nets, training

from jaxfl.core.client_map import everyone, per_group
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.core.initial_weights import initial_weights
from jaxfl.core.protocol import Cohort, Info, Slots
from jaxfl.data.federate import federate
from jaxfl.machine.placement import mesh_of
from jaxfl.registry import METHODS
from jaxfl.tasks import CLASSES, REGRESSION
from methods.cases import CASES, UNLIKE, Comparison
from methods.recording import at

TRAINING = dict(epochs=2, batch_size=3, lr=0.05, momentum=0.5, weight_decay=1e-2)
ROUNDS, PARTICIPATION = 4, 0.6
DIGITS = {"rtol": 1e-9, "atol": 1e-9}
FIRST = {method: next(iter(case.comparisons)) for method, case in CASES.items() if case.comparisons}
WHOLE = ("fedavg",)  # all comparisons run with every change; of other methods the first one,
MORE = (("per-fedavg", "exact"),)  # and these: only here a gradient goes through a gradient step
ON_DEVICES = ("fedavg",)


def rows(comparisons, often):
    """Return rows (method, comparison, ...) of a parametrised test; some run only with the long tests."""
    return [row if often(*row[:2]) else long(*row) for row in comparisons]


def compared_often(method, name):
    """Return whether a comparison runs with every change."""
    return method in WHOLE or name == FIRST[method] or (method, name) in MORE


@pytest.fixture(autouse=True)
def double_precision():
    """Compute in double precision: agreement to nine digits excludes any other formula."""
    with jax.enable_x64(True):
        yield


def test_cohorts_ask_something_of_every_comparison():
    """Every client is absent at times, several come back and train, and a round lacks the second group."""
    for sizes in (5,), (3, 2):
        groups = draw_cohorts(sizes, PARTICIPATION, ROUNDS, Comparison().cohorts)
        present = np.concatenate(
            [
                [np.isin(np.arange(n), index[mask]) for index, mask in zip(*of_group, strict=True)]
                for n, of_group in zip(sizes, groups, strict=True)
            ],
            axis=1,
        )
        assert not present.all(0).any() and present.any(0).all()
        back = [bool((np.diff(np.flatnonzero(of_client)) > 1).any()) for of_client in present.T]
        assert sum(back[i] for i, size in enumerate(SIZES) if size > 1) >= 2
    assert not present[:, 3:].any(1).all()


@pytest.mark.parametrize(
    ("method", "name"),
    rows([(method, name) for method, case in CASES.items() for name in case.comparisons], compared_often),
)
def test_method_agrees_with_its_reference(method, name):
    run, setting = jaxfl_run(method, name)
    assert_agree(run, reference_run(method, setting))


@pytest.mark.long
@pytest.mark.parametrize(
    "method", [method for method, name in FIRST.items() if len(CASES[method].comparisons[name].models) == 1]
)
def test_method_that_keeps_architectures_apart_agrees_with_its_reference_on_two(method):
    run, setting = jaxfl_run(method, FIRST[method], models=UNLIKE)
    assert_agree(run, reference_run(method, setting))


@pytest.mark.parametrize("method", ["fedavg", "fedper", long("scaffold"), long("ditto"), long("fedrep")])
def test_method_agrees_with_its_reference_in_a_regression(method):
    """The networks' three outputs are three targets; every client's are standardised alike."""
    run, setting = jaxfl_run(method, FIRST[method], task=REGRESSION)
    assert_agree(run, reference_run(method, setting))


@pytest.mark.parametrize(("method", "name"), rows(FIRST.items(), lambda method, _: method in ON_DEVICES))
def test_method_on_four_devices_agrees_with_its_reference(method, name):
    run, setting = jaxfl_run(method, name, devices=4)
    assert_agree(run, reference_run(method, setting))


@pytest.mark.parametrize(
    ("method", "name", "option", "value"),
    rows(
        [
            (method, name, *mistake)
            for method, case in CASES.items()
            for name, comparison in case.comparisons.items()
            for mistake in comparison.mistakes
        ],
        compared_often,
    ),
)
def test_reference_with_another_option_disagrees(method, name, option, value):
    run, setting = jaxfl_run(method, name)
    other = dataclasses.replace(setting.options, **{option: value})
    actual, expected = leaves(run), leaves(reference_run(method, setting._replace(options=other)))
    common = actual.keys() & expected.keys()  # an option may decide what clients hold
    assert not all(np.allclose(actual[path], expected[path], **DIGITS, equal_nan=True) for path in common)


def test_reference_that_leaves_out_single_rows_wherever_there_is_batchnorm_disagrees(monkeypatch):
    """The maps of the comparison's network have several pixels, and so a variance."""
    monkeypatch.setattr(nets, "least_rows", lambda names: 2 if any(map(nets.is_statistic, names)) else 1)
    run, setting = jaxfl_run("fedavg", "")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_agree(run, reference_run("fedavg", setting))


def assert_agree(actual, expected):
    """Compare all leaves by their names, to nine digits."""
    actual, expected = leaves(actual), leaves(expected)
    assert actual.keys() == expected.keys()
    for path, value in actual.items():
        np.testing.assert_allclose(value, expected[path], **DIGITS, err_msg=path)


def leaves(tree):
    """Return {path: NumPy array}, the same for weights of jaxfl and of a reference: "fc1/linear/kernel"."""

    def name(path):
        return jax.tree_util.keystr(path, simple=True, separator="/").replace("params/", "")

    return {name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


# ---- both sides of the comparison


class Setting(NamedTuple):
    """The arguments of a reference, explained in the docstring of the package `reference`."""

    clients: list
    initial: list
    cohorts: list
    draws_before_use: dict
    draws_of_preparation: object
    options: object
    x: np.ndarray


@functools.cache
def jaxfl_run(method, name, devices=1, task=CLASSES, models=None):
    """Return all states, losses and final logits of a method, and the setting that gave them."""
    case, comparison = CASES[method], CASES[method].comparisons[name]
    source = tiny_source()
    models = tuple((dataclasses.replace(model, task=task), n) for model, n in models or comparison.models)
    if task is REGRESSION:
        source = source._replace(labels=np.random.default_rng(1).normal(5, 9, (60, 3)).astype(np.float32))
    partition = varied(tiny_partition(source))
    federation = federate(source, partition, models, links=tiny_links())
    # Every client has its own numbering of classes; the references mix predictions whatever they mean.
    federation = dataclasses.replace(federation, unified=True, labelled=True)
    slots = draw_cohorts([n for _, n in models], PARTICIPATION, ROUNDS, comparison.cohorts)
    if name == FIRST[method]:
        slots = tuple(map(dealt, federation.groups, slots))
        federation = dataclasses.replace(widened(federation), clients_at_once=2)
    federation = dataclasses.replace(federation, mesh=mesh_of(devices))
    options = METHODS[method].config(**TRAINING | comparison.options)
    init_key, round_key, use_key = jax.random.split(jax.random.key(0), 3)
    preparation_key = jax.random.key(1)
    clients = reference_clients(source, partition, models)

    def recorded(draws, key, ids):
        def of_client(i):
            client_key = jax.random.fold_in(key, i)
            return jax.device_get(draws(client_key, clients[i], federation.models, options))

        return {i: of_client(i) for i in ids}

    places = [present(federation, slots, t) for t in range(ROUNDS)]
    round_keys = [jax.random.fold_in(round_key, t) for t in range(ROUNDS)]
    images = normalised(source, partition)

    def of_round(t):
        seen = images[case.images(init_key, round_keys[t], federation, options)]
        server = jax.device_get(case.draws_of_server(round_keys[t], options))
        draws = recorded(case.draws, round_keys[t], places[t])
        return training.Cohort(t, ROUNDS, draws, seen, server, images[~source.train])

    setting = Setting(
        clients=clients,
        initial=[leaves(weights) for weights in initial_weights(init_key, federation)],
        cohorts=[of_round(t) for t in range(ROUNDS)],
        draws_before_use=recorded(case.draws_before_use, use_key, range(len(clients))),
        draws_of_preparation=jax.device_get(
            case.draws_of_preparation(preparation_key, clients, options, ROUNDS)
        ),
        options=options,
        x=images[~source.train],
    )

    algorithm = METHODS[method].build(options)
    state = algorithm.init(init_key, federation, jax.tree.map(jnp.asarray, options))
    state = case.given(state, federation)
    cohorts = Cohort(np.arange(ROUNDS, dtype=np.int32), slots, ROUNDS)
    keys = round_key, use_key, preparation_key
    keys, federation, state = *federation.replicate((keys, federation)), federation.place(state)
    program = jax.jit(functools.partial(whole_run, algorithm))
    states, info, told, scores = jax.device_get(program(*keys, state, federation, cohorts, setting.x))
    for of_group, *reported in zip(slots, *info[:3], strict=True):
        for leaf in jax.tree.leaves(reported):
            assert not leaf[~of_group.mask].any()  # in an empty place nothing is trained or sent
    return {
        "state": [case.view(at(states, t), federation, t) for t in range(ROUNDS)],
        "loss": [
            {i: info.loss[group][t, place] for i, (group, place) in places[t].items()} for t in range(ROUNDS)
        ],
        "teacher": [
            {i: told[group][t, place] for i, (group, place) in places[t].items()}
            for t in range(ROUNDS if told else 0)
        ],
        "scores": {name: list(np.concatenate(of_groups)) for name, of_groups in scores.items()},
    }, setting


def whole_run(algorithm, round_key, use_key, preparation_key, state, federation, cohorts, x):
    """Return all rounds' states, reports and teachers' scores of x, and per group all clients' afterwards."""

    def one(state, cohort):
        key = jax.random.fold_in(round_key, cohort.round)
        state, info = algorithm.step(key, state, federation, cohort)
        state = federation.keep_placed(state)
        told = info.teacher and scores(info.teacher, cohort)
        return state, (state, Info(info.loss, info.up, info.down, None), told)

    def scores(predictors, cohort):
        def of_group(model, slots, p):
            return jax.lax.map(lambda one: p.predict(model, p.shared, one[1], x), (slots.index, p.stacked))

        return per_group(of_group, federation.models, cohort.groups, predictors)

    def logits(predict):
        return scores(predict(use_key, state, federation, last), last)

    last = everyone(federation, at(cohorts, -1))
    if algorithm.prepare:
        state, _ = algorithm.prepare(preparation_key, state, federation, in_other_places(federation, last))
    state, (states, info, told) = jax.lax.scan(one, state, cohorts)
    received = logits(algorithm.receive)
    deployed = received if algorithm.personal is algorithm.receive else logits(algorithm.personal)
    return states, info, told, {"received": received, "deployed": deployed}


def reference_run(method, setting):
    """Return the same from a method's reference."""
    case = CASES[method]
    clients, options = setting.clients, setting.options
    state = case.start(clients, setting.initial, options)
    state = case.prepare(state, clients, setting.draws_of_preparation, options, ROUNDS)
    states, losses, teachers = [], [], []
    for cohort in setting.cohorts:
        state, loss, *told = case.step(state, clients, cohort, options)
        states.append(state)
        losses.append(loss)
        teachers += told
    scores = case.scores(state, clients, setting.draws_before_use, options, setting.x)
    return {"state": states, "loss": losses, "teacher": teachers, "scores": scores}


# ---- federations


def widened(federation):
    """Return the same clients with longer lists of rows."""

    def pad(group):
        names = ("rows", "validation_rows", "test_rows")
        extra = ((0, 0), (0, TRAINING["batch_size"]))  # one more batch, if padding counted
        wide = {name: np.pad(getattr(group, name), extra, constant_values=50) for name in names}
        return dataclasses.replace(group, **wide)

    return dataclasses.replace(federation, groups=tuple(map(pad, federation.groups)))


def dealt(group, slots):
    """Arrange a group's cohorts (rounds, k) in eight places of four devices, the first two on one device."""
    places = [0, 1, 5, 6, 7][: slots.mask.shape[1]]
    index = np.full((ROUNDS, 8), len(group.id), np.int32)
    mask = np.zeros((ROUNDS, 8), bool)
    index[:, places], mask[:, places] = slots.index, slots.mask
    return Slots(index, mask)


def in_other_places(federation, cohort):
    """Return a cohort of all clients as `balance` may arrange it: in another order, with empty places."""

    def of_group(group):
        index = np.full(8, len(group.id), np.int32)
        index[[0, 1, 5, 6, 7][: len(group.id)]] = np.arange(len(group.id))[::-1]
        return Slots(index, index < len(group.id))

    return dataclasses.replace(cohort, groups=tuple(map(of_group, federation.groups)))


def varied(partition):
    """Give every client of a partition its own labels and validation rows."""
    rng = np.random.default_rng(0)
    return validating(partition)._replace(relabel=rng.permuted(partition.relabel, axis=1))


def reference_clients(source, partition, models):
    """Return a partition's clients with their images."""
    x = normalised(source, partition)
    groups = np.repeat(np.arange(len(models)), [n for _, n in models])

    def outputs(i, rows):
        if source.task is CLASSES:
            return partition.relabel[i][source.labels[rows]]
        trained = source.labels[np.concatenate(partition.train)].astype(float)
        return (source.labels[rows] - trained.mean(0)) / trained.std(0)

    return [
        training.Client(
            group=int(group),
            net=nets.NETS[models[group][0].name],
            x=x[train],
            y=outputs(i, train),
            x_validation=x[validation],
            y_validation=outputs(i, validation),
            x_public=x[partition.public],
            y_public=outputs(i, partition.public),
        )
        for i, (group, train, validation) in enumerate(
            zip(groups, partition.train, partition.validation, strict=True)
        )
    ]


def normalised(source, partition):
    """Standardise all images by mean and deviation of those on which clients train, who share none."""
    real = source.images[np.concatenate(partition.train)].astype(float)
    return (source.images - real.mean((0, 1, 2))) / real.std((0, 1, 2))


def present(federation, slots, t):
    """Return {client: (group, place in the group's cohort)} of the clients of round t."""
    return {
        int(np.asarray(federation.groups[group].id)[of_group.index[t, place]]): (group, place)
        for group, of_group in enumerate(slots)
        for place in np.flatnonzero(of_group.mask[t])
    }
