"""pFedClub and pFedClub+ (Wang et al. 2024, NeurIPS): a client's round, eq. 5.

`test_pfedclub` tests how the server assembles teachers; here their predictions are given.
"""

import jax.numpy as jnp
import numpy as np
from conftest import CLASSES, assert_same, differ
from reference import nets, own_models
from reference.training import cross_entropy, descend, log_softmax, softmax

from methods import recording
from methods.cases import UNLIKE, Case, Comparison
from methods.rounds import EVERYONE, TRAINING, alike, initial, one_round, run

UNTAUGHT = 1  # a client without a teacher


def step(state, clients, cohort, options):
    """w_m <- SGD over CE(w_m) + lam KL(softmax w*_m || softmax w_m)."""
    own, losses = dict(state["own"]), {}
    for i, draw in cohort.draws.items():
        loss = taught(clients[i], teacher(i, clients[i].size), options.lam if i != UNTAUGHT else 0)
        own[i], losses[i] = descend(own[i], loss, draw["train"], options)
    return {"own": own}, losses


def taught(client, lessons, lam):
    """Return eq. 5 with a teacher's logits (n, classes) of the client's images."""

    def loss(weights, rows):
        z, through_body = client.net(weights, client.x[rows], True)
        scores, through_head = nets.classify(weights, z)
        value, dscores = cross_entropy(scores, client.y[rows])
        log_t, log_p = log_softmax(lessons[rows]), log_softmax(scores)
        divergence = (np.exp(log_t) * (log_t - log_p)).sum(1).mean()
        dscores = dscores + lam * (softmax(scores) - np.exp(log_t)) / len(rows)
        dz, of_head = through_head(dscores)
        return value + lam * divergence, through_body(dz)[1] | of_head

    return loss


# ---- what connects it with jaxfl


def teacher(i, rows):
    """Return arbitrary logits, (rows, classes), different for every client."""
    return 2 * np.sin(np.arange(rows * CLASSES).reshape(rows, CLASSES) + i)


def given(state, federation):
    """Put the same into jaxfl's state, as the server would have left them."""
    logits = tuple(
        jnp.stack([jnp.asarray(teacher(int(i), leaf.shape[1]), leaf.dtype) for i in group.id])
        for group, leaf in zip(federation.groups, state.teacher_logits, strict=True)
    )
    has_teacher = tuple(group.id != UNTAUGHT for group in federation.groups)
    return state._replace(teacher_logits=logits, has_teacher=has_teacher)


# ---- what another method computes


def without_a_teacher_it_is_local():
    for (pfedclub, report), (local, expected) in zip(
        run("pfedclub", alike(), **TRAINING), run("local", alike(), **TRAINING), strict=True
    ):
        assert_same(pfedclub.weights, local.kept, tolerance=1e-6)
        assert_same(report.loss, expected.loss, tolerance=1e-6)


def with_teachers_that_weigh_nothing_it_is_local():
    def after_a_round(lam):
        options = TRAINING | {"lam": lam}
        state = given(initial("pfedclub", alike(), **options), alike())
        return one_round("pfedclub", state, alike(), 0, EVERYONE, **options)[0].weights

    without, _ = run("pfedclub", alike(), **TRAINING)[0]
    assert_same(after_a_round(0.0), without.weights, tolerance=1e-6)
    assert differ(after_a_round(0.2), without.weights)


OF_SERVER = {"server_lr", "tau", "lam"}  # read between rounds, or with a teacher, which no client has yet

pfedclub = Case(
    "pfedclub",
    own_models.start,
    step,
    own_models.scores,
    given=given,
    view=recording.own_models,
    traffic=lambda model, models, t: (model.size, 0),  # no client has a teacher before a server's step
    all_clients=True,
    short={"server_epochs": 1, "candidates": 2},
    idle_rates=OF_SERVER,
    comparisons={
        "": Comparison({"lam": 0.6}, mistakes=[("lam", 0.61)], models=UNLIKE),
    },
    reductions=(without_a_teacher_it_is_local, with_teachers_that_weigh_nothing_it_is_local),
)

pfedclub_plus = pfedclub._replace(
    method="pfedclub-plus",
    idle_rates=OF_SERVER | {"eta"},
    comparisons={},  # a client's round is the same
    reductions=(),
)
