"""Initial weights without a generator of random numbers in the compiled program for every leaf.

XLA compiles a loop for each array of random bits and for each derived key, one by one. That is most of the
compilation of a network's initial weights, one to three CPU seconds. So keys are derived and bits are drawn
outside, by small programs that serve all networks, and the program that makes weights takes the bits as
arguments. The numbers are those of ``jax.jit(model.init)(key)``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.extend.random import threefry_2x32
from jax.interpreters import partial_eval

from jaxfl.models.model import Model, Weights

PIECES = 2_048, 65_536  # random numbers that one call draws, of small arrays and of others


def drawn(model: Model, key: jax.Array) -> Weights:
    """Return ``model.init(key)``."""
    if isinstance(key, Tracer):  # within a larger program
        return model.init(key)
    draws, weights = _parts(model, jnp.result_type(float))
    return weights(key, draws(key))


@functools.cache
def _parts(model: Model, dtype: jnp.dtype) -> tuple[Callable, Callable]:
    """Return the two parts of `init` for a default float dtype: ``key -> bits``, ``(key, bits) -> weights``.

    What a loop, a condition or a map over keys draws is left in the second one, which gets the key for it.
    """
    closed, form = jax.make_jaxpr(model.init, return_shape=True)(jax.random.key(0))
    used = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)  # init also runs the network

    def draws(key):
        found = []

        def draw(key, shape):
            found.append(functools.cache(lambda: _bits(key(), shape)))
            return found[-1]

        _lazily(jaxpr, closed.consts, [_known(key)], draw)
        return [bits() for bits in found]

    @jax.jit
    def weights(key, bits):
        given = iter(bits)
        leaves = _lazily(jaxpr, closed.consts, [_known(key)], lambda *_: _known(next(given)))
        return jax.tree.unflatten(jax.tree.structure(form), [leaf() for leaf in leaves])

    return draws, weights


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array | np.ndarray:
    """Return ``jax.random.bits(key, shape, uint32)``: JAX's usual generator draws them piece by piece."""
    by_place = getattr(jax.config, "jax_threefry_partitionable", True)
    if not by_place or jax.random.key_impl(key) != "threefry2x32":
        return jax.random.bits(key, shape, jnp.uint32)
    size, data = int(np.prod(shape)), jax.random.key_data(key)
    length = PIECES[size > 8 * PIECES[0]]
    pieces = [np.asarray(_piece(data, np.uint32(i), length)) for i in range(0, max(size, 1), length)]
    return np.concatenate(pieces)[:size].reshape(shape)


@functools.partial(jax.jit, static_argnums=2)
def _piece(key_data: jax.Array, first: jax.Array, length: int) -> jax.Array:
    """Return `length` numbers of an array from the `first` on: each one's place, enciphered with the key."""
    places = first + jnp.arange(length, dtype=jnp.uint32)
    one, other = threefry_2x32(key_data, jnp.stack([jnp.zeros_like(places), places]))
    return one ^ other


def _lazily(jaxpr: core.Jaxpr, consts: Sequence, given: Sequence[Callable], draw: Callable) -> list[Callable]:
    """Return for each result of a program a function that computes it.

    Args:
      jaxpr: the program.
      consts: its constants.
      given: a function for each of its arguments.
      draw: ``(function, shape) -> function`` of the key and of the bits, called for each draw in their order.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_known, consts), *given], strict=True))

    def value(variable) -> Callable:
        return _known(variable.val) if isinstance(variable, core.Literal) else values[variable]

    for equation in jaxpr.eqns:
        found = _results(equation, [*map(value, equation.invars)], draw)
        values |= zip(equation.outvars, found, strict=True)
    return [*map(value, jaxpr.outvars)]


def _results(equation: core.JaxprEqn, given: Sequence[Callable], draw: Callable) -> Sequence[Callable]:
    name, params = equation.primitive.name, equation.params
    if name == "jit":
        return _lazily(params["jaxpr"].jaxpr, params["jaxpr"].consts, given, draw)
    if name == "random_bits":
        made: Any = equation.outvars[0].aval
        if made.dtype == jnp.uint32 and made.shape == params["shape"]:  # with one key, not one for each entry
            return [draw(given[0], params["shape"])]

    @functools.cache
    def computed():
        inputs, bind = [one() for one in given], equation.primitive.get_bind_params(params)
        found = equation.primitive.bind(*inputs, **bind)
        return found if equation.primitive.multiple_results else [found]

    return [lambda place=place: computed()[place] for place in range(len(equation.outvars))]


def _known(value: Any) -> Callable:
    return lambda: value
