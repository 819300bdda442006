"""A network that generates the parameters of another one.

Shamsian et al. 2021, "Personalized Federated Learning using Hypernetworks", arXiv:2103.04628, appendix C: a
multilayer perceptron, then one linear map for each leaf of the target.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxfl.models.blocks import Linear
from jaxfl.models.model import PRODUCTS, Model


class Hypernetwork(nn.Module):
    """A network from a vector (d,) to the parameters of a model."""

    model: Model  # model whose parameters it generates
    hidden: int = 100  # units of a hidden layer
    depth: int = 3  # number of hidden layers after the first

    @nn.compact
    def __call__(self, v: jax.Array) -> Any:
        """Return a tree like the model's parameters, computed in the model's precision."""

        def leaf(path, shape):
            return Linear(shape.size, name=_map(path))(h, train=False, mask=None).reshape(shape.shape)

        with jax.default_matmul_precision(PRODUCTS[self.model.precision]):
            h = Linear(self.hidden, name="first")(v[None], train=False, mask=None)
            for number in range(self.depth):
                h = Linear(self.hidden, name=f"hidden{number + 1}")(nn.relu(h), train=False, mask=None)
            return jax.tree.map_with_path(leaf, self.model.form.params)


def generating(psi: dict, params: dict) -> dict:
    """Return the parameters of a `Hypernetwork` that initially generate `params` from every vector."""
    leaves = jax.tree.leaves_with_path(params)
    constant = {
        _map(path): {"kernel": jnp.zeros_like(psi[_map(path)]["kernel"]), "bias": jnp.ravel(leaf)}
        for path, leaf in leaves
    }
    return psi | constant


def _map(path) -> str:
    """Return the name of the linear map that generates a leaf."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
