"""jaxfl: simulation of personalised, model-heterogeneous federated learning in JAX.

import jaxfl
result = jaxfl.run("compfl", dataset="digits", rounds=50, lam=0.5)
print(result["accuracy"]["mean"])
"""

from jaxfl import tree
from jaxfl.api import run
from jaxfl.errors import JaxflError
from jaxfl.options import options, within
from jaxfl.training import Training
from jaxfl.types import Algorithm, Client, Cohort, Info, Method, Predictor, Slots

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
    "options",
    "run",
    "tree",
    "within",
]
