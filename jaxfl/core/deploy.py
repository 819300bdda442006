"""The model that one client deploys, from the state of a run."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from jaxfl.core.cohorts import these_clients
from jaxfl.core.host_state import seen
from jaxfl.core.protocol import Algorithm, Cohort, Predictor
from jaxfl.core.streams import streams
from jaxfl.data.federation import Federation


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
