"""The guarantees of every registered method, as one table: a new method is checked as soon as it has a case.

A method is built from rates that are NaN; its real rates come with `init`. So a rate that is read while
building, where a change would recompile, shows as NaN in the results.
"""

import ast
import dataclasses
import inspect
import itertools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from conftest import arrays_of, assert_same, comparable, differ, long, tiny_cnn, tiny_models
from conftest import cohort as in_places

import jaxfl
from jaxfl import algorithms, cli, mechanisms
from jaxfl.core.job import traced
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Algorithm, messages
from jaxfl.core.protocol_check import check, checked
from jaxfl.data.federation import Federation
from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.folder.variant import choose
from jaxfl.registry import METHODS
from jaxfl.runs import promises
from jaxfl.runs.trial import Trial, rates, whole_round, with_rates
from methods.cases import CASES, Case, keeps_apart, short
from methods.rounds import alike, billed, federated, initial, mlp

OPTIONS = {"epochs": 2, "batch_size": 3}
TOLERANCE = 1e-6  # absolute and relative, where the order of sums changes
ROUNDS = 3
EVERYONE = range(5)  # clients 0, 1 and 2 of the first group, 3 and 4 of the second, where there are two
SOME = (1, 0, 3)
ONLY_SMALLER = (0, 1, 2)

STEPPING = ("fccl", "fedavg", "fedbabu", "fedrod")  # the others are checked with the long tests
SENDING = ("dfedavg", "fedcmd", "flexifed", "pfedsim")  # their own code counts what is sent
OTHERWISE = (  # under local statistics, a first round's traffic is not what their cases state
    ("feddf", "pfeddf", "pfedclub", "pfedclub-plus", "pfedhr")  # refuse them
    + ("fedap", "fedbn", "pfedbayes")  # treat norms apart
    + ("compfl-dd", "fedfomo", "fedproto", "hermes")  # later rounds differ; FedFomo's reduction has both
)

ARGUMENTS = {
    "init": ["key", "federation", "hyper"],
    "receive": ["key", "state", "federation", "cohort"],
    "step": ["key", "state", "federation", "cohort"],
    "personal": ["key", "state", "federation", "cohort"],
    "host": ["key", "state", "federation", "cohort"],
    "matrices": ["state"],
    "embeddings": ["state"],
    "prepare": ["key", "state", "federation", "cohort"],
}


class Played(NamedTuple):
    """A method after one round, so that its clients' states differ."""

    case: Case
    federation: Federation
    algorithm: Algorithm
    play: Program  # (key, state, federation, cohort) -> Round
    state: Any
    stacked: Any  # the state's tree, the number of a leaf's axes with one entry per client


APART, TOGETHER = ((tiny_cnn("cnn"), 5),), tiny_models()
AMONG_PAIRS = ("fedamp", "fedfomo")  # what pairs of an architecture's clients share is not that of all pairs


def rows_of(name):
    """Return the row of a method: on two architectures, or on one, in half of the time, where that is enough.

    FedAvg stands on two for those that keep architectures apart.
    """
    if not keeps_apart(name) or name in ("fedavg", *AMONG_PAIRS):
        return [pytest.param((name, TOGETHER), id=name)]
    of_two = pytest.param((name, TOGETHER), id=f"{name} of two", marks=pytest.mark.long)
    return [pytest.param((name, APART), id=name), of_two]


@pytest.fixture(scope="module", params=[row for name in METHODS for row in rows_of(name)])
def played(request):
    """Return a method on five unequal clients with validation rows, which some methods need."""
    name, models = request.param
    method, federation = METHODS[name], federated(*models, validates=True)
    config = method.config(**OPTIONS, **CASES[method.name].short)
    algorithm = method.build(jax.tree.map(lambda rate: math.nan, config))

    def start(federation):
        return algorithm.init(jax.random.key(0), federation, traced(config))

    # A leaf that grows with the number of clients has one entry per client.
    twice = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), federation.groups)
    shapes = jax.eval_shape(start, federation)
    doubled = jax.eval_shape(start, dataclasses.replace(federation, groups=twice))
    stacked = jax.tree.map(lambda one, other: sum(map(int.__ne__, one.shape, other.shape)), shapes, doubled)

    play = Program(whole_round(algorithm))
    state = play(jax.random.key(1), start(federation), federation, cohort(federation, EVERYONE)).state
    return Played(CASES[name], federation, algorithm, play, state, stacked)


@pytest.fixture
def federation(played):
    """Return the clients."""
    return played.federation


def cohort(federation, ids, t=0):
    """Return round t with these clients; there is an empty place, so places are not as many as clients."""
    return in_places(federation, ids, t, places=[len(group.id) + 1 for group in federation.groups])


def group_of(path):
    """Return a leaf's group: whatever differs per group is a tuple with one entry per group."""
    places = (entry.idx for entry in path if isinstance(entry, jax.tree_util.SequenceKey))
    return next(places, None)


def test_arguments_have_their_names_and_order(played):
    for name, function in played.algorithm._asdict().items():
        if callable(function):
            assert list(inspect.signature(function).parameters) == ARGUMENTS[name]


@pytest.mark.long
def test_every_method_passes_the_check_of_own_methods(played, federation):
    method = METHODS[played.case.method]
    hyper = traced(method.config(**OPTIONS, **played.case.short))
    check(checked(played.algorithm, method.build), federation, hyper, ROUNDS)


def test_a_round_keeps_the_form_of_the_state_and_reports_per_place(played, federation):
    of_round = cohort(federation, SOME)
    done = played.play(jax.random.key(2), played.state, federation, of_round)
    before, state = (jax.tree.map(jax.typeof, state) for state in (played.state, done.state))
    assert jax.tree.structure(state) == jax.tree.structure(before)
    assert jax.tree.leaves(state) == jax.tree.leaves(before)
    info, places = done.info, [len(slots.mask) for slots in of_round.groups]
    assert [loss.shape for loss in info.loss] == [(k,) for k in places]
    for counts in info.up, info.down:
        for of_group, k in zip(counts, places, strict=True):
            assert {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(of_group)} == {
                ((k,), np.dtype(np.int32))
            }


@pytest.mark.parametrize(
    "promise",
    [promises.stays_finite, promises.leaves_the_absent_alone, promises.counts_what_is_sent],
    ids=lambda promise: promise.__name__,
)
def test_promises_that_need_no_further_program_are_kept(played, federation, promise):
    """The others are tried with the long tests, by test_promises.py."""
    of_clients, state = jax.tree.map(bool, played.stacked), played.state
    for t in range(1, ROUNDS):  # FedCMD's second phase begins with new models for all
        state = played.play(jax.random.key(t), state, federation, cohort(federation, EVERYONE, t)).state
    without_host = played.algorithm._replace(host=None)
    assert promise(Trial(None, without_host, played.play, federation, state, of_clients)) is None


def test_idle_clients_have_no_loss(played, federation):
    for present in EVERYONE, SOME, ONLY_SMALLER:
        of_round = cohort(federation, present)
        done = jax.device_get(played.play(jax.random.key(2), played.state, federation, of_round))
        idle = done.info.idle or [np.zeros_like(slots.mask) for slots in of_round.groups]
        for slots, loss, of_group in zip(of_round.groups, done.info.loss, idle, strict=True):
            np.testing.assert_array_equal(loss > 0, slots.mask & ~of_group)


def test_models_right_after_training_are_what_a_client_alone_gets_back_or_deploys(played, federation):
    """With one client there is nothing to average; its architecture is the one that trains no other."""
    done = played.play(jax.random.key(2), played.state, federation, cohort(federation, [1]))
    models = jax.device_get((done.trained, done.received, done.personal))
    trained, *others = (of_groups[0][0] for of_groups in models)
    returned = any(np.allclose(trained, other, rtol=1e-5, atol=1e-5) for other in others)
    assert returned == played.case.returns
    done = played.play(jax.random.key(2), played.state, federation, cohort(federation, EVERYONE))
    of_all = jax.device_get(done.trained)
    assert any(differ(of_group[0], of_group[1]) for of_group in of_all)


def test_an_architecture_without_a_client_present_keeps_its_state(played, federation):
    """The larger one is absent: a client may train another architecture if it is smaller than its own."""
    if len(federation.groups) == 1:
        pytest.skip("it keeps architectures apart")
    smaller, larger = federation.models
    assert smaller.size < larger.size

    def of_larger(state):
        return [leaf for path, leaf in jax.tree.leaves_with_path(state) if group_of(path) == 1]

    new = played.play(jax.random.key(2), played.state, federation, cohort(federation, ONLY_SMALLER)).state
    assert of_larger(new)
    assert_same(of_larger(new), of_larger(played.state))


def test_the_key_determines_a_round(played, federation):
    def play(seed):
        return played.play(jax.random.key(seed), played.state, federation, cohort(federation, EVERYONE))

    assert_same(play(2), play(2))
    assert differ(play(2).state, play(3).state)


def test_the_order_of_clients_does_not_matter(played, federation):
    of_numbers = {2: [1, 0], 3: [2, 0, 1], 5: [2, 0, 4, 1, 3]}
    orders = [np.array(of_numbers[len(group.id)]) for group in federation.groups]

    def reorder(values, stacked, orders):
        def of_leaf(path, axes, leaf):  # a matrix over pairs of all clients is ordered by their ids
            if group_of(path) is None:
                return leaf
            order = orders[group_of(path)]
            return leaf[np.ix_(*[order] * axes)]

        return jax.tree.map_with_path(of_leaf, stacked, jax.device_get(values))

    everything = jax.tree.map(lambda leaf: 1, federation.groups)
    reordered = dataclasses.replace(federation, groups=reorder(federation.groups, everything, orders))
    key, everyone = jax.random.key(2), cohort(federation, EVERYONE)
    done = played.play(key, played.state, federation, everyone)
    other = played.play(key, reorder(played.state, played.stacked, orders), reordered, everyone)
    stacked = jax.tree.map(lambda leaf: 1, done)._replace(state=played.stacked)
    present = [np.arange(len(order)) for order in orders]  # without the empty places
    assert_same(reorder(other, stacked, present), reorder(done, stacked, orders), tolerance=1e-6)


def test_every_rate_has_an_effect_and_none_recompiles(played, federation):
    def outcome(state):
        for t in range(ROUNDS):
            round_key = jax.random.fold_in(jax.random.key(2), t)
            done = played.play(round_key, state, federation, cohort(federation, EVERYONE, t))
            state = done.state
        return done._replace(state=with_rates(state, rates(played.state)))

    usual = outcome(played.state)
    effective = {
        name
        for name, rate in rates(played.state).items()
        if differ(outcome(with_rates(played.state, {name: 0.46 + 0.47 * rate})), usual)
    }
    assert effective == rates(played.state).keys() - set(played.case.idle_rates)
    assert played.play.compilations == 1


@pytest.mark.parametrize("t", [0, ROUNDS - 1])
def test_traffic_is_counted_in_scalars_for_clients_that_are_present(played, federation, t):
    if played.case.traffic is None:
        pytest.skip("chance decides how much is sent")
    state = with_rates(played.state, played.case.traffic_rates)
    done = played.play(jax.random.key(2), state, federation, cohort(federation, SOME, t))
    info = jax.device_get(done.info)
    assert_counted(played.case, federation, info.up, info.down, t)


@pytest.mark.parametrize(
    "name", [name if name in SENDING else long(name) for name in METHODS if name not in OTHERWISE]
)
def test_statistics_that_stay_on_clients_are_not_counted_as_sent(name):
    case, federation = CASES[name], federated((mlp(norm="batch"), 3), (mlp(), 2), validates=True)
    options = OPTIONS | case.short | case.traffic_rates
    up, down, _ = billed(name, federation, SOME, bn_stats="local", **options)
    assert_counted(case, federation, up, down, 0)


def assert_counted(case, federation, ups, downs, t):
    """Compare what some clients sent and received in round t with a case's traffic, without statistics."""
    for model, group, up, down in zip(federation.models, federation.groups, ups, downs, strict=True):
        present = [i for i in SOME if i in np.asarray(group.id)]
        expected = case.traffic(model, federation.models, t)
        both = expected if isinstance(expected, tuple) else (expected, expected)
        for counted, scalars in zip((up, down), both, strict=True):
            of_each = [scalars(i) if callable(scalars) else scalars for i in present]
            counted = sum(size * count for size, count in messages(counted).items())
            assert counted.tolist() == of_each + [0] * (len(counted) - len(present))


@pytest.mark.parametrize("name", ["fedfomo", "hermes"])
def test_methods_that_score_on_validation_rows_refuse_clients_without(name):
    with pytest.raises(JaxflError, match="--validation-fraction"):
        initial(name, alike())


@pytest.mark.parametrize("name", [name if name in STEPPING else long(name) for name in METHODS])
def test_epochs_are_not_read_where_steps_are_given(name, monkeypatch):
    method, federation = METHODS[name], federated(*TOGETHER, validates=True)
    monkeypatch.setattr(method.config, "epochs", "none")  # as the default: others are refused with steps
    config = method.config(**OPTIONS | CASES[name].short | {"epochs": "none", "steps": 2})
    algorithm, everyone = method.build(config), cohort(federation, EVERYONE)

    def play(key):
        state = algorithm.init(key, federation, traced(config))
        if algorithm.prepare:
            state, _ = algorithm.prepare(key, state, federation, everyone)
        return algorithm.step(key, state, federation, everyone)

    jax.eval_shape(play, jax.random.key(0))


def test_no_method_calls_cond_or_switch_of_jax():
    """In a branch devices may wait for each other for ever; jaxfl's own `cond` counts its operations."""
    folders = [Path(package.__file__).parent for package in (algorithms, mechanisms)]
    paths = [[*folder.rglob("*.py")] for folder in folders]
    assert all(paths)
    for path in itertools.chain(*paths):
        for node in ast.walk(ast.parse(path.read_text())):
            ours = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fl"
            names = {node.attr} if isinstance(node, ast.Attribute) and not ours else set()
            if isinstance(node, ast.ImportFrom) and re.match(r"jax(\.|$)", node.module or ""):
                names = {alias.name for alias in node.names}
            assert not names & {"cond", "switch"}, path


# ---- the command

DIGITS = (
    "--dataset digits --partition quantity,min_samples=4 --clients 12 --participation 0.4 --models "
    "mlp,hidden=4 mcmahan,width=0.06,padding=same,features=4 --epochs 2 --rounds 4 --eval-every 2 --devices 1"
)


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_a_run_on_four_devices_equals_that_on_one(name, dataset, tmp_path):
    """Metrics, results, checkpoints and models agree up to the tolerance that docs/devices.md states."""
    for devices in "14":
        cli.main(
            f"run {short(name)} {' '.join(dataset)} --partition quantity,min_samples=4 --clients 12 "
            "--participation 0.9 --models mlp,hidden=4 mcmahan,width=0.06,padding=same,features=4 "
            f"--epochs 2 --rounds 3 --eval-every 3 --devices {devices} --run-dir {tmp_path / devices}".split()
        )
    one, four = (outcome(tmp_path / devices) for devices in "14")
    jax.tree.map(assert_alike, four, one)
    run = jaxfl.load(tmp_path / "4")
    for model, rows in zip(run.models, run.partition.test, strict=True):
        assert (model.predict(run.source.images[rows]) == run.source.labels[rows]).mean() == model.accuracy
        assert model.weights.keys() >= set(model.model.names)


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_a_run_with_clients_in_host_memory_equals_that_on_the_device(name, tmp_path, capsys):
    """Runs agree to the bit, with lost answers and newcomers; methods that need all clients are refused."""
    options = f"{short(name)} {DIGITS} --dropout 0.2 --newcomers 0.2 --score-cohort"
    on_host = f"run {options} --client-state host --run-dir {tmp_path / 'host'}".split()
    if CASES[name].all_clients:
        with pytest.raises(SystemExit):
            cli.main(on_host)
        assert "leave out --client-state host" in capsys.readouterr().err
        return
    cli.main(on_host)
    cli.main(f"run {options} --run-dir {tmp_path / 'device'}".split())
    host, device = (outcome(tmp_path / where) for where in ("host", "device"))
    jax.tree.map(np.testing.assert_array_equal, host, device)


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_seeds_as_one_program_equal_separate_runs(name, tmp_path, capsys):
    """All that they write agrees up to rounding; methods whose server has steps of its own run in turn."""
    options = f"{short(name)} {DIGITS}"
    cli.main(f"compare {options} --seeds 2 --run-dir {tmp_path / 'both'}".split())
    turns = choose(short(name)).programs.algorithm.host
    assert ("one after another" if turns else "2 runs as one program") in capsys.readouterr().out
    for seed in "01":
        cli.main(f"run {options} --seed {seed} --run-dir {tmp_path / seed}".split())
        (folder,) = (tmp_path / "both").glob(f"*/seed-{seed}")
        jax.tree.map(assert_alike, outcome(folder), outcome(tmp_path / seed))


def outcome(folder):
    """Return the metrics, the result and the arrays of the last checkpoint of a finished run."""
    result, metrics = store.read_finished(folder)
    lines = [comparable(line) for line in metrics]
    for line in lines:  # clients are in the order of their places on the devices
        order = np.argsort(line["clients"])
        of_clients = [key for key in line if key.startswith("client")]
        line.update({key: np.array(line[key], float)[order] for key in of_clients})
    return lines, comparable(result), arrays_of(folder / store.CHECKPOINTS / str(len(lines)))


def assert_alike(actual, expected):
    """Compare two leaves: strings, or numbers up to rounding."""
    if isinstance(expected, str):
        assert actual == expected
    else:
        np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_memory_that_stays_on_the_server_is_not_counted_as_sent():
    """An optimiser's moments are such memory."""
    federation = federated(*TOGETHER, validates=True)
    _, down, *_ = billed("fedavg", federation, SOME, server_optimizer="adam", **OPTIONS)
    plain = billed("fedavg", federation, SOME, **OPTIONS)
    assert_same(down, plain[1])
