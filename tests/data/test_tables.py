"""Tables with named columns: what is predicted, whose a row is, and what features columns become."""

import numpy as np
import pandas
import pytest

import jaxfl
from jaxfl.data.readers import absolute, load
from jaxfl.data.sources import numbers
from jaxfl.data.tables import _plain
from jaxfl.errors import JaxflError

HEAD = "rooms,kind,region,price\n"
ROWS = [
    f"{i % 5 + 1},{'flat' if i % 2 else 'house'},{'NORTH' if i < 20 else 'SOUTH'},{i + 0.5}"
    for i in range(40)
]
HOMES = HEAD + "\n".join(ROWS)


@pytest.fixture
def table(tmp_path):
    """Return a function that writes a table and returns its path."""

    def write(text=HOMES):
        path = tmp_path / "homes.csv"
        path.write_text(text)
        return str(path)

    return write


def test_numbers_stay_and_words_become_indicators(table):
    source = load(f"{table()},target=price,client=region")
    order = source.labels[:, 0].astype(int)  # its price says which row it was
    assert source.images.shape == (40, 1, 1, 3) and source.task.name == "regression"
    np.testing.assert_array_equal(source.images[:, 0, 0, 0], order % 5 + 1)
    np.testing.assert_array_equal(source.images[:, 0, 0, 1:], np.eye(2)[1 - order % 2])  # flat, house
    np.testing.assert_array_equal(source.columns["client"], np.where(order < 20, "NORTH", "SOUTH"))
    assert {"kind", "region", "rooms", "client"} == {*source.columns}


def test_words_and_integers_are_classes(table):
    path = table()
    source = load(f"{path},target=kind,without=price")
    assert (source.classes, source.class_names, source.task.name) == (2, ("flat", "house"), "classes")
    of_rooms = load(f"{path},target=rooms,without=price")
    assert of_rooms.class_names == ("1", "2", "3", "4", "5")
    assert load(f"{path},target=rooms", task="regression").labels.max() == 5


def test_several_columns_are_several_labels_or_targets(table):
    rows = [f"{i},{i % 2},{int(i % 3 == 0)},{i + 0.5}" for i in range(40)]
    path = table("x,rain,wind,heat\n" + "\n".join(rows))
    source = load(f"{path},target=rain+wind")
    order = source.images[:, 0, 0, 0].astype(int)
    assert (source.task.name, source.class_names) == ("labels", ("rain", "wind"))
    np.testing.assert_array_equal(source.labels, np.stack([order % 2 == 1, order % 3 == 0], 1))
    targets = load(f"{path},target=heat+x,without=rain").labels
    np.testing.assert_array_equal(targets[:, 0], targets[:, 1] + 0.5)


def test_words_that_only_test_rows_have_are_no_features(table):
    rows = [f"{row},{'test' if i >= 30 else 'train'}" for i, row in enumerate(ROWS)]
    rows[35] = rows[35].replace("flat", "tent")
    source = load(f"{table(HEAD.replace('price', 'price,split') + chr(10).join(rows))},target=price")
    assert source.images.shape[-1] == 1 + 2 + 2  # rooms, kind without tents, region
    tent = source.labels[:, 0] == 35.5
    assert (source.images[tent, 0, 0, 1:3] == 0).all() and (source.images[~tent, 0, 0, 1:3].sum(1) == 1).all()


def test_a_split_is_kept_and_rows_with_empty_fields_are_left_out_on_demand(table):
    rows = [f"{row},{'test' if i % 4 == 0 else 'train'}" for i, row in enumerate(ROWS)]
    rows[1] = rows[1].replace("flat", "")
    rows = [f"{row},{i % 3 if i != 2 else ''}" for i, row in enumerate(rows)]
    path = table(HEAD.replace("price", "price,split,shop") + "\n".join(rows))
    with pytest.raises(
        JaxflError, match=r"2 of 40 rows have an empty field \(kind, shop\); leave them out by .*missing=drop"
    ):
        load(f"{path},target=price")
    source = load(f"{path},target=price,missing=drop")
    assert len(source.labels) == 38 and (~source.train).sum() == 10 and source.divided
    assert source.columns["shop"].dtype == int  # although pandas had to fill a gap
    assert (source.labels[~source.train, 0].astype(int) % 4 == 0).all()
    where = numbers(source)  # in the file, whose rows 1 and 2 are left out
    np.testing.assert_array_equal(source.labels[:, 0], where + 0.5)


def test_a_split_may_be_true_for_training(table):
    rows = [f"{row},{i % 4 > 0}" for i, row in enumerate(ROWS)]
    source = load(f"{table(HEAD.replace('price', 'price,split') + chr(10).join(rows))},target=price")
    assert source.divided and source.images.shape[-1] == 1 + 2 + 2
    np.testing.assert_array_equal(source.train, source.labels[:, 0].astype(int) % 4 > 0)


def test_features_have_names_and_digits(table):
    source = load(f"{table()},target=price")
    assert source.features == ("rooms", "kind=flat", "kind=house", "region=NORTH", "region=SOUTH")
    late = [f"{row},{1.7e9 + i}" for i, row in enumerate(ROWS)]
    path = table(HEAD.replace("price", "price,seconds") + "\n".join(late))
    with pytest.raises(JaxflError, match="as float32 the column seconds loses up to 39, .* without=seconds"):
        load(f"{path},target=price")
    for power in 300, 999:
        far = [f"{row},{i}e{power}" for i, row in enumerate(ROWS)]
        path = table(HEAD.replace("price", "price,far") + "\n".join(far))
        with pytest.raises(JaxflError, match=r"has NaN or infinite values \(as float32\) among its examples"):
            load(f"{path},target=price")
    path = table("," + HEAD + "\n".join(f"{i},{row}" for i, row in enumerate(ROWS)))
    with pytest.raises(JaxflError, match="has a column without a name, .* by without=Unnamed: 0, or name it"):
        load(f"{path},target=price")
    assert load(f"{path},target=price,without=Unnamed: 0").features == source.features


def test_words_of_digits_stay_words_in_parquet():
    codes = pandas.Series(["1", "01"])
    assert _plain("codes.parquet", "code", codes).tolist() == ["1", "01"]
    assert _plain("codes.csv", "code", codes).tolist() == [1, 1]  # a row that was left out had a word


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("", "write which column is to be predicted, .*target=COLUMN; it has rooms, kind, region, price"),
        (",target=prices", "has no column 'prices'; did you mean 'price'"),
        (",target=price,client=owner", "has no column 'owner'"),
        (",target=price,goal=x", "has no option 'goal'"),
        (",target=price,without=rooms+kind+region", "has no column besides price"),
        (",target=price,client=price", "names the column 'price' twice"),
        (",target=price,columns=rooms+price", "has 4 columns, but columns= names 2"),
        (",target=price,length=4", "length is of texts; name their columns by text=, or leave it out"),
        (",columns=rooms+rooms+c+price,target=price", "columns= gives a name twice"),
        (",target=price,missing=mean", "missing must be refuse or drop, not 'mean'"),
    ],
)
def test_wrong_options_are_refused(table, options, sentence):
    with pytest.raises(JaxflError, match=sentence):
        load(table() + options)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cannot be read as a table"),
        ("a,b\n1,2\n1,2,3,4\n", "cannot be read as a table"),
        ("a,price\n", "has no rows to learn from"),
        ("a,split,price\n1,train,0.5\n1,Test,0.5", "split has 'Test' in place of train or test"),
        ("a,split,price\n1,Train,0.5\n1,Test,0.5", "split has 'Train' in place of"),
        ("a,price\n1,0.5,2\n2,1.5,3\n", "cannot be read as a table .*Length of header"),
        (
            "a,price\n" + "\n".join(f"{i if i else 'x'},{i}.5" for i in range(9)),
            "in 1 of 9 rows words, the first is 'x'",
        ),
        ("name,price\n" + "\n".join(f"word{i},{i}.5" for i in range(1300)), "name has 1040 different words"),
        (
            "a,price\n" + "\n".join(f"{i},{i}.0" for i in range(9)),
            "all of them whole: write --task regression",
        ),
    ],
)
def test_wrong_tables_are_refused(table, text, sentence):
    with pytest.raises(JaxflError, match=sentence):
        load(f"{table(text)},target=price")


def test_a_missing_file_and_an_absolute_name(table, monkeypatch):
    path = table()
    monkeypatch.chdir(path.rpartition("/")[0])
    assert absolute("homes.csv,target=price") == f"{path},target=price"
    with pytest.raises(JaxflError, match="There is no file"):
        load("house.csv,target=price")


def test_methods_learn_from_a_table(table, tmp_path):
    run = jaxfl.run(
        "fedavg",
        dataset=f"{table()},target=price,client=region",
        partition="natural,column=client",
        rounds=2,
        eval_every=1,
        quiet=True,
        run_dir=str(tmp_path / "run"),
    )
    assert run.partition.names == ("NORTH", "SOUTH")
    assert run.result["accuracy"]["task"] == "regression"
    assert np.isfinite(run.personal.per_client).all()
