"""The models that clients deploy, from the state of a run: one client's predictor, or the weights of all."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfl.core.cohorts import by_client, in_parts, these_clients
from jaxfl.core.host_state import seen
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Algorithm, Cohort, Predictor
from jaxfl.core.streams import streams
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.models.applied import applied
from jaxfl.models.model import Model, Weights
from jaxfl.models.named import ClientWeights


def deployed(
    algorithm: Algorithm, state, federation: Federation, run_key, last: int, rounds: int, client: int
) -> Predictor:
    """Return a client's predictor, the same that was scored after round `last`, counted from 0.

    The federation is on one device, possibly without data; the state may be `jaxfl.core.host_state.OnHost`.

    Returns:
      Its `Predictor`; leaves of `stacked` have no axis of clients.

    Raises:
      NotAtHand: if its model depends on images or labels, and the federation has none.
    """
    cohort, g = alone(federation, client, last, rounds)
    arguments = jax.random.fold_in(streams(run_key).scores, last), *seen(state, federation, cohort)
    return _predictor(algorithm.personal, g, *arguments)


def alone(federation: Federation, client: int, last: int, rounds: int) -> tuple[Cohort, int]:
    """Return a cohort of one client, with one place per group, and the number of the client's group."""
    chosen = [np.asarray(group.id) == client for group in federation.groups]
    its_group = next(g for g, of_group in enumerate(chosen) if of_group.any())
    return these_clients(federation, chosen, rounds, last, among_all=True), its_group


@functools.partial(jax.jit, static_argnums=(0, 1))
def _predictor(personal: Callable, g: int, key, state, federation, cohort) -> Predictor:
    predictor = personal(key, state, federation, cohort)[g]
    stacked = jax.tree.map(lambda leaf: leaf[0], predictor.stacked)
    return Predictor(predictor.shared, stacked, predictor.predict)


def final_weights(
    algorithm: Algorithm, federation: Federation, state: Any, key, done: int, rounds: int
) -> PerGroup:
    """Return the weights of all clients' models as scored: per group `ClientWeights` of NumPy arrays.

    The state is that after the rounds `done`, on the federation's devices or `jaxfl.core.host_state.OnHost`.

    Raises:
      JaxflError: if the method predicts with several networks side by side, by `jax.vmap`.
    """
    key = federation.replicate(jax.random.fold_in(streams(key).scores, done - 1))

    def predictors(key, state, federation, part):
        return federation.keep_replicated(algorithm.personal(key, state, federation, part))

    program, parts = Program(predictors), in_parts(federation, done - 1, rounds)
    found = [jax.device_get(program(key, *seen(state, federation, part))) for part in parts]

    def of_group(g, model):
        divided = [of_clients(model, of_part[g]) for of_part in found]
        own = [(part.groups[g], weights.own) for part, weights in zip(parts, divided, strict=True)]
        return ClientWeights(divided[0].shared, by_client(own))

    return tuple(of_group(g, model) for g, model in enumerate(federation.models))


def of_clients(model: Model, predictor: Predictor) -> ClientWeights:
    """Return the weights of a predictor's clients; its leaves are NumPy arrays.

    Raises:
      JaxflError: as `final_weights`.
    """
    stacked, leaves = predictor.stacked, jax.tree.leaves(predictor.stacked)
    clients = [
        _applied(model, predictor, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
        for i in range(len(leaves[0]) if leaves else 1)
    ]
    common = {id(leaf) for leaf in jax.tree.leaves(predictor.shared)}
    # Without leaves of their own all clients have one network, whatever `predict` computes from `shared`.
    same = jax.tree.map(lambda leaf: not leaves or id(leaf) in common, clients[0])
    return ClientWeights(
        jax.tree.map(lambda same, leaf: leaf if same else None, same, clients[0]),
        jax.tree.map(lambda same, *leaves: None if same else np.stack(leaves), same, *clients),
    )


def _applied(model: Model, predictor: Predictor, own: Any) -> Weights:
    """Return the weights of a client's first call of its network, however the method has made them."""
    found = applied(model, lambda network, x: predictor.predict(network, predictor.shared, own, x))
    return Weights(
        {block: params for block, [(params, _), *_] in found.items()},
        {block: stats for block, [(_, stats), *_] in found.items()},
    )
