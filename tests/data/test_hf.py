"""Hugging Face data sets: small ones made here and read from folders; nothing is downloaded."""

import io

import numpy as np
import pytest
from PIL import Image

from jaxfl.data.readers import absolute, load
from jaxfl.data.sources import column
from jaxfl.errors import JaxflError

datasets = pytest.importorskip("datasets")

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 4, 5), dtype=np.uint8)
LABELS = np.arange(12) % 3
WRITERS = [f"writer-{i // 4}" for i in range(12)]


def images(**others):
    """Return twelve pictures with two class labels and their writers; `others` replace columns."""
    columns = {
        "picture": [Image.fromarray(pixels) for pixels in PIXELS],
        "fine": LABELS.tolist(),
        "coarse": (LABELS // 2).tolist(),
        "writer": WRITERS,
        "note": [None, *WRITERS[1:]],
    } | others
    kinds = {
        "picture": datasets.Image(),
        "fine": datasets.ClassLabel(num_classes=4),
        "coarse": datasets.ClassLabel(num_classes=2),
        "writer": datasets.Value("string"),
        "note": datasets.Value("string"),
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def test_a_saved_set_is_read_with_its_train_and_test_splits(tmp_path):
    whole = images()
    split = {"test": whole.select([1, 5]), "train": whole.select([11, 0, 2, 3])}
    datasets.DatasetDict(split).save_to_disk(str(tmp_path / "set"))
    source = load(f"hf:{tmp_path}/set,label=fine")
    rows = [11, 0, 2, 3, 1, 5]
    assert (source.images[..., 0] == PIXELS[rows]).all() and source.images.dtype == np.uint8
    assert source.labels.tolist() == LABELS[rows].tolist() and source.classes == 4
    assert source.train.tolist() == [True] * 4 + [False] * 2
    assert source.columns.keys() == {"coarse", "writer", "note"}
    assert source.columns["writer"].tolist() == [WRITERS[row] for row in rows]


def test_sets_that_would_be_misread_are_refused(tmp_path):
    """Sets whose test split numbers classes differently, or with palette images, are refused."""
    kinds = [datasets.ClassLabel(names=names) for names in (["a", "b"], ["b", "a"])]
    parts = [
        datasets.Dataset.from_dict(
            {"x": np.zeros((4, 3, 2), np.uint8).tolist(), "label": [0, 1, 0, 1]},
            features=datasets.Features({"x": datasets.Array2D((3, 2), "uint8"), "label": kind}),
        )
        for kind in kinds
    ]
    datasets.DatasetDict({"train": parts[0], "test": parts[1]}).save_to_disk(str(tmp_path / "names"))
    with pytest.raises(JaxflError, match="label numbers its classes differently in test and train"):
        load(f"hf:{tmp_path}/names")
    datasets.DatasetDict({"train": parts[0], "test": parts[0]}).save_to_disk(str(tmp_path / "alike"))
    assert load(f"hf:{tmp_path}/alike").images.dtype == np.uint8
    images(picture=[Image.fromarray(pixels).convert("P") for pixels in PIXELS]).save_to_disk(
        str(tmp_path / "palette")
    )
    with pytest.raises(JaxflError, match="picture has images of mode P; convert them to L or RGB"):
        load(f"hf:{tmp_path}/palette,label=fine")


def test_a_whole_number_that_is_no_class_is_refused(tmp_path):
    """As -1 of rows without a label; two numbers may be -1 and 1."""

    def load_with(labels):
        rows = {"x": np.zeros((20, 3)).tolist(), "label": 5 * labels}
        datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / str(labels[1])))
        return load(f"hf:{tmp_path}/{labels[1]}")

    with pytest.raises(JaxflError, match="some rows have the label -1, which is no class"):
        load_with([-1, 0, 1, 1])
    assert load_with([-1, 1, 1, -1]).classes == 2


def test_vectors_with_labels_in_words_are_read_from_parquet(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    words = np.array(["sit", "walk"])[np.arange(10) % 2]
    x = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    made = datasets.Dataset.from_dict({"x": x.tolist(), "label": words.tolist()})
    (tmp_path / "set").mkdir()
    made.to_parquet(tmp_path / "set" / "train.parquet")
    source = load(f"hf:{tmp_path}/set")
    assert source.images.shape == (10, 1, 1, 3) and source.classes == 2
    order = np.argsort(x[:, 0]), np.argsort(source.images[:, 0, 0, 0])
    assert (source.labels[order[1]] == (words == "walk")[order[0]]).all()
    assert np.count_nonzero(~source.train) == 2  # a fifth


def test_a_column_of_text_becomes_words_of_training_rows(tmp_path):
    """Columns mean what they mean in a table; class labels keep their names."""
    rows = [f"{'They won' if i % 2 else 'Stocks fell'}, word{i}!" for i in range(12)]
    columns = {"title": rows, "topic": [i % 2 for i in range(12)], "grade": [i / 4 for i in range(12)]}
    kinds = datasets.Features(
        title=datasets.Value("string"),
        topic=datasets.ClassLabel(names=["money", "sports", "none"]),
        grade=datasets.Value("float64"),
    )
    whole = datasets.Dataset.from_dict(columns, features=kinds)
    split = {"train": whole.select(range(8)), "test": whole.select(range(8, 12))}
    datasets.DatasetDict(split).save_to_disk(str(tmp_path / "hf"))
    whole.to_pandas().assign(split=["train"] * 8 + ["test"] * 4).to_parquet(tmp_path / "table.parquet")
    options = ",text=title,length=4"
    source = load(f"hf:{tmp_path}/hf{options}")
    table = load(f"{tmp_path}/table.parquet{options},target=topic,without=grade")
    np.testing.assert_array_equal(source.images, table.images)
    assert source.words == table.words and source.classes == 3 and not source.columns
    assert source.class_names == ("money", "sports", "none")
    assert source.labels.tolist() == columns["topic"] and source.train.sum() == 8
    (again,) = source.encoded(["they fell"])
    assert [*map(source.words.__getitem__, again[:2])] == ["they", "fell"] and (again[2:] == -1).all()

    graded = load(f"hf:{tmp_path}/hf{options},label=grade")
    assert graded.task.name == "regression" and graded.labels[:, 0].tolist() == columns["grade"]
    assert graded.columns["topic"].tolist() == columns["topic"]
    both = load(f"hf:{tmp_path}/hf{options},label=topic+grade", task="regression")
    assert both.labels[:, 1].tolist() == columns["grade"] and both.class_names == ("topic", "grade")
    follows = load(f"hf:{tmp_path}/hf{options},tokens=characters", task="next-token")
    assert follows.class_names == follows.words and {len(word) for word in follows.words} == {1}
    whole.remove_columns(["topic", "grade"]).save_to_disk(str(tmp_path / "alone"))
    alone = load(f"hf:{tmp_path}/alone{options}")
    assert alone.task.name == "next-token" and (~alone.train).sum() == 3
    for wrong, sentence in (
        ("text=topic", "no column 'topic' of text; "),
        ("text=title,image=x", "keep the"),
    ):
        with pytest.raises(JaxflError, match=sentence):
            load(f"hf:{tmp_path}/hf,{wrong}")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("", "does not say which column is the label: fine, coarse; choose one by label=COLUMN"),
        (",label=fin", "has no column 'fin' of labels; did you mean 'fine'"),
        (",label=note", "1 of 12 rows have no 'note', the first is row 0"),
        (",image=writer", "has no column 'writer' of images or vectors; it has picture"),
        (",label=fine", r"picture has 2 sizes, such as \(3, 3\) and \(4, 5\)"),
    ],
)
def test_columns_that_do_not_fit_are_refused(tmp_path, options, sentence):
    odd = Image.fromarray(PIXELS[0, :3, :3])
    images(picture=[odd, *(Image.fromarray(pixels) for pixels in PIXELS[1:])]).save_to_disk(str(tmp_path))
    with pytest.raises(JaxflError, match=sentence):
        load(f"hf:{tmp_path}{options}")


def test_sets_that_cannot_be_loaded_are_refused(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(JaxflError, match=r"empty cannot be loaded \(.*\); check its files"):
        load(f"hf:{tmp_path}/empty")

    def offline(*_):
        raise ConnectionError("Couldn't reach the hub.\nat all")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        JaxflError, match=r"\(ConnectionError: Couldn't reach the hub\); check the name and the n"
    ):
        load("hf:nobody/nothing")


def test_a_relative_folder_becomes_an_absolute_one(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute("hf:set,label=fine") == f"hf:{tmp_path.resolve()}/set,label=fine"
    assert absolute("hf:nobody/set") == "hf:nobody/set"


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    whole = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(whole, "PNG")
    for number, bad in enumerate((b"not an image", whole.getvalue()[:-30])):
        rows = {"image": [{"bytes": whole.getvalue()}] * 3 + [{"bytes": bad}], "label": [0, 1, 0, 1]}
        datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(str(tmp_path / str(number)))
        with pytest.raises(JaxflError, match="the image of row 3 cannot be read"):
            load(f"hf:{tmp_path}/{number}")


@pytest.mark.parametrize("nothing", [None, ""])
def test_rows_without_an_owner_are_named(tmp_path, nothing):
    images(writer=[*WRITERS[:7], nothing, *WRITERS[8:]]).save_to_disk(str(tmp_path))
    source = load(f"hf:{tmp_path},label=fine")
    with pytest.raises(JaxflError, match="1 of 12 rows have no 'writer'"):
        column(source, "writer")
