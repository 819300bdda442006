"""Ditto (Li et al. 2021, arXiv:2012.04221, Algorithm 1): FedAvg and personal models."""

from conftest import assert_same
from reference import nets, sharing
from reference.training import descend, plain_loss

from methods import recording
from methods.cases import Case, Comparison, fedavg, local_statistics
from methods.rounds import TRAINING, alike, reported, run


def start(clients, initial, options):
    """Start with the initial models on the server, and on every client as its personal one."""
    return {
        "fedavg": fedavg.start(clients, initial, options),
        "personal": {i: initial[client.group] for i, client in enumerate(clients)},
    }


def step(state, clients, cohort, options):
    """v_i <- SGD over CE(v_i) + lam/2 ||v_i - w||^2; and FedAvg for w, whose loss is reported.

    The pull is towards the w that was received.
    """
    personal = dict(state["personal"])
    for i, draw in cohort.draws.items():
        w = sharing.model(state["fedavg"], clients, i)
        pulled = proximal(plain_loss(clients[i]), w, options.lam)
        personal[i], _ = descend(personal[i], pulled, draw["personal"], options, lr=options.personal_lr)
    trained, losses = sharing.trained_jointly(state["fedavg"], clients, cohort, options)
    averaged = sharing.averaged(state["fedavg"], clients, trained, fedavg.stays, options)
    return {"fedavg": averaged, "personal": personal}, losses


def proximal(plain, w, lam):
    """Return a loss plus lam/2 ||v - w||^2, over the parameters."""

    def loss(v, rows):
        value, gradients = plain(v, rows)
        away = {name: v[name] - w[name] for name in v if not nets.is_statistic(name)}
        distance = sum((difference**2).sum() for difference in away.values())
        pulled = {name: gradients[name] + lam * difference for name, difference in away.items()}
        return value + lam / 2 * distance, gradients | pulled

    return loss


def scores(state, clients, draws, options, x):
    """Score the global model as received, the personal one as deployed."""
    newest = sharing.scores(state["fedavg"], clients, draws, options, x)
    own = [nets.logits(client.net, state["personal"][i], x) for i, client in enumerate(clients)]
    return newest | {"deployed": own}


def view(state, federation, t):
    """Return FedAvg's state and the personal models."""
    return {
        "fedavg": recording.sharing(state.fedavg, federation, t),
        "personal": recording.by_client(state.personal, federation),
    }


# ---- what another method computes


def the_global_model_is_fedavg():
    for (ditto, report), (other, expected) in zip(
        run("ditto", alike(), **TRAINING), run("fedavg", alike(), **TRAINING), strict=True
    ):
        assert_same(ditto.fedavg.shared, other.shared)
        assert_same(reported(report), reported(expected))


def without_pull_it_is_local():
    ditto, _ = run("ditto", alike(), lam=0.0, **TRAINING)[-1]
    local, _ = run("local", alike(), **TRAINING)[-1]
    assert_same(ditto.personal, local.kept, tolerance=1e-5)


ditto = Case(
    "ditto",
    start,
    step,
    scores,
    draws=recording.phases(train="epochs", personal="personal_epochs"),
    view=view,
    traffic=lambda model, models, t: model.size,
    comparisons={
        "": Comparison({"lam": 0.7, "personal_epochs": 3}, mistakes=[("lam", 0.71)]),
        "at a rate of its own": Comparison({"personal_lr": 0.02}, mistakes=[("personal_lr", None)]),
        "local statistics": local_statistics(lam=0.7),
    },
    reductions=(the_global_model_is_fedavg, without_pull_it_is_local),
)
