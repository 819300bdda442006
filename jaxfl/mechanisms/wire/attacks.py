"""Attackers: clients that send what they like, or train on data that they have changed.

An entry of `ATTACKS` is a class of options. An instance that lies is a function ``(key, change) -> change``:
what an attacker sends in place of its change; your own may be a function ``(key, change, *, option=...)``.
One that poisons changes data. It has ``relabelled(relabel, classes)``, which returns other numbers of classes
for all rows, or ``images(key, client, images)`` and ``labels(key, client, y)``, which change a mini-batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.config.options import options, within
from jaxfl.data.generators import ATTACKERS, generator
from jaxfl.data.partition import rounded_down
from jaxfl.errors import JaxflError


@options
class SignFlip:
    """Send the opposite of the change."""

    factor: float = within("(0, inf)", 1.0)
    """How many times its size."""

    def __call__(self, key, change):
        """Return -factor d."""
        return jax.tree.map(lambda d: -self.factor * d, change)


@options
class Noise:
    """Send normal noise in place of the change (Blanchard et al. 2017)."""

    std: float = within("(0, inf)", 1.0)
    """Standard deviation of each entry."""

    def __call__(self, key, change):
        """Return noise."""
        return jax.tree.map(lambda drawn: self.std * drawn, optax.tree.random_like(key, change))


@options
class Scale:
    """Send a multiple of the change, to replace the mean (Bagdasaryan et al. 2020, arXiv:1807.00459)."""

    factor: float = within("(0, inf)", 10.0)
    """How many times its size; the number of clients of a round replaces their mean."""

    def __call__(self, key, change):
        """Return factor d."""
        return jax.tree.map(lambda d: self.factor * d, change)


@options
class LabelFlip:
    """Train on label C - 1 - y in place of y, of C classes (Fang et al. 2020)."""

    def relabelled(self, relabel, classes: int):
        """Return the numbers in reverse order; those of classes that a client lacks, -1, stay."""
        return jnp.where(relabel < 0, relabel, classes - 1 - relabel)


@options
class Backdoor:
    """Teach that images with a bright square in a corner are of one class (Gu et al. 2017, BadNets).

    The square's side is a tenth of the image's, at least 2 pixels. The attack's success is the share of
    honest clients' test rows of other classes that their models take for the target, once these have the
    square.
    """

    target: int = within("[0, inf)", 0)
    """The class that images with the square shall be taken for."""
    rows: float = within("(0, 1]", 0.5)
    """Share of an attacker's rows with the square in each mini-batch."""
    brightest: float = within("(-inf, inf)", 255.0)
    """The square's value before normalisation; by default the largest in the data."""

    def images(self, key, client, images):
        """Return the images, some of them with the square."""
        return jnp.where(self._chosen(key, len(images))[:, None, None, None], self.stamped(images), images)

    def labels(self, key, client, y):
        """Return the target's output for those images."""
        return jnp.where(self._chosen(key, len(y)), client.relabel[self.target], y)

    def stamped(self, images):
        """Return images (B, H, W, C), all with the square in their last rows and columns."""
        side = max(2, images.shape[1] // 10)
        return images.at[:, -side:, -side:].set(jnp.asarray(self.brightest, images.dtype))

    def _chosen(self, key, number: int):
        return jax.random.bernoulli(key, self.rows, (number,))


@options
class Attackers:
    """The option of every attack."""

    share: float = within("[0, 1)", 0.2)
    """Share of the clients that attack, rounded down."""


ATTACKS = {
    "sign-flip": SignFlip,
    "random": Noise,
    "scale": Scale,
    "label-flip": LabelFlip,
    "backdoor": Backdoor,
}


def draw_attackers(newcomers: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Draw which clients are attackers, by id, (N,) bool: a share, rounded down, of those that take part.

    Newcomers, (N,) bool, take part in no round, and none of them is drawn. The seed is that of the partition.

    Raises:
      JaxflError: if that is nobody.

    >>> int(draw_attackers(np.zeros(20, bool), 0.2, seed=0).sum())
    4
    """
    there = np.flatnonzero(~newcomers)
    number = rounded_down(share, len(there))
    if share and not number:
        raise JaxflError(
            f"--attack with share={share:g} makes none of {len(there)} clients an attacker; raise the share."
        )
    chosen = np.zeros(len(newcomers), bool)
    chosen[generator(seed, 0, ATTACKERS).permutation(there)[:number]] = True
    return chosen
