"""A message's way from its client to the server, where mechanisms let it pass."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.core import tree
from jaxfl.core.client_map import map_and_sum, map_clients, per_group
from jaxfl.core.protocol import Cohort, Info, Slots
from jaxfl.core.streams import WIRE
from jaxfl.core.traffic import sent_up
from jaxfl.data.federation import Client, Federation
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.wire.aggregation import clipped


def require_no_noise(federation: Federation, what: str) -> None:
    """Raise `JaxflError` if there is noise on messages with `what`, where clients also tell classes."""
    if federation.wire and federation.wire.privacy:
        raise JaxflError(
            f"--privacy gaussian covers messages, but with {what} a client also tells which classes it has; "
            "leave it out."
        )


def with_known(f: Callable, known: Any, *trees: Any) -> Any:
    """Map f over the parts of what the server knows and of trees; take the last tree's where that is None."""

    def of_part(before, *parts):
        return parts[-1] if before is None else f(before, *parts)

    return jax.tree.map(of_part, known, *trees, is_leaf=lambda part: part is None)


def away(message: Any, known: Any) -> Any:
    """Return a message minus what the server knows; a part of which it knows None is a change already."""
    return with_known(lambda before, now: now - before, known, message)


def _put_back(message: Any, known: Any, change: Any, arrives: Any) -> Any:
    """Undo `away` for what has arrived; an entry that arrives as it was sent is that of the message."""

    def of_part(before, whole, sent, got):
        return jnp.where(got == sent, whole, before + got)  # before + sent may round otherwise

    return with_known(of_part, known, message, change, arrives)


def _arriving(key, client: Client, message: Any, known: Any, owed: Any) -> tuple[Any, Any, Any]:
    """Return what the server gets of a message, what the client owes it from now on, and 1/2 or -1/2.

    The last is whether the change was within an adaptive clip norm; None without.
    """
    wire, within = client.federation.wire, None
    change = arrives = away(message, known)
    keys = jax.random.split(jax.random.fold_in(key, WIRE), 3)
    if wire.privacy and wire.privacy.where == "client":
        arrives = wire.privacy.noisy(keys[0], clipped(arrives, wire.privacy.clip))
    if wire.lies:
        arrives = tree.where(wire.is_attacker(client), wire.attack(keys[1], change), arrives)
    if wire.compress:
        given = arrives if owed is None else jax.tree.map(jnp.add, arrives, owed)
        arrives = wire.compress(keys[2], given)
        owed = None if owed is None else jax.tree.map(jnp.subtract, given, arrives)
    if wire.bound is not None:
        if wire.adapts:
            within = (optax.tree.norm(arrives) <= wire.bound).astype(float) - 0.5
        arrives = clipped(arrives, wire.bound)
    return _put_back(message, known, change, arrives), owed, within


def sent(key, client: Client, message: Any, known: Any = None) -> Any:
    """Return what the server gets of a message of one client in a client map.

    Args:
      key: the client's in the round.
      client: who sends it.
      message: a tree of floats.
      known: what the server knows already, a tree whose None stand for parts of which it knows nothing.
    """
    if client.federation.wire is None:
        return message
    return _arriving(key, client, message, known, None)[0]


def heard(key, federation: Federation, cohort: Cohort, held: Any) -> Any:
    """Return what others get of what a cohort's clients of one architecture hold (k, ...), in that form."""
    if federation.wire is None:
        return held

    def client(key, client, nothing, message):
        return sent(key, client, message)

    return map_clients(client, key, federation, cohort, own=held)


def units(federation: Federation, message: Any) -> Any:
    """Return the 4-byte units in which one message travels: an int, or () int32 where a rate decides it."""
    compress = federation.wire and federation.wire.compress
    return compress.scalars(message) if compress else tree.scalars(message)


def up(federation: Federation, cohort: Cohort, messages: Any) -> Any:
    """Count what clients send up, as `sent_up`: the 4-byte units that really travel."""
    if not (federation.wire and federation.wire.compress):
        return sent_up(cohort, messages)

    def of_group(slots, message):
        return jnp.where(slots.mask, jnp.asarray(units(federation, message), jnp.int32), 0)

    if cohort.alone:
        return of_group(cohort.slots, messages)
    return per_group(of_group, cohort.groups, messages)


def up_to(federation: Federation, receivers: jax.Array, message: Any) -> dict:
    """Count what clients of one architecture send up to so many receivers each (k,), as `Info.up`."""
    size = units(federation, message)
    if isinstance(size, int):
        return {size: receivers}
    many = 2**16  # counted together, because the product may pass an int32
    return {1: receivers * (size % many), many: receivers * (size // many)}


def nothing_owed(federation: Federation, message: Any) -> Any:
    """Return what clients of one architecture owe at first, zeros (n, ...); None without error feedback.

    A client's message has the shapes that `message()` returns.
    """
    if not (federation.wire and federation.wire.feedback):
        return None
    return federation.of_each(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), message()), 0)


def first_clip(federation: Federation) -> jax.Array | None:
    """Return the clip norm of one architecture before the first round, (); None if it does not adapt."""
    return federation.wire.privacy.clip if federation.wire and federation.wire.adapts else None


def without(federation: Federation, cohort: Cohort, left_out: Any) -> Cohort:
    """Return a cohort of one architecture without some of its clients, (k,) bool; None for nobody."""
    if left_out is None:
        return cohort
    index = jnp.where(left_out, len(federation.group.id), cohort.slots.index)
    return dataclasses.replace(cohort, groups=(Slots(index, cohort.slots.mask & ~left_out),))


class Aggregated(NamedTuple):
    """What a server of one architecture makes of a round's messages.

    Args:
      outputs: what stays with the clients (k, ...).
      mean: of the messages, or what stands for it.
      heard: the cohort, without those whose message was left out; for them the round has not happened.
      owed: what the clients owe the server, see `nothing_owed`.
      left_out: (k,) bool, clients whose message was not finite; None if nobody looks.
      part: () float, what part of the clients the mean is of; None for as many as answered.
      always: whether the server steps even if nobody answers.
      clip: the clip norm of the next round, see `first_clip`.
    """

    outputs: Any
    mean: Any
    heard: Cohort
    owed: Any = None
    left_out: jax.Array | None = None
    part: jax.Array | None = None
    always: bool = False
    clip: jax.Array | None = None

    def told(self, info: Info) -> Info:
        """Return a round's report with what was found, and without the loss of clients that were left out."""
        if self.clip is not None:
            info = info._replace(findings=info.findings | {"clip norm": {"next": self.clip}})
        if self.left_out is None:
            return info
        count = {"messages": {"left out": self.left_out.sum(dtype=jnp.int32)}}
        loss = jnp.where(self.left_out, 0, jnp.asarray(info.loss))
        idle = self.left_out if info.idle is None else self.left_out | jnp.asarray(info.idle)
        return info._replace(loss=loss, idle=idle, findings=info.findings | count)


def averaged(
    f,
    key,
    federation: Federation,
    cohort: Cohort,
    weights,
    shared=None,
    own=None,
    *,
    known=None,
    owed=None,
    clip=None,
) -> Aggregated:
    """Average what clients of one architecture send, over the wire; without one, this is `map_and_sum`.

    Args:
      f: ``(key, client, shared, own) -> (outputs, message)``, for one client.
      key: the round's key.
      federation: of one group.
      cohort: the clients to map over.
      weights: (k,) float, 0 in an empty place; the mean divides them by their sum.
      shared: what all clients receive.
      own: leaves (k, ...), one entry per client.
      known: what the server knows of a message already, see `sent`.
      owed: what the cohort's clients owe (k, ...); None without error feedback.
      clip: the clip norm (), if it adapts; else None.
    """
    wire = federation.wire
    if wire is None:
        outputs, mean = map_and_sum(f, key, federation, cohort, tree.shares(weights), shared, own)
        return Aggregated(outputs, mean, cohort)
    present = (weights > 0).astype(weights.dtype)
    if wire.adapts:
        federation = dataclasses.replace(federation, wire=wire.clipping(clip, federation.numbers[0]))

    def over_the_wire(key, client, shared, own):
        own, owed = own
        outputs, message = f(key, client, shared, own)
        message, owed, within = _arriving(key, client, message, known, owed)
        return (outputs, owed), message if within is None else (message, within)

    if wire.aggregate is not None:
        (outputs, owed), messages = map_clients(over_the_wire, key, federation, cohort, shared, (own, owed))
        mean, left_out = wire.trusted(messages, present if wire.privacy else weights, known)
        return Aggregated(outputs, mean, without(federation, cohort, left_out), owed, left_out)
    if wire.privacy is None:
        shares = tree.shares(weights)
        (outputs, owed), mean = map_and_sum(
            over_the_wire, key, federation, cohort, shares, shared, (own, owed)
        )
        return Aggregated(outputs, mean, cohort, owed)
    return _private(over_the_wire, key, federation, cohort, present, shared, (own, owed), known)


def _private(f, key, federation, cohort, present, shared, own, known) -> Aggregated:
    """Average with the same weight for all, and noise on the sum if the server adds it."""
    privacy, (number,) = federation.wire.privacy, federation.numbers
    if privacy.where == "client":
        (outputs, owed), mean = map_and_sum(f, key, federation, cohort, tree.shares(present), shared, own)
        return Aggregated(outputs, mean, cohort, owed)
    # The expected number: the real one would be a secret. Of newcomers all join, which everybody knows.
    joining = cohort.among_all
    clients = jnp.maximum(present.sum(), 1) if joining else federation.wire.expected[number]
    (outputs, owed), mean = map_and_sum(f, key, federation, cohort, present / clients, shared, own)
    mean, within = mean if federation.wire.adapts else (mean, None)
    rest = (clients - present.sum()) / clients  # of the weights; what it weighs is what the server knows
    mean = with_known(lambda before, now: now + rest * before, known, mean)
    noise_key = jax.random.fold_in(key, WIRE - 1 - number)
    drawn = privacy.noisy(noise_key, jax.tree.map(jnp.zeros_like, mean))
    mean = jax.tree.map(lambda leaf, noise: leaf + noise / clients, mean, drawn)
    part = None if joining else clients / federation.participants[0]
    count_key = jax.random.fold_in(noise_key, WIRE)  # beside those of the sum's leaves
    clip = None if within is None else privacy.next_clip(count_key, within, clients)
    return Aggregated(outputs, mean, cohort, owed, part=part, always=True, clip=clip)
