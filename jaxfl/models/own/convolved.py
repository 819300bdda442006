"""The package's convolution and pooling inside networks that are written with other layers.

Such a network is traced. What it computes stays, except that convolutions and pools of images or of windows
are those of `jaxfl.models.conv`, forward and backward: equal up to rounding, and many times as fast on a CPU,
or with clients side by side. What follows them elementwise or as a sum, such as a normalisation, is computed
in the order of axes that they return. Within `jax.checkpoint` and `lax.scan` they are replaced as well;
within other control flow, and where a convolution has another form than ours, they stay XLA's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from jaxfl.models.conv import axes, axis, conv, depthwise_conv, in_use, pooled_along, to_maps


def convolved(f: Callable, *args: Any) -> Any:
    """Return ``f(*args)``, with convolutions and pools by the implementation in use."""
    if in_use() == "plain":
        return f(*args)
    closed, form = jax.make_jaxpr(f, return_shape=True)(*args)
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    results = _run(needed, closed.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(form), map(_plain, results))


def _run(jaxpr: core.Jaxpr, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))

    def value(variable):
        return variable.val if isinstance(variable, core.Literal) else values[variable]

    for equation in jaxpr.eqns:
        values |= zip(equation.outvars, _results(equation, [*map(value, equation.invars)]), strict=True)
    return [*map(value, jaxpr.outvars)]


def _results(equation: core.JaxprEqn, given: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an equation, of arrays in any order."""
    name, params = equation.primitive.name, equation.params
    order = _order(given)
    if name in LAYERS and (result := LAYERS[name](params, *given)) is not None:
        return [result]
    if name in CALLS:
        return CALLS[name](equation, *given)
    if order and name in ELEMENTWISE:
        return [Placed(_bound(equation, [_placed(one, order) for one in given]), order)]
    if order and name in REDUCTIONS:
        here = tuple(order.index(axis) for axis in params["axes"])
        left = [axis for axis in order if axis not in params["axes"]]
        places = tuple(sorted(left).index(axis) for axis in left)
        return [Placed(_bound(equation, [given[0].array], axes=here), places)]
    found = _bound(equation, [*map(_plain, given)])
    return found if equation.primitive.multiple_results else [found]


def _bound(equation: core.JaxprEqn, given: Sequence[jax.Array], **changed: Any) -> Any:
    params = equation.primitive.get_bind_params(equation.params | changed)
    return equation.primitive.bind(*given, **params)


# ---- arrays in the order of maps


class Placed(NamedTuple):
    """An array whose axes stand in another order, that of the maps of `jaxfl.models.conv`."""

    array: jax.Array  # the values, ``plain.transpose(order)``
    order: tuple[int, ...]  # the plain array's axes, in the order in which they stand here


def _placed(value: Any, order: tuple[int, ...]) -> jax.Array:
    """Return an array with its axes in some order; scalars, which suit every order, as they are."""
    if isinstance(value, Placed) and value.order == order:
        return value.array
    array = _plain(value)
    return array.transpose(order) if jnp.ndim(array) else array


def _order(values: Sequence[Any]) -> tuple[int, ...] | None:
    return next((one.order for one in values if isinstance(one, Placed)), None)


def _plain(value: Any) -> jax.Array:
    if not isinstance(value, Placed):
        return value
    return value.array.transpose([value.order.index(axis) for axis in range(len(value.order))])


# ---- layers


def _conv(params: dict[str, Any], x: Any, kernel: Any) -> Placed | None:
    """Return a convolution of images or windows; None for one of another form."""
    x, kernel = _plain(x), _plain(kernel)  # where it was a map, XLA cancels the two turns
    numbers, groups, strides = (
        params[name] for name in ("dimension_numbers", "feature_group_count", "window_strides")
    )
    dilations = {*params["lhs_dilation"], *params["rhs_dilation"]}
    batch, channels, *space = numbers.lhs_spec
    edges = params["padding"]
    depthwise = groups == x.shape[channels] == kernel.shape[numbers.rhs_spec[0]]
    if (
        len(space) not in (1, 2)
        or params["batch_group_count"] > 1
        or dilations != {1}
        or len({*strides}) > 1
        or min(map(min, edges)) < 0
        or not (groups == 1 or depthwise)
        or params["preferred_element_type"] not in (None, x.dtype)
    ):
        return None
    x = x.transpose(batch, *space, channels)
    features, inputs, *sides = numbers.rhs_spec
    kernel = kernel.transpose(*sides, inputs, features)
    if len(space) == 1:  # windows (B, T, C) are images of one row
        x, kernel, edges = x[:, None], kernel[None], [(0, 0), *edges]
    by_axis = dict(zip("HW", edges, strict=True))
    maps = jnp.pad(to_maps(x), [by_axis.get(name, (0, 0)) for name in axes()])
    apply = partial(depthwise_conv, maps, kernel[:, :, 0]) if depthwise else partial(conv, maps, kernel)
    y, batch, channels, space = apply(strides[0]), *numbers.out_spec[:2], numbers.out_spec[2:]
    places = {"B": batch, "C": channels} | dict(zip("HW"[-len(space) :], space, strict=True))
    if len(space) == 1:
        y = y.squeeze(axis("H"))
    return Placed(y, tuple(places[name] for name in axes() if name in places))


def _pool(combine: Callable, start: float, params: dict[str, Any], x: Any) -> Placed | None:
    """Combine windows along one axis after another; a maximum's gradient is shared by equal entries."""
    sizes, strides, edges = (params[name] for name in ("window_dimensions", "window_strides", "padding"))
    if {*params["base_dilation"], *params["window_dilation"]} != {1} or min(map(min, edges)) < 0:
        return None
    order = x.order if isinstance(x, Placed) else tuple(range(x.ndim))
    x = jnp.pad(_placed(x, order), [edges[of] for of in order], constant_values=start)
    for place, of in enumerate(order):
        if sizes[of] > 1 or strides[of] > 1:
            x = pooled_along(place, combine, x, sizes[of], strides[of])
    return Placed(x, order)


LAYERS = {
    "conv_general_dilated": _conv,
    "reduce_window_max": partial(_pool, jnp.maximum, -jnp.inf),
    "reduce_window_sum": partial(_pool, jnp.add, 0.0),
}


# ---- what suits every order of axes

ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "copy", "cos", "div", "eq"),
    *("erf", "exp", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p"),
    *("logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "round", "rsqrt", "select_n"),
    *("sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tanh"),
}
REDUCTIONS = {"reduce_max", "reduce_min", "reduce_prod", "reduce_sum"}


# ---- calls, in which layers are replaced as well


def _call(equation: core.JaxprEqn, *given: Any) -> list[Any]:
    closed = equation.params["jaxpr"]
    return _run(closed.jaxpr, closed.consts, given)


def _plainly(jaxpr: core.Jaxpr, constants: Sequence[Any], given: Sequence[Any]) -> list[jax.Array]:
    return [*map(_plain, _run(jaxpr, constants, given))]


def _checkpoint(equation: core.JaxprEqn, *given: Any) -> list[Any]:
    again = {name: equation.params[name] for name in ("prevent_cse", "policy")}
    inner = partial(_plainly, equation.params["jaxpr"], ())
    return jax.checkpoint(lambda *given: inner(given), **again)(*map(_plain, given))


def _scan(equation: core.JaxprEqn, *given: Any) -> list[Any]:
    params, plain = equation.params, [*map(_plain, given)]
    if "ft_in" in params:  # since jax 0.12
        constants, carried, _ = map(len, params["ft_in"].unpack())
    else:
        constants, carried = params["num_consts"], params["num_carry"]
    closed = params["jaxpr"]
    fixed, carry, inputs = (
        plain[:constants],
        plain[constants : constants + carried],
        plain[constants + carried :],
    )

    def body(carry, inputs):
        results = _plainly(closed.jaxpr, closed.consts, [*fixed, *carry, *inputs])
        return results[:carried], results[carried:]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, outputs = lax.scan(body, carry, inputs, **how)
    return [*carry, *outputs]


def _custom_jvp(equation: core.JaxprEqn, *given: Any) -> list[Any]:
    """Compute a function with its own derivative; an elementwise one, like ReLU, in the order at hand."""
    order, inner = _order(given), equation.params["call_jaxpr"]
    if not order or not _elementwise(inner.jaxpr):
        return _bound(equation, [*map(_plain, given)])

    def placed(array):
        return Placed(array, order) if jnp.ndim(array) else array

    def in_order(closed, arrays):
        results = _run(closed.jaxpr, closed.consts, [*map(placed, arrays)])
        return [_placed(one, order) for one in results]

    @jax.custom_jvp
    def f(*arrays):
        return in_order(inner, arrays)

    @f.defjvp
    def derivative(arrays, tangents):
        def rule(*both):
            return jax.jvp(lambda *plain: _bound(equation, plain), both[: len(given)], both[len(given) :])

        both = [*arrays, *tangents]
        plain = [jax.eval_shape(lambda one: _plain(placed(one)), one) for one in both]
        results = in_order(jax.make_jaxpr(rule)(*plain), both)
        return results[: len(results) // 2], results[len(results) // 2 :]

    results = f(*(_placed(one, order) for one in given))
    return [*map(placed, results)]


def _elementwise(jaxpr: core.Jaxpr) -> bool:
    """Return whether a program consists of elementwise operations."""
    inner = (part for each in jaxpr.eqns for part in core.jaxprs_in_params(each.params))
    return {each.primitive.name for each in jaxpr.eqns} <= {*ELEMENTWISE, "jit"} and all(
        map(_elementwise, inner)
    )


CALLS = {"jit": _call, "remat2": _checkpoint, "scan": _scan, "custom_jvp_call": _custom_jvp}
