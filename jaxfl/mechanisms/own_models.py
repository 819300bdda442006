"""Models of the clients' own: each client has one of its architecture, trains it and keeps it.

A method's state holds them as `weights`, per group (n_g, ...).
"""

from collections.abc import Callable
from typing import Any

from jaxfl.core import tree
from jaxfl.core.client_map import gather, map_clients, per_group
from jaxfl.core.examples import Examples, own_rows
from jaxfl.core.initial_weights import each_client, initial_weights
from jaxfl.core.protocol import Cohort, Predictor
from jaxfl.core.training import Epochs, Training, cross_entropy, descend
from jaxfl.data.federation import Client, Federation, PerGroup
from jaxfl.mechanisms.sharing import predict
from jaxfl.models.model import Weights


def start(key, federation: Federation) -> PerGroup:
    """The initial models (n_g, ...): the same for all clients of an architecture, if not given for each."""
    return each_client(initial_weights(key, federation), federation)


def train(
    key,
    federation: Federation,
    cohort: Cohort,
    start: PerGroup,
    hyper: Training,
    rows: Callable[[Client, Federation, Any], Examples] = own_rows,
    epochs: Epochs | None = None,
) -> tuple[PerGroup, PerGroup]:
    """LocalSGD: every client of a cohort minimises the cross-entropy of its model.

    Args:
      key: of the round.
      federation: the clients.
      cohort: which of them.
      start: their models, per group (k_g, ...).
      hyper: optimiser, rates, epochs and batch size.
      rows: ``(client, federation, hyper) -> Examples``, on which a client trains.
      epochs: passes over them; by default as long as `hyper` says.

    Returns:
      Per group the trained models (k_g, ...), and their losses (k_g,).
    """

    def client(key, client, nothing, w):
        loss = cross_entropy(client.model)
        trained = descend(loss, w, key, rows(client, federation, hyper), hyper, epochs=epochs)
        return trained.weights, trained.loss

    trained, loss = zip(*map_clients(client, key, federation, cohort, own=start), strict=True)
    return trained, loss


def personal(key, state, federation: Federation, cohort: Cohort) -> PerGroup:
    """What clients deploy, as `Algorithm.personal` is to say: their own models."""
    return of_cohort(state.weights, cohort)


def predictors(weights: PerGroup) -> PerGroup:
    """Models (k_g, ...) as they predict."""
    return per_group(lambda w: Predictor(None, w, predict), weights)


def of_cohort(weights: PerGroup, cohort: Cohort) -> PerGroup:
    """Of all models (n_g, ...) those of a cohort, as they predict."""
    return predictors(gather(weights, cohort))


def with_own_stats(mixed: Weights, own: Weights, bn_stats: str) -> Weights:
    """What a client makes of a mixture of models: where statistics stay local, they are its own."""
    return mixed._replace(stats=own.stats) if bn_stats == "local" else mixed


def sent(w: Weights, bn_stats: str) -> Weights:
    """What a client sends of its model: no statistics where they stay local."""
    return w._replace(stats={}) if bn_stats == "local" else w


def message(weights: PerGroup, bn_stats: str) -> PerGroup:
    """Per group the shapes of what each client sends of its model, of all of these (n_g, ...)."""
    return per_group(lambda w: sent(tree.one(w), bn_stats), weights)
