"""Blocks for tokens (B, T), integers that are -1 after the end of a row.

Between blocks a place after the end is a vector of zeros, which no real token has: so every block knows which
places are real, also where blocks of other networks follow it.
"""

import flax.linen as nn
import jax.numpy as jnp

from jaxfl.errors import JaxflError
from jaxfl.models.blocks import Linear
from jaxfl.models.model import Block, Model


class Embedding(nn.Module):
    """A vector for each token, plus with `places` a learned one for each place; normal as in PyTorch."""

    vocabulary: int
    features: int
    places: bool = False

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map tokens (B, T) to (B, T, features)."""
        dtype, shape = jnp.result_type(float), (self.vocabulary, self.features)
        table = self.param("embedding", nn.initializers.normal(1.0), shape, dtype)
        y = table[jnp.clip(x, 0, self.vocabulary - 1)]
        if self.places:
            of_places = nn.initializers.normal(0.02)
            y = y + self.param("position", of_places, (x.shape[1], self.features), dtype)[None]
        return jnp.where((x >= 0)[..., None], y, 0)


def real_places(x):
    """Return which places of embedded tokens (B, T, d) are real, (B, T) bool."""
    return (x != 0).any(-1)


class EachToken(nn.Module):
    """Affine map of each real place; after the end of a row outputs are 0."""

    features: int

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, T, d) to (B, T, features)."""
        batch, steps, width = x.shape
        linear = Linear(self.features)
        nn.share_scope(self, linear)
        y = linear(x.reshape(batch * steps, width), train=train, mask=mask)
        return jnp.where(real_places(x)[..., None], y.reshape(batch, steps, self.features), 0)


def classifying(
    name: str, body: list[Block], *, shape: tuple[int, ...], classes: int, every_token: bool = False
) -> Model:
    """Complete a body that takes tokens to a model, with its classifier.

    The body returns (B, d), or with `every_token` (B, T, d).

    Raises:
      JaxflError: if the shape is not that of tokens, or `classes` is not positive.
    """
    if len(shape) != 1 or min(shape) < 1:
        raise JaxflError(f"{name} takes tokens of shape (T,), not {tuple(shape)}.")
    if classes < 1:
        raise JaxflError(f"{name} cannot have {classes} classes; give at least one.")
    blocks = (*body, Block("classifier", (EachToken if every_token else Linear)(classes)))
    return Model(name, blocks, tuple(shape), classes, tokens=True)
