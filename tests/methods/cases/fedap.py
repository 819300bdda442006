"""FedAP (Lu et al. 2022, arXiv:2112.00734): passes on held-out rows, a similarity matrix, then rounds."""

import jax
import numpy as np
from conftest import SIZES, assert_same, tiny_cnn
from reference import nets
from reference.training import average, descend, plain_loss

from jaxfl.data.federate import set_apart
from methods import recording
from methods.cases import SMALL, Case, Comparison, local_statistics
from methods.cases.fedbn import stays
from methods.rounds import ALWAYS, TRAINING, alike, billed, initial, normalised, run


def start(clients, initial, options):
    """Start with own models; before the passes all others are equally similar."""
    group = np.array([client.group for client in clients])
    same = (group[:, None] == group) & ~np.eye(len(clients), dtype=bool)
    return {
        "own": {i: initial[client.group] for i, client in enumerate(clients)},
        "closeness": same / np.maximum(same.sum(1, keepdims=True), 1),
    }


def held_out(client, options):
    """Return how many of a client's rows are for the passes."""
    return min(int(np.floor(options.held_out * client.size + 1e-4)), client.size - 1)


def draws_of_preparation(key, clients, options, rounds):
    """Draw the order of every client's held-out rows, pass by pass."""
    passes = rounds // 2 if options.passes is None else options.passes

    def order(t, i):
        of_client = jax.random.fold_in(jax.random.fold_in(key, t), i)
        return recording.orders(jax.random.fold_in(of_client, 0), held_out(clients[i], options), 1)

    return [{i: order(t, i) for i in range(len(clients))} for t in range(passes)]


def draws(key, client, models, options):
    """Draw orders of the other rows."""
    left = client.size - held_out(client, options)
    return {"train": recording.orders(jax.random.fold_in(key, 0), left, options.epochs)}


def prepare(state, clients, draws, options, rounds):
    """Pass one model of each architecture round its clients, or average it; then compare the clients."""
    models = {client.group: state["own"][i] for i, client in enumerate(clients)}
    for orders in draws:
        sent = []
        for i, client in enumerate(clients):
            w, _ = descend(models[client.group], plain_loss(client), orders[i], options)
            if options.pretraining == "sequential":
                models[client.group] = w
            sent.append((client.group, held_out(client, options), w))
        if options.pretraining == "fedavg":
            models = average(models, sent)

    closeness = np.zeros_like(state["closeness"])
    for g, w in models.items():
        members = [i for i, client in enumerate(clients) if client.group == g]
        seen = {i: nets.norm_inputs(clients[i].net, w, clients[i].x) for i in members}
        for i in members:
            near = {j: 1 / max(distance(seen[i], seen[j], options), 1e-8) for j in members if j != i}
            for j in near:
                closeness[i, j] = near[j] / sum(near.values())
    return {"own": {i: models[client.group] for i, client in enumerate(clients)}, "closeness": closeness}


def distance(one, other, options):
    """Return d_ij, from the norms' inputs on two clients' rows."""
    layers = list(zip(one, other, strict=True))[-1 if options.layers == "last" else 0 :]
    return sum(np.linalg.norm(np.concatenate(moments(a)) - np.concatenate(moments(b))) for a, b in layers)


def moments(inputs):
    """Return mean and standard deviation of each channel."""
    of_channels = inputs.reshape(-1, inputs.shape[-1])
    return of_channels.mean(0), of_channels.std(0)


def mixture(state, options):
    """Return the weights of all models in the mixtures from which clients start."""
    rows = (1 - options.mu) * state["closeness"] + options.mu * np.eye(len(state["own"]))
    return rows / rows.sum(1, keepdims=True)


def mixed(state, clients, i, options):
    """Return the model from which client i starts."""
    members = [j for j, client in enumerate(clients) if client.group == clients[i].group]
    own, row = state["own"][i], mixture(state, options)[i]
    return {
        name: w if stays(name) else sum(row[j] * state["own"][j][name] for j in members)
        for name, w in own.items()
    }


def step(state, clients, cohort, options):
    """w_i <- SGD(sum_j W_ij w_j) on the rows that are not held out."""
    own, losses = dict(state["own"]), {}
    for i, draw in cohort.draws.items():
        first = held_out(clients[i], options)
        orders = [order + first for order in draw["train"]]
        begun = mixed(state, clients, i, options)
        own[i], losses[i] = descend(begun, plain_loss(clients[i]), orders, options)
    state = {"own": own, "closeness": state["closeness"]}
    return state | {"mixture": mixture(state, options)}, losses


def scores(state, clients, draws, options, x):
    """Score the mixture as received, the own model as deployed."""
    newest = [mixed(state, clients, i, options) for i in range(len(clients))]
    return {
        "received": [nets.logits(client.net, newest[i], x) for i, client in enumerate(clients)],
        "deployed": [nets.logits(client.net, state["own"][i], x) for i, client in enumerate(clients)],
    }


def view(state, federation, t):
    """Return own models, the matrix, and the weights that users see."""
    matrices = recording.matrices("fedap")(state)
    return (
        recording.own_models(state, federation, t)
        | {"closeness": recording.of_pairs(state.closeness)}
        | matrices
    )


# ---- what another method computes


def with_all_weight_on_the_own_model_it_is_local():
    fedap, _ = run("fedap", alike(), cohorts=ALWAYS, mu=1.0, held_out=0.0, **TRAINING)[-1]
    local, _ = run("local", alike(), cohorts=ALWAYS, **TRAINING)[-1]
    assert_same(fedap.weights, local.kept, tolerance=1e-6)


def every_visit_and_the_moments_are_counted_as_sent():
    """After three passes each client sends mean and deviation of the norms' inputs, and gets the result."""
    up, down, _ = billed("fedap", normalised(), part="prepare", passes=3, **TRAINING)
    size, moments = normalised().models[0].size + 10, 10
    assert_same(up, ({moments: np.full(5, 1, np.int32), size: np.full(5, 3, np.int32)},))
    assert_same(down, ({size: np.full(5, 4, np.int32)},))


def newcomers_have_no_weight_in_mixtures():
    """Their weight is 0 in others' mixtures; in their own mixtures all others have equal weights."""
    clients = len(SIZES)
    joining = set_apart(alike(), [np.arange(clients) == 1])
    (closeness,) = initial("fedap", joining, **TRAINING).closeness
    expected = np.array([[i != j and j != 1 for j in range(clients)] for i in range(clients)], np.float32)
    assert_same(closeness, expected / expected.sum(1, keepdims=True), tolerance=1e-6)


fedap = Case(
    "fedap",
    start,
    step,
    scores,
    draws=draws,
    prepare=prepare,
    draws_of_preparation=draws_of_preparation,
    view=view,
    traffic=lambda model, models, t: model.size,  # these models have no norms
    all_clients=True,
    short={"passes": 1},
    comparisons={
        "": Comparison({"mu": 0.4}, [("mu", 0.41), ("pretraining", "fedavg")]),
        "last norm, after fedavg": Comparison(
            {"pretraining": "fedavg", "layers": "last", "passes": 1},
            [("pretraining", "sequential"), ("layers", "all")],
            ((tiny_cnn("mcmahan", (3, 2), (4, 2)), 3), (SMALL, 2)),
        ),
        "local statistics": local_statistics(),
    },
    reductions=(
        with_all_weight_on_the_own_model_it_is_local,
        every_visit_and_the_moments_are_counted_as_sent,
        newcomers_have_no_weight_in_mixtures,
    ),
)
