"""FedRep (Collins et al. 2021, arXiv:2102.07078, Algorithm 1): own heads, trained first."""

import jax
from conftest import assert_same, differ
from reference import nets, sharing
from reference.training import descend, plain_loss

from methods.cases import Case, Comparison, local_statistics
from methods.recording import phases
from methods.rounds import TRAINING, alike, initial, normalised, run

stays = nets.in_head


def start(clients, initial, options):
    """Start with the extractors on the server and a copy of the initial head on every client."""
    return sharing.begun(clients, initial, stays, options)


def step(state, clients, cohort, options):
    """phi_i <- SGD over phi_i; theta_i <- SGD over theta; theta <- sum_i n_i theta_i / sum_i n_i.

    While the head learns, the extractor is in evaluation mode. The loss is that of the second phase, in
    which the shared leaves are trained.
    """
    trained, losses = {}, {}
    for i, draw in cohort.draws.items():
        w, of_head = sharing.model(state, clients, i), plain_loss(clients[i], train=False)
        w, _ = descend(w, of_head, draw["head"], options, trains=nets.in_head)
        trained[i], losses[i] = descend(w, plain_loss(clients[i]), draw["body"], options, trains=nets.in_body)
    return sharing.averaged(state, clients, trained, stays, options), losses


# ---- what another method computes


def without_head_epochs_it_is_fedbabu():
    fedrep, _ = run("fedrep", alike(), head_epochs=0, **TRAINING)[-1]
    fedbabu, _ = run("fedbabu", alike(), **TRAINING)[-1]
    assert_same((fedrep.shared, fedrep.kept), (fedbabu.shared, fedbabu.kept), tolerance=1e-5)


def training_the_head_moves_neither_parameters_nor_statistics_of_the_body():
    """Only one client takes part, so that the mean over clients is exact."""
    options = TRAINING | {"epochs": 0, "head_epochs": 2}
    before = initial("fedrep", normalised(), **options)
    ((after, _),) = run("fedrep", normalised(), cohorts=((0,),), **options)
    assert jax.tree.leaves([weights.stats for weights in after.shared])
    assert_same(after.shared, before.shared)
    assert differ(after.kept, before.kept)


fedrep = Case(
    "fedrep",
    start,
    step,
    sharing.scores_after_tuning,
    draws=phases(head="head_epochs", body="epochs"),
    draws_before_use=phases(tune="ft_epochs"),
    traffic=lambda model, models, t: model.body.size,
    comparisons={
        "": Comparison({"ft_epochs": 1}, [("ft_part", "head")]),
        "local statistics": local_statistics(head_epochs=2, ft_epochs=1, ft_part="head"),
    },
    reductions=(
        without_head_epochs_it_is_fedbabu,
        training_the_head_moves_neither_parameters_nor_statistics_of_the_body,
    ),
)
