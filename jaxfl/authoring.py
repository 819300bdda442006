"""Everything that a method is written with, in one namespace; CONTRIBUTING.md shows how.

from jaxfl.authoring import Method, Training, cross_entropy, options, sharing, within
"""

from jaxfl.config.options import options, within
from jaxfl.core import tree
from jaxfl.core.client_map import (
    everyone,
    gather,
    map_clients,
    per_group,
    scatter,
    sent_down,
    sent_up,
    upload_weights,
    visit_clients,
)
from jaxfl.core.examples import Examples, arrays, own_rows, public_rows, sweep
from jaxfl.core.protocol import Algorithm, Cohort, Info, Method, Predictor, Slots, State
from jaxfl.core.training import (
    Trained,
    Training,
    correct,
    cross_entropy,
    descend,
    fit,
    initial_weights,
    mean,
    normalises,
    sgd,
)
from jaxfl.data.federation import Batch, Client, Federation, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.sharing import (
    FineTuning,
    Local,
    Memory,
    Phase,
    Uploads,
    fine_tuning,
    mean_by_rows,
    predict,
    sharing,
)
from jaxfl.models.model import Model, Weights

__all__ = [
    "Algorithm",
    "Batch",
    "Client",
    "Cohort",
    "Examples",
    "Federation",
    "FineTuning",
    "Info",
    "JaxflError",
    "Local",
    "Memory",
    "Method",
    "Model",
    "PerGroup",
    "Phase",
    "Predictor",
    "Slots",
    "State",
    "Trained",
    "Training",
    "Uploads",
    "Weights",
    "arrays",
    "correct",
    "cross_entropy",
    "descend",
    "everyone",
    "fine_tuning",
    "fit",
    "gather",
    "initial_weights",
    "map_clients",
    "mean",
    "mean_by_rows",
    "normalises",
    "options",
    "own_rows",
    "per_group",
    "predict",
    "public_rows",
    "scatter",
    "sent_down",
    "sent_up",
    "sgd",
    "sharing",
    "sweep",
    "tree",
    "upload_weights",
    "visit_clients",
    "within",
]
