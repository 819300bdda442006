"""Clients mapped inside loops and branches, and clients visited one after another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import cohort

from jaxfl.config.setup import Setup
from jaxfl.core import engine, flops, loops, memory
from jaxfl.core.client_map import map_and_sum, map_clients, per_group, visit_clients
from jaxfl.folder.variant import choose
from jaxfl.machine.placement import mesh_of
from jaxfl.runs.engine_job import job_of
from jaxfl.runs.prepare import prepare

NOTHING = (None, None)
OWN = (jnp.arange(3.0), jnp.arange(10.0, 12.0))
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def everyone(federation):
    """Return a round with all clients."""
    return cohort(federation, range(5))


@pytest.fixture(scope="module")
def some(federation):
    """Return a round without two of the clients."""
    return cohort(federation, (2, 0, 4))


def rows_of(federation, positions):
    return sum(int(group.size[i]) for group, of in zip(federation.groups, positions, strict=True) for i in of)


def one_product(key, client, shared, own):
    """Count ten operations for each of the client's rows."""
    flops.add(10.0 * client.size.astype(float))
    return own + 1


def counted(f, federation):
    """Return what a function returns, and the operations of each group's clients in it."""

    def run():
        with flops.collect() as amounts:
            outputs = f()
        return outputs, flops.by_owner(amounts, [len(group.id) for group in federation.groups])

    return jax.jit(run)()


def mapped(federation, of_round, own):
    return map_clients(one_product, KEY, federation, of_round, NOTHING, own)


def test_clients_are_mapped_and_counted_inside_scan(federation, everyone):
    def body(own, _):
        return mapped(federation, everyone, own), None

    own, operations = counted(lambda: loops.scan(body, OWN, length=4)[0], federation)
    np.testing.assert_array_equal(own[0], OWN[0] + 4)
    for group, of_group in zip(federation.groups, operations.clients, strict=True):
        np.testing.assert_array_equal(of_group, 4 * 10 * group.size)


def test_clients_are_mapped_and_counted_inside_a_loop_of_any_length(federation, everyone):
    def run(times):
        return loops.fori_loop(0, times, lambda i, own: mapped(federation, everyone, own), OWN)

    for times in (0, 3):
        own, operations = counted(lambda times=times: run(jnp.int32(times)), federation)
        np.testing.assert_array_equal(own[1], OWN[1] + times)
        np.testing.assert_array_equal(operations.clients[0], times * 10 * federation.groups[0].size)


@pytest.mark.parametrize("condition", [True, False])
def test_only_the_branch_that_runs_is_counted(federation, everyone, condition):
    def run():
        both = lambda own: mapped(federation, everyone, own)  # noqa: E731
        return loops.cond(jnp.bool_(condition), both, lambda own: own, OWN)

    own, operations = counted(run, federation)
    np.testing.assert_array_equal(own[0], OWN[0] + float(condition))
    np.testing.assert_array_equal(operations.clients[1], int(condition) * 10 * federation.groups[1].size)


def visitor(key, client, carry, own):
    """Write the client's id and a number drawn from its key into a book; return what is its own, plus 1."""
    flops.add(10.0 * client.size.astype(float))
    book, numbers, entries = carry
    number = jax.random.uniform(key)
    return (book.at[entries].set(client.id), numbers.at[entries].set(number), entries + 1), own + 1


def visits(federation, of_round):
    empty = jnp.full(3, -1, jnp.int32), jnp.zeros(3), jnp.int32(0)
    own = per_group(lambda slots: slots.index.astype(float), of_round.groups)
    return visit_clients(visitor, (empty, empty), KEY, federation, of_round, own)


def test_clients_are_visited_one_after_another_by_their_ids(federation, some):
    ((first, drawn, entries), (second, *_)), outputs = jax.jit(lambda: visits(federation, some))()
    assert first.tolist() == [0, 2, -1] and second.tolist() == [4, -1, -1] and entries == 2
    own = [float(jax.random.uniform(jax.random.fold_in(KEY, client))) for client in (0, 2)]
    assert drawn.tolist() == [*own, 0.0]
    for slots, of_group in zip(some.groups, outputs, strict=True):  # in the order of places
        np.testing.assert_array_equal(of_group[slots.mask], slots.index[slots.mask] + 1)


def test_the_order_of_places_and_empty_places_change_no_visit(federation, some):
    other = cohort(federation, (0, 2, 4), places=(3, 1))
    books, _ = visits(federation, some)
    assert jax.tree.all(jax.tree.map(np.array_equal, books, visits(federation, other)[0]))


def test_visits_are_counted(federation, some):
    _, operations = counted(lambda: visits(federation, some), federation)
    assert operations.clients[0].tolist() == [
        10 * int(federation.groups[0].size[i]) * (i != 1) for i in range(3)
    ]
    assert jax.device_get(operations).total == 10 * rows_of(federation, ((0, 2), (1,)))


@pytest.mark.parametrize(("at_once", "devices"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_weighted_sum_over_clients_is_that_of_their_parts(federation, some, at_once, devices):
    """Only present clients count, with and without padding to the places of devices and of `at_once`."""
    here = dataclasses.replace(federation, mesh=mesh_of(devices), clients_at_once=at_once)

    def client(key, client, shared, own):
        flops.add(10.0 * client.size.astype(float))
        there = jnp.where(client.size > 0, 1.0, jnp.nan)  # an absent client must not count
        return own + 1, {"own": there * (own + 1) * jnp.ones((2, 3)), "id": there * client.id.astype(float)}

    weights = jnp.array([0.5, 2.0, 0.0]), jnp.array([3.0, 0.0])
    run = lambda: map_and_sum(client, KEY, here, some, weights, NOTHING, OWN)  # noqa: E731
    ((first, second), (one, two)), operations = counted(run, here)
    np.testing.assert_array_equal(first, OWN[0] + 1)
    np.testing.assert_array_equal(second, OWN[1] + 1)
    ids = [group.id.tolist() for group in here.groups]
    assert float(one["id"]) == 0.5 * ids[0][2] + 2 * ids[0][0] and float(two["id"]) == 3 * ids[1][1]
    np.testing.assert_array_equal(one["own"], np.full((2, 3), 0.5 * (OWN[0][0] + 1) + 2 * (OWN[0][1] + 1)))
    assert operations.clients[0].tolist() == [10 * int(here.groups[0].size[i]) * (i != 1) for i in range(3)]


def test_memory_of_a_round_does_not_grow_by_a_model_per_client():
    """FedAvg needs less than one more model of memory for 12 clients than for 4, by the compiler's count."""
    needed = []
    for clients in (4, 12):
        setup = Setup.of(dataset="digits", models=("mlp",), clients=clients, rounds=1)
        federation = prepare(setup).federation
        data = sum(leaf.nbytes for leaf in jax.tree.leaves(federation))
        (rounds, *_) = engine.compiled(job_of([(choose("fedavg"), setup)], federation))
        needed.append(memory.peak_bytes(rounds) - data)
    model = sum(leaf.nbytes for leaf in jax.tree.leaves(federation.models[0].init(KEY)))
    assert needed[1] - needed[0] < model
