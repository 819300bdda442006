"""The tables of `jaxfl list` and `jaxfl study --list`: all that has a name, and the options of each."""

import inspect
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from rich.table import Table as RichTable

from jaxfl import registry
from jaxfl.config import choices
from jaxfl.config.options import Described, declared, described
from jaxfl.core.protocol import Method
from jaxfl.core.schedule import SCHEDULES
from jaxfl.core.training import Training
from jaxfl.data.graphs import TOPOLOGIES
from jaxfl.data.partitioners import PARTITIONS
from jaxfl.data.readers import READERS, Reader, reader_of
from jaxfl.data.shift import SHIFTS
from jaxfl.errors import JaxflError
from jaxfl.grid.study_file import found_below, settings
from jaxfl.mechanisms.wire.aggregation import AGGREGATORS
from jaxfl.mechanisms.wire.attacks import ATTACKS
from jaxfl.mechanisms.wire.compression import COMPRESSIONS
from jaxfl.mechanisms.wire.privacy import MECHANISMS
from jaxfl.mechanisms.wire.setup import COMMON
from jaxfl.models.zoo import BUILT_FOR, MODELS
from jaxfl.models.zoo import described as described_model
from jaxfl.results.measures import titles
from jaxfl.tasks import CLASSES, TASKS

NAMED = {  # by their name in the plural, which `jaxfl list` takes
    "methods": registry.METHODS,
    "models": MODELS,
    "partitions": PARTITIONS,
    "topologies": TOPOLOGIES,
    "shifts": SHIFTS,
    "schedules": SCHEDULES,
    "attacks": ATTACKS,
    "compressions": COMPRESSIONS,
    "privacy": MECHANISMS,
    "servers": AGGREGATORS,
    "scores": titles(),
    "datasets": {name: reader for reader in READERS for name in reader.examples},
}
ON_THE_WIRE = {**ATTACKS, **COMPRESSIONS, **MECHANISMS, **AGGREGATORS}
CHOICES = {**registry.METHODS, **MODELS, **PARTITIONS, **TOPOLOGIES, **SHIFTS, **SCHEDULES, **ON_THE_WIRE}


def all_of(kind: str) -> RichTable:
    """Return the table of one kind in `NAMED`: names, what they are, and their options."""
    heads = ("name", "what", "paper", "tasks", "wire", "options of its own")
    if kind != "methods":
        heads = ("name", "what") if kind == "scores" else ("name", "what", "options")
    table = RichTable(*heads, title=kind.capitalize(), title_justify="left")
    for name, found in NAMED[kind].items():
        if isinstance(found, str):
            table.add_row(name, found)
        elif isinstance(found, Method):
            own = [option for option in declared(found.config) if option not in declared(Training)]
            wire = ", ".join(found.build(found.config()).wire)
            table.add_row(name, found.summary, found.paper, _tasks(found), wire, ", ".join(own))
        else:
            own = ", ".join(f"{option.name}={option.default}" for option in options_of(found))
            what = found.examples[name] if isinstance(found, Reader) else _first_line(found)
            table.add_row(name, what, own)
    return table


def _tasks(method: Method) -> str:
    needs = method.needs(method.config()) if callable(method.needs) else method.needs
    return CLASSES.name if "classes" in needs else ", ".join(TASKS)


def table_of(name: str) -> RichTable:
    """Return the table of a kind in `NAMED`, or that of the options of a method, model, data set, ...

    Raises:
      JaxflError: if there is no such name.
    """
    if name in NAMED:
        return all_of(name)
    kinds = "method, model, partition, topology, shift, schedule or name of the wire"
    source = reader_of(name).read
    found = source if declared(source) else choices.lookup(kinds, CHOICES | NAMED, name)
    what = found.summary if isinstance(found, Method) else _first_line(found)
    table = RichTable("option", "default", "what", title=f"{name}: {what}", title_justify="left")
    for option in options_of(found):
        table.add_row(*option)
    return table


def options_of(found: Method | Reader | Callable) -> list[Described]:
    """Return the options of a method, a model, a data set, ..., a method's own ones first."""
    if isinstance(found, Method):
        return described(found.config)
    if isinstance(found, Reader):
        return described(found.read)
    builds = {*BUILT_FOR} <= {*inspect.signature(found).parameters}  # a model
    of_all = [common for table, common in COMMON if found in table.values()]
    return [*(described_model if builds else described)(found), *chain(*map(described, of_all))]


def studies_in(folder: Path) -> RichTable:
    """Return the table of the studies of a folder.

    Raises:
      JaxflError: if there are none.
    """
    table, found = RichTable("study", "title", "claim", "runs"), found_below(folder)
    if not found:
        raise JaxflError(f"There are no studies in {folder.absolute()}; run this in a clone of jaxfl.")
    for name, study in found.items():
        runs = len(study.methods) * len(settings(study)) * study.seeds * study.partition_seeds
        table.add_row(name, study.title, study.claim, str(runs))
    return table


def _first_line(function: Callable) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]
