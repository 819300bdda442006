"""FedBN (Li et al. 2021, arXiv:2102.07623, Algorithm 1): FedAvg of all layers except BatchNorm."""

import jax
from conftest import assert_same
from reference import sharing

from methods.cases import NORMALISED, SMALL, Case, Comparison, local_statistics
from methods.cases.fedavg import ADAM, view
from methods.rounds import TRAINING, alike, reported, run


def stays(name):
    """Keep scale, bias and running statistics of a norm on their client."""
    return "/norm/" in name


def start(clients, initial, options):
    """Start with all but the norms on the server, and a copy of the initial norms on every client."""
    return sharing.begun(clients, initial, stays, options)


def step(state, clients, cohort, options):
    """(w_i, b_i) <- SGD(w, b_i); w <- sum_i n_i w_i / sum_i n_i."""
    trained, losses = sharing.trained_jointly(state, clients, cohort, options)
    return sharing.served(state, clients, trained, stays, options), losses


def without_norms_it_is_fedavg():
    for (fedbn, report), (fedavg, expected) in zip(
        run("fedbn", alike(), **TRAINING), run("fedavg", alike(), **TRAINING), strict=True
    ):
        assert_same(fedbn.shared, fedavg.shared)
        assert not jax.tree.leaves(fedbn.kept)
        assert_same(reported(report), reported(expected))


fedbn = Case(
    "fedbn",
    start,
    step,
    sharing.scores,
    view=view,
    traffic=lambda model, models, t: model.size,  # these models have no norms
    comparisons={
        "": Comparison(mistakes=[("momentum", 0.51)], models=((SMALL, 2), (NORMALISED, 3))),
        "local statistics": local_statistics(),
        "with adam on the server": ADAM,
    },
    reductions=(without_norms_it_is_fedavg,),
)
