"""LG-FedAvg (Liang et al. 2020, arXiv:2001.01523, Algorithm 1): local extractors, a global head."""

from reference import nets, sharing

from methods.cases import Case, Comparison, local_statistics
from methods.recording import phases

stays = nets.in_body


def start(clients, initial, options):
    """Start with the heads on the server and a copy of the initial extractor on every client."""
    return sharing.begun(clients, initial, stays, options)


def step(state, clients, cohort, options):
    """(theta_i, phi_i) <- SGD(theta_i, phi); phi <- sum_i n_i phi_i / sum_i n_i."""
    trained, losses = sharing.trained_jointly(state, clients, cohort, options)
    return sharing.averaged(state, clients, trained, stays, options), losses


lg_fedavg = Case(
    "lg-fedavg",
    start,
    step,
    sharing.scores_after_tuning,
    draws_before_use=phases(tune="ft_epochs"),
    traffic=lambda model, models, t: model.head.size,
    comparisons={
        "": Comparison({"ft_epochs": 2, "ft_part": "head"}, mistakes=[("ft_part", "all")]),
        "local statistics": local_statistics(ft_epochs=1, ft_part="all"),
    },
)
