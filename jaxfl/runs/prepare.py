"""Federations made from options, for the command line and `jaxfl.run`.

source -> partition -> links -> models -> Federation
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.config import choices
from jaxfl.config.options import Option, declared
from jaxfl.config.own_code import own_code, require_call
from jaxfl.config.setup import PartitionOptions, Setup, is_edges, is_saved
from jaxfl.config.values import as_path
from jaxfl.core import memory
from jaxfl.core.cohorts import draw_newcomers
from jaxfl.core.window import on_host
from jaxfl.data import generators as streams
from jaxfl.data import partition as partitions
from jaxfl.data import partition_formats, saved_partition, shift
from jaxfl.data.federate import federate, set_apart, without_data
from jaxfl.data.federation import Federation
from jaxfl.data.normalisation import Moments, training_moments
from jaxfl.data.partition import Partition
from jaxfl.data.partitioners import PARTITIONS, rule_of_test
from jaxfl.data.public import Public, adapt
from jaxfl.data.readers import CLASSES, absolute, load, reader_of, whole
from jaxfl.data.shift import Drawn
from jaxfl.data.sources import Source, column, numbered
from jaxfl.errors import JaxflError, nearest
from jaxfl.folder import store
from jaxfl.folder.records import DataSet
from jaxfl.machine.processes import on_first_process
from jaxfl.mechanisms.wire import wire_of
from jaxfl.models.model import Model
from jaxfl.results.target import check_targets
from jaxfl.runs.architectures import build_models, client_devices, clients_of_each
from jaxfl.runs.recorded_data import recorded_moments, require_same_images, require_same_public
from jaxfl.tasks import task_of

CLIENTS = 20  # default number
# Default options of a partition by data set: digits are few, and a client with little data learns from
# others.
USUAL = {("digits", "classes"): {"samples_per_client": 20}}


class Data(NamedTuple):
    """A prepared federation and what it was made of.

    `starts` says from what architectures start, if given, and `drawn` is the shift of the clients' images, if
    any.
    """

    source: Source
    partition: Partition
    models: tuple[tuple[Model, int], ...]
    federation: Federation
    starts: tuple[str, ...] = ()
    drawn: Drawn | None = None
    others: str = ""  # checksum of public images of another set


@memory.explained()
def prepare(setup: Setup, saved: Path | None = None, source: Source | None = None) -> Data:
    """Load the data, divide them and put them on the device.

    Partition and links of the run `saved` are used instead of drawing them.

    Raises:
      JaxflError: if something does not fit or is not available, or the run was computed on other images.
    """
    _require_device()
    source = source or load_source(setup)
    check_targets(setup.run.target, source.task)
    partition = divide(setup, source, saved and saved / store.PARTITION)
    then = store.read_config(saved)["data"] if saved else None
    if saved and then:
        require_same_images(saved, then, source)
    links = link(setup, len(partition.train), saved)
    shape = source.images.shape[1:]
    models = build_models(setup, shape, partition, source.task, source.vocabulary)
    public = other_images(setup, source, partition.rows)
    others = public.checksum if public else ""
    at_once, devices = share_out(setup, max(count for _, count in models))
    drawn = draw_shift(setup, source, len(partition.train))
    hosted = setup.machine.client_state == "host"
    moments = recorded_moments(then) if then else moments_of(setup, source, partition)
    federation = federate(source, partition, models, at_once, devices, public, links, drawn, hosted, moments)
    federation = with_newcomers(setup, federation)
    federation = replace(federation, wire=wire_of(setup, federation, source.images))
    if hosted:
        federation = on_host(federation)
    if saved and then:
        require_same_public(saved, then, len(federation.public), others)
    client_devices(setup, federation)  # refuses a profile that does not fit, before a run begins
    return Data(source, partition, models, federation, drawn=drawn, others=others)


def same_source(setup: Setup, run: Path) -> Source:
    """Load the data set of a run.

    Raises:
      JaxflError: if it is not available, or has other labels or images than when the run was begun.
    """
    source = load_source(setup)
    _saved(run / store.PARTITION, source)
    require_same_images(run, store.read_config(run)["data"], source)
    return source


def prepare_without_data(setup: Setup, images: DataSet, partition: Partition, begun: Path) -> Federation:
    """Return the federation of a begun run on one device without its data, which `images` describes.

    Raises:
      JaxflError: if something does not fit, or a model is not found again.
    """
    _require_device()
    shape, vocabulary = tuple(images["shape"]), images.get("vocabulary", 0)
    models = build_models(setup, shape, partition, task_of(images), vocabulary)
    links = link(setup, len(partition.train), begun)
    moments = recorded_moments(images)
    data = without_data(partition, models, moments, images["public"], links, vocabulary)
    federation = with_newcomers(setup, data)
    return replace(federation, wire=wire_of(setup, federation))


def with_newcomers(setup: Setup, federation: Federation) -> Federation:
    """Return the federation with newcomers set apart, drawn by `partition_seed`.

    Raises:
      JaxflError: if some are asked for and none is drawn, or nobody of an architecture is left to train.
    """
    counts = [len(group.id) for group in federation.groups]
    drawn = newcomers_of(setup, counts)
    if setup.run.newcomers and not np.concatenate(drawn).any():
        most = max(counts)
        has, way = ("1 client", "--clients") if most == 1 else (f"{most} clients", "it, or --clients")
        raise JaxflError(
            f"--newcomers {setup.run.newcomers} selects no client: the largest architecture has {has}; "
            f"raise {way}."
        )
    apart = [new | np.asarray(has) for new, has in zip(drawn, federation.newcomers, strict=True)]
    for model, new in zip(federation.models, apart, strict=True):
        if new.all():
            raise JaxflError(
                f"Nobody would train {model.name}: all of its clients are newcomers or have no training "
                "rows; give it more clients, or take fewer --models."
            )
    return set_apart(federation, apart) if setup.run.newcomers else federation


def moments_of(setup: Setup, source: Source, partition: Partition) -> Moments:
    """Return the moments of the rows that clients train on, without those of newcomers."""
    counts = clients_of_each(setup, source.images.shape[1:], len(partition.train))
    apart = np.concatenate(newcomers_of(setup, counts))
    trained = [rows for rows, away in zip(partition.train, apart, strict=True) if not away]
    return training_moments(source, trained, setup.data.normalise)


def newcomers_of(setup: Setup, counts: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Draw newcomers among the clients of each architecture: per group (n_g,) bool, in the order of ids."""
    return draw_newcomers(counts, setup.run.newcomers, setup.partition.partition_seed)


def _require_device() -> None:
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        platforms = getattr(jax.config, "jax_platforms", None) or ""
        raise JaxflError(
            f"JAX finds no device for JAX_PLATFORMS={platforms}; unset it, or install JAX for that device."
        ) from error


def held_out(setup: Setup) -> float:
    """Return the share of every class that is held out as public images.

    Raises:
      JaxflError: if the user's share is outside of (0, 1).
    """
    name, options = choices.split(setup.data.public)
    if name != "held-out":
        return 0.0
    share = Option("share", float, interval="(0, 1)")
    return choices.convert("--public held-out", {"share": share}, options).get("share", 0.1)


def other_images(setup: Setup, source: Source, owned: np.ndarray) -> Public | None:
    """Return public images of another data set; None if there are none or they are held out.

    From the clients' own data set, rows that clients own are left out.
    """
    name, options = choices.split(setup.data.public)
    if name in ("auto", "none", "held-out"):
        return None
    own = {option: Option(option, str) for option in (CLASSES, *declared(reader_of(name).read))}
    common = {"size": Option("size", int), "labels": Option("labels", bool)}
    options = choices.convert(name, common | own, options)
    name = choices.join(name, {key: options.pop(key) for key in own if key in options})
    (ours, some), (others, other_some) = (whole(absolute(one)) for one in (setup.data.dataset, name))
    if options.get("labels") and ours == others and _numbers(some) != _numbers(other_some):
        raise JaxflError(
            f"--public {name} numbers its classes otherwise than {setup.data.dataset}; choose the same ones, "
            "or leave out labels=true."
        )
    other = load(name, setup.machine.data_dir, options.get("labels", False))
    return adapt(other, source, seed=setup.partition.partition_seed, owned=owned, **options)


def _numbers(classes: str | None) -> list[int] | None:
    return None if classes is None else numbered(classes)


def share_out(setup: Setup, largest: int) -> tuple[int, int]:
    """Return how many clients train at once on a device, and how many devices share them.

    The setup may say so; else this machine does, by the clients of the largest group.
    """
    at_once = setup.machine.clients_at_once or (1 if jax.default_backend() == "cpu" else largest)
    active = math.ceil(largest * setup.run.participation - 1e-9)
    processes = jax.process_count()  # each takes part with equally many devices
    usual = processes * max(1, min(jax.local_device_count(), active // processes))
    return at_once, setup.machine.devices or usual


def load_source(setup: Setup) -> Source:
    """Load the clients' data set.

    Raises:
      JaxflError: if it is not available, or all rows are of one class.
    """
    source = load(setup.data.dataset, setup.machine.data_dir, task=setup.data.task)
    if source.labels.ndim == 1 and source.classes < 2:
        raise JaxflError(f"{source.name}: all rows are of one class, so there is nothing to learn.")
    return source


def chosen_partitioner(setup: Setup) -> tuple[str, Callable, dict[str, Any]]:
    """Return the partitioner: its name, its function, and its options.

    Raises:
      JaxflError: if there is none of this name, or it has no such options.
    """
    name, partitioner, options = choices.function("partition", PARTITIONS, setup.partition.partition)
    options = USUAL.get((whole(setup.data.dataset)[0], name), {}) | options
    require_call(name, partitioner, "labels", "clients", "rng", **options)
    return name, partitioner, options


def divide(setup: Setup, source: Source, saved: Path | None = None) -> Partition:
    """Draw the partition by `partition_seed`, or read it from a file."""
    choice = setup.partition.partition
    if saved is None and is_saved(choice):
        saved = as_path(choice)
    if saved is not None:
        partition = _saved(saved, source)
        if setup.partition.clients not in (None, len(partition.train)):
            raise JaxflError(
                f"The partition {saved} has {len(partition.train)} clients, not {setup.partition.clients}; "
                f"add --clients {len(partition.train)}."
            )
        if held_out(setup) and not len(partition.public):
            raise JaxflError(
                f"The partition {saved} holds out no public images; divide the data again with "
                "--public held-out, or name another data set in its place."
            )
        return partition._replace(public=partition.public[:0]) if setup.data.public == "none" else partition
    name, partitioner, options = chosen_partitioner(setup)
    by = _column(source, partitioner, options)
    other = setup.partition.disjoint_from
    without = _saved(other, source).rows if other else ()
    test = rule_of_test(setup.partition)
    if test in ("source", "all") and setup.partition.test_fraction != PartitionOptions.test_fraction:
        raise JaxflError(
            f"--test-fraction cuts test rows from what clients have, but with --partition {name} they are "
            f"tested on the data set's own test rows ({test}); leave it out, or add --test own."
        )
    return partitions.divide(
        source,
        own_code()(functools.partial(partitioner, **options)),
        setup.partition.clients or (CLIENTS if by is None else None),
        setup.partition.partition_seed,
        by=by,
        test=test,
        labels=setup.partition.labels,
        test_fraction=setup.partition.test_fraction,
        validation_fraction=setup.partition.validation_fraction or 0.0,
        max_train=setup.partition.max_train,
        max_test=setup.partition.max_test,
        public=held_out(setup),
        without=np.asarray(without, int),
    )


def _saved(path: Path, source: Source) -> Partition:
    """Read a partition from a file in jaxfl's own format, JSON or FL-bench's."""
    read = saved_partition.load if path.suffix == ".npz" else partition_formats.read
    return on_first_process(read)(path, source)


def _column(source: Source, partitioner: Callable, options: dict) -> np.ndarray | None:
    """Return the column of the data by which a partitioner divides, (N,); None if it uses labels."""
    known = declared(partitioner)
    return column(source, options.get("column", known["column"].default)) if "column" in known else None


def draw_shift(setup: Setup, source: Source, clients: int) -> Drawn | None:
    """Draw the shift of each client's images by `partition_seed`; None without a shift."""
    kinds, amounts, seed = [], [], setup.partition.partition_seed
    for choice in setup.data.shift:
        name, _ = choices.split(choice)
        if name not in shift.SHIFTS:
            raise JaxflError(f"There is no shift {name!r}; {nearest(name, shift.SHIFTS)}")
        _, draw, options = choices.function("shift", shift.SHIFTS, choice)
        further = (len(kinds), streams.AMOUNTS) if kinds else ()
        rng = streams.generator(seed, streams.SHIFT, *further)
        amounts.append(draw(clients, rng, **options))
        kinds.append(name)
    shift.require(source.name, kinds, source.images.shape[1:])
    if "noise" in kinds and setup.data.normalise == "none":
        raise JaxflError(
            "--shift noise is measured in the deviations by which --normalise divides, and none divides by "
            "nothing; leave one of them out."
        )
    return Drawn(tuple(kinds), tuple(amounts), seed % 2**32) if kinds else None


def link(setup: Setup, clients: int, saved: Path | None = None) -> np.ndarray | None:
    """Draw the links of clients by `partition_seed`, or read those of a saved run or of a file."""
    choice = setup.run.topology
    if choice == "none":
        return None
    from jaxfl.data import graphs as topology  # here, so that runs without links do not wait for networkx

    kept = saved / store.TOPOLOGY if saved and store.holds(saved, store.TOPOLOGY) else None
    if kept or is_edges(choice):
        return on_first_process(topology.read)(kept or as_path(choice), clients)
    name, make, options = choices.function("topology", topology.TOPOLOGIES, choice)
    require_call(name, make, "clients", "rng", **options)
    rng = streams.generator(setup.partition.partition_seed, streams.TOPOLOGY)
    with own_code():
        graph = make(clients, rng, **options)
    return topology.links(f"--topology {choice}", graph, clients)
