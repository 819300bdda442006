"""The benchmark from its options to its records."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxfl import registry
from jaxfl.bench.measure import measure
from jaxfl.bench.report import machine, versions
from jaxfl.bench.workloads import VARIANTS, WORKLOADS, repetitions_of, setup_of, source_of, strategies
from jaxfl.config import choices
from jaxfl.config.options import check, within


@dataclasses.dataclass(frozen=True)
class Bench:
    """Training alone in its steady state: medians of repetitions, taken in turn with a bare PyTorch loop."""

    methods: tuple[str, ...] = ()
    """Methods, each perhaps with options; by default the workload's own, of `methods` all."""
    strategies: tuple[str, ...] = ("auto",)
    """Ways to run them: auto, rows, patches, plain, bfloat16, "one device", "devices 1..all", "ten at once",
    "5 seeds" (in turn, and as one program)."""
    repetitions: int | None = within("[1, inf)", None)
    """How often each is timed; by default 5 times, W5 on a CPU twice."""
    rounds_per_repetition: int = within("[1, inf)", 1)
    """Rounds that are timed together."""
    torch: bool = True
    """Whether the PyTorch loop takes its turn, with fedavg, fedper, fedrep and ditto; never in `methods`."""
    data_dir: Path | None = None
    """Where tensorflow-datasets keeps its data; random images take the place of a set that is missing."""
    out: Path | None = None
    """A JSON file for the records; a picture is written beside it."""


def bench(names: list[str], options: Bench, command: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure some workloads, all by default.

    Args:
      names: of workloads.
      options: how they are measured.
      command: what the user wrote, for the records.
      say: told what is going on.

    Returns:
      The records of `measure`, each with its "workload", "data" ("real" or "random"), "machine",
      "versions" and "command".

    Raises:
      JaxflError: if a workload, strategy or method is unknown, a number out of range, or PyTorch missing.
    """
    check("bench", options)
    known = WORKLOADS | VARIANTS
    workloads = {name: choices.lookup("workload", known, name) for name in names or WORKLOADS}
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
    facts = {
        "machine": computer,
        "versions": versions(torch),
        "command": command,
    }
    records = []
    for name, workload in workloads.items():
        say(f"{name}: {workload.what}")
        setup = setup_of(workload).replace(data_dir=options.data_dir)
        source, data = source_of(workload, setup, say)
        for choice in options.methods or workload.methods or registry.METHODS:
            measured = measure(
                workload,
                choice,
                setup,
                source,
                ways,
                repetitions=options.repetitions or repetitions_of(workload),
                rounds=options.rounds_per_repetition,
                torch=torch,
            )
            records += [{"workload": name, **record, "data": data, **facts} for record in measured]
    return records
