"""The package's convolution and pooling inside networks that are written with other layers.

Such a network is traced. What it computes stays, except that convolutions and pools of images or of windows
are those of `jaxfl.models.conv`, forward and backward: equal up to rounding, and many times as fast on a CPU,
or with clients side by side. Within `jax.checkpoint` and `lax.scan` they are replaced as well; within other
control flow, and where a convolution has another form than ours, they stay XLA's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from jaxfl.models.conv import conv, depthwise_conv, in_use, pooled_along, to_images, to_maps


def convolved(f: Callable, *args: Any) -> Any:
    """Return ``f(*args)``, with convolutions and pools by the implementation in use."""
    if in_use() == "plain":
        return f(*args)
    closed, form = jax.make_jaxpr(f, return_shape=True)(*args)
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jax.tree.unflatten(jax.tree.structure(form), _run(needed, closed.consts, jax.tree.leaves(args)))


def _run(jaxpr: core.Jaxpr, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Compute a traced program, equation by equation."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))

    def value(variable):
        return variable.val if isinstance(variable, core.Literal) else values[variable]

    for equation in jaxpr.eqns:
        given = [*map(value, equation.invars)]
        results = _replaced(equation, given)
        if results is None:
            found = equation.primitive.bind(*given, **equation.primitive.get_bind_params(equation.params))
            results = found if equation.primitive.multiple_results else [found]
        values |= zip(equation.outvars, results, strict=True)
    return [*map(value, jaxpr.outvars)]


def _replaced(equation: core.JaxprEqn, given: list[Any]) -> Sequence[Any] | None:
    """Return the results of an equation that is replaced or has replaced ones inside; None for another."""
    name, params = equation.primitive.name, equation.params
    if name in LAYERS:
        result = LAYERS[name](params, *given)
        return None if result is None else [result]
    if name not in CALLS or not any(map(_replaces, core.jaxprs_in_params(params))):
        return None
    return CALLS[name](params, *given)


# ---- layers


def _conv(params: dict[str, Any], x: jax.Array, kernel: jax.Array) -> jax.Array | None:
    """Return a convolution of images or windows; None for one of another form."""
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
    maps = to_maps(jnp.pad(x, [(0, 0), *edges, (0, 0)]))
    apply = partial(depthwise_conv, maps, kernel[:, :, 0]) if depthwise else partial(conv, maps, kernel)
    y = to_images(apply(strides[0]))
    y = y[:, 0] if len(space) == 1 else y
    batch, channels, *space = numbers.out_spec
    places = [batch, *space, channels]
    return y.transpose([places.index(axis) for axis in range(y.ndim)])


def _pool(combine: Callable, start: float, params: dict[str, Any], x: jax.Array) -> jax.Array | None:
    """Combine windows along one axis after another; a maximum's gradient is shared by equal entries."""
    sizes, strides, edges = (params[name] for name in ("window_dimensions", "window_strides", "padding"))
    if {*params["base_dilation"], *params["window_dilation"]} != {1} or min(map(min, edges)) < 0:
        return None
    x = jnp.pad(x, edges, constant_values=start)
    for place, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        if size > 1 or stride > 1:
            x = pooled_along(place, combine, x, size, stride)
    return x


LAYERS = {
    "conv_general_dilated": _conv,
    "reduce_window_max": partial(_pool, jnp.maximum, -jnp.inf),
    "reduce_window_sum": partial(_pool, jnp.add, 0.0),
}


# ---- calls, in which layers are replaced as well


def _replaces(jaxpr: core.Jaxpr) -> bool:
    """Return whether a program has anything to replace."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    inner = (part for each in jaxpr.eqns for part in core.jaxprs_in_params(each.params))
    return not names.isdisjoint(LAYERS) or any(map(_replaces, inner))


def _call(params: dict[str, Any], *given: Any) -> list[Any]:
    return _run(params["jaxpr"].jaxpr, params["jaxpr"].consts, given)


def _checkpoint(params: dict[str, Any], *given: Any) -> list[Any]:
    again = {name: params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(lambda *given: _run(params["jaxpr"], (), given), **again)(*given)


def _scan(params: dict[str, Any], *given: Any) -> list[Any]:
    closed, constants, carried = params["jaxpr"], params["num_consts"], params["num_carry"]
    fixed, carry, inputs = (
        given[:constants],
        given[constants : constants + carried],
        given[constants + carried :],
    )

    def body(carry, inputs):
        results = _run(closed.jaxpr, closed.consts, [*fixed, *carry, *inputs])
        return results[:carried], results[carried:]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, outputs = lax.scan(body, [*carry], [*inputs], **how)
    return [*carry, *outputs]


CALLS = {"jit": _call, "remat2": _checkpoint, "scan": _scan}
