"""Floating-point operations of training: counted on the traced program, added up per client and round.

While a program is traced, the loops of local training report their operations with `add`, and an enclosing
`collect` gathers them. So methods need not count. The sum is an output of the program, which knows how many
rows each client really had.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import partial_eval

from jaxfl.data.federation import PerGroup

_amounts: ContextVar[list[tuple] | None] = ContextVar("amounts", default=None)
_noisy_steps: ContextVar[bool] = ContextVar("noisy steps", default=False)


class Operations(NamedTuple):
    """Floating-point operations of a round."""

    clients: PerGroup  # per group (n_g,) float, of the group's clients
    server: Any  # () float, of the computation outside the client map

    @property
    def total(self) -> float:
        """The sum over clients and server, where the leaves are NumPy arrays."""
        return float(sum(of_group.sum() for of_group in self.clients) + self.server)


def of(f: Callable, *args) -> int:
    """Count the operations of one call: 2 per multiply-add of every matrix product and convolution in it.

    Only shapes are used; nothing runs. A loop counts as often as it runs, or once if that depends on data. Of
    several branches the most expensive counts. Products with padding count, elementwise operations do not.

    Args:
      f: function of `args`.
      *args: arrays, or anything with their shapes and dtypes.
    """
    return of_traced(jax.make_jaxpr(f)(*args).jaxpr)


def of_traced(jaxpr: core.Jaxpr) -> int:
    """Count the operations of a traced call, see `of`."""
    # A hand-written backward pass traces unused gradients; the compiler drops them, and so do we.
    needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return _of_jaxpr(needed)


def _of_jaxpr(jaxpr: core.Jaxpr) -> int:
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(equation: core.JaxprEqn) -> int:
    parts = map(_of_jaxpr, core.jaxprs_in_params(equation.params))
    operands: list[Any] = [operand.aval for operand in equation.invars]  # arrays, for the primitives below
    match equation.primitive.name:
        case "dot_general":
            left, (contracted, _) = operands[0], equation.params["dimension_numbers"][0]
            return 2 * math.prod((*_shape(equation), *(left.shape[axis] for axis in contracted)))
        case "conv_general_dilated":
            return 2 * _products(equation, *operands[:2])
        case "scan":
            return equation.params["length"] * sum(parts)
        case "cond":
            return max(parts)
    return sum(parts)


def _products(equation: core.JaxprEqn, x, kernel) -> int:
    """Return the number of products of a convolution, forward or backward.

    Both gradients have as many as the forward pass. JAX writes the one for the input as a convolution of the
    output's gradient, padded with zeros to the size of the input: products with the padding do not count, so
    the pixels are those of the smaller map. The one for the kernel, whose batch is not on the first axis, has
    no such padding, but that of a transposed convolution has zeros between pixels.
    """
    numbers, shape = equation.params["dimension_numbers"], _shape(equation)
    before, after = ([x.shape[axis] for axis in numbers.lhs_spec], [shape[axis] for axis in numbers.out_spec])
    pixels = map(min, before[2:], after[2:]) if numbers.lhs_spec[0] == 0 else after[2:]
    of_pixel = kernel.size // kernel.shape[numbers.rhs_spec[0]]
    between = math.prod(equation.params["lhs_dilation"]) if numbers.lhs_spec[0] else 1
    return math.prod(after[:2]) * math.prod(pixels) * of_pixel // between


def _shape(equation: core.JaxprEqn) -> tuple[int, ...]:
    aval: Any = equation.outvars[0].aval
    return aval.shape


@contextlib.contextmanager
def collect() -> Iterator[list[tuple]]:
    """Collect what is added inside, as pairs (group or None, amount); an outer collector sees none of it."""
    amounts = []
    token = _amounts.set(amounts)
    try:
        yield amounts
    finally:
        _amounts.reset(token)


def add(amount, noisy_steps: Any = 0) -> None:
    """Report operations to the innermost collector; without one, nothing happens.

    Args:
      amount: (), a traced value of the program that the collector encloses, whose loops and branches are
        those of `jaxfl.core.loops`. Between programs, in a host step, a number.
      noisy_steps: how many steps with noise on single rows' gradients they are part of.
    """
    pass_on(jnp.asarray(noisy_steps).astype(float) if _noisy_steps.get() else amount)


@contextlib.contextmanager
def noisy_steps_instead() -> Iterator[None]:
    """Count noisy steps inside, in place of operations."""
    token = _noisy_steps.set(True)
    try:
        yield
    finally:
        _noisy_steps.reset(token)


def pass_on(amount, group: int | None = None) -> None:
    """Report to the innermost collector what another one has collected.

    Args:
      amount: (), or (n_g,) for the clients of a group.
      group: number of the clients' group, if known.
    """
    amounts = _amounts.get()
    if amounts is not None:
        amounts.append((group, amount))


def on_host(f: Callable, *args) -> tuple[Any, float]:
    """Return what a function between programs returns, and the operations added in it as numbers."""
    with collect() as amounts:
        outputs = f(*args)
    # A program traced meanwhile has added traced values, which mean nothing outside it.
    # In double precision, so that threads may add in any order.
    numbers = [np.asarray(amount, np.float64) for _, amount in amounts if not isinstance(amount, Tracer)]
    return outputs, float(sum(number.sum() for number in numbers))


@contextlib.contextmanager
def on_server() -> Iterator[None]:
    """Count what is added inside for the server, whichever clients' networks run."""
    with collect() as amounts:
        yield
    for _, amount in amounts:
        pass_on(jnp.sum(amount))


def with_operations(f: Callable) -> Callable:
    """Return a function that returns ``(f(...), () float)``: the outputs and the operations added in `f`."""

    def counted(*args):
        with collect() as amounts:
            outputs = f(*args)
        return outputs, _sum(amount for _, amount in amounts)

    return counted


def by_owner(amounts: list[tuple], clients: Sequence[int]) -> Operations:
    """Sum the collected operations for the clients of each group, given their numbers, and the server."""

    def owned(owner, shape):
        return _sum((amount for whose, amount in amounts if whose == owner), shape)

    return Operations(tuple(owned(g, (n,)) for g, n in enumerate(clients)), owned(None, ()))


def _sum(amounts, shape: tuple[int, ...] = ()) -> jax.Array:
    return sum(amounts, start=jnp.zeros(shape, float))
