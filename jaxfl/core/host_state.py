"""Clients' state in host memory, of which a round gets its own clients' entries.

A round or a scoring runs on the window of its clients, see `jaxfl.core.window`. A step that needs all clients
calls `Federation.require_all`. That nothing else reads more is one of the promises of `jaxfl.runs.promises`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.cohorts import in_parts
from jaxfl.core.flops import Operations
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.core.rounds import Conditions, Report
from jaxfl.core.window import STRANGERS, Window, around, round_on
from jaxfl.data.federation import Federation
from jaxfl.errors import beyond_cohort

SERVER = -1  # owner of an array, instead of a group's number


class OnHost(NamedTuple):
    """A state between rounds."""

    state: Any  # what a method's `init` returns; clients' arrays (n_g, ...) are NumPy's, and written in place
    owners: Any  # for each array the number of the group that owns it, or `SERVER`


# ---- states


def all_of(state: Any) -> Any:
    """Return a state as its method knows it, wherever it is kept."""
    return state.state if isinstance(state, OnHost) else state


def taken_over(init: Callable, key, federation: Federation, hyper: Any, state: Any) -> OnHost:
    """Return a state with NumPy arrays, such as a checkpoint's, as `OnHost`; read-only arrays are copied.

    Raises:
      JaxflError: if the method's state is not divided by clients.
    """
    owners, _ = _form(init, key, federation, hyper)

    def writable(owner, leaf):
        return leaf if owner == SERVER or leaf.flags.writeable else leaf.copy()

    return OnHost(jax.tree.map(writable, owners, state), owners)


def initial(init: Callable, key, federation: Federation, hyper: Any) -> OnHost:
    """Return the state before the first round, made for one part of the clients at a time, see `in_parts`.

    Raises:
      JaxflError: if the method's state is not divided by clients.
    """
    owners, one = _form(init, key, federation, hyper)

    def empty(owner, leaf):
        clients = 0 if owner == SERVER else len(federation.groups[owner].id)
        return np.empty((clients, *leaf.shape[1:]), leaf.dtype)

    made = OnHost(jax.tree.map(empty, owners, one), owners)
    for part in in_parts(federation, 0, 1):
        window = around(federation, part)
        made = put_back(made, window, init(key, _beginning(federation, window), hyper))
    # Copied, because an array that occurs twice cannot be donated.
    copied = jax.tree.map(lambda o, leaf: jnp.copy(leaf) if o == SERVER else leaf, owners, made.state)
    return OnHost(copied, owners)


def _beginning(federation: Federation, window: Window) -> Federation:
    """Return a window's federation with the given initial weights of its clients."""
    given = federation.initial and tuple(
        of_group._replace(own=jax.tree.map(lambda leaf, at=at: leaf[np.r_[0, at]], of_group.own))
        for of_group, at in zip(federation.initial, window.rows, strict=True)
    )
    return replace(window.federation, initial=given)


def _form(init: Callable, key, federation: Federation, hyper: Any) -> tuple[Any, Any]:
    """Return the owners of a state's arrays, see `OnHost`, and the shapes for one client and the stranger.

    A group owns the arrays that grow with the number of its clients.
    """

    def shapes(*sizes: int):
        some = (Slots(np.zeros(size, np.int32), np.ones(size, bool)) for size in sizes)
        window = around(federation, Cohort(np.int32(0), tuple(some), 1))
        return jax.eval_shape(init, key, window.federation, hyper)

    def owner(one, *more):
        grown = [(g, after.shape) for g, after in enumerate(more) if after.shape != one.shape]
        if not grown:
            return SERVER
        (g, shape), *others = grown
        if others or shape != (one.shape[0] + 1, *one.shape[1:]):
            raise beyond_cohort("The method's state does not have one entry per client")
        return g

    count = len(federation.groups)
    one = shapes(*[1] * count)
    more = (shapes(*1 + np.eye(count, dtype=int)[g]) for g in range(count))
    return jax.tree.map(owner, one, *more), one


# ---- between the host and the devices


def seen(state: Any, federation: Federation, cohort: Cohort, stranger: int = STRANGERS[0]) -> tuple:
    """Return a program's arguments after its key: state, federation, cohort; of a window if on the host."""
    if not isinstance(state, OnHost):
        return state, federation, cohort
    window = around(federation, cohort, stranger)
    return placed(state, window, _entries(state, window)), window.federation, window.cohort


def placed(kept: OnHost, window: Window, entries: Any) -> Any:
    """Return the state of a window on its devices, made of its `_entries` and the server's arrays."""

    def of_leaf(owner, leaf, of_clients):
        if owner == SERVER:
            return leaf
        return jnp.asarray(of_clients) if window.federation.mesh is None else of_clients

    return window.federation.place(jax.tree.map(of_leaf, kept.owners, kept.state, entries), known=True)


def put_back(kept: OnHost, window: Window, after: Any) -> OnHost:
    """Return the state with a window's new entries; clients' arrays are written in place."""

    def of_leaf(owner, leaf, new):
        if owner == SERVER:
            return new
        real = window.real[owner]
        leaf[window.rows[owner][real]] = window.federation.fetch(new)[1:][real]
        return leaf

    return kept._replace(state=jax.tree.map(of_leaf, kept.owners, kept.state, after))


def _entries(kept: OnHost, window: Window) -> Any:
    """Return the entries of a window's clients, NumPy arrays (w_g, ...); () for the server's arrays."""

    def of_leaf(owner, leaf):
        if owner == SERVER:
            return ()
        rows = window.rows[owner]
        entries = np.empty((1 + len(rows), *leaf.shape[1:]), leaf.dtype)
        entries[0] = np.asarray(window.stranger).astype(leaf.dtype)
        np.take(leaf, rows, 0, entries[1:], mode="clip")
        return entries

    return jax.tree.map(of_leaf, kept.owners, kept.state)


def _renew(entries: Any, kept: OnHost, window: Window, written: Window) -> None:
    """Look up again those clients of a window that another window has just written."""
    again = [
        np.isin(rows, before[real])
        for rows, before, real in zip(window.rows, written.rows, written.real, strict=True)
    ]
    owners, leaves = jax.tree.leaves(kept.owners), jax.tree.leaves(kept.state)
    of_clients = [(owner, leaf) for owner, leaf in zip(owners, leaves, strict=True) if owner != SERVER]
    for (owner, leaf), found in zip(of_clients, jax.tree.leaves(entries), strict=True):
        found[1:][again[owner]] = leaf[window.rows[owner][again[owner]]]


# ---- rounds


def rounds_in_windows(
    advance: Callable,
    kept: OnHost,
    federation: Federation,
    rounds: Sequence[tuple[Cohort, Conditions]],
) -> tuple[OnHost, list[Report]]:
    """Run rounds one by one, each on the window of its cohort.

    While the clients of one round train, the entries of the next round's clients are looked up.

    Args:
      advance: ``(state, federation, cohorts, conditions) -> (state, reports)``, for rounds on a leading axis.
      kept: the state before these rounds.
      federation: all clients, `on_host`.
      rounds: for each round its cohort, and its conditions with a leading axis of length 1.

    Returns:
      The state after these rounds, and one report per round with a leading axis of length 1.
    """
    reports, ahead = [], None
    for (cohort, conditions), following in zip(rounds, [*rounds[1:], None], strict=True):
        window, entries = ahead or _looked_up(kept, federation, cohort)
        state, report = advance(placed(kept, window, entries), *round_on(window, conditions))
        ahead = _looked_up(kept, federation, following[0]) if following else None  # while the devices compute
        kept = put_back(kept, window, state)
        if ahead:
            _renew(ahead[1], kept, ahead[0], window)
        report = jax.device_get(report)
        reports.append(report._replace(flops=_of_everyone(report.flops, federation, window)))
    return kept, reports


def _looked_up(kept: OnHost, federation: Federation, cohort: Cohort) -> tuple[Window, Any]:
    """Return the window of a cohort, and the entries of its clients."""
    window = around(federation, cohort)
    return window, _entries(kept, window)


def _of_everyone(flops: Operations, federation: Federation, window: Window) -> Operations:
    """Expand operations (1, w_g) of a window's clients to all clients, (1, n_g)."""
    counted = []
    for of_window, group, rows, real in zip(
        flops.clients, federation.groups, window.rows, window.real, strict=True
    ):
        of_clients = np.zeros((1, len(group.id)), of_window.dtype)
        of_clients[:, rows[real]] = of_window[:, 1:][:, real]
        counted.append(of_clients)
    return flops._replace(clients=tuple(counted))
