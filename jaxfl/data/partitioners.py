"""Partitioners, which share out rows among clients.

A partitioner is a function ``(labels, clients, rng, *, options) -> parts``: from the labels (n,) int of the
rows to share out and the number of clients it draws for every client its positions (n_i,) in `labels`. All
raise `JaxflError` if the data cannot be shared out as asked.

A partitioner with an option `column` gets the values of that column of the data in place of labels, and None
for the number of clients if the user does not give it.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.config import choices
from jaxfl.config.setup import PartitionOptions, is_saved
from jaxfl.data.row_lists import parsed, whole_numbers
from jaxfl.errors import JaxflError

Rng = np.random.Generator
MAX_DRAWS = 1000  # of a random partition until every client has enough rows


def iid(labels: np.ndarray, clients: int, rng: Rng) -> list[np.ndarray]:
    """Shuffle all rows and deal them evenly (McMahan et al. 2017, arXiv:1602.05629, section 3)."""
    _require_rows(len(labels), clients, 1)
    return np.array_split(rng.permutation(len(labels)), clients)


def classes(
    labels: np.ndarray,
    clients: int,
    rng: Rng,
    *,
    classes_per_client: int | None = None,
    samples_per_client: int | None = None,
) -> list[np.ndarray]:
    """Give every client a few random classes and equally many rows of each.

    The pathological setting of CompFL (Xu et al., Cooperative multiple model training for
    personalized federated learning over heterogeneous devices). A class is dealt out in one
    shuffled order, from the start again once it is used up, so that clients share few rows.

    Args:
      classes_per_client: number of different classes on a client; by default 5, or all if there are fewer.
      samples_per_client: number of rows on a client; a remainder goes to its first classes. By default as
        many as there are for everybody without sharing a row.
    """
    queues = {c: rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)}
    classes_per_client = min(5, len(queues)) if classes_per_client is None else classes_per_client
    _require_classes("classes", "classes_per_client", classes_per_client, len(queues))
    own = [rng.choice(list(queues), classes_per_client, replace=False) for _ in range(clients)]
    if samples_per_client is None:
        owners = Counter(itertools.chain.from_iterable(own))
        samples_per_client = classes_per_client * min(len(queues[c]) // n for c, n in owners.items())
        if not samples_per_client:
            raise JaxflError(
                f"A class has fewer rows than clients that have it; use fewer than {clients} clients, or "
                "give samples_per_client, so that clients share rows."
            )
    if samples_per_client < classes_per_client:
        raise JaxflError(
            f"samples_per_client is {samples_per_client}, too few for {classes_per_client} classes "
            "each; raise it or lower classes_per_client."
        )
    counts = np.full(classes_per_client, samples_per_client // classes_per_client)
    counts[: samples_per_client % classes_per_client] += 1
    parts = []
    for chosen in own:
        taken = []
        for c, count in zip(chosen, counts, strict=True):
            if count > len(queues[c]):
                raise JaxflError(
                    f"A client needs {count} rows of class {c}, which has {len(queues[c])}; lower "
                    "samples_per_client or raise classes_per_client."
                )
            taken.append(queues[c][:count])
            queues[c] = np.roll(queues[c], -count)
        parts.append(np.concatenate(taken))
    return parts


def shards(labels: np.ndarray, clients: int, rng: Rng, *, shards_per_client: int = 2) -> list[np.ndarray]:
    """Sort the rows by label, cut them into disjoint shards and give every client a few.

    McMahan et al. 2017 (arXiv:1602.05629, section 3) with every shard cut inside one class, all
    classes into equally many shards (give or take one), and the shards of a client from different
    classes: with two shards a client has exactly two classes, as in pFedClub (Wang et al. 2024).
    Where there are fewer shards than classes, some classes are not used.

    Args:
      shards_per_client: number of shards, hence of classes, on a client.
    """
    present = np.unique(labels)
    _require_classes("shards", "shards_per_client", shards_per_client, len(present))
    demand = np.zeros(len(present), int)
    chosen = []
    for _ in range(clients):
        # The classes in least demand so far, ties at random: demands never differ by more than one.
        chosen.append(np.argsort(demand + rng.random(len(present)))[:shards_per_client])
        demand[chosen[-1]] += 1
    piles = []
    for c, pieces in zip(present, demand, strict=True):
        rows = rng.permutation(np.flatnonzero(labels == c))
        if pieces > len(rows):
            raise JaxflError(
                f"Class {c} has {len(rows)} rows, too few for {pieces} shards; use fewer clients "
                "or lower shards_per_client."
            )
        piles.append(np.array_split(rows, pieces) if pieces else [])
    return [np.concatenate([piles[place].pop() for place in own]) for own in chosen]


def dirichlet(
    labels: np.ndarray, clients: int, rng: Rng, *, alpha: float = 0.1, min_samples: int = 10
) -> list[np.ndarray]:
    """Share out each class in proportions from a symmetric Dirichlet distribution over the clients.

    Yurochkin et al. 2019, arXiv:1905.12022, section 4. The partition is drawn again until every client has
    `min_samples` rows.

    Args:
      alpha: concentration; the smaller, the fewer clients share a class.
      min_samples: minimum number of rows of a client.
    """
    return _dirichlet(labels, clients, rng, alpha, min_samples, full=np.inf, cut=np.rint)


def dirichlet_flbench(
    labels: np.ndarray, clients: int, rng: Rng, *, alpha: float = 0.1, min_samples: int = 10
) -> list[np.ndarray]:
    """Like `dirichlet`, but a client that holds its even share of all rows gets no further class.

    The recipe of NIID-Bench (Li et al. 2022, arXiv:2102.02079) and FL-bench, which FedCMD uses. As there,
    cuts of a class are rounded down. The rows lost this way go to the last client, which therefore has a row
    of nearly every class, even when it is full. When a client's rows are then divided, FL-bench rounds the
    number of its training rows down, we that of its test rows.

    Args:
      alpha: concentration; the smaller, the fewer clients share a class.
      min_samples: minimum number of rows of a client.
    """
    return _dirichlet(labels, clients, rng, alpha, min_samples, full=len(labels) / clients, cut=np.floor)


def _dirichlet(labels, clients, rng, alpha, min_samples, full, cut) -> list[np.ndarray]:
    """Draw a Dirichlet partition; a client with `full` rows gets no further class, `cut` rounds to rows."""
    if not 0 < alpha <= 1e6:
        raise JaxflError(
            f"alpha is {alpha}; it must be positive and at most a million, where all clients are already "
            "alike."
        )
    _require_rows(len(labels), clients, min_samples)
    by_class = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    for _ in range(MAX_DRAWS):
        parts = [np.empty(0, int)] * clients
        for rows in by_class:
            rows = rng.permutation(rows)
            wanting = np.array([len(part) < full for part in parts])
            share = np.zeros(clients)
            while not share.any():  # a tiny alpha can give a whole class to clients that are full
                share = rng.dirichlet(np.full(clients, alpha)) * wanting
            cuts = cut(np.cumsum(share / share.sum()) * len(rows)).astype(int)[:-1]
            pieces = np.split(rows, cuts)
            parts = [np.append(part, piece) for part, piece in zip(parts, pieces, strict=True)]
        if min(len(part) for part in parts) >= min_samples:
            return parts
    raise JaxflError(
        f"None of {MAX_DRAWS} Dirichlet draws with alpha {alpha} gave each of {clients} clients "
        f"{min_samples} of the {len(labels)} rows; raise alpha, or lower min_samples or the number "
        "of clients."
    )


def quantity(
    labels: np.ndarray, clients: int, rng: Rng, *, sigma: float = 1.0, min_samples: int = 10
) -> list[np.ndarray]:
    """Give the clients different amounts of the same mixture of classes.

    Every client gets `min_samples` random rows; the rest is shared out in proportion to log-normal
    weights exp(sigma z), z standard normal, as in the synthetic data of FedProx (Li et al. 2020,
    arXiv:1812.06127).

    Args:
      sigma: standard deviation of the underlying normal distribution; 0 gives equal amounts.
      min_samples: minimum number of rows of a client.
    """
    _require_sigma(sigma)
    _require_rows(len(labels), clients, min_samples)
    exponent = sigma * rng.standard_normal(clients)
    weight = np.exp(exponent - exponent.max())
    extra = np.cumsum(weight / weight.sum()) * (len(labels) - clients * min_samples)
    # A sum of tenths may end just below the whole number that is meant.
    cuts = (np.floor(extra + 1e-6).astype(int) + min_samples * np.arange(1, clients + 1))[:-1]
    return np.split(rng.permutation(len(labels)), cuts)


def power_law(
    labels: np.ndarray,
    clients: int,
    rng: Rng,
    *,
    classes_per_client: int = 2,
    base: int = 10,
    least: int | None = None,
    most: int | None = None,
    sigma: float = 2.0,
) -> list[np.ndarray]:
    """Give every client a few consecutive classes, and unequal amounts of them.

    The non-IID setting of MNFL, whose two cases are ten and two classes per client, in the authors' code;
    pFedMe's for MNIST has the same form (Dinh et al. 2020, arXiv:2006.08848).
    Client i has the classes c = (i + j) mod C, j < L, and of each

        base + m (floor(w_icj (n_c - N)) + u),    w_c ~ log-normal(0, sigma) / sum,  u ~ U{least, ..., most}

    rows, where n_c rows are of class c, w_c has an entry for each of the N clients and L places, and m is 2
    for up to 20 clients, 1 beyond. Clients draw one after another; one that needs all that is left of a
    class, or more, keeps only `base` rows of it. No row is given twice, and some are not given.

    Args:
      classes_per_client: L, number of different classes on a client.
      base: minimum number of rows of each of a client's classes.
      least: minimum number of further rows, besides the log-normal ones. By default 300 as there, where a
        class has 6,000 rows; a fifteenth of its rows where a class has fewer than 4,500 on average.
      most: maximum number of these further rows; by default twice the minimum.
      sigma: standard deviation of the log-normal weights' logarithm; 0 gives equal weights.
    """
    queues = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    _require_classes("power-law", "classes_per_client", classes_per_client, len(queues))
    least = min(300, len(labels) // len(queues) // 15) if least is None else least
    most = 2 * least if most is None else most
    if not 0 <= least <= most:
        raise JaxflError(
            f"least is {least} and most {most}; both are numbers of rows, and least must not exceed most."
        )
    if base < 1:
        raise JaxflError(f"base is {base}; every client needs at least 1 row of its classes.")
    _require_sigma(sigma)
    own = (np.arange(clients)[:, None] + np.arange(classes_per_client)) % len(queues)
    for place, queue in enumerate(queues):
        needed = base * (own == place).sum()
        if needed > len(queue):
            raise JaxflError(
                f"Class {labels[queue[0]]} has {len(queue)} rows, but its clients need {needed}; lower base "
                "or use fewer clients."
            )
    exponent = sigma * rng.standard_normal((len(queues), *own.shape))
    weight = np.exp(exponent - exponent.max((1, 2), keepdims=True))
    weight /= weight.sum((1, 2), keepdims=True)
    times = 2 if clients <= 20 else 1
    parts = [[] for _ in range(clients)]

    def give(i, place, count):
        parts[i].append(queues[place][:count])
        queues[place] = queues[place][count:]

    rows = [len(queue) for queue in queues]
    for (i, _), place in np.ndenumerate(own):
        give(i, place, base)
    for (i, j), place in np.ndenumerate(own):
        skewed = int(weight[place, i, j] * max(0, rows[place] - clients))
        further = times * (skewed + rng.integers(least, most, endpoint=True))
        if further < len(queues[place]):
            give(i, place, further)
    return [np.concatenate(part) for part in parts]


def natural(
    values: np.ndarray, clients: int | None, rng: Rng, *, column: str = "client", min_samples: int = 10
) -> list[np.ndarray]:
    """Make every value of a column of the data a client: each writer, user or device has its own rows.

    Clients are numbered in the order of their values.

    Args:
      clients: number of clients: that many values with enough rows are drawn at random; all of them if None.
      column: column of the data that says whose a row is.
      min_samples: minimum number of rows of a client; values with fewer are left out.
    """
    _require_least(min_samples)
    names, owners, sizes = np.unique(values, return_inverse=True, return_counts=True)
    chosen = np.flatnonzero(sizes >= min_samples)
    if len(chosen) < (clients or 1):
        raise JaxflError(
            f"{len(chosen)} of {len(names)} values of the column {column} have {min_samples} rows or more, "
            f"too few for {clients or 1} clients; lower min_samples or the number of clients."
        )
    if clients is not None:
        chosen = np.sort(rng.choice(chosen, clients, replace=False))
    by_owner = np.split(np.argsort(owners, kind="stable"), np.cumsum(sizes)[:-1])
    return [by_owner[owner] for owner in chosen]


def listed(
    values: np.ndarray, clients: int | None, rng: Rng, *, file: Path | None = None, column: str = "row"
) -> list[np.ndarray]:
    """Give every client the rows that a file lists for it, such as those of a partitioner of flwr-datasets.

    The file is JSON, ``[[rows], ...]`` or ``{"0": [rows], ...}``. Rows held out for everybody are left out,
    and so are test rows under --test source, and numbers that no row has.

    Args:
      clients: number of clients, which must be that of the file; by default the file's.
      file: JSON file with the lists.
      column: column of the data that numbers the rows; by default their place in the data, from 0.
    """
    if file is None:
        raise JaxflError("--partition listed needs a file of lists: --partition listed,file=rows.json.")
    lists = parsed(file)
    if isinstance(lists, dict) and all(key.isdecimal() and len(key) < 10 for key in lists):
        lists = [lists[key] for key in sorted(lists, key=int)]
    if not isinstance(lists, list) or not lists:
        raise JaxflError(
            f'{file} has no list of rows per client; write [[rows], ...], or {{"0": [rows], ...}} with '
            "numbers as keys."
        )
    if clients not in (None, len(lists)):
        raise JaxflError(f"{file} lists the rows of {len(lists)} clients; add --clients {len(lists)}.")
    if not np.issubdtype(values.dtype, np.integer):
        raise JaxflError(
            f"{file} lists rows by numbers, but column={column} holds other values; name another column."
        )
    held = [np.flatnonzero(np.isin(values, whole_numbers(file, rows))) for rows in lists]
    for client, rows in enumerate(held):
        if not len(rows):
            raise JaxflError(
                f"{file} lists no row for client {client} that is left to share out; rows have the numbers "
                f"{values.min()} to {values.max()} here."
            )
    return held


def _require_sigma(sigma: float) -> None:
    if not 0 <= sigma < 1e300:  # above it products with normal variates overflow
        raise JaxflError(f"sigma is {sigma}; it must be a number from 0 up.")


def _require_least(min_samples: int) -> None:
    if min_samples < 1:
        raise JaxflError(f"min_samples is {min_samples}; every client needs at least 1 row.")


def _require_rows(rows: int, clients: int, min_samples: int) -> None:
    _require_least(min_samples)
    if rows < clients * min_samples:
        raise JaxflError(
            f"{clients} clients with at least {min_samples} rows each need {clients * min_samples} "
            f"rows, but there are {rows}; use fewer clients or more data."
        )


def _require_classes(partition: str, option: str, wanted: int, existing: int) -> None:
    if not 1 <= wanted <= existing:
        raise JaxflError(
            f"{option} is {wanted}, but the data have {existing} classes; give 1 to {existing}, as in "
            f"--partition {partition},{option}={existing}."
        )


PARTITIONS: dict[str, Callable[..., list[np.ndarray]]] = {
    "iid": iid,
    "classes": classes,
    "shards": shards,
    "dirichlet": dirichlet,
    "dirichlet-flbench": dirichlet_flbench,
    "quantity": quantity,
    "power-law": power_law,
    "natural": natural,
    "listed": listed,
}

# Where test rows come from (see `jaxfl.data.partition.divide`): for `classes` as in its paper; as the data
# say, where they or a file say whose a row is; for others "own".
TEST = {"classes": "source", "natural": "split", "listed": "split"}


def rule_of_test(given: PartitionOptions) -> Any:
    """Return where test rows come from, which "auto" leaves to the partition; a saved one keeps "auto".

    A share of rows to test on is cut from what clients have.
    """
    if given.test != "auto" or is_saved(given.partition):
        return given.test
    name, _ = choices.split(given.partition)
    rule, cut = TEST.get(name, "own"), given.test_fraction != PartitionOptions.test_fraction
    return "own" if cut and rule == "split" else rule
