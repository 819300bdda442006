"""Compression: what a client sends in fewer bits.

An entry of `COMPRESSIONS` is a class of options. An instance is a function ``(key, change) -> change``, what
the server decodes of a client's change, with a method ``scalars(form)``: the 4-byte units that travel for it,
rounded up, given the change's arrays or shapes. Your own is such a class, or a function ``(key, change, *,
option=...)``, whose result travels as floats.
"""

import math

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxfl.config.options import options, within
from jaxfl.core import tree
from jaxfl.errors import JaxflError

BITS = 32  # of a scalar that is not compressed, and of a unit


def units(bits: int) -> int:
    """Return how many 4-byte units hold so many bits."""
    return -(-bits // BITS)


@options
class Quantize:
    """Round entries to few levels, at random so that the mean stays (Alistarh et al. 2017, QSGD).

    A leaf whose largest entry has the size m has the levels -m, ..., 0, ..., m, 2^bits - 1 of them at equal
    distances. It travels as the numbers of its levels, and m.
    """

    bits: int = within("[2, 32]", 8)
    """Bits of an entry: 2 to 16, or 32 for floats as they are."""

    def __post_init__(self):
        if 16 < self.bits < BITS:
            raise JaxflError(
                f"--compress quantize,bits={self.bits}: floats have too few digits for so many levels; write "
                "bits=16 or fewer, or 32."
            )

    def __call__(self, key, change):
        """Return levels."""
        leaves, structure = jax.tree.flatten(change)
        if self.bits == BITS:
            return change
        keys = jax.random.split(key, len(leaves))
        return structure.unflatten(map(self._rounded, keys, leaves))

    def _rounded(self, key, leaf):
        levels = 2 ** (self.bits - 1) - 1
        step = jnp.abs(leaf).max(initial=0) / levels
        step = jnp.where(step > 0, step, 1)
        number = jnp.floor(leaf / step + jax.random.uniform(key, leaf.shape, leaf.dtype))
        return jnp.clip(number, -levels, levels) * step

    def scalars(self, form) -> int:
        """Return units: the levels' numbers, and m of each leaf."""
        scale = BITS if self.bits < BITS else 0
        return units(sum(self.bits * leaf.size + scale for leaf in jax.tree.leaves(form)))


def largest(sizes, k):
    """Return which k of the sizes (n,) are the largest, and of equal ones the first, (n,) bool.

    The bits of floats from 0 on have the order of their values. So the k-th largest is found bit by bit,
    which takes a tenth of the time of sorting.
    """
    width = 8 * sizes.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(sizes, f"int{width}")

    def with_bit(i, least):
        tried = least | jnp.left_shift(jnp.ones_like(least), width - 2 - i)
        return jnp.where((bits >= tried).sum(dtype=jnp.int32) >= k, tried, least)

    kth = jax.lax.fori_loop(0, width - 1, with_bit, jnp.zeros((), bits.dtype))
    rest = k - (bits > kth).sum(dtype=jnp.int32)
    return (bits > kth) | (bits == kth) & (jnp.cumsum(bits == kth, dtype=jnp.int32) <= rest)


@options
class TopK:
    """Send only the largest entries, of all leaves together (Aji & Heafield 2017, arXiv:1704.05021).

    Each travels as a float and its number. Of entries of one size the first ones are sent.
    """

    share: float = within("(0, 1]", 0.01)
    """Share of the entries that are sent, at least one."""

    def __call__(self, key, change):
        """Return the change with zeros elsewhere."""
        flat, restored = ravel_pytree(change)
        return restored(jnp.where(largest(jnp.abs(flat), self._count(flat.size)), flat, 0))

    def _count(self, size: int):
        return jnp.clip(jnp.round(self.share * size).astype(jnp.int32), min(1, size), size)

    def scalars(self, form):
        """Return units: k floats, and the bits of k numbers below the number of entries."""
        size = tree.scalars(form)
        k, bits = self._count(size), max(1, math.ceil(math.log2(max(2, size))))
        numbers = k // BITS * bits + -(-(k % BITS) * bits // BITS)  # in this order no int32 overflows
        return k + jnp.where(k < size, numbers, 0)  # all of them need no numbers


@options
class Sign:
    """Send only signs, and each leaf's mean size (Karimireddy et al. 2019, arXiv:1901.09847)."""

    def __call__(self, key, change):
        """Return +-m with m the mean size of the leaf's entries; 0 counts as positive."""

        def of_leaf(leaf):
            size = jnp.abs(leaf).sum() / max(1, leaf.size)
            return jnp.where(leaf < 0, -size, size)

        return jax.tree.map(of_leaf, change)

    def scalars(self, form) -> int:
        """Return units: a bit for each entry, and m of each leaf."""
        return units(sum(leaf.size + BITS for leaf in jax.tree.leaves(form)))


@options
class LowRank:
    """Send each kernel as two thin factors (Vogels et al. 2019, PowerSGD, arXiv:1905.13727).

    A leaf is a matrix M (a, b), its last axis against all others. Q (b, r) is drawn, P = orth(M Q), and P and
    M^T P travel; the server gets P P^T M. Nothing of the last round is used. Leaves that would not become
    smaller, such as biases, travel as they are.
    """

    rank: int = within("[1, inf)", 4)
    """r, columns of the factors."""

    def __call__(self, key, change):
        """Return P P^T M for each leaf that becomes smaller."""
        leaves, structure = jax.tree.flatten(change)
        keys = jax.random.split(key, len(leaves))
        return structure.unflatten(map(self._projected, keys, leaves))

    def _projected(self, key, leaf):
        if self._size(leaf) == leaf.size:
            return leaf
        matrix = leaf.reshape(-1, leaf.shape[-1])
        sketch = jax.random.normal(key, (matrix.shape[1], self.rank), leaf.dtype)
        basis, _ = jnp.linalg.qr(jnp.matmul(matrix, sketch, precision="highest"))
        factor = jnp.matmul(basis.T, matrix, precision="highest")
        return jnp.matmul(basis, factor, precision="highest").reshape(leaf.shape)

    def _size(self, leaf) -> int:
        b = leaf.shape[-1] if leaf.ndim else 1
        return min(leaf.size, self.rank * (leaf.size // max(1, b) + b))

    def scalars(self, form) -> int:
        """Return units: the factors' entries."""
        return sum(map(self._size, jax.tree.leaves(form)))


@options
class Feedback:
    """The option of every compression."""

    feedback: bool = False
    """Whether clients send later what compression has lost (error feedback)."""


COMPRESSIONS = {"quantize": Quantize, "top-k": TopK, "sign": Sign, "low-rank": LowRank}
