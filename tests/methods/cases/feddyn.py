"""FedDyn (Acar et al. 2021, arXiv:2111.04263, Algorithm 1)."""

import jax
import numpy as np
from conftest import SIZES, assert_same
from reference import nets, sharing
from reference.training import descend, plain_loss

from methods import recording
from methods.cases import Case, Comparison, local_statistics
from methods.cases.ditto import proximal
from methods.cases.fedavg import stays
from methods.rounds import EVERYONE, TRAINING, alike, run


def start(clients, initial, options):
    """Start as FedAvg, with all g_i and h 0."""
    zero = [
        {name: 0 * w for name, w in weights.items() if not nets.is_statistic(name)} for weights in initial
    ]
    return sharing.begun(clients, initial, stays, options) | {
        "g": {i: zero[client.group] for i, client in enumerate(clients)},
        "h": dict(enumerate(zero)),
    }


def step(state, clients, cohort, options):
    """w_i <- SGD over CE - <g_i, w_i> + alpha/2 ||w_i - w||^2; g_i, h and w as in the paper."""
    alpha, duals, trained, losses = options.alpha, dict(state["g"]), {}, {}
    for i, draw in cohort.draws.items():
        w = sharing.model(state, clients, i)
        loss = dynamic(proximal(plain_loss(clients[i]), w, alpha), duals[i])
        trained[i], losses[i] = descend(w, loss, draw["train"], options)
        duals[i] = {name: g - alpha * (trained[i][name] - w[name]) for name, g in duals[i].items()}

    shared, server, personal = dict(state["shared"]), dict(state["h"]), dict(state["personal"])
    for i, weights in trained.items():
        personal[i], _ = sharing.divide(weights, stays, options)
    for g in {clients[i].group for i in trained}:
        present = [i for i in trained if clients[i].group == g]
        everybody = sum(client.group == g for client in clients)
        w = shared[g]
        moved = {name: sum(trained[i][name] - w[name] for i in present) for name in server[g]}
        server[g] = {name: h - alpha / everybody * moved[name] for name, h in server[g].items()}
        mean = {name: np.mean([trained[i][name] for i in present], axis=0) for name in w}
        shared[g] = mean | {name: mean[name] - h / alpha for name, h in server[g].items()}
    return {"shared": shared, "personal": personal, "g": duals, "h": server}, losses


def dynamic(near, g_i):
    """Return a loss minus <g_i, w>."""

    def loss(w, rows):
        value, gradients = near(w, rows)
        inner = sum((g * w[name]).sum() for name, g in g_i.items())
        return value - inner, gradients | {name: gradients[name] - g for name, g in g_i.items()}

    return loss


def view(state, federation, t):
    """Return the model and the dual variables; jaxfl's server has h / alpha."""
    h = jax.tree.map(lambda divided: state.hyper.alpha * divided, state.server)
    return recording.sharing(state, federation, t) | {
        "g": recording.by_client(state.memory, federation),
        "h": recording.by_group(h),
    }


# ---- what another method computes


def without_regulariser_clients_train_as_in_fedavg():
    """After the first round the server's model is w_0 + (1 + |S| / N) mean_S (w_i - w_0)."""
    options = TRAINING | {"clip_norm": None}

    def model(name, present, **others):
        state, _ = run(name, alike(), cohorts=(present,), **options, **others)[0]
        return state.shared[0].params

    start = model("fedavg", ())
    for present in EVERYONE, (0, 3, 4):
        clients = [model("fedavg", (i,)) for i in present]
        mean = jax.tree.map(lambda *trained: np.mean(trained, axis=0), *clients)
        step = 1 + len(present) / len(SIZES)
        expected = jax.tree.map(lambda w, mean: w + step * (mean - w), start, mean)  # noqa: B023
        assert_same(model("feddyn", present, alpha=0.0), expected, tolerance=1e-5)


feddyn = Case(
    "feddyn",
    start,
    step,
    sharing.scores,
    view=view,
    traffic=lambda model, models, t: model.size,
    returns=False,
    idle_rates={"clip_norm"},  # gradients this long are rare
    comparisons={
        "": Comparison({"alpha": 0.3}, mistakes=[("alpha", 0.31), ("clip_norm", 0.5)]),
        "local statistics": local_statistics(("clip_norm", None), alpha=0.2, clip_norm=1.5),
    },
    reductions=(without_regulariser_clients_train_as_in_fedavg,),
)
