"""Windows: federations of only one cohort's clients, for clients' state in host memory.

A *window* holds the clients of one cohort, their images and the public ones. A step that uses only its cohort
sees no difference: its key is the round's, a client's key is folded from its id, and an array of clients has
their entries. The first client of every window is a *stranger*, an invented client that is in no cohort. A
step that reads more than its cohort reads the stranger's entries, see `jaxfl.core.host_state`.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.core.protocol import Cohort, Slots
from jaxfl.core.rounds import Conditions
from jaxfl.data.absent import ABSENT
from jaxfl.data.federation import NOBODY, Client, Federation, PerGroup
from jaxfl.machine import placement

STRANGERS = 0, 100  # the value of all entries of each
LISTS = "rows", "validation_rows", "test_rows"  # a client's lists of rows


class Window(NamedTuple):
    """The clients of a cohort as a federation."""

    federation: Federation
    """w_g = 1 + k_g clients per group: the stranger, then one for each place, in the order of clients. An
    empty place has the group's last client, who is not `real`. The only images are theirs and the public
    ones; row numbers refer to these."""
    cohort: Cohort  # the same, in the same places
    rows: PerGroup  # per group (k_g,) int, positions of these clients in the group of the whole federation
    real: PerGroup  # per group (k_g,) bool, False after the clients of the cohort
    stranger: int  # the value of all the stranger's entries, one of `STRANGERS`


def on_host(federation: Federation) -> Federation:
    """Return the same clients with their rows and images in host memory."""
    names = ("images", "labels", "groups", "public", "shift")
    return replace(federation, **{name: jax.device_get(getattr(federation, name)) for name in names})


def around(federation: Federation, cohort: Cohort, stranger: int = STRANGERS[0]) -> Window:
    """Return the window of a round's cohort, with one of `STRANGERS`, in a federation `on_host`.

    Cohorts of one size have windows of one shape.
    """

    def of_group(group: Client, slots: Slots):
        many = 10 * group.rows.shape[1] if stranger else 0  # more than any client has
        sizes = {name: np.full(1, many, np.int32) for name in ("size", "validation_size", "test_size")}
        counts = ABSENT
        if group.class_counts is not ABSENT:
            counts = np.full((1, *group.class_counts.shape[1:]), many, np.int32)
        order = np.argsort(slots.index, kind="stable")  # empty places last
        rows, real = np.minimum(slots.index[order], len(group.id) - 1), slots.mask[order]
        ranks = np.empty(len(order), np.int32)
        ranks[order] = np.arange(1, len(order) + 1)
        places = Slots(np.where(slots.mask, ranks, np.int32(1 + len(order))), slots.mask)
        first = jax.tree.map(lambda leaf: leaf[:1], group)
        in_front = replace(
            first, id=np.full(1, NOBODY, np.int32), newcomer=np.ones(1, bool), class_counts=counts, **sizes
        )
        clients = jax.tree.map(lambda one, leaf: np.concatenate([one, leaf[rows]]), in_front, group)
        return clients, places, rows, real

    clients, places, rows, real = zip(*map(of_group, federation.groups, cohort.groups), strict=True)
    own = {"groups": clients} if federation.images is ABSENT else _with_images(federation, clients, stranger)
    own["all_newcomers"] = federation.newcomers
    inside = replace(federation, **federation.replicate(own, known=True), initial=None)
    return Window(inside, replace(cohort, groups=places), rows, real, stranger)


def _with_images(federation: Federation, clients: PerGroup, stranger: int) -> dict[str, Any]:
    """Return a window's own fields: clients, the images in their lists, and the public ones.

    The last image is the stranger's; it is in no list.
    """
    lists = [[getattr(group, name) for name in LISTS] for group in clients], federation.public
    leaves = jax.tree.leaves(lists)
    needed, places = np.unique(np.concatenate(list(map(np.ravel, leaves))), return_inverse=True)
    ends = np.cumsum([leaf.size for leaf in leaves])
    of_leaves = iter(np.split(places.astype(np.int32), ends[:-1]))
    lists, public = jax.tree.map(lambda leaf: next(of_leaves).reshape(leaf.shape), lists)
    groups = [
        replace(group, **dict(zip(LISTS, of_group, strict=True)))
        for group, of_group in zip(clients, lists, strict=True)
    ]
    needed = np.resize(needed, _most(federation, clients))
    shift, rows = federation.shift, needed
    if shift is not None:
        of_needed = {"number": shift.number[needed], "owner": shift.owner[needed]}
        shift, rows = (
            replace(shift, image=np.arange(len(needed), dtype=np.int32), **of_needed),
            shift.image[needed],
        )
    images = placement.aligned((len(rows) + 1, *federation.images.shape[1:]), federation.images.dtype)
    np.take(federation.images, rows, 0, images[:-1], mode="clip")
    images[-1] = stranger
    labels = federation.labels[needed]
    return {"groups": tuple(groups), "images": images, "labels": labels, "public": public, "shift": shift}


def _most(federation: Federation, clients: PerGroup) -> int:
    """Return the largest number of rows that any such set of clients can have, plus the public rows."""
    most = len(federation.public) + 1  # an empty list is filled up with the first row of the data set
    for group, some in zip(federation.groups, clients, strict=True):
        held, count = group.size + group.validation_size + group.test_size, len(some.id)
        most += int(held.sum() if count >= len(held) else np.partition(held, -count)[-count:].sum())
    return min(most, len(federation.labels))


def round_on(window: Window, conditions: Conditions) -> tuple[Federation, Cohort, Conditions]:
    """Return the arguments after the state for the program of rounds, for a single round.

    The conditions are those of all clients, with a leading axis of length 1.
    """
    groups = jax.tree.map(lambda leaf: leaf[None], window.cohort.groups)
    cohort = replace(window.cohort, round=np.asarray(window.cohort.round)[None], groups=groups)
    return window.federation, cohort, _conditions_on(window, conditions)


def _conditions_on(window: Window, conditions: Conditions) -> Conditions:
    """Return a round's conditions with those of the window's clients; the stranger has its neighbour's."""
    dropped, deadline = conditions.dropped, conditions.deadline
    places = [np.concatenate([rows[:1], rows]) for rows in window.rows]
    if dropped is not None:
        dropped = tuple(
            np.asarray(of_group)[:, clients] for of_group, clients in zip(dropped, places, strict=True)
        )
    if deadline is not None:
        devices = tuple(
            jax.tree.map(lambda speeds: np.asarray(speeds)[clients], of_group)  # noqa: B023
            for of_group, clients in zip(deadline.devices, places, strict=True)
        )
        deadline = deadline._replace(devices=devices)
    return conditions._replace(dropped=dropped, deadline=deadline)
