"""Row mixing: matrices over pairs of clients, how MNFL learns one, and what FedCMD compares."""

from types import SimpleNamespace
from typing import Any

import chex
import conftest
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods.cases.mnfl import nearest
from scipy import integrate, stats

from jaxfl.algorithms.mixing.fedcmd_score import Gaussian, gaussian, moments, vote, wasserstein
from jaxfl.core import tree
from jaxfl.core.job import traced
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.data.federation import NOBODY
from jaxfl.mechanisms import learned_matrix, mixing
from jaxfl.mechanisms.learned_matrix import LearnedMatrix
from jaxfl.registry import METHODS


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def floats(values):
    return jnp.asarray(values, jnp.result_type(float))


# ---- places and pairs


@pytest.fixture
def cohort(federation):
    """Return a cohort of client 2 and an empty place, and of clients 4 and 3."""
    return conftest.cohort(federation, [2, 4, 3], places=[2, 2])


def test_ids_are_those_of_the_places(federation, cohort):
    assert [i.tolist() for i in mixing.ids(federation, cohort)] == [[2, NOBODY], [4, 3]]


def test_models_are_mixed_within_the_cohort_or_among_all_when_they_are_scored(federation, cohort):
    in_parts = Cohort(cohort.round, cohort.groups, rounds=1, among_all=True)
    assert mixing.among(federation, cohort) is cohort
    everyone = mixing.ids(federation, mixing.among(federation, in_parts))
    assert [i.tolist() for i in everyone] == [[0, 1, 2], [3, 4]]


def test_split_undoes_concatenate(cohort):
    groups = floats([[1, 2], [3, 4]]), floats([[5, 6], [7, 8]])
    joined = jnp.concatenate(groups)
    assert joined.shape == (4, 2)
    assert all((a == b).all() for a, b in zip(mixing.split(joined, cohort), groups, strict=True))


def test_pairs_of_empty_places_are_zero_and_never_written():
    matrix = np.arange(1.0, 26).reshape(5, 5)
    i, j = np.array([3, NOBODY, 0], np.int32), np.array([1, 4, NOBODY], np.int32)
    assert mixing.pairs(floats(matrix), i, j).tolist() == [[17, 20, 0], [0, 0, 0], [2, 5, 0]]

    put = mixing.put_pairs(floats(matrix), i, j, floats(-np.ones((3, 3))))
    matrix[np.ix_([3, 0], [1, 4])] = -1
    assert put.tolist() == matrix.tolist()


# ---- mixtures


def test_row_stochastic_makes_rows_sum_to_one(rng):
    weights = rng.random((4, 4)) * [1, 1, 0, 1]  # the third place is empty
    weights[1] = 0
    i = np.array([4, 1, NOBODY, 0], np.int32)
    rows = np.asarray(mixing.row_stochastic(floats(weights), i, i))
    np.testing.assert_allclose(rows.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(rows[0], weights[0] / weights[0].sum(), rtol=1e-6)
    assert rows[1].tolist() == [0, 1, 0, 0]
    assert not rows[[0, 1, 3], 2].any()
    others = np.array([7, NOBODY, 2], np.int32)
    assert mixing.row_stochastic(floats(np.zeros((4, 3))), i, others)[0].tolist() == [0.5, 0, 0.5]

    among_all = mixing.row_stochastic(floats(np.zeros((4, 5))), i, np.arange(5, dtype=np.int32))
    assert among_all[jnp.array([0, 1, 3])].tolist() == np.eye(5)[[4, 1, 0]].tolist()


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedcmd", {"personal": "fc1", "selection_rounds": 0}), ("mnfl-homogeneous", {})],
)
def test_what_a_client_receives_does_not_depend_on_its_place(federation, rng, name, options):
    """When all are scored, there may be more places than clients, because devices get equally many."""
    config = METHODS[name].config(**options)
    algorithm = METHODS[name].build(config)
    state = algorithm.init(jax.random.key(0), federation, traced(config))
    apart = jax.tree.map(lambda leaf: leaf + floats(rng.normal(size=leaf.shape)), state.weights)
    state = state._replace(weights=apart)
    if name == "mnfl-homogeneous":
        first, second = state.matrix
        state = state._replace(matrix=(first.at[2].set(0), second))  # client 2 has no teacher

    @jax.jit
    def models(state, cohort):
        return [predictor.stacked for predictor in algorithm.receive(None, state, federation, cohort)]

    def received(*places):
        slots = [
            Slots(np.array(index, np.int32), np.array(index) < len(group.id))
            for index, group in zip(places, federation.groups, strict=True)
        ]
        return models(state, Cohort(np.int32(0), tuple(slots), rounds=1, among_all=True))

    places = [2, 3, 0, 1], [1, 0, 2]
    in_order, elsewhere = received([0, 1, 2], [0, 1]), received(*places)
    for index, expected, actual in zip(places, in_order, elsewhere, strict=True):
        clients = np.array(index)
        taken = clients < len(jax.tree.leaves(expected)[0])
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a[taken], b[clients[taken]], rtol=1e-5, atol=1e-6)


def test_mixtures_and_products_are_those_of_flattened_trees(rng):
    weights, own = rng.random((3, 4)), rng.normal(size=(3, 7))
    others = rng.normal(size=(4, 7))

    def parts(flat):
        return {"kernel": floats(flat[:, :6]).reshape(-1, 3, 2), "bias": floats(flat[:, 6:])}

    close = {"rtol": 1e-5, "atol": 1e-6}
    mixtures = tree.weighted_sum(floats(weights), parts(others))
    chex.assert_trees_all_close(mixtures, parts(weights @ others), **close)
    np.testing.assert_allclose(mixing.products(parts(own), parts(others)), own @ others.T, **close)


def test_whole_numbers_and_flags_are_averaged_as_floats():
    seen = {"rows": jnp.array([1, 4]), "present": jnp.array([True, False])}
    mean = tree.weighted_sum(jnp.array([0.25, 0.75]), seen)
    assert jax.tree.map(float, mean) == {"rows": 3.25, "present": 0.25}


def test_distances_keep_their_digits_where_models_have_much_in_common(rng):
    moved = 1e-3 * rng.normal(size=(4, 70))
    flat = np.float32(10 + moved)
    exact = np.square(flat[:, None].astype(float) - flat).sum(2)
    stacked = {"kernel": flat[:, :60].reshape(-1, 20, 3), "bias": flat[:, 60:]}
    some = {name: leaf[[2, 0]] for name, leaf in stacked.items()}
    distances = mixing.squared_distances(some, stacked)
    np.testing.assert_allclose(distances, exact[[2, 0]], rtol=1e-2, atol=1e-7)


def test_output_units_are_compared_whatever_their_lengths(rng):
    kernel = rng.normal(size=(3, 2, 3, 5))
    lengths = rng.uniform(0.1, 9, size=(3, 1, 1, 5))
    cosines = mixing.cosine_of_units(
        {"kernel": floats(kernel), "bias": floats(rng.normal(size=(3, 5)))},
        {"kernel": floats(kernel * lengths), "bias": floats(rng.normal(size=(3, 5)))},
    )
    units = (kernel / np.linalg.norm(kernel, axis=(1, 2), keepdims=True)).reshape(3, -1)
    np.testing.assert_allclose(cosines, units @ units.T / 5, rtol=1e-5)
    assert (
        mixing.cosine_of_units([floats(0 * kernel)], [floats(kernel)]).tolist() == np.zeros((3, 3)).tolist()
    )


def test_present_entries_are_projected_on_the_simplex(rng):
    present = np.array([True, False, True, True, False, True])
    rows, mass = rng.normal(size=(6, 6)), np.array([1, 0.3, 2, 0, 1e-3, 1])
    rows[5] = [0.25, 9, 0.25, 0.25, 9, 0.25]  # is on the simplex already
    projected = mixing.project_on_simplex(floats(rows), floats(mass), present)
    expected = np.zeros((6, 6))
    for n in np.flatnonzero(mass):
        expected[n, present] = nearest(rows[n, present], mass[n])
    np.testing.assert_allclose(projected, expected, atol=1e-6)
    assert (expected[:, present] == 0).any(1).sum() > 2  # for these a mere shift is not enough

    np.testing.assert_allclose(projected.sum(1), mass, rtol=1e-6)
    assert np.all(projected >= 0) and not projected[:, ~present].any()
    again = mixing.project_on_simplex(projected, floats(mass), present)
    np.testing.assert_allclose(again, projected, atol=1e-6)


# ---- the matrix of MNFL


@pytest.mark.parametrize("row_norm", ["simplex", "softmax"])
def test_rows_of_the_matrix_stay_distributions_and_absent_clients_as_they_are(rng, row_norm):
    hyper = LearnedMatrix(matrix_lr=0.3, row_norm=row_norm)
    step = jax.jit(
        lambda matrix, i, sizes, distance_gradient: learned_matrix.learn(
            matrix, i, sizes, distance_gradient, hyper, 0.2
        )
    )
    matrix = np.asarray(learned_matrix.initial(5, 5.0))
    assert np.all(matrix == np.float32(0.2))
    for _ in range(20):
        i = rng.permutation(5)[:4].astype(np.int32)
        i[rng.integers(4)] = NOBODY
        distance_gradient = floats(5 * rng.normal(size=(4, 4)))
        new = np.asarray(step(matrix, i, floats(np.where(i < NOBODY, i + 1, 0)), distance_gradient))
        absent = np.setdiff1d(np.arange(5), i)
        assert (new[absent] == matrix[absent]).all() and (new[:, absent] == matrix[:, absent]).all()
        np.testing.assert_allclose(new.sum(1), 1, rtol=1e-5)
        assert new.min() >= 0
        matrix = new
    assert np.ptp(matrix) > 0.2


# ---- what FedCMD compares


def test_wasserstein_distance_of_gaussians_is_the_integral_over_quantiles():
    (mu, sd), (nu, se) = (0.3, 0.2), (0.7, 0.05)

    def squared(q):
        return (stats.norm.ppf(q, mu, sd) - stats.norm.ppf(q, nu, se)) ** 2

    integral, _ = integrate.quad(squared, 0, 1)
    one, other = (Gaussian(*map(floats, pair)) for pair in ((mu, sd), (nu, se)))
    assert abs(float(wasserstein(one, other, "wasserstein")) - integral**0.5) < 1e-5
    assert abs(float(wasserstein(one, other, "mean")) - 0.4) < 1e-6


def test_a_tensor_is_represented_by_mean_and_deviation_of_its_entries_as_they_are_or_scaled(rng):
    real = rng.normal(5, 3, (3, 2, 2))
    padded = np.concatenate([real, 1e6 * rng.normal(size=(2, 2, 2))])
    rows, some = moments(floats(padded)), np.arange(5) < 3
    np.testing.assert_allclose(gaussian(rows, some, "none"), (real.mean(), real.std()), rtol=1e-5)
    scaled = (real - real.min()) / np.ptp(real)
    np.testing.assert_allclose(gaussian(rows, some, "min-max"), (scaled.mean(), scaled.std()), rtol=1e-5)
    assert gaussian(moments(floats(np.full((5, 4), 7))), some, "min-max") == (0, 0)


@pytest.mark.parametrize(
    ("scores", "names", "ties", "winner"),
    [
        ([0.3, 0.2, 0.1], ("fc1", "fc2", "classifier"), "fc2", 2),
        ([0.1, 0.1, 0.1], ("fc1", "fc2", "classifier"), "earlier", 0),
        ([0.1, 0.1, 0.3], ("fc1", "fc2", "classifier"), "fc2", 1),
        ([0.1, 0.3, 0.1], ("fc1", "fc2", "classifier"), "fc2", 0),
        ([0.3, 0.1, 0.1], ("fc1", "fc3", "classifier"), "fc2", 1),
    ],
)
def test_a_vote_goes_to_the_least_score_and_in_ties_to_the_chosen_layer(scores, names, ties, winner):
    assert vote(floats(scores), names, ties).tolist() == np.eye(3)[winner].tolist()


def test_the_summary_of_the_matrix_leaves_out_newcomers():
    """Of three clients, the last is a newcomer and does not count."""
    matrix = floats([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [1, 0, 0]])
    apart = (np.array([False, False]), np.array([True]))
    federation: Any = SimpleNamespace(newcomers=apart, participants=floats([2, 0]))
    found = learned_matrix.summary(matrix, federation)
    assert found == pytest.approx({"of oneself": 0.55, "of the best other": 0.15})
