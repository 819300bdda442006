"""FedProto (Tan et al. 2022, arXiv:2105.00243, Algorithm 1).

g_c is the prototype of class c; a class has none before a client has sent one.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, SIZES, assert_same, differ, tiny_partition, tiny_source
from reference import nets
from reference.class_means import of_client
from reference.training import cross_entropy, descend

from jaxfl.algorithms.class_means.fedproto import nearest
from jaxfl.mechanisms.class_means import ClassMeans
from jaxfl.models.blocks import DenseBlock
from jaxfl.models.model import Block, Weights
from methods import recording
from methods.cases import NORMALISED, Case, Comparison, local_statistics
from methods.rounds import EVERYONE, TRAINING, alike, billed, federated, mlp, normalised, run


def start(clients, initial, options):
    """Start with own models and no prototypes."""
    return {"own": {i: initial[client.group] for i, client in enumerate(clients)}, "prototypes": {}}


def step(state, clients, cohort, options):
    """Train towards the prototypes; then every class gets the mean over the clients that have it."""
    own, g, losses, sent = dict(state["own"]), dict(state["prototypes"]), {}, {}
    for i, draw in cohort.draws.items():
        own[i], losses[i] = descend(own[i], pulled(clients[i], g, options), draw["train"], options)
        sent[i] = of_client(clients[i], own[i])
    for c in range(CLASSES):
        known = [of_one[c] for of_one in sent.values() if c in of_one]
        if known:
            share = [1 if options.uniform else n for _, n in known]
            g[c] = np.average([z for z, _ in known], axis=0, weights=share)
    return {"own": own, "prototypes": g}, losses


def pulled(client, g, options):
    """Return cross-entropy + lam * mean over features of (z - g_y)^2; 0 for a class without prototype."""

    def loss(weights, rows):
        y = client.y[rows]
        z, through_body = client.net(weights, client.x[rows], True)
        scores, through_head = nets.classify(weights, z)
        value, dscores = cross_entropy(scores, y)
        dz, of_head = through_head(dscores)
        for b, c in enumerate(y):
            if c in g:
                value += options.lam * ((z[b] - g[c]) ** 2).mean() / len(y)
                dz[b] += options.lam * 2 * (z[b] - g[c]) / z.size
        return value, through_body(dz)[1] | of_head

    return loss


def scores(state, clients, draws, options, x):
    """Score the client's model, or minus the squared distance from every prototype."""

    def of_client(i, client):
        w, g = state["own"][i], state["prototypes"]
        if options.predict == "head":
            return nets.logits(client.net, w, x)
        z, _ = client.net(w, x)
        return np.stack([-((z - g[c]) ** 2).sum(1) for c in range(CLASSES)], 1)

    found = [of_client(i, client) for i, client in enumerate(clients)]
    return {"received": found, "deployed": found}


def view(state, federation, t):
    """Return the models and the prototypes that exist."""
    g = state.prototypes
    prototypes = {c: g.z[c] for c in range(CLASSES) if g.known[c]}
    return recording.own_models(state, federation, t) | {"prototypes": prototypes}


# ---- what connects it with jaxfl


def classes_of(i):
    """Return the classes that client i of the tests' federation has."""
    source = tiny_source()
    return np.unique(source.labels[tiny_partition(source).train[i]])


def traffic(model, models, t):
    """Count each class's mean, number and rows (up), and each prototype and its number (down)."""
    (d,) = model.head.shape
    return lambda i: len(classes_of(i)) * (d + 2), CLASSES * (d + 1)


def nothing_is_received_before_there_are_prototypes():
    _, down, _ = billed("fedproto", alike(), **TRAINING)
    assert down[0].tolist() == [0] * len(SIZES)


def without_a_pull_it_is_local():
    """The classifier may have running statistics."""
    last = Block("classifier", DenseBlock(CLASSES, norm=True, activation=lambda x: x))
    unlike = federated((mlp(), 2), (dataclasses.replace(mlp(), blocks=(*mlp().blocks[:-1], last)), 3))
    for (fedproto, report), (local, expected) in zip(
        run("fedproto", unlike, lam=0.0, **TRAINING), run("local", unlike, **TRAINING), strict=True
    ):
        assert_same(fedproto.weights, local.kept, tolerance=1e-6)
        assert_same(report.loss, expected.loss, tolerance=1e-6)


@pytest.mark.long
def only_classes_with_a_prototype_pull():
    """After a round of client 3 alone only the class of its one row has a prototype."""
    (c,) = classes_of(3)
    cohorts = (3,), EVERYONE
    (first, _), (pulled, _) = run("fedproto", alike(), cohorts, **TRAINING)
    assert first.prototypes.known.tolist() == [other == c for other in range(CLASSES)]
    _, (free, _) = run("fedproto", alike(), cohorts, lam=0.0, **TRAINING)
    moved = [
        differ(recording.at(pulled.weights[0], i), recording.at(free.weights[0], i)) for i in (0, 1, 2, 4)
    ]
    assert moved == [c in classes_of(i) for i in (0, 1, 2, 4)] == [True, False, True, True]
    (group,), x = alike().groups, alike().inputs(np.arange(40, 44))
    found = nearest(group.model, first.prototypes, recording.at(first.weights[0], 0), x)
    assert (found > np.finfo(found.dtype).min).tolist() == 4 * [first.prototypes.known.tolist()]
    assert np.isfinite(found).all()  # another score would end the run


def distances_of_features_far_from_zero_are_right():
    """Single precision is enough, although the squares of such features are almost equal."""
    identity = SimpleNamespace(body=SimpleNamespace(apply=lambda params, stats, x, train: (x, stats)))
    z = np.random.default_rng(0).normal(size=(CLASSES, 4)).astype(np.float32) + np.float32(4096)
    known = jnp.asarray([True] * (CLASSES - 1) + [False])
    prototypes = ClassMeans(jnp.where(known[:, None], z, 0), known.astype(jnp.float32))
    found = nearest(identity, prototypes, Weights({}, {}), jnp.asarray(z))
    expected = -np.square(z[:, None].astype(float) - z[None, :-1]).sum(2)
    np.testing.assert_allclose(found[:, :-1], expected, rtol=1e-4, atol=1e-4)


def a_class_that_no_present_client_has_keeps_its_prototype():
    (first, _), (second, report) = run("fedproto", alike(), (EVERYONE, (3,)), **TRAINING)
    (c,) = classes_of(3)
    others = [other for other in range(CLASSES) if other != c]
    assert_same(second.prototypes.z[np.array(others)], first.prototypes.z[np.array(others)])
    w, x = recording.at(second.weights[0], 3), alike().inputs(alike().groups[0].rows[3, :1])
    z, _ = alike().models[0].body.apply(w.params, w.stats, x, train=False)
    assert_same(second.prototypes.z[c], z[0], tolerance=1e-6)
    assert jax.device_get(report.up[0]).sum() == z.shape[1] + 2


def a_client_that_cannot_train_is_idle_though_it_computes_class_means():
    ((_, report),) = run("fedproto", normalised(), (EVERYONE,), **TRAINING)
    assert report.idle[0].tolist() == [size == 1 for size in SIZES] and any(report.idle[0].tolist())


def under_uniform_weights_clients_send_no_numbers_of_rows():
    up, *_ = billed("fedproto", alike(), uniform=True, **TRAINING)
    (d,) = alike().models[0].head.shape
    assert up[0].tolist() == [len(classes_of(i)) * (d + 1) for i in EVERYONE]


fedproto = Case(
    "fedproto",
    start,
    step,
    scores,
    view=view,
    traffic=traffic,
    comparisons={
        "": Comparison({"lam": 0.7}, [("lam", 0.71), ("uniform", True)], ((mlp(), 3), (NORMALISED, 2))),
        "nearest, uniform, local statistics": local_statistics(
            ("uniform", False), ("predict", "head"), uniform=True, predict="nearest"
        ),
    },
    reductions=(
        nothing_is_received_before_there_are_prototypes,
        without_a_pull_it_is_local,
        only_classes_with_a_prototype_pull,
        distances_of_features_far_from_zero_are_right,
        a_class_that_no_present_client_has_keeps_its_prototype,
        under_uniform_weights_clients_send_no_numbers_of_rows,
        a_client_that_cannot_train_is_idle_though_it_computes_class_means,
    ),
)
