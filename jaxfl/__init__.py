"""jaxfl: simulation of personalised, model-heterogeneous federated learning in JAX.

import jaxfl
run = jaxfl.run("compfl", dataset="digits", rounds=50, lam=0.5)
print(run.personal.mean[-1], run.models[3].predict(run.source.images[:5]))
print(jaxfl.compare("fedper", "compfl", dataset="digits", seeds=3).table)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxfl.api import compare, final_weights, load, report, resume, run
    from jaxfl.config.options import options, within
    from jaxfl.core import tree
    from jaxfl.core.protocol import Algorithm, Cohort, Info, Method, Predictor, Slots
    from jaxfl.core.training import Training
    from jaxfl.data.federation import Client
    from jaxfl.errors import JaxflError

__all__ = [
    "Algorithm",
    "Client",
    "Cohort",
    "Info",
    "JaxflError",
    "Method",
    "Predictor",
    "Slots",
    "Training",
    "compare",
    "final_weights",
    "load",
    "options",
    "report",
    "resume",
    "run",
    "tree",
    "within",
]

HOMES = {
    "jaxfl.api": ("compare", "final_weights", "load", "report", "resume", "run"),
    "jaxfl.config.options": ("options", "within"),
    "jaxfl.core.protocol": ("Algorithm", "Cohort", "Info", "Method", "Predictor", "Slots"),
    "jaxfl.core.training": ("Training",),
    "jaxfl.data.federation": ("Client",),
    "jaxfl.errors": ("JaxflError",),
}


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that the command can be stopped before JAX is loaded."""
    if name == "tree":
        return importlib.import_module("jaxfl.core.tree")
    for home, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'jaxfl' has no attribute {name!r}")
