"""The workloads: seven federations, as data, and the ways in which jaxfl can run them."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.config import choices
from jaxfl.config.setup import Setup
from jaxfl.data.sources import Source, from_arrays
from jaxfl.errors import JaxflError
from jaxfl.runs.prepare import load_source

REPETITIONS = 5

SHAPES = {"cifar10": (32, 32, 3), "mnist": (28, 28, 1)}  # of images; both have ten classes
TOKENS = "characters"  # rows of 80 of as many, as in LEAF's Shakespeare, drawn at random
PER_ROW = ("images", "labels", "train")


class Strategy(NamedTuple):
    """A way to run a workload."""

    setup: dict[str, Any] = {}  # options of `Setup`
    seeds: int = 1  # number of runs, each with its own weights, cohorts and batches
    together: bool = False  # whether they are one program, or take turns


def strategies(names: Sequence[str]) -> dict[str, Strategy]:
    """Return strategies by name, in order; "5 seeds" and "devices 1..all" are names of several.

    Raises:
      JaxflError: if one is unknown.
    """
    every = jax.local_device_count()
    single = {
        "auto": Strategy(),
        "one device": Strategy({"devices": 1}),
        "one at a time": Strategy({"clients_at_once": 1}),
        "ten at once": Strategy({"clients_at_once": 10}),
        "rows": Strategy({"convolution": "rows"}),
        "patches": Strategy({"convolution": "patches"}),
        "plain": Strategy({"convolution": "plain"}),
        "tf32": Strategy({"precision": "tf32"}),
        "bfloat16": Strategy({"precision": "bfloat16"}),
    }
    known = {name: {name: strategy} for name, strategy in single.items()} | {
        "devices 1..all": {f"devices {n}": Strategy({"devices": n}) for n in range(1, every + 1)},
        "5 seeds": {"5 seeds in turn": Strategy(seeds=5), "5 seeds": Strategy(seeds=5, together=True)},
    }
    chosen = {}
    for name in names:
        chosen |= choices.lookup("strategy", known, name)
    return chosen


class Workload(NamedTuple):
    """A federation and how its clients train."""

    what: str  # description in one line
    images: int  # number of training images that the clients share, the first of the data set
    setup: dict[str, Any]  # options of `Setup`
    methods: tuple[str, ...]  # choices such as "ditto,personal_epochs=1"; none stands for all built-in ones
    training: dict[str, Any]  # options that all methods have
    on_cpu: dict[str, Any] = {}  # options of `Setup` for a machine without an accelerator
    repetitions_on_cpu: int = REPETITIONS  # number of repetitions there, unless the user sets it
    rival: str | None = None  # the method with which each takes turns, in place of the PyTorch loop
    patience_s: float = math.inf  # seconds; a contestant that has trained longer is timed no further
    ways: Mapping[str, Strategy] = {}  # further ways to run it, by name


def _of_each_class(samples: int) -> dict[str, Any]:
    """Return options for clients with equally many rows of all ten classes."""
    return {"partition": f"classes,classes_per_client=10,samples_per_client={samples}"}


WORKLOADS = {
    "W1": Workload(
        "CIFAR-10, LeNet5 with BatchNorm, 100 unequal clients, 10 a round",
        20_000,
        {"dataset": "cifar10", "partition": "dirichlet,alpha=0.1,min_samples=10", "models": ("lenet5",)}
        | {"clients": 100, "participation": 0.1},
        ("fedavg", "fedper", "fedrep"),
        {"epochs": 5, "batch_size": 32},
    ),
    "W2": Workload(
        "MNIST, McMahan CNN with valid padding, 20 clients",
        15_000,
        {"dataset": "mnist", "partition": "iid", "models": ("mcmahan,padding=valid",), "clients": 20},
        ("fedavg", "fedrep", "ditto,personal_epochs=1"),
        {"epochs": 1, "batch_size": 10},
    ),
    "W3": Workload(
        "CIFAR-10, McMahan CNN with same padding, 20 clients of 500 images (on a CPU 2 of them a round)",
        10_000,
        {"dataset": "cifar10", "models": ("mcmahan,padding=same",), "clients": 20} | _of_each_class(500),
        ("fedavg",),
        {"epochs": 5, "batch_size": 50, "momentum": 0.5},
        on_cpu={"participation": 0.1},
    ),
    "W4": Workload(
        "MNIST, MLP 784-100-10, 1,000 clients of 50 images",
        50_000,
        {"dataset": "mnist", "models": ("mlp",), "clients": 1000} | _of_each_class(50),
        ("fedavg",),
        {"epochs": 1, "batch_size": 10},
    ),
    "W5": Workload(
        "CIFAR-10, ResNet-18 and McMahan CNN mixed, 20 clients of 500 images (2 of 100 on a CPU)",
        10_000,
        {"dataset": "cifar10", "models": ("mcmahan", "resnet18"), "clients": 20} | _of_each_class(500),
        ("compfl",),
        {"epochs": 1, "batch_size": 50},
        on_cpu={"clients": 2} | _of_each_class(100),
        repetitions_on_cpu=2,
    ),
} | {
    name: Workload(
        f"The next of 80 random characters, {what}, 20 clients of 100 rows, 5 a round",
        2_000,
        {"dataset": TOKENS, "partition": "iid", "models": (model,), "clients": 20, "participation": 0.25},
        ("fedavg",),
        {"epochs": 1, "batch_size": 10},
    )
    for name, what, model in (
        ("W6", "a GRU of 256 features", "gru,hidden=256"),
        ("W7", "a transformer of two encoders, 128 features", "transformer,width=2"),
    )
}


def _written(what: str, model: str, images: int, **further: Any) -> Workload:
    """Return a workload of one network three times: the zoo's, as its user would write it, and PyTorch's."""
    own = {"models": (f"{Path(__file__).with_name('own_network.py')}:{model}",)}
    return Workload(
        f"CIFAR-10, {what}, 4 clients of {images} images: what does writing it in Flax cost?",
        4 * images,
        {"dataset": "cifar10", "models": (model,), "clients": 4} | _of_each_class(images),
        ("fedavg",),
        {"epochs": 1, "batch_size": 32},
        ways={"in Flax": Strategy(own)}
        | {f"in Flax, {value}": Strategy(own | {name: value}) for name, value in further.items()},
    )


OWN_NETWORKS = {
    "own": _written("ResNet-9 of width 1/8", "resnet9,width=0.125", 500, convolution="plain"),
    "own-resnet18": _written("ResNet-18", "resnet18", 64),
    "own-vit": _written("a ViT of four encoders", "vit,depth=4", 128),
}
# Variants that answer one question each; they run only when named.
VARIANTS = {
    "W1-equal": WORKLOADS["W1"]._replace(
        what="W1 with equal clients: what do unequal ones cost?",
        setup=WORKLOADS["W1"].setup | {"partition": "iid"},
        methods=("fedavg",),
    ),
    "methods": Workload(
        "CIFAR-10, LeNet5 and cifar_small, 20 clients of 200 images: what does an operation cost in each "
        "method?",
        5_000,
        # Equally many features in both, as some methods need that.
        {"dataset": "cifar10", "models": ("lenet5", "cifar_small,features=84"), "clients": 20}
        | _of_each_class(200),
        (),
        {"epochs": 1, "batch_size": 50},
        rival="fedavg",
        patience_s=60,
    ),
    "resnet18": WORKLOADS["W5"]._replace(
        what="W5 with ResNet-18 and FedAvg alone: how much of the device do large networks use?",
        setup=WORKLOADS["W5"].setup | {"models": ("resnet18",)},
        methods=("fedavg",),
    ),
} | OWN_NETWORKS
VARIANTS |= {
    f"W4-{clients}": WORKLOADS["W4"]._replace(
        what=f"W4 with {clients:,} clients: does a client cost the same among many?",
        setup=WORKLOADS["W4"].setup | {"clients": clients},
    )
    for clients in (10, 100, 10_000)
}
VARIANTS |= {  # the same number of images per client for any number of clients, so that --grow finds the most
    f"{model}-own": Workload(
        f"CIFAR-10, clients of three images, each with a {model} of its own: how many fit in memory?",
        4 * clients,
        {"dataset": "cifar10", "models": (model,), "clients": clients, "partition": "iid", "test": "own"},
        ("local",),
        {"epochs": 1, "batch_size": 10},
    )
    for model, clients in (("lenet5", 1000), ("resnet18", 20))
}


def grown(workload: Workload, clients: int) -> Workload:
    """Return the workload with `clients` clients, and as many images for each as before."""
    images = workload.images * clients // workload.setup["clients"]
    number = {"clients": clients}
    return workload._replace(images=images, setup=workload.setup | number, on_cpu=workload.on_cpu | number)


def small(workload: Workload) -> Workload:
    """Return the workload with four clients of ten images, to see that it works, not how fast."""
    few = {"clients": 4, "participation": 1.0, "partition": "iid"}
    return workload._replace(images=40, setup=workload.setup | few, on_cpu={}, repetitions_on_cpu=1)


def setup_of(workload: Workload) -> Setup:
    """Return the workload's options on this machine.

    Clients train on all rows that they share. Test rows are the source's: speed needs none, but every client
    must have some.
    """
    here = workload.on_cpu if jax.default_backend() == "cpu" else {}
    return Setup.of(**{"test": "source", "max_test": 10} | workload.setup | here)


def repetitions_of(workload: Workload) -> int:
    """Return how often the workload is timed on this machine."""
    return workload.repetitions_on_cpu if jax.default_backend() == "cpu" else REPETITIONS


def source_of(workload: Workload, setup: Setup, say: Callable[[str], None]) -> tuple[Source, str]:
    """Return the workload's images, and whether they are "real" or "random".

    They are real if tensorflow-datasets has prepared them, or `data_dir` has them as arrays, mnist.npz. If
    random images of the same shape replace them, `say` gets the reason.
    """
    name, folder = setup.data.dataset, setup.machine.data_dir
    if name == TOKENS:
        return _characters(workload.images), "random"
    if folder and (folder / f"{name}.npz").is_file():
        setup = setup.replace(dataset=str(folder / f"{name}.npz"))
    try:
        source = load_source(setup)
        if name in SHAPES and source.train.sum() < workload.images:
            raise JaxflError(f"It has {source.train.sum():,} images to train on, not {workload.images:,}.")
    except JaxflError as error:
        if name not in SHAPES:
            raise
        say(f"Random images take the place of {name}, which does not change the times. {error}")
        return _random(name, SHAPES[name], workload.images), "random"
    rows = np.r_[np.arange(min(workload.images, source.train.sum())), np.flatnonzero(~source.train)]
    return source._replace(**{name: getattr(source, name)[rows] for name in PER_ROW}), "real"


def _random(name: str, shape: tuple[int, ...], count: int) -> Source:
    rng, test = np.random.default_rng(0), 1000
    images = rng.integers(0, 256, (count + test, *shape), dtype=np.uint8)
    labels = rng.permutation(np.arange(count) % 10)  # equally many of each class
    return from_arrays(
        name, images, np.r_[labels, np.arange(test) % 10], np.arange(count + test) < count, classes=10
    )


def _characters(count: int) -> Source:
    rng, test = np.random.default_rng(0), 100
    rows = rng.integers(0, 80, (count + test, 80), dtype=np.int32)
    return from_arrays(TOKENS, rows, None, np.arange(count + test) < count, 0, vocabulary=80)
