"""FedFomo (Zhang et al. 2021, arXiv:2012.08565, Algorithm 1): models weighted by loss on validation rows."""

import functools

import jax
import numpy as np
import pytest
from conftest import SIZES, assert_same, tiny_partition, tiny_source
from reference import nets
from reference.own_models import sent
from reference.training import cross_entropy, descend, plain_loss

from jaxfl.data.federate import federate
from methods import recording
from methods.cases import NORMALISED, SMALL, Case, Comparison, local_statistics
from methods.recording import by_client, phases
from methods.rounds import EVERYONE, TRAINING, federated, mlp, run

EPS = 1e-5


def start(clients, initial, options):
    """Start with own models, none uploaded, and affinities of 1 to oneself."""
    own = {i: initial[client.group] for i, client in enumerate(clients)}
    return {
        "own": own,
        "base": own,
        "uploaded": dict.fromkeys(range(len(clients)), False),
        "affinity": dict(enumerate(np.eye(len(clients)))),
    }


def step(state, clients, cohort, options):
    """Download, mix, train, and report to the server."""
    own, base, affinity, losses = dict(state["own"]), dict(state["base"]), dict(state["affinity"]), {}
    for i, draw in cohort.draws.items():
        begun, affinity[i] = mixture(state, clients, i, draw, options, cohort.t)
        own[i], losses[i] = descend(begun, plain_loss(clients[i]), draw["train"], options)
        base[i] = begun if options.base == "received" else own[i]
    uploaded = state["uploaded"] | dict.fromkeys(cohort.draws, True)
    return {"own": own, "base": base, "uploaded": uploaded, "affinity": affinity}, losses


def mixture(state, clients, i, draw, options, t):
    """Return the model from which client i starts in round t, and its new row of affinities."""
    own, base, row = state["own"][i], state["base"][i], state["affinity"][i].copy()
    x, y = clients[i].x_validation, clients[i].y_validation
    if not len(x):
        return own, row

    def loss(weights):
        return cross_entropy(nets.logits(clients[i].net, weights, x), y)[0]

    models = {j: own | sent(state["own"][j], options) for j in downloads(state, clients, i, draw, options, t)}
    models[i] = own
    q = {}
    for j, model in models.items():
        distance = sum(((model[n] - base[n]) ** 2).sum() for n in base if not nets.is_statistic(n))
        q[j] = (loss(base) - loss(model)) / (np.sqrt(distance) + EPS)
        row[j] += q[j]
    worth = {j: value for j, value in q.items() if value > 0}
    if not worth:
        return base, row
    return {n: sum(q / sum(worth.values()) * models[j][n] for j, q in worth.items()) for n in base}, row


def downloads(state, clients, i, draw, options, t):
    """Return the models with the largest affinities, some of them replaced by others at random."""
    peers = [j for j, client in enumerate(clients) if client.group == clients[i].group]
    available = [j for j in peers if j != i and state["uploaded"][j]]
    places = min(options.downloads, len(peers))
    explore = max(0, options.epsilon - options.epsilon_decay * t)
    random = sum(draw["coins"][:places] < explore)
    by_affinity = sorted(available, key=lambda j: (-state["affinity"][i][j], draw["ties"][j]))
    best = by_affinity[: places - random]
    left = sorted(by_affinity[places - random :], key=lambda j: draw["others"][j])
    return best + left[:random]


def scores(state, clients, draws, options, x):
    """Score the mixture after the last round as received, the own model as deployed."""
    last = 3  # the last round of the comparisons
    begun = [mixture(state, clients, i, draws[i], options, last)[0] for i in range(len(clients))]
    return {
        "received": [nets.logits(c.net, begun[i], x) for i, c in enumerate(clients)],
        "deployed": [nets.logits(c.net, state["own"][i], x) for i, c in enumerate(clients)],
    }


# ---- what connects it with jaxfl


def draws_before_use(key, client, models, options):
    """Draw how equal affinities are ordered, which places are random, and an order of candidates for them."""
    ties, others, coins = jax.random.split(jax.random.fold_in(key, 1), 3)
    return {
        "ties": jax.random.uniform(ties, (len(SIZES),)),
        "others": jax.random.uniform(others, (len(SIZES),)),
        "coins": jax.random.uniform(coins, (options.downloads,)),
    }


def draws(key, client, models, options):
    """Draw the same, and the orders of local training."""
    orders = phases(train="epochs")(key, client, models, options)
    return orders | draws_before_use(key, client, models, options)


def view(state, federation, t):
    """Return models, their bases, which clients have uploaded one, and the rows of P."""
    return recording.own_models(state, federation, t) | {
        "base": by_client(state.base, federation),
        "uploaded": by_client(state.uploaded, federation),
        "affinity": dict(enumerate(recording.of_pairs(state.affinity))),
    }


# ---- what another method computes


@functools.cache
def validating(*models, without=()):
    """Return the tiny clients with validation rows, except those in `without`."""
    source = tiny_source()
    partition = tiny_partition(source)
    rows = tuple(rows[: 0 if i in without else 6] for i, rows in enumerate(partition.test))
    return federate(source, partition._replace(validation=rows), models)


@pytest.mark.long
def a_client_alone_in_its_architecture_is_local():
    alone = validating((mlp(), 1), (mlp(hidden=4), 4))
    fedfomo, local = (
        run(name, alone, **TRAINING | options)[-1][0]
        for name, options in (("fedfomo", {"base": "trained"}), ("local", {}))
    )
    assert_same(fedfomo.weights[0], local.kept[0])
    assert fedfomo.affinity[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def a_client_without_validation_rows_is_local():
    federation = validating((mlp(), 5), without=(0,))
    fedfomo, local = (run(name, federation, **TRAINING)[-1][0] for name in ("fedfomo", "local"))
    (affinity,) = fedfomo.affinity
    of_others = [np.delete(row, i) for i, row in enumerate(affinity)]
    assert not of_others[0].any() and all(row.any() for row in of_others[1:])
    alone, mixed = ([leaf[i] for leaf in jax.tree.leaves(fedfomo.weights)] for i in (0, 1))
    expected = [[leaf[i] for leaf in jax.tree.leaves(local.kept)] for i in (0, 1)]
    assert_same(alone, expected[0], tolerance=1e-6)
    with pytest.raises(AssertionError):
        assert_same(mixed, expected[1], tolerance=1e-3)


def only_uploaded_models_are_sent():
    """They are counted without statistics that stay on clients."""
    present, model = ((0, 1), (0, 1, 2), (0, 3)), mlp(norm="batch")
    options, size = TRAINING | {"downloads": 2, "bn_stats": "local"}, model.size
    reports = [info for _, info in run("fedfomo", validating((model, 5)), present, **options)]
    assert [info.down[0][size].tolist() for info in reports] == [
        [0, 0, 0, 0, 0],
        [1, 1, 2, 0, 0],
        [2, 2, 0, 0, 0],
    ]
    assert [info.up[0].max() for info in reports] == [size + len(SIZES)] * 3


EXPLORING = {"downloads": 1, "epsilon": 0.3}


@pytest.mark.long
def a_client_that_cannot_train_is_idle_though_it_tries_models():
    federation = federated((mlp(norm="batch"), len(SIZES)), validates=True)
    ((_, report),) = run("fedfomo", federation, (EVERYONE,), **TRAINING)
    assert report.idle[0].tolist() == [size == 1 for size in SIZES] and any(report.idle[0].tolist())


fedfomo = Case(
    "fedfomo",
    start,
    step,
    scores,
    draws=draws,
    draws_before_use=draws_before_use,
    view=view,
    traffic=lambda model, models, t: (model.size + len(SIZES), model.size),
    all_clients=True,
    short=EXPLORING,
    idle_rates={"epsilon_decay"},  # changes none of these few draws; the comparison "exploring" tests it
    comparisons={
        "": Comparison(mistakes=[("downloads", 1), ("base", "trained")]),
        "FL-bench's base": Comparison({"base": "trained"}, [("base", "received")]),
        "exploring": Comparison(
            {"downloads": 1, "epsilon": 1.0, "epsilon_decay": 0.28},
            [("epsilon", 0.3), ("epsilon_decay", 0.9), ("downloads", 2)],
            ((SMALL, 1), (NORMALISED, 4)),
        ),
        "local statistics": local_statistics(downloads=2),
    },
    reductions=(
        a_client_alone_in_its_architecture_is_local,
        a_client_without_validation_rows_is_local,
        only_uploaded_models_are_sent,
        a_client_that_cannot_train_is_idle_though_it_tries_models,
    ),
)
