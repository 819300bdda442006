"""MNFL among clients of one architecture (Beikmohammadi et al., the homogeneous variant).

As in `mnfl`, except that clients exchange their models: a teacher is a mixture of parameters.
"""

import jax
import numpy as np
from conftest import assert_same
from reference import nets
from reference.own_models import sent
from reference.training import descend, plain_loss

from methods import recording
from methods.cases import Case, Comparison, local_statistics, mnfl
from methods.rounds import ALWAYS, TRAINING, alike, equal, reported, run


def start(clients, initial, options):
    """Start with own models and equal weights within an architecture."""
    group = np.array([client.group for client in clients])
    same = group[:, None] == group
    return {
        "own": {i: initial[client.group] for i, client in enumerate(clients)},
        "matrix": same / same.sum(1, keepdims=True),
    }


def step(state, clients, cohort, options):
    """Start from the teacher, or from a model pulled towards it; then the server learns the matrix."""
    models, matrix = dict(state["own"]), state["matrix"]
    begun = transferred(state, clients, list(cohort.draws), options)
    losses = {}
    for i, draw in cohort.draws.items():
        models[i], losses[i] = descend(begun[i], plain_loss(clients[i]), draw["train"], options)

    for g in {client.group for client in clients}:
        present = [i for i in cohort.draws if clients[i].group == g]
        members = [i for i, client in enumerate(clients) if client.group == g]
        vectors = {i: np.concatenate([w.ravel() for w in sent(models[i], options).values()]) for i in present}
        centre = sum(vectors.values()) / max(1, len(present))
        away = {n: mnfl.mixture(matrix, n, vectors) - vectors[n] for n in present}
        distance_gradient = {
            (n, m): 2 / len(centre) * away[n] @ (vectors[m] - centre) for n in present for m in present
        }
        matrix = mnfl.learnt(matrix, clients, present, distance_gradient, options, everyone=members)
    return {"own": models, "matrix": matrix}, losses


def transferred(state, clients, present, options):
    """Return the models from which present clients start, {client: weights}."""
    begun = {}
    for n in present:
        known = {m: state["own"][m] for m in present if clients[m].group == clients[n].group}
        teacher = {
            name: mnfl.mixture(state["matrix"], n, {m: w[name] for m, w in known.items()})
            for name in sent(state["own"][n], options)
        }
        begun[n] = state["own"][n] | (teacher if options.transfer == "replace" else {})
        for _ in range(options.transfer_steps if options.transfer == "prox" else 0):
            begun[n] = begun[n] | {
                name: begun[n][name] - 2 * options.transfer_lr * (begun[n][name] - wbar)
                for name, wbar in teacher.items()
            }
    return begun


def scores(state, clients, draws, options, x):
    """Score as received the start of a round of all clients, as deployed the own model."""
    newest = transferred(state, clients, list(range(len(clients))), options)
    return {
        "received": [nets.logits(c.net, newest[i], x) for i, c in enumerate(clients)],
        "deployed": [nets.logits(c.net, state["own"][i], x) for i, c in enumerate(clients)],
    }


# ---- what another method computes


def with_equal_weights_it_is_fedavg_of_equal_clients():
    for (mixed_models, report), (fedavg, expected) in zip(
        run("mnfl-homogeneous", equal(), cohorts=ALWAYS, matrix_lr=0.0, **TRAINING),
        run("fedavg", equal(), cohorts=ALWAYS, **TRAINING),
        strict=True,
    ):
        (weights,) = mixed_models.weights
        assert_same(jax.tree.map(lambda leaf: leaf.mean(0), weights), fedavg.shared[0], tolerance=1e-5)
        assert_same(reported(report), reported(expected), tolerance=1e-5)


def without_steps_towards_the_teacher_it_is_local():
    mnfl, _ = run("mnfl-homogeneous", alike(), transfer="prox", transfer_lr=0.0, **TRAINING)[-1]
    local, _ = run("local", alike(), **TRAINING)[-1]
    assert_same(mnfl.weights, local.kept, tolerance=1e-6)


def view(state, federation, t):
    """Return the models and the matrix."""
    return mnfl.view(state._replace(matrix=recording.of_pairs(state.matrix)), federation, t)


OPTIONS = {"matrix_lr": 0.4, "lam": 6000.0, "rho": 0.2}

mnfl_homogeneous = Case(
    "mnfl-homogeneous",
    start,
    step,
    scores,
    view=view,
    traffic=lambda model, models, t: model.size,
    idle_rates={"transfer_lr"},  # only used by the transfer that is not the default
    all_clients=True,
    comparisons={
        "": Comparison(OPTIONS, mistakes=[("row_norm", "clip")]),
        "steps towards the teacher": Comparison(
            OPTIONS | {"transfer": "prox", "transfer_steps": 3, "transfer_lr": 0.08, "row_norm": "clip"},
            mistakes=[("transfer_steps", 2), ("rho", 0.21)],
        ),
        "local statistics": local_statistics(**OPTIONS),
    },
    reductions=(
        with_equal_weights_it_is_fedavg_of_equal_clients,
        without_steps_towards_the_teacher_it_is_local,
    ),
)
