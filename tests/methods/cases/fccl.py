"""FCCL (Huang et al. 2022, CVPR, section 3): logits correlate on public images, old models are remembered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, PUBLIC, assert_same
from reference import nets, own_models
from reference.training import cross_entropy, descend, log_softmax, plain_loss, softmax

from jaxfl.algorithms.public_images.fccl import standardised as of_jaxfl
from jaxfl.data.federate import set_apart
from methods import recording
from methods.cases import UNLIKE, Case, Comparison, local_statistics, mnfl
from methods.recording import epochs_of, orders
from methods.rounds import ALWAYS, TRAINING, alike, billed, mixed, run

KEPT = ("own", "before", "alone")


def start(clients, initial, options):
    """Start with three copies of the own models."""
    return {kept: {i: initial[client.group] for i, client in enumerate(clients)} for kept in KEPT}


def prepare(state, clients, draws, options, rounds):
    """Train every client alone; the result is what each remembers."""
    own = {
        i: descend(state["own"][i], plain_loss(client), draws[i], options)[0]
        for i, client in enumerate(clients)
    }
    return {kept: own for kept in KEPT}


def draws_of_preparation(key, clients, options, rounds):
    """Draw the orders of one local phase."""

    def of_client(i, client):
        phase = jax.random.fold_in(jax.random.fold_in(key, i), 0)
        return orders(phase, client.size, epochs_of(options, "pretraining_epochs"))

    return {i: of_client(i, client) for i, client in enumerate(clients)}


def step(state, clients, cohort, options):
    """Learn alone while remembering, then batch by batch towards the mean of all clients' logits."""
    own, before, losses = dict(state["own"]), dict(state["before"]), {}
    for i, draw in cohort.draws.items():
        known = state["before"][i], state["alone"][i]
        own[i], losses[i] = descend(
            own[i], remembering(clients[i], known, options.remember), draw["train"], options
        )
        before[i] = own[i]
    size = min(options.public_batch, len(cohort.public))
    for _ in range(options.public_epochs):
        for first in range(0, len(cohort.public) - size + 1, size):
            x = cohort.public[first : first + size]
            mean = np.mean([nets.logits(clients[i].net, own[i], x) for i in cohort.draws], 0)
            for i in cohort.draws:
                own[i], _ = descend(
                    own[i],
                    correlated(clients[i], x, standardised(mean)[0], options.lam),
                    [np.arange(size)],
                    options,
                    lr=options.public_lr,
                    batch_size=size,
                    optimizer="undecayed adam",
                )
    return {"own": own, "before": before, "alone": state["alone"]}, losses


def remembering(client, known, weight):
    """Return CE + weight * sum of KL(an old model's predictions || the current ones)."""

    def loss(weights, rows):
        x, y = client.x[rows], client.y[rows]
        z, through_body = client.net(weights, x, True)
        logits, through_head = nets.classify(weights, z)
        value, dlogits = cross_entropy(logits, y)
        for memory in known:
            said = log_softmax(nets.logits(client.net, memory, x))
            value += weight * (np.exp(said) * (said - log_softmax(logits))).sum(1).mean()
            dlogits = dlogits + weight * (softmax(logits) - np.exp(said)) / len(y)
        dz, of_head = through_head(dlogits)
        return value, through_body(dz)[1] | of_head

    return loss


def correlated(client, x, m, lam):
    """Return sum_u (1 - C_uu)^2 + lam sum_{u != v} (1 + C_uv)^2 of the correlations C with columns m."""

    def loss(weights, rows):
        z, through_body = client.net(weights, x, True)
        logits, through_head = nets.classify(weights, z)
        a, deviation = standardised(logits)
        c, same = a.T @ m / len(x), np.eye(len(m.T), dtype=bool)
        value = np.where(same, (1 - c) ** 2, lam * (1 + c) ** 2).sum()
        da = m @ np.where(same, -2 * (1 - c), 2 * lam * (1 + c)).T / len(x)
        dlogits = (da - a * (da * a).sum(0) / (len(x) - 1)) / deviation
        dz, of_head = through_head(dlogits - dlogits.mean(0))
        gradients = through_body(dz)[1] | of_head
        moved = {name: without_rounding(g) for name, g in gradients.items() if not nets.is_statistic(name)}
        return value, gradients | moved

    return loss


def without_rounding(gradient):
    """Set rounding errors to 0: a first step of Adam would have the full rate all the same."""
    return np.where(np.abs(gradient) > 1e-13, gradient, 0)


def standardised(z):
    """Return columns of mean 0 and sample variance 1, and their standard deviations."""
    deviation = z.std(0, ddof=1)
    return (z - z.mean(0)) / deviation, deviation


def view(state, federation, t):
    """Return clients' models now, after their last local training, and before the federation."""
    parts = zip(KEPT, (state.weights, state.before, state.alone), strict=True)
    return {kept: recording.by_client(weights, federation) for kept, weights in parts}


@pytest.mark.long
def without_public_images_memory_and_pretraining_it_is_local():
    options = TRAINING | {"public_epochs": 0, "remember": 0.0, "pretraining_epochs": 0}
    for (fccl, _), (local, _) in zip(
        run("fccl", alike(), **options), run("local", alike(), **TRAINING), strict=True
    ):
        assert_same(fccl.weights, local.kept)


def right_after_training_models_are_those_of_local():
    mnfl.right_after_training_models_are_those_of_local("fccl", remember=0.0, pretraining_epochs=0)


def a_constant_column_correlates_with_nothing():
    """A column may be constant up to rounding, and gradients stay finite."""
    gradient = jax.jit(jax.grad(lambda z: jnp.sin(of_jaxfl(z)).sum()))
    for value in (0.0, 0.1, 0.3, 1.7):
        z = np.stack([np.arange(77), np.full(77, value)], 1).astype(np.float32)
        first, constant = np.asarray(jax.jit(of_jaxfl)(z)).T
        assert (constant == 0).all() and np.isclose(first.std(ddof=1), 1)
        assert np.isfinite(gradient(z)).all()


def predictions_are_sent_in_every_pass():
    (up,), (down,), _ = billed("fccl", alike(), public_batch=4, public_epochs=2, **TRAINING)
    assert set(up) == {2 * 8 * CLASSES} and set(down) == {2 * 8 * CLASSES + 8}


def newcomers_remember_nothing():
    """Newcomers have not trained alone before the federation."""
    joining = set_apart(mixed(), [np.ones(len(group.id), bool) for group in mixed().groups])
    ((fccl, _), *_), ((local, _), *_) = (
        run(method, joining, ALWAYS[:1], **TRAINING, **options)
        for method, options in (("fccl", {"public_epochs": 0, "remember": 0.9}), ("local", {}))
    )
    assert_same(fccl.weights, local.kept, tolerance=1e-6)


OPTIONS = {"public_size": 9, "public_batch": 4, "public_lr": 0.02, "lam": 0.3}

fccl = Case(
    "fccl",
    start,
    step,
    own_models.scores,
    prepare=prepare,
    draws_of_preparation=draws_of_preparation,
    view=view,
    images=mnfl.drawn_anew,
    traffic=lambda model, models, t: (8 * CLASSES, 8 * CLASSES + 8),  # ten images make two batches of four
    returns=False,
    all_clients=True,
    short={"public_batch": 4, "public_lr": 1e-5},  # small steps, because rounding may turn small gradients
    comparisons={
        "": Comparison(OPTIONS | {"pretraining_epochs": 1}, [("lam", 0.31), ("remember", 0.99)], UNLIKE),
        "local statistics": local_statistics(
            ("remember", 0.0),
            ("public_epochs", 1),
            models=UNLIKE,
            remember=0.6,
            public_epochs=2,
            **OPTIONS | {"public_batch": PUBLIC + 1},
        ),
    },
    reductions=(
        without_public_images_memory_and_pretraining_it_is_local,
        right_after_training_models_are_those_of_local,
        a_constant_column_correlates_with_nothing,
        predictions_are_sent_in_every_pass,
        newcomers_remember_nothing,
    ),
)
