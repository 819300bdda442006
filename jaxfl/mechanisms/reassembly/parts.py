"""Assembled networks as chains of parts: clients' blocks, and stitching layers between them.

A chain is not compiled as a whole. JAX compiles each part, and its gradient, once per shape for all chains of
a process. The gradient of a chain is traced once, and then runs part by part.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun

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


@partial(jax.jit, static_argnums=0)
def applied(layer: Model | Stitch, params, stats, x, dropout=None) -> tuple[jax.Array, dict]:
    """Return a part's output for a batch, and its statistics afterwards.

    Args:
      layer: the part without its weights.
      params: its parameters.
      stats: its statistics.
      x: a batch of its inputs.
      dropout: for a block in training mode, the batch's key and the place in the chain.
    """
    if isinstance(layer, Stitch):
        return stitching.apply(layer, params, x), stats
    key = jax.random.fold_in(*dropout) if dropout else None
    return layer.apply(params, stats, x, train=bool(dropout), key=key)


def run(chain: Chain, x) -> jax.Array:
    """Return a chain's output for a batch, in evaluation mode."""
    stitches = {place: part.weights.params for place, part in enumerate(chain) if is_stitch(part)}
    # As before a gradient, so that no part has a third program.
    y, *_ = jax.vjp(partial(_outputs, chain, {}, None), stitches, x, has_aux=True)
    return y


def run_all(chain: Chain, x, batch_size: int) -> np.ndarray:
    """Return a chain's output (n, ...) in evaluation mode for any number of rows, in batches of one shape."""
    x, batch_size = np.asarray(x), min(batch_size, len(x))
    places = np.resize(np.arange(len(x)), -(-len(x) // batch_size) * batch_size).reshape(-1, batch_size)
    through = in_parts(partial(run, chain))
    return np.concatenate([through(x[of_batch]) for of_batch in places])[: len(x)]


def gradient(chain: Chain, loss: Callable, params: dict, stats: dict, x, target, key) -> tuple[tuple, dict]:
    """Return the gradient of a loss with respect to the parameters of some parts.

    Args:
      chain: the network.
      loss: ``(logits, target) -> ()``, jitted.
      params: by place, parameters of these parts. They are in training mode, all others in evaluation mode.
      stats: by place, their statistics.
      x: a batch.
      target: what the loss compares logits with.
      key: for dropout in them.

    Returns:
      The gradient with respect to `params` and to the first one's input, and the statistics afterwards.
    """
    first = min(params)

    def value(params, x):
        logits, after = _outputs(chain[first:], stats, key, params, x, first)
        return loss(logits, target), after

    # With respect to the input as well, so that the first part has the same programs as the others.
    return jax.grad(value, (0, 1), has_aux=True)(params, run(chain[:first], x))


def _outputs(chain: Chain, stats: dict, key, params: dict, x, first: int = 0) -> tuple[jax.Array, dict]:
    """Return the output of parts at places from `first` on, and new statistics of those that learn."""
    after = {}
    for place, (layer, weights) in enumerate(chain, first):
        own = params.get(place, weights.params), stats.get(place, weights.stats)
        learns = place in stats and not isinstance(layer, Stitch)  # a stitch is the same in both modes
        x, after[place] = applied(layer, *own, x, (key, place) if learns else None)
    return x, {place: after[place] for place in stats}


def in_parts(function: Callable) -> Callable:
    """Return a function of jitted parts, traced in its first call for these shapes; every call is counted."""
    parts = operations = structure = None

    def counted(*args):
        nonlocal parts, operations, structure
        if parts is None:
            traced, form = jax.make_jaxpr(function, return_shape=True)(*args)
            parts, structure = jaxpr_as_fun(traced), jax.tree.structure(form)
            operations = flops.of_traced(traced.jaxpr)
        flops.add(operations)
        return jax.tree.unflatten(structure, parts(*jax.tree.leaves(args)))

    return counted


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
    learning = {place: part for place, part in enumerate(chain) if trains(part)}
    if not learning:
        return chain
    blocks = [part.layer for part in learning.values() if not is_stitch(part)]
    need_two = any(block.needing_two_rows for block in blocks)
    params, stats = ({place: part.weights[i] for place, part in learning.items()} for i in range(2))
    opt_state = {place: optax.adam(lr).init(own) for place, own in params.items()}
    step = in_parts(partial(gradient, chain, loss))
    for number, (x, target) in enumerate(batches):
        if need_two and len(x) == 1:
            raise JaxflError(
                "The server trains blocks with BatchNorm, which needs batches of two images or more; raise "
                "--server-batch, or take more public images."
            )
        (slope, _), stats = step(params, stats, x, target, jax.random.fold_in(key, number))
        for place in learning:  # part by part, so compiled once per shape
            params[place], opt_state[place] = _adam(lr, params[place], opt_state[place], slope[place])
    for place, (layer, _) in learning.items():
        learning[place] = Part(layer, Weights(params[place], stats[place]))
    return tuple(learning.get(place, part) for place, part in enumerate(chain))


@partial(jax.jit, donate_argnums=(2, 3))  # stitches may be large
def _adam(lr, params, opt_state, slope):
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        step, opt_state = optax.adam(lr).update(slope, opt_state)
    return optax.apply_updates(params, step), opt_state
