"""What methods are written with, in one namespace: ``from jaxfl import fl``.

Options, clients mapped over the devices, local training, and the mechanisms that methods share.
CONTRIBUTING.md shows how; docs/method-reference.md lists what is where.
"""

from jaxfl.config.options import client_rate, options, within
from jaxfl.core import flops, streams, tree
from jaxfl.core.batches import Steps
from jaxfl.core.client_map import (
    cohort_rows,
    everyone,
    gather,
    map_and_sum,
    map_clients,
    only_if,
    per_group,
    scatter,
    visit_client,
    visit_clients,
)
from jaxfl.core.examples import Examples, arrays, own_rows, public_rows, server_rows, stretch, sweep, visiting
from jaxfl.core.initial_weights import each_client, initial_weights
from jaxfl.core.loops import cond, fori_loop, scan
from jaxfl.core.protocol import Algorithm, Cohort, Info, Method, Predictor, Slots
from jaxfl.core.traffic import sent_down, sent_up
from jaxfl.core.training import (
    Fitted,
    Trained,
    Training,
    descend,
    fit,
    forward,
    improve,
    local_optimizer,
    mean,
    sgd,
    steps_of,
    task_loss,
)
from jaxfl.data.federation import NOBODY, Batch, Client, Federation, PerGroup
from jaxfl.errors import JaxflError, nearest
from jaxfl.mechanisms import (
    class_means,
    ensembles,
    learned_matrix,
    mixing,
    own_models,
    public_images,
    reassembly,
    shared_entries,
    topology,
    validation,
    wire,
)
from jaxfl.mechanisms.each_architecture import each_architecture
from jaxfl.mechanisms.exchange import LOGITS, SOFT_PREDICTIONS, Exchange, RoundPredictions, Signal, exchanging
from jaxfl.mechanisms.inner_steps import inner_steps
from jaxfl.mechanisms.losses import distillation, proximal
from jaxfl.mechanisms.server_distillation import ServerDistillation, client_logits, distil
from jaxfl.mechanisms.server_steps import ServerSteps, server_steps
from jaxfl.mechanisms.sharing import (
    Averaging,
    FineTuned,
    FineTuning,
    Means,
    Memory,
    Participant,
    Phase,
    body,
    every_leaf,
    fine_tuning,
    head,
    local_training,
    no_leaf,
    norms,
    predict,
    require_plain_head,
    separate,
    sharing,
)
from jaxfl.models import hypernetwork, maps
from jaxfl.models.model import Model, Weights
from jaxfl.tasks.classes import count_correct
