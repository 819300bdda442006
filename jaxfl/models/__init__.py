"""Models: networks as ordered tuples of named blocks, and the zoo of the papers' architectures."""

from jaxfl.models.model import Block, Model, Weights

__all__ = ["Block", "Model", "Weights"]
