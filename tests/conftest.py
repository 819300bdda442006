"""Strict settings for every test, and federations small enough to compile in seconds."""

import gc
import os
import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

# Almost all the time of these tests is compilation: most optimisations are left out, and what one process has
# compiled all others of the session find, workers and the commands that tests start. They inherit all this;
# a test of what users run asks for `optimising`.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from orbax.checkpoint import v1 as ocp

from jaxfl.core.protocol import Cohort, Slots
from jaxfl.data.federation import federate
from jaxfl.data.partition import Partition
from jaxfl.data.sources import Source
from jaxfl.models import zoo
from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import plain_cnn
from jaxfl.runs import variant

pytest.register_assert_rewrite("methods.cases")  # their assertions say what they compared

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")

# These save a third and a tenth of what is left. A later XLA does not know the first one, and aborts.
QUICKLY = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
FLAGS = os.environ.get("XLA_FLAGS", "")
if jax.__version_info__ < (0, 11) and QUICKLY not in FLAGS:
    os.environ["XLA_FLAGS"] = f"{FLAGS} {QUICKLY}".strip()

gc.set_threshold(200_000, 50, 1000)  # tracing makes many objects that live on: looking at all takes a tenth

SHAPE, CLASSES = (8, 8, 1), 3
SIZES = (7, 4, 5, 1, 6)  # training rows of the clients: unequal, and a batch of one
PUBLIC = 10  # rows that everybody sees
EDGES = (
    (0, 1),
    (1, 2),
    (0, 2),
    (2, 3),
    (3, 4),
    (0, 4),
)  # between the clients: some have more neighbours than others


def long(*values):
    """A row of a parametrised test that only runs with the long tests: another one stands for it."""
    return pytest.param(*values, marks=pytest.mark.long)


def tiny_models():
    """Two architectures of five features, quickly compiled; three clients have the first, two the second."""
    return (zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=5), 3), (tiny_cnn("cnn", features=5), 2)


def tiny_cnn(
    name: str,
    *channels_and_pools: tuple[int, int],
    kernel: int = 3,
    norm: bool = False,
    features: int = 6,
):
    """Convolutions with these channels, each pooled, and a dense layer."""
    convs = [
        ConvBlock(channels, kernel, kernel // 2, pool, norm, bias=not norm)
        for channels, pool in channels_and_pools or [(4, 2)]
    ]
    return plain_cnn(name, convs, [DenseBlock(features)], shape=SHAPE, classes=CLASSES)


def tiny_source(seed: int = 0) -> Source:
    """Sixty random images whose mean tells their class, in three classes."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(60) % CLASSES).astype(np.int32)
    images = rng.integers(0, 120, (60, *SHAPE)) + 60 * labels[:, None, None, None]
    return Source("tiny", images.astype(np.uint8), labels, np.arange(60) < 40, CLASSES)


def tiny_partition(source: Source, sizes=SIZES) -> Partition:
    """Unequal clients: training rows in order, every client tested on all test rows."""
    ends = np.cumsum(sizes)
    rows = np.arange(40, dtype=np.int32)
    test = np.arange(40, 60, dtype=np.int32)
    return Partition(
        train=tuple(rows[end - size : end] for size, end in zip(sizes, ends, strict=True)),
        validation=tuple(test[:0] for _ in sizes),
        test=tuple(test[i:] for i in range(len(sizes))),
        relabel=np.tile(np.arange(CLASSES, dtype=np.int32), (len(sizes), 1)),
        outputs=CLASSES,
        public=rows[-PUBLIC:],
    )


def tiny_links() -> np.ndarray:
    """Who of the five clients is linked with whom, (5, 5) bool."""
    links = np.zeros((len(SIZES), len(SIZES)), bool)
    for i, k in EDGES:
        links[i, k] = links[k, i] = True
    return links


def validating(partition: Partition) -> Partition:
    """The same with validation rows, which some methods need."""
    return partition._replace(validation=tuple(rows[:6] for rows in partition.test))


def initial(model):
    """A model's first weights, as one program: drawn layer by layer they are many."""
    return jax.jit(model.init)(jax.random.key(0))


def cohort(federation, ids, t: int = 0, rounds: int = 3, places=None) -> Cohort:
    """Round t with the clients of these ids, in this order within their groups.

    Every group has as many places as clients, if not told otherwise, so that a method compiles once.
    """

    def slots(group, places):
        n = len(group.id)
        position = {int(i): place for place, i in enumerate(np.asarray(group.id))}
        present = [position[i] for i in ids if i in position]
        index = present + [n] * (places - len(present))
        return Slots(np.array(index, np.int32), np.arange(places) < len(present))

    places = places or [len(group.id) for group in federation.groups]
    return Cohort(np.int32(t), tuple(map(slots, federation.groups, places)), rounds)


def assert_same(actual, expected, tolerance: float = 0.0):
    """Compare the leaves of two trees: to the bit, dtypes included, or up to rounding."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if tolerance:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(a, b, strict=True)


def differ(one, other) -> bool:
    """Whether two trees differ in any bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return not all(np.array_equal(a, b) for a, b in pairs)


def comparable(record):
    """A round's metrics or a run's result, without what the same run has differently another time."""
    apart = ("seconds", "together", "compilations")
    kept = {key: value for key, value in record.items() if key not in apart}
    if kept.get("findings"):
        unshared = ("server seconds", "compiled parts")
        kept["findings"] = {key: value for key, value in kept["findings"].items() if key not in unshared}
    return kept


def arrays_of(checkpoint):
    """The arrays of a checkpoint, the path of one, by name."""
    found = ocp.metadata(checkpoint).metadata
    return ocp.load(checkpoint, {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in found.items()})


def _touch(figure, file, **options):
    Path(file).touch()


RENDER, Figure.savefig = Figure.savefig, _touch  # rendering takes a quarter of the tests of runs


@contextmanager
def drawing():
    """Here pictures are rendered, which is left out elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", RENDER)
        yield


@pytest.fixture
def drawn():
    """For a test that looks at pictures."""
    with drawing():
        yield


def pytest_configure(config):
    """The session's first process makes the cache of compiled programs that all of them share."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a shell's background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.compiled = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxfl-tests-")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])


def pytest_runtest_setup():
    """What is there lives on: a collection looks at what a test has made, not at a million older objects."""
    gc.freeze()


def pytest_unconfigure(config):
    """And removes it."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(config.compiled, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def new_programs():
    """What a module counts of compilations does not depend on the modules before it."""
    variant._programs_without_rates.cache_clear()


@contextmanager
def optimising():
    """What users run: programs are optimised, and round otherwise than quickly compiled ones."""
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
        variant._programs_without_rates.cache_clear()


@pytest.fixture(scope="module")
def optimised_compilation():
    """For a whole module."""
    with optimising():
        yield


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """The options that name a tiny data set."""
    path, source = tmp_path_factory.mktemp("data") / "tiny.npz", tiny_source()
    np.savez(path, images=source.images, labels=source.labels, split=source.train)
    return ["--dataset", str(path)]


@pytest.fixture(scope="session")
def federation():
    """Five unequal clients, two architectures."""
    source = tiny_source()
    return federate(source, tiny_partition(source), tiny_models())
