"""FedPer (Arivazhagan et al. 2019, arXiv:1912.00818, Algorithms 1-2): own heads."""

from conftest import assert_same
from reference import nets, sharing

from jaxfl.core import tree
from methods.cases import Case, Comparison, local_statistics
from methods.recording import phases
from methods.rounds import EVERYONE, TRAINING, alike, run

stays = nets.in_head


def start(clients, initial, options):
    """The server has the extractors; every client has a copy of the initial head."""
    return sharing.begun(clients, initial, stays, options)


def step(state, clients, cohort, options):
    """(theta_i, phi_i) <- SGD(theta, phi_i); theta <- sum_i n_i theta_i / sum_i n_i."""
    trained, losses = sharing.trained_jointly(state, clients, cohort, options)
    return sharing.averaged(state, clients, trained, stays, options), losses


def one_round_of_local_training_is_the_same_whatever_is_shared():
    """FedPer and LG-FedAvg divide between them what FedAvg shares and what Local keeps."""
    fedavg, fedper, lg_fedavg, local = (
        run(name, alike(), cohorts=(EVERYONE,), **TRAINING)[0]
        for name in ("fedavg", "fedper", "lg-fedavg", "local")
    )
    assert_same(tree.combine(fedper[0].shared, lg_fedavg[0].shared), fedavg[0].shared)
    assert_same(tree.combine(fedper[0].kept, lg_fedavg[0].kept), local[0].kept)
    assert_same(fedper[1].up[0] + lg_fedavg[1].up[0], fedavg[1].up)
    for _, info in fedper, lg_fedavg, local:
        assert_same(info.loss, fedavg[1].loss)


fedper = Case(
    "fedper",
    start,
    step,
    sharing.scores_after_tuning,
    draws_before_use=phases(tune="ft_epochs"),
    traffic=lambda model, models, t: model.body.size,
    comparisons={
        "": Comparison({"ft_epochs": 2}, mistakes=[("weight_decay", 0.011), ("ft_part", "head")]),
        "local statistics": local_statistics(("ft_part", "all"), ft_epochs=1, ft_part="head"),
    },
    reductions=(one_round_of_local_training_is_the_same_whatever_is_shared,),
)
