"""Gossip and walks on small graphs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EDGES, assert_same, cohort, tiny_links

from jaxfl.mechanisms import topology


@pytest.fixture(scope="module")
def linked(federation):
    """Return the five clients with their links."""
    return dataclasses.replace(federation, links=jnp.asarray(tiny_links()))


def test_metropolis_weights_are_symmetric_and_their_rows_sum_to_one():
    weights = np.asarray(topology.metropolis(jnp.asarray(tiny_links())))
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    assert_same(weights, weights.T)
    degree = tiny_links().sum(1)
    for i, k in EDGES:
        assert weights[i, k] == pytest.approx(1 / (1 + max(degree[i], degree[k])))
    assert np.count_nonzero(weights) == 2 * len(EDGES) + len(degree)


def test_absent_clients_take_no_part_in_gossip(linked):
    present = cohort(linked, (0, 3, 4))
    held = {0: jnp.array([1.0, 0, 0]), 1: jnp.array([10.0, 100])}  # of client 0, and of 3 and 4
    mixed, sent = topology.gossip(linked, present, held)
    # Links are 0-4 and 3-4: client 4 has two neighbours, the others one.
    assert_same(mixed[0][:1], np.float32([1 + (100 - 1) / 3]), tolerance=1e-6)
    assert_same(mixed[1], np.float32([10 + 90 / 3, 100 - 99 / 3 - 90 / 3]), tolerance=1e-6)
    assert [sent[g].tolist() for g in held] == [[1, 0, 0], [1, 2]]


def walked(linked, at, here, accepts, most=1000, seed=0):
    """Walk from client `at` among the clients that are here, until one of those that accept."""
    here, chance = (jnp.asarray(np.isin(np.arange(5), list(ids))) for ids in (here, accepts))
    key, at = jax.random.key(seed), jnp.int32(at)
    return topology.walk(key, linked, here, at, chance.astype(float), most)


def test_a_walk_ends_where_it_is_accepted_and_each_client_pays_for_its_own_hops(linked):
    way = walked(linked, at=3, here=range(5), accepts=[1])
    assert way.accepted and way.at == 1 and bool(way.passed[3])
    assert not bool(way.sent[1])  # which sends it on only after its training
    hops = [walked(linked, 3, range(5), [1], seed=seed).sent.sum() for seed in range(8)]
    assert min(hops) >= 2 and len({int(n) for n in hops}) > 1  # 3 is two links away from 1


def test_a_walk_that_is_accepted_at_once_sends_nothing(linked):
    way = walked(linked, at=3, here=range(5), accepts=[3])
    assert way.accepted and way.at == 3 and not way.sent.any() and way.passed.tolist().count(True) == 1


def test_a_hop_from_an_absent_client_is_paid_by_the_receiver(linked):
    way = walked(linked, at=3, here=[4, 0], accepts=[4])
    assert way.accepted and way.at == 4
    assert way.sent.tolist() == [0, 0, 0, 0, 1]
    assert way.passed.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("at", "here", "accepts"),
    [
        (1, [0, 1, 2], []),  # no client accepts
        (1, [0, 1, 2], [3]),  # the one that accepts is absent
        (1, [0, 1, 4], [4]),  # the one that accepts is not linked
        (0, [1, 3, 4], [0]),  # it accepts itself, but is absent
    ],
)
def test_a_walk_that_no_client_can_accept_stays(linked, at, here, accepts):
    links = linked.links.at[0, 4].set(False).at[4, 0].set(False)
    way = walked(dataclasses.replace(linked, links=links), at, here, accepts)
    assert not way.accepted and way.at == at and not way.sent.any()


def test_a_walk_ends_after_the_most_hops(linked):
    way = walked(linked, at=3, here=range(5), accepts=[1], most=1)
    assert not way.accepted and way.at != 3 and way.sent.tolist() == [0, 0, 0, 1, 0]
