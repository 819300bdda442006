"""FedDF (Lin et al. 2020, arXiv:2006.07242, Algorithm 3): averages that learn from the ensemble."""

import jax
import numpy as np
from conftest import PUBLIC, SIZES, assert_same
from reference import nets, sharing
from reference.distillation import distilled
from reference.training import softmax

from jaxfl.core.streams import SERVER
from methods import recording
from methods.cases import UNLIKE, Case, Comparison, fedavg, mnfl
from methods.rounds import TRAINING, alike, billed, federated, mixed, mlp, run


def step(state, clients, cohort, options):
    """Average as FedAvg; then every average learns from the mean of all trained models' logits."""
    trained, losses = sharing.trained_jointly(state, clients, cohort, options)
    averaged = sharing.averaged(state, clients, trained, fedavg.stays, options)
    if not trained:
        return averaged, losses, {}

    def ensemble(x):
        return np.mean([nets.logits(clients[i].net, w, x) for i, w in trained.items()], axis=0)

    teacher = softmax(ensemble(cohort.public) / options.temperature)
    shared = dict(averaged["shared"])
    for i in trained:  # any client of an architecture has its network
        g = clients[i].group
        start = averaged["shared"][g]
        shared[g] = distilled(clients[i], start, teacher, cohort.public, cohort.server, options)
    return averaged | {"shared": shared}, losses, dict.fromkeys(trained, ensemble(cohort.x))


def draws_of_server(key, options):
    """Draw the order of the round's public images in each of the server's epochs."""
    of_server = jax.random.fold_in(jax.random.fold_in(key, SERVER), 0)
    return recording.orders(of_server, min(options.public_size, PUBLIC), options.server_epochs)


def without_distillation_it_is_fedavg():
    for (feddf, _), (averaged, _) in zip(
        run("feddf", alike(), server_epochs=0, **TRAINING), run("fedavg", alike(), **TRAINING), strict=True
    ):
        assert_same(feddf.shared, averaged.shared)


def an_architecture_that_no_client_has_trained_costs_the_server_nothing():
    """The cost is that of a federation without this architecture."""
    *_, some = billed("feddf", mixed(), present=(0, 1), **TRAINING)
    *_, alone = billed("feddf", federated((mlp(), 2), sizes=SIZES[:2]), present=(0, 1), **TRAINING)
    assert some.server == alone.server > 0


OPTIONS = {
    "public_size": 7,
    "public_batch": 3,
    "server_epochs": 2,
    "server_lr": 0.02,
    "temperature": 2.0,
    "clip_norm": 0.5,
}

feddf = Case(
    "feddf",
    fedavg.start,
    step,
    sharing.scores,
    images=mnfl.drawn_anew,
    draws_of_server=draws_of_server,
    traffic=lambda model, models, t: model.size,
    returns=False,
    short={"public_batch": 4},
    comparisons={"": Comparison(OPTIONS, [("server_lr", 0.021), ("temperature", 2.1)], UNLIKE)},
    reductions=(
        without_distillation_it_is_fedavg,
        an_architecture_that_no_client_has_trained_costs_the_server_nothing,
    ),
)

pfeddf = feddf._replace(
    method="pfeddf",
    scores=sharing.scores_after_tuning,
    draws_before_use=recording.phases(tune="ft_epochs"),
    comparisons={
        "": Comparison(
            OPTIONS | {"ft_part": "head"},
            [("ft_part", "all"), ("server_epochs", 1)],
            UNLIKE,
            cohorts=17,  # on four devices the server's Adam enlarges the rounding with the default's
        )
    },
    reductions=(),
)
