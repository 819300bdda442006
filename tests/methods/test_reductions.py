"""Methods that must coincide: what one computes under some option is what another one computes.

A batch holds all rows of a client: where two methods shuffle by different keys, that is mere rounding.
Equality is to the bit where they do the same work in the same order.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, SHAPE, SIZES, tiny_models, tiny_partition, tiny_source

from jaxfl.core import tree
from jaxfl.core.engine import traced
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.data.federation import federate
from jaxfl.models import zoo
from jaxfl.registry import METHODS

pytestmark = pytest.mark.usefixtures("quick_compilation")

TRAINING = {"epochs": 2, "batch_size": max(SIZES), "weight_decay": 0.1}
PERSONAL = {"personal_epochs": TRAINING["epochs"]}  # of Ditto
EVERYONE = range(len(SIZES))
COHORTS = (EVERYONE, (0, 3, 4), (1, 2))
ALWAYS = (EVERYONE,) * 3
HIDDEN = 5


def federated(*models, sizes=SIZES):
    source = tiny_source()
    return federate(source, tiny_partition(source, sizes), models)


@pytest.fixture(scope="module")
def federation():
    """Five clients with one architecture."""
    return federated((zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=HIDDEN), len(SIZES)))


@pytest.fixture(scope="module")
def normalised():
    """The same with BatchNorm in the extractor; the client with a single row cannot train."""
    model = zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=HIDDEN, norm="batch")
    return federated((model, len(SIZES)))


@pytest.fixture(scope="module")
def equal():
    """One architecture, and as many rows for each of the clients."""
    model = zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=HIDDEN)
    return federated((model, len(SIZES)), sizes=(max(SIZES),) * len(SIZES))


@pytest.fixture(scope="module")
def mixed():
    """Two architectures, the larger one first."""
    models = [zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=hidden) for hidden in (HIDDEN, 4)]
    return federated((models[0], 2), (models[1], 3))


@pytest.fixture(scope="module")
def convolving():
    """Two architectures, one of which has convolutions."""
    return federated(*tiny_models())


@functools.cache
def program(name, options):
    """One round of a method. Its rates are not part of it, so they may be NaN while it is built."""
    config = jax.tree.unflatten(options, [math.nan] * options.num_leaves)
    return Program(METHODS[name].build(config).step)


def initial(name, federation, **options):
    """A method's state before the first round."""
    config = METHODS[name].config(**options)
    return METHODS[name].build(config).init(jax.random.key(0), federation, traced(config))


def run(name, federation, cohorts=COHORTS, **options):
    """Train by a method; [(state, info) after each round]."""
    step = program(name, jax.tree.structure(METHODS[name].config(**options)))
    state, done = initial(name, federation, **options), []
    for t, present in enumerate(cohorts):
        key = jax.random.fold_in(jax.random.key(1), t)
        state, info = step(key, state, federation, cohort(federation, t, present))
        done.append((state, info))
    return done


def cohort(federation, t, present):
    """Round t with the clients of these ids, each in its own place."""

    def slots(group):
        places = np.arange(len(group.id), dtype=np.int32)
        mask = np.isin(group.id, present)
        return Slots(np.where(mask, places, np.int32(len(places))), mask)

    return Cohort(np.int32(t), tuple(map(slots, federation.groups)), rounds=len(COHORTS))


def assert_same(actual, expected, tolerance=0.0):
    """Compare the leaves of two trees."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def differ(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return not all(np.array_equal(a, b) for a, b in pairs)


# ---- the same in another guise


def test_the_global_model_of_ditto_is_fedavg(federation):
    for (ditto, report), (fedavg, expected) in zip(
        run("ditto", federation, **PERSONAL, **TRAINING),
        run("fedavg", federation, **TRAINING),
        strict=True,
    ):
        assert_same(ditto.fedavg.shared, fedavg.shared)
        assert_same(report._replace(trained=None), expected._replace(trained=None))


def test_ditto_without_pull_is_local(federation):
    ditto, _ = run("ditto", federation, lam=0.0, **PERSONAL, **TRAINING)[-1]
    local, _ = run("local", federation, **TRAINING)[-1]
    assert_same(ditto.personal, local.kept, tolerance=1e-5)


@pytest.mark.parametrize(
    ("nothing", "weight_decay"),
    [
        ({"draft_epochs": 0}, 0.1),
        ({"lam1": 0.0, "lam2": 0.0, "lam3": 0.0}, 0.0),  # decay would go on
    ],
)
def test_draftfed_without_draft_learning_is_local(convolving, nothing, weight_decay):
    training = TRAINING | {"weight_decay": weight_decay}
    for (draftfed, report), (local, expected) in zip(
        run("draftfed", convolving, **training | nothing), run("local", convolving, **training), strict=True
    ):
        assert_same(draftfed.weights, local.kept, tolerance=1e-6)
        assert_same(report.loss, expected.loss, tolerance=1e-6)


def test_pfedclub_without_a_teacher_is_local(mixed):
    for (pfedclub, report), (local, expected) in zip(
        run("pfedclub", mixed, **TRAINING), run("local", mixed, **TRAINING), strict=True
    ):
        assert_same(pfedclub.weights, local.kept, tolerance=1e-6)
        assert_same(report.loss, expected.loss, tolerance=1e-6)


def test_pfedclub_whose_teachers_weigh_nothing_is_local(mixed):
    def after_a_round(lam):
        state = initial("pfedclub", mixed, lam=lam, **TRAINING)
        taught = tuple(jnp.ones_like(has) for has in state.has_teacher)
        logits = tuple(leaf.at[:, :, 0].add(3) for leaf in state.teacher_logits)
        step = program("pfedclub", jax.tree.structure(state.hyper))
        state = state._replace(has_teacher=taught, teacher_logits=logits)
        key = jax.random.fold_in(jax.random.key(1), 0)
        return step(key, state, mixed, cohort(mixed, 0, EVERYONE))[0].weights

    without, _ = run("pfedclub", mixed, **TRAINING)[0]
    assert_same(after_a_round(0.0), without.weights, tolerance=1e-6)
    assert differ(after_a_round(0.2), without.weights)


def test_fine_tuning_never_reaches_the_server(federation):
    tuned, _ = run("fedavg-ft", federation, ft_epochs=5, **TRAINING)[-1]
    fedavg, _ = run("fedavg", federation, **TRAINING)[-1]
    assert_same(tuned.shared, fedavg.shared)


def test_fine_tuning_for_no_epochs_is_no_fine_tuning():
    fedavg_ft = METHODS["fedavg-ft"]
    algorithm = fedavg_ft.build(fedavg_ft.config(ft_epochs=0))
    assert algorithm.personal is algorithm.receive


def test_one_round_of_local_training_is_the_same_whatever_is_shared(federation):
    """FedPer and LG-FedAvg divide between them what FedAvg shares and what Local keeps."""
    fedavg, fedper, lg_fedavg, local = (
        run(name, federation, cohorts=(EVERYONE,), **TRAINING)[0]
        for name in ("fedavg", "fedper", "lg-fedavg", "local")
    )
    assert_same(tree.combine(fedper[0].shared, lg_fedavg[0].shared), fedavg[0].shared)
    assert_same(tree.combine(fedper[0].kept, lg_fedavg[0].kept), local[0].kept)
    assert_same(fedper[1].up[0] + lg_fedavg[1].up[0], fedavg[1].up)
    for _, info in fedper, lg_fedavg, local:
        assert_same(info.loss, fedavg[1].loss)


def test_fedrep_without_head_epochs_is_fedbabu(federation):
    fedrep, _ = run("fedrep", federation, head_epochs=0, **TRAINING)[-1]
    fedbabu, _ = run("fedbabu", federation, **TRAINING)[-1]
    assert_same((fedrep.shared, fedrep.kept), (fedbabu.shared, fedbabu.kept), tolerance=1e-5)


def test_the_generic_part_of_fedrod_is_fedavg_without_the_exponent(federation):
    fedrod, _ = run("fedrod", federation, gamma=0.0, **TRAINING)[-1]
    fedavg, _ = run("fedavg", federation, **TRAINING)[-1]
    assert_same(fedrod.shared, fedavg.shared, tolerance=1e-6)


def test_the_generic_part_of_fedrod_is_fedavg_on_balanced_classes(federation):
    fedavg, _ = run("fedavg", federation, **TRAINING)[-1]
    unbalanced, _ = run("fedrod", federation, **TRAINING)[-1]
    assert differ(unbalanced.shared, fedavg.shared)

    (group,) = federation.groups
    group = dataclasses.replace(group, class_counts=jnp.full_like(group.class_counts, 4))
    balanced, _ = run("fedrod", dataclasses.replace(federation, groups=(group,)), **TRAINING)[-1]
    assert_same(balanced.shared, fedavg.shared, tolerance=1e-5)


def test_compfl_without_cooperation_is_fedper(mixed):
    off = {"align": False, "greedy": False, "kd": False, "head_init": "keep"}
    for (compfl, report), (fedper, expected) in zip(
        run("compfl", mixed, **off, **TRAINING),
        run("fedper", mixed, **TRAINING),
        strict=True,
    ):
        own_heads = tuple(heads[-1] for heads in compfl.heads)
        assert_same(compfl.experts, fedper.shared, tolerance=1e-5)
        assert_same(own_heads, fedper.kept, tolerance=1e-5)
        assert_same(report, expected, tolerance=1e-5)


def test_local_training_of_all_needs_no_cohort(federation):
    everybody, _ = run("local", federation, local_schedule="all", **TRAINING)[-1]
    always_present, _ = run("local", federation, cohorts=ALWAYS, **TRAINING)[-1]
    assert_same(everybody.kept, always_present.kept)


def test_local_training_of_all_reports_the_cohort(federation):
    config = METHODS["local"].config(local_schedule="all", **TRAINING)
    two = Slots(np.array([1, 3], np.int32), np.ones(2, bool))
    _, info = jax.eval_shape(
        METHODS["local"].build(config).step,
        jax.random.key(1),
        initial("local", federation, **TRAINING),
        federation,
        Cohort(np.int32(0), (two,), rounds=1),
    )
    assert {leaf.shape[0] for leaf in jax.tree.leaves(info)} == {2}
    assert [leaf.shape for leaf in jax.tree.leaves(info._replace(trained=None))] == [(2,)] * 3


def test_fedcmd_with_a_personal_classifier_is_fedper(mixed):
    fixed = {"personal": "classifier", "selection_rounds": 0}
    for (fedcmd, report), (fedper, expected) in zip(
        run("fedcmd", mixed, **fixed, **TRAINING),
        run("fedper", mixed, **TRAINING),
        strict=True,
    ):
        assert_same([w.params["fc1"] for w in fedcmd.shared], fedper.shared, tolerance=1e-6)
        assert_same([w.params["classifier"] for w in fedcmd.own], fedper.kept, tolerance=1e-6)
        assert_same((report.loss, report.down), (expected.loss, expected.down), tolerance=1e-6)


def test_fedcmd_votes_in_rounds_of_fedavg(federation):
    *voting, _ = run("fedcmd", federation, selection_rounds=2, **TRAINING)
    for (fedcmd, report), (fedavg, expected) in zip(
        voting, run("fedavg", federation, **TRAINING), strict=False
    ):
        assert_same(fedcmd.shared, fedavg.shared, tolerance=1e-6)
        assert_same(report.loss, expected.loss, tolerance=1e-6)
    (of_clients,), (globally,) = fedcmd.own, fedcmd.shared
    assert_same(of_clients, tree.stack(globally, len(SIZES)))


def test_clients_without_a_mini_batch_do_not_vote(normalised):
    """BatchNorm leaves a batch of one row out, and client 3 has no more."""
    alone, with_another, without = (
        run("fedcmd", normalised, cohorts=[present], selection_rounds=2, **TRAINING)[0][0]
        for present in ([3], [3, 4], [4])
    )
    assert alone.won[0].tolist() == [0, 0] and with_another.won[0].sum() == 1
    assert_same((with_another.won, with_another.scores), (without.won, without.scores))


def test_fedcmd_compares_networks_that_resize_images():
    """Resizing is a block without parameters."""
    resizing = federated((zoo.lenet5(shape=SHAPE, classes=CLASSES, width=0.1), len(SIZES)))
    assert resizing.models[0].names[0] == "input"
    options = {"personal": "fc2", "selection_rounds": 0}
    for similarity in ("parameters", "updates"):
        state = initial("fedcmd", resizing, similarity=similarity, **options)
        build = METHODS["fedcmd"].build(METHODS["fedcmd"].config(similarity=similarity, **options))
        everyone = cohort(resizing, 0, EVERYONE)
        jax.eval_shape(build.step, jax.random.key(1), state, resizing, everyone)


def test_fedcmd_with_a_personal_first_layer_and_equal_weights_is_lg_fedavg(equal):
    """It mixes what is sent in the next round, LG-FedAvg at once: the same where all take part."""
    fixed = {"personal": "fc1", "selection_rounds": 0, "tail": "uniform"}
    for (fedcmd, report), (lg_fedavg, expected) in zip(
        run("fedcmd", equal, cohorts=ALWAYS, **fixed, **TRAINING),
        run("lg-fedavg", equal, cohorts=ALWAYS, **TRAINING),
        strict=True,
    ):
        assert_same([w.params["fc1"] for w in fedcmd.own], lg_fedavg.kept, tolerance=1e-5)
        assert_same(report.loss, expected.loss, tolerance=1e-5)


def test_mnfl_without_distillation_is_local(mixed):
    for (mnfl, report), (local, expected) in zip(
        run("mnfl", mixed, distill_lr=0.0, **TRAINING),
        run("local", mixed, **TRAINING),
        strict=True,
    ):
        assert_same(mnfl.weights, local.kept)
        assert_same(report.loss, expected.loss)


def test_mnfl_of_equal_weights_is_fedavg_of_equal_clients(equal):
    for (mnfl, report), (fedavg, expected) in zip(
        run("mnfl-homogeneous", equal, cohorts=ALWAYS, matrix_lr=0.0, **TRAINING),
        run("fedavg", equal, cohorts=ALWAYS, **TRAINING),
        strict=True,
    ):
        (weights,) = mnfl.weights
        assert_same(jax.tree.map(lambda leaf: leaf.mean(0), weights), fedavg.shared[0], tolerance=1e-5)
        assert_same(report, expected._replace(findings=report.findings), tolerance=1e-5)


def test_mnfl_without_steps_towards_the_teacher_is_local(mixed):
    mnfl, _ = run("mnfl-homogeneous", mixed, transfer="prox", transfer_lr=0.0, **TRAINING)[-1]
    local, _ = run("local", mixed, **TRAINING)[-1]
    assert_same(mnfl.weights, local.kept, tolerance=1e-6)


# ---- what does not train, and what is not sent


def test_the_head_of_fedbabu_stays_as_it_was(federation):
    before = initial("fedbabu", federation, **TRAINING)
    after, _ = run("fedbabu", federation, **TRAINING)[-1]
    assert_same(after.kept, before.kept)
    assert differ(after.shared, before.shared)


def test_training_the_head_moves_neither_parameters_nor_statistics_of_the_body(normalised):
    """One client alone: the mean over clients is then exact."""
    options = TRAINING | {"epochs": 0, "head_epochs": 2}
    before = initial("fedrep", normalised, **options)
    ((after, _),) = run("fedrep", normalised, cohorts=((0,),), **options)
    assert jax.tree.leaves([weights.stats for weights in after.shared])
    assert_same(after.shared, before.shared)
    assert differ(after.kept, before.kept)


def test_local_statistics_differ_and_are_never_sent(normalised):
    (model,), statistics = normalised.models, 2 * HIDDEN
    _, sent = run("fedavg", normalised, **TRAINING)[0]
    kept, not_sent = run("fedavg", normalised, bn_stats="local", **TRAINING)[0]
    assert sent.up[0].tolist() == sent.down[0].tolist() == [model.size + statistics] * len(SIZES)
    assert not_sent.up[0].tolist() == not_sent.down[0].tolist() == [model.size] * len(SIZES)

    assert not jax.tree.leaves([weights.stats for weights in kept.shared])
    leaves = jax.tree.leaves([weights.stats for weights in kept.kept])
    assert sum(leaf[0].size for leaf in leaves) == statistics
    for leaf in leaves:
        assert len(np.unique(leaf, axis=0)) == len(SIZES)
