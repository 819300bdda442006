"""Assembled networks as chains of parts: clients' blocks, and stitching layers between them.

A chain is not compiled as a whole. Its parts are: forward and backward of every block and stitching layer are
programs of their own, compiled once per shape and shared by all chains of a run.
"""

import functools
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import jax
import optax

from jaxfl.core.programs import Program
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.reassembly import stitching
from jaxfl.mechanisms.reassembly.stitching import Stitch
from jaxfl.models.model import Model, Weights


class Part(NamedTuple):
    """A block of a client's model or a stitching layer, with its weights; a stitch has no statistics."""

    layer: Model | Stitch
    weights: Weights


Chain = tuple[Part, ...]


def is_stitch(part: Part) -> bool:
    """Whether a part is a stitching layer, for `train`."""
    return isinstance(part.layer, Stitch)


class CompiledParts:
    """A cache: the programs of all parts that a run has met.

    Attributes:
      compilations: how many were compiled, one per part, direction and shape.
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

    def program(self, make: Callable[..., Callable], *of) -> Program:
        """The program of ``make(*of)``; functions are told apart by `make` and what it is called with."""
        if (make, *of) not in self._programs:
            self._programs[make, *of] = Program(make(*of))
        return self._programs[make, *of]

    def forward(self, part: Part, x):
        """The output of a part in evaluation mode."""
        return self.program(_forward, part.layer)(part.weights, x)

    def backward(self, part: Part, x, dy):
        """The gradient with respect to the input, in evaluation mode."""
        return self.program(_backward, part.layer)(part.weights, x, dy)

    def forward_training(self, part: Part, x, key) -> tuple[jax.Array, dict]:
        """The output of a part in training mode, and its statistics after it."""
        if is_stitch(part):
            return self.forward(part, x), part.weights.stats
        return self.program(_forward_training, part.layer)(part.weights, x, key)

    def backward_training(self, part: Part, x, key, dy) -> tuple[dict, jax.Array]:
        """Gradients with respect to the parameters and to the input, in training mode with the same key."""
        return self.program(_backward_training, part.layer)(part.weights, x, key, dy)


def run(parts: CompiledParts, chain: Chain, x) -> jax.Array:
    """Logits of a batch in evaluation mode."""
    for part in chain:
        x = parts.forward(part, x)
    return x


def gradients(
    parts: CompiledParts, chain: Chain, x, target, loss: Callable, places: Collection[int], key
) -> tuple[dict[int, dict], dict[int, dict]]:
    """Of a loss with respect to the parameters of some parts.

    Args:
      parts: the programs.
      chain: the network.
      x: a batch.
      target: what the loss compares logits with.
      loss: ``(logits, target) -> ()``.
      places: of the parts; these are in training mode, all others in evaluation mode.
      key: for dropout in them.

    Returns:
      By place the gradient, and by place the statistics that BatchNorm has afterwards.
    """
    inputs, keys, found, stats = [], {}, {}, {}
    for place, part in enumerate(chain):
        inputs.append(x)
        if place in places:
            keys[place] = None if is_stitch(part) else jax.random.fold_in(key, place)
            x, stats[place] = parts.forward_training(part, x, keys[place])
        else:
            x = parts.forward(part, x)
    dy = parts.program(_gradient, loss)(x, target)
    for place in reversed(range(min(places), len(chain))):  # nothing learns before the first of them
        part, x = chain[place], inputs[place]
        if place in places:
            found[place], dy = parts.backward_training(part, x, keys[place], dy)
        else:
            dy = parts.backward(part, x, dy)
    return found, stats


def train(
    parts: CompiledParts,
    chain: Chain,
    batches: Iterable,
    loss: Callable,
    lr,
    *,
    trains: Callable[[Part], bool],
    key,
) -> Chain:
    """Adam on some parts of a chain; the others keep their weights to the bit.

    Args:
      parts: the programs.
      chain: the network.
      batches: pairs (batch, target); none is drawn where no part trains.
      loss: ``(logits, target) -> ()``, the mean over the batch.
      lr: learning rate.
      trains: which parts do: `is_stitch`, or any other predicate.
      key: for dropout in the blocks that train.

    Raises:
      JaxflError: if a block with BatchNorm is to train on batches of one row.
    """
    places = [place for place, part in enumerate(chain) if trains(part)]
    if not places:
        return chain
    normalises = any(
        isinstance(layer, Model) and layer.normalised for layer, _ in map(chain.__getitem__, places)
    )
    moments = {place: optax.scale_by_adam().init(chain[place].weights.params) for place in places}
    update = parts.program(_update)  # part by part: compiled once per shape
    trained = list(chain)
    for number, (x, target) in enumerate(batches):
        if normalises and len(x) == 1:
            raise JaxflError(
                "The server trains blocks with BatchNorm, which needs batches of two images or more; raise "
                "--server-batch, or take more public images."
            )
        of_batch = jax.random.fold_in(key, number)
        found, stats = gradients(parts, tuple(trained), x, target, loss, places, of_batch)
        for place in places:
            layer, weights = trained[place]
            params, moments[place] = update(lr, weights.params, moments[place], found[place])
            trained[place] = Part(layer, Weights(params, stats[place]))
    return tuple(trained)


def _update():
    def update(lr, params, moments, gradient):
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
            step, moments = optax.scale_by_adam().update(gradient, moments)
        return jax.tree.map(lambda w, d: w - lr * d, params, step), moments

    return update


def _gradient(loss: Callable) -> Callable:
    return jax.grad(loss)


def _forward(layer: Model | Stitch) -> Callable:
    if isinstance(layer, Stitch):
        return lambda weights, x: stitching.apply(layer, weights.params, x)
    return lambda weights, x: layer.apply(weights.params, weights.stats, x, train=False)[0]


def _backward(layer: Model | Stitch) -> Callable:
    forward = _forward(layer)
    return lambda weights, x, dy: jax.vjp(functools.partial(forward, weights), x)[1](dy)[0]


def _forward_training(block: Model) -> Callable:
    return lambda weights, x, key: block.apply(weights.params, weights.stats, x, train=True, key=key)


def _backward_training(layer: Model | Stitch) -> Callable:
    def backward(weights, x, key, dy):
        def forward(params, x):
            if isinstance(layer, Stitch):
                return stitching.apply(layer, params, x)
            return layer.apply(params, weights.stats, x, train=True, key=key)[0]

        return jax.vjp(forward, weights.params, x)[1](dy)

    return backward
