"""pFedMe (Dinh et al. 2020, arXiv:2006.08848, Algorithm 1): personal models around a global one."""

import numpy as np
from conftest import assert_same
from reference import nets
from reference.sharing import weight
from reference.training import OPTIMIZERS, average, clipped, plain_loss

from methods import recording
from methods.cases import Case, Comparison, ditto, fedavg, local_statistics
from methods.rounds import TRAINING, alike, convolving, initial, normalised, run


def start(clients, initial, options):
    """Start with the initial models on the server, and on every client as its personal one."""
    shared = fedavg.start(clients, initial, options)["shared"]
    return {"shared": shared, "personal": {i: initial[client.group] for i, client in enumerate(clients)}}


def step(state, clients, cohort, options):
    """theta_i and v_i in turn; w <- (1 - beta) w + beta avg_n(v_i), its statistics avg_n of theta_i's."""
    personal, sent, losses = dict(state["personal"]), [], {}
    for i, draw in cohort.draws.items():
        client, w = clients[i], state["shared"][clients[i].group]
        v = {name: leaf for name, leaf in w.items() if not nets.is_statistic(name)}
        begun = personal[i] | v  # statistics are the client's own
        personal[i], v, losses[i] = in_turn(client, begun, v, draw["train"], options)
        statistics = {name: leaf for name, leaf in personal[i].items() if nets.is_statistic(name)}
        sent.append((client.group, weight(client, options), v | statistics))
    shared = {}
    for group, mean in average(state["shared"], sent).items():
        w = state["shared"][group]
        beta = {name: 1 if nets.is_statistic(name) else options.beta for name in w}
        shared[group] = {name: (1 - beta[name]) * w[name] + beta[name] * mean[name] for name in w}
    return {"shared": shared, "personal": personal}, losses


def in_turn(client, theta, v, orders, options):
    """Take K steps of theta towards v and the data and one of v on every batch; return both and the loss."""
    least = nets.least_rows(theta)
    update, plain = OPTIMIZERS[options.optimizer](options), plain_loss(client)
    theta, memory, values = dict(theta), {name: (0.0, 0.0) for name in v}, []
    for order in orders:
        for first in range(0, len(order), options.batch_size):
            rows = order[first : first + options.batch_size]
            if len(rows) < least:
                continue
            for _ in range(options.inner_steps):
                value, found = ditto.proximal(plain, v, options.lam)(theta, rows)
                values.append(value)
                theta |= {name: new for name, new in found.items() if nets.is_statistic(name)}
                gradients = clipped({name: found[name] for name in v}, options.clip_norm)
                for name, gradient in gradients.items():
                    change, memory[name] = update(theta[name], gradient, memory[name], len(values))
                    theta[name] = theta[name] - options.lr * change
            v = {name: v[name] - options.eta * options.lam * (v[name] - theta[name]) for name in v}
    return theta, v, np.mean(values) if values else 0.0


def scores(state, clients, draws, options, x):
    """Score w, under bn_stats="local" with theta_i's statistics, as received, and theta_i as deployed."""
    received, deployed = [], []
    for i, client in enumerate(clients):
        theta, w = state["personal"][i], state["shared"][client.group]
        received.append(nets.logits(client.net, theta | w, x))
        deployed.append(nets.logits(client.net, theta, x))
    return {"received": received, "deployed": deployed}


# ---- what another method computes


def without_inner_steps_nothing_moves():
    for federation in (convolving(), normalised()):
        start = initial("pfedme", federation, inner_steps=0, **TRAINING)
        for state, report in run("pfedme", federation, inner_steps=0, **TRAINING):
            assert_same(state, start)
            assert not any(loss.any() for loss in report.loss)


def without_pull_it_is_local_from_the_first_model_in_every_round():
    of_pfedme = run("pfedme", alike(), lam=0.0, inner_steps=1, **TRAINING)
    (pfedme, report), (local, expected) = of_pfedme[0], run("local", alike(), **TRAINING)[0]
    assert_same(pfedme.personal, local.kept, tolerance=1e-6)
    assert_same(report.loss, expected.loss, tolerance=1e-6)
    for state, _ in of_pfedme:
        assert_same(state.shared, initial("pfedme", alike(), **TRAINING).shared)


RATES = {"lam": 9.0, "eta": 0.03, "beta": 0.8}

pfedme = Case(
    "pfedme",
    start,
    step,
    scores,
    view=recording.global_and_personal,
    traffic=lambda model, models, t: model.size,
    comparisons={
        "": Comparison(
            RATES | {"inner_steps": 3},
            [("lam", 9.1), ("eta", 0.031), ("beta", 0.81), ("inner_steps", 2), ("momentum", 0.51)],
        ),
        "uniform, local statistics": local_statistics(
            ("lam", 9.1), ("weighting", "rows"), weighting="uniform", **RATES
        ),
    },
    reductions=(
        without_inner_steps_nothing_moves,
        without_pull_it_is_local_from_the_first_model_in_every_round,
    ),
)
