"""Clients that have never trained change nothing for the others, and train when they join."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import SIZES, assert_same, cohort, long, tiny_cnn, tiny_partition, tiny_source

from jaxfl.core.cohorts import in_parts
from jaxfl.core.engine import newcomers_in_places
from jaxfl.data.federate import federate, set_apart
from jaxfl.data.normalisation import training_moments
from jaxfl.registry import METHODS
from methods.rounds import TRAINING, federated, initial, mlp, one_round, run

NEWCOMER = len(SIZES) - 1
OPTIONS = {
    "fedcmd": {"base": "stored", "personal": "classifier", "selection_rounds": 0},
    "mnfl": {"matrix_lr": 1.0},
    "mnfl-homogeneous": {"matrix_lr": 1.0},
}


def clients(number):
    """Return the given number of clients of one architecture."""
    source = tiny_source()
    moments = training_moments(source, tiny_partition(source, SIZES[:NEWCOMER]).train)
    return federate(source, tiny_partition(source, SIZES[:number]), [(mlp(), number)], moments=moments)


def with_a_newcomer():
    """Return all five clients, with the last one set apart."""
    return set_apart(clients(len(SIZES)), [np.arange(len(SIZES)) == NEWCOMER])


@pytest.mark.parametrize("name", ["fedamp", *map(long, ("fedcmd", "mnfl", "mnfl-homogeneous", "scaffold"))])
def test_others_train_as_if_a_newcomer_did_not_exist(name):
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
            ours, theirs = (np.squeeze(s.matrix) for s in (state, expected))  # in one architecture
            assert_same(ours[:NEWCOMER, :NEWCOMER], theirs, tolerance=1e-6)
            assert_same(info.findings, same.findings, tolerance=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mnfl-homogeneous", {}),
        ("fedcmd", {"personal": "fc1", "selection_rounds": 0}),
        ("fedap", {"mu": 1.0, "passes": 0}),
    ],
)
def test_a_newcomer_receives_models_of_clients_that_have_trained(name, options):
    """A newcomer receives the same as when all clients are scored, whatever its own classifier is."""
    federation, options = with_a_newcomer(), TRAINING | options
    receive = jax.jit(METHODS[name].build(METHODS[name].config(**options)).receive)
    *_, (state, _) = run(name, federation, [range(NEWCOMER)], **options)
    key, job = jax.random.key(0), SimpleNamespace(federation=federation, rounds=1)
    joining, (scored,) = newcomers_in_places(job, 0), in_parts(federation, 0, 1)
    own = state.weights[0]
    moved = jax.tree.map(lambda leaf: leaf.at[NEWCOMER].add(1), own.params["classifier"])
    other = state._replace(weights=(own._replace(params=own.params | {"classifier": moved}),))
    (alone,) = receive(key, state, federation, joining)
    (among,) = receive(key, other, federation, scored)

    def of_newcomer(predictor, cohort):
        (place,) = np.flatnonzero(np.asarray(cohort.groups[0].index) == NEWCOMER)
        return jax.tree.map(lambda leaf: leaf[place], predictor.stacked)

    received = of_newcomer(alone, joining)
    assert_same(received, of_newcomer(among, scored), tolerance=1e-6)
    if name == "fedap":  # equal weights for all clients that have trained
        mean = jax.tree.map(lambda leaf: np.asarray(leaf)[:NEWCOMER].mean(0), own.params)
        assert_same(received.params, mean, tolerance=1e-6)


def test_with_local_schedule_all_a_newcomer_trains_only_when_it_joins():
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


@pytest.mark.parametrize("name", ["fedmd", "dfedavg", *map(long, ("mnfl", "topk-pfd", "draftfed", "hermes"))])
def test_who_joins_without_rows_teaches_nobody(name):
    """It has no predictions, drafts or weights to tell: others deploy the same models without it."""
    model, sizes = tiny_cnn("cnn") if name == "draftfed" else mlp(), (*SIZES[:2], 0)
    options = TRAINING | ({"target_ratio": 1.0} if name == "hermes" else {})
    federation = federated((model, len(sizes)), sizes=sizes, validates=True)
    personal = jax.jit(METHODS[name].build(METHODS[name].config(**options)).personal)
    deployed = []
    for present in ((0, 1, 2), (0, 1)):
        ((state, _),) = run(name, federation, [present], **options)
        (predictor,) = personal(jax.random.key(0), state, federation, cohort(federation, (0, 1)))
        deployed.append(jax.tree.map(lambda leaf: leaf[:2], predictor.stacked))
    assert_same(*deployed, tolerance=1e-6)


def test_who_has_no_rows_is_predicted_all_classes():
    """HeteroFL masks those that a client is known to lack."""
    federation = federated((mlp(), 3), sizes=(7, 4, 0))
    state = initial("heterofl", federation)
    receive = jax.jit(METHODS["heterofl"].build(METHODS["heterofl"].config()).receive)
    (predictor,) = receive(jax.random.key(0), state, federation, cohort(federation, range(3)))
    known = jax.tree.leaves(predictor.stacked)[-1]
    assert known.shape == (3, 3) and known[2].all()


@pytest.mark.long
def test_who_has_no_rows_keeps_its_head():
    """CompFL's head of prototypes would be one of zeros."""
    federation, options = federated((mlp(), 3), sizes=(7, 4, 0)), TRAINING | {"head_init": "proto"}
    method = METHODS["compfl"]
    state = initial("compfl", federation, **options)
    personal = jax.jit(method.build(method.config(**options)).personal)
    (predictor,) = personal(jax.random.key(0), state, federation, cohort(federation, range(3)))
    own = jax.tree.map(lambda leaf: leaf[2], predictor.stacked)
    logits = predictor.predict(mlp(), predictor.shared, own, federation.inputs(np.arange(4)))
    assert np.abs(logits).max() > 0


@pytest.mark.long
def test_hermes_rewinds_each_client_to_its_own_initial_weights():
    federation = dataclasses.replace(federated((mlp(), 3), sizes=SIZES[:3], validates=True), apart=True)
    options = TRAINING | {"granularity": "weight", "rewind": True, "threshold": 0.0, "lr": 1e-9}
    before = jax.device_get(initial("hermes", federation, **options).own[0].weights.params)
    ((after, _),) = run("hermes", federation, [range(3)], **options)
    held, now = jax.device_get((after.own[0].held.params, after.own[0].weights.params))
    for kept, w, first in zip(*map(jax.tree.leaves, (held, now, before)), strict=True):
        np.testing.assert_allclose(w, np.where(kept, first, 0), atol=1e-6)
    kernels = before["fc1"]["linear"]["kernel"]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3
