"""Strict settings for every test, and federations small enough to compile in seconds."""

import functools
import gc
import os
import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

# Almost all the time of these tests is compilation: most optimisations are left out, and all processes of a
# session (workers, and commands that tests start) share a cache of the larger programs: keeping one of the
# thousands of small ones takes longer than it does to compile it again. They inherit these settings; a test
# of what users run asks for `optimising`.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from orbax.checkpoint import v1 as ocp

from jaxfl.core.protocol import Cohort, Slots
from jaxfl.data import kept
from jaxfl.data.federate import federate
from jaxfl.data.partition import Partition
from jaxfl.data.sources import Source
from jaxfl.folder import variant
from jaxfl.machine import placement
from jaxfl.models import zoo
from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import plain_cnn

pytest.register_assert_rewrite("methods.cases")  # so that failures show the compared values

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")

# The first saves a third of the time, the second a tenth of the rest, the others a twentieth. A later XLA
# aborts at the first.
QUICKLY = " ".join(
    [
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_xnnpack=false",
        "--xla_disable_hlo_passes=while-loop-invariant-code-motion,simplify-while-loops",
    ]
)
FLAGS = os.environ.get("XLA_FLAGS", "")
if jax.__version_info__ < (0, 11) and QUICKLY not in FLAGS:
    os.environ["XLA_FLAGS"] = f"{FLAGS} {QUICKLY}".strip()

kept.LEAST = float("inf")  # nothing goes to the cache of whoever runs the tests
placement.FEW = 0  # arrays of the tiny clients are divided as large ones are
gc.set_threshold(200_000, 50, 1000)  # looking at all the long-lived objects of tracing takes a tenth

SHAPE, CLASSES = (8, 8, 1), 3
SIZES = (7, 4, 5, 1, 6)  # training rows of each client: unequal, one client has a single row
PUBLIC = 10  # public rows
EDGES = (
    (0, 1),
    (1, 2),
    (0, 2),
    (2, 3),
    (3, 4),
    (0, 4),
)  # links between clients, some of which have more neighbours than others


def long(*values):
    """Return a row that runs only with the long tests; another row stands for it, unless all are costly."""
    return pytest.param(*values, marks=pytest.mark.long)


def tiny_models():
    """Return two architectures of five features, for three and two clients; they compile quickly."""
    return (zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=5), 3), (tiny_cnn("cnn", features=5), 2)


def tiny_cnn(
    name: str,
    *channels_and_pools: tuple[int, int],
    kernel: int = 3,
    norm: bool = False,
    features: int = 6,
):
    """Return a network of convolutions with these channels, each pooled, and a dense layer."""
    convs = [
        ConvBlock(channels, kernel, kernel // 2, pool, norm, bias=not norm)
        for channels, pool in channels_and_pools or [(4, 2)]
    ]
    return plain_cnn(name, convs, [DenseBlock(features)], shape=SHAPE, classes=CLASSES)


def tiny_source(seed: int = 0) -> Source:
    """Return sixty random images of three classes, which differ in their mean."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(60) % CLASSES).astype(np.int32)
    images = rng.integers(0, 120, (60, *SHAPE)) + 60 * labels[:, None, None, None]
    return Source("tiny", images.astype(np.uint8), labels, np.arange(60) < 40, CLASSES)


def tiny_partition(source: Source, sizes=SIZES) -> Partition:
    """Return unequal clients: training rows in order; client i has all test rows except the first i."""
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
    """Return which of the five clients are linked, (5, 5) bool."""
    links = np.zeros((len(SIZES), len(SIZES)), bool)
    for i, k in EDGES:
        links[i, k] = links[k, i] = True
    return links


def validating(partition: Partition) -> Partition:
    """Return the same partition with validation rows, which some methods need."""
    return partition._replace(validation=tuple(rows[:6] for rows in partition.test))


def initial(model):
    """Draw a model's initial weights by one program; layer by layer would take many."""
    return jax.jit(model.init)(jax.random.key(0))


def applied(apply, *arguments, **options):
    """Return what a model's `apply` does as one program; otherwise every operation would be one."""
    return jax.jit(functools.partial(apply, **options))(*arguments)


def some_weights(model):
    """Return weights of a model that NumPy draws, for tests that ask nothing of them: nothing is compiled."""
    rng = np.random.default_rng(0)

    def drawn(path, leaf):
        if path[-1].key in ("scale", "var", "mean"):  # of norms
            values = np.full(leaf.shape, path[-1].key != "mean")
        else:
            bound = np.prod(leaf.shape[:-1]) ** -0.5
            values = rng.uniform(-bound, bound, leaf.shape)
        return jax.device_put(values.astype(leaf.dtype))  # for which, too, nothing is compiled

    return jax.tree.map_with_path(drawn, model.form)


def cohort(federation, ids, t: int = 0, rounds: int = 3, places=None) -> Cohort:
    """Return round t with the clients of these ids, in this order within their groups.

    By default every group has as many places as clients, so that a method compiles once.
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
    """Assert that two trees have leaves of the same names, shapes, dtypes and values, up to a tolerance."""
    found, wanted = jax.tree.leaves_with_path(actual), jax.tree.leaves_with_path(expected)
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, a), (_, b) in zip(found, wanted, strict=True):
        name = jax.tree_util.keystr(path)
        if tolerance:
            np.testing.assert_allclose(a, b, tolerance, tolerance, err_msg=name, strict=True)
        else:
            np.testing.assert_array_equal(a, b, name, strict=True)


def differ(one, other) -> bool:
    """Return whether two trees differ in any value."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return not all(np.array_equal(a, b) for a, b in pairs)


def comparable(record):
    """Return a run's metrics, result or configuration, without what differs when the run is repeated."""
    apart = ("seconds", "together", "compilations")
    kept = {key: value for key, value in record.items() if key not in apart}
    if "environment" in kept:
        kept["environment"] = {key: value for key, value in kept["environment"].items() if key != "folder"}
    if kept.get("findings"):
        unshared = ("server seconds", "compiled parts")
        kept["findings"] = {key: value for key, value in kept["findings"].items() if key not in unshared}
    return kept


def arrays_of(checkpoint):
    """Return the arrays of the checkpoint at this path, by name."""
    found = ocp.metadata(checkpoint).metadata
    return ocp.load(checkpoint, {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in found.items()})


def _outline(figure, file, **options):
    Path(file).write_bytes(bytes(1000))  # a full disk refuses them


RENDER, Figure.savefig = Figure.savefig, _outline  # rendering would take a quarter of the time of tests/runs


@contextmanager
def drawing(*names):
    """Render pictures, which is left out elsewhere: those with these names, by default all."""

    def savefig(figure, file, **options):
        (_outline if names and Path(file).name not in names else RENDER)(figure, file, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield


@pytest.fixture
def drawn():
    """Render pictures in a test that looks at them."""
    with drawing():
        yield


def pytest_configure(config):
    """Create, in the session's first process, the cache of compiled programs that all its processes share."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.compiled = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxfl-tests-")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])


def pytest_runtest_setup():
    """Let garbage collection look only at what a test has made, not at a million older objects."""
    gc.freeze()


def pytest_unconfigure(config):
    """Remove the session's cache of compiled programs."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(config.compiled, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def new_programs():
    """Forget programs, so that a module's counts of compilations do not depend on the modules before it."""
    variant._kept_programs.cache_clear()


@contextmanager
def optimising():
    """Optimise programs as for users; they round differently from quickly compiled ones."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
        variant._kept_programs.cache_clear()


@pytest.fixture(scope="module")
def optimised_compilation():
    """Optimise programs in a whole module."""
    with optimising():
        yield


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """Return the options that name a tiny data set."""
    path, source = tmp_path_factory.mktemp("data") / "tiny.npz", tiny_source()
    np.savez(path, images=source.images, labels=source.labels, split=source.train)
    return ["--dataset", str(path)]


@pytest.fixture(scope="session")
def federation():
    """Return five unequal clients with two architectures."""
    source = tiny_source()
    return federate(source, tiny_partition(source), tiny_models())
