"""Windows: the clients of one cohort alone, where what clients have lies in the host's memory.

A *window* is a federation of one cohort's clients, with their images and the public ones. A step sees no
difference as long as it goes by its cohort: its key is the round's, a client's is folded from its id, and an
array of clients has their entries. In front of every window stands a *stranger*, a client that is in no
cohort: who reads more than its cohort reads the stranger's, see `jaxfl.core.host_state`.
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

STRANGERS = 0, 100  # what all their numbers are
LISTS = "rows", "validation_rows", "test_rows"  # of a client


class Window(NamedTuple):
    """The clients of a cohort as a federation.

    Args:
      federation: of w_g = 1 + k_g clients a group: the stranger, and after it one for each place, by their
        order. For an empty place stands the group's last client, who is not `real`. It has their images and
        the public ones alone; rows are places among these.
      cohort: the same, in the same places.
      rows: per group (k_g,) int, which clients of the whole federation these are, by their order.
      real: per group (k_g,) bool, False after those of the cohort.
      stranger: what all numbers of the stranger's are.
    """

    federation: Federation
    cohort: Cohort
    rows: PerGroup
    real: PerGroup
    stranger: int


def on_host(federation: Federation) -> Federation:
    """The same clients, whose rows and images lie in the host's memory."""
    names = ("images", "labels", "groups", "public", "shift")
    return replace(federation, **{name: jax.device_get(getattr(federation, name)) for name in names})


def around(federation: Federation, cohort: Cohort, stranger: int = STRANGERS[0]) -> Window:
    """The window of a cohort; all of one size have one shape.

    Args:
      federation: all clients, `on_host`.
      cohort: of one round.
      stranger: which of `STRANGERS` stands in front.
    """

    def of_group(group: Client, slots: Slots):
        many = 10 * group.rows.shape[1] if stranger else 0  # more than anybody has
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
    own["population"] = federation.newcomers
    there = replace(federation, **federation.replicate(own, known=True), initial=None)
    return Window(there, replace(cohort, groups=places), rows, real, stranger)


def _with_images(federation: Federation, clients: PerGroup, stranger: int) -> dict[str, Any]:
    """Clients, with the images in their lists and the public ones, as far as a window has its own.

    The last image is the stranger's, who has it in no list.
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
        there = {"number": shift.number[needed], "owner": shift.owner[needed]}
        shift, rows = (
            replace(shift, image=np.arange(len(needed), dtype=np.int32), **there),
            shift.image[needed],
        )
    images = placement.aligned((len(rows) + 1, *federation.images.shape[1:]), federation.images.dtype)
    np.take(federation.images, rows, 0, images[:-1], mode="clip")
    images[-1] = stranger
    labels = federation.labels[needed]
    return {"groups": tuple(groups), "images": images, "labels": labels, "public": public, "shift": shift}


def _most(federation: Federation, clients: PerGroup) -> int:
    """How many rows so many clients of each architecture have at most, with the public ones."""
    most = len(federation.public) + 1  # an empty list is filled up with the first row of the data set
    for group, some in zip(federation.groups, clients, strict=True):
        held, count = group.size + group.validation_size + group.test_size, len(some.id)
        most += int(held.sum() if count >= len(held) else np.partition(held, -count)[-count:].sum())
    return min(most, len(federation.labels))


def round_on(window: Window, conditions: Conditions) -> tuple[Federation, Cohort, Conditions]:
    """What the program of rounds gets of a single one, after the state.

    Args:
      window: of its cohort.
      conditions: that all clients meet, along an axis of that round.
    """
    groups = jax.tree.map(lambda leaf: leaf[None], window.cohort.groups)
    cohort = replace(window.cohort, round=np.asarray(window.cohort.round)[None], groups=groups)
    dropped = conditions.dropped and tuple(
        np.pad(np.asarray(of_group)[:, rows], [(0, 0), (1, 0)])
        for of_group, rows in zip(conditions.dropped, window.rows, strict=True)
    )
    return window.federation, cohort, conditions._replace(dropped=dropped)
