"""Random configurations, partitions and files: each works, or is refused without a traceback.

A share of each test's examples must be accepted, so that what works is tried as well.
"""

import json
import shutil

import jax
import numpy as np
import pytest
from conftest import long, tiny_source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from methods.cases import short

import jaxfl
from jaxfl import cli
from jaxfl.config.options import declared
from jaxfl.config.setup import Setup
from jaxfl.config.values import alternatives, entry_type, text
from jaxfl.core.job import traced
from jaxfl.core.protocol import Cohort
from jaxfl.data import partition as partitions
from jaxfl.data import readers, saved_partition, sources
from jaxfl.data.partition import Partition
from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.registry import METHODS
from jaxfl.runs import loop as run_loop


def fuzz(examples):
    """Return settings that draw the same examples every time, so that failures can be reproduced."""
    checks = [HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=checks)


def accepted(examples, is_accepted, **strategies):
    """Return the share of random examples that are accepted; `is_accepted` checks and judges one."""
    outcomes = []

    @fuzz(examples)
    @given(**strategies)
    def judge(**drawn):
        outcomes.append(is_accepted(**drawn))

    judge()
    return np.mean(outcomes)


class Begins(BaseException):
    """Raised where a run would begin: all options are accepted and there is a state."""


@pytest.fixture
def stops_before_rounds(monkeypatch):
    """Stop runs when nothing is left to refuse; only the shapes of the first round are computed."""

    def begin(job, start, states):
        (config,), (cohorts,), (key,), federation = job.configs, job.cohorts, job.keys, job.federation
        state = jax.eval_shape(job.programs.algorithm.init, key, federation, traced(config))
        slots = jax.tree.map(lambda leaf: leaf[:1], cohorts)
        first = Cohort(np.zeros(1, np.int32), slots, rounds=job.rounds)
        score_key = key if job.score_cohort else None
        job.programs.rounds._jitted.eval_shape(key, state, federation, first, score_key)
        raise Begins

    monkeypatch.setattr(run_loop, "simulate", begin)


def begins(capsys, words):
    """Return whether a command gets to its rounds or its end; else it must be refused without a traceback."""
    capsys.readouterr()
    try:
        cli.main(words)
    except Begins:
        return True
    except SystemExit as end:
        said = capsys.readouterr()
        assert end.code == 2 and "Traceback" not in said.err
        return False
    return True


# --- options

WORDS = """
    0 1 2 3 7 -1 0.3 1.0 1e-9 1e30 nan inf -inf none true false all auto iid quantity own source , = :
    dirichlet,alpha=0.5 dirichlet,alpha=nan shards,shards_per_client=9 classes,classes_per_client=2
    classes,samples_per_client=-5 held-out held-out,share=0.3 held-out,share=2 mlp mlp,hidden=3 mlp,hidden=-3
    lenet5 mlp,width=inf mcmahan,width=0.06 mlp,clients=2 my.py my.py:f .npz / . .. measured unified bfloat16
    independent adam class ä
"""
SOME = 0.1  # least share of accepted examples: about a third was seen, but it depends on what is drawn
TEXTS = st.sampled_from(["", "\0", *WORDS.split()]) | st.text(max_size=5)
FLAGS = sorted(declared(Setup).keys() - {"dataset", "devices"})


def given_to(hint, sensible):
    """Return a strategy of values of an option, sensible for its type or any; None for a switch."""
    if True in alternatives(hint):
        return st.none()
    if not sensible:
        return st.integers(-1, 8).map(str) | st.floats(0, 1).map(str) | TEXTS
    numbers = {int: st.integers(1, 8).map(str), float: st.floats(0, 1).map(str)}
    return st.one_of([numbers.get(kind, st.just(str(kind).lower())) for kind in alternatives(hint)])


@st.composite
def commands(draw):
    """Draw a method and a few flags of the run or of the method."""
    method = METHODS[draw(st.sampled_from(sorted(METHODS)))]
    known = declared(Setup) | declared(method.config)
    own = sorted(declared(method.config))
    chosen = {"models": "mlp,hidden=3", "partition": "iid", "clients": "4"}
    sensible = draw(st.booleans())
    for name in draw(st.lists(st.sampled_from(FLAGS) | st.sampled_from(own), unique=True, max_size=3)):
        chosen[name] = draw(given_to(known[name].type, sensible))
    values = {name: "" if value is None else f"={value}" for name, value in chosen.items()}
    return ["run", method.name, *(f"--{name.replace('_', '-')}{value}" for name, value in values.items())]


def test_random_options_begin_or_are_refused(stops_before_rounds, dataset, tmp_path, capsys):
    def begun(words):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return begins(capsys, [*words, *dataset, "--run-dir", str(tmp_path / "run")])

    assert accepted(20, begun, words=commands()) >= SOME


def sensible(hint):
    """Return a strategy of values of a type that make sense by themselves."""
    numbers = {int: st.integers(1, 3), float: st.sampled_from([0.01, 0.3, 0.9])}

    def of_kind(kind):
        if entry_type(kind) is not None:
            return st.lists(st.sampled_from(alternatives(entry_type(kind)))).map(tuple)
        return numbers.get(kind, st.just(kind))

    kinds = [of_kind(kind) for kind in alternatives(hint) if kind is not str]
    return st.one_of(kinds).map(text)


SENSIBLE = [  # one of each list
    [
        "--partition iid",
        "--partition classes,classes_per_client=2,samples_per_client=4",
        "--partition quantity",
    ],
    [
        "--models mlp,hidden=3 mcmahan,width=0.06,padding=same",
        "--models mlp,hidden=3",
        "--models lenet5,width=0.1",
    ],
    ["--labels unified", "--labels independent"],
    ["--validation-fraction 0", "--validation-fraction 0.3"],
    ["--public auto", "--public held-out,share=0.3", "--public none"],
    ["--participation 0.1", "--participation 0.5", "--participation 1"],
    ["", "--score-cohort"],
    ["--clients-at-once 1", "--clients-at-once 2"],
    ["--devices 1", "--devices 3"],
    ["--convolution rows", "--convolution patches", "--convolution plain"],
    ["--precision full", "--precision tf32", "--precision bfloat16"],
]


@st.composite
def sensible_commands(draw):
    """Draw a method with all its options, each of which makes sense by itself, on some federation."""
    method = METHODS[draw(st.sampled_from(sorted(METHODS)))]
    choice, left_out = [method.name], draw(st.sampled_from(["epochs", "steps"]))  # each excludes the other
    for name, option in declared(method.config).items():
        if alternatives(option.type) != (str,) and name != left_out:
            choice.append(f"{name}={draw(sensible(option.type))}")
    return ["run", ",".join(choice), *" ".join(draw(st.sampled_from(texts)) for texts in SENSIBLE).split()]


@pytest.mark.long
def test_random_sensible_options_run_or_are_refused(dataset, tmp_path, capsys):
    folder = tmp_path / "run"

    def finished(words):
        shutil.rmtree(folder, ignore_errors=True)
        words += ["--clients", "5", "--rounds", "2", "--eval-every", "1", "--run-dir", str(folder)]
        ended = begins(capsys, [*words, *dataset])
        assert ended == (folder / store.RESULT).exists()
        return ended

    assert accepted(50, finished, words=sensible_commands()) >= SOME


# --- run folders

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def begun(dataset, tmp_path_factory):
    """Return the folder of a run that was stopped before its first round."""
    folder = tmp_path_factory.mktemp("runs") / "begun"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            run_loop, "simulate", lambda *arguments, **options: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        options = {"partition": "iid", "models": ["mlp,hidden=3"], "clients": 4}
        jaxfl.run("fedavg", run_dir=folder, dataset=dataset[1], **options)
    return folder


def alike(value):
    """Return a strategy of JSON values of the same type, which suit most options."""
    match value:
        case bool():
            return st.booleans()
        case int():
            return st.integers(1, 4)
        case float():
            return st.sampled_from([0.01, 0.3, 0.9])
    return st.just(value)


def test_random_configurations_resume_or_are_refused(begun, stops_before_rounds, tmp_path, capsys):
    def resumed(data):
        folder = shutil.copytree(begun, tmp_path / "run", dirs_exist_ok=True)
        config = json.loads((folder / store.CONFIG).read_text())
        place = config if data.draw(st.integers(0, 3)) == 0 else config["options"]
        sensible = data.draw(st.booleans())
        for name in data.draw(st.lists(st.sampled_from(sorted(place)), min_size=1, max_size=3)):
            place[name] = data.draw(alike(place[name]) if sensible else JSON)
        (folder / store.CONFIG).write_text(json.dumps(config))
        return begins(capsys, ["resume", str(folder)])

    assert accepted(30, resumed, data=st.data()) >= SOME


def test_runs_with_random_bytes_resume_or_are_refused(begun, stops_before_rounds, tmp_path, capsys):
    lines = b"".join(json.dumps({"round": t, "loss": 1.0}).encode() + b"\n" for t in (1, 2, 3))

    def resumed(data):
        folder = shutil.copytree(begun, tmp_path / "run", dirs_exist_ok=True)
        (folder / store.METRICS).write_bytes(lines)
        name = data.draw(st.sampled_from([store.CONFIG, store.PARTITION, store.METRICS]))
        content = bytearray((folder / name).read_bytes())
        for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
            content[place] = data.draw(st.integers(0, 255))
        (folder / name).write_bytes(content)
        rounds = [record["round"] for record in store.read_metrics(folder)]
        assert rounds == list(range(1, len(rounds) + 1))
        return begins(capsys, ["resume", str(folder)])

    assert accepted(30, resumed, data=st.data()) >= SOME


# --- data and partitions


ARRAYS = (*partitions.PARTS, "train_sizes", "test_sizes", "relabel", "outputs", "public")


def arrays(*dtypes):
    """Return a strategy of small arrays, not all of which make sense."""
    shapes = st.lists(st.integers(0, 4), max_size=4)
    values = st.integers(-2, 5)
    return st.builds(
        lambda shape, value, dtype, step: (
            (np.arange(np.prod(shape, dtype=int)) * step + value).reshape(shape).astype(dtype)
        ),
        shapes,
        values,
        st.sampled_from(dtypes),
        st.integers(0, 2),
    )


@st.composite
def data_sets(draw):
    """Draw arrays of a data set, in half of which one array is any other."""
    rows, shape = draw(st.integers(1, 12)), draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    pixels = np.arange(rows * np.prod(shape)).reshape(rows, *shape)
    found = {"images": pixels.astype(draw(st.sampled_from(["u1", "f4", "f8"])))}
    found["labels"] = np.arange(rows) % draw(st.integers(1, 3))
    if draw(st.booleans()):
        found["split"] = np.arange(rows) % 3 > 0
    anything = arrays("u1", "f4", "f8", "i4", "?", "U3")
    return found | draw(st.dictionaries(st.sampled_from(["images", "labels", "split"]), anything, max_size=1))


def test_random_data_fit_or_are_refused(tmp_path):
    path = tmp_path / "fuzz.npz"

    def fit(given):
        np.savez(path, **given)
        try:
            source = readers.load(str(path))
        except JaxflError:
            return False
        order = sources.numbers(source)
        assert sorted(order) == list(range(len(source.images)))
        np.testing.assert_array_equal(source.images.ravel(), given["images"][order].ravel())
        np.testing.assert_array_equal(source.labels, given["labels"][order])
        assert source.images.ndim == 4 and source.train.shape == source.labels.shape
        assert source.labels.min() >= 0 and source.labels.max() < source.classes
        return True

    assert accepted(200, fit, given=data_sets()) >= SOME


def shifted():
    """Return a strategy of functions that shift the entries of an array and perhaps change its integers."""
    return st.builds(
        lambda by, dtype: lambda array: np.roll(array, by).astype(dtype),
        st.integers(0, 3),
        st.sampled_from(["i4", "i8", "u8"]),
    )


def test_partitions_with_random_arrays_fit_or_are_refused(begun, dataset, tmp_path):
    source = readers.load(dataset[1])
    with np.load(begun / store.PARTITION) as file:
        saved = dict(file)

    def fit(changes):
        changed = saved | {name: change(saved[name]) for name, change in changes.items()}
        np.savez(tmp_path / "fuzz.npz", **changed)
        try:
            loaded = saved_partition.load(tmp_path / "fuzz.npz", source)
        except JaxflError:
            return False
        assert_fits(loaded, source)
        for name in partitions.PARTS:
            np.testing.assert_array_equal(np.concatenate(getattr(loaded, name)), changed[name])
        return True

    others = arrays("i4", "i8", "u8", "f4").map(lambda other: lambda array: other)
    changes = st.dictionaries(st.sampled_from(ARRAYS), shifted() | others, min_size=1, max_size=2)
    assert accepted(200, fit, changes=changes) >= SOME


def assert_fits(partition, source):
    """Assert that rows exist and have labels that their clients know; all clients train and are tested."""
    assert len({len(part) for part in partition[:3]} | {len(partition.relabel)}) == 1
    for part, least in zip(partition[:3], (1, 0, 1), strict=True):
        for rows, relabel in zip(part, partition.relabel, strict=True):
            known = relabel[source.labels[rows]]
            assert len(rows) >= least and ((known >= 0) & (known < partition.outputs)).all()
    assert set(partition.public) <= set(range(len(source.labels)))


@st.composite
def dealt(draw):
    """Draw what a user's own partitioner may return for 40 rows and 5 clients, half of it with a mistake."""
    sizes = draw(st.lists(st.integers(4, 8), min_size=5, max_size=5))
    rows = np.random.default_rng(draw(st.integers(0, 99))).permutation(40)
    *parts, _ = np.split(rows, np.cumsum(sizes))
    if draw(st.booleans()):
        parts[draw(st.integers(0, 4))] = np.array(draw(st.lists(st.integers(-1, 41), max_size=6)), int)
        del parts[: draw(st.integers(0, 1))]
    return parts


def test_random_partitioners_fit_or_are_refused():
    source = tiny_source()

    def fit(parts, test, share):
        try:
            partition = partitions.divide(
                source,
                lambda labels, clients, rng: parts,
                5,
                0,
                test=test,
                labels="independent",
                validation_fraction=share,
            )
        except JaxflError:
            return False
        assert_fits(partition, source)
        for client, rows in enumerate(parts):
            kept = [partition.train[client], partition.validation[client]]
            kept += [partition.test[client]] if test == "own" else []
            assert sorted(np.concatenate(kept)) == sorted(rows)
        return True

    kinds = {"test": st.sampled_from(["own", "source"]), "share": st.sampled_from([0.0, 0.2, 0.9])}
    assert accepted(200, fit, parts=dealt(), **kinds) >= SOME


@pytest.mark.parametrize(
    "method",
    [*map(long, ("fedper", "compfl", "fedcmd", "fedrod"))],
)
@fuzz(2)
@given(data=st.data())
def test_methods_train_on_random_partitions(tmp_path_factory, method, data):
    """Methods train on every valid partition: unequal clients, rows of one class, one row."""
    source = tiny_source()
    rows = st.lists(st.integers(0, 39), min_size=1, max_size=5).map(np.int32)
    train = tuple(data.draw(rows) for _ in range(5))
    test = tuple(data.draw(rows) for _ in range(5))
    none = tuple(np.empty(0, np.int32) for _ in range(5))
    participation = data.draw(st.sampled_from([0.2, 0.6, 1.0]))
    relabel = np.tile(np.arange(3, dtype=np.int32), (5, 1))
    folder = tmp_path_factory.mktemp("fuzz")
    np.savez(folder / "tiny.npz", images=source.images, labels=source.labels, split=source.train)
    saved = Partition(train, none, test, relabel, 3)
    assert_fits(saved, source)
    saved_partition.save(folder / "mine.npz", saved, readers.load(str(folder / "tiny.npz")))
    run = jaxfl.run(
        short(method),
        run_dir=folder / "run",
        dataset=str(folder / "tiny.npz"),
        partition=str(folder / "mine.npz"),
        models=["mlp,hidden=3"],
        clients=5,
        participation=participation,
        epochs=1,
        rounds=3,
        eval_every=1,
        devices=1,
        quiet=True,
    )
    assert [len(line["clients"]) for line in run.metrics] == 3 * [round(5 * participation)]
    assert np.isfinite(run.loss).all()
    right = run.personal.per_client * [len(rows) for rows in test]
    np.testing.assert_allclose(right, right.round(), atol=1e-6)  # of a client, a number of its test images
