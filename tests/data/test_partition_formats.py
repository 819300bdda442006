"""Partitions for other programs: their files hold the right rows, and JSON comes back unchanged."""

import json
import os
import pickle
import re
from functools import partial

import numpy as np
import pytest
from conftest import assert_same, tiny_partition, tiny_source, validating

from jaxfl.data import partition_formats
from jaxfl.data.normalisation import training_moments
from jaxfl.data.partition import divide
from jaxfl.data.partitioners import iid, natural
from jaxfl.data.readers import load
from jaxfl.data.shift import Drawn
from jaxfl.data.sources import column, from_arrays
from jaxfl.errors import JaxflError

SOURCE = tiny_source()


class Trap:
    """An object that makes a file when it is unpickled."""

    def __reduce__(self):
        """Return the call that pickle makes."""
        return open, ("sprung", "w")


PARTITION = tiny_partition(SOURCE)
MOMENTS = training_moments(SOURCE, PARTITION.train)


def test_json_comes_back_unchanged(tmp_path):
    relabel = PARTITION.relabel[:, [2, 0, 1]]
    validation = tuple(rows[1:3] for rows in PARTITION.train)
    train = tuple(np.delete(rows, [1, 2][: len(rows) - 1]) for rows in PARTITION.train)
    names = tuple("vwxyz")
    partition = PARTITION._replace(train=train, validation=validation, relabel=relabel, names=names)
    path = tmp_path / "rows.json"
    partition_formats.write_json(path, partition, SOURCE)
    assert_same(partition_formats.read(path, SOURCE), partition)
    # Another program's own file has neither relabelling nor public rows.
    content = json.loads(path.read_text())["data_indices"]
    path.write_text(json.dumps(content))
    plain = partition._replace(relabel=PARTITION.relabel, public=partition.public[:0], names=())
    assert_same(partition_formats.read(path, SOURCE), plain)
    with pytest.raises(JaxflError, match="does not fit tiny: it is for other labels"):
        path.write_text(json.dumps({"checksum": 7, "data_indices": content}))
        partition_formats.read(path, SOURCE)


def test_rows_in_json_have_their_numbers_in_the_data(tmp_path):
    """Rows are not renumbered when training rows are put first."""
    images, labels = np.arange(20, dtype=np.uint8).reshape(20, 1, 1, 1), np.arange(20) % 2
    source = from_arrays("mixed", images, labels, np.arange(20) % 5 > 0, 2)
    rows = '[{"train": [7, 1], "test": [10]}, {"train": [19], "test": [5, 0]}]'
    (tmp_path / "rows.json").write_text(f'{{"data_indices": {rows}, "public": [15, 3]}}')
    found = partition_formats.read(tmp_path / "rows.json", source)
    assert source.images[found.public].ravel().tolist() == [15, 3]
    pixels = [[source.images[rows].ravel().tolist() for rows in part] for part in (found.train, found.test)]
    assert pixels == [[[7, 1], [19]], [[10], [5, 0]]]
    assert column(source, "row").tolist() == source.images.ravel().tolist() != list(range(20))
    partition_formats.write_json(tmp_path / "again.json", found, source)
    written = json.loads((tmp_path / "again.json").read_text())
    assert [indices["test"] for indices in written["data_indices"]] == [[10], [5, 0]]
    assert written["public"] == [15, 3]
    assert_same(partition_formats.read(tmp_path / "again.json", source), found)
    again = from_arrays(*source)  # like a user's own source made from this one
    assert_same(again.images[partition_formats.read(tmp_path / "again.json", again).train[0]], images[[7, 1]])


def test_rows_of_some_classes_keep_their_numbers(tmp_path):
    """Other programs, which have the whole set, take the same images."""
    source = load("digits,classes=3+8")
    partition = divide(source, iid, 4, seed=0, test="own")
    partition_formats.write_json(tmp_path / "rows.json", partition, source)
    assert_same(partition_formats.read(tmp_path / "rows.json", source), partition)
    assert_same(partition_formats.read(tmp_path / "rows.json", from_arrays(*source)), partition)
    (tmp_path / "bare.json").write_text(
        json.dumps(json.loads((tmp_path / "rows.json").read_text())["data_indices"])
    )
    of_whole = partition_formats.read(tmp_path / "bare.json", load("digits"))
    assert_same(load("digits").images[of_whole.train[2]], source.images[partition.train[2]])
    (tmp_path / "bare.json").write_text('[{"train": [0], "test": [1]}]')
    with pytest.raises(JaxflError, match="names row 0, which digits,classes=3.8 does not have"):
        partition_formats.read(tmp_path / "bare.json", source)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[", "is not JSON"),
        ("3", "does not list each client's train, val and test; write "),
        ("[[1, 2]]", "to divide lists of clients' rows, use --partition listed,file="),
        (
            '[{"train": [0], "test": [60]}]',
            "names row 60, which tiny does not have; its 60 rows have numbers from 0 to 59",
        ),
        ('[{"train": [0], "test": ["x"]}]', "does not hold lists of rows"),
        ('[{"train": [0, 0], "test": [1]}]', "names a row twice"),
        ('[{"train": [0]}]', "Client 0 is left without test rows; in .* move some of its train there"),
        ('[{"test": [0]}, {"train": [], "test": [1]}]', "has no client with rows in train"),
        ('[{"train": [0, 1], "test": [1]}]', "client 0 has row 1 twice in train, val, test and public"),
        ('[{"train": [0], "val": [1], "test": [1]}]', "client 0 has row 1 twice"),
        (
            '[{"train": [0], "val": [1], "test": [2]}, {"train": [0], "test": [1]}]',
            "client 1 is tested on row 1, which client 0 has in train or val",
        ),
        (
            '{"data_indices": [{"train": [0], "test": [1]}], "names": ["a", "b"]}',
            "names is not a list of one name",
        ),
        ('[{"train": [0], "tset": [1]}]', "client 0 has 'tset'; did you mean 'test'"),
        ('{"public": [0], "data_indices": [{"train": [0], "test": [1]}]}', "client 0 has row 0 twice"),
        (
            '{"relabel": [[0, 0, 1]], "data_indices": [{"train": [0], "test": [1]}]}',
            "two classes the same number",
        ),
        (
            '{"data_indices": [{"train": [0], "test": [1]}], "relabel": [[0, 1, 3]]}',
            "does not number 3 classes",
        ),
        ('{"data_indices": [{"train": [0], "test": [1]}], "relabel": [[0], 1]}', "does not number 3 classes"),
    ],
)
def test_invalid_json_is_refused(tmp_path, content, sentence):
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(JaxflError, match=sentence):
        partition_formats.read(tmp_path / "rows.json", SOURCE)


def test_files_for_fl_bench_have_its_form(tmp_path):
    """A client without training rows only tests."""
    partition = PARTITION._replace(train=(*PARTITION.train[:4], PARTITION.train[4][:0]))
    partition_formats.write_fl_bench(tmp_path / "partition.pkl", partition, SOURCE)
    with (tmp_path / "partition.pkl").open("rb") as file:
        found = pickle.load(file)
    everyone = [0, 1, 2, 3, 4]
    assert found["separation"] == {"train": everyone[:4], "val": everyone, "test": everyone, "total": 5}
    for rows, train, test in zip(found["data_indices"], partition.train, partition.test, strict=True):
        assert rows == {"train": train.tolist(), "val": [], "test": test.tolist()}
    expected = partition._replace(public=partition.public[:0])
    assert_same(partition_formats.read(tmp_path / "partition.pkl", SOURCE), expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, ">i8"])
@pytest.mark.parametrize("protocol", [4, 5])  # Python's own before 3.14, and since
def test_partitions_of_fl_bench_are_read_without_unpickling_them(tmp_path, monkeypatch, dtype, protocol):
    """FL-bench itself writes arrays; what else a pickle can name is neither imported nor called."""
    path, own = tmp_path / "partition.pkl", zip(PARTITION.train, PARTITION.test, strict=True)
    indices = [{"train": a.astype(dtype), "val": np.array([], int), "test": b.astype(dtype)} for a, b in own]
    indices[0]["test"] = [*indices[0]["test"]]  # a list of numpy.int64
    path.write_bytes(pickle.dumps({"data_indices": indices, "separation": {"total": 5}}, protocol))
    assert_same(partition_formats.read(path, SOURCE), PARTITION._replace(public=PARTITION.public[:0]))
    monkeypatch.chdir(tmp_path)
    for value in (
        Trap(),
        {"data_indices": [Trap()]},
        [np.array([Trap()])],
        np.dtype("O"),
        {1, 2},
        1j,
        os.getcwd,
    ):
        path.write_bytes(pickle.dumps(value, protocol))
        with pytest.raises(JaxflError, match="partition.pkl is damaged, or holds more than lists and arrays"):
            partition_formats.read(path, SOURCE)
    whole = pickle.dumps(indices, protocol)
    for damaged in (b"", whole[:-9], whole.replace(b"train", b"trail"), re.sub(b"i[48]", b"O8", whole)):
        path.write_bytes(damaged)
        with pytest.raises(JaxflError):
            partition_formats.read(path, SOURCE)
    assert not (tmp_path / "sprung").exists()


def test_files_for_pfllib_hold_what_clients_see(tmp_path):
    drawn = Drawn(("rotate",), (np.array([0.0, 180.0, 0.0, 0.0, 0.0]),), 0)
    partition_formats.write_pfllib(tmp_path, PARTITION, SOURCE, "mine", drawn, MOMENTS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_clients"], config["num_classes"], config["partition"]) == (5, 3, "mine")
    training = SOURCE.images[np.concatenate(PARTITION.train)].astype(float)
    for client, flip in ((0, slice(None)), (1, slice(None, None, -1))):
        for part in ("train", "test"):
            rows = getattr(PARTITION, part)[client]
            found = np.load(tmp_path / part / f"{client}.npz", allow_pickle=True)["data"].tolist()
            images = (SOURCE.images[rows][:, flip, flip] - training.mean()) / training.std()
            np.testing.assert_allclose(found["x"], images.transpose(0, 3, 1, 2), atol=1e-4)
            assert (found["y"] == SOURCE.labels[rows]).all()
    counted = [sum(n for _, n in client) for client in config["Size of samples for labels in clients"]]
    assert counted == [len(a) + len(b) for a, b in zip(PARTITION.train, PARTITION.test, strict=True)]
    with pytest.raises(JaxflError, match="PFLlib has no validation rows"):
        partition_formats.require(["pfllib"], validating(PARTITION), SOURCE)
    with pytest.raises(JaxflError, match="the data are tokens"):
        partition_formats.require(["pfllib"], PARTITION, SOURCE._replace(vocabulary=9))


def test_a_folder_of_pfllib_is_a_data_set_of_natural_clients_with_its_split(tmp_path, monkeypatch):
    partition_formats.write_pfllib(tmp_path, PARTITION, SOURCE, "mine", None, MOMENTS)
    source = load(f"pfllib:{tmp_path}")
    assert (source.images.dtype, source.images.shape[1:], source.classes) == (np.float32, (8, 8, 1), 3)
    by = column(source, "client")
    found = divide(source, partial(natural, min_samples=1), None, 0, test="split", by=by)
    training = SOURCE.images[np.concatenate(PARTITION.train)].astype(float)
    for part in ("train", "test"):
        for rows, original in zip(getattr(found, part), getattr(PARTITION, part), strict=True):
            images = (SOURCE.images[original] - training.mean()) / training.std()
            np.testing.assert_allclose(source.images[np.sort(rows)], images, atol=1e-4)
            assert (source.labels[np.sort(rows)] == SOURCE.labels[original]).all()

    with pytest.raises(JaxflError, match="is a folder of PFLlib: --dataset pfllib:"):
        load(str(tmp_path))

    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train" / "3.npz"
    for data, sentence in [
        ({"x": Trap(), "y": np.zeros(1)}, "holds more than lists and arrays of numbers .*open"),
        ({"x": np.array([Trap()]), "y": np.zeros(1)}, "holds more than lists"),
        ({"x": [[1, 2]], "y": [0]}, "3.npz does not hold arrays x and y of equal length"),
        ([1], "3.npz does not hold arrays x and y"),
    ]:
        np.savez(file, data=np.array(data, object))
        with pytest.raises(JaxflError, match=sentence):
            load(f"pfllib:{tmp_path}")
    file.write_bytes(b"PK")
    with pytest.raises(JaxflError, match="3.npz is damaged or not a file of PFLlib"):
        load(f"pfllib:{tmp_path}")
    file.unlink()
    with pytest.raises(JaxflError, match="no file .*3.npz, although config.json counts its client"):
        load(f"pfllib:{tmp_path}")
    assert not (tmp_path / "sprung").exists()
