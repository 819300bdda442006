"""The model that one client deploys, out of the state of a run."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from jaxfl.core.host_state import seen
from jaxfl.core.protocol import Algorithm, Cohort, Predictor, Slots
from jaxfl.core.streams import streams
from jaxfl.data.federation import Federation


def deployed(
    algorithm: Algorithm, state, federation: Federation, run_key, last: int, rounds: int, client: int
) -> Predictor:
    """What a client predicts with: the same that was scored.

    Args:
      algorithm: of the run.
      state: after round `last`, perhaps `jaxfl.core.host_state.OnHost`.
      federation: the clients, on one device; perhaps without data.
      run_key: of the run.
      last: a round, from 0.
      rounds: of the whole run.
      client: its id.

    Returns:
      Its `Predictor`, whose leaves `stacked` have no axis of clients.

    Raises:
      NotAtHand: if its model is made of images or labels, and the federation has none.
    """
    cohort, g = alone(federation, client, last, rounds)
    arguments = jax.random.fold_in(streams(run_key).scores, last), *seen(state, federation, cohort)
    return _predictor(algorithm.personal, g, *arguments)


def alone(federation: Federation, client: int, last: int, rounds: int) -> tuple[Cohort, int]:
    """A cohort of one client, in which every group has one place, and the number of the client's group."""
    slots, its_group = [], 0
    for g, group in enumerate(federation.groups):
        (found,) = np.nonzero(np.asarray(group.id) == client)
        its_group = g if len(found) else its_group
        place = found[0] if len(found) else len(group.id)
        slots.append(Slots(np.array([place], np.int32), np.array([len(found) > 0])))
    return Cohort(np.int32(last), tuple(slots), rounds, part=True), its_group


@functools.partial(jax.jit, static_argnums=(0, 1))
def _predictor(personal: Callable, g: int, key, state, federation, cohort) -> Predictor:
    predictor = personal(key, state, federation, cohort)[g]
    stacked = jax.tree.map(lambda leaf: leaf[0], predictor.stacked)
    return Predictor(predictor.shared, stacked, predictor.predict)
