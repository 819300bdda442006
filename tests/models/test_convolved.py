"""Networks of the user's own compute with the package's convolutions, and get the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from jaxfl.models.conv import using
from jaxfl.models.own import convolved as module
from jaxfl.models.own.convolved import convolved

IMAGES, WINDOWS = (2, 9, 8, 4), (2, 11, 4)
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def convolution(kernel, strides=(1, 1), padding="SAME", layout=NHWC, **how):
    """Return a function of x, and the shape of its kernel."""

    def f(kernel, x):
        return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=layout, **how)

    return f, kernel


def pool(start, combine, sizes, strides, padding="VALID"):
    return lambda kernel, x: lax.reduce_window(x * kernel.sum(), start, combine, sizes, strides, padding), (
        1,
    )


REPLACED = {
    "same": (*convolution((3, 3, 4, 5)), IMAGES),
    "valid, stride 2": (*convolution((3, 2, 4, 5), (2, 2), "VALID"), IMAGES),
    "uneven padding": (*convolution((3, 3, 4, 5), (2, 2), ((0, 1), (2, 1))), IMAGES),
    "channels first": (*convolution((5, 4, 3, 3), layout=NCHW), (2, 4, 9, 8)),
    "depthwise": (*convolution((3, 3, 1, 4), feature_group_count=4), IMAGES),
    "windows": (*convolution((3, 4, 5), (2,), layout=("NWC", "WIO", "NWC")), WINDOWS),
    "maximum": (*pool(-jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), IMAGES),
    "maximum of a rest": (*pool(-jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1)), IMAGES),
    "sum": (*pool(0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1)), IMAGES),
    "sum of windows": (*pool(0.0, lax.add, (1, 3, 1), (1, 2, 1)), WINDOWS),
}
LEFT = {
    "dilation": (*convolution((3, 3, 4, 5), rhs_dilation=(2, 2)), IMAGES),
    "groups": (*convolution((3, 3, 2, 6), feature_group_count=2), IMAGES),
    "two strides": (*convolution((3, 3, 4, 5), (1, 2)), IMAGES),
    "volumes": (
        *convolution((2, 2, 2, 4, 5), (1, 1, 1), layout=("NDHWC", "DHWIO", "NDHWC")),
        (1, 3, 4, 5, 4),
    ),
}


def names(f, *args):
    """Return the names of all primitives in a traced function."""
    found = set()

    def look(jaxpr):
        for equation in jaxpr.eqns:
            found.add(equation.primitive.name)
            for part in core.jaxprs_in_params(equation.params):
                look(part)

    look(jax.make_jaxpr(f)(*args).jaxpr)
    return found


def drawn(kernel, shape, dtype=float):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=size), dtype) for size in (kernel, shape)]


def of_loss(f, *args):
    """Return the value and the gradients of a function of two arguments, whose outputs weigh differently."""

    def loss(*args):
        y = f(*args)
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum(), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*args)


@pytest.mark.parametrize("way", ["rows", "patches"])
@pytest.mark.parametrize("form", REPLACED)
def test_a_layer_is_replaced_and_computes_the_same(form, way):
    f, kernel, shape = REPLACED[form]
    with jax.enable_x64(True), using(way):
        args = drawn(kernel, shape)
        ours = names(lambda *args: convolved(f, *args), *args)
        assert ours.isdisjoint(module.LAYERS)
        for found, wanted in zip(
            jax.tree.leaves(of_loss(lambda *args: convolved(f, *args), *args)),
            jax.tree.leaves(of_loss(f, *args)),
            strict=True,
        ):
            np.testing.assert_allclose(found, wanted, 1e-10, 1e-10)


def test_what_follows_a_layer_is_computed_in_the_order_of_its_axes():
    """Normalisation, activations with derivatives of their own, and pools turn nothing back."""
    conv, kernel, shape = REPLACED["same"]

    def f(kernel, x):
        y = conv(kernel, x)
        for activation in (jax.nn.relu, jax.nn.relu6, jax.nn.softplus, jax.nn.gelu):
            y = activation(y - y.mean((0, 1, 2), keepdims=True)) / jnp.sqrt(
                1e-5 + y.var((0, 1, 2), keepdims=True)
            )
        return (
            lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME").max((1, 2)) + y.sum()
        )

    with jax.enable_x64(True), using("rows"):
        args = drawn(kernel, shape)
        found, wanted = (of_loss(g, *args) for g in (lambda *args: convolved(f, *args), f))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-10), found, wanted)
        program = jax.make_jaxpr(lambda *args: convolved(f, *args))(*args)
        turned = [one.invars[0].aval.shape for one in program.eqns if one.primitive.name == "transpose"]
        assert [shape for shape in turned if len(shape) == 4 and min(shape) > 1] == [IMAGES]  # only x


@pytest.mark.parametrize("form", LEFT)
def test_a_convolution_of_another_form_stays(form):
    f, kernel, shape = LEFT[form]
    args = drawn(kernel, shape)
    np.testing.assert_array_equal(convolved(f, *args), f(*args))
    assert "conv_general_dilated" in names(lambda *args: convolved(f, *args), *args)


@pytest.mark.parametrize("within", [jax.jit, jax.checkpoint, "scan"])
def test_layers_in_calls_are_replaced(within):
    conv, kernel, shape = REPLACED["same"]

    def scanned(kernel, x):
        def layer(y, k):
            return y + jnp.tanh(conv(k, y))[..., :4], y.sum()

        return lax.scan(layer, x, jnp.stack([kernel, -kernel]))[0]

    f = scanned if within == "scan" else within(lambda kernel, x: jnp.tanh(conv(kernel, x)))
    with jax.enable_x64(True):
        args = drawn(kernel, shape)
        assert names(lambda *args: convolved(f, *args), *args).isdisjoint(module.LAYERS)
        found, wanted = (of_loss(g, *args) for g in (lambda *args: convolved(f, *args), f))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-10), found, wanted)


def test_clients_side_by_side_and_fewer_digits():
    f, kernel, shape = REPLACED["same"]
    args = [jnp.stack([array, -array]) for array in drawn(kernel, shape, jnp.bfloat16)]
    found = jax.vmap(lambda *args: convolved(f, *args))(*args)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(float), jax.vmap(f)(*args).astype(float), rtol=0.05, atol=0.1)


def test_plain_leaves_a_network_as_it_is():
    f, kernel, shape = REPLACED["same"]
    args = drawn(kernel, shape)
    with using("plain"):
        assert "conv_general_dilated" in names(lambda *args: convolved(f, *args), *args)
