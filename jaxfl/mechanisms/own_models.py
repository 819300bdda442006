"""Models of the clients' own: each client has one of its architecture, trains it and keeps it."""

from jaxfl.core import tree
from jaxfl.core.client_map import gather, per_group
from jaxfl.core.protocol import Cohort, Predictor
from jaxfl.core.training import each_client, initial_weights
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.mechanisms.sharing import predict


def start(key, federation: Federation) -> PerGroup:
    """The initial models (n_g, ...): the same for all clients of an architecture, if not given for each."""
    return each_client(initial_weights(key, federation), federation)


def predictors(weights: PerGroup) -> PerGroup:
    """Models (k_g, ...) as they predict."""
    return per_group(lambda w: Predictor(None, w, predict), weights)


def of_cohort(weights: PerGroup, cohort: Cohort) -> PerGroup:
    """Of all models (n_g, ...) those of a cohort, as they predict."""
    return predictors(gather(weights, cohort))


def scalars_sent(weights: PerGroup, bn_stats: str) -> PerGroup:
    """What each client sends of its model, as shapes of its leaves: no statistics where they stay local."""
    one = per_group(tree.one, weights)
    return per_group(lambda w: w._replace(stats={}), one) if bn_stats == "local" else one
