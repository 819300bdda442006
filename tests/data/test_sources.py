"""Data sources: what is read and what is refused. All data are made here; nothing is downloaded."""

import io
import os
import re
import shutil
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from conftest import SIZES, tiny_models, tiny_partition, tiny_source, validating
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxfl
from jaxfl.data import folder, kept
from jaxfl.data.federate import federate
from jaxfl.data.normalisation import moments, training_moments
from jaxfl.data.public import Public
from jaxfl.data.readers import absolute, load
from jaxfl.data.sources import column, from_arrays, numbered, numbers
from jaxfl.errors import JaxflError


def random_images(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def check(source, train, test, shape, classes):
    """Assert the sizes and types, and the order that every source keeps."""
    assert source.images.shape == (train + test, *shape)
    assert source.labels.dtype == np.int32
    assert source.train.tolist() == [True] * train + [False] * test
    assert source.classes == classes


def test_a_fixed_stratified_fifth_of_digits_is_for_testing():
    source = load("digits")
    check(source, 1437, 360, (8, 8, 1), 10)
    assert source.images.dtype == np.uint8 and source.images.max() == 16
    in_test = np.bincount(source.labels[~source.train])
    assert abs(in_test / np.bincount(source.labels) - 0.2).max() < 0.01
    assert (load("digits").images == source.images).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32])
def test_moments_are_those_of_each_channel_of_some_images(dtype):
    images = random_images(1100, 3, 2, 3).astype(dtype)
    images[..., 1] = 7  # never changes
    rows = np.random.default_rng(1).permutation(1100)[:1030]  # more than are processed at once
    mean, std = moments(images, rows)
    some = images[rows]
    assert mean.shape == std.shape == (1, 1, 1, 3)
    np.testing.assert_allclose(mean.ravel(), some.mean((0, 1, 2), dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(
        std.ravel()[[0, 2]], some[..., [0, 2]].std((0, 1, 2), dtype=np.float64), rtol=1e-12
    )
    assert std.ravel()[1] == 1


def test_images_are_normalised_by_those_on_which_clients_train():
    """Whatever the source's split says; other rows have no effect, and public images get the same moments."""
    source, models = tiny_source(), tiny_models()[:1]
    partition = validating(tiny_partition(source, SIZES[:3]))
    rows = np.concatenate(partition.train)
    elsewhere = source.images.copy()
    elsewhere[np.setdiff1d(np.arange(60), rows)] = 255
    mean, std = source.images[rows].mean(), source.images[rows].std()
    for images in source.images, elsewhere:
        federation = federate(source._replace(images=images), partition, models)
        np.testing.assert_allclose([federation.mean.item(), federation.std.item()], [mean, std], rtol=1e-6)
    foreign = Public(np.full((4, 8, 8, 1), 255, np.uint8), np.zeros(4, np.int32), labelled=False)
    beside = federate(source, partition, models, public=foreign)
    expected = np.full((4, 8, 8, 1), (255 - mean) / std)
    np.testing.assert_allclose(beside.inputs(beside.public), expected, rtol=1e-5)
    twice = partition._replace(train=(*partition.train, partition.train[0]))
    np.testing.assert_array_equal(
        training_moments(source, twice.train)[:2], training_moments(source, partition.train)[:2]
    )


@pytest.mark.parametrize(("normalise", "axes"), [("channel", (0, 1, 2)), ("feature", 0), ("none", None)])
def test_normalisation_is_a_choice(normalise, axes, tmp_path):
    """The run keeps it, its deployed models use it, and the rows that nobody trains on have no part in it."""
    images, labels = np.random.default_rng(0).normal(3, 2, (40, 5, 4, 2)), np.arange(40) % 2
    name = write(tmp_path / "some.npz", images=images, labels=labels, split=np.arange(40) < 30)
    source, train = load(name), [np.arange(9), np.arange(5, 25)]
    mean, std, _ = training_moments(source, train, normalise)
    known = source.images[:25].astype(float)
    expected = (0, 1) if axes is None else (known.mean(axes), known.std(axes))
    for found, wanted in zip((mean, std), expected, strict=True):
        np.testing.assert_allclose(found[0], np.broadcast_to(wanted, found.shape[1:]), rtol=1e-6)
    options = dict(clients=2, partition="iid", models=["mlp"], rounds=1, test="source", quiet=True)
    run = jaxfl.run("local", dataset=name, normalise=normalise, run_dir=str(tmp_path / "run"), **options)
    rows = run.partition.test[1]
    said = run.models[1].predict(run.source.images[rows])
    assert (said == run.source.labels[rows]).mean() == pytest.approx(run.models[1].accuracy)
    trained = run.source.images[np.unique(np.concatenate(run.partition.train))].astype(float)
    kept = np.reshape(run.config["data"]["mean"], (5, 4, 2) if normalise == "feature" else (2,))
    np.testing.assert_allclose(kept, trained.mean(axes) if axes is not None else 0, rtol=1e-5)


def test_digits_are_those_of_scikit_learn():
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    _, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    source, train = load("digits"), ~np.isin(np.arange(len(labels)), test)
    np.testing.assert_array_equal(source.images, np.r_[pixels[train], pixels[~train]].reshape(-1, 8, 8, 1))
    np.testing.assert_array_equal(source.labels, np.r_[labels[train], labels[~train]])


# --- some of the classes


@pytest.mark.parametrize(
    ("chosen", "rows", "labels"),
    [("1-2", [4, 1, 3, 5], [1, 0, 0, 1]), ("3+0", [2, 0], [1, 0]), ("0-1+3", [2, 0, 1, 3], [2, 0, 1, 1])],
)
def test_some_classes_of_a_set_are_numbered_anew(tmp_path, chosen, rows, labels):
    images, split = random_images(6, 4, 5), np.array(["test", "test", "train", "test", "train", "test"])
    arrays = {"images": images, "labels": [0, 1, 3, 1, 2, 2], "split": split, "owner": np.arange(6) * 2}
    source = load(write(tmp_path / "mine.npz", **arrays) + f",classes={chosen}")
    train = (split[rows] == "train").sum()  # training rows first
    check(source, train, len(rows) - train, (4, 5, 1), len(set(labels)))
    assert (source.images[..., 0] == images[rows]).all()
    assert source.labels.tolist() == labels
    assert source.columns["owner"].tolist() == [row * 2 for row in rows]
    assert column(source, "row").tolist() == rows


def test_names_end_in_classes(tmp_path, monkeypatch):
    assert load("digits,classes=0-4").name == "digits,classes=0-4"
    assert load("digits , classes = 9").classes == 1
    prepare(tmp_path, "mnist", random_images(4, 28, 28, 1), label=[0, 7, 8, 9])
    source = load("mnist,classes=7-9", tmp_path)
    assert (source.name, source.classes, source.labels.max()) == ("mnist,classes=7-9", 3, 2)
    write(tmp_path / "a.npz", images=IMAGES, labels=LABELS)
    monkeypatch.chdir(tmp_path)
    assert absolute("a.npz,classes=1") == f"{tmp_path}/a.npz,classes=1"
    assert absolute("digits,classes=7-9") == "digits,classes=7-9"
    write(tmp_path / "b,classes=0.npz", images=IMAGES, labels=LABELS)
    (tmp_path / "c,classes=0").mkdir()
    (tmp_path / "b,classes=0.npz").rename(tmp_path / "c,classes=0" / "b.npz")
    assert load("c,classes=0/b.npz").classes == load("c,classes=0/b.npz,classes=0-1").classes == 2
    with pytest.raises(JaxflError, match="'a.npz,classes=1,classes=0' gives classes twice"):
        load("a.npz,classes=1,classes=0")
    np.savez(tmp_path / "bare.npz", images=IMAGES)
    with pytest.raises(JaxflError, match="lacks labels"):  # even as public images
        load("bare.npz,classes=0", labelled=False)


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ("", "classes=: write numbers and ranges"),
        ("a-c", "classes=a-c: write numbers and ranges, such as 0-4"),
        ("5-10", "there is no class 10; the last is 9"),
        ("99-2", "write each range upwards"),
        ("4-2", "each range upwards"),
        ("0-4+3", "each class once"),
    ],
)
def test_classes_that_are_not_there_are_refused(chosen, sentence):
    with pytest.raises(JaxflError, match=f"digits: .*{re.escape(sentence)}"):
        load(f"digits,classes={chosen}")


# --- .npz


def write(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize("words", [True, False])
def test_npz_with_a_split_is_read_with_training_rows_first(tmp_path, words):
    images, labels = random_images(6, 4, 5), np.array([2, 0, 1, 0, 1, 2])
    train = np.array([True, False, True, True, False, True])
    split = np.where(train, "train", "test") if words else train
    source = load(write(tmp_path / "mine.npz", images=images, labels=labels, split=split))
    check(source, 4, 2, (4, 5, 1), 3)
    order = [0, 2, 3, 5, 1, 4]  # training rows first, each part in the order of the file
    assert (source.images[..., 0] == images[order]).all()
    assert (source.labels == labels[order]).all()


def test_npz_of_floats_without_a_split_gets_one(tmp_path):
    images = random_images(20, 2, 2, 3) / 255
    source = load(write(tmp_path / "mine.npz", images=images, labels=np.arange(20) % 2))
    check(source, 16, 4, (2, 2, 3), 2)
    assert source.images.dtype == np.float32
    assert np.bincount(source.labels[~source.train]).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("labels", "tested"),
    [
        ([0] * 10 + [1] * 10 + [2], [2, 2, 0]),  # a class with one row
        (np.repeat(np.arange(30), 3), [0] * 30),  # many small classes
    ],
)
def test_small_classes_need_no_test_rows(tmp_path, labels, tested):
    images = random_images(len(labels), 2, 2)
    source = load(write(tmp_path / "mine.npz", images=images, labels=labels))
    assert np.bincount(source.labels[~source.train], minlength=source.classes).tolist() == tested
    assert not source.divided
    several = load(str(tmp_path / "mine.npz") + ",classes=0-1")
    assert np.bincount(several.labels[~several.train], minlength=2).tolist() == tested[:2]


def test_npz_of_vectors_keeps_columns_that_say_whose_a_row_is(tmp_path):
    features, labels = np.random.default_rng(0).normal(size=(20, 7)), np.arange(20) % 2
    whose, split = np.array(["ann", "bob"])[np.arange(20) // 10], np.arange(20) % 4 > 0
    arrays = {"features": features, "labels": labels, "split": split, "user": whose, "weight": features[:, 0]}
    source = load(write(tmp_path / "mine.npz", **arrays))
    check(source, 15, 5, (1, 1, 7), 2)
    order = np.append(np.flatnonzero(split), np.flatnonzero(~split))
    assert (source.images[:, 0, 0] == features[order].astype(np.float32)).all()
    assert source.columns.keys() == {"user"}  # not weight: floats do not say whose a row is
    assert (source.columns["user"] == whose[order]).all()
    with pytest.raises(JaxflError, match=r"column user is <U3 of shape \(19,\); give each of 20 rows"):
        load(write(tmp_path / "short.npz", **arrays | {"user": whose[1:]}))
    whole = load(write(tmp_path / "whole.npz", features=np.arange(40).reshape(20, 2), labels=labels))
    assert whole.images.dtype == np.float32
    assert (whole.images[:, 0, 0, 0] == 2 * numbers(whole)).all() and (np.diff(numbers(whole)) < 0).any()


IMAGES = random_images(10, 2, 2)
LABELS = np.arange(10) % 2


@pytest.mark.parametrize("signals", [3, 7])  # as many as steps are no grey images
def test_windows_of_signals_are_images_of_one_row_normalised_by_channel(tmp_path, signals):
    windows, labels = np.random.default_rng(0).integers(-9, 9, (20, 7, signals)), np.arange(20) % 2
    source = load(write(tmp_path / "windows.npz", windows=windows, labels=labels, split=np.ones(20, bool)))
    assert source.images.shape == (20, 1, 7, signals) and source.images.dtype == np.float32
    mean, std, _ = training_moments(source, [np.arange(20)])
    np.testing.assert_allclose([mean.ravel(), std.ravel()], [windows.mean((0, 1)), windows.std((0, 1))])


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"images": IMAGES}, "lacks labels; it holds images"),
        ({"images": IMAGES[0], "labels": LABELS}, r"images have shape \(2, 2\); .* features are \(N, d\)"),
        ({"features": IMAGES, "labels": LABELS}, r"shape \(10, 2, 2\); .* windows are \(N, T, C\)"),
        ({"images": IMAGES, "windows": IMAGES, "labels": LABELS}, "holds images and windows; keep the one"),
        ({"labels": LABELS}, "lacks images, features, windows or tokens; it holds labels"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "at least one of each"),
        ({"images": IMAGES.astype(int), "labels": LABELS}, "images are int64"),
        ({"images": np.full((10, 2, 2), np.nan), "labels": LABELS}, "NaN or infinite"),
        ({"images": np.full((10, 2, 2), 1e300), "labels": LABELS}, "NaN or infinite"),
        ({"images": IMAGES, "labels": LABELS[:9]}, r"shape \(9,\), not \(10,\)"),
        ({"images": IMAGES, "labels": LABELS[:, None]}, r"labels have shape \(10, 1\)"),
        ({"images": IMAGES, "labels": LABELS / 1}, "labels are float64"),
        ({"images": IMAGES, "labels": LABELS - 1}, "run from -1 to 0"),
        ({"images": IMAGES, "labels": LABELS + 1}, "run from 1 to 2, but 2 classes"),
        ({"images": IMAGES, "labels": LABELS + 2**40 * LABELS}, "numbered from 0 to 1"),
        ({"images": IMAGES, "labels": LABELS, "split": LABELS}, "split \\(train of a Source\\) must say"),
        (
            {"images": IMAGES, "labels": LABELS, "split": np.full(10, "dev")},
            "split \\(train of a Source\\) must say",
        ),
        (
            {"images": IMAGES, "labels": LABELS, "split": np.full(9, True)},
            "split \\(train of a Source\\) must say",
        ),
        ({"images": IMAGES, "labels": LABELS.astype(object)}, "not an .npz file of plain arrays"),
    ],
)
def test_invalid_npz_arrays_are_refused(tmp_path, arrays, sentence):
    with pytest.raises(JaxflError, match=sentence):
        load(write(tmp_path / "mine.npz", **arrays))


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((10, 3, 16, 16), False),
        ((10, 1, 8, 8), False),
        ((10, 4, 20, 12), False),
        ((10, 16, 16, 3), True),
        ((10, 1, 128, 9), True),  # a signal of nine channels
        ((10, 3, 4, 8), True),
    ],
)
def test_images_with_channels_first_are_refused(tmp_path, shape, fits):
    np.savez(tmp_path / "x.npz", images=np.zeros(shape, np.uint8), labels=np.arange(10) % 2)
    if fits:
        assert load(str(tmp_path / "x.npz")).images.shape == shape
        return
    with pytest.raises(JaxflError, match=rf"{shape[3]} channels, but looks like .* images.transpose"):
        load(str(tmp_path / "x.npz"))


def test_unreadable_npz_files_are_refused(tmp_path):
    path = tmp_path / "mine.npz"
    with pytest.raises(JaxflError, match="There is no file"):
        load(str(path))
    write(path, images=random_images(99, 4, 4), labels=np.zeros(99, int))
    whole = path.read_bytes()
    one_array = io.BytesIO()
    np.save(one_array, IMAGES)
    flipped = whole[:600] + b"????" + whole[604:]
    for content in (b"", b"images", whole[:-100], flipped, one_array.getvalue()):
        path.write_bytes(content)
        with pytest.raises(JaxflError, match="damaged or not an .npz file"):
            load(str(path))


# --- folders of images


def write_images(folder, images):
    folder.mkdir(parents=True)
    for number, pixels in enumerate(images):
        Image.fromarray(pixels).save(folder / f"{number}.png")


def test_a_folder_with_one_sub_folder_per_class_is_read(tmp_path):
    dogs, cats = random_images(2, 10, 4, 6, 3)
    write_images(tmp_path / "dog", dogs)
    write_images(tmp_path / "cat", cats)
    (tmp_path / "dog" / ".hidden").write_text("not an image")
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "__MACOSX" / "._1.png").write_text("not an image")
    source = load(str(tmp_path))
    check(source, 16, 4, (4, 6, 3), 2)
    assert (source.images[source.labels == 0].sum(0) == cats.sum(0)).all()


def test_a_photograph_is_turned_as_its_camera_says(tmp_path):
    (upright,) = random_images(1, 4, 4, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned clockwise
    Image.fromarray(np.rot90(upright)).save(tmp_path / "0.png", exif=exif)
    assert (load(str(tmp_path), labelled=False).images[0] == upright).all()


def test_classes_have_the_names_that_the_data_give_them(tmp_path):
    labels = np.array(["owl", "cat", "dog", "cat", "owl"])
    mine = write(tmp_path / "mine.npz", images=IMAGES[:5], labels=labels, split=np.arange(5) < 3)
    source = load(mine)
    assert (source.labels.tolist(), source.class_names) == ([2, 0, 1, 0, 2], ("cat", "dog", "owl"))
    some = load(f"{mine},classes=0+2")
    assert (some.labels.tolist(), some.class_names) == ([1, 0, 0, 1], ("cat", "owl"))
    for word in ("dog", "cat"):
        write_images(tmp_path / "photos" / word, random_images(5, 4, 4))
    assert load(str(tmp_path / "photos")).class_names == ("cat", "dog")
    stars = write(tmp_path / "stars.npz", images=IMAGES, labels=np.array(["10", "2"])[LABELS])
    assert load(f"{stars},classes=2+10").class_names == ("10", "2")  # names that are numbers
    assert load(f"{stars},classes=10").class_names == ("10",)
    with pytest.raises(JaxflError, match="there is no class 1; the last is 10"):
        load(f"{stars},classes=0-1")
    with pytest.raises(JaxflError, match="1 of 5 rows have no 'labels', the first is row 2"):
        load(write(tmp_path / "gap.npz", images=IMAGES[:5], labels=np.where(labels == "dog", "", labels)))
    with pytest.raises(JaxflError, match="mine names 1 of 2 classes"):
        from_arrays("mine", IMAGES, LABELS, LABELS == 0, 2, class_names=["a"])


def test_decoded_data_are_kept_until_their_files_change(tmp_path, monkeypatch):
    images, reads, read = random_images(12, 4, 5, 3), [], folder.read_source
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "LEAST", 0)

    def filled(*given):
        return read(*given)._replace(vocabulary=7)  # a field that folders leave empty

    monkeypatch.setattr(folder, "read_source", lambda *given: reads.append(given) or filled(*given))
    for place, word in enumerate(("cat", "dog")):
        write_images(tmp_path / "photos" / word, images[6 * place :][:6])

    def loaded(number):
        """Load the folder, which must be read for the so many-th time, or not again."""
        source, straight = load(str(tmp_path / "photos")), filled("straight", tmp_path / "photos")
        assert len(reads) == number and source.name == str(tmp_path / "photos")
        for field, ours, theirs in zip(source._fields[1:], source[1:], straight[1:], strict=True):
            if field == "columns":
                assert ours.keys() == theirs.keys() and (ours["file"] == theirs["file"]).all()
            else:
                np.testing.assert_array_equal(ours, theirs)
                assert np.asarray(ours).dtype == np.asarray(theirs).dtype

    loaded(1)
    loaded(1)
    Image.fromarray(255 - images[3]).save(tmp_path / "photos" / "cat" / "3.png")
    os.utime(tmp_path / "photos" / "cat" / "3.png", (1, 1))
    loaded(2)
    (file,) = (tmp_path / "cache" / "jaxfl" / "data").iterdir()  # one for a data set, complete
    whole = file.read_bytes()
    for number, content in enumerate((b"", whole[:-9], whole[:600] + b"??" + whole[602:]), 3):
        file.write_bytes(content)
        loaded(number)
        assert file.read_bytes() == whole
    (tmp_path / "photos" / "dog" / "5.png").rename(tmp_path / "photos" / "dog" / "10.png")
    loaded(6)
    file.unlink()
    file.mkdir()  # which cannot be replaced
    loaded(7)
    loaded(8)
    assert [*file.parent.iterdir()] == [file]


def test_a_folder_with_train_and_test_is_read(tmp_path):
    images = random_images(3, 4, 4)  # grey
    write_images(tmp_path / "train" / "cat", images[:1])
    write_images(tmp_path / "train" / "dog", images[1:2])
    write_images(tmp_path / "test" / "dog", images[2:])
    source = load(str(tmp_path))
    check(source, 2, 1, (4, 4, 1), 2)
    assert source.labels.tolist() == [0, 1, 1]
    assert source.columns["file"].tolist() == ["train/cat/0.png", "train/dog/0.png", "test/dog/0.png"]
    assert (source.images[..., 0] == images).all()


def test_public_images_need_no_labels(tmp_path):
    images, flat = random_images(6, 8, 9), tmp_path / "flat"
    flat.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(flat / f"{number}.png")
    np.savez(tmp_path / "public.npz", images=images)
    for path in (flat, tmp_path / "public.npz"):
        source = load(str(path), labelled=False)
        check(source, 6, 0, (8, 9, 1), 1)
        np.testing.assert_array_equal(source.images[..., 0], images)
        with pytest.raises(JaxflError, match="lacks labels|give every class a sub-folder"):
            load(str(path))
    np.savez(tmp_path / "some.npz", images=images, split=["test"] * 4 + ["train"] * 2)
    check(load(str(tmp_path / "some.npz"), labelled=False), 2, 4, (8, 9, 1), 1)
    np.savez(tmp_path / "none.npz", images=np.uint8(3))
    with pytest.raises(JaxflError, match=r"images have shape \(\); images are"):
        load(str(tmp_path / "none.npz"), labelled=False)


def test_invalid_folders_are_refused(tmp_path):
    write_images(tmp_path / "half" / "train" / "dog", random_images(2, 4, 4))
    with pytest.raises(JaxflError, match="has train, but no test beside it"):
        load(str(tmp_path / "half"))
    for part in ("test", "val"):
        shutil.copytree(tmp_path / "half" / "train", tmp_path / "half" / part)
    with pytest.raises(JaxflError, match="has val beside train and test, but only these two are read"):
        load(str(tmp_path / "half"))
    shutil.rmtree(tmp_path / "half")
    (tmp_path / "cat").mkdir()
    with pytest.raises(JaxflError, match="has no images"):
        load(str(tmp_path))
    write_images(tmp_path / "dog", random_images(2, 4, 4))
    for content, sentence in [
        (Image.fromarray(random_images(4, 5)), r"\(4, 5\), but .*0.png has \(4, 4\)"),
        (Image.fromarray(random_images(4, 4, 3)), "one size and mode"),
        (Image.fromarray(random_images(4, 4, 4)), "mode RGBA"),
        (b"GIF89a", "cannot be read as an image"),
    ]:
        path = tmp_path / "dog" / "9.png"
        path.write_bytes(content) if isinstance(content, bytes) else content.save(path)
        with pytest.raises(JaxflError, match=sentence):
            load(str(tmp_path))


# --- tensorflow-datasets, written by its own writer in the format that it prepares


def prepare(data_dir, name, images, **labels):
    """Write `images` as both train and test split of a set that tensorflow-datasets knows."""

    def png(pixels):
        file = io.BytesIO()
        Image.fromarray(pixels.squeeze()).save(file, "PNG")
        file.seek(0)
        return file

    def example(i):
        extra = {"id": str(i)} if "id" in builder.info.features else {}
        return {"image": png(images[i])} | {k: v[i] for k, v in labels.items()} | extra

    builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
    builder.data_path.mkdir(parents=True)
    writer = tfds.core.SequentialWriter(builder.info, len(images), file_format="array_record")
    writer.initialize_splits(["train", "test"])
    for split in ("train", "test"):
        writer.add_examples({split: [example(i) for i in range(len(images))]})
    writer.close_all()
    return builder.data_path


def test_a_tfds_set_with_two_labels_is_read_by_either(tmp_path, capsys):
    images = random_images(3, 32, 32, 3)
    fine, coarse = [7, 99, 0], [1, 19, 1]
    prepare(tmp_path, "cifar100", images, label=fine, coarse_label=coarse)
    source = load("cifar100", tmp_path)
    check(source, 3, 3, (32, 32, 3), 100)
    assert (source.images == np.concatenate([images, images])).all()
    assert source.labels.tolist() == fine * 2
    source = load("cifar100:coarse_label", str(tmp_path))
    check(source, 3, 3, (32, 32, 3), 20)
    assert source.labels.tolist() == coarse * 2
    with pytest.raises(JaxflError, match="no class label 'rough'; it has coarse_label, label"):
        load("cifar100:rough", tmp_path)
    assert capsys.readouterr() == ("", "")


def test_a_tfds_set_with_a_configuration_is_read(tmp_path):
    images = random_images(2, 28, 28, 1)
    prepare(tmp_path, "emnist/byclass", images, label=[61, 3])
    source = load("emnist/byclass", tmp_path)
    check(source, 2, 2, (28, 28, 1), 62)
    assert (source.images[:2] == images).all()


def test_a_tfds_set_without_a_test_split_gets_one(tmp_path):
    folder = prepare(tmp_path, "mnist", random_images(10, 28, 28, 1), label=[0, 1] * 5)
    info = tfds.builder("mnist", data_dir=tmp_path).info
    info.set_splits(tfds.core.SplitDict([info.splits["train"]]))
    info.write_to_directory(folder)
    check(load("mnist", tmp_path), 8, 2, (28, 28, 1), 10)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cifar1o", "neither a file, a folder nor .* did you mean .cifar10."),
        ("digit", "did you mean .digits."),
        ("./photos", r"neither a file, a folder nor .* none of the \d+ known names is similar"),
        ("emnist/byclas", "no configuration 'byclas'; did you mean .byclass."),
        ("cifar10", r"cifar10 is not prepared in .*cifar10.*pip install '\.\[tfds-prepare\]'"),
    ],
)
def test_invalid_tfds_names_are_refused(tmp_path, name, sentence):
    with pytest.raises(JaxflError, match=sentence):
        load(name, tmp_path)


def test_damaged_tfds_sets_are_refused(tmp_path):
    folder = prepare(tmp_path, "mnist", random_images(2, 28, 28, 1), label=[0, 1])
    records, info = folder / "mnist-test.array_record-00000", folder / "dataset_info.json"
    assert records.exists()
    records.write_bytes(b"damaged")
    with pytest.raises(JaxflError, match="test split in .* is damaged"):
        load("mnist", tmp_path)
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(JaxflError, match="as tfrecord, which only TensorFlow reads"):
        load("mnist", tmp_path)
    info.write_text("{")
    with pytest.raises(JaxflError, match="description of mnist is damaged"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("further", "sentence"),
    [
        ({"columns": None}, "columns of a Source must be a dict of arrays by name, not None"),
        ({"columns": {"device": LABELS[:9]}}, "give each of 10 rows an integer or a word"),
        ({"classes": "2"}, "classes must be the number of classes, at most 100,000, but is '2'"),
        ({"classes": 10**9}, "at most 100,000, but is 1000000000"),
        ({"images": np.ma.masked_equal(np.arange(10.0)[:, None], 3)}, "images: values are masked"),
        ({"images": [[1.0, 2.0], [3.0]]}, "images: lists of different lengths; give one array"),
        ({"train": [[True], []]}, "train: lists of different lengths"),
        ({"numbers": np.arange(12)}, r"each of its 10 rows came from, but have shape \(12,\)"),
    ],
)
def test_a_source_with_invalid_fields_is_refused(further, sentence):
    arrays = {"images": IMAGES, "labels": LABELS, "train": LABELS == 0, "classes": 2}
    with pytest.raises(JaxflError, match=sentence):
        from_arrays("mine", **arrays | further)


def test_words_may_be_objects_as_in_pandas():
    words = np.array(["cat", "owl"], object)[LABELS]
    source = from_arrays("mine", IMAGES, words, LABELS == 0, 0, {"of": words})
    assert source.class_names == ("cat", "owl") and (source.columns["of"] == np.sort(words)).all()
    with pytest.raises(JaxflError, match="the column of is object"):
        from_arrays("mine", IMAGES, LABELS, LABELS == 0, 2, {"of": np.where(LABELS, words, None)})


def test_small_windows_of_a_signal_are_images_of_height_one():
    """Windows are not taken for grey images in PyTorch's order, which are square or larger."""

    def held(*shape):
        labels = np.arange(50) % 2
        return from_arrays("windows", random_images(50, *shape), labels, labels == 0, 2)

    assert held(1, 16, 9).images.shape == (50, 1, 16, 9)
    for shape in (1, 8, 8), (1, 28, 20):
        with pytest.raises(JaxflError, match=r"looks like \(N, C, H, W\)"):
            held(*shape)


def test_a_hugging_face_set_without_their_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(JaxflError, match=r"needs the package datasets.*pip install '\.\[hf\]'"):
        load("hf:nobody/nothing")


def test_labels_in_brackets_are_taken_out_of_them():
    """Not turned into zeros by argmax, which is for rows of zeros and a one."""
    labels = np.arange(10) % 2
    for given, mend in (labels[:, None], ".ravel()"), (np.eye(2, dtype=int)[labels], ".argmax(1)"):
        with pytest.raises(JaxflError, match=re.escape(mend)):
            from_arrays("x", random_images(10, 4, 4), given, None, 2)


def test_windows_of_many_channels_are_no_images():
    """(N, 1, T, C) floats of unequal sides are a signal; bytes and squares may be images."""
    images = random_images(50, 1, 64, 40)
    labels = np.arange(50) % 2
    assert from_arrays("eeg", images.astype(np.float32), labels, None, 2).images.shape == images.shape
    for others in images, random_images(50, 1, 64, 64).astype(np.float32):
        with pytest.raises(JaxflError, match=r"looks like \(N, C, H, W\)"):
            from_arrays("pictures", others, labels, None, 2)


def test_classes_chosen_twice_in_other_words_are_the_same():
    assert numbered("0-4+8") == numbered("8+4+0-3") == [0, 1, 2, 3, 4, 8]
