"""DraftFed's parts: matching of drafts, the global set, targets, the loss and traffic."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, SHAPE, some_weights

from jaxfl.algorithms.public_images.draftfed import (
    DraftFed,
    Drafts,
    aggregate,
    draft_loss,
    ends,
    global_set,
    supplied,
)
from jaxfl.core import tree
from jaxfl.core.job import traced
from jaxfl.data.federation import Batch
from jaxfl.mechanisms.public_images import shuffled, subset
from jaxfl.models import zoo
from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import plain_cnn
from jaxfl.models.maps import match, resize
from methods.cases import draftfed as reference

IMAGES = 4


@pytest.fixture(autouse=True)
def double_precision():
    """Compute in double precision: agreement to twelve digits excludes any other formula."""
    with jax.enable_x64(True):
        yield


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


# ---- the global set


def test_images_of_the_global_set_have_labels_that_the_clients_know(federation):
    """Images of other labels are left out; the rest repeat if too few; all are used if none fit."""
    rows = np.asarray(federation.public)

    def drawn(labels, size):
        other = federation.labels.at[rows].set(jnp.asarray(labels, jnp.int32))
        found = global_set(
            shuffled(jax.random.key(0), federation), dataclasses.replace(federation, labels=other), size
        )
        return rows[np.asarray(found)].tolist()

    every = np.arange(len(rows))
    known, order = (
        drawn(every % CLASSES, len(rows)),
        subset(jax.random.key(0), federation, len(rows)).tolist(),
    )
    assert known == order and drawn(every % CLASSES, 3) == order[:3]
    some = drawn(every, len(rows))  # only the first CLASSES images have a label below CLASSES
    first = [row for row in order if row in rows[:CLASSES]]
    assert some == [first[i % CLASSES] for i in range(len(rows))] and drawn(every, 2) == first[:2]
    assert drawn(every + CLASSES, 3) == order[:3]


# ---- matching


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((8, 8, 3), (4, 4, 5)),
        ((6, 7, 4), (4, 3, 2)),  # areas of unequal size that overlap
        ((4, 4, 2), (8, 9, 2)),
        ((2, 9, 3), (5, 4, 1)),  # one axis grows, the other shrinks
        ((1, 1, 2), (3, 3, 4)),
    ],
)
def test_matching_of_maps_agrees_with_the_reference_and_is_linear(given, wanted):
    x, y = normal(0, IMAGES, *given), normal(1, IMAGES, *given)
    of_x, of_y, of_both = (match(jnp.asarray(maps), wanted) for maps in (x, y, 3 * x - 2 * y))
    np.testing.assert_allclose(of_x, reference.match(x, wanted), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(of_both, 3 * of_x - 2 * of_y, rtol=1e-12, atol=1e-12)


def test_maps_that_have_the_shape_already_keep_their_bits():
    x = normal(0, IMAGES, 5, 4, 3)
    np.testing.assert_array_equal(match(jnp.asarray(x), (5, 4, 3)), x)


def test_maps_can_also_grow_by_nearest_pixels():
    x = normal(0, IMAGES, 2, 3, 1)
    rows, columns = (((np.arange(new) + 0.5) * old / new).astype(int) for new, old in ((5, 2), (7, 3)))
    grown = resize(jnp.asarray(x), 5, 7, up="nearest")
    np.testing.assert_allclose(grown, x[:, rows][:, :, columns], rtol=1e-12)


# ---- targets

# The numbers of convolutions of four architectures, one of them 0, and the shapes of their taps.
DEPTHS = (2, 5, 0, 3)
SHAPES = (
    {1: (8, 8, 3), 2: (4, 4, 6)},
    {1: (4, 4, 5), 2: (4, 4, 2), 3: (3, 3, 7), 5: (2, 2, 9)},
    {},
    {1: (8, 6, 2), 2: (8, 8, 8), 3: (4, 5, 4)},
)
MODELS = tuple(SimpleNamespace(convolution_count=depth) for depth in DEPTHS)


def drafts_of(places):
    """Return drafts of the given number of clients of each architecture."""
    return tuple(
        Drafts(
            {depth: jnp.asarray(normal([g, depth], k, IMAGES, *shape)) for depth, shape in taps.items()},
            jnp.asarray(normal([g, 9], k, IMAGES, CLASSES)),
        )
        for g, (k, taps) in enumerate(zip(places, SHAPES, strict=True))
    )


def test_clients_send_the_drafts_that_shallower_networks_need():
    assert [supplied(model, MODELS) for model in MODELS] == [tuple(taps) for taps in SHAPES]
    assert [ends(model) for model in MODELS] == [(1, 2), (1, 5), (), (1, 3)]
    assert ends(SimpleNamespace(convolution_count=1)) == (1,)


@pytest.mark.parametrize(
    "present",
    [
        ((True, False, True), (True,), (False, True), (True, True)),
        ((False, True, False), (False,), (True, True), (True, False)),  # no client of the deepest
        ((False, True, True), (True,), (False, False), (False, False)),
    ],
)
def test_targets_are_means_over_the_clients_that_have_such_a_draft(present):
    drafts = drafts_of(map(len, present))
    targets = jax.jit(lambda drafts: aggregate(drafts, MODELS, [*map(np.array, present)]))(drafts)
    drafts, targets = jax.device_get((drafts, targets))

    def of_client(g, place):
        one = jax.tree.map(lambda leaf: leaf[place], drafts[g])
        return reference.Draft(DEPTHS[g], one.taps, one.logits)

    there = {(g, i): of_client(g, i) for g, mask in enumerate(present) for i in np.flatnonzero(mask)}
    for client in there:
        expected, found = reference.target(client, there), targets[client[0]]
        assert found.taps.keys() == expected.taps.keys()
        for depth, tap in expected.taps.items():
            np.testing.assert_allclose(found.taps[depth], tap, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-12)
    if present[1] == (True,):  # the deepest learns its last draft from no other client
        np.testing.assert_array_equal(targets[1].taps[5], drafts[1].taps[5][0])


# ---- the loss


def loss_of(model, targets, position, **options):
    """Return the draft loss of images at some positions of the global set; the last one is padding."""
    weights, x = some_weights(model), normal(0, IMAGES, *SHAPE)[position]
    batch = Batch(jnp.asarray(x), None, jnp.arange(len(position)) < len(position) - 1, jnp.asarray(position))
    loss = draft_loss(model, targets, traced(DraftFed(**options)))
    return loss(weights, batch, jax.random.key(1))[0]


@pytest.mark.long
def test_a_single_convolution_has_both_weights_and_no_loss_at_its_target():
    model = plain_cnn("one", [ConvBlock(2, 3, 1, 2)], [DenseBlock(4)], shape=SHAPE, classes=CLASSES)
    weights, images = some_weights(model), jnp.asarray(normal(0, IMAGES, *SHAPE))
    logits, _, (tap,) = model.apply_with_taps(*weights, images, (1,), train=False)
    away = Drafts({1: tap + 2.0 * jnp.arange(IMAGES, dtype=float).reshape(-1, 1, 1, 1)}, logits)
    position = [2, 1, 3]  # the last is padding, so the mean square is (4**2 + 2**2) / 2
    for lam1, lam2 in ((1.0, 0.0), (0.0, 1.0), (0.3, 0.2)):
        value = loss_of(model, away, position, lam1=lam1, lam2=lam2, lam3=0.0)
        np.testing.assert_allclose(value, 10 * (lam1 + lam2), rtol=1e-12)
    assert loss_of(model, Drafts({1: tap}, logits), position, lam3=0.0) < 1e-30
    towards = jax.nn.softmax(logits[jnp.array([2, 1])])
    entropy = -(towards * jnp.log(towards)).sum(1).mean()
    np.testing.assert_allclose(loss_of(model, Drafts({1: tap}, logits), position), entropy, rtol=1e-12)


# ---- traffic


@pytest.mark.long
def test_drafts_of_a_densenet_have_the_size_that_the_paper_counts():
    """Table I of the paper is for 128 images; of the ten logits it counts one."""
    model = zoo.densenet121(shape=(32, 32, 3), classes=10, stem="imagenet")
    weights = jax.eval_shape(model.init, jax.random.key(0))
    draft = functools.partial(model.apply_with_taps, depths=supplied(model, (model,)), train=False)
    logits, _, taps = jax.eval_shape(draft, *weights, jax.ShapeDtypeStruct((128, 32, 32, 3), float))
    assert 4 * tree.scalars((taps, logits)) == 4 * 128 * (16384 + 1024 + 10)
