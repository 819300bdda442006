"""The encoder of transformers, of images and of tokens."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxfl.models.blocks import LAYER_EPSILON

UNCUT = "has attention heads that each take some of the channels, which leaves no first ones"


def encoded(
    x: jax.Array, heads: int, dropout: float, *, train: bool, mask: jax.Array | None = None
) -> jax.Array:
    """Return tokens (B, T, d) after attention and a perceptron of two layers, in a module's compact method.

    Each comes after a LayerNorm and has a shortcut, and dropout of its outputs. `mask` (B, 1, 1, T) are the
    tokens to attend to; all by default.
    """
    dtype, features = jnp.result_type(float), x.shape[-1]

    def dropped(x):
        return nn.Dropout(dropout, deterministic=not train)(x)

    attention = nn.MultiHeadDotProductAttention(heads, param_dtype=dtype, name="attention")
    x = x + dropped(attention(layer_norm("norm1", x), mask=mask))
    y = nn.Dense(4 * features, param_dtype=dtype, name="mlp1")(layer_norm("norm2", x))
    y = nn.Dense(features, param_dtype=dtype, name="mlp2")(nn.gelu(y, approximate=False))
    return x + dropped(y)


def layer_norm(name: str, x: jax.Array) -> jax.Array:
    """Normalise the features of tokens (B, T, d), in a module's compact method."""
    dtype = jnp.result_type(float)
    layer = nn.LayerNorm(
        epsilon=LAYER_EPSILON,
        dtype=dtype,  # statistics need more digits than a reduced precision has
        param_dtype=dtype,
        use_fast_variance=False,
        force_float32_reductions=False,
        name=name,
    )
    return layer(x.astype(dtype)).astype(x.dtype)
