"""Assembled networks as chains of parts: frozen blocks, and stitching layers that learn.

An assembly is not compiled. Its parts are: forward and backward of every block and stitching layer are
programs of their own, compiled once per shape and shared by all assemblies of a run.
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import optax

from jaxfl.core.programs import Program
from jaxfl.mechanisms.reassembly.stitching import Stitch, apply
from jaxfl.models.model import Model, Weights


class Frozen(NamedTuple):
    """A block with its weights, in evaluation mode; they never change."""

    block: Model
    weights: Weights


class Learnt(NamedTuple):
    """A stitching layer with its weights."""

    stitch: Stitch
    weights: dict


Chain = tuple[Frozen | Learnt, ...]


class Workshop:
    """The programs of all parts that a run has met.

    Attributes:
      compilations: how many were compiled, one per part and shape.
      seconds: how long that took.
    """

    def __init__(self):
        self._programs = {}

    @property
    def compilations(self) -> int:
        """How many programs were compiled."""
        return sum(program.compilations for program in self._programs.values())

    @property
    def seconds(self) -> float:
        """How long that took."""
        return sum(program.seconds for program in self._programs.values())

    def forward(self, part: Frozen | Learnt, x):
        """The output of a part."""
        return self._program("forward", part[0])(part.weights, x)

    def backward(self, part: Frozen | Learnt, x, dy):
        """Gradients with respect to a stitching layer's weights (None of a block) and to the input."""
        return self._program("backward", part[0])(part.weights, x, dy)

    def program(self, name: str, function: Callable) -> Program:
        """A program of another kind, known by its name."""
        return self._programs.setdefault(name, Program(function))

    def _program(self, direction: str, kind: Model | Stitch) -> Program:
        if (direction, kind) not in self._programs:
            self._programs[direction, kind] = Program(_FUNCTIONS[direction, type(kind)](kind))
        return self._programs[direction, kind]


def run(workshop: Workshop, chain: Chain, x) -> jax.Array:
    """Logits of a batch."""
    for part in chain:
        x = workshop.forward(part, x)
    return x


def gradients(workshop: Workshop, chain: Chain, x, loss_gradient: Callable) -> list[dict | None]:
    """Of a loss with respect to the weights of every stitching layer, None for blocks.

    Args:
      workshop: the programs.
      chain: the network.
      x: a batch.
      loss_gradient: from logits to the loss's gradient with respect to them.
    """
    first = next(place for place, part in enumerate(chain) if isinstance(part, Learnt))
    inputs = []
    for part in chain:
        inputs.append(x)
        x = workshop.forward(part, x)
    dy, found = loss_gradient(x), [None] * len(chain)
    for place in reversed(range(first, len(chain))):  # nothing learns before the first stitching layer
        found[place], dy = workshop.backward(chain[place], inputs[place], dy)
    return found


def train(workshop: Workshop, chain: Chain, batches: Iterable, loss_gradient: Callable, lr) -> Chain:
    """Adam on the stitching layers; blocks keep their weights to the bit.

    Args:
      workshop: the programs.
      chain: the network.
      batches: pairs (batch, what the loss needs beside the logits).
      loss_gradient: ``(logits, other) -> gradient``.
      lr: learning rate.
    """
    learnt = {place: part.weights for place, part in enumerate(chain) if isinstance(part, Learnt)}
    if not learnt:
        return chain
    moments = {place: optax.scale_by_adam().init(weights) for place, weights in learnt.items()}
    update = workshop.program("update", _update)  # layer by layer: compiled once per shape
    for x, other in batches:
        found = gradients(workshop, chain, x, functools.partial(loss_gradient, other=other))
        for place, weights in learnt.items():
            learnt[place], moments[place] = update(lr, weights, moments[place], found[place])
        chain = tuple(
            part._replace(weights=learnt[place]) if place in learnt else part
            for place, part in enumerate(chain)
        )
    return chain


def _update(lr, weights, moments, gradient):
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        step, moments = optax.scale_by_adam().update(gradient, moments)
    return jax.tree.map(lambda w, d: w - lr * d, weights, step), moments


def _block_forward(block: Model) -> Callable:
    return lambda weights, x: block.apply(weights.params, weights.stats, x, train=False)[0]


def _block_backward(block: Model) -> Callable:
    forward = _block_forward(block)
    return lambda weights, x, dy: (None, jax.vjp(functools.partial(forward, weights), x)[1](dy)[0])


def _stitch_forward(stitch: Stitch) -> Callable:
    return lambda weights, x: apply(stitch, weights, x)


def _stitch_backward(stitch: Stitch) -> Callable:
    return lambda weights, x, dy: jax.vjp(_stitch_forward(stitch), weights, x)[1](dy)


_FUNCTIONS = {
    ("forward", Model): _block_forward,
    ("backward", Model): _block_backward,
    ("forward", Stitch): _stitch_forward,
    ("backward", Stitch): _stitch_backward,
}
