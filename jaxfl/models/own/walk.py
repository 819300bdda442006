"""A network written as one module, and one call of it, watched or from one of its layers to another.

The libraries differ in how they call their layers: `linen`, `nnx` and `equinox` each have a `Network`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxfl.config.own_code import line_of
from jaxfl.errors import JaxflError
from jaxfl.models.model import Weights, are_tokens, input_dtype

Path = tuple[str, ...]  # of a leaf: layer, ..., name
EXAMPLES = 13  # batch of the watched network: an axis of this length is the batch of a layer's input


class Network:
    """A module of some library; hashable. Its weights are flat here: {path: leaf}."""

    kind: Any  # class of the module
    shape: tuple[int, ...]  # (H, W, C) of an image, or (T,) of tokens
    batched = True  # whether the module is called with a batch, not with one example
    draw: Callable[[jax.Array], Weights]  # draws initial weights by a key
    given: Callable[..., Weights]  # the flat weights of a network trained elsewhere, in its library's form
    run: Callable[..., tuple]  # ``(weights, x, walk, *, train, key, mask)``, its output and all statistics

    def inward(self, x: jax.Array) -> jax.Array:
        """Convert maps (B, H, W, C), or any other array, to the module's form."""
        return x

    def outward(self, y: jax.Array) -> jax.Array:
        """Invert `inward`."""
        return y


class _End(Exception):
    """The end of a walk, with the value that is passed on there."""


@dataclasses.dataclass(frozen=True)
class Walk:
    """One call of a module, from the input of one of its layers to that of another."""

    start: int | None = None  # number of the layer call where it starts; None is the module's own input
    stop: int | None = None  # number of the layer call where it ends; None is the module's own output
    z: Any = None  # input of the layer at the start
    before: Sequence[Any] = ()  # outputs of the calls before the start
    told: Callable[[str, Any, Any, Any], None] | None = None
    """Gets ``(layer, module, input, output)`` of every call."""
    with_outputs: bool = False  # whether the value comes in a pair, with the arrays that the calls returned

    def through(self, forward: Callable[[Callable], Any]) -> Any:
        """Return the value at the walk's end.

        Args:
          forward: calls the module; it is given ``called(layer, module, input, call)``, which replaces every
            call of a layer.
        """
        number, inside, level, outputs = itertools.count(), False, _level(), []

        def called(layer: str, module: Any, value: Any, call: Callable) -> Any:
            nonlocal inside
            if inside or _level() != level:  # within a layer, or a loop: nothing can begin there
                return call(value)
            i = next(number)
            if i == self.stop:
                raise _End(value)
            if self.start is not None and i < self.start:
                return self.before[i]
            inside = True
            y = call(self.z if i == self.start else value)
            inside = False
            outputs.extend(leaf for leaf in jax.tree.leaves(y) if isinstance(leaf, jax.Array))
            if self.told:
                self.told(layer, module, value, y)
            return y

        try:
            value = forward(called)
        except _End as end:
            value = end.args[0]
        return (value, outputs) if self.with_outputs else value


def _level():
    """Return the transformation in which a program is traced."""
    return core.get_opaque_trace_state(convention="flax")


class Call(NamedTuple):
    """A call of a layer."""

    layer: str  # name of the layer
    kind: str  # name of its class
    input: Any  # shape and dtype of its input; None where that is not one array
    output: Any  # shapes and dtypes of its output


@functools.cache
def calls(network: Network, examples: int = EXAMPLES, train: bool = False) -> tuple[Call, ...]:
    """Return all calls of a module's layers, in order, on a batch of this many examples."""
    found, key = [], jax.random.key(0) if train else None

    def told(layer, module, value, y):
        whole = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)
        whole = whole and (not network.batched or value.shape[:1] == (examples,))
        y = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), y)
        taken = jax.ShapeDtypeStruct(value.shape, value.dtype) if whole else None
        found.append(Call(layer, type(module).__name__, taken, y))

    y, _ = jax.eval_shape(
        lambda weights, x: network.run(weights, x, Walk(told=told), train=train, key=key, mask=None),
        leaves(network),
        images(network, examples),
    )
    if not hasattr(y, "shape"):
        raise JaxflError(f"{line_of(network.kind)}: it returns a {type(y).__name__}, not an array of floats.")
    return tuple(found)


@functools.partial(jax.jit, static_argnums=0)
def drawn(network: Network, key: jax.Array) -> Weights:
    """Return a network's initial weights; traced once, although every block draws the whole network."""
    return network.draw(key)


@functools.cache
def leaves(network: Network) -> Weights:
    """Return shapes and dtypes of a network's weights."""
    return jax.eval_shape(functools.partial(drawn, network), jax.random.key(0))


def batched(example: jax.ShapeDtypeStruct, examples: int = EXAMPLES) -> jax.ShapeDtypeStruct:
    """Return the form of this many examples."""
    return jax.ShapeDtypeStruct((examples, *example.shape), example.dtype)


def images(network: Network, examples: int = EXAMPLES) -> jax.ShapeDtypeStruct:
    """Return the form in which a network takes this many examples of the data."""
    example = jax.ShapeDtypeStruct(tuple(network.shape), input_dtype(are_tokens(network.shape)))
    return jax.eval_shape(network.inward, batched(example, examples))


def real_rows(mask: jax.Array, x: jax.Array, where: str) -> jax.Array:
    """Return which examples of a layer's input x (B, ...) are real, as BatchNorm's `mask`: (B, 1, ...) bool.

    Raises:
      JaxflError: if the network has folded another axis into the batch, so that the examples of rows are
        unknown.
    """
    if len(x) != len(mask):
        raise JaxflError(
            f"{where}: BatchNorm is given {len(x)} rows for a batch of {len(mask)}; give it (B, ..., C); it "
            "takes the mean over all axes except the last."
        )
    return mask.reshape(-1, *(1,) * (x.ndim - 1))
