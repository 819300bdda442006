"""Strict settings for every test, and federations small enough to compile in seconds."""

import os

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jaxfl.data.federation import federate
from jaxfl.data.partition import Partition
from jaxfl.data.sources import Source
from jaxfl.models import zoo
from jaxfl.runs import variant

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_num_cpu_devices", 4)

# Almost all the time of these tests is compilation, of which this saves a third. Subprocesses inherit it, and
# whoever sets it to true tests what users run. A later XLA does not know the flag, and aborts.
FLAGS = os.environ.get("XLA_FLAGS", "")
if jax.__version_info__ < (0, 11) and "xla_cpu_use_fusion_emitters" not in FLAGS:
    os.environ["XLA_FLAGS"] = f"{FLAGS} --xla_cpu_use_fusion_emitters=false".strip()

SHAPE, CLASSES = (8, 8, 1), 3
SIZES = (7, 4, 5, 1, 6)  # training rows of the clients: unequal, and a batch of one
PUBLIC = 10  # rows that everybody sees
SHORT = {  # options with which a method does all that it does within a few rounds of tiny clients
    "fedcmd": {"selection_rounds": 2},
    "mnfl": {"public_batch": 4},
    "draftfed": {"draft_batch": 4},
    "pfedclub": {"server_epochs": 1, "candidates": 2},
    "pfedclub-plus": {"server_epochs": 1, "candidates": 2},
}


def tiny_models():
    """Two architectures that compile in a second; three clients have the first, two the second."""
    return (
        (zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=5), 3),
        (zoo.mcmahan(shape=SHAPE, classes=CLASSES, width=0.06, padding="same"), 2),
    )


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


@pytest.fixture(scope="module")
def quick_compilation():
    """For programs that compile for seconds and run for milliseconds; optimised ones round otherwise."""
    variant._programs_without_rates.cache_clear()
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    variant._programs_without_rates.cache_clear()


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
