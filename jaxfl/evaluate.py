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
from jaxfl.training import sweep
from jaxfl.types import Cohort, PerGroup


class Score(NamedTuple):
    """Rows that a client's predictor gets right, of how many: leaves () or (k,) int32."""

    test: jax.Array
    test_rows: jax.Array
    validation: jax.Array
    validation_rows: jax.Array


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
    functions = tuple(predictor.predict for predictor in predictors)
    shared = tuple((f, p.shared) for f, p in zip(functions, predictors, strict=True))
    own = tuple(predictor.stacked for predictor in predictors)

    def client(key, client, shared, own):
        predict, common = shared

        def correct(rows, size):
            scores = sweep(lambda x: predict(client.model, common, own, x), rows, size, federation)
            labels = client.relabel[federation.labels[rows]]
            right = scores.argmax(1).astype(labels.dtype) == labels
            real = jnp.arange(rows.shape[0], dtype=jnp.int32) < size
            return (right & real).sum(dtype=jnp.int32)

        return Score(
            correct(client.test_rows, client.test_size),
            client.test_size,
            correct(client.validation_rows, client.validation_size),
            client.validation_size,
        )

    return map_clients(client, key, federation, cohort, shared, own)
