"""A small transformer for tokens."""

import flax.linen as nn
import jax.numpy as jnp

from jaxfl.errors import JaxflError
from jaxfl.models.build import probability, scaled
from jaxfl.models.model import Block, Model
from jaxfl.models.zoo.encoder import UNCUT, encoded, layer_norm
from jaxfl.models.zoo.tokens import Embedding, classifying, real_places


class TokenEncoder(nn.Module):
    """An encoder that attends to the real places.

    `last` marks the network's last one, which ends with a LayerNorm and the mean over the real places. If
    `causal`, a place attends to those up to it, and the last encoder takes no mean.
    """

    heads: int
    dropout: float = 0.0
    last: bool = False
    causal: bool = False
    uncut = UNCUT  # see `jaxfl.models.slices`

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map embedded tokens (B, T, d) to the same shape; the last, unless causal, to (B, d)."""
        real = real_places(x)
        seen = real[:, None, None]
        if self.causal:
            seen = seen & jnp.tri(x.shape[1], dtype=bool)[None, None]
        x = encoded(x, self.heads, self.dropout, train=train, mask=seen)
        x = layer_norm("norm", x) if self.last else x
        if self.last and not self.causal:
            return x.mean(1, where=real[..., None])
        return jnp.where(real[..., None], x, 0)


def transformer(
    *,
    shape: tuple[int, ...],
    classes: int,
    vocabulary: int,
    every_token: bool = False,
    width: float = 1.0,
    depth: int = 2,
    heads: int = 4,
    dropout: float = 0.0,
) -> Model:
    """Embedding with learned places, encoders of 64 features, and a classifier of their mean, or of each.

    Vaswani et al. 2017, arXiv:1706.03762, with the norms before attention and perceptron.

    Args:
      width: factor on the 64 features of a token.
      depth: number of encoders.
      heads: number of attention heads; the number of features is a multiple of it.
      dropout: probability of dropping an output of attention or perceptron, at least 0 and below 1.
    """
    features, dropout = scaled(width, 64), probability("dropout", dropout)
    if heads < 1 or features % heads:
        raise JaxflError(f"heads is {heads}; transformer divides its {features} features among whole heads.")
    if depth < 1:
        raise JaxflError(f"depth is {depth}; transformer needs at least one encoder.")
    body = [Block("embed", Embedding(vocabulary, features, places=True))]
    body += [
        Block(f"encoder{i}", TokenEncoder(heads, dropout, last=i == depth, causal=every_token))
        for i in range(1, depth + 1)
    ]
    return classifying("transformer", body, shape=shape, classes=classes, every_token=every_token)
