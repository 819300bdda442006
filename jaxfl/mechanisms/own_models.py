"""Personal models: each client has a model of its architecture, trains it and keeps it.

A method's state holds them as `weights`, per group (n_g, ...), or (n, ...) in a method of one architecture.
"""

from collections.abc import Callable
from typing import Any

from jaxfl.core import tree
from jaxfl.core.batches import Epochs
from jaxfl.core.client_map import map_clients, one_or_all, per_group
from jaxfl.core.examples import Examples, own_rows
from jaxfl.core.initial_weights import each_client, initial_weights
from jaxfl.core.protocol import Cohort, Predictor
from jaxfl.core.training import Training, descend, task_loss
from jaxfl.data.federation import Client, Federation, PerGroup
from jaxfl.mechanisms.sharing import predict
from jaxfl.models.model import Weights


def start(key, federation: Federation) -> Any:
    """Return initial models (n_g, ...), see `each_client`."""
    return each_client(key, initial_weights(key, federation), federation)


def train(
    key,
    federation: Federation,
    cohort: Cohort,
    start: PerGroup,
    hyper: Training,
    rows: Callable[[Client, Any], Examples] = own_rows,
    epochs: Epochs | None = None,
) -> tuple[Any, Any]:
    """Train every client of a cohort by LocalSGD on the cross-entropy of its model.

    Args:
      key: key of the round.
      federation: the clients.
      cohort: the clients that train.
      start: their models, per group (k_g, ...), or (k, ...) of one architecture.
      hyper: optimiser, rates, epochs and batch size.
      rows: ``(client, hyper) -> Examples``, on which a client trains.
      epochs: passes over them; by default those of `hyper`.

    Returns:
      In the same form the trained models, and their losses (k_g,).
    """

    def client(key, client, nothing, w):
        loss = task_loss(client.model)
        trained = descend(loss, w, key, rows(client, hyper), hyper, epochs=epochs)
        return trained.weights, trained.loss

    done = map_clients(client, key, federation, cohort, own=start)
    trained, loss = done if federation.alone else zip(*done, strict=True)
    return trained, loss


def personal(key, state, federation: Federation, cohort: Cohort) -> PerGroup:
    """Return the clients' own models, which they deploy, for `Algorithm.personal`."""
    return of_cohort(state.weights, cohort)


def predictor(w: Weights) -> Predictor:
    """Return models (k, ...) of an architecture as a predictor."""
    return Predictor(None, w, predict)


def predictors(weights: PerGroup) -> PerGroup:
    """Return models (k_g, ...) as predictors."""
    return per_group(predictor, weights)


@one_or_all("weights")
def of_cohort(weights: PerGroup, cohort: Cohort) -> PerGroup:
    """Return a cohort's models, out of all models (n_g, ...), as predictors."""
    return per_group(lambda w, slots: predictor(tree.take(w, slots)), weights, cohort.groups)


def with_own_stats(mixed: Weights, own: Weights, bn_stats: str) -> Weights:
    """Return a mixture of models, with the client's own statistics where these stay local."""
    return mixed._replace(stats=own.stats) if bn_stats == "local" else mixed


def sent(w: Weights, bn_stats: str) -> Weights:
    """Return what a client sends of its model: no statistics where these stay local."""
    return w._replace(stats={}) if bn_stats == "local" else w


def message(weights: PerGroup, bn_stats: str) -> PerGroup:
    """Return per group the shapes of what each client sends of its model, from all models (n_g, ...)."""
    return per_group(lambda w: sent(tree.one(w), bn_stats), weights)
