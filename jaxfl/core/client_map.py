"""The client axis and its entry points.

An algorithm describes one client. `map_clients` runs that description for all clients of a cohort, group by
group, and decides how many run side by side and on which devices; `map_and_sum` also takes a mean over them.
So no algorithm maps over clients itself. `visit_clients` and `visit_client` go from one client to the next.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from jaxfl.core import flops, loops, tree
from jaxfl.core.examples import as_trained
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.data.federation import Client, Federation, PerGroup


def one_or_all(*names: str) -> Callable[[Callable], Callable[..., Any]]:
    """Let a function also accept the federation or the cohort of one group, see `each_architecture`.

    Then the arguments of these names are given, and all results returned, without the tuple of groups.
    """

    def lower(f):
        signature = inspect.signature(f)

        @functools.wraps(f)
        def either(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            if not any(getattr(given.get(name), "alone", None) for name in ("federation", "cohort")):
                return f(*args, **kwargs)
            wrapped = {name: (given[name],) for name in names if name in given}
            found = f(**given | wrapped)
            return found[0] if len(found) == 1 else tuple(of_group for (of_group,) in found)

        return either

    return lower


@one_or_all("shared", "own")
def map_clients(f, key, federation: Federation, cohort: Cohort, shared=None, own=None) -> PerGroup:
    """Run a one-client function for every client of a cohort.

    Args:
      f: ``(key, client, shared, own) -> outputs``, for one client. An absent client has size 0: it runs no
        batch, and its outputs are not used.
      key: the round's key; the client's is ``fold_in(key, client.id)``, whatever the order of clients.
      federation: all clients.
      cohort: the clients to map over. Each device takes an equal stretch of the places;
        `jaxfl.core.cohorts.balance` arranges clients so that the stretches take about equally long.
      shared: per group, what all its clients receive; None for nothing.
      own: per group, leaves (k_g, ...), one entry per client, see `gather`; None for nothing.

    Returns:
      Per group the outputs of `f`, with a leading axis (k_g, ...).

    Raises:
      ValueError: if `own` does not have one entry per place of the cohort.
    """
    outputs, _ = _mapped(_each, f, key, federation, cohort, shared, own, weights=None)
    return outputs


@one_or_all("weights", "shared", "own")
def map_and_sum(
    f, key, federation: Federation, cohort: Cohort, weights: PerGroup, shared=None, own=None
) -> tuple[PerGroup, PerGroup]:
    """Run a one-client function for every client of a cohort, and add up a part of what it returns.

    The sum is taken while clients run, so the parts of all clients are never in memory together. Devices
    exchange their sums, so do not use this inside `cond`.

    Args:
      f: ``(key, client, shared, own) -> (outputs, parts)``, for one client, see `map_clients`. Parts are
        floats, summed in their own dtype.
      key: the round's key.
      federation: all clients.
      cohort: the clients to map over.
      weights: per group (k_g,) float, 0 in an empty place: the factor of each client's parts, see
        `jaxfl.core.tree.shares`.
      shared: per group, what all its clients receive; None for nothing.
      own: per group, leaves (k_g, ...), one entry per client; None for nothing.

    Returns:
      Per group the outputs, with a leading axis (k_g, ...), and per group the weighted sum of the parts.

    Raises:
      ValueError: if `own` or `weights` do not have one entry per place of the cohort, if `f` returns no pair,
        or parts that are not floats.
    """
    return _mapped(_summed, f, key, federation, cohort, shared, own, weights)


def _mapped(along, f, key, federation: Federation, cohort: Cohort, shared, own, weights):
    """Run a one-client function group by group, on all devices; return outputs and totals per group.

    The clients of a device go through `along`, ``(one, at_once, clients, own, weights) -> (outputs, total)``:
    `_each` or `_summed`. All else is as in `map_and_sum`.
    """
    mesh = federation.mesh
    f = flops.with_operations(_with_data(f, federation))

    def of_group(g, group, slots, shared, own, weights):
        places = len(slots.mask)
        for leaf in jax.tree.leaves((own, weights)):
            if leaf.shape[:1] != (places,):
                raise ValueError(
                    f"a leaf of own or weights has the shape {leaf.shape}, but the cohort has {places} "
                    "places of this architecture; take the entries of its clients by gather(..., cohort)"
                )
        at_once = max(1, min(federation.clients_at_once, -(-places // federation.devices)))
        # Padded with empty places: a remainder would be compiled as another program.
        fill = -places % (federation.devices * at_once)
        if fill:
            slots = Slots(
                jnp.pad(slots.index, (0, fill), constant_values=len(group.id)), jnp.pad(slots.mask, (0, fill))
            )
            own, weights = jax.tree.map(
                lambda leaf: jnp.pad(leaf, [(0, fill)] + [(0, 0)] * (leaf.ndim - 1)), (own, weights)
            )

        def one(client, own):
            return f(jax.random.fold_in(key, client.id), client, shared, own)

        def stretch(clients, own, weights):
            return along(one, at_once, clients, own, weights)

        everything = clients_in(group, slots), own, weights
        done, total = stretch(*everything) if mesh is None else _over_devices(stretch, mesh, *everything)
        outputs, operations = jax.tree.map(lambda leaf: leaf[:places], done)
        _count(federation, cohort.groups[g], g, operations)
        return outputs, total

    groups = range(len(federation.groups))
    given = (
        (None,) * len(groups) if of_groups is None else of_groups for of_groups in (shared, own, weights)
    )
    outputs, totals = zip(*per_group(of_group, groups, federation.groups, cohort.groups, *given), strict=True)
    return outputs, totals


def _with_data(f, federation: Federation):
    """Return a one-client function whose client knows its data."""

    def of_client(key, client, *more):
        return f(key, as_trained(dataclasses.replace(client, federation=federation)), *more)

    return of_client


def _each(one, at_once: int, clients, own, weights: None):
    """Run ``one(client, own)`` for each client, `at_once` side by side; there is no total."""
    batch_size = at_once if at_once > 1 else None
    return jax.lax.map(lambda entry: one(*entry), (clients, own), batch_size=batch_size), None


@one_or_all("carry", "own")
def visit_clients(
    f, carry: PerGroup, key, federation: Federation, cohort: Cohort, own=None
) -> tuple[PerGroup, PerGroup]:
    """Visit the clients of a cohort one after another; each passes its carry on to the next.

    Every architecture has a carry, which goes round in the order of ids. Every device makes all visits.

    Args:
      f: ``(key, client, carry, own) -> (carry, outputs)``, for one client. Its results are not used in an
        empty place.
      carry: per group, of the first client.
      key: the round's key; the client's is ``fold_in(key, client.id)``.
      federation: all clients.
      cohort: the clients to visit.
      own: per group, leaves (k_g, ...), one entry per client, see `gather`; None for nothing.

    Returns:
      Per group the carry after the last client, and the outputs of `f` with a leading axis (k_g, ...).
    """
    f = flops.with_operations(_with_data(f, federation))

    def visit(carry, one):
        # Replicated before and after the visit, so that the compiler does not shard a single client.
        carry, (client, present, own) = federation.keep_replicated((carry, one))
        done = f(jax.random.fold_in(key, client.id), client, carry, own)
        (after, outputs), operations = federation.keep_replicated(done)
        return tree.where(present, after, carry), (outputs, operations)

    def of_group(g, group, slots, carry, own):
        order = jnp.argsort(slots.index)  # empty places last
        everything = clients_in(group, slots), slots.mask, own
        in_turn = jax.tree.map(lambda leaf: jnp.asarray(leaf)[order], everything)
        carry, found = jax.lax.scan(visit, carry, in_turn)
        outputs, operations = jax.tree.map(lambda leaf: leaf[jnp.argsort(order)], found)
        _count(federation, slots, g, operations)
        return carry, outputs

    groups = range(len(federation.groups))
    nothing = (None,) * len(groups)
    done = per_group(
        of_group, groups, federation.groups, cohort.groups, carry, nothing if own is None else own
    )
    carry, outputs = zip(*done, strict=True)
    return carry, outputs


def visit_client(f, carry, key, federation: Federation, g: int, who, own) -> tuple[Any, Any]:
    """Visit one client if it belongs to group `g`; every device makes the visit.

    Args:
      f: ``(key, client, carry, own) -> (carry, own)``, for one client.
      carry: before the visit.
      key: the round's key; the client's is ``fold_in(key, client.id)``.
      federation: all clients.
      g: number of the group.
      who: () int32, id of the client. If it belongs to another group, nothing changes.
      own: leaves (n_g, ...), one entry per client of the group.

    Returns:
      The carry after the visit, and `own` with the client's new entry.
    """
    group = federation.groups[g]
    of_it = group.id == who
    place = jnp.argmax(of_it).astype(jnp.int32)
    f = flops.with_operations(_with_data(f, federation))

    def visit(carry, mine):
        client = jax.tree.map(lambda leaf: leaf[place], group)
        (carry, mine), operations = f(jax.random.fold_in(key, client.id), client, carry, mine)
        added = jnp.zeros(group.size.shape, operations.dtype).at[place].add(operations)
        flops.pass_on(added, group=federation.numbers[g])
        return carry, mine

    mine = jax.tree.map(lambda leaf: leaf[place], own)  # out here: a branch would copy all clients' state
    # Replicated before and after the branch, so that no device waits for another one inside it.
    carry, mine = federation.keep_replicated((carry, mine))
    visited = loops.cond(of_it.any(), visit, lambda carry, mine: (carry, mine), carry, mine)
    carry, mine = federation.keep_replicated(visited)
    return carry, jax.tree.map(lambda leaf, new: leaf.at[place].set(new), own, mine)


def clients_in(group: Client, slots: Slots) -> Client:
    """The clients in some places of a group; an empty place has a client without rows."""
    return only_if(slots.mask, tree.take(group, slots))


def only_if(present, client: Client) -> Client:
    """Return a client, without any rows unless present, so that it trains on and predicts nothing."""
    return dataclasses.replace(
        client,
        size=jnp.where(present, client.size, 0),
        validation_size=jnp.where(present, client.validation_size, 0),
        test_size=jnp.where(present, client.test_size, 0),
    )


def _count(federation: Federation, slots: Slots, g: int, operations) -> None:
    """Report the operations (k_g,) of the clients in some places of a group."""
    nobody = jnp.zeros(federation.groups[g].size.shape, operations.dtype)
    flops.pass_on(nobody.at[slots.index].add(operations, mode="drop"), group=federation.numbers[g])


def _summed(one, at_once: int, clients, own, weights):
    """Run ``one(client, own) -> ((outputs, parts), operations)`` for each client, `at_once` side by side.

    Returns:
      ``(outputs, operations)`` of the n clients with a leading axis, and the sum of their parts times their
      weights (n,). Parts of clients with weight 0 are left out, even if they are NaN.
    """
    alone = at_once == 1

    def with_parts(client, own):
        found, operations = one(client, own)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError("a client of map_and_sum returns (outputs, parts)")
        outputs, parts = found
        return (outputs, operations), parts

    # Traced once for its shapes and for the loop.
    f = jax.jit(with_parts if alone else jax.vmap(with_parts), inline=True)

    def dealt(leaf):
        return leaf if alone else leaf.reshape(leaf.shape[0] // at_once, at_once, *leaf.shape[1:])

    def collected(leaf):
        return leaf if alone else leaf.reshape(leaf.shape[0] * at_once, *leaf.shape[2:])

    weights, entries = jax.tree.map(dealt, (weights, (clients, own)))
    _, parts = jax.eval_shape(lambda: f(*jax.tree.map(lambda leaf: leaf[0], entries)))
    for part in jax.tree.leaves(parts):
        if not jnp.issubdtype(part.dtype, jnp.inexact):
            raise ValueError(f"a sum over clients takes floats, but a part of it is {part.dtype}; convert it")
    nothing = jax.tree.map(jnp.zeros_like, parts if alone else tree.one(parts))

    def add(total, turn):
        weights, entry = turn
        outputs, parts = f(*entry)

        def more(total, leaf):
            counts = weights.reshape(weights.shape + (1,) * (leaf.ndim - weights.ndim)) != 0
            leaf = jnp.where(counts, leaf, 0)
            return total + jnp.tensordot(weights.astype(leaf.dtype), leaf, weights.ndim, precision="highest")

        return jax.tree.map(more, total, parts), outputs

    total, outputs = jax.lax.scan(add, nothing, (weights, entries))
    return jax.tree.map(collected, outputs), total


def _over_devices(f, mesh, *args):
    """Run ``f(*args) -> (outputs, total)`` with the clients divided among the mesh's devices.

    Clients are the leading axis of all arguments and outputs; the totals of the devices are summed.
    """
    share = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // mesh.size, *leaf.shape[1:]), leaf.dtype), args
    )
    # Captured arrays become arguments: inside `shard_map` arrays from outside are of another kind.
    jaxpr, outputs = jax.make_jaxpr(f, return_shape=True)(*share)

    def on_device(captured, args):
        leaves = jaxpr_as_fun(jaxpr.replace(consts=captured))(*jax.tree.leaves(args))
        done, total = jax.tree.unflatten(jax.tree.structure(outputs), leaves)
        return done, jax.lax.psum(total, mesh.axis_names)

    whole, divided = PartitionSpec(), PartitionSpec(*mesh.axis_names)
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=(whole, divided), out_specs=(divided, whole), check_vma=False
    )
    return mapped(jaxpr.consts, args)


def per_group(f, *groups) -> PerGroup:
    """Apply ``f`` to the entries of each group, and return a tuple.

    Raises:
      ValueError: if an argument does not have one entry per group.
    """
    for entries in groups:
        if not isinstance(entries, Iterable):
            kind = type(entries).__name__
            raise ValueError(f"expected a tuple with an entry for each architecture, not a {kind}")
    groups = [tuple(entries) for entries in groups]
    if len(lengths := {len(entries) for entries in groups}) > 1:
        found = " and ".join(map(str, sorted(lengths)))
        raise ValueError(f"expected tuples with an entry for each architecture, but they have {found}")
    return tuple(f(*entries) for entries in zip(*groups, strict=True))


@one_or_all("stacked")
def gather(stacked: PerGroup, cohort: Cohort) -> PerGroup:
    """The cohort's entries of stacked client state: leaves (n_g, ...) -> (k_g, ...)."""
    return per_group(tree.take, stacked, cohort.groups)


@one_or_all("stacked", "new")
def scatter(stacked: PerGroup, cohort: Cohort, new: PerGroup) -> PerGroup:
    """Write `new` (k_g, ...) to the cohort's entries of stacked client state."""
    return per_group(tree.put, stacked, cohort.groups, new)


@one_or_all()
def cohort_rows(federation: Federation, cohort: Cohort) -> PerGroup:
    """Per group (k_g,) float: n_i of the clients whose answer reaches the server, 0 in other places."""
    dtype = federation.mean.dtype
    return per_group(
        lambda group, slots: clients_in(group, slots).size.astype(dtype), federation.groups, cohort.groups
    )


def everyone(federation: Federation, cohort: Cohort, joining: bool = False) -> Cohort:
    """The same round with all clients except newcomers.

    If `joining`, these are the newcomers instead in the round in which they join.

    Raises:
      JaxflError: if the federation is a window.
    """
    federation.require_all()
    newcomers_there = per_group(
        lambda group, slots: tree.take(group.newcomer, slots) & slots.mask, federation.groups, cohort.groups
    )
    join = jnp.concatenate(newcomers_there).any() if joining else False

    def of_group(group):
        present = group.newcomer == join
        return Slots(jnp.where(present, jnp.arange(len(group.id), dtype=jnp.int32), len(group.id)), present)

    return dataclasses.replace(cohort, groups=per_group(of_group, federation.groups))
