"""What accuracy means, defined once for all methods.

A client's accuracy is the share of its own rows that its own predictor gets right. Predictors come from
the algorithm: `personal` (what clients deploy) and `receive` (what they start a round from, before local
training). The rows are the client's test rows, or its validation rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.clientmap import map_clients
from jaxfl.data.federation import Federation
from jaxfl.training import correct, sweep
from jaxfl.types import Cohort, PerGroup


class Score(NamedTuple):
    """Rows that a client's predictor gets right, of how many: leaves () or (k,)."""

    test: jax.Array  # int32
    test_rows: jax.Array  # int32
    validation: jax.Array  # int32
    validation_rows: jax.Array  # int32
    finite: jax.Array  # bool, whether all scores on test rows are


def score(predictors: PerGroup, key, federation: Federation, cohort: Cohort) -> PerGroup:
    """Score predictors on their clients' test and validation rows.

    Args:
      predictors: one `Predictor` per group, for the cohort's clients.
      key: of the round.
      federation: the clients.
      cohort: which of them.

    Returns:
      Per group a `Score` with leaves (k_g,); an empty place has 0 of 0 rows.
    """
    shared = tuple((predictor.predict, predictor.shared) for predictor in predictors)
    own = tuple(predictor.stacked for predictor in predictors)

    def client(key, client, shared, own):
        predict, common = shared

        def judge(rows, size):
            scores = sweep(lambda x: predict(client.model, common, own, x), rows, size, federation)
            labels = client.relabel[federation.labels[rows]]
            real = jnp.arange(len(rows), dtype=jnp.int32)[:, None] < size
            return correct(scores, labels, size), jnp.all(jnp.isfinite(scores) | ~real)

        test, finite = judge(client.test_rows, client.test_size)
        validation, _ = judge(client.validation_rows, client.validation_size)
        return Score(test, client.test_size, validation, client.validation_size, finite)

    return map_clients(client, key, federation, cohort, shared, own)
