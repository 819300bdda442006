"""A recurrent network for tokens, with gated recurrent units."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxfl.models.blocks import Linear, uniform
from jaxfl.models.build import scaled
from jaxfl.models.model import Block, Model
from jaxfl.models.zoo.tokens import Embedding, classifying, real_places

GATES = "reset", "update", "new"


class GRU(nn.Module):
    """Gated recurrent units (Cho et al. 2014, arXiv:1406.1078), as in PyTorch; after a row's end they keep.

    r = sigmoid(W_r x + U_r h),  z = sigmoid(W_z x + U_z h),  n = tanh(W_n x + r (U_n h + b_n))
    h <- (1 - z) n + z h

    With `every_token` it returns the states after all tokens.
    """

    features: int
    every_token: bool = False

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map embedded tokens (B, T, d) to the last state (B, features), or all (B, T, features)."""
        batch, steps, width = x.shape
        dtype, start = jnp.result_type(float), uniform(self.features)
        flat = x.reshape(batch * steps, width)
        of_inputs = [
            Linear(self.features, name=f"from_{gate}")(flat, train=train, mask=mask) for gate in GATES
        ]
        of_inputs = [y.reshape(batch, steps, self.features).swapaxes(0, 1) for y in of_inputs]
        square = (self.features, self.features)
        reset, update, new = (
            self.param(f"state_{gate}", start, square, dtype).astype(x.dtype) for gate in GATES
        )
        bias = self.param("state_bias", start, (self.features,), dtype).astype(x.dtype)

        def step(h, inputs):
            of_reset, of_update, of_new, real = inputs
            r, z = jax.nn.sigmoid(of_reset + h @ reset), jax.nn.sigmoid(of_update + h @ update)
            n = jnp.tanh(of_new + r * (h @ new + bias[None]))
            h = jnp.where(real[:, None], (1 - z) * n + z * h, h)
            return h, jnp.where(real[:, None], h, 0) if self.every_token else None

        start = jnp.zeros((batch, self.features), x.dtype)
        h, states = lax.scan(step, start, (*of_inputs, real_places(x).T))
        return h if states is None else states.swapaxes(0, 1)


def gru(
    *,
    shape: tuple[int, ...],
    classes: int,
    vocabulary: int,
    every_token: bool = False,
    width: float = 1.0,
    embedding: int = 64,
    hidden: int = 64,
) -> Model:
    """Embedding, gated recurrent units, classifier of their last state, or of each.

    Args:
      width: factor on the features of the embedding and of the state.
      embedding: features of a token.
      hidden: features of the state.
    """
    body = [
        Block("embed", Embedding(vocabulary, scaled(width, embedding))),
        Block("gru", GRU(scaled(width, hidden), every_token)),
    ]
    return classifying("gru", body, shape=shape, classes=classes, every_token=every_token)
