"""Comparison of two methods: the mean of paired differences, and its 95 % interval.

Runs with one seed on one partition have the same rows, initial weights and cohorts, so chance affects both
alike. Their differences scatter less than their accuracies do. So differences are averaged,

    d_s = accuracy of a run with seed s - accuracy of the other method's with seed s,
    mean(d) ± t_0.975(n - 1) std(d) / sqrt(n)        (Student's t over n pairs).

A pair is a seed. With several partitions it is a partition, with the mean over its seeds, because chance in a
partition affects all of its seeds. With a single run of each method it is a client, the same in both runs:
the interval then says what other clients would give, and not what another seed would.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxfl.config import choices
from jaxfl.errors import JaxflError, nearest
from jaxfl.folder.records import Result
from jaxfl.results.frame import Draw

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """A mean of paired differences and its interval, in the unit of what is compared; NaN where unknown."""

    mean: float  # mean of the differences
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    pairs: int  # number of pairs
    of: str  # what a pair is: "seeds", "partitions" or "clients"

    @property
    def inside(self) -> bool:
        """Whether the interval contains 0: no difference stands out from the spread."""
        return self.low <= 0 <= self.high

    def text(self) -> str:
        """Return ``+1.20 [+0.31, +2.09]``, and whether that is inside the spread; a dash without a mean."""
        if math.isnan(self.mean):
            return "-"
        if math.isnan(self.low):
            return self.number(self.mean) + (" in every pair" if self.pairs > 1 else "")
        inside = ", inside the spread" if self.inside else ""
        return f"{self.number(self.mean)} [{self.number(self.low)}, {self.number(self.high)}]{inside}"

    def number(self, value: float) -> str:
        """Return the mean, or an end of its interval, as ``+1.20``."""
        largest = max(abs(each) for each in (self.mean, self.low, self.high) if not math.isnan(each))
        return f"{value:+.{decimals(largest)}f}"


def decimals(value: float) -> int:
    """Return how many decimals a number is written with: two, or more for small ones, such as 0.0281."""
    small = 1e-12 < abs(value) < 0.1  # such as the megabytes of class means; below, it is rounding
    return 2 - math.floor(math.log10(abs(value))) if small else 2


UNPAIRED = Difference(math.nan, math.nan, math.nan, 0, "seeds")


def label_of(against: str, labels: Iterable[str]) -> str:
    """Return the label with which others are compared, see `matching_label`.

    It may begin with what is named, if it is the only one: a table adds what tells a method from others.

    Raises:
      JaxflError: if there is none, naming a similar label, or all of them.
    """
    labels = list(dict.fromkeys(labels))  # of several seeds
    longer = [label for label in labels if label.startswith(f"{against},")]
    if found := matching_label(against, labels) or (len(longer) == 1 and longer[0]):
        return found
    raise JaxflError(f"--against {against}: there is no such row in the table; {nearest(against, labels)}")


def matching_label(wanted: str, labels: Iterable[str]) -> str | None:
    """Return the label that `wanted` means, or None; its numbers may be written differently (1 for 1.0)."""
    labels = list(labels)
    if wanted in labels:
        return wanted
    for label in labels:
        with contextlib.suppress(JaxflError):  # if options occur twice, as with several models
            if _numbers(label) == _numbers(wanted):
                return label
    return None


def _numbers(label: str) -> tuple:
    """Return a label's name and options: numbers as floats, and true, false and none in lower case."""
    name, options = choices.split(label)
    found = {}
    for option, value in options.items():
        try:
            found[option] = float(value)
        except ValueError:
            found[option] = value.lower() if value.lower() in ("true", "false", "none") else value
    return name, found


def interval(differences: Sequence[float] | np.ndarray, of: str) -> Difference:
    """Return the mean of differences, one for each pair, and its interval.

    The interval is NaN for a single pair, and where all differences are the same, as in bytes: chance has no
    part in them, or it is hidden, as in rounds to a target by the rounds between two evaluations.
    """
    number, mean = len(differences), float(np.mean(differences))
    if number == 1 or (mean and np.ptp(differences) <= 1e-9 * abs(mean)):
        return Difference(mean, math.nan, math.nan, number, of)
    from scipy import stats  # here: it takes most of a second to load

    error = float(np.std(differences, ddof=1)) / math.sqrt(number)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, number - 1)) * error
    return Difference(mean, mean - half, mean + half, number, of)


def paired(
    ours: Mapping[Draw, Result],
    others: Mapping[Draw, Result],
    value: Callable[[Result], float],
    clients: Callable[[Result], Sequence[float | None]] | None = None,
) -> Difference:
    """Return how much one method's runs are above another's; `UNPAIRED` if no draw is common.

    Args:
      ours: results by seed and partition seed.
      others: results of the other method on the same partitions; draws of only one method are left out.
      value: returns the compared value of a result.
      clients: returns that value for every client by id, None for clients without it; None if no client
        has such a value.
    """
    common = sorted(ours.keys() & others.keys())
    if not common:
        return UNPAIRED

    apart = {draw: _apart(clients(ours[draw]), clients(others[draw])) for draw in common} if clients else {}
    apart = {draw: each for draw, each in apart.items() if each.size}
    if len(apart) == 1:
        return interval(*apart.values(), "clients")
    by_draw = {draw: each.mean() for draw, each in apart.items()}
    by_draw = by_draw or {draw: value(ours[draw]) - value(others[draw]) for draw in common}
    by_partition = {}
    for (_, partition), difference in by_draw.items():
        by_partition.setdefault(partition, []).append(difference)
    if len(by_partition) == 1:
        (by_seed,) = by_partition.values()
        return interval(by_seed, "seeds")
    return interval([np.mean(by_seed) for by_seed in by_partition.values()], "partitions")


def _apart(own: Sequence[float | None], other: Sequence[float | None]) -> np.ndarray:
    """Return the differences of clients with a value in both; newcomers have none."""
    apart = np.array(own, float) - np.array(other, float)
    return apart[np.isfinite(apart)]
