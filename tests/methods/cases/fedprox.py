"""FedProx (Li et al. 2020, arXiv:1812.06127, Algorithm 2): FedAvg with a pull towards the received model."""

from conftest import assert_same
from reference import sharing
from reference.training import descend, plain_loss

from methods.cases import Case, Comparison, local_statistics
from methods.cases.ditto import proximal
from methods.cases.fedavg import ADAM, start, stays, view
from methods.rounds import TRAINING, alike, reported, run


def step(state, clients, cohort, options):
    """w_i <- SGD over CE(w_i) + mu/2 ||w_i - w||^2 from w; w <- sum_i n_i w_i / sum_i n_i."""
    trained, losses = {}, {}
    for i, draw in cohort.draws.items():
        w = sharing.model(state, clients, i)
        pulled = proximal(plain_loss(clients[i]), w, options.mu)
        trained[i], losses[i] = descend(w, pulled, draw["train"], options)
    return sharing.served(state, clients, trained, stays, options), losses


def without_pull_it_is_fedavg():
    for (fedprox, report), (fedavg, expected) in zip(
        run("fedprox", alike(), mu=0.0, **TRAINING), run("fedavg", alike(), **TRAINING), strict=True
    ):
        assert_same(fedprox.shared, fedavg.shared, tolerance=1e-6)
        assert_same(reported(report), reported(expected), tolerance=1e-6)


fedprox = Case(
    "fedprox",
    start,
    step,
    sharing.scores,
    view=view,
    traffic=lambda model, models, t: model.size,
    comparisons={
        "": Comparison({"mu": 0.7}, [("mu", 0.71)]),
        "local statistics": local_statistics(mu=0.7),
        "with adam on the server": ADAM,
    },
    reductions=(without_pull_it_is_fedavg,),
)
