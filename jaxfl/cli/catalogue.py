"""The tables of `jaxfl list`: all that has a name, and the options of each."""

import inspect
from collections.abc import Callable, Iterator

from rich.table import Table as RichTable

from jaxfl import registry
from jaxfl.config import choices
from jaxfl.config.options import helps, hints, own_first, text
from jaxfl.core.protocol import Method
from jaxfl.core.schedule import SCHEDULES
from jaxfl.core.training import Training
from jaxfl.data.partitioners import PARTITIONS
from jaxfl.data.readers import READERS
from jaxfl.data.shift import SHIFTS
from jaxfl.data.topology import TOPOLOGIES
from jaxfl.models.zoo import GIVEN, MODELS, described


def everything() -> Iterator[RichTable]:
    """Yield a table each of methods, models, partitions, topologies, shifts, schedules and data sets."""
    methods = RichTable(
        "method", "what", "paper", "options of its own", title="Methods", title_justify="left"
    )
    common = hints(Training)
    for method in registry.METHODS.values():
        own = [name for name in hints(method.config) if name not in common]
        methods.add_row(method.name, method.summary, method.paper, ", ".join(own))
    yield methods
    for title, kind, table, options in (
        ("Models", "model", MODELS, described),
        ("Partitions", "partition", PARTITIONS, choices.described),
        ("Topologies", "topology", TOPOLOGIES, choices.described),
        ("Shifts of clients' images", "shift", SHIFTS, choices.described),
        ("Schedules", "schedule", SCHEDULES, choices.described),
    ):
        drawn = RichTable(kind, "what", "options", title=title, title_justify="left")
        for name, function in table.items():
            own = ", ".join(f"{option.name}={option.default}" for option in options(function))
            drawn.add_row(name, _first_line(function), own)
        yield drawn
    sources = RichTable("data set", "what", title="Data sets", title_justify="left")
    for reader in READERS:
        for name, what in reader.examples.items():
            sources.add_row(name, what)
    yield sources


def options_of(name: str) -> RichTable:
    """Return a table of a method's, model's, partition's, topology's, shift's or schedule's options."""
    table = {**registry.METHODS, **MODELS, **PARTITIONS, **TOPOLOGIES, **SHIFTS, **SCHEDULES}
    found = choices.lookup("method, model, partition, topology, shift or schedule", table, name)
    if isinstance(found, Method):
        config = found.config()
        what, sentences = found.summary, helps(type(config))
        options = [
            choices.Option(option, text(getattr(config, option)), sentences.get(option, ""))
            for option in own_first(type(config))
        ]
    else:
        builds = set(GIVEN) <= set(inspect.signature(found).parameters)  # a model
        what, options = _first_line(found), (described if builds else choices.described)(found)
    table = RichTable("option", "default", "what", title=f"{name}: {what}", title_justify="left")
    for option in options:
        table.add_row(*option)
    return table


def _first_line(function: Callable) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]
