"""A network that generates the parameters of another one.

Shamsian et al. 2021, "Personalized Federated Learning using Hypernetworks", arXiv:2103.04628, appendix C: a
multilayer perceptron, and behind it one linear map for each leaf of the target.
"""

from typing import Any

import flax.linen as nn
import jax

from jaxfl.models.blocks import Linear
from jaxfl.models.model import Model


class Hypernetwork(nn.Module):
    """From a vector (d,) to the parameters of a model.

    Attributes:
      model: whose parameters it generates.
      hidden: units of a hidden layer.
      depth: hidden layers behind the first.
    """

    model: Model
    hidden: int = 100
    depth: int = 3

    @nn.compact
    def __call__(self, v: jax.Array) -> Any:
        """Returns a tree like the model's parameters."""
        h = Linear(self.hidden, name="first")(v[None], train=False, mask=None)
        for number in range(self.depth):
            h = Linear(self.hidden, name=f"hidden{number + 1}")(nn.relu(h), train=False, mask=None)

        def leaf(path, shape):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return Linear(shape.size, name=name)(h, train=False, mask=None).reshape(shape.shape)

        target = jax.eval_shape(self.model.init, jax.random.key(0)).params
        return jax.tree.map_with_path(leaf, target)
