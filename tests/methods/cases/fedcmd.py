"""FedCMD (Chen et al. 2024, IEEE Transactions on Computers, Algorithms 1-3, eqs. 5-8).

In the first `selection_rounds` rounds clients vote for the layer l* with the least feature transfer
(eq. 6); then l* is personal. Every architecture votes separately. The options of the authors' code are
included.
"""

import jax
import numpy as np
import pytest
from conftest import CLASSES, SHAPE, SIZES, assert_same, differ, tiny_cnn, tiny_models
from reference import nets
from reference.nets import block_of
from reference.own_models import cosine, sent
from reference.training import average, descend, plain_loss, softmax

from jaxfl.algorithms.mixing.fedcmd_score import candidates
from jaxfl.core import tree
from jaxfl.models import zoo
from methods.cases import NORMALISED, Case, Comparison, local_statistics
from methods.recording import by_client, by_group, of_pairs
from methods.rounds import (
    ALWAYS,
    EVERYONE,
    TRAINING,
    alike,
    billed,
    equal,
    federated,
    initial,
    normalised,
    one_round,
    run,
)


def start(clients, initial, options):
    """Start every client with the initial model and no votes."""
    blocks = {client.group: list(nets.BLOCKS[client.net]) for client in clients}
    layers = {g: candidate_layers(of_net, options) for g, of_net in blocks.items()}
    return {
        "shared": {g: sent(weights, options) for g, weights in enumerate(initial)},
        "own": {i: initial[client.group] for i, client in enumerate(clients)},
        "won": {g: dict.fromkeys(names, 0) for g, names in layers.items()},
        "scores": {g: dict.fromkeys(names, 0.0) for g, names in layers.items()},
        "personal": {i: dict.fromkeys(blocks[client.group], False) for i, client in enumerate(clients)},
    }


def step(state, clients, cohort, options):
    """Assemble, train and vote, average; elect in the first phase."""
    own, phase_one = dict(state["own"]), cohort.t < options.selection_rounds
    fedavg = options.selection == "fedavg"
    plain = phase_one and fedavg
    last, begun, trained, answers, losses, seen = state["shared"], {}, {}, [], {}, {}
    for i in sorted(cohort.draws):
        client = clients[i]
        begun[i] = assembled(state | {"shared": last}, clients, list(cohort.draws), options)[i]
        trained[i], losses[i], seen[i] = train_and_vote(client, begun[i], cohort.draws[i]["train"], options)
        answers.append((client.group, client.size, trained[i]))
        if options.base == "last" and not plain:
            last = last | {client.group: sent(trained[i], options)}
    own |= trained

    if options.base == "participants" or plain:
        shared = average(state["shared"], answers)
    elif options.base == "stored":
        shared = average(state["shared"], [(client.group, 1, own[i]) for i, client in enumerate(clients)])
    else:
        shared = last

    won, scores, personal = {}, {}, {}
    for g in state["shared"]:
        present = [i for i in cohort.draws if clients[i].group == g and seen[i]]
        won[g] = dict(state["won"][g])
        scores[g] = state["scores"][g]
        if present and phase_one:
            means = [np.mean(seen[i], axis=0) for i in present]
            scores[g] = dict(zip(scores[g], np.mean(means, axis=0), strict=True))
            won[g][majority([seen[i] for i in present], list(won[g]), options)] += 1
        ends = cohort.t + 1 >= options.selection_rounds
        for i in (i for i, client in enumerate(clients) if client.group == g):
            layers = elected(won[g], i, options) if ends or not fedavg else []
            personal[i] = {block: block in layers for block in state["personal"][i]}
    if fedavg and cohort.t + 1 == options.selection_rounds:
        own = {i: own[i] | shared[client.group] for i, client in enumerate(clients)}
    new = {"shared": shared, "own": own, "won": won, "scores": scores, "personal": personal}
    if remembers(options):
        new["phi"] = met(state, clients, begun, trained, options)
    return new, losses


# ---- the first phase


def train_and_vote(client, weights, orders, options):
    """Return the trained weights, the mean loss, and the scores of whatever has a vote, a list of lists."""
    plain, seen = plain_loss(client), []

    def loss(weights, rows):
        seen.append(transfers(client.net, weights, client.x[rows], client.y[rows], options, train=True))
        return plain(weights, rows)

    trained, value = descend(weights, loss, orders, options)
    if options.vote_on == "rows":
        seen = [transfers(client.net, trained, client.x, client.y, options, train=False)]
    return trained, value, seen


def transfers(net, weights, x, y, options, train):
    """Return eq. 6 for every layer that can be voted for, in their order."""
    outputs = nets.outputs(net, weights, x, train)
    names, tensors = list(outputs), [x, *outputs.values()]  # o_0 is the input

    def distance(a, b):
        (mu_a, sd_a), (mu_b, sd_b) = fitted(a, options), fitted(b, options)
        return abs(mu_a - mu_b) if options.distance == "mean" else np.hypot(mu_a - mu_b, sd_a - sd_b)

    found = []
    for before, now, name in zip(tensors[:-1], tensors[1:], names, strict=True):
        if name not in candidate_layers(names, options):
            continue
        if options.score == "signed":
            part_a = distance(now, y) - distance(now, x)
            part_b = distance(before, y) - distance(before, x)
            found.append(abs(part_a - part_b))
        else:
            towards_label = abs(distance(now, y) - distance(before, y))
            found.append(abs(towards_label - abs(distance(now, x) - distance(before, x))))
    return found


def fitted(tensor, options):
    """Return mean and standard deviation, perhaps after scaling to [0, 1]: 0 and 0 if all are the same."""
    if options.score_scale == "none":
        return tensor.mean(), tensor.std()
    if np.ptp(tensor) == 0:
        return 0.0, 0.0
    scaled = (tensor - tensor.min()) / np.ptp(tensor)
    return scaled.mean(), scaled.std()


def majority(seen, names, options):
    """Return a round's layer: by majority of the clients' majorities, or of all mini-batches."""
    votes = [[names[np.argmin(scores)] for scores in of_client] for of_client in seen]
    if options.vote_on == "pooled":
        return most_frequent(sum(votes, []), names)
    return most_frequent([most_frequent(of_client, names) for of_client in votes], names)


def most_frequent(votes, names):
    """Return the first of the names with most votes."""
    return max(names, key=votes.count)


def elected(won, i, options):
    """Return client i's personal layers: fixed ones, alternatives in turn, or the winner of most rounds."""
    if options.personal == "vote":
        return [max(won, key=won.get)]
    alternatives = options.personal.split("/")
    return alternatives[i % len(alternatives)].split("+")


# ---- the second phase


def assembled(state, clients, present, options):
    """Return eq. 7, the models from which present clients start, {client: weights}."""
    begun = {}
    for i in present:
        g = clients[i].group
        layers, order = personal_layers(state, i), list(state["personal"][i])
        first = min(map(order.index, layers), default=len(order))
        pool = range(len(clients)) if options.tail == "softmax" else present
        peers = [j for j in pool if clients[j].group == g]
        weights = tail_weights(state, i, peers, layers, options)
        begun[i] = dict(state["own"][i])
        for name, newest in state["shared"][g].items():
            if block_of(name) in layers:
                begun[i][name] = state["own"][i][name]
            elif options.base != "last" and order.index(block_of(name)) > first:
                begun[i][name] = sum(c * state["own"][j][name] for c, j in zip(weights, peers, strict=True))
            else:
                begun[i][name] = newest
    return begun


def tail_weights(state, i, peers, layers, options):
    """Return Phi of eq. 8, normalised; or the authors' weights, from stored Phi of pairs that have met."""
    if options.tail == "uniform":
        return np.full(len(peers), 1 / len(peers))
    if remembers(options):
        known = state.get("phi", np.zeros((len(state["own"]), len(state["own"]))))
        phi = known[i, peers]
    else:
        phi = np.array([similarity(state["own"][i], state["own"][j], layers, options) for j in peers])
    phi[list(peers).index(i)] = 1
    return softmax(phi) if options.tail == "softmax" else phi / phi.sum()


def remembers(options):
    """Return whether Phi is kept from round to round."""
    return options.base != "last" and (options.tail == "softmax" or options.similarity == "updates")


def met(state, clients, begun, trained, options):
    """Return Phi (N, N), with new entries for clients of an architecture that took part together."""
    phi = state.get("phi", np.zeros((len(clients), len(clients)))).copy()
    vectors = trained
    if options.similarity == "updates":
        vectors = {i: {name: w[name] - begun[i][name] for name in w} for i, w in trained.items()}
    for i in vectors:
        for j in vectors:
            if clients[i].group == clients[j].group:
                phi[i, j] = similarity(vectors[i], vectors[j], personal_layers(state, i), options)
    return phi


def similarity(one, other, layers, options):
    """Return eq. 8, not below 0: cosine of the personal layers, or mean cosine of their output units."""
    names = [name for name in one if block_of(name) in layers and not nets.is_statistic(name)]
    if not names:
        return 0.0
    if options.similarity == "updates":
        kernels = [name for name in names if name.endswith("kernel")]
        return max(0.0, np.mean([mean_cosine(one[name], other[name]) for name in kernels]))
    flat = [np.concatenate([w[name].ravel() for name in names]) for w in (one, other)]
    return max(0.0, cosine(*flat))


def mean_cosine(kernel, other):
    """Return the mean cosine over units of kernels (..., units)."""
    of_units = zip(*(k.reshape(-1, k.shape[-1]).T for k in (kernel, other)), strict=True)
    return np.mean([cosine(a, b) for a, b in of_units])


def scores(state, clients, draws, options, x):
    """Score the model assembled among all clients as received, the trained own model as deployed."""
    newest = assembled(state, clients, list(range(len(clients))), options)
    return {
        "received": [nets.logits(c.net, newest[i], x) for i, c in enumerate(clients)],
        "deployed": [nets.logits(c.net, state["own"][i], x) for i, c in enumerate(clients)],
    }


# ---- names


def personal_layers(state, i):
    """Return client i's personal blocks."""
    return [block for block, is_personal in state["personal"][i].items() if is_personal]


def candidate_layers(blocks, options):
    """Return the blocks that can be voted for."""
    return [block for block in blocks if options.candidates == "all" or not block.startswith("conv")]


# ---- what connects it with jaxfl


def view(state, federation, t):
    """Return models, votes and scores by layer, personal blocks, and Phi of clients that have met."""
    layers = [candidates(model, state.hyper.candidates) for model in federation.models]
    won, found = (by_name(layers, of_groups) for of_groups in (state.won, state.scores))
    shared = state.shared
    if state.hyper.bn_stats == "local":  # the average of what stays on clients is never read
        shared = tuple(w._replace(stats={}) for w in shared)
    view = {
        "shared": by_group(shared),
        "own": by_client(state.weights, federation),
        "won": won,
        "scores": found,
        "personal": personal_of_clients(state, federation),
    }
    return view if state.phi[0] is None else view | {"phi": of_pairs(state.phi)}


def personal_of_clients(state, federation):
    """Return {client: {block: whether it is personal}}; in jaxfl a group may have one row."""
    of_groups = [
        np.broadcast_to(personal, (len(group.id), len(group.model.names)))
        for group, personal in zip(federation.groups, state.personal_layers, strict=True)
    ]
    names = [group.model.names for group in federation.groups for _ in group.id]
    rows = by_client(of_groups, federation)
    return {i: dict(zip(of_client, rows[i], strict=True)) for i, of_client in enumerate(names)}


def by_name(names, arrays):
    """Turn names and an array of as many entries, per group, into {group: {name: entry}}."""
    pairs = zip(names, arrays, strict=True)
    return {group: dict(zip(of_group, array, strict=True)) for group, (of_group, array) in enumerate(pairs)}


def two_cnns():
    """Return two architectures with layers before and between two that are personal."""
    return tuple(
        (tiny_cnn("mcmahan", (2, 2), (channels, 2)), clients) for channels, clients in ((3, 3), (4, 2))
    )


# ---- what another method computes


def layers(name, of_groups):
    """Return one layer of each architecture."""
    return [weights.params[name] for weights in of_groups]


def with_a_personal_classifier_it_is_fedper():
    fixed = {"personal": "classifier", "selection_rounds": 0}
    for (fedcmd, report), (fedper, expected) in zip(
        run("fedcmd", alike(), **fixed, **TRAINING), run("fedper", alike(), **TRAINING), strict=True
    ):
        assert_same(layers("fc1", fedcmd.shared), layers("fc1", fedper.shared), tolerance=1e-6)
        assert_same(layers("classifier", fedcmd.weights), layers("classifier", fedper.kept), tolerance=1e-6)
        assert_same((report.loss, report.down), (expected.loss, expected.down), tolerance=1e-6)


def rounds_with_votes_are_those_of_fedavg():
    *voting, _ = run("fedcmd", alike(), selection_rounds=2, **TRAINING)
    for (fedcmd, report), (fedavg, expected) in zip(voting, run("fedavg", alike(), **TRAINING), strict=False):
        assert_same(fedcmd.shared, fedavg.shared, tolerance=1e-6)
        assert_same(report.loss, expected.loss, tolerance=1e-6)
    (of_clients,), (globally,) = fedcmd.weights, fedcmd.shared
    assert_same(of_clients, tree.repeat(globally, len(SIZES)))


def all_start_from_the_global_model_even_if_the_last_vote_is_lost():
    """A round whose answers are all lost does not run: here the second of two with votes."""
    options = TRAINING | {"selection_rounds": 2}
    voted, _ = one_round("fedcmd", initial("fedcmd", alike(), **options), alike(), 0, EVERYONE, **options)
    assert not any(layers.any() for layers in voted.personal_layers)
    begun, _ = one_round("fedcmd", voted, alike(), 2, (0, 3), **options)
    assert all(layers.any() for layers in begun.personal_layers)
    for own, shared in zip(begun.weights, begun.shared, strict=True):
        assert_same(own, tree.repeat(shared, len(jax.tree.leaves(own)[0])))
    assert_same(begun.won, voted.won)
    later, _ = one_round("fedcmd", begun, alike(), 3, (0, 3), **options)
    assert differ(later.weights, begun.weights)


def clients_without_a_mini_batch_do_not_vote():
    """BatchNorm leaves a batch of one row out, and client 3 has only one row."""
    alone, with_another, without = (
        run("fedcmd", normalised(), cohorts=[present], selection_rounds=2, vote_on="batches", **TRAINING)[0][
            0
        ]
        for present in ([3], [3, 4], [4])
    )
    assert alone.won[0].tolist() == [0, 0] and with_another.won[0].sum() == 1
    assert_same((with_another.won, with_another.scores), (without.won, without.scores))


@pytest.mark.long
def networks_that_resize_images_can_be_compared():
    """The block that resizes has no parameters, so nothing of it is sent."""
    resizing = federated((zoo.lenet5(shape=SHAPE, classes=CLASSES, width=0.1), len(SIZES)))
    (model,), options = resizing.models, {"personal": "fc2", "selection_rounds": 0}
    assert model.names[0] == "input"
    whole, personal = tree.scalars(model.form), tree.scalars(model.form.params["fc2"])
    for similarity in ("parameters", "updates"):
        up, down, _ = billed("fedcmd", resizing, similarity=similarity, **options)
        assert up[0].tolist() == [whole] * len(SIZES)
        assert down[0].tolist() == [whole - personal] * len(SIZES)


def with_a_personal_first_layer_and_equal_weights_it_is_lg_fedavg():
    """FedCMD mixes in the next round, LG-FedAvg at once: these are the same if all take part."""
    fixed = {"personal": "fc1", "selection_rounds": 0, "tail": "uniform"}
    for (fedcmd, report), (lg_fedavg, expected) in zip(
        run("fedcmd", equal(), cohorts=ALWAYS, **fixed, **TRAINING),
        run("lg-fedavg", equal(), cohorts=ALWAYS, **TRAINING),
        strict=True,
    ):
        assert_same(layers("fc1", fedcmd.weights), layers("fc1", lg_fedavg.kept), tolerance=1e-5)
        assert_same(report.loss, expected.loss, tolerance=1e-5)


SHORT = {"selection_rounds": 2}

fedcmd = Case(
    "fedcmd",
    start,
    step,
    scores,
    view=view,
    traffic=lambda model, models, t: (model.size + (t < SHORT["selection_rounds"]), model.size),
    all_clients=True,
    short=SHORT,
    comparisons={
        "": Comparison(
            SHORT,
            [
                ("score_scale", "min-max"),
                ("vote_on", "batches"),
                ("score", "absolute"),
                ("distance", "mean"),
                ("selection_rounds", 1),
                ("selection", "personal"),
                ("tail", "uniform"),
                ("similarity", "updates"),
            ],
            tiny_models(),
        ),
        "two personal layers": Comparison(
            {
                "selection_rounds": 1,
                "personal": "conv2+classifier",
                "base": "stored",
                "score": "absolute",
                "score_scale": "min-max",
            },
            [("base", "participants"), ("score", "signed"), ("personal", "conv2"), ("score_scale", "none")],
            two_cnns(),
        ),
        "stored models": Comparison(
            {
                "selection_rounds": 2,
                "distance": "mean",
                "score_scale": "min-max",
                "vote_on": "pooled",
                "selection": "personal",
                "base": "stored",
                "tail": "softmax",
                "similarity": "updates",
            },
            [("vote_on", "batches"), ("tail", "cosine"), ("score_scale", "none")],
            tiny_models(),
            cohorts=7,
        ),
        "trained last": Comparison(
            {"selection_rounds": 2, "candidates": "all", "score_scale": "min-max", "base": "last"},
            [
                ("base", "participants"),
                ("base", "stored"),
                ("selection", "personal"),
                ("candidates", "dense"),
            ],
            two_cnns(),
        ),
        "trained last, clients that differ": local_statistics(
            ("base", "participants"),
            ("momentum", 0.51),
            selection_rounds=1,
            personal="fc1/classifier",
            selection="personal",
            base="last",
        ),
        "clients that differ": Comparison(
            {"selection_rounds": 1, "personal": "fc1/classifier"},
            [("personal", "classifier/fc1"), ("personal", "fc1")],
            ((NORMALISED, 5),),
        ),
        "clients that differ, stored models": Comparison(
            {
                "selection_rounds": 1,
                "personal": "fc1+classifier/fc1",
                "tail": "softmax",
                "similarity": "updates",
            },
            [("similarity", "parameters"), ("tail", "cosine")],
            ((NORMALISED, 5),),
        ),
        "BatchNorm": Comparison(SHORT, [("momentum", 0.51)], ((NORMALISED, 5),)),
        "local statistics": local_statistics(**SHORT),
    },
    reductions=(
        with_a_personal_classifier_it_is_fedper,
        rounds_with_votes_are_those_of_fedavg,
        all_start_from_the_global_model_even_if_the_last_vote_is_lost,
        clients_without_a_mini_batch_do_not_vote,
        networks_that_resize_images_can_be_compared,
        with_a_personal_first_layer_and_equal_weights_it_is_lg_fedavg,
    ),
)
