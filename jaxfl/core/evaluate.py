"""What accuracy means, defined once for all methods.

A client's accuracy is the share of its own rows that its own predictor gets right. Predictors come from
the algorithm: `personal` (what clients deploy) and `receive` (what they start a round from, before local
training). The rows are the client's test rows, or its validation rows.

Where all clients of a group use one model, it does not matter who runs it on which rows: then they are dealt
to the clients' places in full batches, and small clients cost no padding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import tree
from jaxfl.core.client_map import map_clients, per_group
from jaxfl.core.examples import sweep
from jaxfl.core.protocol import Cohort
from jaxfl.data.federation import Federation, PerGroup

BATCH = 64  # images at a time


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
    one_model = not jax.tree.leaves([predictor.stacked for predictor in predictors])
    clients = per_group(tree.take, federation.groups, cohort.groups)

    def run(key, client, shared, own):
        """The predictions of a client's model on the rows of its place, and whether they are finite."""
        (predict, common), (stacked, rows, size) = shared, own

        def answer(x):
            scores = predict(client.model, common, stacked, x)
            return scores.argmax(1).astype(jnp.int32), jnp.isfinite(scores).all(1)

        return sweep(answer, rows, size, federation, BATCH)

    def judge(rows, sizes):
        """Per group ((k_g,) int32 rows that are right, (k_g,) bool whether all are finite)."""
        if rows[0].shape[1] == 0:  # no client has such rows
            return sizes, per_group(lambda size: size == 0, sizes)
        deal = _dealt if one_model else _its_own
        places = per_group(deal, rows, sizes)
        own = tuple((one.stacked, *place[:2]) for one, place in zip(predictors, places, strict=True))
        shared = tuple((one.predict, one.shared) for one in predictors)
        answers = map_clients(run, key, federation, cohort, shared, own)

        def of_group(client, rows, sizes, place, answer):
            predicted, finite = (leaf.ravel()[place[2]] for leaf in answer)
            labels = jnp.take_along_axis(client.relabel, federation.labels[rows], 1)
            real = jnp.arange(rows.shape[1], dtype=jnp.int32)[None] < sizes[:, None]
            right = ((predicted == labels) & real).sum(1, dtype=jnp.int32)
            return right, (finite | ~real).all(1)

        return zip(*per_group(of_group, clients, rows, sizes, places, answers), strict=True)

    def of(name):
        """Rows (k_g, m) and sizes (k_g,) of each group's clients."""
        sizes = tuple(getattr(client, f"{name}_size") for client in clients)
        sizes = per_group(lambda size, slots: jnp.where(slots.mask, size, 0), sizes, cohort.groups)
        return tuple(getattr(client, f"{name}_rows") for client in clients), sizes

    test, validation = of("test"), of("validation")
    right, finite = judge(*test)
    validated, _ = judge(*validation)
    return per_group(Score, right, test[1], validated, validation[1], finite)


def _its_own(rows, sizes):
    """Every client's own rows in its place, see `_dealt`."""
    return rows, sizes, jnp.arange(rows.size, dtype=jnp.int32).reshape(rows.shape)


def _dealt(rows, sizes):
    """The rows of all clients, dealt to their places in equal numbers of full batches.

    Args:
      rows: (k, m) int32, padded.
      sizes: (k,) int32, how many are real.

    Returns:
      rows (k, M) and sizes (k,) of the places; and (k, m) where each row went, in the flattened (k, M).
    """
    k, m = rows.shape
    batch = min(BATCH, m)
    width = -(-m // batch) * batch
    end = sizes.cumsum(dtype=jnp.int32)
    first = end - sizes  # real rows are numbered through, client after client
    share = jnp.maximum(-(-end[-1] // (k * batch)), 1) * batch
    start = share * jnp.arange(k, dtype=jnp.int32)
    number = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    owner = jnp.searchsorted(end, number, side="right")
    owner = jnp.minimum(owner, k - 1)
    of_places = rows.at[owner, number - first[owner]].get(mode="clip")
    went = first[:, None] + jnp.arange(m, dtype=jnp.int32)[None]
    return of_places, jnp.clip(end[-1] - start, 0, share), went // share * width + went % share
