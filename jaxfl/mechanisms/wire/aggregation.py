"""Servers that trust a message less than a mean does.

An entry of `AGGREGATORS` is a class of options. An instance is a function ``(messages, weights) -> message``:
of trees with leaves (k, ...), one entry per client, and weights (k,), 0 for a client that is absent or whose
message is not finite. What papers define without weights asks only whether they are positive. Your own may be
a function ``(changes, weights, *, option=...)``: it gets messages minus what the server knows of them, which
makes no difference to those here.

All messages of an architecture are in memory at once, except under `NormBound`, which bounds each message on
its arrival; a mean follows.
"""

import jax
import jax.numpy as jnp
import optax

from jaxfl.config.options import options, within
from jaxfl.core import tree
from jaxfl.core.tree import where_each
from jaxfl.data.partition import rounded_down
from jaxfl.errors import JaxflError


def ranks(leaf, present):
    """Return each entry's rank among those of the clients present, (k, ...) int32; k of the others.

    Counted, because sorting along clients is slow to compile and, for hundreds of them, no faster.
    """
    places, ones = jnp.arange(len(leaf), dtype=jnp.int32), [1] * (leaf.ndim - 1)

    def count(rank, other):
        place, value, there = other
        before = (value[None] < leaf) | ((value[None] == leaf) & (place < places).reshape(-1, *ones))
        return rank + (there & before).astype(jnp.int32), None

    rank, _ = jax.lax.scan(count, jnp.zeros(leaf.shape, jnp.int32), (places, leaf, present))
    return jnp.where(present.reshape(-1, *ones), rank, len(leaf))


def mean_of_kept(leaf, kept, share):
    """Return the sum of share times the entries kept, client by client, as `map_and_sum` adds them."""

    def add(total, entry):
        value, keep = entry
        return total + share * jnp.where(keep, value, 0), None

    return jax.lax.scan(add, jnp.zeros_like(leaf[0]), (leaf, kept))[0]


def distances(messages):
    """Return the squared distances of all pairs of messages, (k, k).

    Pair by pair: by inner products, those of honest messages would be lost in the rounding of a loud lie.
    """

    def of_pair(one, other):
        return optax.tree.norm(optax.tree.sub(one, other), squared=True)

    return jax.lax.map(lambda one: jax.vmap(of_pair, (None, 0))(one, messages), messages)


@options
class Median:
    """The median of each entry (Yin et al. 2018, arXiv:1803.01498), without weights."""

    def __call__(self, messages, weights):
        """Return medians: of an even number the mean of the two in the middle."""
        present = weights > 0
        n = present.sum(dtype=jnp.int32)

        def of_leaf(leaf):
            rank = ranks(leaf, present)
            low, high = (n - 1) // 2, n // 2
            middle = [jnp.where(rank == place, leaf, 0).sum(0) for place in (low, high)]
            return (middle[0] + middle[1]) / 2

        return jax.tree.map(of_leaf, messages)


@options
class TrimmedMean:
    """The mean of each entry without the largest and the smallest (Yin et al. 2018), without weights."""

    share: float = within("[0, 0.5)", 0.1)
    """Share of the messages that is left out at each end, rounded down."""

    def require(self, choice: str, usual: int) -> None:
        """Raise `JaxflError` if nothing would be left out of as many messages as a round has on average."""
        if self.share and not rounded_down(self.share, usual):
            raise JaxflError(
                f"--aggregate {choice} leaves out none of an architecture's messages, {usual} in a round on "
                "average; raise share, let more clients take part, or take --aggregate median."
            )

    def __call__(self, messages, weights):
        """Return means of those between."""
        present = weights > 0
        n = present.sum(dtype=jnp.int32)
        cut = jnp.floor(self.share * n.astype(weights.dtype) + 1e-5).astype(jnp.int32)
        share = 1 / jnp.maximum(n - 2 * cut, 1).astype(weights.dtype)

        def of_leaf(leaf):
            rank = ranks(leaf, present)
            return mean_of_kept(leaf, (rank >= cut) & (rank < n - cut), share.astype(leaf.dtype))

        return jax.tree.map(of_leaf, messages)


@options
class Krum:
    """The message that is nearest to its neighbours, or the mean of m such (Blanchard et al. 2017).

    Its score is the sum of its squared distances to its n - f - 2 nearest others. Without weights.
    """

    attackers: int | None = within("[0, inf)", None)
    """f, how many of a round's messages may lie; by default as many as can be, the most with n > 2 f + 2."""
    m: int = within("[1, inf)", 1)
    """How many messages of the best scores are averaged (Multi-Krum)."""

    def require(self, choice: str, usual: int) -> None:
        """Raise `JaxflError` if as many messages as a round has on average are too few."""
        least = max(2 * (self.attackers or 0) + 3, self.m)
        if usual < least:
            raise JaxflError(
                f"--aggregate {choice} needs {least} messages of an architecture or more, but a round has "
                f"{usual} on average; let more clients take part, or lower attackers or m."
            )

    def __call__(self, messages, weights):
        """Return the mean of the chosen messages."""
        present = weights > 0
        n, k = present.sum(dtype=jnp.int32), len(weights)
        most = jnp.maximum((n - 3) // 2, 0)  # where answers are lost, or by --sampling poisson, n is less
        f = most if self.attackers is None else jnp.minimum(self.attackers, most)
        pairs = present[:, None] & present[None] & ~jnp.eye(k, dtype=bool)
        apart = jnp.sort(jnp.where(pairs, distances(messages), jnp.inf), axis=1)
        nearest = jnp.arange(k, dtype=jnp.int32)[None] < jnp.clip(n - f - 2, 1, jnp.maximum(n - 1, 1))
        score = jnp.where(nearest, jnp.where(pairs.any(1)[:, None], apart, 0), 0).sum(1)
        rank = jnp.argsort(jnp.argsort(jnp.where(present, score, jnp.inf), stable=True))
        chosen = present & (rank < self.m)
        return tree.weighted_sum(tree.shares(chosen.astype(weights.dtype)), messages)


@options
class GeometricMedian:
    """The point with the least weighted sum of distances (Pillutla et al. 2022, RFA, arXiv:1912.13445)."""

    iterations: int = within("[1, inf)", 8)
    """Steps of the smoothed Weiszfeld algorithm, from the mean on."""
    smoothing: float = within("(0, inf)", 1e-6)
    """nu, the least distance that divides a weight."""

    def __call__(self, messages, weights):
        """Return z <- sum_i b_i x_i / sum_i b_i with b_i = a_i / max(nu, ||x_i - z||), repeated."""
        squares = jax.vmap(lambda one: optax.tree.norm(one, squared=True))

        def closer(_, z):
            away = jnp.sqrt(squares(jax.tree.map(lambda leaf, centre: leaf - centre[None], messages, z)))
            shares = tree.shares(weights / jnp.maximum(self.smoothing, away))
            return tree.weighted_sum(shares, messages)

        start = tree.weighted_sum(tree.shares(weights), messages)
        return jax.lax.fori_loop(0, self.iterations, closer, start)


@options
class NormBound:
    """The mean of changes that are scaled down to a bound (Sun et al. 2019, arXiv:1911.07963)."""

    bound: float = within("(0, inf)", 1.0)
    """Largest Euclidean norm of all that a client sends."""


AGGREGATORS = {
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "krum": Krum,
    "geometric-median": GeometricMedian,
    "norm-bound": NormBound,
}


def clipped(change, bound):
    """Return a change scaled down to a norm over all its leaves, and not up."""
    norm = optax.tree.norm(change)
    factor = jnp.minimum(1, bound / jnp.where(norm > 0, norm, 1))
    return jax.tree.map(lambda d: d * factor.astype(d.dtype), change)


def of_finite(aggregate, messages, weights):
    """Return what a server makes of the finite messages, and which others it leaves out, (k,).

    If none of those present is finite, it leaves out none and has diverged with them.
    """
    leaves = jax.tree.leaves(messages)
    if not leaves:  # nothing is sent
        return messages, jnp.zeros(weights.shape, bool)
    present = weights > 0
    finite = jnp.stack([jnp.isfinite(leaf).reshape(len(weights), -1).all(1) for leaf in leaves]).all(0)
    heard = (present & finite).any()
    zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), messages)
    made = aggregate(where_each(finite, messages, zeros), jnp.where(finite, weights, 0))
    made = jax.tree.map(lambda leaf: jnp.where(heard | ~present.any(), leaf, jnp.nan), made)
    return made, ~finite & present & heard
