"""Assembled networks as chains of parts: clients' blocks, and stitching layers between them.

A chain is not compiled as a whole. JAX compiles each part, and its gradient, once per shape for all chains of
a process. The gradient of a chain is traced once, and then runs part by part.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.stages import Wrapped

from jaxfl.core import flops
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.reassembly import stitching
from jaxfl.mechanisms.reassembly.stitching import Stitch
from jaxfl.models.model import Model, Weights


class Part(NamedTuple):
    """A block of a client's model or a stitching layer, with its weights; a stitch has no statistics.

    It equals only itself, as weights are not compared: a part that has learnt is another part.
    """

    layer: Model | Stitch
    weights: Weights

    __eq__ = object.__eq__
    __hash__ = object.__hash__


Chain = tuple[Part, ...]


def is_stitch(part: Part) -> bool:
    """Return whether a part is a stitching layer, for `train`."""
    return isinstance(part.layer, Stitch)


def every_part(part: Part) -> bool:
    """Return True for every part, for `train`."""
    return True


def output_shape(layer: Model | Stitch) -> tuple[int, ...]:
    """Return the shape of a part's output for one example."""
    return layer.target if isinstance(layer, Stitch) else layer.output


def counted(function: Wrapped, *args) -> Any:
    """Run a jitted function and add its operations to `jaxfl.core.flops`."""
    flops.add(_operations(function.trace(*args).jaxpr))
    return function(*args)


def in_parts(function: Wrapped, *static) -> Callable:
    """Return a function that runs part by part: the jitted functions that it calls, and not it, are compiled.

    The function is jitted only because JAX then remembers its traces; its first arguments are static. What is
    returned takes the others, of one shape in all calls; their operations are counted as by `counted`.
    """
    traced = None

    def in_turn(*args):
        nonlocal traced
        traced = traced or function.trace(*static, *args)
        flops.add(_operations(traced.jaxpr))
        outputs = jaxpr_as_fun(traced.jaxpr)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), outputs)

    return in_turn


@lru_cache(maxsize=4096)
def _operations(traced: ClosedJaxpr) -> int:
    return flops.of_traced(traced.jaxpr)


def run_all(chain: Chain, x, batch_size: int) -> np.ndarray:
    """Return a chain's output (n, ...) in evaluation mode for any number of rows, in batches of one shape."""
    x, batch_size = np.asarray(x), min(batch_size, len(x))
    places = np.resize(np.arange(len(x)), -(-len(x) // batch_size) * batch_size).reshape(-1, batch_size)
    through, weights = in_parts(output, tuple(part.layer for part in chain)), [part.weights for part in chain]
    return np.concatenate([through(weights, x[of_batch]) for of_batch in places])[: len(x)]


@partial(jax.jit, static_argnums=0, inline=True)
def output(layers, weights, x) -> jax.Array:
    """Return the output of all parts in evaluation mode, for `in_parts`."""
    stitches = {i: weights[i].params for i, layer in enumerate(layers) if isinstance(layer, Stitch)}
    # As before a gradient, so that no part has a third program.
    y, *_ = jax.vjp(partial(_through, layers, weights, (), None, 0), stitches, x, has_aux=True)
    return y


@partial(jax.jit, static_argnums=(0, 1, 2))
def gradient(layers, loss, places, weights, x, target, key) -> tuple[tuple[dict, jax.Array], dict]:
    """Return the gradient of a loss with respect to the parameters of some parts, for `in_parts`.

    Args:
      layers: all parts.
      loss: ``(logits, target) -> ()``, jitted.
      places: of the parts that learn, ascending. They are in training mode, the others in evaluation mode.
      weights: of all parts.
      x: a batch.
      target: what the loss compares logits with.
      key: for dropout in the parts that learn.

    Returns:
      The gradient by place and that of the first one's input; the statistics afterwards by place.
    """
    first = places[0]

    def value(params, x):
        logits, stats = _through(layers, weights, places, key, first, params, x)
        return loss(logits, target), stats

    params = {place: weights[place].params for place in places}
    # With respect to the input as well, so that the first part has the same programs as the others.
    return jax.grad(value, (0, 1), has_aux=True)(params, output(layers[:first], weights[:first], x))


def _through(layers, weights, places, key, first, params, x) -> tuple[jax.Array, dict]:
    """Return the output of the parts from `first` on, some with other parameters, and new statistics."""
    stats = {}
    for place, layer in enumerate(layers[first:], first):
        own = Weights(params.get(place, weights[place].params), weights[place].stats)
        in_training = place in places and not isinstance(layer, Stitch)  # a stitch is the same in both modes
        x, new = _output_of_part(layer, own, x, (key, place) if in_training else None)
        if place in places:
            stats[place] = new
    return x, stats


@partial(jax.jit, static_argnums=0)
def _output_of_part(layer: Model | Stitch, weights: Weights, x, dropout) -> tuple[jax.Array, dict]:
    """Return a part's output and new statistics; `dropout` is a key and a place, in training mode."""
    if isinstance(layer, Stitch):
        return stitching.apply(layer, weights.params, x), weights.stats
    key = jax.random.fold_in(*dropout) if dropout else None
    return layer.apply(*weights, x, train=dropout is not None, key=key)


def train(
    chain: Chain, batches: Iterable, loss: Callable, lr, *, trains: Callable[[Part], bool], key
) -> Chain:
    """Train some parts of a chain by Adam; the others keep their weights to the bit.

    Args:
      chain: the network.
      batches: pairs (batch, target) of one shape; none is drawn if no part trains.
      loss: ``(logits, target) -> ()``, the mean over the batch, jitted.
      lr: learning rate.
      trains: which parts train: `is_stitch`, or any other predicate.
      key: for dropout in the blocks that train.

    Raises:
      JaxflError: if a block is to train that needs two rows, see `jaxfl.models.norms`, on batches of one.
    """
    places = tuple(place for place, part in enumerate(chain) if trains(part))
    if not places:
        return chain
    layers, weights = tuple(part.layer for part in chain), [part.weights for part in chain]
    learning = [layers[place] for place in places]
    need_two = any(isinstance(layer, Model) and layer.needing_two_rows for layer in learning)
    opt_state = {place: optax.adam(lr).init(weights[place].params) for place in places}
    step = in_parts(gradient, layers, loss, places)
    for number, (x, target) in enumerate(batches):
        if need_two and len(x) == 1:
            raise JaxflError(
                "The server trains blocks with BatchNorm, which needs batches of two images or more; raise "
                "--server-batch, or take more public images."
            )
        (slope, _), stats = step(weights, x, target, jax.random.fold_in(key, number))
        for place in places:  # part by part, so compiled once per shape
            params, opt_state[place] = _adam(lr, weights[place].params, opt_state[place], slope[place])
            weights[place] = Weights(params, stats[place])
    trained = {place: Part(layers[place], weights[place]) for place in places}
    return tuple(trained.get(place, part) for place, part in enumerate(chain))


@partial(jax.jit, donate_argnums=(2, 3))  # stitches may be large
def _adam(lr, params, opt_state, slope):
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        step, opt_state = optax.adam(lr).update(slope, opt_state)
    return optax.apply_updates(params, step), opt_state
