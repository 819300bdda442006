"""Cohorts: the clients of each round and their places, drawn before the run.

The draw depends only on the seed, the round and the number of clients. So every method sees the same cohorts,
and a resumed run sees those of the uninterrupted one.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxfl.core.protocol import Cohort, Slots
from jaxfl.data.federation import Federation
from jaxfl.data.generators import NEWCOMERS, generator
from jaxfl.data.partition import rounded_down

SPARE = 8  # extra places per device, so that many small clients can balance a large one
SCORED_AT_ONCE = 256  # clients of a group that are scored at once: their models are in memory together


def draw_cohorts(
    group_sizes: Sequence[int],
    participation: float,
    rounds: int,
    seed: int,
    newcomers: Sequence[np.ndarray] = (),
) -> tuple[Slots, ...]:
    """Draw max(1, floor(participation * N)) of N clients for every round, without replacement.

    Ids count through the groups in order. Newcomers, per group (n_g,) bool, are not among the N yet.

    Returns:
      Per group `Slots` with leaves (rounds, k_g): k_g is the largest number of the group's clients that any
      round can have, and at least 1, so all rounds of all runs have one shape; places that a round leaves
      empty are masked.
    """
    clients = np.arange(sum(group_sizes))
    if newcomers:
        clients = clients[~np.concatenate(newcomers)]
    active = max(1, rounded_down(participation, len(clients)))
    chosen = np.zeros((rounds, sum(group_sizes)), bool)
    for t in range(rounds):
        rng = generator(seed, t)
        chosen[t, rng.permutation(clients)[:active]] = True
    groups = np.split(chosen, np.cumsum(group_sizes)[:-1], axis=1)
    return tuple(_slots(of_group, min(of_group.shape[1], active)) for of_group in groups)


def draw_poisson(
    group_sizes: Sequence[int],
    participation: float,
    rounds: int,
    seed: int,
    newcomers: Sequence[np.ndarray] = (),
) -> tuple[Slots, ...]:
    """Draw each client of every round by itself, with the probability `participation`, see `draw_cohorts`.

    There are more places than a round has clients on average: by eight standard deviations, or as many as the
    fullest round needs.
    """
    apart = np.concatenate(newcomers) if newcomers else np.zeros(sum(group_sizes), bool)
    draws = np.stack([generator(seed, t).random(sum(group_sizes)) for t in range(rounds)])
    groups = np.split((draws < participation) & ~apart, np.cumsum(group_sizes)[:-1], axis=1)

    def places(chosen):
        usual = participation * chosen.shape[1]
        return min(chosen.shape[1], max(math.ceil(usual + 8 * math.sqrt(usual) + 8), chosen.sum(1).max()))

    return tuple(_slots(of_group, places(of_group)) for of_group in groups)


def draw_newcomers(group_sizes: Sequence[int], share: float, seed: int) -> tuple[np.ndarray, ...]:
    """Draw the clients that take part in no round and join at the end, per group (n_g,) bool.

    They are a share of each group's clients, in [0, 1), rounded down, so that some are left. The seed is that
    of the partition.

    >>> [int(of_group.sum()) for of_group in draw_newcomers([10, 4, 3], 0.25, seed=0)]
    [2, 1, 0]
    """
    return tuple(
        generator(seed, g, NEWCOMERS).permutation(clients) < rounded_down(share, clients)
        for g, clients in enumerate(group_sizes)
    )


def _slots(chosen: np.ndarray, places: int) -> Slots:
    """Return the chosen clients (rounds, n_g) bool of every round in so many places, or in 1 if that is 0."""
    counts, places = chosen.sum(1), max(1, places)
    # A stable sort on "not chosen" puts the chosen clients first, in the order of their ids.
    index = np.argsort(~chosen, axis=1, kind="stable")[:, :places].astype(np.int32)
    mask = np.arange(places) < counts[:, None]
    return Slots(np.where(mask, index, np.int32(chosen.shape[1])), mask)


def balance(
    cohorts: Sequence[Slots], sizes: Sequence[np.ndarray], federation: Federation
) -> tuple[Slots, ...]:
    """Rearrange cohorts so that the devices, each with an equal stretch of places, get equal work.

    From the largest client on, each goes to the device with the least work so far that has a place left.
    Within a stretch clients are ordered by size, so those that run side by side are of similar size.

    Args:
      cohorts: per group `Slots` with leaves (rounds, k_g).
      sizes: per group (n_g,), the rows of each client: its work.
      federation: its devices, and how many clients run side by side on each.

    Returns:
      The same clients in the same rounds, with leaves (rounds, devices * places): at most `SPARE` more
      places per device than its share. Places depend neither on the number of rounds nor on the seed, so that
      sums over a cohort have the same last digits in a longer run, and beside other seeds. Only clients that
      run side by side get no more places than some round needs, because there an empty place costs as much as
      the largest client.
    """
    alone = federation.clients_at_once == 1
    return tuple(
        _balanced(slots, work, federation.devices, alone) for slots, work in zip(cohorts, sizes, strict=True)
    )


def _balanced(slots: Slots, sizes: np.ndarray, devices: int, alone: bool) -> Slots:
    rounds, k = slots.mask.shape
    places = min(k, -(-k // devices) + SPARE * alone)
    index = np.full((rounds, devices, places), len(sizes), np.int32)
    for t in range(rounds):
        clients = slots.index[t][slots.mask[t]]
        if t and np.array_equal(slots.index[t], slots.index[t - 1]):
            index[t] = index[t - 1]
            continue
        loads = [(0, 0, device) for device in range(devices)]  # rows, clients, device
        for client in clients[np.argsort(-sizes[clients], kind="stable")]:
            rows, count, device = heapq.heappop(loads)
            index[t, device, count] = client
            if count + 1 < places:
                heapq.heappush(loads, (rows + int(sizes[client]), count + 1, device))
    used = places if alone else (index < len(sizes)).sum(2).max(initial=1)
    index = index[:, :, :used].reshape(rounds, devices * used)
    return Slots(index, index < len(sizes))


def align(runs: Sequence[tuple[Slots, ...]], federation: Federation) -> list[tuple[Slots, ...]]:
    """Pad the cohorts of several runs to as many places as the fullest needs; clients keep their devices.

    Args:
      runs: results of `balance`, leaves (rounds, devices * places); places may differ between runs.
      federation: the clients and devices.
    """

    def of_group(group, *parts):
        places = max(part.mask.shape[1] for part in parts) // federation.devices

        def filled(leaf, value):
            rounds, its_own = len(leaf), leaf.shape[1] // federation.devices
            stretches = leaf.reshape(rounds, federation.devices, its_own)
            fill = [(0, 0), (0, 0), (0, places - its_own)]
            return np.pad(stretches, fill, constant_values=value).reshape(rounds, -1)

        return [Slots(filled(part.index, len(group.id)), filled(part.mask, False)) for part in parts]

    return list(zip(*map(of_group, federation.groups, *runs), strict=True))


def all_clients(federation: Federation, rounds: int) -> Cohort:
    """Return all clients as one cohort, before the first round."""
    return these_clients(federation, [np.ones(len(group.size), bool) for group in federation.groups], rounds)


def these_clients(
    federation: Federation,
    chosen: Sequence[np.ndarray],
    rounds: int,
    number: int = 0,
    among_all: bool = False,
) -> Cohort:
    """Return some clients, (n_g,) bool per group, as the cohort of a round; see `Cohort` for `among_all`."""
    slots = [_slots(np.asarray(of_group)[None], int(np.sum(of_group))) for of_group in chosen]
    places = balance(slots, [np.asarray(group.size) for group in federation.groups], federation)
    return Cohort(np.int32(number), jax.tree.map(lambda leaf: leaf[0], places), rounds, among_all)


def in_parts(federation: Federation, last: int, rounds: int) -> list[Cohort]:
    """Divide all clients after round `last` into cohorts of one shape, at most `SCORED_AT_ONCE` per group."""
    number = max(-(-len(group.size) // SCORED_AT_ONCE) for group in federation.groups)

    def slots(group):
        count = len(group.size)
        index = np.arange(number * min(count, SCORED_AT_ONCE), dtype=np.int32).reshape(number, -1)
        return Slots(np.minimum(index, np.int32(count)), index < count)

    work = [np.asarray(group.test_size) for group in federation.groups]
    parts = balance([slots(group) for group in federation.groups], work, federation)
    return [
        Cohort(
            np.int32(last), jax.tree.map(lambda leaf, part=part: leaf[part], parts), rounds, among_all=True
        )
        for part in range(number)
    ]


def by_client(parts: list[tuple]) -> Any:
    """Join leaves (places,) of several parts, each with its `Slots`, as leaves (n_g,) in clients' order."""
    slots, trees = zip(*parts, strict=True)
    taken = np.concatenate([of_part.mask for of_part in slots])
    order = np.argsort(np.concatenate([of_part.index for of_part in slots])[taken])
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[taken][order], *trees)
