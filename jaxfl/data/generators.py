"""NumPy's random streams: what is drawn on the host before a run. Those of JAX are in `jaxfl.core.streams`.

    partition_seed  ->  (ROWS,), (TEST,), ... (MOST,)  the partition, public images, links, most rows
                        (SHIFT,)                       the clients' amounts of the first shift
                        (SHIFT, number, AMOUNTS)       those of each further shift
                        (DEVICES,)                     how fast each client's device is
                        (group, NEWCOMERS)             which clients join at the end
                        (0, ATTACKERS)                 which clients are attackers
    seed            ->  (t,)                           the cohort of round t
                        (t, DROPOUTS)                  which clients drop out of round t

NumPy takes zeros at the end for nothing, so the numbers that tell longer streams apart are not 0, and the
rows of a partition are drawn by the stream that is NumPy's own for its seed. With equal
seeds the cohort of round t shares the stream t of the partition's seed. A cohort permutes clients, which
nothing else does, so this does no harm. Runs do not keep what these streams give, except partitions and
links: a number that changes here changes runs that are continued.
"""

import numpy as np

ROWS, TEST, VALIDATION, LABELS, PUBLIC, OTHER_PUBLIC, TOPOLOGY, SHIFT, MOST, DEVICES = range(10)
DROPOUTS, NEWCOMERS, AMOUNTS, ATTACKERS = 1, 2, 3, 4


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Return the generator of one stream of a seed.

    >>> generator(0, SHIFT, 1, AMOUNTS).random() == generator(0, SHIFT, DROPOUTS).random()
    False
    """
    return np.random.default_rng([seed, *stream])
