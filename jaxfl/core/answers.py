"""Lost answers: some clients of a cohort drop out, others answer later than the server waits.

A lost answer changes nothing, neither on the server nor on its client. For both the round has not happened,
so they agree on what was learned. Therefore no method knows of it: its step gets a cohort of the clients that
answer. What the others have received and computed until then still counts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import tree
from jaxfl.core.client_map import per_group
from jaxfl.core.flops import Operations
from jaxfl.core.protocol import BYTES_PER_SCALAR, Cohort, Slots, messages
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.data.generators import DROPOUTS, generator
from jaxfl.machine import clock
from jaxfl.machine.clock import Deadline


def draw_dropouts(group_sizes: Sequence[int], dropout: float, rounds: int, seed: int) -> PerGroup:
    """Draw which clients drop out of which round if they take part, from only seed, round and client.

    They do so with the probability `dropout`. Ids count through the groups in order.

    Returns:
      Per group (rounds, n_g) bool.
    """
    clients = sum(group_sizes)
    draws = np.stack([generator(seed, t, DROPOUTS).random(clients) for t in range(rounds)])
    return tuple(np.split(draws < dropout, np.cumsum(group_sizes)[:-1], axis=1))


class Ledger(NamedTuple):
    """Traffic (see `Info`) and operations (see `jaxfl.core.flops`) of a round."""

    up: PerGroup
    down: PerGroup
    flops: Operations


def lost_answers(ledger: Ledger, dropped: PerGroup, deadline: Deadline | None, cohort: Cohort) -> PerGroup:
    """Return which clients of a cohort do not answer, per group (k_g,) bool.

    The ledger is that of the round in which all of them answer. For `dropped` (n_g,) bool see
    `draw_dropouts`. Without a deadline the server waits as long as it takes.
    """
    lost = per_group(lambda slots, gone: tree.take(gone, slots) & slots.mask, cohort.groups, dropped)
    if deadline is None:
        return lost

    def late(slots, device, flops, *traffic):
        moved = BYTES_PER_SCALAR * tree.total(map(_scalars, traffic))
        device, flops = tree.take(device, slots), tree.take(flops, slots)
        return slots.mask & (clock.seconds(device, flops, moved) > deadline.seconds)

    columns = deadline.devices, ledger.flops.clients, ledger.up, ledger.down
    return per_group(jnp.logical_or, lost, per_group(late, cohort.groups, *columns))


def _scalars(counts: Any) -> jax.Array:
    """Return the scalars that each client sent or received, (k_g,) float, see `Info.up`."""
    return tree.total(size * count.astype(float) for size, count in messages(counts).items())


def answering(federation: Federation, cohort: Cohort, lost: PerGroup) -> Cohort:
    """Empty the places of the clients of a round whose answers are `lost` (k_g,)."""
    groups = per_group(
        lambda group, slots, gone: Slots(
            jnp.where(gone, jnp.int32(len(group.id)), slots.index), slots.mask & ~gone
        ),
        federation.groups,
        cohort.groups,
        lost,
    )
    return dataclasses.replace(cohort, groups=groups)


def anybody(cohort: Cohort) -> jax.Array:
    """Return whether anybody takes part, () bool."""
    return jnp.stack([slots.mask.any() for slots in cohort.groups]).any()


def spent(
    answered: Ledger,
    everyone: Ledger,
    lost: PerGroup,
    dropped: PerGroup,
    federation: Federation,
    cohort: Cohort,
) -> Ledger:
    """Return what all clients of a round received, computed and sent; those that drop out send nothing.

    Args:
      answered: of the round with only the clients that answer.
      everyone: of the round in which all answer.
      lost: see `lost_answers`.
      dropped: per group (n_g,) bool, see `draw_dropouts`.
      federation: the clients.
      cohort: of the round, including clients whose answers are lost.
    """

    def sent(slots, is_lost, dropped, answered, everyone):
        drops_out = tree.take(dropped, slots)
        everyone = jax.tree.map(lambda counts: jnp.where(drops_out, 0, counts), everyone)
        return tree.where(is_lost, everyone, answered)

    def computed(group, slots, is_lost, answered, everyone):
        of_clients = jnp.zeros(group.size.shape, bool).at[slots.index].set(is_lost, mode="drop")
        return tree.where(of_clients, everyone, answered)

    groups, places, flops = federation.groups, cohort.groups, answered.flops
    flops = flops._replace(
        clients=per_group(computed, groups, places, lost, flops.clients, everyone.flops.clients)
    )
    up = per_group(sent, places, lost, dropped, answered.up, everyone.up)
    return Ledger(up, per_group(tree.where, lost, everyone.down, answered.down), flops)
