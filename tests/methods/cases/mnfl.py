"""MNFL (Beikmohammadi et al., Algorithm 1, eqs. 5-7), the algorithm of KT-pFL (arXiv:2111.02862).

C[n, m] is the weight of client m in the teacher of client n; the round's cohort has the public images.
"""

import jax
import numpy as np
import pytest
from conftest import CLASSES, PUBLIC, assert_same
from reference import exchange, nets, own_models
from reference.exchange import mixture
from reference.training import softmax

from jaxfl.mechanisms.public_images import subset
from methods import recording
from methods.cases import UNLIKE, Case, Comparison, local_statistics
from methods.recording import orders
from methods.rounds import ALWAYS, TRAINING, alike, run


def start(clients, initial, options):
    """Start with own models and equal weights."""
    matrix = np.full((len(clients), len(clients)), 1 / len(clients))
    return own_models.start(clients, initial, options) | {"matrix": matrix}


def step(state, clients, cohort, options):
    """Learn alone, exchange predictions, learn from the teacher; then the server learns the matrix."""
    matrix, present = state["matrix"], list(cohort.draws)
    models, losses, s, _, told = exchange.exchanged(state, clients, cohort, options, lambda s: matrix)
    if options.matrix_predictions == "after":
        s = {
            i: softmax(nets.logits(clients[i].net, models[i], cohort.public) / options.temperature)
            for i in present
        }
    distance_gradient = {
        (n, m): slope(mixture(matrix, n, s), s[n], s[m], options) for n in present for m in present
    }
    matrix = learnt(matrix, clients, present, distance_gradient, options)
    return {"own": models, "matrix": matrix}, losses, told


def slope(teacher, own, of_m, options):
    """Return the derivative of t_n's distance from s_n by C[n, m]: KL(t_n || s_n), or the mean square."""
    if options.matrix_loss == "mse":
        return (2 * (teacher - own) * of_m).mean()
    return (of_m * (np.log(teacher / own) + 1)).sum(1).mean()


# ---- the server's step, eq. 7


def learnt(matrix, clients, present, distance_gradient, options, everyone=None):
    """Return C after a step for the pairs of present clients; rows keep their sums, except under "clip"."""
    everyone = range(len(clients)) if everyone is None else everyone
    uniform, rows = 1 / len(everyone), sum(clients[n].size for n in everyone)
    new = matrix.copy()
    for n in present:
        old = matrix[n, present]
        share = clients[n].size / rows
        gradient = options.lam * share * np.array([distance_gradient[n, m] for m in present])
        rate = options.lr if options.matrix_lr is None else options.matrix_lr
        moved = old - rate * (gradient + 2 * options.rho * (old - uniform))
        if options.row_norm == "simplex":
            moved = nearest(moved, old.sum())
        elif options.row_norm == "softmax":
            moved = old.sum() * softmax(5 * moved)
        else:
            moved = np.clip(moved, 0, None)
        new[n, present] = moved
    return new


def nearest(row, mass):
    """Return the nearest point with c >= 0 and sum c = mass: cut off at a level that bisection finds."""
    low, high = row.min() - mass, row.max()
    for _ in range(100):
        level = (low + high) / 2
        low, high = (level, high) if np.clip(row - level, 0, None).sum() > mass else (low, level)
    return np.clip(row - level, 0, None)


# ---- what connects it with jaxfl


def draws(key, client, models, options):
    """Draw orders for the local epochs, and of the round's public images for the epochs of distillation."""
    alone, taught = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
    images = min(options.public_size, PUBLIC)
    return {
        "train": orders(alone, client.size, options.epochs),
        "distill": orders(taught, images, options.distill_epochs),
    }


def view(state, federation, t):
    """Return the models and the matrix."""
    return recording.own_models(state, federation, t) | {"matrix": state.matrix}


def drawn_anew(init_key, round_key, federation, options):
    """Return the rows of a round's public images."""
    return subset(round_key, federation, options.public_size)


@pytest.mark.long
def without_distillation_it_is_local():
    for (mnfl, report), (local, expected) in zip(
        run("mnfl", alike(), distill_lr=0.0, **TRAINING), run("local", alike(), **TRAINING), strict=True
    ):
        assert_same(mnfl.weights, local.kept)
        assert_same(report.loss, expected.loss)


@pytest.mark.long
def distillation_has_the_rate_of_training_if_no_other_is_given():
    for (one, _), (other, _) in zip(
        run("mnfl", alike(), **TRAINING), run("mnfl", alike(), distill_lr=0.05, **TRAINING), strict=True
    ):
        assert_same(one.weights, other.weights)


def right_after_training_models_are_those_of_local(method="mnfl", **options):
    """Clients are taught only after that moment."""
    ((_, report), *_), ((local, _), *_) = (
        run(name, alike(), ALWAYS[:1], **TRAINING, **of_method)
        for name, of_method in ((method, options), ("local", {}))
    )
    for of_group, kept in zip(report.trained, local.kept, strict=True):
        assert_same(of_group.stacked, kept, tolerance=1e-6)


OPTIONS = {
    "public_size": 7,
    "public_batch": 3,
    "distill_epochs": 2,
    "distill_lr": 0.03,
    "temperature": 2.0,
    "kl_weight": 0.9,
    "matrix_lr": 0.4,
    "lam": 60.0,
    "rho": 0.2,
}

mnfl = Case(
    "mnfl",
    start,
    step,
    own_models.scores,
    draws=draws,
    view=view,
    images=drawn_anew,
    # Up: predictions before and after learning; down: the teacher's, and the images' numbers.
    traffic=lambda model, models, t: (2 * PUBLIC * CLASSES, PUBLIC * CLASSES + PUBLIC),
    returns=False,
    short={"public_batch": 4},
    comparisons={
        "": Comparison(OPTIONS, [("matrix_predictions", "before"), ("row_norm", "clip")], UNLIKE),
        "as in the authors' code": Comparison(
            OPTIONS
            | {
                "matrix_loss": "mse",
                "matrix_predictions": "before",
                "row_norm": "softmax",
                "matrix_lr": None,
            },
            mistakes=[("matrix_loss", "kl")],
            models=UNLIKE,
        ),
        "local statistics": local_statistics(**OPTIONS),
    },
    reductions=(
        without_distillation_it_is_local,
        right_after_training_models_are_those_of_local,
        distillation_has_the_rate_of_training_if_no_other_is_given,
    ),
)
