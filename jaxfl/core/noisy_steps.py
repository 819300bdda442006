"""How many noisy steps each client takes on its rows in a run, see `jaxfl.core.dp_sgd`, without taking them.

A method's functions are traced, and their noisy steps counted as operations are elsewhere. So no local phase
is forgotten. Only the counts are computed: the compiler leaves out the training, whose result is unused.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import flops
from jaxfl.core.cohorts import these_clients
from jaxfl.core.protocol import Algorithm, Cohort
from jaxfl.data.federation import Federation


class NoisySteps(NamedTuple):
    """Numbers of noisy steps of all clients, in the order of groups.

    Args:
      rounds: (T, N) int, of each round; what comes before the first one counts for it.
      deployed: (N,) int, on the copy of a model that a client deploys, such as by fine-tuning.
    """

    rounds: np.ndarray
    deployed: np.ndarray


def noisy_steps(algorithm: Algorithm, key, hyper: Any, federation: Federation, cohorts: Cohort) -> NoisySteps:
    """Count a method's noisy steps in the cohorts of all rounds.

    Its options are traced, and the key is any.
    """
    members = [~np.asarray(group.newcomer) for group in federation.groups]
    everyone = these_clients(federation, members, cohorts.rounds, among_all=True)

    def counted(f, *arguments):
        with flops.collect() as amounts, flops.noisy_steps_instead():
            f(*arguments)
        owned = flops.by_owner(amounts, [len(group.id) for group in federation.groups]).clients
        return jnp.concatenate(owned).astype(jnp.int32)

    @jax.jit
    def count(key, hyper, federation, cohorts, everyone):
        state = algorithm.init(key, federation, hyper)

        def of_round(_, cohort):
            return None, counted(algorithm.step, key, state, federation, cohort)

        _, rounds = jax.lax.scan(of_round, None, cohorts)
        if algorithm.prepare:
            rounds = rounds.at[0].add(counted(algorithm.prepare, key, state, federation, everyone))
        return rounds, counted(algorithm.personal, key, state, federation, everyone)

    return NoisySteps(*jax.device_get(count(key, hyper, federation, cohorts, everyone)))
