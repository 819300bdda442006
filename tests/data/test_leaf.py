"""Folders of LEAF: the rows of its users, its split, and what is refused."""

import json
from functools import partial

import numpy as np
import pytest

from jaxfl.data.partition import divide
from jaxfl.data.partitioners import natural
from jaxfl.data.readers import absolute, load
from jaxfl.data.sources import column
from jaxfl.errors import JaxflError

ROWS = {("ann", "train"): 3, ("bob", "train"): 2, ("ann", "test"): 1, ("bob", "test"): 2, ("eve", "test"): 2}
RNG = np.random.default_rng(0)
USERS = {key: (RNG.random((n, 15)), RNG.integers(0, 4, n)) for key, n in ROWS.items()}
USERS["ann", "test"][1][:] = 9  # the last class, without training rows; some have no row


@pytest.fixture
def folder(tmp_path):
    """Return a folder in which each user and part has a file."""
    for (user, part), (x, y) in USERS.items():
        write(tmp_path, part, {user: {"x": x.tolist(), "y": y.tolist()}})
    return tmp_path


def write(folder, part, users):
    sizes = [len(data["y"]) for data in users.values()]
    (folder / "data" / part).mkdir(parents=True, exist_ok=True)
    content = {"users": [*users], "num_samples": sizes, "user_data": users}
    (folder / "data" / part / f"{'-'.join(users)}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("shape", "sides"), [("", (1, 1, 15)), ("3x5", (3, 5, 1)), ("5x1x3", (5, 1, 3))])
@pytest.mark.parametrize("below", ["", "/data"])
def test_users_are_clients_with_their_rows_and_their_split(folder, shape, sides, below):
    source = load(f"leaf:{folder}{below}" + (shape and f",shape={shape}"))
    assert (source.images.shape[1:], source.classes, source.divided) == (sides, 10, True)
    natural_clients, by = partial(natural, min_samples=1), column(source, "client")
    found = divide(source, natural_clients, None, 0, test="split", by=by)
    assert found.names == ("ann", "bob", "eve")
    for user, train, test in zip(found.names, found.train, found.test, strict=True):
        for part, rows in (("train", train), ("test", test)):
            x, y = USERS.get((user, part), (np.zeros((0, 15)), []))
            expected = x.astype(np.float32).reshape(-1, *sides)
            np.testing.assert_array_equal(source.images[np.sort(rows)], expected)
            np.testing.assert_array_equal(source.labels[np.sort(rows)], y)


def test_a_name_holds_in_every_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert absolute("leaf:data,shape=3x5,classes=1") == f"leaf:{folder}/data,shape=3x5,classes=1"
    zeros = sum((y == 0).sum() for _, y in USERS.values())
    assert len(load("leaf:.,classes=0").labels) == zeros > 0


@pytest.mark.parametrize(
    ("x", "y", "options", "sentence"),
    [
        (["to be", "or not"], ["t", "t"], "", "x of zoe is no list of rows .* text, and images by their"),
        ([[0.5] * 15], [0, 1], "", "x of zoe is no list of rows of equally many numbers, one for each entry"),
        ([[0.5] * 15, [0.5]], [0, 1], "", "x of zoe is no list of rows"),
        ([[0.5] * 14], [0], "", r"the shapes of rows are \(14,\), \(15,\); all must have one"),
        ([[0.5] * 15], [0], ",shape=4x4", r"the shapes of rows are \(15,\); .* as shape= says"),
        ([[0.5] * 15], [0], ",shape=15", "write height and width, .* such as shape=28x28"),
        ([[1e300] * 15], [0], "", "NaN or infinite"),
        ([[0.5] * 15], [0], ",size=3", "has no option 'size'"),
    ],
)
def test_other_rows_are_refused(folder, x, y, options, sentence):
    write(folder, "train", {"zoe": {"x": x, "y": y}})
    with pytest.raises(JaxflError, match=sentence):
        load(f"leaf:{folder}{options}")


def test_other_files_are_refused(folder):
    file = folder / "data" / "train" / "ann.json"
    for content, sentence in ("[]", "ann.json has no user_data by user"), ("{", "ann.json is not JSON"):
        file.write_text(content)
        with pytest.raises(JaxflError, match=sentence):
            load(f"leaf:{folder}")
    with pytest.raises(JaxflError, match="train has no .json file; LEAF's preprocess.sh"):
        load(f"leaf:{folder}/data/test")
