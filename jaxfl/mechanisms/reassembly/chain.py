"""Assembled networks as chains of parts: clients' blocks, and stitching layers between them.

A chain is not compiled as a whole. Every block and stitching layer has separate programs: for its output, for
the output with what the gradient needs, and for the gradient. They are compiled once per shape and shared by
all chains of a run.
"""

import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxfl.core.programs import Program
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


class CompiledParts:
    """A cache of the programs of all parts that a run has met, for several threads.

    Attributes:
      compilations: number of compiled programs.
      seconds: time spent compiling.
    """

    def __init__(self):
        self._programs = {}
        self._adding = threading.Lock()

    @property
    def compilations(self) -> int:
        """The number of compiled programs."""
        return sum(program.compilations for program in self._programs.values())

    @property
    def seconds(self) -> float:
        """The seconds spent compiling."""
        return sum(program.seconds for program in self._programs.values())

    def program(self, make: Callable[..., Callable], *of, donate: tuple[int, ...] = ()) -> Program:
        """Return the program of ``make(*of)``; functions are distinguished by `make` and its arguments.

        Args:
          make: makes the function.
          *of: arguments of `make`.
          donate: numbers of the arguments whose memory the output may reuse; the same in every call.
        """
        with self._adding:
            if (make, *of) not in self._programs:
                self._programs[make, *of] = Program(make(*of), donate)
            return self._programs[make, *of]

    def forward(self, part: Part, x, learns: bool = False, key=None) -> tuple[jax.Array, Any, dict]:
        """Compute a part's output.

        Args:
          part: the part, in training mode if it learns, otherwise in evaluation mode.
          x: a batch of its inputs.
          learns: whether a gradient with respect to its parameters will follow.
          key: for dropout if it learns: the batch's key, and the place in the chain.

        Returns:
          The output, what `backward` takes, and the statistics afterwards.
        """
        if is_stitch(part):  # the same in both modes: one program
            learns, key = True, None
        program = self.program(_forward, part.layer, learns)
        return program.counted(part.weights, x, key if learns else None)

    def backward(self, part: Part, x, saved, dy) -> dict[str, Any]:
        """Return the gradients with respect to the input "x" and, if the part learns, to its "params"."""
        return self.program(_backward).counted(saved, (part.weights, x), dy)


def run(parts: CompiledParts, chain: Chain, x) -> jax.Array:
    """Return a chain's output for a batch, in evaluation mode."""
    for part in chain:
        x, *_ = parts.forward(part, x)
    return x


def run_all(parts: CompiledParts, chain: Chain, x, batch_size: int) -> np.ndarray:
    """Return a chain's output (n, ...) in evaluation mode for any number of rows, in batches of one shape."""
    x, batch_size = np.asarray(x), min(batch_size, len(x))
    places = np.resize(np.arange(len(x)), -(-len(x) // batch_size) * batch_size).reshape(-1, batch_size)
    outputs = [run(parts, chain, x[of_batch]) for of_batch in places]
    return np.concatenate(outputs)[: len(x)]


def gradients(
    parts: CompiledParts, chain: Chain, x, target, loss: Callable, places: Collection[int], key
) -> dict[int, tuple[dict, dict]]:
    """Return the gradients of a loss with respect to the parameters of some parts.

    Args:
      parts: the programs.
      chain: the network.
      x: a batch.
      target: what the loss compares logits with.
      loss: ``(logits, target) -> ()``.
      places: places of these parts, which are in training mode, all others in evaluation mode.
      key: for dropout in them.

    Returns:
      By place, the gradient and BatchNorm's statistics afterwards.
    """
    first, passed, found = min(places), [], {}
    x = run(parts, chain[:first], x)  # nothing learns before the first of them
    for place, part in enumerate(chain[first:], first):
        y, saved, stats = parts.forward(part, x, place in places, (key, place))
        passed.append((place, part, x, saved, stats))
        x = y
    dy = parts.program(jax.grad, loss).counted(x, target)
    for place, part, x, saved, stats in reversed(passed):
        gradient = parts.backward(part, x, saved, dy)
        dy = gradient["x"]
        if place in places:
            found[place] = gradient["params"], stats
    return found


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
    """Train some parts of a chain by Adam; the others keep their weights to the bit.

    Args:
      parts: the programs.
      chain: the network.
      batches: pairs (batch, target); none is drawn if no part trains.
      loss: ``(logits, target) -> ()``, the mean over the batch.
      lr: learning rate.
      trains: which parts train: `is_stitch`, or any other predicate.
      key: for dropout in the blocks that train.

    Raises:
      JaxflError: if a block is to train that needs two rows, see `jaxfl.models.norms`, on batches of one.
    """
    places = [place for place, part in enumerate(chain) if trains(part)]
    if not places:
        return chain
    learning = [chain[place].layer for place in places]
    need_two = any(isinstance(layer, Model) and layer.needing_two_rows for layer in learning)
    opt_state = {place: optax.adam(lr).init(chain[place].weights.params) for place in places}
    # Part by part, so compiled once per shape. Stitches may be large: gradients and old states are donated.
    update = parts.program(_update, donate=(2, 3))
    trained = list(chain)
    for number, (x, target) in enumerate(batches):
        if need_two and len(x) == 1:
            raise JaxflError(
                "The server trains blocks with BatchNorm, which needs batches of two images or more; raise "
                "--server-batch, or take more public images."
            )
        of_batch = jax.random.fold_in(key, number)
        found = gradients(parts, tuple(trained), x, target, loss, places, of_batch)
        for place, (gradient, stats) in found.items():
            layer, weights = trained[place]
            params, opt_state[place] = update(lr, weights.params, opt_state[place], gradient)
            trained[place] = Part(layer, Weights(params, stats))
    return tuple(trained)


def _update():
    def update(lr, params, opt_state, gradient):
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
            step, opt_state = optax.adam(lr).update(gradient, opt_state)
        return optax.apply_updates(params, step), opt_state

    return update


def _forward(layer: Model | Stitch, learns: bool) -> Callable:
    def forward(weights, x, key):
        def output(wanted):
            params, x = wanted.get("params", weights.params), wanted["x"]
            if isinstance(layer, Stitch):
                return stitching.apply(layer, params, x), weights.stats
            of_part = jax.random.fold_in(*key) if learns else None
            return layer.apply(params, weights.stats, x, train=learns, key=of_part)

        wanted = {"x": x, "params": weights.params} if learns else {"x": x}
        y, back, stats = jax.vjp(output, wanted, has_aux=True)
        return y, _without(back, (weights, x)), stats

    return forward


def _without(back: Callable, given) -> jax.tree_util.Partial:
    """Return ``(given, dy) -> gradients``, as ``back(dy)``, without copies of the arrays of `given`."""
    known, (leaves, structure) = jax.tree.leaves(given), jax.tree.flatten(back)
    places = [next((i for i, array in enumerate(known) if array is leaf), None) for leaf in leaves]

    def restored(own, given, dy):
        own, known = iter(own), jax.tree.leaves(given)
        leaves = [next(own) if place is None else known[place] for place in places]
        return jax.tree.unflatten(structure, leaves)(dy)[0]

    own = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
    return jax.tree_util.Partial(restored, own)


def _backward():
    return lambda saved, given, dy: saved(given, dy)
