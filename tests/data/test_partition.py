"""Partitions: properties of every partitioner, division into parts, files, the picture."""

import contextlib
import json
from functools import partial

import numpy as np
import pytest
from conftest import tiny_models, tiny_partition, tiny_source
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from jaxfl.config.options import described, explained
from jaxfl.config.setup import PartitionOptions, is_edges, is_saved
from jaxfl.data import partition, partition_formats, saved_partition
from jaxfl.data.federate import federate
from jaxfl.data.generators import TEST as TEST_STREAM
from jaxfl.data.generators import generator
from jaxfl.data.partition import divide
from jaxfl.data.partitioners import (
    PARTITIONS,
    TEST,
    classes,
    dirichlet,
    dirichlet_flbench,
    iid,
    listed,
    natural,
    power_law,
    quantity,
    rule_of_test,
    shards,
)
from jaxfl.data.pictures import draw
from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError
from jaxfl.models import zoo

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=30, deadline=None)


def labels_of(seed, rows, classes):
    """Return unbalanced labels in random order, with at least one row of each class."""
    rng = np.random.default_rng(seed)
    drawn = rng.choice(classes, rows - classes, p=rng.dirichlet(np.full(classes, 3.0)))
    return rng.permutation(np.append(np.arange(classes), drawn)).astype(np.int32)


def sizes(parts):
    return np.array([len(part) for part in parts])


def is_disjoint(parts):
    return len(np.unique(np.concatenate(parts))) == sizes(parts).sum()


# --- partitioners


@given(seed=seeds, clients=st.integers(1, 20))
@quick
def test_iid_deals_all_rows_evenly(seed, clients):
    parts = iid(labels_of(seed, 100, 5), clients, np.random.default_rng(seed))
    assert is_disjoint(parts) and sizes(parts).sum() == 100
    assert np.ptp(sizes(parts)) <= 1


@given(seed=seeds, clients=st.integers(1, 30), per_client=st.integers(1, 6), data=st.data())
@quick
def test_classes_gives_exact_counts_and_overlaps_as_little_as_possible(seed, clients, per_client, data):
    samples = data.draw(st.integers(per_client, 8 * per_client))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(6), range(9, 15)))
    parts = classes(
        labels,
        clients,
        np.random.default_rng(seed),
        classes_per_client=per_client,
        samples_per_client=samples,
    )
    for part in parts:
        held = np.bincount(labels[part], minlength=6)
        held = held[held > 0]
        assert len(held) == per_client and held.sum() == samples and np.ptp(held) <= 1
        assert is_disjoint([part])
        _, starts = np.unique(labels[part], return_index=True)
        dealt = np.diff([*np.sort(starts), samples]).tolist()
        assert dealt == sorted(dealt, reverse=True)  # the first classes have what does not divide evenly
    used = np.bincount(np.concatenate(parts), minlength=len(labels))
    assert all(np.ptp(used[labels == c]) <= 1 for c in range(6))


@given(seed=seeds, clients=st.integers(1, 9), per_client=st.integers(1, 6))
@quick
def test_classes_gives_every_client_the_most_rows_without_sharing(seed, clients, per_client):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(6), range(9, 15)))

    def drawn(samples):
        rng = np.random.default_rng(seed)
        return classes(labels, clients, rng, classes_per_client=per_client, samples_per_client=samples)

    parts = drawn(None)
    (size,) = set(sizes(parts))
    assert is_disjoint(parts) and all(map(np.array_equal, parts, drawn(int(size))))
    with contextlib.suppress(JaxflError):  # a class may have too few rows for one client
        assert not is_disjoint(drawn(int(size) + per_client))


@pytest.mark.parametrize("existing", [2, 7])
def test_classes_gives_five_classes_or_all_there_are(existing):
    labels = np.repeat(np.arange(existing), 30)
    parts = classes(labels, 6, np.random.default_rng(0))
    assert {len(np.unique(labels[part])) for part in parts} == {min(5, existing)}


@given(seed=seeds, clients=st.integers(1, 20), per_client=st.integers(1, 5))
@quick
def test_shards_are_disjoint_and_of_different_classes(seed, clients, per_client):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(5), range(20, 25)))
    rng = np.random.default_rng(seed)
    parts = shards(labels, clients, rng, shards_per_client=per_client)
    assert is_disjoint(parts)
    assert all(len(np.unique(labels[part])) == per_client for part in parts)
    if clients * per_client >= 5:
        assert sizes(parts).sum() == len(labels)


@pytest.mark.parametrize(
    "partitioner", [partial(classes, classes_per_client=6, samples_per_client=12), shards]
)
def test_another_seed_gives_other_rows_and_classes(partitioner):
    """With `classes` every client has all six classes, with `shards` only two."""
    labels = np.repeat(np.arange(6), 30)
    deals = [partitioner(labels, 3, np.random.default_rng(seed)) for seed in range(4)]
    rows = {tuple(tuple(sorted(part)) for part in parts) for parts in deals}
    held = {tuple(tuple(np.unique(labels[part])) for part in parts) for parts in deals}
    assert len(rows) == 4 and len(held) == (4 if partitioner is shards else 1)


@pytest.mark.parametrize("partitioner", [dirichlet, dirichlet_flbench])
@given(seed=seeds, clients=st.integers(1, 8), alpha=st.floats(0.3, 100))
@quick
def test_dirichlet_shares_out_all_rows(partitioner, seed, clients, alpha):
    labels = labels_of(seed, 300, 5)
    rng = np.random.default_rng(seed)
    parts = partitioner(labels, clients, rng, alpha=alpha, min_samples=3)
    assert is_disjoint(parts) and sizes(parts).sum() == 300
    assert sizes(parts).min() >= 3


def test_dirichlet_follows_alpha():
    labels = np.repeat(np.arange(10), 100)

    def largest_share(alpha):
        parts = dirichlet(labels, 5, np.random.default_rng(0), alpha=alpha, min_samples=1)
        counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
        return (counts.max(0) / counts.sum(0)).mean()

    assert largest_share(1000) < 0.25
    assert largest_share(0.05) > 0.8


def test_dirichlet_accepts_draws_with_exactly_the_minimum():
    even = dirichlet(np.repeat([0, 1], 6), 2, np.random.default_rng(0), alpha=1e6, min_samples=6)
    assert sizes(even).tolist() == [6, 6]


def test_dirichlet_favours_no_client():
    """Shares are rounded to the nearest; down, the last client would have a row of nearly every class."""
    labels = np.repeat(np.arange(10), 200)
    draws = [
        dirichlet(labels, 10, np.random.default_rng(seed), alpha=0.1, min_samples=1) for seed in range(40)
    ]
    known = np.mean([[len(np.unique(labels[part])) for part in parts] for parts in draws], 0)
    assert known.max() < 1.2 * known.min()


@pytest.mark.parametrize("largest", [50, 51])
def test_dirichlet_flbench_gives_no_further_class_to_a_client_with_its_even_share(largest):
    # Nearly all of a class goes to one client, and `largest` of 100 rows are half of them or more.
    labels = np.repeat(np.arange(3), [largest, 10, 90 - largest])
    for seed in range(20):
        rng = np.random.default_rng(seed)
        parts = dirichlet_flbench(labels, 2, rng, alpha=1e-3, min_samples=1)
        assert sizes(parts).min() >= 45


@given(seed=seeds, clients=st.integers(1, 20), sigma=st.floats(0, 1e6))
@example(seed=0, clients=10, sigma=0.0)  # tenths do not add up to one in floats
@quick
def test_quantity_keeps_the_minimum_and_uses_all_rows(seed, clients, sigma):
    rng = np.random.default_rng(seed)
    parts = quantity(labels_of(seed, 200, 5), clients, rng, sigma=sigma, min_samples=4)
    assert is_disjoint(parts) and sizes(parts).sum() == 200
    assert sizes(parts).min() >= 4
    assert sigma > 0 or np.ptp(sizes(parts)) <= 1


def test_quantity_is_log_normal_above_the_minimum():
    parts = quantity(np.zeros(10**6), 2000, np.random.default_rng(0), sigma=0.5, min_samples=1)
    assert abs(np.log(sizes(parts) - 1).std() - 0.5) < 0.03


@given(seed=seeds, clients=st.integers(1, 30), per_client=st.integers(1, 6), sigma=st.floats(0, 1e3))
@quick
def test_power_law_gives_consecutive_classes_and_the_base_to_all(seed, clients, per_client, sigma):
    labels = labels_of(seed, 2000, 6)
    labels = np.append(labels, np.repeat(np.arange(6), 30 * 3))  # enough for the base of all clients
    rng = np.random.default_rng(seed)
    options = {"classes_per_client": per_client, "base": 3, "least": 5, "most": 20, "sigma": sigma}
    parts = power_law(labels, clients, rng, **options)
    assert is_disjoint(parts)
    for i, part in enumerate(parts):
        held = np.bincount(labels[part], minlength=6)
        assert sorted(np.flatnonzero(held)) == sorted((i + j) % 6 for j in range(per_client))
        further = held[held > 0] - 3
        assert all((further == 0) | (further >= 5 * (2 if clients <= 20 else 1)))


@pytest.mark.parametrize(("clients", "times"), [(20, 2), (21, 1)])
def test_power_law_amounts_follow_the_recipe(clients, times):
    """Without skew every weight is 1 / (N L); the uniform part is what is left, doubled for few clients."""
    labels = np.repeat(np.arange(10), 6000)
    parts = power_law(labels, clients, np.random.default_rng(0), sigma=0.0)
    skewed = int((6000 - clients) / (2 * clients))
    held = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    uniform = (held[held > 0] - 10) / times - skewed
    assert (uniform == uniform.astype(int)).all()
    assert uniform.min() in range(300, 330) and uniform.max() in range(570, 601)


def test_power_law_is_log_normal_above_the_base():
    labels = np.repeat(np.arange(2), 10**7)
    options = {"classes_per_client": 1, "base": 1, "least": 0, "most": 0, "sigma": 0.5}
    parts = power_law(labels, 2000, np.random.default_rng(0), **options)
    assert abs(np.log(sizes(parts) - 1).std() - 0.5) < 0.03


@pytest.mark.parametrize(("of_class", "least"), [(6000, 300), (4500, 300), (180, 12), (60, 4)])
def test_power_law_amounts_are_by_default_those_of_its_code_or_fit_smaller_data(of_class, least):
    labels, rng = np.repeat(np.arange(10), of_class), np.random.default_rng
    usual = power_law(labels, 10, rng(0))
    assert all(map(np.array_equal, usual, power_law(labels, 10, rng(0), least=least, most=2 * least)))
    assert sizes(usual).max() > 1.5 * sizes(usual).min() and sizes(usual).sum() > len(labels) / 3


@pytest.mark.parametrize(("further", "first"), [(15, 80), (22, 2)])
def test_power_law_gives_only_the_base_if_the_rest_of_a_class_does_not_suffice(further, first):
    labels = np.zeros(100)
    options = {"classes_per_client": 1, "base": 2, "least": further, "most": further, "sigma": 0.0}
    parts = power_law(labels, 4, np.random.default_rng(0), **options)
    # Of 100 rows the base takes 8; a client draws 2 (floor(96 / 4) + further) more: 78 of 92, or all.
    assert sizes(parts).tolist() == [first, 2, 2, 2]


@pytest.mark.parametrize(("clients", "wanted"), [(None, "abd"), (3, "abd"), (2, None)])
def test_natural_clients_are_the_values_of_a_column(clients, wanted):
    whose = np.random.default_rng(0).permutation(np.repeat(list("dcba"), [6, 2, 9, 5]))
    for seed in range(4):
        parts = natural(whose, clients, np.random.default_rng(seed), column="whose", min_samples=5)
        names = ["".join(np.unique(whose[part])) for part in parts]
        assert names == sorted(names) and len(names) == (clients or 3)  # c has too few rows
        assert wanted in (None, "".join(names))
        for part, name in zip(parts, names, strict=True):
            assert (np.sort(part) == np.flatnonzero(whose == name)).all()


@pytest.mark.parametrize("lists", [[[5, 1], [3]], {"1": [3], "0": [5, 1]}])
def test_listed_clients_have_the_rows_of_a_file(tmp_path, lists):
    (tmp_path / "rows.json").write_text(json.dumps(lists))
    numbers = np.array([3, 5, 0, 1])  # of the rows to share out; a column may have any
    parts = listed(numbers, None, np.random.default_rng(0), file=tmp_path / "rows.json")
    assert [sorted(numbers[part]) for part in parts] == [[1, 5], [3]]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[[1], [", "is not JSON"),
        ("{}", "has no list of rows per client"),
        ('[["a"], [1]]', "does not hold lists of rows"),
        ("[[1, -1], [2]]", "does not hold lists of rows"),
        ("[[true], [2]]", "does not hold lists of rows"),
        ("[[1, 1], [2]]", "names a row twice"),
        ("[[1], [2], [3]]", "lists the rows of 3 clients; add --clients 3"),
        ("[[1], [4]]", "lists no row for client 1 that is left to share out; rows have the numbers 0 to 3"),
    ],
)
def test_invalid_lists_are_refused(tmp_path, content, sentence):
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(JaxflError, match=sentence):
        listed(np.arange(4), 2, np.random.default_rng(0), file=tmp_path / "rows.json")


def test_lists_of_numbers_are_refused_for_a_column_of_words(tmp_path):
    (tmp_path / "rows.json").write_text("[[1], [2]]")
    with pytest.raises(JaxflError, match="lists rows by numbers, but column=who holds other values"):
        listed(
            np.array(["1", "2"]), None, np.random.default_rng(0), file=tmp_path / "rows.json", column="who"
        )


def test_an_option_of_a_partition_may_be_a_file():
    assert is_saved("parts/mine.npz") and is_saved("shared.json")
    assert not is_saved("listed,file=rows.json") and not is_saved("my.py:mine,file=rows.json")
    assert is_edges("graph.txt") and not is_edges("my.py:graph,file=edges.txt")


def test_help_names_all_options_of_partitions_and_their_defaults():
    said = explained(PartitionOptions)["partition"]
    for name, function in PARTITIONS.items():
        own = (f",{option.name}={option.default}" for option in described(function))
        assert name + "".join(own) in said


# --- divide


def toy_source(classes=6, train=60, test=20):
    """Return a source with `train` training and `test` test rows of every class."""
    numbers = np.arange(classes, dtype=np.int32)
    labels = np.append(numbers.repeat(train), numbers.repeat(test))
    is_train = np.arange(len(labels)) < classes * train
    return Source("toy", np.zeros((len(labels), 1, 1, 1), np.uint8), labels, is_train, classes)


SOURCE = toy_source()


def divided(name, seed=0, clients=6, **options):
    return divide(SOURCE, PARTITIONS[name], clients, seed, test=TEST.get(name, "own"), **options)


def test_the_partitioner_is_not_called_if_no_row_is_left():
    source, asked = toy_source(), []
    everything = np.arange(len(source.labels))
    with pytest.raises(JaxflError, match="No row of .* is left for clients besides those of --disjoint-from"):
        divide(source, lambda *arguments: asked.append(arguments), 2, 0, test="own", without=everything)
    with pytest.raises(JaxflError, match="No training row of .* is left for clients; change"):
        none = source._replace(train=np.zeros_like(source.train))
        divide(none, lambda *arguments: asked.append(arguments), 2, 0, test="source")
    assert not asked


def flat(partition):
    """Return all of a partition's arrays as one list, to compare."""
    parts = (partition.train, partition.validation, partition.test)
    return [rows.tolist() for part in parts for rows in part] + [partition.relabel.tolist()]


@pytest.mark.parametrize("name", sorted(PARTITIONS.keys() - {"listed"}))
def test_the_same_seed_gives_the_same_partition(name):
    first = divided(name, validation_fraction=0.2, labels="independent")
    again = divided(name, validation_fraction=0.2, labels="independent")
    other = divided(name, seed=1, validation_fraction=0.2, labels="independent")
    assert flat(first) == flat(again)
    assert all(a != b for a, b in zip(flat(first), flat(other), strict=True) if a)
    arrays = [*first.train, *first.validation, *first.test, first.relabel]
    assert all(array.dtype == np.int32 for array in arrays)


@pytest.mark.parametrize("name", sorted(PARTITIONS.keys() - {"listed"}))
def test_labels_and_test_size_never_change_who_trains_on_what(name):
    plain = divided(name, validation_fraction=0.2)
    varied = divided(name, validation_fraction=0.2, labels="independent", max_test=6)
    assert flat(plain)[:12] == flat(varied)[:12]
    assert all(0 < size <= 6 for size in sizes(varied.test))
    assert sizes(plain.test).min() > 0


@pytest.mark.parametrize("name", ["dirichlet", "classes"])
def test_a_largest_number_of_training_rows_takes_some_of_each_clients_own(name):
    """Test rows stay as they are, and validation rows are cut from what is left."""
    plain = divided(name, labels="independent")
    limited = divided(name, labels="independent", max_train=7, validation_fraction=0.3)
    rows = [np.append(*parts) for parts in zip(limited.train, limited.validation, strict=True)]
    assert sizes(rows).tolist() == np.minimum(sizes(plain.train), 7).tolist()
    assert all(np.isin(some, all_).all() for some, all_ in zip(rows, plain.train, strict=True))
    assert [*map(sorted, limited.test)] == [*map(sorted, plain.test)]
    assert sizes(limited.validation).max() == 2


def test_own_test_rows_are_cut_from_each_share():
    result = divided("iid", test_fraction=0.5, validation_fraction=0.25)
    assert sizes(result.test).tolist() == [40] * 6
    assert sizes(result.validation).tolist() == [10] * 6
    assert sizes(result.train).tolist() == [30] * 6
    everything = [*result.train, *result.validation, *result.test]
    assert is_disjoint(everything) and sizes(everything).sum() == 480


def test_a_share_that_is_a_whole_number_of_rows_is_exact():
    """A share of 0.5125 of 240 rows is 123, although the product of floats is less."""
    assert sizes(divided("iid", clients=2, test_fraction=0.5125).test).tolist() == [123] * 2


def uneven_source():
    """Return sixty training rows of each of four classes, and 900, 90, 10 and no test rows."""
    labels = np.repeat(np.tile(np.arange(4, dtype=np.int32), 2), [60, 60, 60, 60, 900, 90, 10, 0])
    return Source("uneven", np.zeros((1240, 1, 1, 1), np.uint8), labels, np.arange(1240) < 240, 4)


def test_all_of_the_sources_test_rows_are_used():
    """Of a client's classes, or of all, as many as there are; with a largest number equally many of each."""
    source, own = uneven_source(), partial(classes, classes_per_client=2)
    for test in "source", "all":
        result = divide(source, iid, 5, 0, test=test)
        assert sizes(result.train).tolist() == [48] * 5 and source.train[np.concatenate(result.train)].all()
        assert all((np.sort(rows) == np.arange(240, 1240)).all() for rows in result.test)
    result = divide(source, own, 8, 0, test="source")
    for train, test in zip(result.train, result.test, strict=True):
        known = np.unique(source.labels[train])
        expected = np.flatnonzero(~source.train & np.isin(source.labels, known))
        assert np.sort(test).tolist() == expected.tolist()
    first, *others = divide(source, own, 8, 0, test="all", max_test=30).test
    assert np.bincount(source.labels[first]).tolist() == [10, 10, 10]
    assert all((rows == first).all() for rows in others)
    with pytest.raises(JaxflError, match=r"classes of which uneven has no test rows \(3\); take --test own"):
        divide(source, partial(classes, classes_per_client=1), 8, 0, test="source")


def test_a_largest_number_of_test_rows_draws_the_same_as_ever():
    """Partitions that were drawn before all test rows were used stay comparable."""
    drawn, rng = divide(SOURCE, classes, 6, 3, test="source", max_test=52), generator(3, TEST_STREAM)
    for train, test in zip(drawn.train, drawn.test, strict=True):
        known = np.unique(SOURCE.labels[train])
        of_classes = [np.flatnonzero(~SOURCE.train & (SOURCE.labels == c)) for c in known]
        assert test.tolist() == np.concatenate([rng.permutation(rows)[:10] for rows in of_classes]).tolist()


def test_source_test_rows_are_those_of_the_clients_classes():
    result = divide(SOURCE, classes, 6, 0, test="source", validation_fraction=0.25)
    for train, validation, test in zip(*result[:3], strict=True):
        assert SOURCE.train[train].all() and SOURCE.train[validation].all()
        assert not SOURCE.train[test].any()
        own = np.unique(SOURCE.labels[np.append(train, validation)])
        counts = np.bincount(SOURCE.labels[test], minlength=6)
        assert counts[own].tolist() == [20] * 5 and counts.sum() == 100


def test_unified_labels_are_those_of_the_source():
    result = divided("classes")
    assert result.outputs == 6
    assert (result.relabel == np.arange(6)).all()


def test_independent_labels_number_the_classes_of_each_client():
    result = divided("classes", labels="independent")
    assert result.outputs == 5
    for relabel, train in zip(result.relabel, result.train, strict=True):
        own = np.unique(SOURCE.labels[train])
        assert sorted(relabel[own]) == [0, 1, 2, 3, 4]
        assert (relabel < 0).sum() == 1
    result = divided("dirichlet", labels="independent")
    assert result.outputs == 6
    assert (np.sort(result.relabel) == np.arange(6)).all()
    assert len(np.unique(result.relabel, axis=0)) > 1


def test_permuted_labels_number_all_classes_and_change_no_row():
    unified, permuted = (divided("classes", labels=labels) for labels in ("unified", "permuted"))
    assert permuted.outputs == 6
    assert (np.sort(permuted.relabel) == np.arange(6)).all()
    assert len(np.unique(permuted.relabel, axis=0)) > 1
    for part in ("train", "test"):
        for rows, same in zip(getattr(permuted, part), getattr(unified, part), strict=True):
            assert rows.tolist() == same.tolist()


REFUSALS = {
    "natural clients without rows": (
        partial(natural, column="user", min_samples=0),
        {},
        "min_samples is 0; every client needs at least 1 row",
    ),
    "too few natural clients": (
        partial(natural, column="user", min_samples=81),
        {},
        "0 of 6 values of the column user have 81 rows or more, too few for 6 clients",
    ),
    "more clients than rows": (iid, {"clients": 481}, "need 481 rows, but there are 480"),
    "more clients than rows to share": (
        partial(classes, samples_per_client=20),
        {"clients": 361, "test": "source"},
        "361 clients need 361 rows, but there are 360",
    ),
    "more clients than rows of a class": (
        classes,
        {"clients": 300, "test": "source"},
        "A class has fewer rows than clients that have it; use fewer than 300",
    ),
    "too many classes": (
        partial(classes, classes_per_client=7),
        {"test": "source"},
        "classes_per_client is 7, but the data have 6 classes",
    ),
    "fewer samples than classes": (
        partial(classes, samples_per_client=4),
        {"test": "source"},
        "samples_per_client is 4, too few for 5 classes",
    ),
    "more samples than a class has": (
        partial(classes, classes_per_client=1, samples_per_client=61),
        {"test": "source"},
        "needs 61 rows of class ., which has 60",
    ),
    "too many shards": (
        partial(shards, shards_per_client=7),
        {},
        "shards_per_client is 7, but the data have 6 classes",
    ),
    "shards without rows": (
        partial(shards, shards_per_client=6),
        {"clients": 81},
        "80 rows, too few for 81 shards",
    ),
    "alpha": (partial(dirichlet, alpha=0.0), {}, "alpha is 0.0"),
    "alpha without value": (partial(dirichlet, alpha=np.nan), {}, "alpha is nan"),
    "sigma": (partial(quantity, sigma=-1.0), {}, "sigma is -1.0"),
    "sigma of a power law": (partial(power_law, sigma=np.nan), {}, "sigma is nan"),
    "base": (partial(power_law, base=0), {}, "base is 0"),
    "base for all": (partial(power_law, base=41), {}, "has 80 rows, but its clients need 82"),
    "least and most": (partial(power_law, least=5, most=4), {}, "least is 5 and most 4"),
    "min_samples": (partial(quantity, min_samples=0), {}, "min_samples is 0"),
    "min_samples for all": (dirichlet, {"clients": 49}, "at least 10 rows each need 490"),
    "unlucky draws": (
        partial(dirichlet, alpha=1e-6),
        {"clients": 7},
        "None of 1000 Dirichlet draws with alpha 1e-06 gave each of 7 clients 10 of the 480 rows",
    ),
    "no validation rows": (iid, {"validation_fraction": 0.001}, "of 0.001 sets no row of any client aside"),
    "no own test rows": (iid, {"test_fraction": 0.0}, "Client 0 is left without test rows"),
    "fewer test rows than classes": (
        classes,
        {"test": "source", "max_test": 4},
        "max_test is 4, too few for a test row of each of 5 classes; raise it",
    ),
    "an empty client": (
        lambda labels, clients, rng: [np.arange(9), np.arange(0)],
        {"clients": 2},
        "Client 1 is left without training rows",
    ),
    "positions that do not exist": (
        lambda labels, clients, rng: [np.arange(3), np.array([2, -1])],
        {"clients": 2},
        "for each of 2 clients, an array of different positions from 0 to 479",
    ),
    "a position twice": (
        lambda labels, clients, rng: [np.arange(3), np.array([2, 5, 5])],
        {"clients": 2, "test": "source"},
        "2 arrays, of which that of client 1 is none such",
    ),
    "not a part for each client": (
        lambda labels, clients, rng: [np.arange(3)],
        {"clients": 2},
        "for each of 2 clients",
    ),
    "own test rows that others train on": (
        partial(classes, samples_per_client=200),
        {},
        "Clients share rows",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_impossible_divisions_are_refused(case):
    partitioner, options, sentence = REFUSALS[case]
    with pytest.raises(JaxflError, match=sentence):
        divide(SOURCE, partitioner, **{"clients": 6, "seed": 0, "test": "own"} | options)


# --- files


@pytest.mark.parametrize("name", sorted(PARTITIONS.keys() - {"listed"}))
def test_a_saved_partition_comes_back_unchanged(tmp_path, name):
    saved = divided(name, labels="independent", validation_fraction=0.1)
    saved_partition.save(tmp_path / "mine.part", saved, SOURCE)
    loaded = saved_partition.load(tmp_path / "mine.part", SOURCE)
    assert flat(loaded) == flat(saved) and loaded.outputs == saved.outputs
    assert type(loaded) is type(saved) and loaded.relabel.dtype == np.int32


def test_natural_clients_keep_their_names(tmp_path):
    whose = np.resize(np.array(["zoe", "al", "bo"]), len(SOURCE.labels))
    by_column = partial(natural, column="whose")
    named = partition.divide(SOURCE, by_column, None, 0, test="own", by=whose)
    assert named.names == ("al", "bo", "zoe")
    assert all((whose[rows] == name).all() for rows, name in zip(named.train, named.names, strict=True))
    saved_partition.save(tmp_path / "named.npz", named, SOURCE)
    assert saved_partition.load(tmp_path / "named.npz", SOURCE).names == named.names
    mixed = partition.divide(SOURCE, iid, 3, 0, test="own", by=whose)
    assert mixed.names == ()


def users(*names, test=()):
    """Return forty rows of each user, the first three of four training rows unless all are in `test`."""
    whose, labels = np.repeat(names, 40), np.tile(np.arange(4), 10 * len(names)).astype(np.int32)
    train = (np.arange(len(whose)) % 40 < 30) & ~np.isin(whose, test)
    order = np.argsort(~train, kind="stable")
    source = Source("users", np.zeros((len(whose), 1, 1, 1), np.uint8), labels[order], train[order], 4)
    return source, whose[order]


def natural_clients(source, whose, test=TEST["natural"], **options):
    by_column = partial(natural, column="whose")
    return partition.divide(source, by_column, None, 0, test=test, by=whose, **options)


def test_natural_clients_keep_the_split_of_the_data():
    """Users with only test rows never train; those without any are tested on a share of their others."""
    source, whose = users(*"abc")
    found = natural_clients(source, whose)
    assert sizes(found.train).tolist() == [30] * 3 and sizes(found.test).tolist() == [10] * 3
    for train, test in zip(found.train, found.test, strict=True):
        assert source.train[train].all() and not source.train[test].any()
    of_bob = source._replace(train=source.train | (whose == "b"))  # one client without test rows
    found = natural_clients(of_bob, whose, public=0.1)
    assert of_bob.train[np.concatenate([*found.train, found.public])].all()
    assert [bool(of_bob.train[rows].any()) for rows in found.test] == [False, True, False]
    assert sizes(found.test)[[0, 2]].tolist() == [10, 10]
    undivided = source._replace(divided=False)  # a fifth that we made is no split of the data
    assert flat(natural_clients(undivided, whose)) == flat(natural_clients(source, whose, test="own"))
    assert not source.train[np.concatenate(natural_clients(source, whose, test="own").train)].all()
    with pytest.raises(JaxflError, match="No training row of users is left for clients"):
        natural_clients(source._replace(train=np.zeros(120, bool)), whose)


def test_users_held_out_whole_never_train(tmp_path):
    """Of twelve users two are the test part: ten clients train, on no test row, and two are newcomers."""
    source, whose = users(*"abcdefghijkl", test=("k", "l"))
    source = source._replace(train=~np.isin(whose, ["k", "l"]))
    found = natural_clients(source, whose)
    assert sizes(found.train).tolist() == [30] * 10 + [0, 0]
    assert source.train[np.concatenate(found.train)].all()
    assert sizes(found.test).tolist() == [10] * 10 + [40, 40]
    assert [name for name, rows in zip(found.names, found.train, strict=True) if not len(rows)] == ["k", "l"]
    images = np.zeros((480, 8, 8, 1), np.uint8)
    model = zoo.mlp(shape=(8, 8, 1), classes=4, hidden=2)
    (group,) = federate(source._replace(images=images), found, [(model, 12)]).groups
    assert np.flatnonzero(group.newcomer).tolist() == [10, 11]
    npz, rows = tmp_path / "users.npz", tmp_path / "users.json"
    saved_partition.save(npz, found, source)
    partition_formats.write_json(rows, found, source)
    for again in saved_partition.load(npz, source), partition_formats.read(rows, source):
        assert flat(again) == flat(found) and again.names == found.names


def test_where_test_rows_come_from_depends_only_on_options():
    def rule(**options):
        return rule_of_test(PartitionOptions(**options))

    assert rule() == "source" and rule(partition="dirichlet") == "own"
    assert rule(partition="natural,column=x") == rule(partition="listed,file=a.json") == "split"
    assert rule(partition="natural", test_fraction=0.5) == "own"
    assert rule(partition="natural", test_fraction=0.5, test="split") == "split"
    assert rule(partition="iid", test="all") == "all" and rule(partition="mine.npz") == "auto"


def test_a_partition_of_other_data_is_refused(tmp_path):
    path = tmp_path / "mine.npz"
    saved_partition.save(path, divided("iid"), SOURCE)
    swapped = SOURCE.labels.copy()
    swapped[[0, -1]] = swapped[[-1, 0]]
    for other, sentence in [
        (toy_source(classes=7), "6 classes, not 7"),
        (toy_source(train=70), "other labels"),
        (SOURCE._replace(labels=swapped), "other labels"),
    ]:
        with pytest.raises(JaxflError, match=f"does not fit toy: it is for {sentence}"):
            saved_partition.load(path, other)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "mine.npz"
    saved_partition.save(path, divided("iid"), SOURCE)
    good = dict(np.load(path))
    for damage in [
        {"train": good["train"][1:]},
        {"train": good["train"] * 0.5},
        {"train": -good["train"]},
        {"test_sizes": good["test_sizes"][1:]},
        {"test_sizes": good["test_sizes"] * 0, "test": good["test"][:0]},
        {"train_sizes": good["train_sizes"] * 0, "train": good["train"][:0]},
        {"relabel": good["relabel"][0]},
        {"relabel": good["relabel"] - 2},
        {"outputs": np.array(5)},
        {"outputs": np.array([6])},
        {"checksum": np.array([1, 2])},
    ]:
        np.savez(path, **good | damage)
        with pytest.raises(JaxflError, match="not a partition that jaxfl saved"):
            saved_partition.load(path, SOURCE)
    np.savez(path, train=good["train"])
    with pytest.raises(JaxflError, match="lacks validation, test"):
        saved_partition.load(path, SOURCE)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(JaxflError, match="is damaged"):
        saved_partition.load(path, SOURCE)


def test_files_that_cannot_be_written_are_refused(tmp_path):
    parts, path = divided("iid"), tmp_path / "nowhere" / "mine"
    with pytest.raises(JaxflError, match="cannot be written"):
        saved_partition.save(path, parts, SOURCE)


# --- the picture


def test_the_picture_shows_who_has_what(drawn, tmp_path):
    def picture(name):
        draw(divided(name).counts(SOURCE.labels), title="toy").savefig(tmp_path / "part.png")
        with Image.open(tmp_path / "part.png") as image:
            assert image.format == "PNG"
            return np.asarray(image)

    even, skewed = picture("iid"), picture("shards")
    assert (even == picture("iid")).all()
    # With two of six classes each, most of the picture is white, unlike when each client has all.
    assert (skewed == 255).all(-1).mean() > 0.5 > (even == 255).all(-1).mean()


def test_training_rows_are_counted_by_the_outputs_of_their_client():
    """Clients number the classes in different orders."""
    source = tiny_source()
    orders = np.array([np.roll(np.arange(3), i) for i in range(5)], np.int32)
    partition = tiny_partition(source)._replace(relabel=orders)
    federation = federate(source, partition, tiny_models())
    found = np.concatenate([np.asarray(group.class_counts) for group in federation.groups])
    counts = partition.counts(source.labels)
    assert all(
        (of_client[order] == classes).all()
        for of_client, order, classes in zip(found, orders, counts, strict=True)
    )
    assert (federation.rows_per_class() == counts).all() and (found != counts).any()
