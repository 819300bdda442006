"""Hermes (Li et al. 2021, doi:10.1145/3447993.3483278): own masks, means over clients that hold an entry."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, SHAPE, SIZES, assert_same, cohort, tiny_partition, tiny_source, validating
from reference import nets
from reference.training import descend, plain_loss

from jaxfl.algorithms.shared_entries import hermes_pruning as pruning
from jaxfl.algorithms.shared_entries.hermes import summary
from jaxfl.data.federate import federate
from jaxfl.models import zoo
from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import network, plain_cnn
from jaxfl.models.conv import spatial_mean
from jaxfl.models.model import Block
from jaxfl.models.zoo.densenet import DenseLayer
from jaxfl.models.zoo.mobilenet import InvertedResidual
from methods import recording
from methods.cases import CONVOLVING, SMALL, Case, Comparison, local_statistics
from methods.rounds import COHORTS, TRAINING, alike, mlp, run


def start(clients, initial, options):
    """Start every client with all of the initial model; nothing has been averaged."""
    return {
        "own": {i: initial[client.group] for i, client in enumerate(clients)},
        "held": {
            i: {name: np.ones(w.shape, bool) for name, w in initial[client.group].items()}
            for i, client in enumerate(clients)
        },
        "there": dict.fromkeys(range(len(clients)), 0),
        "mean": dict(enumerate(initial)),
        "made": {
            g: {name: np.full(w.shape, -1) for name, w in of_g.items()} for g, of_g in enumerate(initial)
        },
        "initial": {i: initial[client.group] for i, client in enumerate(clients)} if options.rewind else {},
        "rounds": 0,
    }


def begun(state, clients, i):
    """Return the own model, with the means of its entries since client i last took part."""
    g, held, there = clients[i].group, state["held"][i], state["there"][i]
    return {
        name: np.where(held[name] & (state["made"][g][name] >= there), state["mean"][g][name], w)
        for name, w in state["own"][i].items()
    }


def step(state, clients, cohort, options):
    """Receive, prune, train; average what two or more of the cohort hold."""
    own, held, losses, now = dict(state["own"]), dict(state["held"]), {}, state["rounds"] + 1
    for i, draw in cohort.draws.items():
        client, w = clients[i], begun(state, clients, i)
        held[i] = pruned(client, state["held"][i], w, options)
        if options.rewind and count(held[i]) < count(state["held"][i]):
            w = state["initial"][i]
        w = {name: value * held[i][name] for name, value in w.items()}
        own[i], losses[i] = descend(w, masked(plain_loss(client), held[i]), draw["train"], options)
    there = state["there"] | dict.fromkeys(cohort.draws, now)
    mean = {g: dict(of_g) for g, of_g in state["mean"].items()}
    made = {g: dict(of_g) for g, of_g in state["made"].items()}
    for g in mean:
        members = [i for i in cohort.draws if clients[i].group == g]
        for name in mean[g]:
            if not members or (nets.is_statistic(name) and options.bn_stats == "local"):
                continue
            holders = sum(held[i][name].astype(int) for i in members)
            total = sum(own[i][name] for i in members)
            mean[g][name] = np.where(holders > 1, total / np.maximum(holders, 1), mean[g][name])
            made[g][name] = np.where(holders > 1, now, made[g][name])
    new = {"own": own, "held": held, "there": there, "mean": mean, "made": made, "rounds": now}
    return state | new, losses


def masked(loss, held):
    """Return the loss without gradients of pruned entries."""

    def of_rows(w, rows):
        value, gradients = loss(w, rows)
        free = {name: gradient * held[name] for name, gradient in gradients.items() if name in held}
        return value, gradients | free

    return of_rows


def count(held):
    """Return the number of parameters held."""
    return sum(mask.sum() for name, mask in held.items() if not nets.is_statistic(name))


def pruned(client, held, w, options):
    """Return a client's mask after it has checked its accuracy and its kept ratio."""
    layers = [f"{name}/kernel" for name in ("conv1/conv", "fc1/linear") if f"{name}/kernel" in w]
    good = nets.logits(client.net, w, client.x_validation).argmax(1) == client.y_validation
    size = sum(mask.size for name, mask in held.items() if not nets.is_statistic(name))
    missing = count(held) - options.target_ratio * size
    if good.mean() < options.threshold or missing <= 0:
        return held
    missing = min(missing / sum(held[layer].sum() for layer in layers), 1)
    if options.granularity == "channel":
        missing = 1 - np.sqrt(1 - missing)
    held = {name: mask.copy() for name, mask in held.items()}
    for layer in layers:
        goes = smallest_weights if options.granularity == "weight" else smallest_channels
        goes(held, layer, w[layer], min(options.prune, missing))
    if options.granularity == "channel":
        cut_off(held, layers)
    return held


def how_many(share, left):
    """Return how many of the remaining entries are pruned."""
    return min(int(np.round(share * left)), left - 1)


def smallest_weights(held, layer, w, share):
    """Prune the smallest weights of a kernel."""
    left = [place for place in np.ndindex(w.shape) if held[layer][place]]
    for place in sorted(left, key=lambda place: abs(w[place]))[: how_many(share, len(left))]:
        held[layer][place] = False


def smallest_channels(held, layer, w, share):
    """Prune the channels with the smallest kernels."""
    left = [c for c in range(w.shape[-1]) if held[layer][..., c].any()]
    for c in sorted(left, key=lambda c: np.abs(w[..., c]).sum())[: how_many(share, len(left))]:
        held[layer][..., c] = False


def cut_off(held, layers):
    """Prune what belongs to channels without a kernel: biases, norms and the next layer's inputs."""
    for layer, following in zip(layers, [*layers[1:], f"{nets.HEAD}/kernel"], strict=True):
        channels = held[layer].shape[-1]
        for c in range(channels):
            if not held[layer][..., c].any():
                for name in held:
                    if nets.block_of(name) == nets.block_of(layer):
                        held[name][..., c] = False
                outputs = held[following].shape[-1]
                held[following].reshape(-1, channels, outputs)[:, c] = False


def scores(state, clients, draws, options, x):
    """Score the model with which a client would start a round, received and deployed."""
    newest = [nets.logits(client.net, begun(state, clients, i), x) for i, client in enumerate(clients)]
    return {"received": newest, "deployed": newest}


# ---- what connects it with jaxfl


def view(state, federation, t):
    """Return models, masks, and the rounds in which clients took part and means were made."""
    own, server = recording.by_client(state.own, federation), recording.by_group(state.server)
    return {
        "own": {i: of_client.weights for i, of_client in own.items()},
        "held": {i: of_client.held for i, of_client in own.items()},
        "there": {i: of_client.since for i, of_client in own.items()},
        "mean": {g: of_group.mean for g, of_group in server.items()},
        "made": {g: of_group.since for g, of_group in server.items()},
        "initial": {i: of_client.initial for i, of_client in own.items()},
        "rounds": state.rounds,
    }


SHORT = {"threshold": 0.0, "prune": 0.4, "target_ratio": 0.05}


def traffic(model, models, t):
    """Count what the tiny models have left after one pruning (down) and two (up), and a bit per channel."""

    def scalars(units, channels):
        inputs = 16 * channels if channels else 64
        return channels * (9 + 1) + units * (inputs + 1) + CLASSES * (units + 1)

    convolves = model.name == "cnn"
    return scalars(2, convolves * 1) + 1, scalars(3, convolves * 2) + 1


# ---- what must hold


@functools.cache
def with_norms(sizes=SIZES):
    """Return the tiny clients with validation rows and BatchNorm."""
    source = tiny_source()
    partition = validating(tiny_partition(source, sizes))
    return federate(source, partition, ((mlp(norm="batch"), len(sizes)),))


EQUAL = (max(SIZES),) * len(SIZES)


def without_pruning_it_is_fedavg_of_equal_clients():
    hermes = run("hermes", with_norms(EQUAL), target_ratio=1.0, **TRAINING)
    fedavg = run("fedavg", with_norms(EQUAL), **TRAINING)
    for (state, info), (expected, report) in zip(hermes, fedavg, strict=True):
        assert_same(state.server[0].mean, expected.shared[0], tolerance=1e-5)
        assert_same(info.loss, report.loss, tolerance=1e-5)
        assert info.findings["kept"]["least"] == 1


def masks_only_shrink_and_pruned_entries_are_0():
    rounds = run("hermes", with_norms(EQUAL), COHORTS * 3, target_ratio=0.1, threshold=0.2, **TRAINING)
    states = [jax.device_get(state.own[0]) for state, _ in rounds]
    for own in states:
        for held, w in zip(jax.tree.leaves(own.held), jax.tree.leaves(own.weights), strict=True):
            assert not w[~held].any()
    for before, after in itertools.pairwise(states):
        shrinks = jax.tree.map(lambda old, new: (new <= old).all(), before.held, after.held)
        assert all(jax.tree.leaves(shrinks))
    units = states[-1].held.params["fc1"]["linear"]["kernel"].any(1)
    assert units.any(1).all() and not units.all()
    assert rounds[-1][1].findings["kept"]["mean"] < 0.5


@pytest.mark.long
def entries_pruned_with_channels_had_no_effect():
    """The network joins channels by sums, concatenation, gates and depthwise convolutions."""
    body = [
        Block("stem", ConvBlock(6, 3, 1)),
        Block("inverted", InvertedResidual(6, 8, squeezed=3)),
        Block("dense", DenseLayer(4, spatial_mean)),
    ]
    model = network("joins", body, shape=SHAPE, classes=CLASSES)
    x = jax.random.normal(jax.random.key(2), (4, *SHAPE))

    @jax.jit
    def compared(w):
        w = jax.tree.map(lambda leaf: leaf + 0.1, w)  # so that shifts of norms are not 0
        held = pruning.pruned(model, pruning.whole(w), w, jnp.float32(0.4), "channel")
        inputs = jax.tree.map(with_all_inputs, held)
        both = jax.tree.map(lambda *leaves: jnp.stack(leaves), pruning.only(held, w), pruning.only(inputs, w))
        logits = jax.lax.map(lambda w: model.apply(w.params, w.stats, x, train=False)[0], both)
        return logits, pruning.scalars(held) / pruning.scalars(inputs)

    def with_all_inputs(mask):
        return jnp.broadcast_to(mask.any(range(mask.ndim - 1)), mask.shape)

    (actual, expected), ratio = compared(model.init(jax.random.key(0)))
    assert_same(actual, expected, tolerance=1e-5)
    assert ratio < 0.8


def all_places_of_a_kernel_go_with_its_channels():
    """Also those that meet nothing but padding, on maps that are smaller than the kernel."""
    body = [ConvBlock(8, 5, 2), ConvBlock(12, 5, 2, 2)]
    model = plain_cnn("padded", body, [DenseBlock(4)], shape=(2, 2, 1), classes=CLASSES)

    @jax.jit
    def pruned(key):
        w = model.init(key)
        return pruning.pruned(model, pruning.whole(w), w, jnp.float32(0.25), "channel").params

    held = jax.device_get(pruned(jax.random.key(0)))
    inputs, outputs = (np.asarray(held[name]["conv"]["bias"]) for name in ("conv1", "conv2"))
    assert (inputs.sum(), outputs.sum()) == (6, 9)
    expected = inputs[:, None] & outputs
    np.testing.assert_array_equal(held["conv2"]["conv"]["kernel"], np.broadcast_to(expected, (5, 5, 8, 12)))


def biases_and_positions_of_attention_are_not_pruned():
    model = zoo.vit(shape=SHAPE, classes=CLASSES, depth=1)
    names = pruning.kernels(model, jax.eval_shape(model.init, jax.random.key(0)), "weight")
    assert names and {name.rsplit("/")[-1] for name in names} == {"kernel"}


def reported_ratios_are_of_present_clients():
    kept, present = (np.array([0.5, 0.7, 0.0]),), cohort(alike(), (0, 1), places=[3])
    expected = {"mean": np.float32(0.6), "least": np.float32(0.5)}
    assert_same(summary(kept, present), expected, tolerance=1e-6)


hermes = Case(
    "hermes",
    start,
    step,
    scores,
    view=view,
    traffic=traffic,
    short=SHORT,
    comparisons={
        "": Comparison(
            {"prune": 0.3, "target_ratio": 0.4, "threshold": 0.3},
            [("prune", 0.5), ("target_ratio", 0.6), ("threshold", 0.7), ("granularity", "weight")],
            ((CONVOLVING, 3), (SMALL, 2)),
        ),
        "weights, rewound, local statistics": local_statistics(
            ("rewind", False),
            ("prune", 0.4),
            granularity="weight",
            rewind=True,
            prune=0.3,
            target_ratio=0.3,
            threshold=0.3,
        ),
    },
    reductions=(
        without_pruning_it_is_fedavg_of_equal_clients,
        masks_only_shrink_and_pruned_entries_are_0,
        entries_pruned_with_channels_had_no_effect,
        all_places_of_a_kernel_go_with_its_channels,
        biases_and_positions_of_attention_are_not_pruned,
        reported_ratios_are_of_present_clients,
    ),
)
