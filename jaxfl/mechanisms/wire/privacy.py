"""Differential privacy of clients: DP-FedAvg (McMahan et al. 2018, arXiv:1710.06963).

All that a client sends in a round, as one vector, is clipped to the norm C. With z the noise multiplier,

    where=server    mean <- (sum_i clip(d_i) + N(0, (z C)^2)) / m        m: the expected number of clients
    where=client    d_i  <- clip(d_i) + N(0, (z C)^2)

All clients weigh the same. What the accountant makes of it is in `accounting`.
"""

from typing import Literal

import jax

from jaxfl.config.options import options, within
from jaxfl.mechanisms.wire.aggregation import clipped
from jaxfl.mechanisms.wire.attacks import noise_like


@options
class Gaussian:
    """Clip what clients send and add normal noise (McMahan et al. 2018, arXiv:1710.06963)."""

    clip: float = within("(0, inf)", 1.0)
    """C, the largest Euclidean norm of all that a client sends in a round."""
    noise: float = within("[0, inf)", 1.0)
    """z, the noise multiplier: standard deviation of an entry's noise, divided by C."""
    where: Literal["server", "client"] = "server"
    """Who adds the noise: a trusted server to the sum, or each client to its message."""
    delta: float = within("(0, 1)", 1e-5)
    """delta of the guarantee (epsilon, delta); well below 1 divided by the number of clients."""

    def noisy(self, key, tree):
        """Return a tree with the noise of one sum or message."""
        drawn = noise_like(key, tree, self.clip * self.noise)
        return jax.tree.map(lambda leaf, noise: leaf + noise, tree, drawn)

    def clipped(self, change):
        """Return a change with at most the norm C."""
        return clipped(change, self.clip)


MECHANISMS = {"gaussian": Gaussian}
