"""pFedSim (Tan et al. 2023, arXiv:2305.15706, Algorithm 1): FedAvg, then mixed extractors."""

import math

import jax
import numpy as np
from conftest import SIZES, assert_same
from reference import nets
from reference.own_models import cosine, sent
from reference.training import average, descend, plain_loss

from jaxfl.algorithms.mixing.pfedsim import generalises
from jaxfl.core.protocol import Cohort
from methods import recording
from methods.cases import NORMALISED, SMALL, Case, Comparison, local_statistics
from methods.recording import by_client, by_group
from methods.rounds import EVERYONE, TRAINING, alike, mixed, reported, run

SELF = 0.9999


def start(clients, initial, options):
    """Start with the initial models on the server; no clients have met."""
    return {
        "shared": {g: sent(weights, options) for g, weights in enumerate(initial)},
        "own": {i: initial[client.group] for i, client in enumerate(clients)},
        "apart": dict.fromkeys(range(len(clients)), False),
        "phi": np.zeros((len(clients), len(clients))),
    }


def step(state, clients, cohort, options):
    """Run FedAvg in the first rounds; then store similarities of clients that have met."""
    shared, phi = dict(state["shared"]), state["phi"].copy()
    trained, losses, apart = {}, {}, dict(state["apart"])
    for i, draw in cohort.draws.items():
        begun = received(state, clients, i, options)
        trained[i], losses[i] = descend(begun, plain_loss(clients[i]), draw["train"], options)
    if cohort.t < math.floor(options.generalization * cohort.rounds):
        everything = [(clients[i].group, clients[i].size, weights) for i, weights in trained.items()]
        shared = average(shared, everything)
    else:
        apart |= dict.fromkeys(trained, True)
        for i in trained:
            for j in trained:
                if clients[i].group == clients[j].group:
                    phi[i, j] = similarity(trained[i], trained[j])
    weights = np.array([weights_of(phi[i], i) for i in range(len(clients))])
    own = state["own"] | trained
    return {"shared": shared, "own": own, "apart": apart, "phi": phi, "weights": weights}, losses


def weights_of(phi, i):
    """Return a_ij from client i's row of Phi."""
    row = -np.log(1 - np.minimum(phi, SELF))
    row[i] = -np.log(1 - SELF)
    return row / row.sum()


def similarity(one, other):
    """Return the mean over classes of the cosine of their weights, at least 0."""
    kernels = (weights[f"{nets.HEAD}/kernel"].T for weights in (one, other))
    return max(0, np.mean([cosine(a, b) for a, b in zip(*kernels, strict=True)]))


def received(state, clients, i, options):
    """Return the own model with an extractor mixed from those of clients that it has met."""
    own = deployed(state, clients, i)
    weights = weights_of(state["phi"][i], i)
    if not state["apart"][i]:
        return own
    peers = [j for j, client in enumerate(clients) if client.group == clients[i].group]
    theta = sent(nets.body(own), options)
    return own | {name: sum(weights[j] * state["own"][j][name] for j in peers) for name in theta}


def deployed(state, clients, i):
    """Return the own model of a client that has trained in the second phase, else the global one."""
    return state["own"][i] | ({} if state["apart"][i] else state["shared"][clients[i].group])


def scores(state, clients, draws, options, x):
    """Score the model with the mixed extractor as received, the stored or the global one as deployed."""
    found = {"received": [], "deployed": []}
    for i, client in enumerate(clients):
        found["received"].append(nets.logits(client.net, received(state, clients, i, options), x))
        found["deployed"].append(nets.logits(client.net, deployed(state, clients, i), x))
    return found


def view(state, federation, t):
    """Return models, which clients have their own, Phi, and the weights that users see."""
    shared = state.shared
    if state.hyper.bn_stats == "local":  # the average of what stays on clients is never read
        shared = tuple(w._replace(stats={}) for w in shared)
    return {
        "shared": by_group(shared),
        "own": by_client(state.weights, federation),
        "apart": by_client(state.has_own, federation),
        "phi": recording.of_pairs(state.phi),
    } | recording.matrices("pfedsim")(state)


# ---- what another method computes


def without_a_second_phase_it_is_fedavg():
    for (pfedsim, report), (fedavg, expected) in zip(
        run("pfedsim", alike(), generalization=1.0, **TRAINING),
        run("fedavg", alike(), **TRAINING),
        strict=True,
    ):
        assert_same(pfedsim.shared, fedavg.shared)
        assert_same(reported(report), reported(expected))
        assert not any(map(np.any, pfedsim.phi)) and not np.any(pfedsim.has_own[0])


def a_client_that_meets_no_other_is_local():
    """In the second phase one client of each architecture takes part."""
    alone = ((0, 2), (0, 2), (0, 2))
    pfedsim, _ = run("pfedsim", mixed(), alone, generalization=0.0, **TRAINING)[-1]
    local, _ = run("local", mixed(), alone, **TRAINING)[-1]
    assert_same(pfedsim.weights, local.kept, tolerance=1e-6)


def classifiers_are_not_received_in_the_second_phase():
    """The exception is a client without the last global classifier, which receives it once."""
    present = (EVERYONE, (0, 3), EVERYONE)
    (model,), of_clients = alike().models, np.arange(len(SIZES))
    reports = [info for _, info in run("pfedsim", alike(), present, **TRAINING)]  # a round of FedAvg
    assert all(info.up[0].max() == model.size for info in reports)
    assert [info.down[0].max() for info in reports[:2]] == [model.size] * 2
    expected = np.where(np.isin(of_clients, present[1]), model.body.size, model.size)
    assert reports[2].down[0].tolist() == expected.tolist()


def the_number_of_rounds_of_fedavg_is_exact():
    """0.29 * 100 is 28.999... in double precision, and 0.3 * 50 is more than 15 in single precision."""
    for rounds in (1, 3, 50, 100, 1000):
        for hundredths in range(101):
            times = Cohort(np.arange(rounds, dtype=np.int32), (), rounds)
            for dtype in (np.float32, np.float64):
                with jax.enable_x64(dtype == np.float64):
                    first = generalises(times, jax.numpy.asarray(hundredths / 100, dtype))
                assert first.sum() == hundredths * rounds // 100


pfedsim = Case(
    "pfedsim",
    start,
    step,
    scores,
    view=view,
    traffic=lambda model, models, t: model.size,
    all_clients=True,
    comparisons={
        "": Comparison(mistakes=[("generalization", 0.25)]),
        "without rounds of fedavg": Comparison(
            {"generalization": 0.0}, [("momentum", 0.51)], ((SMALL, 1), (NORMALISED, 4))
        ),
        "local statistics": local_statistics(generalization=0.25),
    },
    reductions=(
        without_a_second_phase_it_is_fedavg,
        a_client_that_meets_no_other_is_local,
        classifiers_are_not_received_in_the_second_phase,
        the_number_of_rounds_of_fedavg_is_exact,
    ),
)
