"""jaxfl: simulation of personalised, model-heterogeneous federated learning in JAX.

import jaxfl
result = jaxfl.run("compfl", dataset="digits", rounds=50, lam=0.5)
print(result["accuracy"]["mean"])
print(jaxfl.compare("fedper", "compfl", dataset="digits", seeds=3).table)
"""

from jaxfl.api import compare, load, report, resume, run
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
    "load",
    "options",
    "report",
    "resume",
    "run",
    "tree",
    "within",
]
