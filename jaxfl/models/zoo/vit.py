"""A vision transformer for small images."""

import flax.linen as nn
import jax.numpy as jnp

from jaxfl.errors import JaxflError
from jaxfl.models.blocks import LAYER_EPSILON, Linear
from jaxfl.models.build import network, probability, scaled
from jaxfl.models.model import Block, Model

UNCUT = "has attention heads that each take some of the channels, which leaves no first ones"


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
    """Attention and a perceptron of two layers, each after a LayerNorm and with a shortcut.

    `mean` marks the network's last encoder, which ends with a LayerNorm and the mean of all tokens. Its tap
    is its output before these, the tokens in their places in the image.
    """

    heads: int
    dropout: float = 0.0
    mean: bool = False
    uncut = UNCUT

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map tokens (B, H, W, d) to the same shape, or to (B, d) with `mean`."""
        dtype, (batch, height, width, features) = jnp.result_type(float), x.shape

        def norm(name, x):
            layer = nn.LayerNorm(
                epsilon=LAYER_EPSILON,
                dtype=dtype,  # statistics need more digits than a reduced precision has
                param_dtype=dtype,
                use_fast_variance=False,
                force_float32_reductions=False,
                name=name,
            )
            return layer(x.astype(dtype)).astype(x.dtype)

        def dropped(x):
            return nn.Dropout(self.dropout, deterministic=not train)(x)

        x = x.reshape(batch, height * width, features)
        attention = nn.MultiHeadDotProductAttention(self.heads, param_dtype=dtype, name="attention")
        x = x + dropped(attention(norm("norm1", x)))
        y = norm("norm2", x)
        y = nn.Dense(4 * features, param_dtype=dtype, name="mlp1")(y)
        y = nn.Dense(features, param_dtype=dtype, name="mlp2")(nn.gelu(y, approximate=False))
        x = x + dropped(y)
        maps = x.reshape(batch, height, width, features)
        self.sow("intermediates", "taps", maps)
        return norm("norm", x).mean(1) if self.mean else maps


def vit(
    *,
    shape: tuple[int, int, int],
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
      shape: (H, W, C) of the images.
      classes: number of classes.
      patch: side of a patch in pixels; height and width of images are multiples of it.
      width: factor on the 192 features of a token.
      depth: number of encoders.
      heads: number of attention heads; the number of features is a multiple of it.
      dropout: probability of dropping an output of attention or perceptron, at least 0 and below 1.

    Raises:
      JaxflError: if an argument is out of range.
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
