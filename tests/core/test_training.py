"""Local training beyond plain SGD: batches of other sources, corrections, tallies, augmentation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import CLASSES, PUBLIC, SHAPE, SIZES, assert_same, some_weights, tiny_cnn
from matplotlib.colors import rgb_to_hsv
from scipy import ndimage

from jaxfl.core import flops
from jaxfl.core.augment import augmentation, colour, crop, cutout, flip, rotate
from jaxfl.core.batches import batch_order, batches_per_phase
from jaxfl.core.client_map import only_if
from jaxfl.core.cohorts import all_clients
from jaxfl.core.examples import Examples, arrays, own_rows, public_rows, server_rows
from jaxfl.core.job import traced
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.core.score import score
from jaxfl.core.streams import AUGMENTATION
from jaxfl.core.traffic import sent_up
from jaxfl.core.training import (
    Steps,
    Training,
    descend,
    fit,
    local_optimizer,
    mean,
    steps_of,
    task_loss,
)
from jaxfl.data.federation import Batch
from jaxfl.errors import JaxflError
from jaxfl.models import zoo
from jaxfl.registry import METHODS

KEY = jax.random.key(0)
PLAIN = Training(epochs=2, batch_size=3)


def one_client(federation, group=0, position=0):
    client = jax.tree.map(lambda leaf: leaf[position], federation.groups[group])
    return dataclasses.replace(client, federation=federation)


def positions(examples, epochs=2, batch_size=2):
    """Return the positions that an update sees, batch after batch, one row per part."""

    def update(carry, batch, key):
        seen, number = carry
        parts = batch if isinstance(batch, tuple) and not isinstance(batch, Batch) else (batch,)
        row = jnp.stack([jnp.where(part.mask, part.position, -1) for part in parts])
        return (seen.at[number].set(row), number + 1), jnp.zeros(())

    parts = 1 if isinstance(examples, Examples) else len(examples)
    start = jnp.full((20, parts, batch_size), -2, jnp.int32), jnp.int32(0)
    done = jax.jit(lambda: fit(update, start, KEY, examples, epochs=epochs, batch_size=batch_size))()
    seen, number = done.carry
    assert number == done.steps
    return np.asarray(seen)[: int(number)]


def seven():
    return arrays(jnp.arange(10.0)[:, None], jnp.zeros(10, jnp.int32), jnp.int32(7))


def test_an_epoch_takes_every_real_row_once():
    seen = positions(seven())
    assert seen.shape == (8, 1, 2)
    for epoch in np.split(seen, 2):
        assert sorted(epoch[epoch >= 0].tolist()) == list(range(7))


@pytest.mark.parametrize(
    ("epochs", "batches"),  # an epoch of 7 rows has 4
    [(0.1, 1), (0.6, 3), (2 / 3, 3), (1.0, 4), (1.5, 6), (Steps(3), 3), (Steps(9), 9), (jnp.int32(2), 8)],
)
def test_epochs_may_be_fractions_or_steps_or_arrays(epochs, batches):
    """All take the first batches of whole epochs, and only these count."""
    np.testing.assert_array_equal(positions(seven(), epochs), positions(seven(), 3)[:batches])

    def update(carry, batch, key):
        return carry, (batch.x @ jnp.ones(1)).sum()

    with flops.collect() as amounts:
        fit(update, (), KEY, seven(), epochs=epochs, batch_size=2)
    assert [float(amount) for _, amount in amounts] == [2 * (7 * (batches // 4) + 2 * (batches % 4))]


def test_batches_of_fractions_fit_an_int32():
    count = jnp.int32(50_000)
    assert batches_per_phase(50.001, count) == 2_500_050
    assert [int(batches_per_phase(0.3, jnp.int32(n))) for n in (0, 1, 4, 10, 11)] == [0, 1, 2, 3, 4]


def test_a_batch_is_no_longer_than_the_list():
    """Longer batches would hold only more padding."""
    rows = []

    def update(carry, batch, key):
        rows.append(len(batch.x))
        return carry + jnp.where(batch.mask[:, None], batch.x, 0).sum(), batch.x.sum()

    done = fit(update, jnp.zeros(()), KEY, seven(), epochs=1, batch_size=2**31 - 1)
    assert set(rows) == {10} and done.steps == 1 and done.carry == sum(range(7))


@pytest.mark.parametrize("epochs", [0.5, Steps(3)])
def test_a_client_without_rows_takes_no_steps(epochs):
    nobody = arrays(jnp.ones((3, 1)), jnp.zeros(3, jnp.int32), jnp.int32(0))
    assert len(positions(nobody, epochs)) == 0


def test_batches_of_several_sources_are_independent_and_show_as_many_rows():
    seen, alone = positions((seven(), seven())), positions(seven())
    assert len(seen) == len(alone) // 2  # of four batches per epoch each source takes two
    np.testing.assert_array_equal(seen[:2, 0], alone[:2, 0])  # the first source's are as if alone
    assert not np.array_equal(seen[:, 0], seen[:, 1])


def test_public_rows_are_for_present_clients_and_the_server(federation):
    rows = federation.public[:5]
    client = one_client(federation)
    absent = only_if(False, client)
    assert [int(public_rows(rows, who).size) for who in (client, absent)] == [5, 0]
    taken = server_rows(rows, 5, federation).take(jnp.array([1, 3]), jnp.ones(2, bool), KEY)
    np.testing.assert_array_equal(taken.y, federation.labels[rows[jnp.array([1, 3])]])


def test_a_server_trains_without_a_client(federation):
    model, public = federation.models[0], federation.public
    rows = server_rows(public, jnp.int32(len(public)), federation)
    weights = model.init(KEY)
    trained = jax.jit(lambda: descend(task_loss(model), weights, KEY, rows, PLAIN))()
    assert trained.steps == 2 * 4 and trained.loss > 0


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        (zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=2), 3),
        (zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=2, norm="batch"), 2),
        (tiny_cnn("maps", norm=True), 3),
        (tiny_cnn("pixels", (2, 8), (2, 1), norm=True), 2),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_last_batch_of_one_row_trains_unless_batchnorm_gets_single_values(federation, model, batches):
    client = one_client(federation)
    rows, weights = own_rows(client, PLAIN), some_weights(model)
    assert client.size == 7
    for _ in range(2):  # the second time as the first, whatever JAX remembers
        trained = jax.jit(lambda: descend(task_loss(model), weights, KEY, rows, PLAIN))()
        assert trained.steps == 2 * batches == steps_of(client.size, model, PLAIN)
    one_by_one = Training(batch_size=1)
    if batches == 3:
        descend(task_loss(model), weights, KEY, rows, one_by_one)
    else:
        with pytest.raises(JaxflError, match="BatchNorm .* needs batches of two rows or more"):
            descend(task_loss(model), weights, KEY, rows, one_by_one)


def test_an_update_that_was_traced_before_is_asked_again():
    model = zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=2, norm="batch")
    rows = arrays(jnp.ones((7, *SHAPE)), jnp.zeros(7, jnp.int32), jnp.int32(7))

    def update(weights, batch, key):
        loss, stats = task_loss(model)(weights, batch, key)
        return weights._replace(stats=stats), loss

    for _ in range(2):
        assert fit(update, some_weights(model), KEY, rows, epochs=1, batch_size=3).steps == 2


def trained(federation, **departures):
    client = one_client(federation)
    model = client.model
    weights, rows = model.init(KEY), own_rows(client, PLAIN)
    loss = departures.pop("loss", task_loss(model))
    return jax.jit(lambda: descend(loss, weights, KEY, rows, PLAIN, **departures))()


def test_a_correction_changes_gradients_before_the_optimiser(federation):
    plain, identity = trained(federation), trained(federation, correction=optax.identity())
    assert_same(plain, identity)
    stopped = trained(federation, correction=optax.set_to_zero())
    decay = (1 - PLAIN.lr * PLAIN.weight_decay) ** 2  # weights decay at least so much, momentum adds to it
    initial = federation.models[0].init(KEY).params["fc1"]["linear"]["kernel"]
    moved = np.asarray(stopped.weights.params["fc1"]["linear"]["kernel"] / initial)
    assert (moved < decay).all() and (moved > 0.99).all()


def test_gradients_are_clipped_before_they_are_corrected():
    gradient, longest = jnp.array([3.0, 4.0]), Training(clip_norm=1.0)
    doubled = local_optimizer(longest, optax.identity(), optax.scale(2.0))
    updates, _ = jax.jit(lambda gradient: doubled.update(gradient, doubled.init(gradient)))(gradient)
    np.testing.assert_allclose(updates, 2 * gradient / 5, rtol=1e-6)


def test_a_given_optimizer_replaces_the_usual_one(federation):
    frozen = trained(federation, optimizer=optax.sgd(0.0))
    assert_same(frozen.weights, federation.models[0].init(KEY))


def test_each_phase_draws_other_batches(federation):
    assert trained(federation, phase=1).loss != trained(federation).loss


def test_a_tally_sums_what_the_loss_observes(federation):
    client = one_client(federation)
    plain = task_loss(client.model)

    def observing(weights, batch, key):
        return *plain(weights, batch, key), {"rows": batch.mask.sum(dtype=jnp.int32)}

    seen = trained(federation, loss=observing, tally={"rows": jnp.int32(0)})
    assert seen.tally == {"rows": PLAIN.epochs * int(client.size)}
    assert_same(seen._replace(tally=None), trained(federation))


def test_batch_orders_do_not_depend_on_padding():
    narrow, wide = batch_order(KEY, jnp.int32(5), 5), batch_order(KEY, jnp.int32(5), 9)
    np.testing.assert_array_equal(narrow, wide[:5])


IMAGES = jnp.asarray(np.random.default_rng(0).integers(1, 255, (40, 16, 16, 3), dtype=np.uint8))


def test_flips_mirror_about_half_of_the_images():
    flipped = flip(KEY, IMAGES)
    mirrored = (flipped == IMAGES[:, :, ::-1]).all((1, 2, 3))
    assert (mirrored | (flipped == IMAGES).all((1, 2, 3))).all()
    assert 10 < mirrored.sum() < 30


def test_crops_move_images_by_up_to_an_eighth():
    moved, found = crop(KEY, IMAGES), set()
    padded = np.pad(IMAGES, ((0, 0), (2, 2), (2, 2), (0, 0)))
    for image, wide in zip(np.asarray(moved), padded, strict=True):
        places = [
            (i, j) for i in range(5) for j in range(5) if np.array_equal(image, wide[i : i + 16, j : j + 16])
        ]
        assert len(places) == 1
        found |= set(places)
    assert len(found) > 10 and moved.dtype == jnp.uint8


def test_crops_move_the_windows_of_a_signal_only_along_it():
    windows = jnp.broadcast_to(jnp.arange(1.0, 33).reshape(1, 1, 32, 1), (40, 1, 32, 2))
    moved = np.asarray(crop(KEY, windows))[:, 0, :, 0]
    shifts = [next(s for s in range(-4, 5) if row[16] == 17 + s) for row in moved]
    assert len(set(shifts)) > 5 and ((moved == 0).sum(1) == np.abs(shifts)).all()


def test_rotations_match_scipy():
    turned = rotate(KEY, IMAGES[:5])
    angles = np.degrees(jax.random.uniform(KEY, (5,), minval=-np.pi / 12, maxval=np.pi / 12))
    assert np.ptp(angles) > 10
    for image, angle, found in zip(np.asarray(IMAGES, float), angles, np.asarray(turned), strict=False):
        wanted = ndimage.rotate(image, angle, reshape=False, order=1)
        np.testing.assert_allclose(found[4:12, 4:12], wanted[4:12, 4:12], atol=0.05)  # edges differ


def test_cutouts_are_squares_of_half_the_height():
    cut = np.asarray(cutout(KEY, IMAGES))
    gone = (cut == 0).all(-1)
    np.testing.assert_array_equal(np.where(gone[..., None], 0, IMAGES), cut)
    for hole in gone:
        rows, columns = np.flatnonzero(hole.any(1)), np.flatnonzero(hole.any(0))
        assert hole[np.ix_(rows, columns)].all() and max(len(rows), len(columns)) <= 8
        assert min(len(rows), len(columns)) >= 3  # the centre is within the image
    assert (gone.sum((1, 2)) == 64).any() and cut.dtype == np.uint8


@pytest.mark.long
def test_colours_change_within_bounds_and_grey_stays_grey():
    even = jnp.full((200, 4, 4, 3), 90, jnp.uint8)
    light = np.asarray(colour(KEY, even)) / 90  # without contrast, saturation and hue
    assert np.ptp(light, (1, 2, 3)).max() < 1e-5
    assert 0.6 <= light.min() < 0.62 and 1.38 < light.max() <= 1.4
    grey = np.asarray(colour(KEY, IMAGES[..., :1]))
    for image, found in zip(np.asarray(IMAGES[..., :1], float), grey, strict=True):
        slope, offset = np.polyfit(image.ravel(), found.ravel(), 1)  # brightness and contrast alone
        np.testing.assert_allclose(found, slope * image + offset, atol=1e-2)
        assert 0.36 <= slope <= 1.96
    red = np.asarray(colour(KEY, jnp.tile(jnp.array([200.0, 40.0, 40.0]), (200, 4, 4, 1))))[:, 0, 0]
    hue = (rgb_to_hsv((red + 100) / 600)[:, 0] + 0.5) % 1 - 0.5
    assert -0.1 <= hue.min() < -0.09 and 0.09 < hue.max() <= 0.1


@pytest.mark.parametrize("name", ["fedmd", "feddf"])  # the public images train clients and the server
def test_only_own_training_images_are_augmented(monkeypatch, federation, name):
    """Batches are as long as their lists, so the number of images tells whose they are."""
    seen = []
    noting = lambda names: lambda key, images: seen.append(len(images)) or images  # noqa: E731
    monkeypatch.setattr("jaxfl.core.examples.augmentation", noting)
    config = METHODS[name].config(augment=("flip",), batch_size=100)
    algorithm = METHODS[name].build(config)

    def trained_and_scored(key, cohort):
        state = algorithm.init(key, federation, traced(config))
        if algorithm.prepare:
            state, _ = algorithm.prepare(key, state, federation, cohort)
        state, _ = algorithm.step(key, state, federation, cohort)
        return score(algorithm.personal(key, state, federation, cohort), key, federation, cohort)

    jax.eval_shape(trained_and_scored, KEY, all_clients(federation, rounds=1))
    assert set(seen) == {max(SIZES)} and max(SIZES) != PUBLIC


@pytest.mark.parametrize("names", [(), ("flip",), ("crop", "flip"), ("rotate", "cutout", "colour")])
def test_augmentation_changes_the_images_of_training_batches_and_not_their_labels(federation, names):
    client = one_client(federation)
    hyper = Training(augment=names)
    places, real = jnp.arange(4, dtype=jnp.int32), jnp.ones(4, bool)
    batch = own_rows(client, hyper).take(places, real, KEY)
    plain = own_rows(client, Training()).take(places, real, KEY)
    assert np.array_equal(batch.x, plain.x) == (not names)
    np.testing.assert_array_equal(batch.y, plain.y)
    changed = functools.partial(augmentation(names), jax.random.fold_in(KEY, AUGMENTATION))
    assert_same(batch.x, federation.inputs(client.rows[places], changed))


def test_a_mean_is_of_one_value_per_row():
    batch = Batch(None, np.zeros((3, 1)), jnp.array([True, True, False]), None)
    assert mean(jnp.array([1.0, 3.0, 100.0]), batch) == 2
    with pytest.raises(ValueError, match=r"one value per row, \(3,\), not of \(3, 1\)"):
        mean(jnp.ones((3, 1)), batch)


@pytest.mark.parametrize("number", [500, np.int32(500), np.prod((50, 10))])
def test_a_message_is_a_whole_number_of_scalars(number):
    cohort = Cohort(jnp.int32(0), (Slots(jnp.arange(2), jnp.array([True, False])),), 1)
    assert sent_up(cohort, (number,))[0].tolist() == [500, 0]
