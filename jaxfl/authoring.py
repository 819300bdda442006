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
    rows_uploaded,
    scatter,
    sent_down,
    sent_up,
    visit_clients,
)
from jaxfl.core.examples import Examples, arrays, own_rows, public_rows, sweep
from jaxfl.core.loops import cond, fori_loop, scan
from jaxfl.core.protocol import Algorithm, Cohort, Info, Method, Predictor, Slots
from jaxfl.core.training import (
    Trained,
    Training,
    count_correct,
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
from jaxfl.mechanisms import learned_matrix, mixing, own_models, public_images
from jaxfl.mechanisms.losses import distillation, proximal
from jaxfl.mechanisms.sharing import (
    FineTuning,
    Memory,
    Participant,
    Phase,
    Uploads,
    body,
    every_leaf,
    fine_tuning,
    head,
    local_training,
    mean_by_rows,
    mean_of_clients,
    norms,
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
    "Memory",
    "Method",
    "Model",
    "Participant",
    "PerGroup",
    "Phase",
    "Predictor",
    "Slots",
    "Trained",
    "Training",
    "Uploads",
    "Weights",
    "arrays",
    "body",
    "cond",
    "count_correct",
    "cross_entropy",
    "descend",
    "distillation",
    "every_leaf",
    "everyone",
    "fine_tuning",
    "fit",
    "fori_loop",
    "gather",
    "head",
    "initial_weights",
    "learned_matrix",
    "local_training",
    "map_clients",
    "mean",
    "mean_by_rows",
    "mean_of_clients",
    "mixing",
    "normalises",
    "norms",
    "options",
    "own_models",
    "own_rows",
    "per_group",
    "predict",
    "proximal",
    "public_images",
    "public_rows",
    "rows_uploaded",
    "scan",
    "scatter",
    "sent_down",
    "sent_up",
    "sgd",
    "sharing",
    "sweep",
    "tree",
    "visit_clients",
    "within",
]
