"""CompFL in server mode (Xu et al. 2024, FedKDD, section 3 and Algorithm 1).

Experts j are architectures, ordered by size; client i owns expert j_i and can run all smaller ones.
theta_j is the server's extractor of expert j, phi_ij client i's head on it.
"""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from conftest import SIZES, assert_same
from reference import nets
from reference.sharing import divide
from reference.training import average, cross_entropy, descend, log_softmax, softmax

from jaxfl.algorithms.experts.compfl import distils, select
from jaxfl.algorithms.experts.compfl_client import runnable
from jaxfl.core.protocol import Cohort
from jaxfl.errors import JaxflError
from jaxfl.registry import METHODS
from methods.cases import NORMALISED, SMALL, Case, Comparison, local_statistics
from methods.recording import by_client, by_group, orders
from methods.rounds import EVERYONE, TRAINING, billed, federated, mixed, mlp, normalised, reported, run

SMALLEST = mlp(hidden=3)


class Adapted(NamedTuple):
    """One expert on one client: theta_j and the new head, and what the client learns about it.

    Args:
      weights: theta_j and phi_ij.
      anchors: (classes, d), mean feature of each class on the client; 0 where it has no rows.
      accuracy: a_j.
      predictions: (n, classes), probabilities on the client's training rows.
    """

    weights: dict
    anchors: np.ndarray
    accuracy: float
    predictions: np.ndarray


def by_size(initial):
    """Return the numbers of the architectures, the smallest first."""

    def parameters(j):
        return sum(leaf.size for name, leaf in initial[j].items() if not nets.is_statistic(name))

    return sorted(range(len(initial)), key=parameters)


def start(clients, initial, options):
    """Start with the extractors on the server and every client with heads for all that it can run."""
    order = by_size(initial)
    parts = [divide(weights, nets.in_head, options) for weights in initial]
    return {
        "experts": {j: theta for j, (_, theta) in enumerate(parts)},
        "heads": {
            i: {j: parts[j][0] for j in order[: order.index(client.group) + 1]}
            for i, client in enumerate(clients)
        },
        "trained": {},  # {client: its own expert as trained in the last round}
    }


def step(state, clients, cohort, options):
    """Adapt, weigh, select, update; then the server averages each expert over the clients that trained it.

    A client's draw has "adapt", an order of rows for each expert that it can run, smallest first;
    "chosen", the position in that list of the one it trains; "train", the orders of its local epochs.
    """
    experts, heads = state["experts"], dict(state["heads"])
    net = {client.group: client.net for client in clients}
    warm = cohort.t >= options.warmup * cohort.rounds
    sent, losses, trained, told = [], {}, {}, {}
    for i, draw in cohort.draws.items():
        client, own = clients[i], clients[i].group
        chosen = list(heads[i])[draw["chosen"]] if options.greedy else own
        downloaded = heads[i] if warm and (options.kd or options.greedy) else {chosen, own}
        adapted = {
            j: adapt(client, net[j], experts[j] | heads[i][j], order, options, j == own, j == chosen)
            for j, order in zip(heads[i], draw["adapt"], strict=True)
            if j in downloaded
        }
        teaching = [j for j in adapted if options.teachers == "all" or j != chosen]
        teachers = [adapted[j] for j in teaching]
        loss = objective(
            client,
            net[chosen],
            adapted[chosen].anchors,
            soft_labels(client.y, teachers, options.tau) if options.kd and warm and teachers else None,
            options,
        )
        model, losses[i] = descend(adapted[chosen].weights, loss, draw["train"], options)
        parts = {j: divide(one.weights, nets.in_head, options) for j, one in adapted.items()}
        parts[chosen] = divide(model, nets.in_head, options)
        heads[i] = heads[i] | {j: head for j, (head, _) in parts.items()}
        sent.append((chosen, client.size, parts[chosen][1]))
        if chosen == own:
            trained[i] = model
        told[i] = np.full((len(cohort.x), len(heads[i][own][f"{nets.HEAD}/bias"])), np.nan)
        if warm and teachers:
            said = [softmax(nets.logits(net[j], adapted[j].weights, cohort.x)) for j in teaching]
            told[i] = ensemble(teachers, said, options.tau)
    state = {"experts": average(experts, sent), "heads": heads, "trained": trained}
    return (state, losses, told) if options.kd else (state, losses)


def adapt(client, net, weights, order, options, own=True, chosen=False):
    """Take steps 1 and 2: class means, the head from them (eq. 6) or the client's last, and its accuracy."""
    keeps_both = chosen and options.head_init == "keep-chosen+ft"
    head_init = options.head_init if own or keeps_both else "proto+ft"
    z, _ = net(weights, client.x)
    classes = len(weights[f"{nets.HEAD}/bias"])
    anchors = np.zeros((classes, z.shape[1]))
    for c in set(client.y):
        anchors[c] = z[client.y == c].mean(0)

    if "proto" in head_init:
        kernel = np.zeros_like(anchors)
        for c in range(classes):
            if anchors[c].any():
                kernel[c] = anchors[c] / np.linalg.norm(anchors[c])
        prototypes = {f"{nets.HEAD}/kernel": kernel.T, f"{nets.HEAD}/bias": np.zeros(classes)}
        weights = weights | prototypes
    if "ft" in head_init:

        def loss(weights, rows):
            scores, back = nets.classify(weights, z[rows])
            value, dscores = cross_entropy(scores, client.y[rows])
            return value, back(dscores)[1]

        weights, _ = descend(
            weights, loss, [order], options, lr=options.head_lr, optimizer="sgd", trains=nets.in_head
        )

    x, y = client.x, client.y
    if options.accuracy_on == "validation":
        x, y = client.x_validation, client.y_validation
    accuracy = np.mean(nets.logits(net, weights, x).argmax(1) == y)
    return Adapted(weights, anchors, accuracy, softmax(nets.classify(weights, z)[0]))


def soft_labels(y, teachers, tau):
    """Return targets of eq. 3, (n, classes): half the truth, half the teachers."""
    said = ensemble(teachers, [teacher.predictions for teacher in teachers], tau)
    return np.eye(said.shape[1])[y] / 2 + said / 2


def ensemble(teachers, said, tau):
    """Return what teachers have said, (n, classes) each, weighted by eq. 7."""
    accuracies = np.array([teacher.accuracy for teacher in teachers])
    scaled = np.ones(len(teachers))
    if np.ptp(accuracies) > 0:
        scaled = (accuracies - accuracies.min()) / np.ptp(accuracies)
    return sum(s * of_one for s, of_one in zip(softmax(scaled / tau), said, strict=True))


def objective(client, net, anchors, targets, options):
    """Return eq. 4: cross-entropy + lam * distance to the anchors (eq. 2) + mu * distillation (eq. 3)."""

    def loss(weights, rows):
        y = client.y[rows]
        z, through_body = net(weights, client.x[rows], True)
        scores, through_head = nets.classify(weights, z)
        value, dscores = cross_entropy(scores, y)
        if targets is not None:
            divergence, gradient = distillation(scores, targets[rows], options.kd_direction)
            value += options.mu * divergence
            dscores = dscores + options.mu * gradient
        dz, of_head = through_head(dscores)
        if options.align:
            away = z - anchors[y]
            scale = len(y) * (z.shape[1] if options.anchor_reduction == "mean" else 1)
            value += options.lam * (away**2).sum() / scale
            dz = dz + options.lam * 2 * away / scale
        return value, through_body(dz)[1] | of_head

    return loss


def distillation(scores, targets, direction):
    """Return mean KL(t || p) or, reversed, KL(p || t) with p = softmax(scores), and its gradient."""
    log_p, log_t = log_softmax(scores), np.log(targets)
    p = np.exp(log_p)
    if direction == "forward":
        divergence, gradient = (targets * (log_t - log_p)).sum(1), p - targets
    else:
        divergence = (p * (log_p - log_t)).sum(1)
        gradient = p * (log_p - log_t - divergence[:, None])
    return divergence.mean(), gradient / len(scores)


def scores(state, clients, draws, options, x):
    """Score the newest own expert, adapted, as received; as deployed the one just trained, or all experts."""
    received, deployed = [], []
    net = {client.group: client.net for client in clients}
    for i, client in enumerate(clients):
        if options.deploy == "ensemble":
            probabilities = []
            for (j, head), order in zip(state["heads"][i].items(), draws[i]["adapt of each"], strict=True):
                one = adapt(client, net[j], state["experts"][j] | head, order, options, j == client.group)
                probabilities.append(softmax(nets.logits(net[j], one.weights, x)))
            deployed.append(np.log(np.mean(probabilities, axis=0)))
        newest = state["experts"][client.group] | state["heads"][i][client.group]
        newest = adapt(client, client.net, newest, draws[i]["adapt"], options).weights
        received.append(nets.logits(client.net, newest, x))
        if options.deploy == "own":
            own = state["trained"].get(i, newest)
            deployed.append(nets.logits(client.net, own, x))
    return {"received": received, "deployed": deployed}


# ---- what connects it with jaxfl


def draws(key, client, models, options):
    """Draw an order for the head of every expert, the selection, and orders for the local epochs."""
    experts = len(runnable(models)[client.group])
    adapt_key, choose_key, train_key = jax.random.split(key, 3)
    return {
        "adapt": [orders(jax.random.fold_in(adapt_key, e), client.size, 1)[0] for e in range(experts)],
        "chosen": select(choose_key, options.eps, experts),
        "train": orders(train_key, client.size, options.epochs),
    }


def draws_before_use(key, client, models, options):
    """Draw an order for the own head, and orders for the heads of an ensemble."""
    experts = range(len(runnable(models)[client.group]))
    return {
        "adapt": orders(key, client.size, 1)[0],
        "adapt of each": [orders(jax.random.fold_in(key, e), client.size, 1)[0] for e in experts],
    }


def view(state, federation, t):
    """Return experts, all heads, and the own experts that were trained in this very round."""
    heads = [
        dict(zip(js, of_group, strict=True))
        for js, of_group in zip(runnable(federation.models), state.heads, strict=True)
    ]
    last, trained = by_client(state.last, federation), by_client(state.trained, federation)
    return {
        "experts": by_group(state.experts),
        "heads": by_client(heads, federation),
        "trained": {i: weights for i, weights in trained.items() if last[i] == t},
    }


def traffic(model, models, t):
    """Count the own expert, which trains here (up), and after the warm-up all smaller ones too (down)."""
    downloads = [model] if t == 0 else [other for other in models if other.size <= model.size]
    return model.body.size, sum(other.body.size for other in downloads)


def the_warmup_ends_at_the_exact_round():
    """In single precision 0.3 x 50 is more than 15."""
    for rounds, warmup, first in (50, 0.3, 15), (100, 0.29, 29), (7, 0.5, 4), (10, 0.0, 0):
        times = Cohort(np.arange(rounds, dtype=np.int32), (), rounds)
        later = distils(times, METHODS["compfl"].config(warmup=np.float32(warmup)))
        assert np.flatnonzero(later)[0] == first


def experts_that_are_not_downloaded_cost_nothing():
    """Until the warm-up ends nobody teaches, and a client works on its own expert alone."""
    clients = federated((mlp(), 2), (SMALLEST, 3), validates=True)
    options = {"greedy": False, "accuracy_on": "validation", "warmup": 1.0}
    alone, untaught = (billed("compfl", clients, kd=kd, **options, **TRAINING) for kd in (False, True))
    assert_same(untaught, alone)


def what_a_client_draws_is_sent_up_and_what_it_can_use_down():
    """In the warm-up a client gets its own expert and the drawn one, later all; also if none teaches."""
    federation = federated((mlp(), 2), (SMALLEST, 1), (SMALL, 2))  # not in the order of their sizes
    (up, early, _), (again, late, _) = (
        billed("compfl", federation, eps=1.0, warmup=warmup, kd=False, **TRAINING) for warmup in (1.0, 0.0)
    )
    size = [model.body.size for model in federation.models]
    assert_same(again, up)
    drew_another = []
    for group, js, *counts in zip(
        federation.groups, runnable(federation.models), up, early, late, strict=True
    ):
        for i, sent, *received in zip(np.asarray(group.id), *counts, strict=True):
            of_client = jax.random.fold_in(jax.random.key(0), i)
            drawn = js[int(select(jax.random.split(of_client, 3)[1], 1.0, len(js)))]
            assert sent == size[drawn]
            assert received == [sum(size[j] for j in {drawn, js[-1]}), sum(size[j] for j in js)]
            drew_another.append(drawn != js[-1])
    assert any(drew_another) and not all(drew_another)


def without_cooperation_it_is_fedper():
    off = {"align": False, "greedy": False, "kd": False, "head_init": "keep"}
    for (compfl, report), (fedper, expected) in zip(
        run("compfl", mixed(), **off, **TRAINING), run("fedper", mixed(), **TRAINING), strict=True
    ):
        own_heads = tuple(heads[-1] for heads in compfl.heads)
        assert_same(compfl.experts, fedper.shared, tolerance=1e-5)
        assert_same(own_heads, fedper.kept, tolerance=1e-5)
        assert_same(reported(report), reported(expected), tolerance=1e-5)


OPTIONS = {"eps": 0.6, "warmup": 0.5, "lam": 0.7, "mu": 0.8, "tau": 0.3, "head_lr": 0.2}
SOON = {"eps": 0.6, "warmup": 0.25}  # clients train experts of others, and distil from the second round on


@pytest.mark.long
def a_client_that_cannot_train_is_idle_though_it_adapts():
    ((_, report),) = run("compfl", normalised(), (EVERYONE,), **TRAINING)
    assert report.idle[0].tolist() == [size == 1 for size in SIZES] and any(report.idle[0].tolist())


def experts_without_statistics_of_their_own_are_refused():
    small, large = (mlp(norm="batch", hidden=3), 3), (mlp(norm="batch"), 2)
    for options in {}, {"greedy": False, "kd": False, "deploy": "ensemble"}:
        with pytest.raises(JaxflError, match="would run mlp of others without BatchNorm statistics"):
            run("compfl", federated(small, large), bn_stats="local", **options, **TRAINING)


compfl = Case(
    "compfl",
    start,
    step,
    scores,
    draws=draws,
    draws_before_use=draws_before_use,
    view=view,
    traffic=traffic,
    traffic_rates={"eps": 0.0},  # every client then trains its own expert
    idle_rates={"tau"},  # with two architectures one is the only teacher: its weight is 1 at any temperature
    comparisons={
        "": Comparison(
            OPTIONS,
            [("lam", 0.71), ("mu", 0.81), ("head_lr", 0.21), ("warmup", 0.51), ("head_init", "proto")],
            ((SMALL, 3), (SMALLEST, 2)),
        ),
        "three experts, heads as in Algorithm 1, their ensemble": Comparison(
            OPTIONS | {"head_init": "keep-chosen+ft", "deploy": "ensemble"},
            [("tau", 0.31), ("head_init", "keep+ft"), ("deploy", "own")],
            ((SMALL, 2), (NORMALISED, 2), (SMALLEST, 1)),  # not by size; the largest has two teachers
            cohorts=7,
        ),
        "as printed in the paper": Comparison(
            SOON
            | {
                "head_init": "keep",
                "kd_direction": "reverse",
                "anchor_reduction": "sum",
                "accuracy_on": "validation",
                "teachers": "all",
            },
            [("kd_direction", "forward"), ("accuracy_on", "train"), ("teachers", "others")],
            ((SMALL, 2), (mlp(), 2), (SMALLEST, 1)),
        ),
        "without anchors, heads from prototypes": Comparison(
            SOON | {"align": False, "head_init": "proto"},
            [("align", True), ("head_init", "keep")],
            ((SMALL, 3), (SMALLEST, 2)),
        ),
        "without other experts, heads fitted": Comparison(
            SOON | {"greedy": False, "head_init": "keep+ft"},
            [("greedy", True), ("head_init", "keep")],
            ((SMALL, 3), (SMALLEST, 2)),
        ),
        "without distillation, under adam, local statistics": local_statistics(
            ("kd", True),
            ("optimizer", "sgd"),
            models=((NORMALISED, 3), (SMALLEST, 2)),
            **SOON | {"kd": False, "optimizer": "adam", "lr": 0.01},
        ),
    },
    reductions=(
        the_warmup_ends_at_the_exact_round,
        experts_that_are_not_downloaded_cost_nothing,
        what_a_client_draws_is_sent_up_and_what_it_can_use_down,
        without_cooperation_it_is_fedper,
        a_client_that_cannot_train_is_idle_though_it_adapts,
        experts_without_statistics_of_their_own_are_refused,
    ),
)
