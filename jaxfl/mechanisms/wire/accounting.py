"""What differential privacy guarantees after some rounds, by the accountant of `dp-accounting`.

The neighbour of a federation, and the event of one round that the accountant composes, with z the noise
multiplier (`privacy`), q the share of clients that take part and m of N its number:

    where=server, sampling=poisson    one client more or less      Poisson sampling with q, Gauss of z
    where=server, sampling=fixed      another client in its place  m of N without replacement, Gauss of z / 2
    where=client                      another message              Gauss of z / 2
    rows                              one row of a client less     in each of its steps Poisson, Gauss of z

Another client in its place moves a sum of clipped changes by up to 2 C, hence z / 2. Under where=client the
server sees who takes part, so that sampling hides nobody, and a client is charged for every round. A row is
in a batch of B of the client's n rows with probability B / n, see `jaxfl.core.dp_sgd`; n is no secret. The
bound is that of Renyi's divergence (`RdpAccountant`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxfl.core.noisy_steps import NoisySteps
from jaxfl.core.protocol import Slots
from jaxfl.errors import JaxflError
from jaxfl.machine.packages import optional, quiet
from jaxfl.mechanisms.wire.privacy import Rows


class Accounting(NamedTuple):
    """What the accountant needs to know of a run.

    Args:
      noise: z, the noise multiplier.
      delta: of the guarantee.
      where: who adds the noise.
      sampling: how clients are drawn for a round.
      participation: q, the share of clients that take part.
      active: m, the number of clients of a round under ``fixed``.
      clients: N, without newcomers.
    """

    noise: float
    delta: float
    where: str
    sampling: str
    participation: float
    active: int
    clients: int

    def epsilon(self, rounds: int) -> float:
        """Return epsilon after so many rounds; infinite without noise.

        Raises:
          JaxflError: if `dp-accounting` is not installed.
        """
        return _epsilon(self, rounds) if rounds else 0.0

    def after(self, rounds: int, cohorts: Sequence[Slots]) -> dict[str, float | None]:
        """Return epsilon, delta and noise multiplier after so many rounds; None for an infinite epsilon.

        Args:
          rounds: number of rounds done.
          cohorts: of all rounds, per group leaves (rounds, k_g).
        """
        if self.where == "client":  # a client is charged for the rounds in which it sends
            taken = [slots.index[:rounds][slots.mask[:rounds]] for slots in cohorts]
            rounds = max(int(np.bincount(of_group, minlength=1).max()) for of_group in taken)
        return _record(self.epsilon(rounds), self.delta, self.noise)


def of_rows(
    privacy: Rows, batch_size: int, sizes: np.ndarray, counted: Callable[[], NoisySteps]
) -> Callable[[int], dict[str, float | None]]:
    """Return a function of the rounds done that returns what `Accounting.after` does, for clients' rows.

    The batch size is B; `sizes` (N,) int are n, the rows of each client, and `counted` returns the noisy
    steps of all clients in the same order.

    Raises:
      JaxflError: if `dp-accounting` is not installed.
    """
    noise, delta = float(privacy.noise), float(privacy.delta)
    Accounting(noise, delta, "server", "poisson", 1.0, 0, 0).epsilon(1)  # says so before the first round

    def after(rounds):
        steps = counted().rounds[:rounds].sum(0) + counted().deployed
        worst, most = 0.0, 0
        for n, taken in sorted(set(zip(sizes.tolist(), steps.tolist(), strict=True))):
            if taken > most:  # else a client with as few rows or fewer has taken as many steps or more
                # A row is in a batch as a client is in a round.
                q, most = min(1.0, batch_size / n), taken
                worst = max(worst, Accounting(noise, delta, "server", "poisson", q, 0, 0).epsilon(taken))
        return _record(worst, delta, noise)

    return after


def _record(epsilon: float, delta: float, noise: float) -> dict[str, float | None]:
    """Return what a run writes down; epsilon is None if it is infinite."""
    return {"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta, "noise": noise}


@functools.lru_cache(maxsize=4096)
def _epsilon(of: Accounting, rounds: int) -> float:
    if not of.noise:
        return math.inf
    library = optional("dp_accounting", "privacy", "--privacy")
    rdp = optional("dp_accounting.rdp", "privacy", "--privacy")
    relation = library.NeighboringRelation
    if of.where == "server" and of.sampling == "poisson":
        accountant = rdp.RdpAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE)
        event = library.PoissonSampledDpEvent(of.participation, library.GaussianDpEvent(of.noise))
    else:
        accountant = rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
        event = library.GaussianDpEvent(of.noise / 2)
        if of.where == "server" and of.active < of.clients:
            event = library.SampledWithoutReplacementDpEvent(of.clients, of.active, event)
    with quiet():  # about orders that it leaves out
        return float(accountant.compose(event, rounds).get_epsilon(of.delta))


def least_noise(of: Accounting, epsilon: float, rounds: int) -> float:
    """Return the least noise multiplier, to four digits, whose epsilon is at most this after so many rounds.

    Raises:
      JaxflError: if none below a million is enough.
    """
    low, high = 0.0, 1.0
    while of._replace(noise=high).epsilon(rounds) > epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            raise JaxflError(f"--target-epsilon {epsilon:g} needs more noise than a million; raise it.")
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if of._replace(noise=middle).epsilon(rounds) <= epsilon else (middle, high)
    return high
