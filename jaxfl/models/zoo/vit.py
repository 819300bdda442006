"""A vision transformer for small images."""

import flax.linen as nn
import jax.numpy as jnp

from jaxfl.errors import JaxflError
from jaxfl.models.blocks import Linear
from jaxfl.models.build import Shape, network, probability, scaled
from jaxfl.models.model import Block, Model
from jaxfl.models.zoo.encoder import UNCUT, encoded, layer_norm


class PatchEmbedding(nn.Module):
    """Patches of images as vectors: a linear map of each, and a learned position."""

    features: int
    patch: int
    uncut = UNCUT  # see `jaxfl.models.slices`

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to tokens (B, H / patch, W / patch, features)."""
        batch, height, width, channels = x.shape
        rows, columns = height // self.patch, width // self.patch
        x = x.reshape(batch, rows, self.patch, columns, self.patch, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch * rows * columns, -1)
        x = Linear(self.features, name="linear")(x, train=train, mask=mask)
        shape = (rows, columns, self.features)
        position = self.param("position", nn.initializers.normal(0.02), shape, jnp.result_type(float))
        return x.reshape(batch, *shape) + position[None]


class Encoder(nn.Module):
    """An encoder of tokens in their places in the image.

    `mean` marks the network's last encoder, which ends with a LayerNorm and the mean of all tokens. Its tap
    is its output before these.
    """

    heads: int
    dropout: float = 0.0
    mean: bool = False
    uncut = UNCUT

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map tokens (B, H, W, d) to the same shape, or to (B, d) with `mean`."""
        tokens = x.reshape(x.shape[0], -1, x.shape[-1])
        tokens = encoded(tokens, self.heads, self.dropout, train=train)
        maps = tokens.reshape(x.shape)
        self.sow("intermediates", "taps", maps)
        return layer_norm("norm", tokens).mean(1) if self.mean else maps


def vit(
    *,
    shape: Shape,
    classes: int,
    patch: int = 4,
    width: float = 1.0,
    depth: int = 12,
    heads: int = 3,
    dropout: float = 0.0,
) -> Model:
    """ViT-Tiny with 4x4 patches: 12 encoders of 192 features with 3 heads (Dosovitskiy et al. 2021).

    arXiv:2010.11929, in the size that Touvron et al. 2021, arXiv:2012.12877, table 1, call tiny. The head
    gets the mean of all tokens instead of a class token, as in Beyer et al. 2022, arXiv:2205.01580, so tokens
    keep their places in the image from block to block.

    Args:
      patch: side of a patch in pixels; height and width of images are multiples of it.
      width: factor on the 192 features of a token.
      depth: number of encoders.
      heads: number of attention heads; the number of features is a multiple of it.
      dropout: probability of dropping an output of attention or perceptron, at least 0 and below 1.
    """
    features, dropout = scaled(width, 192), probability("dropout", dropout)
    if tuple(shape[:2]) == (1, 1):
        raise JaxflError(
            f"vit divides images into patches, but the data are vectors of {shape[2]} features; take another "
            "network: --models mlp."
        )
    if patch < 1 or any(side % patch for side in shape[:2]):
        raise JaxflError(f"patch is {patch}; vit divides {shape[0]}x{shape[1]} images into whole patches.")
    if heads < 1 or features % heads:
        raise JaxflError(f"heads is {heads}; vit divides its {features} features among whole heads.")
    if depth < 1:
        raise JaxflError(f"depth is {depth}; vit needs at least one encoder.")
    encoders = [Encoder(heads, dropout, mean=i == depth) for i in range(1, depth + 1)]
    body = [Block("embed", PatchEmbedding(features, patch))]
    body += [Block(f"encoder{i}", encoder) for i, encoder in enumerate(encoders, 1)]
    return network("vit", body, shape=shape, classes=classes)
