"""DFedAvg (Sun et al. 2021, arXiv:2104.11375, Algorithm 1): own models, averaged with neighbours."""

import jax
from conftest import EDGES, SIZES, assert_same, differ
from reference import nets, own_models
from reference.training import descend, plain_loss

from methods import recording
from methods.cases import Case, Comparison, local_statistics
from methods.rounds import TRAINING, equal, run


def step(state, clients, cohort, options):
    """z_i <- SGD(w_i); w_i <- sum_l W_il z_l over the neighbours that are present, and itself."""
    z, losses = {}, {}
    for i, draw in cohort.draws.items():
        z[i], losses[i] = descend(state["own"][i], plain_loss(clients[i]), draw["train"], options)
    local = options.bn_stats == "local"
    mixed = {}
    for group in {clients[i].group for i in z}:
        own = {i: w for i, w in z.items() if clients[i].group == group}
        mixed |= gossip(own, kept=lambda name: local and nets.is_statistic(name))
    return {"own": state["own"] | mixed}, losses


def gossip(held, kept=lambda name: False):
    """Return {client: sum_l W_il of what is held}, with Metropolis weights among the holders."""
    linked = {i: neighbours(i, held) for i in held}
    mixed = {}
    for i, own in held.items():
        new = dict(own)
        for k in linked[i]:
            weight = 1 / (1 + max(len(linked[i]), len(linked[k])))
            for name in own:
                if not kept(name):
                    new[name] = new[name] + weight * (held[k][name] - own[name])
        mixed[i] = new
    return mixed


def neighbours(i, present):
    """Return the clients that are linked with client i and present."""
    return sorted(
        {b if a == i else a for a, b in EDGES if i in (a, b) and a in present and b in present} - {i}
    )


def traffic(model, models, t):
    """Count the model per neighbour of the architecture: of clients 0, 1 and 3 only 0 and 1 are linked."""
    return lambda i: model.size if i in (0, 1) else 0, 0


def without_links_it_is_local_training():
    """Clients 1 and 4 are not linked, nor are 0 and 3."""
    apart = [(1, 4), (0, 3)]
    for (dfedavg, report), (local, expected) in zip(
        run("dfedavg", equal(), cohorts=apart, **TRAINING),
        run("local", equal(), cohorts=apart, **TRAINING),
        strict=True,
    ):
        assert_same(dfedavg.weights, local.kept, tolerance=1e-6)
        assert_same(report.loss, expected.loss, tolerance=1e-6)
        assert not any(sent.any() for up in report.up for sent in up.values())


def with_three_clients_that_are_all_linked_it_is_fedavg():
    """Clients 0, 1 and 2 have equally many rows; each sends to the two others."""
    together = [(0, 1, 2)] * 2
    for (dfedavg, report), (fedavg, _) in zip(
        run("dfedavg", equal(), cohorts=together, **TRAINING),
        run("fedavg", equal(), cohorts=together, **TRAINING),
        strict=True,
    ):
        for i in together[0]:
            assert_same(recording.at(dfedavg.weights[0], i), fedavg.shared[0], tolerance=1e-5)
        (sent,) = report.up[0].values()
        assert sent.tolist() == [2, 2, 2, 0, 0]


def gossip_keeps_the_mean_of_all():
    ((state, _),) = run("dfedavg", equal(), cohorts=[range(len(SIZES))], **TRAINING)
    ((local, _),) = run("local", equal(), cohorts=[range(len(SIZES))], **TRAINING)
    before, after = (jax.tree.map(lambda leaf: leaf.mean(0), of[0]) for of in (local.kept, state.weights))
    assert_same(after, before, tolerance=1e-5)
    assert differ(state.weights, local.kept)


dfedavg = Case(
    "dfedavg",
    own_models.start,
    step,
    own_models.scores,
    view=recording.own_models,
    traffic=traffic,
    comparisons={
        "": Comparison({}, [("lr", 0.051), ("momentum", 0.51)]),
        "local statistics": local_statistics(("bn_stats", "aggregate")),
    },
    reductions=(
        without_links_it_is_local_training,
        with_three_clients_that_are_all_linked_it_is_fedavg,
        gossip_keeps_the_mean_of_all,
    ),
)
