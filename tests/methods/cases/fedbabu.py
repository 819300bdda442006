"""FedBABU (Oh et al. 2022, arXiv:2106.06042, Algorithm 1): a random head until fine-tuning."""

from conftest import assert_same, differ
from reference import nets, sharing
from reference.training import descend, plain_loss

from methods.cases import Case, Comparison, local_statistics
from methods.recording import phases
from methods.rounds import TRAINING, alike, initial, run

stays = nets.in_head


def start(clients, initial, options):
    """Start with the extractors on the server and a copy of the initial head on every client."""
    return sharing.begun(clients, initial, stays, options)


def step(state, clients, cohort, options):
    """theta_i <- SGD over theta, under the initial head; theta <- sum_i n_i theta_i / sum_i n_i."""
    trained, losses = {}, {}
    for i, draw in cohort.draws.items():
        w, loss = sharing.model(state, clients, i), plain_loss(clients[i])
        trained[i], losses[i] = descend(w, loss, draw["train"], options, trains=nets.in_body)
    return sharing.averaged(state, clients, trained, stays, options), losses


def the_head_stays_as_it_was():
    before = initial("fedbabu", alike(), **TRAINING)
    after, _ = run("fedbabu", alike(), **TRAINING)[-1]
    assert_same(after.kept, before.kept)
    assert differ(after.shared, before.shared)


fedbabu = Case(
    "fedbabu",
    start,
    step,
    sharing.scores_after_tuning,
    draws_before_use=phases(tune="ft_epochs"),
    traffic=lambda model, models, t: model.body.size,
    comparisons={
        "": Comparison(mistakes=[("ft_part", "head")]),
        "local statistics": local_statistics(("ft_part", "all"), ft_part="head", ft_epochs=3),
    },
    reductions=(the_head_stays_as_it_was,),
)
