"""A block made of two plain functions: one draws its weights, one applies them."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxfl.config.own_code import line_of, require_call
from jaxfl.errors import JaxflError
from jaxfl.models.blocks import CONVOLVED, DENSE
from jaxfl.models.model import Block, Model, Weights, are_tokens
from jaxfl.models.own.convolved import convolved

GIVEN = ("stats", "train", "key", "mask")  # besides parameters and inputs, for functions that name them


class OwnBlock:
    """Replacement for a block's Linen module: `draw` and `run`, called as a module is."""

    kind: Any  # distinguishes blocks with leaves of the same names and shapes
    where: Any  # file and line where the network or the function is defined
    draw: Callable[..., Weights]  # ``(key, x (1, ...))``, initial weights for inputs like x
    run: Callable[..., tuple[jax.Array, dict]]  # ``(weights, x, *, train, key, mask)``, output and statistics
    uncut = "is part of a network of your own, and jaxfl does not know how its channels are ordered"

    def lazy_init(self, key, x, *, train, mask) -> dict:
        """Draw variables, as Linen's `lazy_init`."""
        weights = self.draw(key, jnp.zeros(x.shape, x.dtype))
        leaves: dict[Any, Any] = flatten_dict(weights.params) | flatten_dict(weights.stats)
        for path, leaf in leaves.items():
            if not _is_float(leaf):
                raise JaxflError(
                    f"{self.where}: {'/'.join(path)} is {leaf.dtype}; make it a float, because clients' "
                    "parameters and statistics are averaged."
                )
            if leaf.dtype.itemsize < 4:
                raise JaxflError(
                    f"{self.where}: {'/'.join(path)} is {leaf.dtype}, too coarse to be trained and averaged; "
                    "make it float32, and compute with fewer bits by --precision bfloat16."
                )
        return {"params": weights.params, "batch_stats": weights.stats}

    def apply(self, variables, x, *, train, mask, rngs=None, mutable=()) -> tuple[jax.Array, dict]:
        """Apply the block, as Linen's `apply`; maps that a block with a convolution returns are its tap."""
        weights = Weights(variables["params"], variables.get("batch_stats", {}))

        def run(weights, x, key, mask):
            return self.run(weights, x, train=train, key=key, mask=mask)

        y, stats = convolved(run, weights, x, (rngs or {}).get("dropout"), mask)
        if not isinstance(y, jax.Array) or not _is_float(y):
            what = f"an array of {y.dtype}" if isinstance(y, jax.Array) else f"a {type(y).__name__}"
            raise JaxflError(f"{self.where}: it returns {what}, not an array of floats.")
        new: dict[str, Any] = {"batch_stats": stats}
        axes = max((leaf.ndim for leaf in jax.tree.leaves(weights.params)), default=0)
        if "intermediates" in mutable and axes == 4 and y.ndim == 4:
            new["intermediates"] = {"taps": (y,), CONVOLVED: (y,)}
        elif "intermediates" in mutable and axes and y.ndim == 2:
            new["intermediates"] = {DENSE: (y,)}
        return y, new


@dataclasses.dataclass(frozen=True)
class Functions(OwnBlock):
    """A block of two functions, see `from_functions`."""

    init: Callable
    function: Callable

    @property
    def where(self) -> str:
        """Place where the function is defined."""
        return line_of(self.function)

    kind = where

    def draw(self, key, x):
        """Return the output of `init` as weights."""
        found = self.init(key, x)
        weights = found if isinstance(found, Weights) else Weights(found, {})
        for tree in weights:
            leaves = flatten_dict(tree) if isinstance(tree, dict) else {("",): None}
            named = all(isinstance(name, str) for path in leaves for name in path)
            if not named or not all(hasattr(leaf, "dtype") for leaf in leaves.values()):
                raise JaxflError(
                    f"{line_of(self.init)}: init returns {_form(tree)}; return a dict (of dicts) of float "
                    "arrays by name, or Weights of two of them: parameters and statistics."
                )
            if divided := [name for path in leaves for name in path if "/" in name]:
                raise JaxflError(
                    f"{line_of(self.init)}: init names an array {divided[0]!r}; leave out the slash, which "
                    "separates names in files of weights, or put a dict into the dict."
                )
        return weights

    def run(self, weights, x, *, train, key, mask):
        """Return the output of `function`; statistics stay as they are if it does not name them."""
        given = accepted(self.function, dict(stats=weights.stats, train=train, key=key, mask=mask))
        found = self.function(weights.params, x, **given)
        y, stats = found if isinstance(found, tuple) and len(found) == 2 else (found, weights.stats)
        if isinstance(found, tuple) != ("stats" in given) or not hasattr(y, "shape"):
            wanted = (
                "a pair (y, stats), as it has a parameter stats" if "stats" in given else "an array alone"
            )
            what = "an array" if hasattr(found, "shape") else f"a {type(found).__name__}"
            raise JaxflError(f"{line_of(self.function)}: apply returns {what}; return {wanted}.")
        return y, stats


def from_functions(
    name: str, blocks: Mapping[str, tuple[Callable, Callable]], shape: tuple[int, ...], classes: int
) -> Model:
    """Make a model of plain functions: a pair (init, apply) for each block, in order; the last is the head.

    ``init(key, x) -> params`` draws a dict (of dicts) of arrays by name for inputs like x (1, ...), and
    ``apply(params, x) -> y`` maps a batch of them. An apply with a parameter ``train`` (bool), ``key`` (for
    dropout; None in evaluation) or ``mask`` ((B,) bool, the real rows of a padded batch; None: all) gets it.
    One with a parameter ``stats`` gets statistics and returns them as well, ``(y, stats)``; then init returns
    ``jaxfl.models.Weights(params, stats)``.

    Args:
      name: name of the architecture.
      blocks: {name: (init, apply)}.
      shape: (H, W, C) of an image.
      classes: number of outputs of the last block.

    Raises:
      JaxflError: if there is no block, or a function cannot be called like this, naming its file and line.
    """
    pairs = list(blocks.values()) if isinstance(blocks, Mapping) else []
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise JaxflError(
            f"The blocks of {name} are {blocks!r}; give from_functions a dict of pairs (init, apply) by name."
        )
    for init, function in pairs:
        require_call("init", init, "key", "x")
        require_call("apply", function, "params", "x", **accepted(function, dict.fromkeys(GIVEN)))
    found = tuple(Block(block, Functions(*pair)) for block, pair in blocks.items())
    return Model(name, found, tuple(shape), classes, tokens=are_tokens(shape))


def accepted(function: Callable, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the offered arguments for which a function has parameters."""
    return {name: offered[name] for name in inspect.signature(function).parameters if name in offered}


def _is_float(leaf: Any) -> bool:
    """Return whether a leaf is an array of real numbers, which can be trained and averaged."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _form(tree: Any) -> str:
    return "entries that are not all arrays by name" if isinstance(tree, dict) else f"a {type(tree).__name__}"
