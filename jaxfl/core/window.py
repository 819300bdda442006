"""State beyond the device: what clients have lies in the host's memory, and a round gets its own clients'.

A *window* is a federation of one cohort's clients alone. A step sees no difference as long as it goes by its
cohort: its key is the round's, a client's is folded from its id, and an array of clients has their entries.
What reads more than that is refused (`Federation.require_all`), or meets the stranger: a client in front of
every window, in no cohort, whose numbers are NaN.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.cohorts import in_parts
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.core.rounds import Conditions, Report
from jaxfl.data.federation import NOBODY, Client, Federation, PerGroup
from jaxfl.errors import ADVICE, AllClients

SERVER = -1  # whose array it is, in place of a group's number


class Kept(NamedTuple):
    """A state between rounds.

    Args:
      state: what a method's `init` returns; clients' arrays (n_g, ...) are NumPy's, and written in place.
      owners: of each array the number of the group whose clients it belongs to, or `SERVER`.
    """

    state: Any
    owners: Any


class Window(NamedTuple):
    """The clients of a cohort as a federation.

    Args:
      federation: of w_g = 1 + k_g clients a group: the stranger, and those of the cohort by their order;
        where places are empty, the group's last client as well.
      cohort: the same, in the same places.
      rows: per group (k_g,) int, which clients of the whole federation these are, by their order.
      real: per group (k_g,) bool, False behind those of the cohort.
    """

    federation: Federation
    cohort: Cohort
    rows: PerGroup
    real: PerGroup


def around(federation: Federation, cohort: Cohort) -> Window:
    """The window of a cohort; all of one size have one shape.

    Args:
      federation: all clients, perhaps `on_host`.
      cohort: of one round.
    """

    def of_group(group: Client, slots: Slots):
        order = np.argsort(slots.index, kind="stable")  # empty places last
        rows, real = np.minimum(slots.index[order], len(group.id) - 1), slots.mask[order]
        ranks = np.empty(len(order), np.int32)
        ranks[order] = np.arange(1, len(order) + 1)
        places = Slots(np.where(slots.mask, ranks, np.int32(1 + len(order))), slots.mask)
        nobody = {
            name: np.zeros_like(getattr(group, name)[:1]) for name in ("size", "validation_size", "test_size")
        }
        stranger = replace(
            jax.tree.map(lambda leaf: leaf[:1], group),
            id=np.full(1, NOBODY, np.int32),
            newcomer=np.ones(1, bool),
            **nobody,
        )
        clients = jax.tree.map(lambda one, leaf: np.concatenate([one, leaf[rows]]), stranger, group)
        return clients, places, rows, real

    clients, places, rows, real = zip(*map(of_group, federation.groups, cohort.groups), strict=True)
    population = tuple((len(apart), int(apart.sum())) for apart in federation.newcomers)
    initial = federation.initial and tuple(
        given._replace(own=jax.tree.map(lambda leaf, at=at: leaf[np.r_[0, at]], given.own))
        for given, at in zip(federation.initial, rows, strict=True)
    )
    groups = federation.replicate(clients)
    there = replace(federation, groups=groups, population=population, initial=initial)
    return Window(there, replace(cohort, groups=places), rows, real)


def seen(state: Any, federation: Federation, cohort: Cohort) -> tuple[Any, Federation, Cohort]:
    """What a program gets of a state for some clients: its arguments behind the key."""
    if not isinstance(state, Kept):
        return state, federation, cohort
    window = around(federation, cohort)
    return placed(state, window, rows_of(state, window)), window.federation, window.cohort


def kept(init: Callable, key, federation: Federation, hyper: Any, state: Any) -> Kept:
    """A state that is there already, such as a checkpoint's, as one that lies in the host's memory.

    Args:
      init: of the method.
      key: of a run.
      federation: all clients.
      hyper: the method's configuration, traced.
      state: with NumPy arrays of clients.

    Raises:
      AllClients: if the method's state is not divided by clients.
    """
    owners = _owners(init, key, federation, hyper)

    def writable(owner, leaf):
        return leaf if owner == SERVER or leaf.flags.writeable else leaf.copy()

    return Kept(jax.tree.map(writable, owners, state), owners)


def all_of(state: Any) -> Any:
    """A state as its method knows it, wherever it lies."""
    return state.state if isinstance(state, Kept) else state


def on_host(federation: Federation) -> Federation:
    """The same clients, whose rows lie in the host's memory."""
    return replace(federation, groups=jax.device_get(federation.groups))


def initial(init: Callable, key, federation: Federation, hyper: Any, most: int) -> Kept:
    """The state before the first round, made for at most so many clients of a group at a time; see `kept`."""
    owners, made = _owners(init, key, federation, hyper), None
    for part in in_parts(federation, most, 0, 1):
        window = around(federation, part)
        state = init(key, window.federation, hyper)
        if made is None:

            def empty(owner, leaf):
                if owner == SERVER:
                    return leaf
                return np.empty((len(federation.groups[owner].id), *leaf.shape[1:]), leaf.dtype)

            made = Kept(jax.tree.map(empty, owners, state), owners)
        made = put_back(made, window, state)
    assert made is not None  # a federation has clients
    # Copied, because an array that stands in two places cannot be donated.
    return made._replace(
        state=jax.tree.map(lambda o, leaf: jnp.copy(leaf) if o == SERVER else leaf, owners, made.state)
    )


def _owners(init: Callable, key, federation: Federation, hyper: Any) -> Any:
    """Whose the arrays of a state are, see `Kept`: a group's grow with the number of its clients."""

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
            raise AllClients(f"The method's state is not divided by clients{ADVICE}.")
        return g

    count = len(federation.groups)
    ones = shapes(*[1] * count)
    return jax.tree.map(owner, ones, *(shapes(*1 + np.eye(count, dtype=int)[g]) for g in range(count)))


def rows_of(kept: Kept, window: Window) -> Any:
    """The entries of a window's clients, NumPy arrays (w_g, ...); of the server's arrays none."""

    def of_leaf(owner, leaf):
        if owner == SERVER:
            return ()
        rows = window.rows[owner]
        entries = np.empty((1 + len(rows), *leaf.shape[1:]), leaf.dtype)
        entries[0] = np.nan if jnp.issubdtype(leaf.dtype, jnp.inexact) else 0
        np.take(leaf, rows, 0, entries[1:], mode="clip")
        return entries

    return jax.tree.map(of_leaf, kept.owners, kept.state)


def placed(kept: Kept, window: Window, rows: Any) -> Any:
    """The state of a window on its devices, made of `rows_of` it and the server's arrays."""
    state = jax.tree.map(
        lambda owner, leaf, entries: leaf if owner == SERVER else jnp.asarray(entries),
        kept.owners,
        kept.state,
        rows,
    )
    return window.federation.place(state)


def put_back(kept: Kept, window: Window, after: Any) -> Kept:
    """The state with a window's entries as they are now; clients' arrays are written in place."""

    def of_leaf(owner, leaf, new):
        if owner == SERVER:
            return new
        real = window.real[owner]
        leaf[window.rows[owner][real]] = window.federation.fetch(new)[1:][real]
        return leaf

    return kept._replace(state=jax.tree.map(of_leaf, kept.owners, kept.state, after))


def rounds_in_windows(
    advance: Callable,
    kept: Kept,
    federation: Federation,
    rounds: Sequence[tuple[Cohort, Conditions]],
    watched: bool,
) -> tuple[Kept, list[Report]]:
    """Rounds one by one, each on the window of its cohort.

    While the clients of one train, what the next ones have is looked up.

    Args:
      advance: ``(state, federation, cohorts, conditions) -> (state, reports)``, of rounds along a first axis.
      kept: the state before.
      federation: all clients.
      rounds: of each its cohort and its conditions, with an axis of a single round.
      watched: whether to look at what the first one leaves for the stranger's numbers.

    Returns:
      The state behind them, and the reports with such an axis.

    Raises:
      JaxflError: if a step reads what belongs to clients that are not in its cohort.
    """
    reports, windows = [], [around(federation, _only(cohort)) for cohort, _ in rounds]
    entries = rows_of(kept, windows[0])
    for window, following, (cohort, conditions) in zip(windows, [*windows[1:], None], rounds, strict=True):
        state, there = (
            placed(kept, window, entries),
            jax.tree.map(lambda leaf: leaf[None], window.cohort.groups),
        )
        met = conditions._replace(dropped=_of_window(conditions.dropped, window))
        state, report = advance(state, window.federation, replace(cohort, groups=there), met)
        entries = rows_of(kept, following) if following else None  # while the devices are at work
        kept = put_back(kept, window, state)
        if following:
            _renew(entries, kept, following, window)
        report = jax.device_get(report)
        if watched and not reports:
            _refuse_strangers(kept, window, report)
        reports.append(report._replace(flops=_of_all(report.flops, federation, window)))
    return kept, reports


def _only(cohort: Cohort) -> Cohort:
    """The cohort of the only round along a first axis."""
    return jax.tree.map(lambda leaf: leaf[0], cohort)


def _of_window(dropped: PerGroup | None, window: Window) -> PerGroup | None:
    """Of (1, n_g) bool the entries of a window's clients, (1, w_g)."""
    return dropped and tuple(
        np.pad(of_group[:, rows], [(0, 0), (1, 0)])
        for of_group, rows in zip(dropped, window.rows, strict=True)
    )


def _of_all(flops: tuple, federation: Federation, window: Window) -> tuple:
    """Operations (1, w_g) of a window's clients as those of all, (1, n_g); the last entry is the server's."""
    *of_groups, elsewhere = flops
    counted = []
    for of_window, group, rows, real in zip(
        of_groups, federation.groups, window.rows, window.real, strict=True
    ):
        of_clients = np.zeros((1, len(group.id)), of_window.dtype)
        of_clients[:, rows[real]] = of_window[:, 1:][:, real]
        counted.append(of_clients)
    return *counted, elsewhere


def _renew(entries: Any, kept: Kept, window: Window, written: Window) -> None:
    """Look up once more those clients of a window who have just been written by another one."""
    again = [
        np.isin(rows, before[real])
        for rows, before, real in zip(window.rows, written.rows, written.real, strict=True)
    ]

    def of_leaf(owner, leaf, looked_up):
        if owner != SERVER:
            looked_up[1:][again[owner]] = leaf[window.rows[owner][again[owner]]]

    jax.tree.map(of_leaf, kept.owners, kept.state, entries)


def _refuse_strangers(kept: Kept, window: Window, report: Report) -> None:
    """Refuse a step that has read the stranger's numbers."""

    def of_leaf(owner, leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return False
        entries = window.federation.fetch(leaf) if owner == SERVER else leaf[window.rows[owner]]
        return bool(np.isnan(entries).any())

    groups = zip(report.info.loss, window.cohort.groups, strict=True)
    losses = any(np.isnan(loss[0][slots.mask]).any() for loss, slots in groups)
    if losses or any(jax.tree.leaves(jax.tree.map(of_leaf, kept.owners, kept.state))):
        raise AllClients(
            "A first round has left what is no number: --lr is too high, or the method's step reads what "
            "belongs to clients beyond its cohort, which --client-state host does not have; leave that out."
        )
