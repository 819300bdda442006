"""FedAMP (Huang et al. 2021, arXiv:2007.03797, Algorithm 1): attention among own models."""

import itertools
import math

import numpy as np
import pytest
from conftest import SIZES, assert_same
from reference import nets
from reference.training import descend, plain_loss

from jaxfl.algorithms.mixing.fedamp import State, attention
from jaxfl.core.job import traced
from jaxfl.registry import METHODS
from methods import recording
from methods.cases import NORMALISED, SMALL, Case, Comparison, ditto, local_statistics
from methods.recording import by_client
from methods.rounds import TRAINING, alike, federated, mlp, reported, run


def start(clients, initial, options):
    """Start with own models, none of them uploaded."""
    return {
        "own": {i: initial[client.group] for i, client in enumerate(clients)},
        "uploaded": dict.fromkeys(range(len(clients)), False),
    }


def step(state, clients, cohort, options):
    """w_i <- SGD over CE(w) + lam / (2 alpha) ||w - u_i||^2, from w_i."""
    own, losses = dict(state["own"]), {}
    for i, draw in cohort.draws.items():
        pulled = plain_loss(clients[i])
        alpha = constants(state, clients, i, options)[1]
        if alpha > 0:
            least = nets.least_rows(state["own"][i])
            last = clients[i].size % options.batch_size
            batches = math.ceil(clients[i].size / options.batch_size) - (0 < last < least)
            steps = max(options.epochs * batches, 1)
            pull = min(options.lam / alpha, 1 / (options.lr * steps))
            pulled = ditto.proximal(pulled, aggregate(state, clients, i, options), pull)
        own[i], losses[i] = descend(state["own"][i], pulled, draw["train"], options)
    state = {"own": own, "uploaded": state["uploaded"] | dict.fromkeys(cohort.draws, True)}
    return state | {"attention": attentions(state, clients, options)}, losses


def peers(clients, i):
    """Return the clients of i's architecture, including i."""
    return [j for j, client in enumerate(clients) if client.group == clients[i].group]


def constants(state, clients, i, options):
    """Return sigma and alpha_k of client i's architecture; 0 without models to measure them by."""
    uploaded = [j for j in peers(clients, i) if state["uploaded"][j]]
    known = [distance(state, a, b) for a, b in itertools.combinations(uploaded, 2)]
    sigma = options.sigma or (np.median(known) if known else 0)
    return sigma, options.alpha or sigma / len(peers(clients, i))


def distance(state, i, j):
    """Return ||w_i - w_j||^2, over the parameters."""
    one, other = state["own"][i], state["own"][j]
    return sum(((one[name] - other[name]) ** 2).sum() for name in one if not nets.is_statistic(name))


def attentions(state, clients, options):
    """Return xi of all clients."""
    xi = np.eye(len(clients))
    for i in range(len(clients)):
        sigma, alpha = constants(state, clients, i, options)
        for j in peers(clients, i) if sigma else []:
            if j != i and state["uploaded"][j]:
                xi[i, j] = alpha * np.exp(-distance(state, i, j) / sigma) / sigma
                xi[i, i] -= xi[i, j]
    return xi


def aggregate(state, clients, i, options):
    """Return u_i; under bn_stats="local" with client i's own running statistics."""
    own, xi = state["own"][i], attentions(state, clients, options)[i]
    u = {name: sum(xi[j] * state["own"][j][name] for j in peers(clients, i)) for name in own}
    local = options.bn_stats == "local"
    return u | {name: w for name, w in own.items() if local and nets.is_statistic(name)}


def scores(state, clients, draws, options, x):
    """Score the client's aggregate as received, its own model as deployed."""
    aggregates = [aggregate(state, clients, i, options) for i in range(len(clients))]
    return {
        "received": [nets.logits(c.net, aggregates[i], x) for i, c in enumerate(clients)],
        "deployed": [nets.logits(c.net, state["own"][i], x) for i, c in enumerate(clients)],
    }


def view(state, federation, t):
    """Return the models, which clients have uploaded one, and the matrix that users see."""
    uploaded = {i: last >= 0 for i, last in by_client(state.last_upload, federation).items()}
    matrices = recording.matrices("fedamp")(state)
    return recording.own_models(state, federation, t) | {"uploaded": uploaded} | matrices


# ---- what another method computes


def without_pull_it_is_local():
    for (fedamp, report), (local, expected) in zip(
        run("fedamp", alike(), lam=0.0, **TRAINING), run("local", alike(), **TRAINING), strict=True
    ):
        assert_same(fedamp.weights, local.kept)
        assert_same(report.loss, expected.loss)


@pytest.mark.long
def a_client_alone_in_its_architecture_is_local():
    alone = federated((mlp(), 1), (mlp(hidden=4), len(SIZES) - 1))
    fedamp, local = (run(name, alone, **TRAINING)[-1] for name in ("fedamp", "local"))
    assert_same(fedamp[0].weights[0], local[0].kept[0])
    assert_same(reported(fedamp[1])[0][0], reported(local[1])[0][0])


@pytest.mark.long
def attention_is_symmetric_and_its_rows_sum_to_one():
    state, _ = run("fedamp", alike(), **TRAINING)[-1]
    xi = METHODS["fedamp"].build(METHODS["fedamp"].config()).matrices(state)["attention"]
    np.testing.assert_allclose(xi.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(xi, xi.T, rtol=1e-5)
    assert (xi >= 0).all() and len(np.unique(xi)) > len(SIZES)


def identical_models_are_neither_mixed_nor_pulled():
    """Attention is the identity before the first round, and if all uploaded models are equal."""
    options, same = traced(METHODS["fedamp"].config()), np.zeros((5, 5), np.float32)
    for last in (-1, 0):
        found = attention(State(options, None, same, np.full(5, last, np.int32)))
        assert_same(found.xi, np.eye(5, dtype=np.float32))
        assert found.pull == 0


FIXED = {"lam": 0.5, "sigma": 3.0, "alpha": 0.7}

fedamp = Case(
    "fedamp",
    start,
    step,
    scores,
    view=view,
    traffic=lambda model, models, t: model.size,
    all_clients=True,
    short=FIXED,
    comparisons={
        "": Comparison({"lam": 0.3}, [("lam", 0.301), ("sigma", 1.0), ("alpha", 0.05)]),
        "fixed constants": Comparison(
            FIXED,
            [("lam", 0.51), ("sigma", 3.01), ("alpha", 0.71)],
            ((SMALL, 1), (NORMALISED, 4)),
        ),
        "strongest pull, local statistics": local_statistics(("lam", 0.1), lam=1e6),
    },
    reductions=(
        without_pull_it_is_local,
        a_client_alone_in_its_architecture_is_local,
        attention_is_symmetric_and_its_rows_sum_to_one,
        identical_models_are_neither_mixed_nor_pulled,
    ),
)
