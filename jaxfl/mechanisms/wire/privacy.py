"""Differential privacy: of clients, by noise on what they send, or of their rows, by noise on gradients.

**Clients: DP-FedAvg** (McMahan et al. 2018, arXiv:1710.06963). All that a client sends in a round, as one
vector, is clipped to the norm C. With z the noise multiplier,

    where=server    mean <- (sum_i clip(d_i) + N(0, (z C)^2)) / m        m: the expected number of clients
    where=client    d_i  <- clip(d_i) + N(0, (z C)^2)

All clients weigh the same. With `adapt` the server lets C follow the quantile gamma of the changes' norms
(Andrew et al. 2021, arXiv:1905.03871, Algorithm 1):

    b       =   (sum_i (1[||d_i|| <= C] - 1/2) + N(0, sigma_b^2)) / m + 1/2
    C      <-   C exp(-eta (b - gamma))
    z_delta =   (z^-2 - (2 sigma_b)^-2)^(-1/2)                     of the sum, in place of z

so that both releases together have the epsilon of z.

**Rows: DP-SGD** (Abadi et al. 2016, arXiv:1607.00133). A client clips the gradient of each row and adds noise
to their sum, in every step, see `jaxfl.core.dp_sgd`. Nothing happens to its messages.

What the accountant makes of both is in `accounting`.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxfl.config.options import options, within
from jaxfl.errors import JaxflError


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
    adapt: float | None = within("(0, 1)", None)
    """gamma, the share of clients whose changes shall be within C, which follows it from `clip` on; under
    where=server. By default C stays."""
    rate: float = within("(0, inf)", 0.2)
    """eta, the rate at which C follows."""
    count_noise: float | None = within("(0, inf)", None)
    """sigma_b, standard deviation of the noise on the number of these clients, more than z / 2. By default a
    twentieth of the clients of a round; 0 if z is 0."""

    def require_count_noise(self, choice: str, clients) -> None:
        """Raise `JaxflError` if the count of a round with so many clients on average has too little noise."""
        if self.adapt is not None and 2 * self.sigma_b(clients) <= self.noise > 0:
            raise JaxflError(
                f"--privacy {choice} counts clients with a noise of {float(self.sigma_b(clients)):g}, but "
                f"needs more than half of the noise multiplier {float(self.noise):g}; raise count_noise, or "
                "let more clients take part."
            )

    def sigma_b(self, clients):
        """Return the standard deviation of the count's noise in a round with so many clients on average."""
        return jnp.where(self.noise > 0, clients / 20 if self.count_noise is None else self.count_noise, 0)

    def at(self, clip, clients) -> "Gaussian":
        """Return what happens to a sum while C is `clip`: with z_delta in place of z."""
        z, most = self.noise, 2 * self.sigma_b(clients)
        kept = jnp.where(z > 0, 1 - jnp.square(z / jnp.where(z > 0, most, 1)), 1)
        return dataclasses.replace(self, clip=clip, noise=z / jnp.sqrt(kept))

    def next_clip(self, key, within, clients):
        """Return the next C, given sum_i (1[||d_i|| <= C] - 1/2) / m."""
        drawn = self.sigma_b(clients) * jax.random.normal(key, dtype=within.dtype)
        return self.clip * jnp.exp(-self.rate * (within + drawn / clients + 0.5 - self.adapt))

    def noisy(self, key, tree):
        """Return a tree with the noise of one sum or message."""
        std, drawn = self.clip * self.noise, optax.tree.random_like(key, tree)
        return jax.tree.map(lambda leaf, noise: leaf + std * noise, tree, drawn)


@options
class Rows:
    """Clip the gradient of each training row and add normal noise (Abadi et al. 2016, arXiv:1607.00133)."""

    clip: float = within("(0, inf)", 1.0)
    """C, the largest Euclidean norm of a row's gradient, over all blocks that train."""
    noise: float = within("[0, inf)", 1.0)
    """z, the noise multiplier: standard deviation of an entry's noise on the sum of a batch, divided by C."""
    delta: float = within("(0, 1)", 1e-5)
    """delta of the guarantee (epsilon, delta); well below 1 divided by a client's number of rows."""


MECHANISMS = {"gaussian": Gaussian, "rows": Rows}
