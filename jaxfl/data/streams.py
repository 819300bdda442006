"""NumPy's random streams: what is drawn on the host before a run. Those of JAX are in `jaxfl.core.streams`.

    partition_seed  ->  (ROWS,) to (MOST,)        the partition, one for everything that is drawn
                        (SHIFT, number, AMOUNTS)  the clients' amounts of each of several shifts
                        (group, NEWCOMERS)        which clients join at the end
    seed            ->  (t,)                      the cohort of round t
                        (t, DROPOUTS)             which clients drop out of round t

NumPy takes zeros at the end for nothing, so a last number that tells streams apart is not 0. With equal seeds
the first cohorts share their streams with the partition; they permute clients, and it permutes rows.
"""

import numpy as np

ROWS, TEST, VALIDATION, LABELS, PUBLIC, OTHER_PUBLIC, TOPOLOGY, SHIFT, MOST = range(9)
DROPOUTS, NEWCOMERS, AMOUNTS = 1, 2, 3


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Return the generator of one stream of a seed.

    >>> generator(0, SHIFT, 1, AMOUNTS).random() == generator(0, SHIFT, DROPOUTS).random()
    False
    """
    return np.random.default_rng([seed, *stream])
