"""pFedClub's and pFedHR's server step: split networks into blocks, assemble, train and choose teachers."""

import copy
import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    CLASSES,
    PUBLIC,
    SHAPE,
    assert_same,
    differ,
    long,
    some_weights,
    tiny_cnn,
    tiny_models,
    tiny_partition,
    tiny_source,
)
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv

from jaxfl import tasks
from jaxfl.algorithms.reassembly.cmsr import Candidate
from jaxfl.algorithms.reassembly.pfedclub import PFedClub
from jaxfl.algorithms.reassembly.pfedclub_plus import PFedClubPlus
from jaxfl.algorithms.reassembly.pfedhr import PFedHR
from jaxfl.config.asked import make
from jaxfl.core import flops
from jaxfl.core.job import traced
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.core.score import score_functions
from jaxfl.data.colour import with_hue
from jaxfl.data.federate import federate
from jaxfl.data.federation import Batch
from jaxfl.errors import JaxflError
from jaxfl.mechanisms import reassembly
from jaxfl.mechanisms.reassembly import assembly, server, stitching, teachers, tuning
from jaxfl.mechanisms.reassembly.networks import Network, Pool, blocks_of, networks, references, weights_of
from jaxfl.mechanisms.reassembly.parts import (
    Part,
    gradient,
    in_parts,
    is_stitch,
    output_shape,
    run_all,
    train,
)
from jaxfl.mechanisms.reassembly.seen import Seen
from jaxfl.mechanisms.reassembly.server import assembled, logits_of, take_apart, timed, tuned
from jaxfl.mechanisms.reassembly.stitching import Stitch
from jaxfl.mechanisms.reassembly.teachers import State, from_teacher
from jaxfl.mechanisms.reassembly.tuning import Images, view
from jaxfl.models import zoo
from jaxfl.registry import METHODS

CROSS_ENTROPY = tuning.supervised(tasks.CLASSES)
COLOUR = (32, 32, 3)
SOME = ((2, 0), (1,))  # clients that are present, by position in their two groups
ABSENT = ((1,), (0,))


@pytest.fixture(scope="module")
def federation():
    """Return five unequal clients; three have an MLP, two a CNN of four blocks."""
    source, (mlp, _) = tiny_source(), tiny_models()
    return federate(source, tiny_partition(source), (mlp, (tiny_cnn("cnn", (2, 2), (4, 2)), 2)))


def run(chain, x):
    """Return a chain's output for one batch."""
    return run_all(chain, x, len(x))


def own_weights(federation):
    """Return models per group (n_g, ...), different for every client."""
    ids = [tuple(np.asarray(group.id).tolist()) for group in federation.groups]
    return tuple(map(own_of, federation.models, ids))


@functools.cache
def own_of(model, ids):
    """Return the models of one architecture's clients."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), np.array(ids))
    return jax.jit(jax.vmap(model.init))(keys)


def cohort(present):
    """Return a round with these clients, by position in their groups."""
    slots = [Slots(np.array(some, np.int32), np.ones(len(some), bool)) for some in present]
    return Cohort(np.int32(0), tuple(slots), rounds=1)


class Round(NamedTuple):
    """A state before and after a server step, and what the step reports."""

    before: State
    after: State
    findings: dict
    teacher: dict


def algorithm_of(config):
    """Return the method that has these options."""
    (method,) = (method for method in METHODS.values() if method.config is type(config))
    return method.build(config)


def teach(federation, config, seed=0, present=SOME, seen=None):
    """Run one server step; `seen` are clients that have had a teacher before, by position."""
    algorithm = algorithm_of(config)
    state = algorithm.init(jax.random.key(0), federation, traced(config))
    state = state._replace(weights=own_weights(federation))
    if seen:
        has = zip(state.has_teacher, seen, strict=True)
        state = state._replace(has_teacher=tuple(has.at[np.array(some, int)].set(True) for has, some in has))
    after, info = algorithm.host(jax.random.key(seed), state, federation, cohort(present))
    return Round(state, after, info.findings, info.teacher)


def candidate_of(federation, *places):
    """Return networks, and a candidate of blocks (client, index); client 0 has an MLP, client 3 the CNN."""
    found = networks(own_weights(federation), federation, cohort(((0,), (0,))))
    labels = np.zeros(sum(len(network.blocks) for network in found.values()), int)
    by_place = {(block.client, block.index): block for block in references(list(found.values()), labels)}
    blocks = tuple(by_place[place] for place in places)
    candidate = Candidate(blocks, len(blocks), (0.0,) * len(blocks))
    return found, candidate


def public_images(federation):
    x = federation.inputs(federation.public)
    top = federation.images.max().astype(x.dtype)
    return Images(x, federation.labels[federation.public], federation.mean, federation.std, 0, top)


# ---- blocks


@pytest.mark.parametrize(
    ("name", "conv", "fc"),
    [
        ("cnn1", 2, 2),
        ("cnn2", 3, 2),
        ("cnn3", 5, 4),
        ("cnn4", 6, 4),
        long("mobilenet_v1", 14, 1),
        long("mobilenet_v2", 19, 1),
        ("mobilenet_v3", 13, 2),
    ],
)
def test_the_papers_networks_are_split_into_their_blocks(name, conv, fc):
    model = getattr(zoo, name)(shape=COLOUR, classes=10, width=0.1)
    found = blocks_of(model)
    assert [block.kind for block in found] == ["conv"] * conv + ["fc"] * fc
    assert sum(block.model.size for block in found) == model.size
    assert [block.model.shape for block in found] == [COLOUR, *(block.output_shape for block in found[:-1])]
    assert found[-1].output_shape == (10,)
    assert sum((block.model.names for block in found), ()) == model.names


def test_resizing_is_part_of_the_block_after_it():
    model = zoo.cnn1(shape=SHAPE, classes=CLASSES, width=0.05, norm="batch")
    found = blocks_of(model)
    names = [block.model.names for block in found]
    assert names == [("input", "conv1"), ("conv2",), ("fc1",), ("classifier",)]
    assert found[0].model.shape == SHAPE


def test_a_chain_of_a_models_own_blocks_computes_the_model():
    """The model resizes and has BatchNorm and dropout."""
    model = zoo.cnn1(shape=SHAPE, classes=CLASSES, width=0.05, norm="batch")
    weights = some_weights(model)
    weights = weights._replace(stats=jax.tree.map(lambda leaf: leaf + 0.3, weights.stats))
    network = Network(0, 0, 0, blocks_of(model), weights)
    pool = Pool(references([network], np.zeros(4, int)), np.ones((4, 4)))
    own = assembly.layers(pool.own(0), SHAPE, CLASSES, "shape")
    assert own == list(pool.blocks)
    x = jax.random.normal(jax.random.key(1), (5, *SHAPE))
    chain = assembly.assemble(own, {0: network}, np.random.default_rng(0))
    expected, _ = jax.jit(functools.partial(model.apply, train=False))(*weights, x)
    np.testing.assert_allclose(run(chain, x), expected, rtol=1e-5, atol=1e-6)


# ---- stitching layers


def test_shapes_fit_where_the_next_block_takes_the_same_numbers():
    assert stitching.fits((4, 4, 2), (4, 4, 2), vector=True)
    assert stitching.fits((5,), (5,), vector=True)
    assert stitching.fits((5,), (1, 1, 5), vector=True)  # a dense block takes both as one vector
    assert stitching.fits((1, 1, 5), (5,), vector=True)
    assert not stitching.fits((5,), (1, 1, 5), vector=False)
    assert not stitching.fits((2, 2, 5), (20,), vector=True)


def test_a_dense_block_that_takes_maps_gets_maps_from_maps_and_all_numbers_from_a_vector():
    assert stitching.between((5, 5, 3), (4, 4, 2), vector=True) == Stitch((5, 5, 3), (4, 4, 2))
    assert stitching.between((5,), (4, 4, 2), vector=True) == Stitch((5,), (32,))
    assert stitching.between((5,), (4, 4, 2), vector=False) == Stitch((5,), (4, 4, 2))


KINDS = {  # (source, target): shape of W
    ((4, 4, 2), (8, 2, 3)): (2, 3),
    ((4, 3, 2), (31,)): (24, 31),
    ((5, 1, 2), (31,)): (2, 31),  # too large to be flattened
    ((5,), (31,)): (5, 31),
    ((5,), (4, 3, 2)): (5, 2),
}


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(("source", "target"), KINDS)
def test_a_stitching_layer_is_one_affine_map(source, target, relu):
    stitch = Stitch(source, target, relu)
    weights = stitching.initial(jax.random.key(0), stitch)
    kernel, bias = weights["kernel"], weights["bias"]
    assert kernel.shape == stitch.shape == KINDS[source, target]
    assert stitch.size == kernel.size + bias.size
    x = np.random.default_rng(0).normal(size=(2, *source)).astype(np.float32)
    seen = x
    if len(source) == 3 and len(target) == 1:
        seen = x.reshape(2, -1) if max(source[:2]) <= 4 else x.mean((1, 2))
    elif len(source) == 3:  # 4x4 to 8x2: every row twice, the means of two columns
        seen = x.repeat(2, 1).reshape(2, 8, 2, 2, 2).mean(3)
    y = seen @ np.asarray(kernel) + np.asarray(bias)
    if len(source) < len(target):
        y = np.broadcast_to(y[:, None, None], (2, *target))
    assert y.min() < 0
    expected = np.maximum(y, 0) if relu else y
    np.testing.assert_allclose(
        stitching.apply(stitch, weights, jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6
    )


def test_a_dense_stitching_layer_maps_all_numbers_to_all_numbers():
    """A dense layer has no ReLU, as in pFedHR's code."""
    stitch = Stitch((2, 3, 2), (3, 1, 2), relu=False, dense=True)
    weights = stitching.initial(jax.random.key(0), stitch)
    x = np.random.default_rng(0).normal(size=(4, 2, 3, 2)).astype(np.float32)
    y = x.reshape(4, 12) @ np.asarray(weights["kernel"]) + np.asarray(weights["bias"])
    assert y.min() < 0 and stitch.size == 12 * 6 + 6
    found = stitching.apply(stitch, weights, jnp.asarray(x))
    np.testing.assert_allclose(found, y.reshape(4, 3, 1, 2), rtol=1e-5, atol=1e-6)


def test_dense_stitching_layers_come_before_every_block_and_at_the_end(federation):
    _, candidate = candidate_of(federation, (3, 0), (0, 0))
    conv, fc = candidate.blocks
    layers = assembly.layers(candidate.blocks, SHAPE, CLASSES, "dense")
    assert layers == [
        Stitch(SHAPE, SHAPE, False, True),
        conv,
        Stitch(conv.output_shape, SHAPE, False, True),
        fc,
        Stitch(fc.output_shape, (CLASSES,), False, True),
    ]
    stitches = [64 * 64 + 64, np.prod(conv.output_shape) * 64 + 64, fc.output_shape[0] * CLASSES + CLASSES]
    assert assembly.size(layers) == conv.parameters + fc.parameters + sum(stitches)


# Images to a second block, equal shapes, neighbours in another model, every other kind of change.
STITCHED = ((4, 1), (3, 2), (3, 3), (3, 1), (3, 0), (4, 3), (0, 0))


@pytest.mark.parametrize("start", ["least-squares", "random"])
@pytest.mark.parametrize("stitch", ["joint", "shape"])
def test_stitching_layers_are_placed_and_start_as_the_reference_says(federation, stitch, start):
    known = (jnp.zeros(3, bool), jnp.zeros(2, bool))
    given = own_weights(federation), known, federation, cohort(((0,), (0, 1)))
    options = PFedClub(stitch=stitch, stitch_start=start)
    whole = take_apart(jax.random.key(0), options, is_stitch, *given)
    by_place = {(block.client, block.index): block for block in whole.pool.blocks}
    blocks = [by_place[place] for place in STITCHED]
    network = assembled(whole, blocks)
    scalars = sum(leaf.size for part in network for leaf in jax.tree.leaves(part.weights.params))
    assert server.size(whole, blocks) == scalars
    found = run(network, whole.images.x)

    def agrees(*how):
        expected, stitches = by_ridge_regression(whole, blocks, *how)
        assert expected.std(0).min() > 1e-3  # something of the images is left
        return sum(map(is_stitch, network)) == stitches and np.allclose(found, expected, rtol=1e-3, atol=1e-4)

    mistakes = [("shape" if stitch == "joint" else "joint", 1e-3), (stitch, 1.2e-3)]
    assert agrees(stitch, 1e-3) == (start == "least-squares") and not any(agrees(*how) for how in mistakes)


def by_ridge_regression(server, blocks, stitch, ridge):
    """Return a network's logits (P, C) with stitches that are least squares, and their number."""
    images = x = np.asarray(server.images.x, float)
    before, stitches = (blocks[0].client, -1), 0
    for block in [*blocks, None]:
        model = server.networks[block.client if block else before[0]].parts
        shape, end = (block.input_shape, block.index) if block else ((CLASSES,), len(model))
        neighbours = stitch == "joint" and block and (block.client, block.index - 1) == before
        if not neighbours and (x.shape[1:] != shape or stitch == "joint" and block):
            y = np.asarray(run(model[:end], images), float)
            x = stitched(x, y, ridge, relu=block is not None, flat=block and block.kind == "fc")
            stitches += 1
        if block:
            x = np.asarray(run((model[block.index],), x), float)
            before = block.client, block.index
    return x, stitches


def stitched(x, y, ridge, relu, flat):
    """Map x (n, ...) to y (n, ...) by one affine map of all pixels; a QR decomposition solves for it."""
    shape = y.shape
    if x.ndim == 4 and y.ndim == 4:
        side = min(x.shape[1], y.shape[1])
        x, y = shrunk(x, side), shrunk(y, side)
    elif x.ndim == 4:
        x = x.reshape(len(x), -1)
    elif y.ndim == 4:
        y = y.reshape(len(y), -1) if flat else y.mean((1, 2))
    rows, aims = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    rows = np.column_stack([rows, np.ones(len(rows))])
    width = rows.shape[1]
    penalty = np.sqrt(ridge * (rows**2).sum() / width) * np.eye(width)
    q, r = np.linalg.qr(np.concatenate([rows, penalty]))
    z = rows @ np.linalg.solve(r, q.T @ np.concatenate([aims, np.zeros((width, aims.shape[1]))]))
    z = (np.maximum(z, 0) if relu else z).reshape(*x.shape[:-1], -1)
    if z.ndim == 4:
        times = shape[1] // z.shape[1]
        return z.repeat(times, 1).repeat(times, 2)
    return np.broadcast_to(z[:, None, None], shape) if len(shape) == 4 and not flat else z


def shrunk(maps, side):
    """Return the means of areas: (n, h, h, c) -> (n, side, side, c)."""
    n, height, _, channels = maps.shape
    return maps.reshape(n, side, height // side, side, height // side, channels).mean((2, 4))


def test_gradients_through_a_chain_are_those_of_the_composed_function(federation):
    members, candidate = candidate_of(federation, (3, 0), (3, 0), (3, 3), (0, 0), (3, 1))
    layers = assembly.layers(candidate.blocks, SHAPE, CLASSES, "shape")
    assert [(len(s.source), len(s.target), s.relu) for s in layers if isinstance(s, Stitch)] == [
        (3, 3, True),
        (3, 1, True),
        (1, 1, True),
        (1, 3, True),
        (3, 1, False),
    ]
    images = tuning.images_of(federation)
    chain = assembly.assemble(layers, members, np.random.default_rng(0))
    # With positive weights no ReLU stops the gradient.
    chain = tuple(part._replace(weights=jax.tree.map(jnp.abs, part.weights)) for part in chain)
    places = [place for place, part in enumerate(chain) if is_stitch(part)]
    assert places == [1, 3, 5, 7, 9] and len(chain) == 10

    def loss(learnt):
        x = images.x
        for place, (layer, weights) in enumerate(chain):
            if place in learnt:
                x = stitching.apply(layer, learnt[place], x)
            else:
                x, _ = layer.apply(*weights, x, train=False)
        picked = jnp.take_along_axis(jax.nn.log_softmax(x), images.y[:, None], axis=1)
        return -picked.mean()

    expected = jax.jit(jax.grad(loss))({place: chain[place].weights.params for place in places})
    step = in_parts(gradient, tuple(part.layer for part in chain), CROSS_ENTROPY, tuple(places))
    (found, _), _ = step([part.weights for part in chain], images.x, images.y, None)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


@pytest.fixture(scope="module")
def normalised():
    """Return a chain with BatchNorm, dropout and stitching layers; it skips the network's second block."""
    model = zoo.cnn1(shape=SHAPE, classes=CLASSES, width=0.05, norm="batch", dropout=0.4)
    network = Network(0, 0, 0, blocks_of(model), some_weights(model))
    first, _, third, last = references([network], np.zeros(4, int))
    layers = assembly.layers((first, third, last), SHAPE, CLASSES, "shape")
    return assembly.assemble(layers, {0: network}, np.random.default_rng(0))


def by_composition(chain, batches, lr, places, key, train=True):
    """Train parts of a chain as one function, with Adam written out; return parameters and statistics."""
    params = {place: chain[place].weights.params for place in places}
    stats = {place: chain[place].weights.stats for place in places}

    @jax.jit
    def gradient(params, stats, x, y, key):
        def loss(params):
            z, new = x, dict(stats)
            for place, (layer, weights) in enumerate(chain):
                if isinstance(layer, Stitch):
                    z = stitching.apply(layer, params.get(place, weights.params), z)
                elif place in params:
                    dropout = jax.random.fold_in(key, place)
                    z, new[place] = layer.apply(params[place], stats[place], z, train=train, key=dropout)
                else:
                    z, _ = layer.apply(*weights, z, train=False)
            return -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], axis=1).mean(), new

        return jax.grad(loss, has_aux=True)(params)

    m = v = jax.tree.map(jnp.zeros_like, params)
    for t, (x, y) in enumerate(batches):
        g, stats = gradient(params, stats, x, y, jax.random.fold_in(key, t))
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, v, g)
        params = jax.tree.map(
            lambda w, m, v, t=t: (
                w - lr * (m / (1 - 0.9 ** (t + 1))) / (jnp.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)
            ),
            params,
            m,
            v,
        )
    return {place: (params[place], stats[place]) for place in places}


TRAINS = {"all": lambda part: True, "blocks": lambda part: not is_stitch(part), "stitches": is_stitch}


@pytest.mark.parametrize("which", TRAINS)
def test_exactly_the_chosen_parts_of_a_chain_train(normalised, federation, which):
    """The chosen parts are in training mode, dropout and BatchNorm too; the others keep their bits."""
    places = [place for place, part in enumerate(normalised) if TRAINS[which](part)]
    images, key = tuning.images_of(federation), jax.random.key(7)
    batches = [(images.x[i : i + 5], images.y[i : i + 5]) for i in (0, 5, 2)]
    after = train(normalised, batches, CROSS_ENTROPY, 0.01, trains=TRAINS[which], key=key)
    normalised, after = jax.device_get((normalised, after))
    expected = by_composition(normalised, batches, 0.01, places, key)
    for place, (old, new) in enumerate(zip(normalised, after, strict=True)):
        if place not in places:
            assert_same(new, old)
            continue
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
            tuple(new.weights),
            expected[place],
        )
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), new.weights.params, old.weights.params)
        assert max(jax.tree.leaves(moved)) > 0.01
    if which != "stitches":  # evaluation mode would give other weights
        still = by_composition(normalised, batches, 0.01, places, key, train=False)
        distance = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected, still)
        assert max(jax.tree.leaves(distance)) > 0.01


def test_batchnorm_after_a_dense_layer_does_not_train_on_single_images(normalised, federation):
    images = tuning.images_of(federation)
    batches, loss, key = [(images.x[:1], images.y[:1])], CROSS_ENTROPY, jax.random.key(0)
    train(normalised, batches, loss, 0.1, trains=TRAINS["all"], key=key)
    model = zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=2, norm="batch")
    chain = (Part(model, some_weights(model)),)
    with pytest.raises(JaxflError, match="raise --server-batch"):
        train(chain, batches, loss, 0.1, trains=TRAINS["all"], key=key)
    train(chain, batches, loss, 0.1, trains=is_stitch, key=key)


@pytest.mark.parametrize("labelled", [True, False])
def test_stitching_layers_learn_and_blocks_keep_their_bits(federation, labelled):
    members, candidate = candidate_of(federation, (3, 0), (0, 1), (3, 3))
    images = tuning.images_of(federation)

    def tuned(epochs):
        options = PFedClub(server_epochs=epochs, server_batch=PUBLIC, labelled=labelled)
        rng = np.random.default_rng(1)
        chain = assembly.assemble(assembly.layers(candidate.blocks, SHAPE, CLASSES, "shape"), members, rng)
        drawn = tuning.draws(PUBLIC, options, rng)
        loss, batches = tuning.objective(tasks.CLASSES, images, options, drawn)
        return train(chain, batches, loss, 0.005, trains=is_stitch, key=jax.random.key(0))

    before, after = jax.device_get((tuned(0), tuned(60)))
    frozen = [part.weights for part in after if not is_stitch(part)]
    assert_same(frozen, [weights_of(members[block.client], block.index) for block in candidate.blocks])
    for old, new in zip(before, after, strict=True):
        if is_stitch(old):
            moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), new.weights.params, old.weights.params)
            assert min(jax.tree.leaves(moved)) > 0

    def cross_entropy(chain):
        logits = run(chain, images.x)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), images.y[:, None], axis=1).mean()

    def contrast(chain, key):
        logits = run(chain, tuning.two_views(key, images))
        own = logits / jnp.linalg.norm(logits, axis=1, keepdims=True)
        alike = own @ own.T / PFedClub().tau - 1e9 * jnp.eye(2 * PUBLIC)  # no view is its own partner
        partner = jnp.roll(jnp.arange(2 * PUBLIC), PUBLIC)
        return -jax.nn.log_softmax(alike)[jnp.arange(2 * PUBLIC), partner].mean()

    def loss(chain):
        if labelled:
            return cross_entropy(chain)
        return np.mean([contrast(chain, key) for key in jax.random.split(jax.random.key(0), 8)])

    assert loss(after) < loss(before) - 0.1


# ---- views


def test_views_have_the_form_of_images_and_differ():
    images = jax.random.uniform(jax.random.key(0), (6, 8, 8, 3))
    seen = jax.jit(view)
    one, other = (seen(jax.random.key(seed), images) for seed in (1, 2))
    assert one.shape == images.shape and one.dtype == images.dtype
    assert one.min() >= 0 and one.max() <= 1
    changed = np.abs(one - other).max((1, 2, 3))
    assert (changed > 0).all() and np.isfinite(changed).all()
    assert_same(one, seen(jax.random.key(1), images))


@pytest.mark.parametrize("turn", [-0.1, 0.03, 0.1, 0.5])
def test_a_shift_of_hue_is_that_in_hsv(turn):
    images = np.random.default_rng(0).uniform(0, 1, (5, 6, 3)).astype(np.float32)
    images[0, :4] = [[0.3, 0.3, 0.3], [0, 0, 0], [1, 1, 0], [0.2, 0.7, 0.7]]  # grey, black, two largest
    hsv = rgb_to_hsv(images)
    hsv[..., 0] = (hsv[..., 0] + turn) % 1
    found = with_hue(jnp.asarray(images), jnp.float32(turn))
    np.testing.assert_allclose(found, hsv_to_rgb(hsv), atol=1e-5)


@pytest.mark.long
def test_jitter_moves_hue_by_up_to_a_tenth_of_the_circle():
    """Without it red would stay red: brightness, contrast and saturation treat green and blue alike."""
    red = jnp.broadcast_to(jnp.array([0.8, 0.3, 0.3]), (400, 4, 4, 3))
    views = np.asarray(view(jax.random.key(0), red))[:, 0, 0]
    hue = (rgb_to_hsv(views)[:, 0] + 0.5) % 1 - 0.5
    assert np.abs(hue).max() <= 0.1 + 1e-4 and hue.min() < -0.08 and hue.max() > 0.08
    assert 0.5 < (np.abs(hue) > 1e-4).mean() < 0.75  # 0.8 are jittered, and 0.2 of these become grey


@pytest.mark.parametrize(("channels", "low"), [(1, 0), (2, -50), (3, 0)])
def test_two_views_of_an_image_are_a_pair(channels, low):
    """All images except one are black, and every view of black is black, whether black is 0 or less."""
    low = np.float32(low)
    values = np.full((4, 8, 8, channels), low, np.float32)
    values[2] += 200
    mean, std, top = (
        jnp.full((1, 1, 1, channels), 10.0),
        jnp.full((1, 1, 1, channels), 50.0),
        low + 250,
    )
    images = Images((values - mean) / std, jnp.zeros(4, jnp.int32), mean, std, low, top)
    options = PFedClub(labelled=False, server_batch=4, server_epochs=2)
    drawn = tuning.draws(len(values), options, np.random.default_rng(0))
    loss, batches = tuning.objective(tasks.CLASSES, images, options, drawn)
    batches = list(batches)
    assert loss is tuning.contrast and len(batches) == 2
    for views, (pairs, tau) in batches:
        assert tau == options.tau
        bright = np.flatnonzero((views * std + mean).max((1, 2, 3)) > low + 1)
        assert views.shape == (8, 8, 8, channels) and len(bright) == 2
        assert pairs[bright[0]] == pairs[bright[1]] and sorted(pairs.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert (views * std + mean).min() > low - 1e-3 and (views * std + mean).max() < top + 0.01


# ---- a server step


@pytest.fixture(scope="module")
def taught(federation):
    return teach(federation, PFedClub(server_epochs=1))


def test_a_server_step_keeps_the_form_of_the_state_and_absent_clients(taught):
    form = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (taught.before, taught.after))
    assert form[0] == form[1]
    assert_same(taught.after.weights, taught.before.weights)
    assert_same(taught.after.hyper, taught.before.hyper)
    for g, (present, absent) in enumerate(zip(SOME, ABSENT, strict=True)):
        _, _, logits, has, sizes = (leaf if leaf is taught.after.hyper else leaf[g] for leaf in taught.after)
        assert np.isfinite(logits).all()
        assert all(logits[i].any() and has[i] and sizes[i] > 0 for i in present)
        assert not any(logits[i].any() or has[i] or sizes[i] for i in absent)


def test_a_server_step_depends_on_the_key_and_not_on_the_clients_order(federation, taught):
    config = PFedClub(server_epochs=1)
    assert_same(teach(federation, config).after, taught.after)
    reordered = teach(federation, config, present=((0, 2), (1,)))
    assert_same(reordered.after, taught.after)
    assert reordered.findings["assembled"] == taught.findings["assembled"]
    other = teach(federation, config, seed=1)
    pairs = zip(other.after.teacher_logits, taught.after.teacher_logits, strict=True)
    assert any(not np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "config",
    [
        PFedClub(server_epochs=0, candidates=1),
        PFedHR(server_epochs=0, candidates=1, shortest=2, longest=2, groups=2),
    ],
    ids=["pfedclub", "pfedhr"],
)
def test_clients_with_a_teacher_download_it_with_its_stitching_layers(federation, config):
    """Before the next round; a client that never took part has none and receives nothing."""
    done = teach(federation, config)
    algorithm, everyone = algorithm_of(config), cohort(((0, 1, 2), (0, 1)))
    count = jax.jit(lambda key, state: algorithm.step(key, state, federation, everyone)[1].down)
    received = np.concatenate(count(jax.random.key(1), done.after))
    found = done.findings["assembled"]
    assert dict(enumerate(received)) == {1: 0, 3: 0} | {one["client"]: one["teacher"] for one in found}
    assert any(one["teacher"] > sum(block["parameters"] for block in one["blocks"]) for one in found)


@pytest.mark.parametrize("rule", ["max", "min"])
def test_the_first_block_of_every_teacher_follows_the_rule(federation, monkeypatch, rule):
    """It is the most similar one of all others, or a first one; all blocks are of one group."""
    served = []
    monkeypatch.setattr(teachers, "take_apart", lambda *args: served.append(take_apart(*args)) or served[-1])
    done = teach(federation, PFedClub(server_epochs=0, candidates=1, groups=1, anchor=rule))
    pool = served[0].pool
    for found in done.findings["assembled"]:
        anchor, first = found["blocks"][0], pool.blocks.index(pool.own(found["client"])[0])
        if rule == "max":
            assert anchor["similarity"] == np.delete(pool.similarity[first], first).max()
        else:
            assert anchor["index"] == 0


def test_each_client_chooses_among_its_own_candidates_whose_stitches_alone_learn(federation, monkeypatch):
    """Similarities are those to the client's own logits; blocks keep the bits of their models."""
    begun, learnt = [], []
    monkeypatch.setattr(server, "assembled", lambda *args: begun.append(assembled(*args)) or begun[-1])
    monkeypatch.setattr(reassembly, "tuned", lambda *args: learnt.append(tuned(*args)) or learnt[-1])
    done = teach(federation, PFedClub(server_epochs=1, candidates=2, groups=2))
    moved = [
        (is_stitch(old), differ(new.weights, old.weights))
        for before, after in zip(begun, itertools.chain(*learnt), strict=True)
        for old, new in zip(before, after, strict=True)
    ]
    assert set(moved) == {(True, True), (False, False)}

    images = tuning.images_of(federation).x
    own = networks(done.before.weights, federation, cohort(SOME))
    for found, candidates in zip(done.findings["assembled"], learnt, strict=True):
        client, (g, i) = found["client"], divmod(found["client"], 3)
        opinions = [run(network, images) for network in candidates]
        alpha = mean_cosines(run(own[client].parts, images), opinions)
        np.testing.assert_allclose(found["alpha"], alpha, rtol=1e-4, atol=1e-5)
        x = federation.inputs(federation.groups[g].rows[i])
        expected = run(candidates[int(np.argmax(alpha))], x)
        np.testing.assert_allclose(done.after.teacher_logits[g][i], expected, rtol=1e-4, atol=1e-5)


def mean_cosines(own, opinions):
    """Return the mean cosine of a model's logits (n, C) with those of each network."""
    return [
        np.mean([a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in zip(own, other, strict=True)])
        for other in np.asarray(opinions)
    ]


def test_a_deeper_network_of_known_parts_compiles_nothing(federation):
    """Programs are those of parts, for the output and for the gradient, whatever network they are in."""
    members, _ = candidate_of(federation, (0, 0), (0, 1))
    (dense, classifier), images = members[0].parts, tuning.images_of(federation)
    stitch = assembly.assemble([Stitch((5,), (5,))], members, np.random.default_rng(0))

    def compiled(stitches):
        before, network = server.compiled.programs, (dense, *stitches * stitch, classifier)
        batches = [(images.x[:5], images.y[:5])] * 2
        train(network, batches, CROSS_ENTROPY, 0.1, trains=is_stitch, key=jax.random.key(0))
        run_all(network, images.x[:5], 5)
        return server.compiled.programs - before

    assert compiled(1) > 0 and compiled(3) == 0


@pytest.mark.long
def test_a_second_run_compiles_nothing(federation):
    config, assemblies = PFedClub(server_epochs=1, candidates=2, groups=2), set()
    for seed in range(3):
        findings = teach(federation, config, seed).findings
        assemblies |= {
            tuple((block["client"], block["index"]) for block in of_client["blocks"])
            for of_client in findings["assembled"]
        }
    assert len(assemblies) > 5
    before = server.compiled.programs
    for seed in range(3):
        teach(federation, config, seed)
    assert server.compiled.programs == before


@pytest.mark.long
def test_a_crowded_process_drops_its_programs_and_computes_the_same(federation, taught, monkeypatch):
    monkeypatch.setattr(server, "crowded", lambda: True)
    before = server.compiled.programs
    assert_same(teach(federation, PFedClub(server_epochs=1)).after, taught.after)
    assert server.compiled.programs > before


@pytest.mark.parametrize("room", [0, 2**29])
def test_parts_before_the_first_that_learns_are_computed_once(federation, room):
    """If there is room, such parts run again in no later epoch and for no other network."""
    options = PFedClub(server_epochs=2, server_batch=5, stitch_start="random")
    key, round_ = jax.random.key(0), cohort(((0,), (0,)))
    known = (jnp.zeros(3, bool), jnp.zeros(2, bool))
    whole = take_apart(key, options, is_stitch, own_weights(federation), known, federation, round_)
    images, batches = whole.images, PUBLIC // options.server_batch
    whole = whole._replace(seen=Seen(images.x, options.server_batch, room))
    for places in (((3, 0), (3, 2), (3, 3)), ((3, 0), (0, 1))):
        by_place = {(block.client, block.index): block for block in whole.pool.blocks}
        blocks, rng = [by_place[place] for place in places], copy.deepcopy(whole.rng)
        network = assembled(whole._replace(rng=rng), blocks)
        assert [is_stitch(part) for part in network[:2]] == [False, True]
        drawn = tuning.draws(PUBLIC, options, rng)
        loss, shown = tuning.objective(tasks.CLASSES, images, options, drawn)
        training = functools.partial(train, trains=is_stitch, key=key)
        expected, always = flops.on_host(training, network, shown, loss, options.server_lr)
        [found], operations = flops.on_host(tuned, whole, [blocks])
        assert_same([part.weights for part in found], [part.weights for part in expected], tolerance=1e-5)
        logits = run(expected, images.x)
        np.testing.assert_allclose(logits_of(whole, [found])[0], logits, rtol=1e-4, atol=1e-5)
        _, first = flops.on_host(run_all, network[:1], images.x, options.server_batch)
        epochs = options.server_epochs if room == 0 else 1 if places[1] == (3, 2) else 0
        assert batches > 1 and operations == always + (epochs - options.server_epochs) * first


def test_networks_learn_the_same_at_the_same_time_as_in_turn(federation):
    def taught(at_once):
        known = (jnp.zeros(3, bool), jnp.zeros(2, bool))
        options, round_ = PFedClub(server_epochs=2, server_batch=5), cohort(((0,), (0,)))
        key, weights = jax.random.key(0), own_weights(federation)
        alone = take_apart(key, options, is_stitch, weights, known, federation, round_)
        together = alone._replace(at_once=at_once)
        by_place = {(block.client, block.index): block for block in together.pool.blocks}
        several = [[by_place[place] for place in ((3, 0), (i, 1), (3, 3))] for i in (0, 3, 0, 3)]
        networks, operations = flops.on_host(tuned, together, several)
        return [part.weights for network in networks for part in network], operations

    in_turn, at_the_same_time = taught(1), taught(3)
    assert_same(at_the_same_time[0], in_turn[0])
    assert at_the_same_time[1] == in_turn[1] > 0


def test_operations_of_parts_are_counted(federation):
    """A part that learns counts three products, two for gradients; one that passes a gradient on, two."""
    members, _ = candidate_of(federation, (0, 0), (0, 1))
    dense, classifier = members[0].parts
    images = tuning.images_of(federation)
    stitch = assembly.assemble([Stitch((5,), (5,))], members, np.random.default_rng(0))

    def operations(chain, places):
        step = in_parts(gradient, tuple(part.layer for part in chain), CROSS_ENTROPY, tuple(places))
        given = [part.weights for part in chain], images.x, images.y, jax.random.key(0)
        return flops.on_host(step, *given)[1]

    into, between, out = (2 * PUBLIC * a * b for a, b in [(np.prod(SHAPE), 5), (5, 5), (5, CLASSES)])
    assert operations((dense, *stitch, classifier), [1]) == into + 3 * between + 2 * out
    assert operations((dense, classifier), [0, 1]) == 3 * (into + out)
    seen = Seen(images.x, PUBLIC)
    layers = [*references([members[0]], np.zeros(2, int))[:1], Stitch((5,), (CLASSES,), relu=False)]
    _, fitting = flops.on_host(assembly.assemble, layers, members, np.random.default_rng(0), seen)
    assert fitting == into + out + 2 * PUBLIC * (5 + 1) * (5 + 1 + CLASSES)


def test_the_cache_of_images_keeps_the_latest_that_fit(federation):
    members, candidate = candidate_of(federation, (3, 0), (3, 1), (3, 2), (3, 3))
    chain = assembly.assemble(candidate.blocks, members, np.random.default_rng(0))
    assert chain == members[3].parts  # a part is the same in every chain
    images = tuning.images_of(federation).x
    sizes = [4 * PUBLIC * np.prod(output_shape(part.layer)) for part in chain]
    seen = Seen(images, PUBLIC, room=max(sizes))
    _, needed = flops.on_host(run_all, chain, images, PUBLIC)
    for length, operations in ((4, needed), (2, 0), (1, 0)):  # computed again, but counted once
        (done, x), counted = flops.on_host(seen.after, chain[:length])
        assert done == length and counted == operations
        assert sum(kept.nbytes for kept in seen._remembered.values()) <= max(sizes)
        np.testing.assert_allclose(x, run(chain[:length], images), rtol=1e-5, atol=1e-6)
    assert Seen(images, PUBLIC, room=max(sizes) - 1).after(chain)[0] == int(np.argmax(sizes))


@pytest.mark.long
def test_teachers_of_the_plus_variant_never_exceed_their_bound(federation):
    exceeded, training = {}, {"server_epochs": 0, "candidates": 3, "groups": 2}
    for eta, options in (
        (None, PFedClub(**training)),
        (0.1, PFedClubPlus(**training)),
        (-0.1, PFedClubPlus(eta=-0.1, **training)),
    ):
        exceeded[eta] = []
        for seed, present in itertools.product(range(4), (((0, 1, 2), (0, 1)), SOME)):
            done = teach(federation, options, seed, present)
            for of_client in done.findings["assembled"]:
                g, place = divmod(of_client["client"], 3)
                own, teacher = federation.models[g].size, int(done.after.teacher_size[g][place])
                # These networks have no statistics: their parameters are all that is sent.
                assert (of_client["model"], of_client["teacher"]) == (own, teacher)
                itself = all(block["client"] == of_client["client"] for block in of_client["blocks"])
                exceeded[eta].append(teacher > (1.1 if eta is None else 1 + eta) * own and not itself)
    assert any(exceeded[None]) and not any(exceeded[0.1]) and not any(exceeded[-0.1])
    assert make(PFedClubPlus, "pfedclub-plus", {"eta": -0.999}).eta == -0.999
    with pytest.raises(JaxflError, match=r"--eta must lie in \(-1, inf\)"):
        make(PFedClubPlus, "pfedclub-plus", {"eta": -1.0})


@pytest.mark.parametrize(
    "ablation",
    [{"anchor": "max"}, long({"anchor": "min"}), {"order": False}, long({"completion": False})]
    + [long({"stitch": "dense"})],
)
def test_ablations_give_teachers_too(federation, ablation):
    done = teach(federation, PFedClub(server_epochs=1, groups=2, **ablation))
    lengths = [(len(one["blocks"]), len(one["own"])) for one in done.findings["assembled"]]
    assert all(got <= own for got, own in lengths)
    assert "completion" in ablation or all(got == own for got, own in lengths)
    assert_taught(done)


def test_unlabelled_images_and_kmedoids_give_finite_logits(federation):
    unlabelled = dataclasses.replace(federation, labelled=False)
    with pytest.raises(JaxflError, match="add labelled=false"):
        teach(unlabelled, PFedClub())
    done = teach(unlabelled, PFedClub(labelled=False, grouping="kmedoids", server_epochs=1))
    assert_taught(done)


def assert_taught(done):
    """Assert that the clients present have a teacher with finite logits, which begin as zeros."""
    for logits, present in zip(done.after.teacher_logits, SOME, strict=True):
        assert logits[np.array(present)].any((1, 2)).all() and np.isfinite(logits).all()


def test_the_known_pool_has_blocks_of_all_clients_that_ever_took_part(federation):
    """Client 1 had a teacher before, client 3 never: client 1's last model is used, and stays unchanged."""
    config, seen = PFedClub(pool="known", server_epochs=0, groups=1, signature_images=PUBLIC), ((1,), ())

    def givers(seed, pool="known", seen=seen):
        done = teach(federation, dataclasses.replace(config, pool=pool), seed, SOME, seen)
        found = done.findings["assembled"]
        assert [of_client["client"] for of_client in found] == [0, 2, 4]
        assert not any(
            np.asarray(sizes)[list(some)].any()
            for sizes, some in zip(done.after.teacher_size, ABSENT, strict=True)
        )
        return {block["client"] for of_client in found for block in of_client["blocks"]}

    assert set.union(*map(givers, range(6))) == {0, 1, 2, 4}
    assert set.union(*(givers(seed, pool="cohort") for seed in range(6))) == {0, 2, 4}
    assert givers(0, seen=((), ())) == givers(0, pool="cohort")


def test_statistics_that_the_server_never_gets_are_refused():
    source = tiny_source()
    model = zoo.cnn1(shape=SHAPE, classes=CLASSES, width=0.05, norm="batch")
    normalised = federate(source, tiny_partition(source, (5, 6)), [(model, 2)])
    with pytest.raises(JaxflError, match="bn_stats=local never sends"):
        teach(normalised, PFedClub(bn_stats="local"))


def test_a_round_reports_the_cohorts_models_after_training(federation):
    algorithm, config = METHODS["pfedclub"].build(PFedClub(epochs=1)), PFedClub(epochs=1)
    state = algorithm.init(jax.random.key(0), federation, traced(config))
    after, info = jax.jit(algorithm.step)(jax.random.key(1), state, federation, cohort(SOME))
    for predictor, weights, some in zip(info.trained, after.weights, SOME, strict=True):
        assert_same(predictor.stacked, jax.tree.map(lambda leaf: leaf[np.array(some)], weights))  # noqa: B023


# ---- pFedHR


@pytest.mark.long
def test_all_clients_of_pfedhr_choose_among_the_same_networks(federation, monkeypatch):
    """Choice, similarities, size and predictions are right by value; no client's own model changes.

    So are accuracies of teachers on their clients' test rows.
    """
    begun, learnt = [], []
    monkeypatch.setattr(server, "assembled", lambda *args: begun.append(assembled(*args)) or begun[-1])
    monkeypatch.setattr(reassembly, "tuned", lambda *args: learnt.extend(tuned(*args)) or learnt)
    config = PFedHR(server_epochs=1, candidates=2, shortest=2, longest=3, groups=2)
    done = teach(federation, config)
    assert_same(done.after.weights, done.before.weights)
    assert [len(network) for network in learnt] == [2 * blocks + 1 for blocks in (2, 3)]

    for before, after in zip(begun, learnt, strict=True):
        blocks = [part for part in before if not is_stitch(part)]
        assert [is_stitch(part) for part in before] == [True, False] * len(blocks) + [True]
        assert (before[0].layer.source, before[-1].layer.target) == (SHAPE, (CLASSES,))
        for old, new in zip(before, after, strict=True):
            moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), new.weights.params, old.weights.params)
            assert max(jax.tree.leaves(moved)) > 0  # blocks learn as well

    def says(network, x):
        for part in network:
            if is_stitch(part):
                kernel, bias = (np.asarray(part.weights.params[name]) for name in ("kernel", "bias"))
                x = (np.reshape(x, (len(x), -1)) @ kernel + bias).reshape(len(x), *part.layer.target)
            else:
                x = np.asarray(run((part,), x))
        return x

    images = tuning.images_of(federation).x
    opinions = [says(network, images) for network in learnt]
    own = networks(done.before.weights, federation, cohort(SOME))
    scores = score_functions(done.teacher, federation, cohort(SOME))
    for found in done.findings["assembled"]:
        client, (g, i) = found["client"], divmod(found["client"], 3)
        logits = np.asarray(run(own[client].parts, images))
        cosine = mean_cosines(logits, opinions)
        np.testing.assert_allclose(found["alpha"], cosine, rtol=1e-4, atol=1e-5)
        teacher = learnt[int(np.argmax(cosine))]
        x = np.asarray(federation.inputs(federation.groups[g].rows[i]))
        np.testing.assert_allclose(done.after.teacher_logits[g][i], says(teacher, x), rtol=1e-4, atol=1e-5)
        rows = np.asarray(federation.groups[g].test_rows[i])[: federation.groups[g].test_size[i]]
        right = says(teacher, np.asarray(federation.inputs(rows))).argmax(1) == federation.labels[rows]
        score = jax.tree.map(lambda leaf: leaf[SOME[g].index(i)], scores[g])  # noqa: B023
        assert (score.test.right.sum(), score.test.rows.sum(), score.finite) == (right.sum(), len(rows), True)
        sizes = [
            part.weights.params["kernel"].size + part.weights.params["bias"].size for part in teacher[::2]
        ]
        sizes += [part.layer.size for part in teacher[1::2]]
        assert found["teacher"] == done.after.teacher_size[g][i] == sum(sizes)


def test_pfedhr_refuses_empty_lengths_and_too_large_layers(federation, monkeypatch):
    with pytest.raises(JaxflError, match="--shortest 5 is more than --longest 4"):
        METHODS["pfedhr"].build(PFedHR(shortest=5, longest=4))
    _, candidate = candidate_of(federation, (3, 0), (0, 0))
    monkeypatch.setattr(assembly, "LARGEST_STITCH", 64 * 64 + 64 - 1)
    with pytest.raises(
        JaxflError, match="from \\(8, 8, 1\\) to \\(8, 8, 1\\) has too many weights .4,160.; choose stitch"
    ):
        assembly.layers(candidate.blocks, SHAPE, CLASSES, "dense")
    assembly.layers(candidate.blocks, SHAPE, CLASSES, "shape")


# ---- the identity teacher


@pytest.fixture(scope="module")
def alone():
    """Return two clients of one architecture."""
    source = tiny_source()
    model = zoo.mcmahan(shape=SHAPE, classes=CLASSES, width=0.06, padding="same")
    return federate(source, tiny_partition(source, (5, 6)), [(model, 2)])


@pytest.mark.long
def test_one_client_alone_is_its_own_teacher(alone):
    done = teach(alone, PFedClub(candidates=1, groups=9), present=((1,),))
    (group,), (found,) = alone.groups, done.findings["assembled"]
    weights = jax.tree.map(lambda leaf: leaf[1], done.after.weights[0])
    x = alone.inputs(group.rows[1])
    logits, _ = group.model.apply(*weights, x, train=False)
    teacher = done.after.teacher_logits[0][1]
    np.testing.assert_allclose(teacher, logits, rtol=1e-5, atol=1e-6)
    assert [(block["client"], block["index"]) for block in found["blocks"]] == [(1, r) for r in range(4)]
    assert found["phi"] == 0
    np.testing.assert_allclose(found["alpha"], [1], rtol=1e-5)
    assert done.after.teacher_size[0][1] == group.model.size

    # At the client's own weights the teacher has nothing to teach.
    rows = jnp.arange(len(x), dtype=jnp.int32)
    batch = Batch(x, alone.labels[group.rows[1]], jnp.ones(len(rows), bool), rows)

    @jax.jit
    def gradient(teacher, lam):
        loss = from_teacher(group.model, teacher, lam)
        return jax.grad(lambda params: loss(weights._replace(params=params), batch, None)[0])(weights.params)

    without, own, other = (
        gradient(teacher, 0.0),
        gradient(teacher, 5.0),
        gradient(teacher.at[:, 0].add(1), 5.0),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), own, without)
    assert np.abs(other["classifier"]["kernel"] - without["classifier"]["kernel"]).max() > 1e-3


def test_seconds_of_a_step_are_never_negative():
    """Two threads that compile at the same time count more seconds than pass."""
    seconds = {}
    with timed(seconds, "matching"):
        server.compiled.seconds += 1000.0
    assert seconds["matching"] == 0.0 and 0.0 < seconds["compilation"] < 1000.0
