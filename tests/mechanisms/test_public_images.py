"""Public images: held out or of another set, drawn for a round, and predicted by clients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, PUBLIC, SHAPE, SIZES, tiny_models, tiny_partition, tiny_source

from jaxfl.config.setup import Setup
from jaxfl.core.examples import visiting
from jaxfl.data import partition, saved_partition
from jaxfl.data.federate import federate
from jaxfl.data.partitioners import PARTITIONS, TEST
from jaxfl.data.public import Public, adapt
from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError
from jaxfl.folder.variant import choose, provided
from jaxfl.grid.resolve import check_setup
from jaxfl.mechanisms import public_images as public
from jaxfl.runs.prepare import divide

SOURCE = tiny_source()
KEY = jax.random.key(0)


# ---- images of a round


def test_each_round_draws_its_own_distinct_images(federation):
    drawn = [
        public.subset(jax.random.fold_in(KEY, t), federation, size).tolist()
        for t, size in ((0, 6), (0, 6), (1, 6), (1, 2 * PUBLIC))
    ]
    available = set(federation.public.tolist())
    assert [len(rows) for rows in drawn] == [6, 6, 6, PUBLIC]
    assert all(len(set(rows)) == len(rows) and set(rows) <= available for rows in drawn)
    assert drawn[0] == drawn[1] and set(drawn[0]) != set(drawn[2]) < set(drawn[3])


def test_a_federation_without_public_images_is_refused(federation):
    without = dataclasses.replace(federation, public=federation.public[:0])
    with pytest.raises(JaxflError, match="needs public images, but the federation has none; add --public"):
        public.subset(KEY, without, 6)


def test_clients_see_public_images_unless_they_are_absent(federation):
    (group, _), rows = federation.groups, federation.public
    client = jax.tree.map(lambda leaf: leaf[1], group)
    client = dataclasses.replace(client, federation=federation)
    absent = dataclasses.replace(client, size=jnp.zeros_like(client.size))
    assert visiting(client, rows).rows is rows
    assert [int(visiting(c, rows).size) for c in (client, absent)] == [PUBLIC, 0]

    weights = group.model.init(KEY)
    expected, _ = group.model.apply(weights.params, weights.stats, federation.inputs(rows), train=False)
    np.testing.assert_allclose(public.logits(weights, client, rows), expected, rtol=1e-5)
    assert not public.logits(weights, absent, rows).any()


# ---- images of another set


def other(shape=(6, 4, 3), *, top=255, classes=CLASSES, dtype=np.uint8):
    """Return ten images of one value each, the same in all channels; the last two are for testing."""
    values = np.linspace(0, top, 10).astype(dtype)
    images = np.broadcast_to(values[:, None, None, None], (10, *shape)).copy()
    return Source("other", images, np.arange(10, dtype=np.int32) % classes, np.arange(10) < 8, classes)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("wanted", [(8, 8, 1), (3, 5, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images_take_the_form_of_the_clients_own(channels, wanted, dtype):
    given = other((6, 4, channels), dtype=dtype)
    like = SOURCE._replace(images=np.full((60, *wanted), 200, dtype))
    images, labels, labelled, _ = adapt(given, like, seed=0, labels=True)
    assert images.shape == (8, *wanted) and images.dtype == dtype and labelled
    flat = given.images[:8, 0, 0, 0].astype(float)  # one value stays that value, whatever size and colours
    places = np.argsort(images[:, 0, 0, 0])
    np.testing.assert_allclose(
        images[places], np.broadcast_to(flat[:, None, None, None], images.shape), rtol=1e-5
    )
    assert labels[places].tolist() == given.labels[:8].tolist()


def test_resizing_interpolates_and_grey_weights_colours_as_the_eye_does():
    ramp = np.broadcast_to(np.arange(8, dtype=np.uint8)[None, None, :, None] * 30, (4, 8, 8, 1))
    given = Source("ramp", ramp, np.zeros(4, np.int32), np.ones(4, bool), CLASSES)
    small = adapt(given, SOURCE._replace(images=np.full((60, 4, 4, 1), 200, np.uint8)), seed=0).images
    assert np.all(np.diff(small[0, 0, :, 0].astype(int)) > 30)

    red = np.zeros((4, *SHAPE[:2], 3), np.uint8)
    red[..., 0] = 250
    given = given._replace(images=red)
    assert set(adapt(given, SOURCE, seed=0).images.ravel()) == {75}  # round(0.299 * 250)


def test_the_seed_decides_which_images_are_drawn():
    drawn = [adapt(other(), SOURCE, seed=seed, size=5).images[:, 0, 0, 0].tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 5


def test_images_that_clients_have_are_not_public():
    owned = np.array([0, 1, 2, 50])
    images = adapt(SOURCE, SOURCE, seed=0, owned=owned).images
    (free,) = np.nonzero(SOURCE.train & ~np.isin(np.arange(60), owned))
    assert len(images) == len(free) == 37
    assert sorted(map(bytes, images)) == sorted(map(bytes, SOURCE.images[free]))
    assert len(adapt(other(), SOURCE, seed=0, owned=owned).images) == 8  # rows of another set
    with pytest.raises(JaxflError, match="tiny: clients have all of its training images; .* held-out"):
        adapt(SOURCE, SOURCE, seed=0, owned=np.arange(60))
    images, train = SOURCE.images[::-1].astype(np.float32), SOURCE.train[::-1]
    backwards = SOURCE._replace(images=images, train=train)
    again = adapt(backwards, SOURCE, seed=0, owned=owned).images
    assert sorted(map(bytes, again)) == sorted(map(bytes, SOURCE.images[free]))
    coloured = SOURCE._replace(images=np.repeat(SOURCE.images, 3, -1))
    again = adapt(coloured, SOURCE, seed=0, owned=owned).images
    assert sorted(map(bytes, again)) == sorted(map(bytes, SOURCE.images[free]))
    with pytest.raises(JaxflError, match="other has no training images to draw from"):
        adapt(other((6, 4, 1))._replace(train=np.zeros(len(other().labels), bool)), SOURCE, seed=0)


moved = other()._replace(images=other(dtype=np.float32).images - 128)


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        (other(), {"size": 9}, r"other has 8 training images .*size= must lie in \[1, 8\], but is 9"),
        (other(), {"size": 0}, "but is 0"),
        (other(), {"size": -1}, "but is -1"),
        (other(classes=5), {"labels": True}, "have 5 classes and the clients' 3, .*leave out labels=true"),
        (
            other(top=1, dtype=np.float32),
            {},
            "Values run from 0 to 1 in the public images of other and from 0 to 2.. in tiny",
        ),
        (moved, {}, "Values run from -128 to 127 in the public images of other and from 0 to 2.. in tiny"),
        (other()._replace(class_names=("a", "b", "c")), {"labels": True}, "call their classes differently"),
        (
            other()._replace(features=("x", "y")),
            {},
            "features of other are x, y, but the clients' are size, colour",
        ),
        (other((6, 4, 2)), {}, "of other have 2 channels and the clients' 1; convert them"),
    ],
)
def test_images_that_do_not_fit_are_refused(given, options, sentence):
    named = SOURCE._replace(class_names=("a", "c", "b"), features=("size", "colour"))
    with pytest.raises(JaxflError, match=sentence):
        adapt(given, named, seed=0, **options)


def test_images_of_another_set_come_after_the_clients_own():
    images = Public(np.full((3, *SHAPE), 9, np.uint8), np.array([2, 0, 1], np.int32), labelled=False)
    federation = federate(SOURCE, tiny_partition(SOURCE), tiny_models(), public=images)
    assert federation.public.tolist() == [60, 61, 62] and not federation.labelled
    assert (federation.images[federation.public] == 9).all()
    assert federation.labels[federation.public].tolist() == [2, 0, 1]
    trained = SOURCE.images[: sum(SIZES)]
    np.testing.assert_allclose(federation.mean.ravel(), trained.mean(), rtol=1e-6)


# ---- images that are held out


@pytest.mark.parametrize("name", ["classes", "iid"])
def test_held_out_images_belong_to_no_client_and_come_from_every_class(name, tmp_path):
    def divided(share):
        options = {"classes_per_client": 2, "samples_per_client": 6} if name == "classes" else {}
        return partition.divide(
            SOURCE,
            lambda *arguments: PARTITIONS[name](*arguments, **options),
            4,
            0,
            test=TEST.get(name, "own"),
            validation_fraction=0.2,
            public=share,
        )

    held_out = divided(0.25)
    pool = SOURCE.train if TEST.get(name, "own") == "source" else np.ones(60, bool)
    expected = np.bincount(SOURCE.labels[pool]) // 4
    assert np.bincount(SOURCE.labels[held_out.public]).tolist() == expected.tolist()
    assert pool[held_out.public].all()
    rows = np.concatenate([*held_out.train, *held_out.validation, *held_out.test])
    assert not set(held_out.public) & set(rows) and len(set(held_out.public)) == expected.sum()

    saved_partition.save(tmp_path / "mine.npz", held_out, SOURCE)
    loaded = saved_partition.load(tmp_path / "mine.npz", SOURCE)
    assert loaded.public.dtype == np.int32 and loaded.public.tolist() == held_out.public.tolist()
    saved = {"partition": str(tmp_path / "mine.npz"), "clients": 4}
    assert len(divide(Setup.of(**saved), SOURCE).public) == expected.sum()
    assert not len(divide(Setup.of(public="none", **saved), SOURCE).public)
    with pytest.raises(JaxflError, match="--public held-out,share=0.2 does not change the saved partition"):
        check_setup(Setup.of(public="held-out,share=0.2", **saved))
    assert not len(divided(0.0).public)
    with pytest.raises(JaxflError, match="A share of 0.01 of every class holds out no row; raise it"):
        divided(0.01)


def test_images_are_held_out_if_a_method_needs_some():
    def chosen(*methods, **options):
        return provided(Setup.of(**options), map(choose, methods)).data.public

    assert chosen("fedavg") == "none"
    assert chosen("fedavg", "mnfl") == "held-out"
    assert chosen("mnfl", public="mnist,size=9") == "mnist,size=9"
    assert chosen("mnfl", partition="saved.npz") == "auto"  # the file decides
