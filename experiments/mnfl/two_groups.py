"""A partition with two planted groups: even clients have the first half of the classes, odd ones the rest."""

import numpy as np


def two_groups(
    labels: np.ndarray, clients: int, rng: np.random.Generator, *, samples_per_client: int = 200
) -> list[np.ndarray]:
    """Draw every client's rows from the classes of its group."""
    low = labels < (labels.max() + 1) / 2
    pools = [rng.permutation(np.flatnonzero(low)), rng.permutation(np.flatnonzero(~low))]
    starts = [i // 2 * samples_per_client for i in range(clients)]
    return [pools[i % 2][start : start + samples_per_client] for i, start in enumerate(starts)]
