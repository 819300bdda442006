"""FedPer (Arivazhagan et al. 2019, arXiv:1912.00818, Algorithms 1-2): own heads, or all except layer one."""

import numpy as np
from conftest import assert_same
from reference import nets, sharing

from jaxfl.core import tree
from methods.cases import NORMALISED, TWO_LAYERS, Case, Comparison, local_statistics
from methods.recording import phases
from methods.rounds import EVERYONE, TRAINING, alike, reported, run


def begins(name):
    """Return whether a leaf belongs to the layer with which all networks of the comparison begin."""
    return nets.block_of(name) == "fc1"


def start(clients, initial, options):
    """Start with the extractors, or the first network's first layer, on the server; clients have the rest."""
    if options.share == "body":
        return sharing.begun(clients, initial, nets.in_head, options)
    first = {name: w for name, w in initial[0].items() if begins(name)}
    return sharing.begun(clients, [w | first for w in initial], lambda name: not begins(name), options)


def step(state, clients, cohort, options):
    """(theta_i, phi_i) <- SGD(theta, phi_i); theta <- sum_i n_i theta_i / sum_i n_i."""
    trained, losses = sharing.trained_jointly(state, clients, cohort, options)
    if options.share == "body":
        return sharing.averaged(state, clients, trained, nets.in_head, options), losses
    after = sharing.averaged(state, clients, trained, lambda name: not begins(name), options)
    weights = [sharing.weight(clients[i], options) for i in trained]
    theta = {
        name: np.average([w[name] for w in trained.values()], axis=0, weights=weights)
        for name in state["shared"][0]
    }
    return after | {"shared": {group: theta for group in after["shared"]}}, losses


def one_round_of_local_training_is_the_same_whatever_is_shared():
    """FedPer and LG-FedAvg divide between them what FedAvg shares and what Local keeps."""
    fedavg, fedper, lg_fedavg, local = (
        run(name, alike(), cohorts=(EVERYONE,), **TRAINING)[0]
        for name in ("fedavg", "fedper", "lg-fedavg", "local")
    )
    assert_same(tree.combine(fedper[0].shared, lg_fedavg[0].shared), fedavg[0].shared)
    assert_same(tree.combine(fedper[0].kept, lg_fedavg[0].kept), local[0].kept)
    assert_same(fedper[1].up[0] + lg_fedavg[1].up[0], fedavg[1].up[0])
    for _, info in fedper, lg_fedavg, local:
        assert_same(info.loss, fedavg[1].loss)


def with_one_architecture_the_common_layers_are_the_body():
    prefix, body = (
        run("fedper", alike(), cohorts=((0, 3, 4),), share=share, **TRAINING)[0]
        for share in ("prefix", "body")
    )
    assert_same(prefix[0].shared, body[0].shared, tolerance=1e-6)
    assert_same((prefix[0].kept, reported(prefix[1])), (body[0].kept, reported(body[1])))


fedper = Case(
    "fedper",
    start,
    step,
    sharing.scores_after_tuning,
    draws_before_use=phases(tune="ft_epochs"),
    traffic=lambda model, models, t: model.body.size,
    comparisons={
        "": Comparison({"ft_epochs": 2}, mistakes=[("weight_decay", 0.011), ("ft_part", "head")]),
        "prefix": Comparison(
            {"share": "prefix", "weighting": "uniform"},
            [("share", "body"), ("weighting", "rows")],
            ((NORMALISED, 3), (TWO_LAYERS, 2)),
        ),
        "local statistics": local_statistics(("ft_part", "all"), ft_epochs=1, ft_part="head"),
    },
    reductions=(
        one_round_of_local_training_is_the_same_whatever_is_shared,
        with_one_architecture_the_common_layers_are_the_body,
    ),
)
