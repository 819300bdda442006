"""The definition of accuracy, the same for all methods.

A client's accuracy is the share of its own rows that its own predictor gets right. Predictors come from
the algorithm: `personal` (what clients deploy) and `receive` (what they start a round from, before local
training). The rows are the client's test rows, or its validation rows.

If all clients of a group use one model, it does not matter which client runs it on which rows. Then rows are
dealt to the clients' places in full batches, and small clients cost no padding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core.client_map import clients_in, map_clients, per_group
from jaxfl.core.examples import SWEPT, sweep
from jaxfl.core.protocol import Cohort
from jaxfl.data.federation import Federation, PerGroup


class Score(NamedTuple):
    """Counts of a client's rows by its predictor's answers; C classes as the data set numbers them.

    Args:
      right: (k, C) int32, test rows of each class that it gets right.
      rows: (k, C) int32, test rows of each class.
      predicted: (k, C) int32, test rows that it predicts as each class.
      validated: (k,) int32, validation rows that it gets right.
      validation_rows: (k,) int32, number of validation rows.
      finite: (k,) bool, whether all scores on test rows are finite, or -inf, the logarithm of 0.
    """

    right: jax.Array
    rows: jax.Array
    predicted: jax.Array
    validated: jax.Array
    validation_rows: jax.Array
    finite: jax.Array


def score(predictors: PerGroup, key, federation: Federation, cohort: Cohort) -> PerGroup:
    """Score predictors on their clients' test and validation rows.

    Args:
      predictors: one `Predictor` per group, for the cohort's clients.
      key: of the round.
      federation: the clients.
      cohort: the clients to score.

    Returns:
      Per group a `Score`; an empty place has 0 of 0 rows.
    """
    one_model = not jax.tree.leaves([predictor.stacked for predictor in predictors])
    clients = per_group(clients_in, federation.groups, cohort.groups)

    def run(key, client, shared, own):
        """Predict the rows of a client's place with its model, and tell whether its scores are numbers."""
        (predict, common), (stacked, rows, size) = shared, own

        def answer(x):
            scores = predict(client.model, common, stacked, x)
            return scores.argmax(1).astype(jnp.int32), (scores < jnp.inf).all(1)

        return sweep(answer, rows, size, federation)

    def judge(rows, sizes):
        """Return per group right, rows, predicted (k_g, C) and (k_g,) bool whether all scores are numbers."""
        if rows[0].shape[1] == 0:  # no client has such rows
            return per_group(_of_nobody, clients, sizes)
        deal = _dealt if one_model else _its_own
        places = per_group(deal, rows, sizes)
        own = tuple((one.stacked, *place[:2]) for one, place in zip(predictors, places, strict=True))
        shared = tuple((one.predict, one.shared) for one in predictors)
        answers = map_clients(run, key, federation, cohort, shared, own)

        def of_group(client, rows, sizes, place, answer):
            output, finite = (leaf.ravel()[place[2]] for leaf in answer)
            real = jnp.arange(rows.shape[1], dtype=jnp.int32)[None] < sizes[:, None]
            classes = jnp.arange(client.relabel.shape[1], dtype=jnp.int32)
            of_class = (federation.labels[rows][..., None] == classes[None, None]) & real[..., None]
            taken_for = (output[..., None] == client.relabel[:, None]) & real[..., None]  # (k, m, C)
            counts = (which.sum(1, dtype=jnp.int32) for which in (of_class & taken_for, of_class, taken_for))
            return *counts, (finite | ~real).all(1)

        return per_group(of_group, clients, rows, sizes, places, answers)

    def of(name):
        """Return rows (k_g, m) and sizes (k_g,) of each group's clients."""
        sizes = tuple(getattr(client, f"{name}_size") for client in clients)
        return tuple(getattr(client, f"{name}_rows") for client in clients), sizes

    def of_group(test, validation, validation_rows):
        right, rows, predicted, finite = test
        return Score(
            right=right,
            rows=rows,
            predicted=predicted,
            validated=validation[0].sum(1, dtype=jnp.int32),
            validation_rows=validation_rows,
            finite=finite,
        )

    validation = of("validation")
    return per_group(of_group, judge(*of("test")), judge(*validation), validation[1])


def _of_nobody(client, sizes):
    """Return scores for rows that no client owns, see `score`."""
    none = jnp.zeros(client.relabel.shape, jnp.int32)
    return none, none, none, sizes == 0


def _its_own(rows, sizes):
    """Return every client's own rows in its place, see `_dealt`."""
    return rows, sizes, jnp.arange(rows.size, dtype=jnp.int32).reshape(rows.shape)


def _dealt(rows, sizes):
    """Deal the rows of all clients to their places in equal numbers of full batches.

    Args:
      rows: (k, m) int32, padded.
      sizes: (k,) int32, number of real rows.

    Returns:
      Rows (k, M) and sizes (k,) of the places, and (k, m) where each row went in the flattened (k, M).
    """
    k, m = rows.shape
    batch = min(SWEPT, m)
    width = -(-m // batch) * batch
    end = sizes.cumsum(dtype=jnp.int32)
    first = end - sizes  # real rows are numbered consecutively, client after client
    share = jnp.maximum(-(-end[-1] // (k * batch)), 1) * batch
    start = share * jnp.arange(k, dtype=jnp.int32)
    number = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    owner = jnp.searchsorted(end, number, side="right")
    owner = jnp.minimum(owner, k - 1)
    of_places = rows.at[owner, number - first[owner]].get(mode="clip")
    went = first[:, None] + jnp.arange(m, dtype=jnp.int32)[None]
    return of_places, jnp.clip(end[-1] - start, 0, share), went // share * width + went % share
