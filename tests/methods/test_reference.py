"""Every method against its plain-NumPy reference, round for round, in double precision.

The references know no keys. What jaxfl draws from a client's key in a round - orders of rows, which
expert to train - is recorded here by jaxfl's public functions and handed to them as arrays.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, PUBLIC, SHAPE, SIZES, tiny_models, tiny_partition, tiny_source
from reference import (
    compfl,
    ditto,
    draftfed,
    fedavg,
    fedavg_ft,
    fedbabu,
    fedcmd,
    fedper,
    fedrep,
    fedrod,
    lg_fedavg,
    local,
    mnfl,
    mnfl_homogeneous,
    nets,
    training,
)

from jaxfl.algorithms.experts.compfl import runnable, select
from jaxfl.algorithms.mixing.fedcmd_score import candidates
from jaxfl.core.client_map import everyone, per_group
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.core.protocol import Cohort
from jaxfl.core.training import batch_order, initial_weights
from jaxfl.data.federation import federate
from jaxfl.mechanisms.public_images import subset
from jaxfl.models import zoo
from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import plain_cnn
from jaxfl.registry import METHODS

pytestmark = pytest.mark.usefixtures("quick_compilation")

NETS = {"mlp": nets.mlp, "mcmahan": nets.cnn, "late": nets.late, "deep": nets.deep}
TRAINING = dict(epochs=2, batch_size=3, lr=0.05, momentum=0.5, weight_decay=1e-2)
ROUNDS, PARTICIPATION = 4, 0.6
COHORT_SEED = 7  # every client is absent at times, and one round has nobody of the second group


@pytest.fixture(autouse=True)
def double_precision():
    """Agreement to nine digits leaves no room for another formula."""
    with jax.enable_x64(True):
        yield


def three_experts():
    """Three architectures, not in the order of their sizes: the largest has two teachers."""
    (middle, _), (large, _) = tiny_models()
    return (middle, 2), (large, 2), (zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=3), 1)


def two_cnns():
    """Two architectures with layers before and between two that are personal."""
    (_, (cnn, _)), wider = (
        tiny_models(),
        zoo.mcmahan(shape=SHAPE, classes=CLASSES, width=0.09, padding="same"),
    )
    return (cnn, 3), (dataclasses.replace(wider, name="mcmahan"), 2)


def three_depths():
    """No, two and three convolutions; maps of one depth have several sizes, two clients' the same."""

    def convolving(name, *channels_and_pools):
        convs = [ConvBlock(channels, 5, 2, pool) for channels, pool in channels_and_pools]
        return plain_cnn(name, convs, [DenseBlock(6)], shape=SHAPE, classes=CLASSES)

    (mlp, _), (cnn, _) = tiny_models()
    late, deep = convolving("late", (3, 1), (3, 2)), convolving("deep", (4, 2), (5, 2), (3, 2))
    return (mlp, 1), (cnn, 2), (late, 1), (deep, 1)


# ---- what a client draws from its key in a round


def orders(key, size: int, epochs: int):
    """The order of a client's rows in each epoch of a local phase: (epochs, size)."""
    return padded_orders(key, jnp.int32(size), epochs)[:, :size]


@functools.partial(jax.jit, static_argnums=2)
def padded_orders(key, size, epochs: int):
    """The same for clients of any size as one program, with what pads the rows behind them."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(epochs, dtype=jnp.int32))
    return jax.vmap(lambda epoch: batch_order(epoch, size, max(*SIZES, PUBLIC)))(keys)


def phases(**epochs: str) -> Callable:
    """Orders for local phases 0, 1, ..., each given as name="the option with its epochs"."""

    def draw(key, client, models, options):
        return {
            name: orders(jax.random.fold_in(key, number), client.size, epochs_of(options, option))
            for number, (name, option) in enumerate(epochs.items())
        }

    return draw


def epochs_of(options, option):
    """An option that is a number of epochs: None is the number of all."""
    epochs = getattr(options, option)
    return options.epochs if epochs is None else epochs


def compfl_round(key, client, models, options):
    """An order for the head of every expert, the selection, and orders for the local epochs."""
    experts = len(runnable(models)[client.group])
    adapt, choose, train = jax.random.split(key, 3)
    return {
        "adapt": [orders(jax.random.fold_in(adapt, e), client.size, 1)[0] for e in range(experts)],
        "chosen": select(choose, options.eps, experts),
        "train": orders(train, client.size, options.epochs),
    }


def compfl_head(key, client, models, options):
    """An order for one head, adapted before use."""
    return {"adapt": orders(key, client.size, 1)[0]}


def draftfed_round(key, client, models, options):
    """Orders for the local epochs, and of the global set's images for those of draft learning."""
    alone, drafting = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
    images = min(options.global_size, PUBLIC)
    return {
        "train": orders(alone, client.size, options.epochs),
        "draft": orders(drafting, images, options.draft_epochs),
    }


def mnfl_round(key, client, models, options):
    """Orders for the local epochs, and of the round's public images for those of distillation."""
    alone, taught = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
    images = min(options.public_size, PUBLIC)
    return {
        "train": orders(alone, client.size, options.epochs),
        "distill": orders(taught, images, options.distill_epochs),
    }


# ---- jaxfl's state after round t, in the form of the references' states


def sharing(state, federation, t):
    """Shared leaves by group, kept leaves by client."""
    return {"shared": by_group(state.shared), "personal": by_client(state.kept, federation)}


def two_models(state, federation, t):
    """Ditto's global and personal models."""
    return {
        "shared": by_group(state.fedavg.shared),
        "personal": by_client(state.personal, federation),
    }


def experts(state, federation, t):
    """CompFL's experts, all heads, and the own experts that were trained in this very round."""
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


def layers(state, federation, t):
    """FedCMD's models, its votes and scores by dense layer, the personal blocks, Phi of who has met."""
    dense = [candidates(model) for model in federation.models]
    won, found = (by_name(dense, of_groups) for of_groups in (state.won, state.scores))
    view = {
        "shared": by_group(state.shared),
        "own": by_client(state.own, federation),
        "won": won,
        "scores": found,
        "personal": by_name([model.names for model in federation.models], state.personal),
    }
    return view if state.phi is None else view | {"phi": state.phi}


def by_name(names, arrays):
    """Names and an array of as many entries, per group -> {group: {name: entry}}."""
    pairs = zip(names, arrays, strict=True)
    return {group: dict(zip(of_group, array, strict=True)) for group, (of_group, array) in enumerate(pairs)}


def own_models(state, federation, t):
    """DraftFed's models."""
    return {"own": by_client(state.weights, federation)}


def teaching(state, federation, t):
    """MNFL's models and its matrix."""
    return own_models(state, federation, t) | {"matrix": state.matrix}


def by_group(trees):
    """A tree per group -> {group: tree}."""
    return dict(enumerate(trees))


def by_client(trees, federation):
    """A tree per group, with leaves (n_g, ...) -> {client: tree}."""
    return {
        int(i): at(tree, row)
        for group, tree in zip(federation.groups, trees, strict=True)
        for row, i in enumerate(np.asarray(group.id))
    }


def at(tree, position):
    """One entry of every leaf's first axis."""
    return jax.tree.map(lambda leaf: leaf[position], tree)


# ---- the methods


class Case(NamedTuple):
    """A method, its reference, and what connects them.

    Args:
      method: its name.
      reference: its module.
      draws: ``(key, client, models, options) -> what a client draws in a round``.
      draws_before_use: the same for predicting.
      view: ``(state, federation, t) -> state`` in the form of the reference's.
      images: ``(key of the run, key of the round, federation, options) -> rows``, a round's public images.
      models: of the federation.
      options: of the method, beside `TRAINING`.
    """

    method: str
    reference: ModuleType
    draws: Callable = phases(train="epochs")
    draws_before_use: Callable = phases()
    view: Callable = sharing
    images: Callable = lambda init_key, round_key, federation, options: federation.public[:0]
    models: tuple = tiny_models()
    options: dict = {}


def drawn_once(init_key, round_key, federation, options):
    """DraftFed's global set."""
    return subset(init_key, federation, options.global_size)


def drawn_anew(init_key, round_key, federation, options):
    """MNFL's public images of a round."""
    return subset(round_key, federation, options.public_size)


FEDCMD = Case("fedcmd", fedcmd, view=layers, options=dict(selection_rounds=2))
MNFL = Case(
    "mnfl",
    mnfl,
    mnfl_round,
    view=teaching,
    images=drawn_anew,
    options=dict(
        public_size=7,
        public_batch=3,
        distill_epochs=2,
        distill_lr=0.03,
        temperature=2.0,
        kl_weight=0.9,
        matrix_lr=0.4,
        lam=60.0,
        rho=0.2,
    ),
)
HOMOGENEOUS = Case(
    "mnfl-homogeneous", mnfl_homogeneous, view=teaching, options=dict(matrix_lr=0.4, lam=6000.0, rho=0.2)
)
COMPFL = Case("compfl", compfl, compfl_round, compfl_head, experts, models=three_experts())
CASES = {
    "local": Case("local", local),
    "fedavg": Case("fedavg", fedavg),
    "fedavg-ft": Case("fedavg-ft", fedavg_ft, draws_before_use=phases(tune="ft_epochs")),
    "lg-fedavg": Case("lg-fedavg", lg_fedavg),
    "fedper": Case("fedper", fedper),
    "fedrep": Case("fedrep", fedrep, phases(head="head_epochs", body="epochs")),
    "fedbabu": Case("fedbabu", fedbabu, draws_before_use=phases(tune="ft_epochs")),
    "ditto": Case(
        "ditto",
        ditto,
        phases(train="epochs", personal="personal_epochs"),
        view=two_models,
        options=dict(lam=0.7, personal_epochs=3),
    ),
    "fedrod": Case("fedrod", fedrod, options=dict(gamma=0.8)),
    "compfl": COMPFL._replace(options=dict(eps=0.6, warmup=0.5, lam=0.7, mu=0.8, tau=0.3, head_lr=0.2)),
    "compfl as printed": COMPFL._replace(
        options=dict(
            eps=0.6,
            warmup=0.25,
            head_init="keep",
            kd_direction="reverse",
            anchor_reduction="sum",
            accuracy_on="validation",
        )
    ),
    "fedcmd": FEDCMD,
    "fedcmd of two layers": FEDCMD._replace(
        models=two_cnns(),
        options=dict(selection_rounds=1, personal="conv2+classifier", base="stored", score="absolute"),
    ),
    "fedcmd of stored models": FEDCMD._replace(
        options=dict(
            selection_rounds=2,
            distance="mean",
            count="batches",
            selection="personal",
            base="stored",
            tail="softmax",
            similarity="updates",
        )
    ),
    "draftfed": Case(
        "draftfed",
        draftfed,
        draftfed_round,
        view=own_models,
        images=drawn_once,
        models=three_depths(),
        options=dict(global_size=7, draft_epochs=2, draft_batch=3, lam1=0.6, lam2=0.9, lam3=0.4),
    ),
    "mnfl": MNFL,
    "mnfl as its code": MNFL._replace(
        options=MNFL.options | dict(matrix_loss="mse", matrix_predictions="before", row_norm="softmax")
    ),
    "mnfl-homogeneous": HOMOGENEOUS,
    "mnfl-homogeneous by steps": HOMOGENEOUS._replace(
        options=HOMOGENEOUS.options
        | dict(transfer="prox", transfer_steps=3, transfer_lr=0.08, row_norm="clip")
    ),
}


# ---- the tests


@pytest.mark.parametrize("name", CASES)
def test_method_agrees_with_its_reference(name):
    run, setting = jaxfl_run(name)
    assert_same(run, reference_run(name, setting))


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("fedavg", "momentum", 0.51),
        ("fedper", "weight_decay", 0.011),
        ("ditto", "lam", 0.71),
        ("fedrod", "gamma", 0.81),
        ("compfl", "lam", 0.71),
        ("compfl", "mu", 0.81),
        ("compfl", "tau", 0.31),
        ("compfl", "head_lr", 0.21),
        ("compfl", "warmup", 0.51),
        ("compfl", "head_init", "proto"),
        ("compfl as printed", "kd_direction", "forward"),
        ("compfl as printed", "accuracy_on", "train"),
        ("fedcmd", "distance", "mean"),
        ("fedcmd", "selection_rounds", 1),
        ("fedcmd", "selection", "personal"),
        ("fedcmd", "tail", "uniform"),
        ("fedcmd", "similarity", "updates"),
        ("fedcmd of two layers", "base", "participants"),
        ("fedcmd of two layers", "score", "signed"),
        ("fedcmd of two layers", "personal", "conv2"),
        ("fedcmd of stored models", "count", "clients"),
        ("fedcmd of stored models", "tail", "cosine"),
        ("draftfed", "lam1", 0.61),
        ("draftfed", "lam2", 0.91),
        ("draftfed", "lam3", 0.41),
        ("draftfed", "draft_batch", 4),
        ("mnfl", "matrix_predictions", "before"),
        ("mnfl", "row_norm", "clip"),
        ("mnfl as its code", "matrix_loss", "kl"),
        ("mnfl-homogeneous", "row_norm", "clip"),
        ("mnfl-homogeneous by steps", "transfer_steps", 2),
        ("mnfl-homogeneous by steps", "rho", 0.21),
    ],
)
def test_reference_with_another_option_disagrees(name, option, value):
    run, setting = jaxfl_run(name)
    other = dataclasses.replace(setting.options, **{option: value})
    with pytest.raises(AssertionError):
        assert_same(run, reference_run(name, setting._replace(options=other)))


def assert_same(actual, expected):
    actual, expected = leaves(actual), leaves(expected)
    assert actual.keys() == expected.keys()
    for path, value in actual.items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-9, atol=1e-9, err_msg=path)


def leaves(tree):
    """{path: NumPy array}, the same for weights of jaxfl and of a reference: "fc1/linear/kernel"."""

    def name(path):
        return jax.tree_util.keystr(path, simple=True, separator="/").replace("params/", "")

    return {name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


# ---- both sides of the comparison


class Setting(NamedTuple):
    """What a reference is given; the docstring of the package `reference` explains each."""

    clients: list
    initial: list
    cohorts: list
    draws_before_use: dict
    options: object
    x: np.ndarray


@functools.cache
def jaxfl_run(name):
    """All states, losses and final logits of a method, and the setting that gave them."""
    case, method = CASES[name], METHODS[CASES[name].method]
    source = tiny_source()
    partition = varied(tiny_partition(source))
    federation = federate(source, partition, case.models)
    # Clients number their classes anew; the references mix predictions whatever they mean.
    federation = dataclasses.replace(federation, unified=True)
    slots = draw_cohorts([n for _, n in case.models], PARTICIPATION, ROUNDS, COHORT_SEED)
    options = method.config(**TRAINING, **case.options)
    init_key, round_key, use_key = jax.random.split(jax.random.key(0), 3)
    clients = reference_clients(source, partition, case.models)

    def recorded(draws, key, ids):
        def of_client(i):
            client_key = jax.random.fold_in(key, i)
            return jax.device_get(draws(client_key, clients[i], federation.models, options))

        return {i: of_client(i) for i in ids}

    places = [present(federation, slots, t) for t in range(ROUNDS)]
    round_keys = [jax.random.fold_in(round_key, t) for t in range(ROUNDS)]
    images = normalised(source)

    def of_round(t):
        seen = images[case.images(init_key, round_keys[t], federation, options)]
        return training.Cohort(t, ROUNDS, recorded(case.draws, round_keys[t], places[t]), seen)

    setting = Setting(
        clients=clients,
        initial=[leaves(weights) for weights in initial_weights(init_key, federation)],
        cohorts=[of_round(t) for t in range(ROUNDS)],
        draws_before_use=recorded(case.draws_before_use, use_key, range(len(clients))),
        options=options,
        x=images[~source.train],
    )

    algorithm = method.build(options)
    state = algorithm.init(init_key, federation, jax.tree.map(jnp.asarray, options))
    program = jax.jit(functools.partial(whole_run, algorithm))
    cohorts = Cohort(np.arange(ROUNDS, dtype=np.int32), slots, ROUNDS)
    outputs = program(round_key, use_key, state, federation, cohorts, setting.x)
    states, losses, scores = jax.device_get(outputs)
    return {
        "state": [case.view(at(states, t), federation, t) for t in range(ROUNDS)],
        "loss": [
            {i: losses[group][t, place] for i, (group, place) in places[t].items()} for t in range(ROUNDS)
        ],
        "scores": {name: list(np.concatenate(of_groups)) for name, of_groups in scores.items()},
    }, setting


def whole_run(algorithm, round_key, use_key, state, federation, cohorts, x):
    """States and losses of all rounds, and per group all clients' logits of x after the last one."""

    def one(state, cohort):
        key = jax.random.fold_in(round_key, cohort.round)
        state, info = algorithm.step(key, state, federation, cohort)
        return state, (state, info.loss)

    def logits(predict):
        def of_group(group, p):
            return jax.lax.map(lambda one: p.predict(group.model, p.shared, one[1], x), (group.id, p.stacked))

        return per_group(of_group, federation.groups, predict(use_key, state, federation, last))

    state, (states, losses) = jax.lax.scan(one, state, cohorts)
    last = everyone(federation, at(cohorts, -1))
    scores = {"received": logits(algorithm.receive), "deployed": logits(algorithm.personal)}
    return states, losses, scores


def reference_run(name, setting):
    """The same from a method's reference."""
    reference = CASES[name].reference
    clients, options = setting.clients, setting.options
    state = reference.start(clients, setting.initial)
    states, losses = [], []
    for cohort in setting.cohorts:
        state, loss = reference.step(state, clients, cohort, options)
        states.append(state)
        losses.append(loss)
    scores = reference.scores(state, clients, setting.draws_before_use, options, setting.x)
    return {"state": states, "loss": losses, "scores": scores}


def varied(partition):
    """The partition, every client with labels and validation rows of its own."""
    rng = np.random.default_rng(0)
    return partition._replace(
        relabel=rng.permuted(partition.relabel, axis=1),
        validation=tuple(rows[:6] for rows in partition.test),
    )


def reference_clients(source, partition, models):
    """The clients of a partition, with their images in hand."""
    x = normalised(source)
    groups = np.repeat(np.arange(len(models)), [n for _, n in models])

    def outputs(i, rows):
        return partition.relabel[i][source.labels[rows]]

    return [
        training.Client(
            group=int(group),
            net=NETS[models[group][0].name],
            x=x[train],
            y=outputs(i, train),
            x_validation=x[validation],
            y_validation=outputs(i, validation),
        )
        for i, (group, train, validation) in enumerate(
            zip(groups, partition.train, partition.validation, strict=True)
        )
    ]


def normalised(source):
    """All images, standardised by mean and deviation of the training images."""
    real = source.images[source.train].astype(float)
    return (source.images - real.mean((0, 1, 2))) / real.std((0, 1, 2))


def present(federation, slots, t):
    """Who takes part in round t: {client: (group, place in the group's cohort)}."""
    return {
        int(federation.groups[group].id[of_group.index[t, place]]): (group, place)
        for group, of_group in enumerate(slots)
        for place in np.flatnonzero(of_group.mask[t])
    }
