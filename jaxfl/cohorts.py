"""Who takes part in which round: drawn before the run, from a stream of its own.

The stream depends on the seed, the round and the number of clients alone, so every method sees the same
cohorts, and a resumed run the same as an undisturbed one.
"""

from collections.abc import Sequence

import numpy as np

from jaxfl.types import Slots


def draw_cohorts(
    group_sizes: Sequence[int], participation: float, rounds: int, seed: int
) -> tuple[Slots, ...]:
    """Draw max(1, floor(participation * N)) of N clients for every round, without replacement.

    Args:
      group_sizes: clients of each architecture group; ids count through the groups in order.
      participation: share of clients that take part, in (0, 1].
      rounds: how many rounds to draw.
      seed: of the run.

    Returns:
      Per group `Slots` with leaves (rounds, k_g): k_g is the largest number of the group's clients in
      any round, so all rounds have one shape; places that a round leaves empty are masked.
    """
    clients = sum(group_sizes)
    active = max(1, int(participation * clients + 1e-9))
    chosen = np.zeros((rounds, clients), bool)
    for t in range(rounds):
        rng = np.random.default_rng([seed, t])
        chosen[t, rng.permutation(clients)[:active]] = True
    starts = np.cumsum([0, *group_sizes])
    return tuple(_slots(chosen[:, start:end]) for start, end in zip(starts[:-1], starts[1:], strict=True))


def _slots(chosen: np.ndarray) -> Slots:
    counts = chosen.sum(1)
    places = int(counts.max(initial=0))
    # A stable sort on "not chosen" puts the chosen clients first, in the order of their ids.
    index = np.argsort(~chosen, axis=1, kind="stable")[:, :places].astype(np.int32)
    mask = np.arange(places) < counts[:, None]
    return Slots(np.where(mask, index, np.int32(chosen.shape[1])), mask)
