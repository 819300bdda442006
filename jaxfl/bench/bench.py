"""The benchmark from its options to its records."""

import dataclasses
import functools
import gc
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxfl import registry
from jaxfl.bench.measure import measure
from jaxfl.bench.output import check_writable, keep, machine, unfinished, versions
from jaxfl.bench.workloads import (
    VARIANTS,
    WORKLOADS,
    grown,
    repetitions_of,
    setup_of,
    small,
    source_of,
    strategies,
)
from jaxfl.config import choices
from jaxfl.config.options import within
from jaxfl.errors import JaxflError


@dataclasses.dataclass(frozen=True)
class Bench:
    """Only training, in its steady state: medians of repetitions, taken in turn with a bare PyTorch loop."""

    methods: tuple[str, ...] = ()
    """Methods, each perhaps with options; by default the workload's own, for `methods` all."""
    strategies: tuple[str, ...] = ("auto",)
    """Ways to run them: auto, rows, patches, plain, tf32, bfloat16, "one device", "devices 1..all",
    "one at a time", "ten at once", "5 seeds" (in turn, and as one program)."""
    repetitions: int | None = within("[1, inf)", None)
    """Number of times each is timed; by default 5 times, W5 on a CPU twice."""
    rounds_per_repetition: int = within("[1, inf)", 1)
    """Rounds that are timed together."""
    torch: bool = True
    """Whether the PyTorch loop takes its turn, with fedavg, fedper, fedrep and ditto; never in `methods`."""
    grow: tuple[int, ...] = ()
    """FIRST LAST: train FIRST clients, twice as many, and so on up to LAST or until memory runs out; then
    once more the number that fitted."""
    checksum: bool = False
    """Record a checksum of what was trained: equal checksums mean equal bits."""
    small: bool = False
    """Four clients with ten images in place of the workload's: shows that a command works, not how fast."""
    data_dir: Path | None = None
    """Where tensorflow-datasets keeps its data, or mnist.npz and cifar10.npz are; random images take the
    place of a set that is missing."""
    out: Path | None = None
    """A JSON file for the records; a picture is written beside it. Repeating a command that was cut short
    continues it."""


class Measured(NamedTuple):
    """The results of a benchmark."""

    records: list[dict[str, Any]]
    """Those of `measure`, each with its "workload", "data" ("real" or "random"), "machine", "versions" and
    "command", and after a refusal "refused": how many "clients", and the "sentence"."""
    failures: list[str]  # a sentence for each method that could not be measured


def bench(names: list[str], options: Bench, command: str, say: Callable[[str], None]) -> Measured:
    """Measure some workloads, all by default.

    `command` is what the user wrote, for the records; `say` gets messages about the progress.

    Raises:
      JaxflError: if a workload, strategy or method is unknown, a number out of range, or PyTorch missing.
    """
    if options.grow and (len(options.grow) != 2 or not 0 < options.grow[0] <= options.grow[1]):
        raise JaxflError("--grow takes two numbers of clients, the first and the last: --grow 100 10000.")
    known = WORKLOADS | VARIANTS
    workloads = {name: choices.lookup("workload", known, name) for name in names or WORKLOADS}
    if options.small:
        workloads = {name: small(workload) for name, workload in workloads.items()}
    ways = strategies(options.strategies)
    for choice in options.methods:
        registry.method(choice)
    torch = options.torch and any(workload.rival is None for workload in workloads.values())
    if torch:
        importlib.import_module("jaxfl.bench.torch_loop")  # refuses at once where PyTorch is missing
    computer = machine()
    if (computer["load"] or 0) > computer["cores"] / 4:
        say(
            f"This machine is busy (load {computer['load']:.1f} on {computer['cores']} cores): the PyTorch "
            "loop suffers more from that than jaxfl; repeat this when it is idle."
        )
    facts = {"machine": computer, "versions": versions(torch), "command": command}
    check_writable(options.out)
    records, failures = unfinished(options.out, facts, say), []
    images, once = {}, functools.cache(say)  # of the last workload; each sentence about images only once

    def measured(name, workload, choice, **more):
        """Return the new records of a method on a workload of this name; none if they exist already."""
        if any((one["workload"], one["method"]) == (name, choice) for one in records):
            return []
        setup = setup_of(workload).replace(data_dir=options.data_dir)
        if name not in images:
            images.clear()
            images[name] = source_of(workload, setup, once)
        source, data = images[name]
        new = measure(
            workload,
            choice,
            setup,
            source,
            ways | workload.ways,
            repetitions=options.repetitions or repetitions_of(workload),
            rounds=options.rounds_per_repetition,
            torch=torch,
            checksum=options.checksum,
        )
        return [{"workload": name, **one, "data": data, **more, **facts} for one in new]

    def add(new):
        records.extend(new)
        keep(records, options.out)

    def grow(name, workload, choice):
        """Double the clients until memory refuses; then train once more the number that fitted."""
        first, last = (4, 16) if options.small else options.grow
        clients, refused = first, None
        while clients <= last and not refused:
            say(f"{name}: {clients:,} clients")
            try:
                new = measured(f"{name}-{clients}", grown(workload, clients), choice)
            except JaxflError as error:
                refused = {"clients": clients, "sentence": str(error)}
            else:
                add(new)
            clients *= 2
        if refused:
            gc.collect()  # the error's traceback holds what did not fit, in a cycle
            say(refused["sentence"])
            if refused["clients"] == first:
                raise JaxflError(refused["sentence"])
            fitted = refused["clients"] // 2
            again = f"{name}-{fitted}, after a refusal"
            return measured(again, grown(workload, fitted), choice, refused=refused)
        return []

    for name, workload in workloads.items():
        say(f"{name}: {workload.what}")
        for choice in options.methods or workload.methods or registry.METHODS:
            try:
                new = (grow if options.grow else measured)(name, workload, choice)
            except JaxflError as error:  # of this method; the others go on
                failures.append(f"{name}, {choice}: {error}")
                say(failures[-1])
            else:
                add(new)
    return Measured(records, failures)
