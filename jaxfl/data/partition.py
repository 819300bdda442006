"""Partitions: training, validation and test rows of every client, and its labels."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxfl.data.generators import LABELS, MOST, PUBLIC, ROWS, TEST, VALIDATION, generator
from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError
from jaxfl.tasks import CLASSES, require_classes, strata

PARTS = ("train", "validation", "test")


class Partition(NamedTuple):
    """A federation's division of one source.

    Attributes:
      train: per client (n_i,) int32, row numbers into the source's images; a client without any never trains.
      validation: per client (v_i,) int32; all empty without a validation split.
      test: per client (t_i,) int32.
      relabel: (clients, classes) int32, from a class of the source to the client's output; the
        identity for unified labels, -1 where an independent client lacks the class.
      outputs: number of outputs of every client's model.
      public: (p,) int32, rows held out for everybody to see; no client has them.
      names: per client its name in the data: the value that all its rows have in the column by which the
        source was divided; empty without one.
    """

    train: tuple[np.ndarray, ...]
    validation: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    relabel: np.ndarray
    outputs: int
    public: np.ndarray = np.empty(0, np.int32)
    names: tuple[str, ...] = ()

    def counts(self, labels: np.ndarray) -> np.ndarray:
        """Return training rows per client and class, or what stands for it, see `counts_of`."""
        of_rows = strata(labels)
        return counts_of([of_rows[rows] for rows in self.train], self.relabel.shape[1])

    @property
    def rows(self) -> np.ndarray:
        """All rows in use, each once."""
        return np.unique(np.concatenate([*self.train, *self.validation, *self.test, self.public]))


def counts_of(held: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """Return how many rows each client has of each of at least so many classes, (clients, classes)."""
    classes = max([classes, *(rows.max() + 1 for rows in held if len(rows))])
    return np.stack([np.bincount(rows, minlength=classes) for rows in held])


def divide(
    source: Source,
    partitioner: Callable[[np.ndarray, Any, np.random.Generator], list[np.ndarray]],
    clients: int | None,
    seed: int,
    *,
    test: Literal["own", "source", "split", "all"],
    labels: Literal["unified", "independent", "permuted"] = "unified",
    test_fraction: float = 0.25,
    validation_fraction: float = 0.0,
    max_train: int | None = None,
    max_test: int | None = None,
    public: float = 0.0,
    without: np.ndarray = np.empty(0, np.int32),  # noqa: B008
    by: np.ndarray | None = None,
) -> Partition:
    """Divide a source among clients.

    Rows, test rows, validation rows, labels, public rows and those of `max_train` are drawn from separate
    random streams: `labels` and `max_test` never change who trains on what.

    Args:
      source: data to divide.
      partitioner: one of `jaxfl.data.partitioners`, its options bound with `functools.partial`.
      clients: number of clients; None leaves it to the partitioner.
      seed: not negative; the same seed gives the same partition.
      test: "own" shares out all rows of the source, then cuts test rows from each client's share.
        "source" shares out the source's training rows; a client is tested on all of the source's test rows
        of its classes, with `max_test` on equally many of each. "all" does the same with all classes, so that
        all clients are tested on the same rows. "split" shares out all rows, and a client's test rows are
        those of its share that are test rows of a divided source; a client without any has some cut from its
        share, and one without others never trains.
      labels: "unified": a class means the same to everybody. Otherwise every client numbers classes in a
        random order of its own: "permuted" all classes of the source, "independent" only those of its rows
        with test="source", and otherwise all.
      test_fraction: share of a client's rows to test on, where test rows are cut from its share.
      validation_fraction: share of a client's training rows to validate on.
      max_train: maximum number of training rows of a client, validation rows included; all by default.
      max_test: maximum number of test rows of a client; all by default.
      public: share of every class, of the rows to share out, to hold out for everybody to see.
      without: rows that are not shared out.
      by: (N,), what the partitioner gets for every row of the source; its label by default.

    Raises:
      JaxflError: if a client is left without test rows, or all are without training rows.
    """
    row_rng, test_rng, validation_rng, label_rng, public_rng, most_rng = (
        generator(seed, stream) for stream in (ROWS, TEST, VALIDATION, LABELS, PUBLIC, MOST)
    )
    of_test = _never_trained_on(source, test)
    trainable = _rows_to_train_on(source, of_test, without)
    if labels != "unified":
        require_classes(source.task, f"--labels {labels}")
    classes = strata(source.labels)
    held_out = _of_every_class(trainable, classes, public, public_rng)
    pool = np.setdiff1d(np.arange(len(of_test)), without) if test == "split" else trainable
    values = classes if by is None else by
    held = _shared_out(np.setdiff1d(pool, held_out), partitioner, clients, values, row_rng)
    everything = [np.arange(source.classes)] * len(held)
    known = [np.unique(classes[rows]) for rows in held] if test == "source" else everything
    if test == "source":
        train, tested = held, [_source_test(source, classes, own, max_test, test_rng) for own in known]
    elif test == "all":
        every = _source_test(source, classes, np.unique(classes), max_test, test_rng)
        train, tested = held, [every] * len(held)
    else:
        train, tested = _own_test(held, of_test, test_fraction, max_test, test_rng)
    if max_train is not None:
        train = [most_rng.permutation(rows)[:max_train] for rows in train]
    train, validation = _cut(train, validation_fraction, validation_rng)
    if validation_fraction and not any(map(len, validation)):
        raise JaxflError(
            f"A validation_fraction of {validation_fraction:g} sets no row of any client aside; raise it, or "
            f"{'give clients more rows' if max_train is None else f'max_train (now {max_train})'}."
        )
    if labels == "unified":
        relabel = np.stack(everything).astype(np.int32)
    else:
        relabel = _renumber(known if labels == "independent" else everything, source.classes, label_rng)
    return Partition(
        train=as_int32(train),
        validation=as_int32(validation),
        test=as_int32(tested),
        relabel=relabel,
        outputs=int(relabel.max()) + 1,
        public=held_out.astype(np.int32),
        names=() if by is None else _names(by, held),
    )


def _never_trained_on(source: Source, test: str) -> np.ndarray:
    """Return which rows of the source nobody may train on, (N,) bool; "split" keeps no split that we made."""
    if test == "own" or (test == "split" and not source.divided):
        return np.zeros(len(source.train), bool)
    return ~source.train


def _rows_to_train_on(source: Source, of_test: np.ndarray, without: np.ndarray) -> np.ndarray:
    """Return the rows that clients may train on, or the public may get, at least one."""
    rows = np.setdiff1d(np.flatnonzero(~of_test), without)
    if not len(rows):
        kind = "training row" if of_test.any() else "row"
        beside = (
            " besides those of --disjoint-from; change that, the data"
            if len(without)
            else "; change the data"
        )
        raise JaxflError(f"No {kind} of {source.name} is left for clients{beside} or --test.")
    return rows


def _shared_out(pool, partitioner: Callable, clients: int | None, values, rng) -> list[np.ndarray]:
    """Return each client's share of the rows in the pool, by their values; everybody has one."""
    if clients is not None and clients > len(pool):
        raise JaxflError(
            f"{clients:,} clients need {clients} rows, but there are {len(pool)}; use fewer clients "
            "or more data."
        )
    held = _positions(partitioner(values[pool], clients, rng), clients, len(pool))
    require_everyone("training", held, "use fewer clients or more data")
    return [pool[part] for part in held]


def _own_test(held, of_test: np.ndarray, fraction: float, most: int | None, rng):
    """Return each client's training rows and its test rows, of these at most `most`.

    Test rows are those of its rows that are `of_test`; a client without any has a fraction of its rows cut.
    """
    if sum(map(len, held)) > len(np.unique(np.concatenate(held))):
        raise JaxflError(
            "Clients share rows, so one would train on what another is tested on; ask for fewer "
            "rows or clients, or choose --test source."
        )
    train, tested = [], []
    for rows in held:
        mine = of_test[rows]
        if mine.any():
            left, taken = rows[~mine], rng.permutation(rows[mine])
        else:
            (left,), (taken,) = _cut([rows], fraction, rng)
        train.append(left)
        tested.append(taken[:most])
    require_everyone(
        "test",
        tested,
        "raise test_fraction, give clients more rows (by min_samples, if the partition has that; of a text "
        "by a smaller length), or take the data's test rows (--test source)",
    )
    if not any(map(len, train)):
        raise JaxflError("No client has training rows; take --test own, or data of which a client has some.")
    return train, tested


def _names(values: np.ndarray, held: list[np.ndarray]) -> tuple[str, ...]:
    """Return per client the value (N,) that all its rows have; nothing if the rows of one differ."""
    if any((values[rows] != values[rows[0]]).any() for rows in held):
        return ()
    if values.dtype.kind == "S":  # text as bytes
        values = np.char.decode(values, "utf-8", "replace")
    return tuple(str(values[rows[0]]) for rows in held)


def _of_every_class(pool, labels, share: float, rng) -> np.ndarray:
    """Draw a share, rounded down, of each class's rows in the pool."""
    by_class = [rng.permutation(pool[labels[pool] == c]) for c in np.unique(labels[pool])]
    rows = np.concatenate([rows[: rounded_down(share, len(rows))] for rows in by_class])
    if share and not len(rows):
        raise JaxflError(
            f"A share of {share} of every class holds out no row; raise it, as in --public "
            "held-out,share=0.1."
        )
    return rows


def _source_test(source: Source, of_rows: np.ndarray, classes: np.ndarray, most: int | None, rng):
    """Return the source's test rows of some classes: all, or at most `most` and equally many of each.

    Classes without test rows have no part in this; `of_rows` (N,) has the class of every row.
    """
    rows = np.flatnonzero(~source.train)
    by_class = [rng.permutation(rows[of_rows[rows] == c]) for c in classes]
    found = [of_class for of_class in by_class if len(of_class)]
    if not found:
        raise JaxflError(
            f"A client has only classes of which {source.name} has no test rows "
            f"({', '.join(map(str, classes))}); take --test own, which cuts test rows from its own."
        )
    if most is None:
        return np.concatenate(found)
    if most < len(found):
        raise JaxflError(
            f"max_test is {most}, too few for a test row of each of {len(found)} classes; raise it."
        )
    each = min(*map(len, found), most // len(found))
    return np.concatenate([of_class[:each] for of_class in found])


def _cut(held, fraction: float, rng) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Take a random fraction, rounded down, of each client's rows: (rows left, rows taken)."""
    left, taken = [], []
    for rows in held:
        rows = rng.permutation(rows)
        cut = rounded_down(fraction, len(rows))
        left.append(rows[cut:])
        taken.append(rows[:cut])
    return left, taken


def _renumber(numbered, classes: int, rng) -> np.ndarray:
    """Draw a random order of each client's numbered classes, -1 for the others: (clients, classes)."""
    relabel = np.full((len(numbered), classes), -1, np.int32)
    for client, own in enumerate(numbered):
        relabel[client, own] = rng.permutation(len(own))
    return relabel


def as_int32(parts) -> tuple[np.ndarray, ...]:
    """Return arrays of rows as int32."""
    return tuple(rows.astype(np.int32) for rows in parts)


def require_everyone(kind: str, parts, advice: str) -> None:
    """Raise `JaxflError` if a client has no rows among these parts."""
    for client, rows in enumerate(parts):
        if len(rows) == 0:
            raise JaxflError(f"Client {client} is left without {kind} rows; {advice}.")


def _positions(parts: Any, clients: int | None, rows: int) -> list[np.ndarray]:
    """Return as arrays, once checked, what a partitioner has returned; it may be the user's own."""

    def fits(part):
        if part.ndim != 1 or (part.size and part.dtype.kind not in "iu"):
            return False
        there = 0 <= part.min(initial=0) <= part.max(initial=0) < rows
        return there and len(np.unique(part)) == len(part)

    made = f"a {type(parts).__name__}"
    with contextlib.suppress(TypeError, ValueError):  # of anything but a sequence of arrays
        held = [np.asarray(part) for part in parts]
        fitting = [fits(part) for part in held]
        if held and len(held) == (clients or len(held)) and all(fitting):
            return held
        wrong = "" if all(fitting) else f", of which that of client {fitting.index(False)} is none such"
        made = f"{len(held)} arrays{wrong}"
    whom = "client" if clients is None else f"of {clients} clients"
    raise JaxflError(
        f"The partitioner must return, for each {whom}, an array of different positions from 0 to "
        f"{rows - 1}, but returns {made}."
    )


def rounded_down(share: float, count: int) -> int:
    """Return a share of `count`, rounded down; 0.29 of 100 is 29, though as floats it is less."""
    return int(share * count + 1e-9)


def lacks_class(known: np.ndarray, source: Source, rows: np.ndarray) -> bool:
    """Return whether rows have a class without an output in `known` (classes,), see `Partition.relabel`."""
    return source.task is CLASSES and bool((known[source.labels[rows]] < 0).any())
