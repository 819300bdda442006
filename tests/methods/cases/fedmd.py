"""FedMD (Li and Wang 2019, arXiv:1910.03581, Algorithm 1): all learn from the mean of all predictions."""

import dataclasses

import jax
import numpy as np
from conftest import CLASSES, PUBLIC, assert_same
from reference import exchange, own_models
from reference.training import descend, plain_loss

from jaxfl.core.cohorts import all_clients
from jaxfl.registry import METHODS
from methods.cases import UNLIKE, Case, Comparison, local_statistics, mnfl
from methods.recording import epochs_of, orders
from methods.rounds import TRAINING, alike, initial, mixed, run


def start(clients, initial, options):
    """Start with own models; no clients have met."""
    matrix = np.zeros((len(clients), len(clients)))
    return own_models.start(clients, initial, options) | {"matrix": matrix}


def prepare(state, clients, draws, options, rounds):
    """Train on all public images with their labels, then on the own ones."""
    own = {}
    for i, client in enumerate(clients):
        public = client._replace(x=client.x_public, y=client.y_public)
        w, _ = descend(
            state["own"][i], plain_loss(public), draws[i]["public"], options, batch_size=options.public_batch
        )
        own[i], _ = descend(w, plain_loss(client), draws[i]["own"], options)
    return state | {"own": own}


def draws_of_preparation(key, clients, options, rounds):
    """Draw orders for both parts of it."""

    def of_client(i, client):
        public, own = (jax.random.fold_in(jax.random.fold_in(key, i), phase) for phase in (0, 1))
        epochs = epochs_of(options, "transfer_epochs")
        return {"public": orders(public, PUBLIC, epochs), "own": orders(own, client.size, epochs)}

    return {i: of_client(i, client) for i, client in enumerate(clients)}


def step(state, clients, cohort, options):
    """Learn alone, exchange predictions, learn from their mean."""
    share = np.full((len(clients), len(clients)), 1 / max(1, len(cohort.draws)))
    logits = {"say": lambda logits, options: logits, "distance": exchange.absolute_error}
    signal = logits if options.signal == "logit" else {}
    models, losses, _, _, told = exchange.exchanged(
        state, clients, cohort, options, lambda s: share, **signal
    )
    present, matrix = list(cohort.draws), state["matrix"].copy()
    matrix[np.ix_(present, present)] = share[np.ix_(present, present)]
    return {"own": models, "matrix": matrix}, losses, told


def without_transfer_and_distillation_it_is_local():
    options = TRAINING | {"distill_lr": 0.0, "transfer_epochs": 0}
    for (fedmd, _), (local, _) in zip(
        run("fedmd", alike(), **options), run("local", alike(), **TRAINING), strict=True
    ):
        assert_same(fedmd.weights, local.kept)


def unlabelled_images_are_not_trained_on_before_the_first_round():
    unlabelled = dataclasses.replace(mixed(), labelled=False)
    fedmd = METHODS["fedmd"]
    state, _ = fedmd.build(fedmd.config()).prepare(
        jax.random.key(1), initial("fedmd", unlabelled), unlabelled, all_clients(unlabelled, 1)
    )
    assert_same(state, initial("fedmd", unlabelled))


OPTIONS = {name: value for name, value in mnfl.OPTIONS.items() if name not in ("matrix_lr", "lam", "rho")}

fedmd = Case(
    "fedmd",
    start,
    step,
    own_models.scores,
    draws=mnfl.draws,
    prepare=prepare,
    draws_of_preparation=draws_of_preparation,
    view=mnfl.view,
    images=mnfl.drawn_anew,
    traffic=lambda model, models, t: (PUBLIC * CLASSES, PUBLIC * CLASSES + PUBLIC),
    returns=False,
    all_clients=True,
    short={"public_batch": 4},
    comparisons={
        "": Comparison(OPTIONS | {"transfer_epochs": 1}, [("temperature", 2.1), ("signal", "logit")], UNLIKE),
        "logits": local_statistics(("signal", "prob"), ("distill_lr", 0.031), signal="logit", **OPTIONS),
    },
    reductions=(
        without_transfer_and_distillation_it_is_local,
        unlabelled_images_are_not_trained_on_before_the_first_round,
    ),
)
