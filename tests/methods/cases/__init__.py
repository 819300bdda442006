"""The tests' knowledge of each method: one module for each file of a method, found because it exists.

A new method is two files, its own under `jaxfl.algorithms` and its case here, which states

    - the method once more, in plain NumPy, from its paper: `start`, `step` and `scores` (the words that these
      use are explained in the package `reference`, which also has networks, local training and averages);
    - what a client draws from its key in a round, so that the reference is given the same draws;
    - `comparisons`: the options and models with which both are run, round by round, and mistakes that the
      comparison must notice;
    - `traffic`: how many scalars a client sends and receives;
    - `reductions`: under which options it computes what another method computes.

`methods.case` explains these words one by one, and `fedavg` is the example to read. `test_reference`,
`test_protocol` and `test_reductions` run over all cases.
"""

import importlib
import pkgutil

from jaxfl.registry import METHODS

# From a separate module, which stays loaded when this package is imported again after a case was missing.
from methods.case import (
    CONVOLVING,
    NORMALISED,
    SMALL,
    THREE_LAYERS,
    TWO_LAYERS,
    UNLIKE,
    Case,
    Comparison,
    local_statistics,
    on_batch_norm,
)

__all__ = [
    "CASES",
    "CONVOLVING",
    "NORMALISED",
    "SMALL",
    "THREE_LAYERS",
    "TWO_LAYERS",
    "UNLIKE",
    "Case",
    "Comparison",
    "keeps_apart",
    "local_statistics",
    "on_batch_norm",
    "short",
]


def discover() -> dict[str, Case]:
    """Return the cases of all registered methods, by their names."""
    found = {}
    for info in pkgutil.iter_modules(__path__, f"{__name__}."):
        for entry in vars(importlib.import_module(info.name)).values():
            if isinstance(entry, Case):
                found[entry.method] = entry
    for name in METHODS.keys() - found.keys():
        raise LookupError(
            f"The method {name!r} has no case: write tests/methods/cases/{name.replace('-', '_')}.py with "
            f"{name.replace('-', '_')} = Case({name!r}, start, step, scores, traffic), as "
            "tests/methods/cases/fedavg.py has it."
        )
    for name in found.keys() - METHODS.keys():
        raise LookupError(f"There is a case of {name!r}, but no method of this name.")
    return {name: found[name] for name in METHODS}


CASES = discover()


def keeps_apart(name: str) -> bool:
    """Return whether a method keeps architectures apart: its first comparison has only one."""
    comparisons = [*CASES[name].comparisons.values()]
    return bool(comparisons) and len(comparisons[0].models) == 1


def short(name: str) -> str:
    """Return a method as the command names it, with options with which it does everything in a few rounds."""
    options = (f"{option}={value}" for option, value in CASES[name].short.items())
    return ",".join([name, *options])
