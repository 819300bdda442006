"""How clients' predictors are scored, the same for all methods.

A client's score, such as the share of its own rows that its own predictor gets right, follows from what its
task counts of its predictions. Predictors come from the algorithm: `personal` (what clients deploy) and
`receive` (what they start a round from, before local training). The rows are the client's test rows, or its
validation rows.

If all clients of a group use one model, it does not matter which client runs it on which rows. Then rows are
dealt to the clients' places in full batches, and small clients cost no padding.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.client_map import clients_in, map_clients, per_group
from jaxfl.core.examples import SWEPT, sweep
from jaxfl.core.protocol import Cohort
from jaxfl.data.federation import Federation, PerGroup


class Score(NamedTuple):
    """What is known of the predictions of k clients.

    Args:
      test: the task's counts of test rows, leaves (k, ...).
      validation: those of validation rows.
      validation_rows: (k,) int32, number of these.
      finite: (k,) bool, whether all outputs on test rows are finite, or -inf, the logarithm of 0.
    """

    test: Any
    validation: Any
    validation_rows: jax.Array
    finite: jax.Array


class Places(NamedTuple):
    """The rows that one group's clients predict, M in each of k places; of its own each client has m.

    Args:
      rows: (k, M) int32, padded.
      sizes: (k,) int32, number of real rows.
      went: (k, m) int32, where each of a client's own rows went in the flattened (k, M).
    """

    rows: jax.Array
    sizes: jax.Array
    went: jax.Array


def score(predictors: PerGroup, key, federation: Federation, cohort: Cohort) -> PerGroup:
    """Score a cohort's predictors, one per group, on their clients' test and validation rows.

    Returns:
      Per group a `Score`; an empty place has 0 rows.
    """
    return _score(partial(predictions, predictors, key, federation, cohort), federation, cohort)


def score_functions(functions: Mapping[int, Callable], federation: Federation, cohort: Cohort) -> PerGroup:
    """Score functions that cannot be part of a program, such as networks that a host step has assembled.

    They are {client id: ``images (n, ...) -> scores (n, outputs)``}. A client without one has no finite
    score. The cohort has NumPy arrays. For what is returned see `score`.
    """

    def given(group, slots, rows):
        finite = np.zeros(rows.shape, bool)
        answers = _no_answers(federation, rows, np.zeros)
        for place in np.flatnonzero(slots.mask):
            if function := functions.get(int(group.id[slots.index[place]])):
                scores = np.asarray(function(federation.inputs(rows[place])))
                said = federation.task.answer(scores, federation.labels[rows[place]])
                for known, new in zip(jax.tree.leaves(answers), jax.tree.leaves(said), strict=True):
                    known[place] = new
                finite[place] = _finite(scores)
        return answers, finite

    def answers(rows, sizes):
        return per_group(given, federation.groups, cohort.groups, rows)

    return _score(answers, federation, cohort)


def _score(answers: Callable, federation: Federation, cohort: Cohort) -> PerGroup:
    """Score ``(rows, sizes) -> answers``, see `predictions`, on the test and validation rows of a cohort."""
    clients = per_group(clients_in, federation.groups, cohort.groups)

    def counts(rows, sizes):
        given = per_group(nothing, rows) if rows[0].shape[1] == 0 else answers(rows, sizes)
        return per_group(partial(_counted, federation), clients, rows, sizes, given)

    def nothing(rows):  # no client has such rows, and no network need be compiled
        return _no_answers(federation, rows, jnp.zeros), jnp.zeros(rows.shape, bool)

    def of_group(client, test, validation):
        (tested, finite), (validated, _) = test, validation
        return Score(tested, validated, client.validation_size, finite)

    test = counts([of.test_rows for of in clients], [of.test_size for of in clients])
    validation = counts([of.validation_rows for of in clients], [of.validation_size for of in clients])
    return per_group(of_group, clients, test, validation)


def _no_answers(federation: Federation, rows, zeros: Callable) -> Any:
    """Return zeros in the form of the answers on rows (k, m)."""
    labels = jax.ShapeDtypeStruct((rows.size, *federation.labels.shape[1:]), federation.labels.dtype)
    outputs = jax.ShapeDtypeStruct((rows.size, *federation.models[0].output), federation.mean.dtype)
    form = jax.eval_shape(federation.task.answer, outputs, labels)
    return jax.tree.map(lambda leaf: zeros((*rows.shape, *leaf.shape[1:]), leaf.dtype), form)


def _finite(scores) -> jax.Array:
    """Return of which rows all scores (B, ...) are numbers, (B,) bool."""
    return (scores < np.inf).all(tuple(range(1, scores.ndim)))


def predictions(predictors: PerGroup, key, federation: Federation, cohort: Cohort, rows, sizes) -> PerGroup:
    """Return what a cohort's predictors, one per group, say of some rows.

    Rows are per group (k, m) int32, padded, of which `sizes` (k,) int32 are real.

    Returns:
      Per group the task's answer, leaves (k, m, ...), such as the output with the largest score, and (k, m)
      bool, whether all scores are numbers; for padding anything.
    """
    one_model = not jax.tree.leaves([predictor.stacked for predictor in predictors])
    places = per_group(_dealt if one_model else _its_own, rows, sizes)

    def client(key, client, shared, own):
        (predict, common), (stacked, rows, size) = shared, own

        def answer(x, labels):
            scores = predict(client.model, common, stacked, x)
            return federation.task.answer(scores, labels), _finite(scores)

        return sweep(answer, rows, size, federation, federation.labels)

    shared = per_group(lambda predictor: (predictor.predict, predictor.shared), predictors)
    own = per_group(lambda predictor, place: (predictor.stacked, place.rows, place.sizes), predictors, places)
    given = map_clients(client, key, federation, cohort, shared, own)

    def of_own(place, answer):
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[place.went], answer)

    return per_group(of_own, places, given)


def likelihoods(predictors: PerGroup, key, federation: Federation, cohort: Cohort) -> PerGroup:
    """Return what a cohort's predictors say of their rows, for scores that need more than the largest output.

    Returns:
      Per group ((k, m, outputs), (k, v, outputs)) float: logarithms of probabilities, see `Task.logs`, on
      test and on validation rows; for padding anything.
    """

    def client(key, client, shared, own):
        predict, common = shared

        def logs(x):
            scores = predict(client.model, common, own, x)
            return federation.task.logs(scores.astype(jnp.result_type(float)))

        return (
            sweep(logs, client.test_rows, client.test_size, federation),
            sweep(logs, client.validation_rows, client.validation_size, federation),
        )

    shared = per_group(lambda predictor: (predictor.predict, predictor.shared), predictors)
    own = per_group(lambda predictor: predictor.stacked, predictors)
    return map_clients(client, key, federation, cohort, shared, own)


def _counted(federation, client, rows, sizes, answer) -> tuple[Any, jax.Array]:
    """Count one group's answers by the task, and say whether those of each client are finite."""
    predicted, finite = answer
    real = jnp.arange(rows.shape[1], dtype=jnp.int32)[None] < sizes[:, None]
    std = federation.target and federation.target[1]
    counts = federation.task.count(federation.labels[rows], client.relabel, std, predicted, real)
    return counts, (finite | ~real).all(1)


def _its_own(rows, sizes) -> Places:
    """Leave every client's rows in its place."""
    return Places(rows, sizes, jnp.arange(rows.size, dtype=jnp.int32).reshape(rows.shape))


def _dealt(rows, sizes) -> Places:
    """Deal the rows of all clients to their places in equal numbers of full batches."""
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
    return Places(of_places, jnp.clip(end[-1] - start, 0, share), went // share * width + went % share)
