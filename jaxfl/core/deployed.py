"""What clients deploy, as weights: to be kept, averaged, or taken into another run."""

from typing import Any

import jax
import numpy as np

from jaxfl.core import tree
from jaxfl.core.cohorts import by_client, in_parts
from jaxfl.core.engine import CLIENTS_PER_SCORING
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Algorithm, Predictor
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.models.model import Model
from jaxfl.models.named import Models


def deployed(
    algorithm: Algorithm, federation: Federation, state: Any, key, done: int, rounds: int
) -> PerGroup:
    """The models of all clients as they were scored after some rounds: per group `Models` with NumPy leaves.

    Args:
      algorithm: the method.
      federation: the clients.
      state: after these rounds.
      key: of the run.
      done: how many rounds.
      rounds: of the whole run.
    """
    *_, score_key = jax.random.split(key, 4)  # as `jaxfl.core.engine` scores them
    key, state = federation.replicate((jax.random.fold_in(score_key, done - 1), state))

    def predictors(key, state, federation, part):
        return federation.keep_replicated(algorithm.personal(key, state, federation, part))

    program, parts = Program(predictors), in_parts(federation, CLIENTS_PER_SCORING, done - 1, rounds)
    found = [jax.device_get(program(key, state, federation, part)) for part in parts]

    def of_group(g, model):
        divided = [_divided(model, of_part[g]) for of_part in found]
        own = [(part.groups[g], models.own) for part, models in zip(parts, divided, strict=True)]
        return Models(divided[0].shared, by_client(own))

    return tuple(of_group(g, model) for g, model in enumerate(federation.models))


def _divided(model: Model, predictor: Predictor) -> Models:
    """The models of a predictor's clients."""

    def of_client(i):
        own = jax.tree.map(lambda leaf: leaf[i], predictor.stacked)
        if predictor.weights is None:
            return tree.combine(predictor.shared, own)
        return predictor.weights(model, predictor.shared, own)

    leaves = jax.tree.leaves(predictor.stacked)
    clients = [of_client(i) for i in range(len(leaves[0]) if leaves else 1)]
    common = {id(leaf) for leaf in jax.tree.leaves(predictor.shared)}
    same = jax.tree.map(lambda leaf: id(leaf) in common, clients[0])
    return Models(
        jax.tree.map(lambda same, leaf: leaf if same else None, same, clients[0]),
        jax.tree.map(lambda same, *leaves: None if same else np.stack(leaves), same, *clients),
    )
