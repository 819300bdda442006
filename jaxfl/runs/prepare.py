"""From options to a federation: what the command line and `jaxfl.run` have in common.

source -> partition -> models -> Federation
"""

import dataclasses
import functools
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from jaxfl.config import choices
from jaxfl.config.options import check, within
from jaxfl.core import memory
from jaxfl.core.protocol import Method
from jaxfl.data import partition as partitions
from jaxfl.data.federation import Federation, federate
from jaxfl.data.partition import Partition
from jaxfl.data.partitioners import PARTITIONS, TEST
from jaxfl.data.public_images import Public, adapt
from jaxfl.data.sources import Source, from_arrays, is_folder, load
from jaxfl.errors import JaxflError
from jaxfl.machine.clock import Device, profile
from jaxfl.machine.processes import agree
from jaxfl.models.measured import fastest
from jaxfl.models.model import Model
from jaxfl.models.zoo import MODELS


@dataclasses.dataclass(frozen=True)
class Setup:
    """The federation and the run: options that mean the same for every method."""

    dataset: str = "digits"
    """digits, a tensorflow-datasets name (cifar10, cifar100:coarse_label, emnist/byclass, ...), an .npz
    file, a folder with one sub-folder of images per class, or my.py:source."""
    data_dir: Path | None = None
    """Where tensorflow-datasets keeps its data; its own default if not given."""
    partition: str = "classes"
    """classes, iid, shards, dirichlet, dirichlet-flbench, quantity or power-law, with options:
    dirichlet,alpha=0.5; a saved partition (.npz); or my.py:partitioner."""
    partition_seed: int = within("[0, inf)", 0)
    """Draws the partition. It is the data: fixed, whatever the seed of the run."""
    labels: Literal["unified", "independent"] = "unified"
    """Whether a label means the same on all clients, or each numbers its classes anew."""
    test: Literal["auto", "own", "source"] = "auto"
    """Test rows: cut from the client's own rows, or the source's test rows of its classes. auto: source
    for the partition `classes`, own for the others."""
    test_fraction: float = within("(0, 1)", 0.25)
    """Share of a client's rows that are test rows, where they are cut from its own."""
    validation_fraction: float = within("[0, 1)", 0.0)
    """Share of a client's training rows that are set aside for validation."""
    max_test: int | None = within("[1, inf)", None)
    """At most so many test rows per client; from the source, equally many of each of its classes."""
    public: str = "auto"
    """Images that everybody sees: none, held-out (with share=0.1: of every class, taken from the clients), or
    another data set with size=NUMBER and labels=true where these mean the same: mnist,size=3000. auto:
    held-out where a method needs some, or what a saved partition holds."""
    clients: int = within("[1, inf)", 20)
    """Number of clients."""
    models: tuple[str, ...] = ()
    """Architectures, each with options (resnet18,width=0.5) and perhaps a number of clients
    (mlp,clients=5); by default clients are divided equally. Default: mlp mcmahan,padding=same on digits,
    lenet5 mcmahan elsewhere."""
    rounds: int = within("[1, inf)", 50)
    """Communication rounds."""
    participation: float = within("(0, 1]", 1.0)
    """Share of clients that take part in a round."""
    eval_every: int = within("[1, inf)", 5)
    """Rounds between evaluations; they run as one program."""
    device_profile: tuple[str, ...] = ()
    """What clients compute with, for a simulated wall clock: architecture=FLOPS:BYTES for each, operations
    and bytes per second, such as lenet5=1e9:1e6."""
    score_cohort: bool = False
    """Score the clients of every round on their test rows before (received) and after (personal) local
    training."""
    checkpoint_every: int | None = within("[1, inf)", None)
    """Rounds between checkpoints, a multiple of eval_every; by default every evaluation."""
    keep_checkpoints: int = within("[1, inf)", 2)
    """How many of them are kept, the newest ones: should one be damaged, a resume takes the one before."""
    seed: int = within("[0, inf)", 0)
    """Initial weights, cohorts and batches."""
    clients_at_once: int | None = within("[1, inf)", None)
    """Clients of a group that train side by side on a device; by default 1 on a CPU, all elsewhere."""
    devices: int | None = within("[1, inf)", None)
    """Devices that share the clients of a round; by default all that JAX has (the command line starts one
    per CPU core), but no more than a group has clients in a round on average. Each holds the data set and
    the state: on a machine with many cores and little memory give fewer."""
    convolution: Literal["auto", "measured", "rows", "patches", "plain"] = "auto"
    """How convolutions are computed: auto goes by backend and shapes; measured tries them once on each
    network and remembers."""
    precision: Literal["full", "bfloat16"] = "full"
    """What networks compute in: JAX's default float, or bfloat16, for accelerators. Parameters stay as they
    are."""


# Options that a saved partition holds the outcome of.
SAVED = ("partition_seed", "labels", "test", "test_fraction", "validation_fraction", "max_test")


class Data(NamedTuple):
    """A prepared federation and what it was made of; `devices` are the clients', where they are given."""

    source: Source
    partition: Partition
    models: tuple[tuple[Model, int], ...]
    federation: Federation
    devices: dict[str, Device] | None


@memory.explained()
def prepare(setup: Setup, saved_partition: Path | None = None, source: Source | None = None) -> Data:
    """Load, divide and put on the device.

    Args:
      setup: the options.
      saved_partition: use this one instead of drawing it (the one of a run that is resumed).
      source: use this one instead of loading it.

    Raises:
      JaxflError: if something does not fit or is not at hand.
    """
    check_setup(setup)
    _require_device()
    agree("options", absolute(setup))
    source = source or load_source(setup)
    partition = divide(setup, source, saved_partition)
    setup, models = on_this_machine(setup, build_models(setup, source, partition))
    public = other_images(setup, source)
    federation = federate(source, partition, models, setup.clients_at_once, setup.devices, public)
    clients_devices = profile(setup.device_profile, [model.name for model, _ in models])
    return Data(source, partition, models, federation, clients_devices)


def _require_device() -> None:
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        raise JaxflError(
            f"JAX finds no device of JAX_PLATFORMS={jax.config.jax_platforms or ''}; unset it, or install "
            "JAX for that device."
        ) from error


def for_methods(setup: Setup, methods: Iterable[Method]) -> Setup:
    """The setup with public images, if one of the methods needs some and the user chose nothing."""
    if setup.public != "auto" or setup.partition.endswith(".npz"):
        return setup
    return dataclasses.replace(
        setup, public="held-out" if any("public" in m.needs(m.config()) for m in methods) else "none"
    )


def held_out(setup: Setup) -> float:
    """The share of every class that is held out as public images.

    Raises:
      JaxflError: if the user gave one that is no share.
    """
    name, options = choices.split(setup.public)
    if name != "held-out":
        return 0.0
    share = choices.convert(name, {"share": float}, options).get("share", 0.1)
    if not 0 < share < 1:
        raise JaxflError(f"--public held-out: share must lie in (0, 1), but is {share}.")
    return share


def other_images(setup: Setup, source: Source) -> Public | None:
    """Public images of another data set; None where there are none or they are held out."""
    name, options = choices.split(setup.public)
    if name in ("auto", "none", "held-out"):
        return None
    options = choices.convert(name, {"size": int, "labels": bool}, options)
    other = load_source(dataclasses.replace(setup, dataset=name))
    return adapt(other, source, seed=setup.partition_seed, **options)


def cache_folder() -> Path:
    """Where compiled programs and measurements of all runs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxfl"


def on_this_machine(setup: Setup, models):
    """The setup with its automatic choices made, and the models with the convolution that was chosen."""
    largest = max(count for _, count in models)
    at_once = setup.clients_at_once or (1 if jax.default_backend() == "cpu" else largest)
    active = math.ceil(largest * setup.participation - 1e-9)
    processes = jax.process_count()  # each takes part with equally many devices
    devices = setup.devices or processes * max(1, min(jax.local_device_count(), active // processes))
    if setup.convolution == "measured":
        convolution = fastest(models, min(at_once, largest), cache_folder() / "convolutions.json")
    else:
        convolution = setup.convolution
    setup = dataclasses.replace(setup, clients_at_once=at_once, devices=devices, convolution=convolution)
    return setup, tuple((dataclasses.replace(model, convolution=convolution), n) for model, n in models)


def check_setup(setup: Setup) -> None:
    """Refuse options that contradict each other, or are of another type or range."""
    check("the run", setup)
    every = setup.checkpoint_every
    if every is not None and every % setup.eval_every:
        raise JaxflError(
            f"--checkpoint-every {every} is not a multiple of --eval-every {setup.eval_every}; "
            "checkpoints are written at evaluations."
        )
    if not setup.partition.endswith(".npz"):
        return
    if setup.public.startswith("held-out,"):
        raise JaxflError(
            f"--public {setup.public} does not change the saved partition {setup.partition}, which holds out "
            "its own images; write --public held-out."
        )
    for name in SAVED:
        if getattr(setup, name) != getattr(Setup, name):
            flag = name.replace("_", "-")
            raise JaxflError(
                f"--{flag} does not change the saved partition {setup.partition}, which was divided with "
                "its own; leave it out."
            )


def absolute(setup: Setup) -> Setup:
    """The same options with absolute paths: from every directory they name the same files."""
    dataset, partition = choices.absolute(setup.dataset), choices.absolute(setup.partition)
    if dataset.endswith(".npz") or is_folder(dataset):
        dataset = str(Path(dataset).expanduser().resolve())
    if partition.endswith(".npz"):
        partition = str(Path(partition).resolve())
    public, *options = choices.absolute(setup.public).split(",")
    if public.endswith(".npz") or (public not in ("auto", "none", "held-out") and is_folder(public)):
        public = str(Path(public).expanduser().resolve())
    return dataclasses.replace(
        setup,
        dataset=dataset,
        public=",".join([public, *options]),
        data_dir=setup.data_dir and setup.data_dir.expanduser().resolve(),
        partition=partition,
        models=tuple(map(choices.absolute, setup.models)),
    )


def load_source(setup: Setup) -> Source:
    """The data set; a user's own is ``my.py:function``, from `data_dir` to a `Source`."""
    name, _, _ = setup.dataset.partition(":")
    if not name.endswith(".py"):
        return load(setup.dataset, setup.data_dir)
    found = choices.lookup("data set", {}, setup.dataset)
    made = found(setup.data_dir)
    if not isinstance(made, Source):
        raise JaxflError(f"{setup.dataset} returns a {type(made).__name__}, not a jaxfl.data.sources.Source.")
    return from_arrays(*made)


def divide(setup: Setup, source: Source, saved: Path | None = None) -> Partition:
    """The partition: drawn by `partition_seed`, or read from a file."""
    if saved is None and setup.partition.endswith(".npz"):
        saved = Path(setup.partition)
    if saved is not None:
        partition = partitions.load(saved, source)
        if len(partition.train) != setup.clients:
            raise JaxflError(
                f"The partition {saved} has {len(partition.train)} clients, not {setup.clients}; "
                f"add --clients {len(partition.train)}."
            )
        if held_out(setup) and not len(partition.public):
            raise JaxflError(
                f"The partition {saved} holds out no public images; divide the data again with "
                "--public held-out."
            )
        return partition._replace(public=partition.public[:0]) if setup.public == "none" else partition
    name, partitioner, options = choices.function("partition", PARTITIONS, setup.partition)
    test = TEST.get(name, "own") if setup.test == "auto" else setup.test
    return partitions.divide(
        source,
        functools.partial(partitioner, **options),
        setup.clients,
        setup.partition_seed,
        test=test,
        labels=setup.labels,
        test_fraction=setup.test_fraction,
        validation_fraction=setup.validation_fraction,
        max_test=setup.max_test,
        public=held_out(setup),
    )


def build_models(setup: Setup, source: Source, partition: Partition):
    """Pairs (model, number of clients), in the order of client ids."""
    named = setup.models or default_models(setup.dataset)
    built, counts = [], []
    for choice in named:
        name, texts = choices.split(choice)
        counts.append(texts.pop("clients", None))
        factory = choices.lookup("model", MODELS, name)
        options = choices.convert(name, choices.keywords(factory), texts)
        shape, classes = source.images.shape[1:], partition.outputs
        model = factory(shape=shape, classes=classes, **options)
        if not isinstance(model, Model):
            raise JaxflError(f"{name} returns a {type(model).__name__}, not a jaxfl.models.Model.")
        if sum(choices.split(other)[0] == name for other in named) > 1:
            label = ",".join([model.name, *(f"{key}={text}" for key, text in texts.items())])
            model = dataclasses.replace(model, name=label)
        built.append(dataclasses.replace(model, precision=setup.precision))
    if len({model.name for model in built}) < len(built):
        raise JaxflError("--models names one architecture twice; name it once, with clients=NUMBER.")
    return tuple(zip(built, _divide_clients(counts, setup.clients), strict=True))


def default_models(dataset: str) -> tuple[str, ...]:
    """Two architectures that suit the images."""
    return ("mlp", "mcmahan,padding=same") if dataset == "digits" else ("lenet5", "mcmahan")


def _divide_clients(counts: list[str | None], clients: int) -> list[int]:
    if any(count is not None and not (count.isdecimal() and int(count)) for count in counts):
        raise JaxflError("--models: clients= takes a whole number from 1 up.")
    open_places = [i for i, count in enumerate(counts) if count is None]
    left = clients - sum(int(count) for count in counts if count is not None)
    if left < len(open_places) or (left and not open_places):
        raise JaxflError(
            f"--models cannot be given to {clients} clients: every architecture needs at least one, and "
            "the numbers must add up; change clients=NUMBER or --clients."
        )
    share, rest = divmod(left, max(1, len(open_places)))
    return [
        share + (open_places.index(i) < rest) if count is None else int(count)
        for i, count in enumerate(counts)
    ]
