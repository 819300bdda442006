"""Models: the patch convolution, the blocks, slicing, and every network of the zoo."""

import dataclasses
import functools
import inspect
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import initial, long, some_weights
from jax import lax

from jaxfl.config.setup import Setup
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.reassembly.networks import require_flattening
from jaxfl.models import Block, Model, repeated, zoo
from jaxfl.models.blocks import AdaptiveMean, Bottleneck, ConvBlock, DenseBlock, Linear, Norm
from jaxfl.models.build import scaled
from jaxfl.models.conv import (
    CONVOLUTIONS,
    conv,
    depthwise_conv,
    halves,
    interleaved,
    max_pool,
    mean_pool,
    spatial_mean,
    to_images,
    to_maps,
    using,
)
from jaxfl.models.zoo.densenet import DenseLayer, Transition
from jaxfl.runs.architectures import build_models

GRAY, COLOUR = (28, 28, 1), (32, 32, 3)
LENET = zoo.lenet5(shape=(16, 16, 1), classes=3)
SHUFFLENET_PARTS = "stem", "stage1_1", "stage1_2", "conv", "classifier"  # both kinds of units
V3_PARTS = "stem", "residual4", "fc1", "classifier"  # with a stride, a gate and a 5x5 kernel


def normal(seed, *shape):
    """Return standard normal numbers of the default float dtype."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.result_type(float))


def run(model, weights, x, train, **arguments):
    """Run `model.apply` as one compiled program, which costs less than its operations one by one."""
    apply = jax.jit(functools.partial(model.apply, train=train))
    return apply(*weights, x, **arguments)


def part(model, *names):
    """Return the model made of some of the blocks."""
    return dataclasses.replace(model, blocks=tuple(b for b in model.blocks if b.name in names))


def brief(model, *middle):
    """Return a network that compiles in seconds: its first blocks, some of the middle, the last two."""
    names = model.names
    return model if len(names) <= 6 else part(model, *names[:4], *middle, *names[-2:])


def assert_close(actual, expected, **tolerance):
    """Assert that two pytrees of arrays are close, and of the same structure."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


# ---- convolution and pooling


def on_images(f, *arguments, **options):
    """Return a function of maps as one of images."""
    return lambda x, *more: to_images(f(to_maps(x), *more, *arguments, **options))


def value_and_gradients(f, x, kernel):
    """Return a function's value, and its gradients for one fixed cotangent."""

    @jax.jit
    def run(x, kernel):
        value, vjp = jax.vjp(f, x, kernel)
        return value, vjp(jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape))

    return run(x, kernel)


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(5, 1, 0), (5, 2, 2), (3, 1, 1), (3, 2, 0), (1, 2, 0)]
)
def test_convolutions_equal_lax_conv(name, size, stride, padding, depthwise):
    library = functools.partial(library_conv, stride=stride, padding=padding)
    with jax.enable_x64(True), using(name):
        x, kernel = normal(0, 2, 9, 8, 3), normal(1, size, size, *((3,) if depthwise else (3, 4)))
        ours = on_images(depthwise_conv if depthwise else conv, stride=stride, padding=padding)
        actual = value_and_gradients(ours, x, kernel)
        assert_close(actual, value_and_gradients(library, x, kernel), atol=1e-12)


def library_conv(x, kernel, stride=1, padding=0):
    """Return JAX's own convolution, with a kernel (height, width, channels) a depthwise one."""
    sides, layout = [(padding, padding)] * 2, ("NHWC", "HWIO", "NHWC")
    groups, kernel = (x.shape[-1], kernel[:, :, None]) if kernel.ndim == 3 else (1, kernel)
    return lax.conv_general_dilated(
        x, kernel, (stride,) * 2, sides, dimension_numbers=layout, feature_group_count=groups
    )


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_backward_passes_written_by_hand_can_be_differentiated(stride, depthwise):
    """MAML needs gradients of gradients."""

    def steepness(f):
        gradients = jax.grad(lambda *arguments: jnp.sin(f(*arguments)).sum(), (0, 1))
        return lambda *arguments: sum((leaf**2).sum() for leaf in gradients(*arguments))

    with jax.enable_x64(True), using("rows"):
        x, kernel = normal(0, 2, 6, 7, 3), normal(1, 3, 3, *((3,) if depthwise else (3, 4)))
        ours = on_images(depthwise_conv if depthwise else conv, stride=stride, padding=1)
        actual = value_and_gradients(steepness(ours), x, kernel)
        library = steepness(functools.partial(library_conv, stride=stride, padding=1))
        assert_close(actual, value_and_gradients(library, x, kernel), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(("window", "stride", "padding"), [(2, None, 0), (3, None, 0), (3, 2, 1)])
def test_pooling_takes_each_complete_window(name, window, stride, padding):
    x, step = normal(0, 2, 9, 8, 3), stride or window
    edges = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
    tiles = np.lib.stride_tricks.sliding_window_view(
        np.pad(x, edges, constant_values=-np.inf), (window, window), axis=(1, 2)
    )[:, ::step, ::step]
    with using(name):
        highest = on_images(max_pool, window, stride, padding)(x)
        np.testing.assert_array_equal(highest, tiles.max(axis=(-2, -1)))
        if stride is None:
            means = on_images(mean_pool, window)(x)
            np.testing.assert_allclose(means, tiles.mean(axis=(-2, -1)), atol=1e-6)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_shuffling_interleaves_the_halves(name):
    x = normal(0, 2, 3, 3, 6)
    with using(name):
        shuffled = on_images(lambda maps: interleaved(*halves(maps)))(x)
    np.testing.assert_array_equal(shuffled, x[..., np.array([0, 3, 1, 4, 2, 5])])


@pytest.mark.parametrize(
    "model",
    [
        long(zoo.lenet5(shape=(16, 16, 1), classes=3, width=0.06)),
        part(zoo.resnet9(shape=(16, 16, 1), classes=3, width=0.06), "conv1", "residual2", "classifier"),
        long(part(zoo.shufflenet(shape=(16, 16, 1), classes=3, width=0.1), *SHUFFLENET_PARTS)),
        long(part(zoo.mobilenet_v3(shape=(16, 16, 1), classes=3, width=0.1), *V3_PARTS)),
    ],
    ids=lambda model: model.name,
)
def test_a_network_is_the_same_with_every_convolution(model):
    with jax.enable_x64(True):  # BatchNorm of so few images magnifies what the order of sums changes
        weights, x, mask = some_weights(model), normal(1, 4, 16, 16, 1), jnp.arange(4) < 3

        @functools.partial(jax.jit, static_argnums=0)
        def outcome(model):
            def loss(params):
                output = model.apply(params, weights.stats, x, train=True, mask=mask, key=jax.random.key(2))
                return jnp.square(output[0][:3]).sum(), output

            return jax.value_and_grad(loss, has_aux=True)(weights.params), model.taps(*weights, x, (2,))

        first, *others = (outcome(dataclasses.replace(model, convolution=name)) for name in CONVOLUTIONS)
        for other in others:
            assert_close(other, first, atol=1e-9)


@pytest.mark.parametrize("precision", ["full", "tf32"])
@pytest.mark.parametrize(
    ("name", "convolution"), [("lenet5", name) for name in CONVOLUTIONS] + [("vit", "auto")]
)
def test_all_products_have_the_chosen_precision_also_in_gradients(name, convolution, precision):
    """By default JAX multiplies float32 in TF32 on a GPU and in bfloat16 on a TPU."""
    model = zoo.MODELS[name](shape=(32, 32, 3), classes=3)
    model = dataclasses.replace(model, convolution=convolution, precision=precision)

    def loss(params, stats, x):
        return model.apply(params, stats, x, train=False)[0].sum()

    x = jax.ShapeDtypeStruct((2, *model.shape), jnp.float32)
    program = str(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 2)))(*model.form, x))
    products = re.findall("precision=(.*)", program)
    assert len(products) == len(re.findall(r"= (?:dot_general|conv_general_dilated)\b", program))
    assert len(products) >= 3 * len(model.names)  # forward, gradients of weights, gradients of inputs
    asked = {"full": "Precision.HIGHEST", "tf32": "Precision.HIGH"}[precision]
    assert set(products) == {f"({asked}, {asked})"}


def test_reduced_precision_computes_in_bfloat16_and_returns_float32_gradients():
    full = zoo.lenet5(shape=(16, 16, 1), classes=3)
    reduced = dataclasses.replace(full, precision="bfloat16")
    weights, x = some_weights(full), normal(1, 4, 16, 16, 1)

    def outcome(model):
        def loss(params):
            logits, stats = model.apply(params, weights.stats, x, train=True)
            return jnp.square(logits).sum(), stats

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(weights.params)

    (value, stats), gradient = outcome(reduced)
    (expected, expected_stats), _ = outcome(full)
    assert value == pytest.approx(float(expected), rel=0.1) and value != expected
    assert_close(stats, expected_stats, atol=0.02)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((value, stats, gradient))}
    assert dtypes == {jnp.dtype("float32")}
    program = str(jax.make_jaxpr(functools.partial(reduced.apply, train=False))(*weights, x))
    assert "bf16[" in program


# ---- batch normalisation


def test_norm_uses_the_real_rows_only():
    x, mask = normal(0, 5, 6).at[3:].set(1e6), jnp.arange(5) < 3
    variables = Norm().init(jax.random.key(0), x, train=False, mask=None)
    y, new = Norm().apply(variables, x, train=True, mask=mask, mutable=["batch_stats"])

    real = np.asarray(x)[:3]
    mean, var = real.mean(axis=0), real.var(axis=0)
    np.testing.assert_allclose(y[:3], (real - mean) / np.sqrt(var + 1e-5), atol=1e-5)
    np.testing.assert_allclose(new["batch_stats"]["mean"], 0.1 * mean, rtol=1e-4)
    np.testing.assert_allclose(new["batch_stats"]["var"], 0.9 + 0.1 * var, rtol=1e-5)


def test_a_padded_batch_gives_the_results_of_its_real_rows():
    weights, x = some_weights(LENET), normal(1, 6, 16, 16, 1).at[4:].set(1e3)
    mask = jnp.arange(6) < 4
    padded, padded_stats = run(LENET, weights, x, train=True, mask=mask)
    plain, plain_stats = run(LENET, weights, x[:4], train=True)
    np.testing.assert_allclose(padded[:4], plain, atol=1e-5)
    assert_close(padded_stats, plain_stats, atol=1e-6)


# ---- slices


def test_body_and_head_make_the_model():
    key, x = jax.random.key(0), normal(1, 4, 16, 16, 1)
    weights = LENET.init(key)
    whole, stats = run(LENET, weights, x, train=True)
    z, body_stats = run(LENET.body, weights, x, train=True)
    logits, head_stats = run(LENET.head, weights, z, train=True)
    np.testing.assert_allclose(logits, whole, atol=1e-6)
    assert_close({**body_stats, **head_stats}, stats, atol=1e-6)
    assert LENET.head.names == ("classifier",) and LENET.head.shape == z.shape[1:] == (84,)
    body, head = LENET.body.init(key), LENET.head.init(key)
    assert_close({**body.params, **head.params}, weights.params)
    assert LENET.body.size + LENET.head.size == LENET.size


def test_train_names_the_blocks_in_training_mode():
    weights, x = some_weights(LENET), normal(1, 4, 16, 16, 1)
    output, stats = run(LENET, weights, x, train=("conv2", "classifier"))
    # By hand: the first block in evaluation mode, the others as in training.
    inner, _ = run(part(LENET, "conv1"), weights, x, train=False)
    rest = part(LENET, "conv2", "fc1", "fc2", "classifier")
    expected, expected_stats = run(rest, weights, inner, train=True)
    np.testing.assert_allclose(output, expected, atol=1e-6)
    assert_close(stats["conv2"], expected_stats["conv2"], atol=1e-6)
    assert_close(stats["conv1"], weights.stats["conv1"])
    assert not np.allclose(stats["conv2"]["conv"]["norm"]["mean"], 0)


def test_dropout_depends_only_on_key_and_block():
    model = zoo.cnn1(shape=(16, 16, 1), classes=3)
    weights, x, key = some_weights(model), normal(1, 4, 16, 16, 1), jax.random.key(2)
    convs, dense = part(model, "conv1", "conv2"), part(model, "fc1")
    z, _ = run(model.body, weights, x, train=True, key=key)
    inner, _ = run(convs, weights, x, train=False)
    again, _ = run(dense, weights, inner, train=True, key=key)
    np.testing.assert_allclose(again, z, atol=1e-6)
    other, _ = run(dense, weights, inner, train=True, key=jax.random.key(3))
    assert not np.allclose(other, z)
    kept, _ = run(dense, weights, inner, train=False)
    np.testing.assert_allclose(z[z != 0], 2 * kept[z != 0], rtol=1e-5)
    assert (z == 0).sum() > (kept == 0).sum()
    with pytest.raises(JaxflError, match="dropout in its block 'fc1'"):
        model.apply(*weights, x, train=True)


def test_channel_dropout_drops_whole_channels():
    model = part(zoo.cnn4(shape=(8, 8, 1), classes=3, width=0.3, channel_dropout=0.5), "conv4")
    block = dataclasses.replace(model, shape=(4, 4, 19))
    weights, x = some_weights(block), 1 + jnp.abs(normal(1, 3, 4, 4, 19))
    weights.params["conv4"]["conv"]["bias"] += 9.0  # nothing is zero by itself
    kept, _ = run(block, weights, x, train=False)
    dropped, _ = run(block, weights, x, train=True, key=jax.random.key(2))
    gone = np.asarray(dropped == 0)
    np.testing.assert_array_equal(gone, gone[:, :1, :1].repeat(2, 1).repeat(2, 2))
    assert 0.3 < gone.mean() < 0.7
    np.testing.assert_allclose(dropped[~gone], 2 * kept[~gone], rtol=1e-5)


def test_alexnet_drops_the_inputs_of_its_dense_layers():
    model = zoo.alexnet(shape=(16, 16, 1), classes=3, width=0.05)
    weights, x = some_weights(model), jnp.ones((3, 1, 1, 13))
    layer = dataclasses.replace(part(model, "fc1"), shape=x.shape[1:])
    kernel, bias = (weights.params["fc1"]["linear"][name] for name in ("kernel", "bias"))
    z, _ = run(layer, weights, x, train=True, key=jax.random.key(2))
    # The layer's 205 outputs tell which of its 13 inputs were kept, and doubled.
    solved = [np.linalg.lstsq(np.asarray(kernel.T)[row > 0], (row - bias)[row > 0])[0] for row in z]
    np.testing.assert_allclose(np.abs(np.subtract(solved, 1)), 1, atol=1e-3)
    assert 0.2 < np.mean(np.asarray(solved) > 1) < 0.8


# ---- taps


def test_taps_are_taken_before_activation_in_the_order_asked_for():
    model = zoo.mcmahan(shape=(8, 8, 1), classes=3, width=0.06)
    weights, x = some_weights(model), normal(1, 4, 8, 8, 1)
    second, first = jax.jit(functools.partial(model.taps, depths=(2, 1)))(*weights, x)
    pooled, _ = run(part(model, "conv1"), weights, x, train=False)
    np.testing.assert_allclose(on_images(max_pool)(jax.nn.relu(first)), pooled, atol=1e-6)
    assert first.min() < 0 and second.shape == (4, 4, 4, 4)


SHALLOW = {
    "resnet9": 8, "resnet18": 17, "shufflenet": 50,
    "mobilenet_v1": 27, "mobilenet_v2": 52, "mobilenet_v3": 34,
}  # fmt: skip
DEEP = {
    "resnet50": 49, "resnet101": 100, "resnet152": 151,
    "densenet121": 120, "densenet161": 160, "densenet169": 168, "densenet201": 200,
}  # fmt: skip


@pytest.mark.parametrize(("name", "depth"), [*SHALLOW.items(), *(long(*deep) for deep in DEEP.items())])
def test_depth_counts_the_convolutions_of_the_main_path(name, depth):
    assert getattr(zoo, name)(shape=COLOUR, classes=10).convolution_count == depth


@pytest.mark.parametrize(
    ("width", "count", "found"), [(1, 30, 30), (0.1, 30, 3), (1 / 3, 3, 1), (1 / 16, 6, 1), (1 / 8, 84, 11)]
)
def test_widths_are_rounded_up(width, count, found):
    """A width is HeteroFL's ceil(r C), without the rounding error of the product."""
    assert scaled(width, count) == found


@pytest.mark.parametrize(
    ("name", "options", "ends"),
    [
        ("resnet18", {"width": 0.05}, [(32, 32, 4), (4, 4, 26)]),
        ("resnet50", {"stem": "imagenet"}, [(16, 16, 64), (1, 1, 2048)]),
        long("densenet121", {"stem": "imagenet"}, [(16, 16, 64), (1, 1, 1024)]),  # DraftFed, table I
    ],
)
def test_the_first_and_last_taps_have_the_shapes_of_their_maps(name, options, ends):
    model = getattr(zoo, name)(shape=COLOUR, classes=10, **options)
    weights, x = jax.eval_shape(model.init, jax.random.key(0)), jnp.ones((1, *COLOUR))
    taps = jax.eval_shape(functools.partial(model.taps, depths=(1, model.convolution_count)), *weights, x)
    assert [tap.shape[1:] for tap in taps] == ends
    for missing in (0, model.convolution_count + 1):
        with pytest.raises(JaxflError, match=f"has {model.convolution_count} convolutions, none at depth"):
            model.taps(*weights, x, (missing,))


# ---- deep networks


def normalised(x):
    """Return images whose channels have mean 0 and variance 1."""
    return (x - x.mean(axis=(0, 1, 2), keepdims=True)) / jnp.sqrt(x.var(axis=(0, 1, 2), keepdims=True) + 1e-5)


def test_bottleneck_and_dense_layer_match_formulas_by_hand():
    def bottleneck(kernels, x):
        first = normalised(library_conv(x, kernels["conv1"]))
        second = normalised(library_conv(jax.nn.relu(first), kernels["conv2"], 2, 1))
        third = normalised(library_conv(jax.nn.relu(second), kernels["conv3"]))
        shortcut = normalised(library_conv(x, kernels["shortcut"], 2))
        return jax.nn.relu(third + shortcut), (first, second, third)

    def layer(kernels, x):
        first = normalised(library_conv(jax.nn.relu(normalised(x)), kernels["conv1"]))
        second = library_conv(jax.nn.relu(first), kernels["conv2"], 1, 1)
        return jnp.concatenate([x, second], -1), (first, second)

    def last_layer(kernels, x):
        joined, (first, _) = layer(kernels, x)
        joined = normalised(joined)
        return jax.nn.relu(joined).mean((1, 2)), (first, joined)

    def transition(kernels, x):
        y = library_conv(jax.nn.relu(normalised(x)), kernels["conv"])
        return (y[:, ::2, ::2] + y[:, 1::2, ::2] + y[:, ::2, 1::2] + y[:, 1::2, 1::2]) / 4, (y,)

    for by_hand, module in [
        (bottleneck, Bottleneck(2, 2)),
        (layer, DenseLayer(2)),
        (last_layer, DenseLayer(2, spatial_mean)),
        (transition, Transition()),
    ]:
        model = Model("one block", (Block("block", module),), (6, 6, 4), 1)
        weights, x = initial(model), normal(1, 3, 6, 6, 4)
        layers = weights.params["block"].items()
        kernels = {name: layer["kernel"] for name, layer in layers if "kernel" in layer}
        expected, taps = jax.jit(by_hand)(kernels, x)
        depths = tuple(range(1, len(taps) + 1))
        assert model.convolution_count == len(taps)
        output, _, found = jax.jit(functools.partial(model.apply_with_taps, depths=depths, train=True))(
            *weights, x
        )
        assert_close((output, found), (expected, taps), atol=1e-5)


def short(*modules):
    """Return a network of some modules and a classifier, for images of 6x6 pixels and 4 channels."""
    blocks = [Block(f"block{i}", module) for i, module in enumerate(modules)]
    shape, convolution = (6, 6, 4), "patches"  # these have no loops
    return Model("short", (*blocks, Block("classifier", Linear(3))), shape, 3, convolution=convolution)


@pytest.mark.parametrize(
    ("model", "depths"),
    [
        long(short(*[Bottleneck(2)] * 4, Bottleneck(2, pool=spatial_mean)), (2,)),
        long(short(DenseLayer(2), Transition(), *[DenseLayer(2)] * 4, DenseLayer(2, spatial_mean)), (3,)),
        long(short(*[DenseBlock(5, norm=True, dropout=0.5)] * 5), ()),
        (short(*[ConvBlock(4, 3, 1, pool=2)] * 2, *[ConvBlock(4, 1)] * 3, DenseBlock(5)), (1,)),
    ],
    ids=["residual", "dense", "dropout", "pooled"],
)
def test_a_loop_over_blocks_equals_the_blocks(model, depths, monkeypatch):
    def loss(params, stats):
        logits, stats, taps = model.apply_with_taps(
            params, stats, x, depths, train=True, key=jax.random.key(2), mask=mask
        )
        return sum(jnp.square(part).sum() for part in (logits, *taps)), (logits, stats, taps)

    def outcome():
        """Return the results of stacked clients, and the number of loops, forward and backward."""
        traced = jax.jit(jax.vmap(jax.value_and_grad(loss, has_aux=True))).trace(*clients)
        return traced.lower().compile()(*clients), str(traced.jaxpr).count(" scan[")

    monkeypatch.setattr(repeated, "LONGEST", 3)
    with jax.enable_x64(True):
        clients = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf]), some_weights(model))
        x, mask = normal(1, 4, 6, 6, 4), jnp.arange(4) < 3
        looped, loops = outcome()
        monkeypatch.setattr(repeated, "SHORTEST", len(model.blocks))
        unrolled, none = outcome()
        assert (loops, none) == (2, 0)
        assert_close(looped, unrolled, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("stem", "least"), [("cifar", 8), ("imagenet", 29)])
def test_the_minimum_of_a_densenet_is_the_smallest_image_that_leaves_a_pixel(stem, least):
    model = zoo.densenet121(shape=(least, least, 1), classes=3, stem=stem)
    smaller = zoo.densenet121(shape=(least, least - 1, 1), classes=3, stem=stem)
    assert model.note == "" and f"at least {least}x{least}" in smaller.note
    for own, pixels in [(model, (1, 1)), (smaller, (1, 0))]:
        poolings = part(own, "stem", "transition1", "transition2", "transition3")
        weights = jax.eval_shape(poolings.init, jax.random.key(0))
        apply = functools.partial(poolings.apply, train=False)
        maps, _ = jax.eval_shape(apply, *weights, jnp.ones((1, *own.shape)))
        assert maps.shape[1:3] == pixels


# ---- initial values and dtypes


def test_layers_start_uniform_within_the_inverse_root_of_fan_in():
    params = initial(zoo.mcmahan(shape=GRAY, classes=10)).params
    layers = {25: params["conv1"]["conv"], 800: params["conv2"]["conv"], 512: params["classifier"]}
    for fan_in, layer in layers.items():
        bound = 1 / np.sqrt(fan_in)
        for leaf in layer.values():
            assert 0.7 * bound < np.abs(leaf).max() <= bound
        assert np.std(layer["kernel"]) == pytest.approx(bound / np.sqrt(3), rel=0.1)


@pytest.mark.parametrize("factory", [long(zoo.mlp), long(zoo.mcmahan)])  # so do the references of methods
def test_networks_compute_in_double_precision_under_x64(factory):
    with jax.enable_x64(True):
        model = factory(shape=(8, 8, 1), classes=3, width=0.1, norm="none")
        weights, x = some_weights(model), normal(1, 4, 8, 8, 1)

        def loss(params):
            return model.apply(params, weights.stats, x, train=True)[0].sum()

        value, grads = jax.jit(jax.value_and_grad(loss))(weights.params)
        assert {leaf.dtype for leaf in jax.tree.leaves((value, grads))} == {jnp.dtype("float64")}


# ---- the zoo


@pytest.mark.parametrize(
    ("factory", "shape", "classes", "options", "size"),
    [
        (zoo.mlp, GRAY, 10, {}, 79_510),
        (zoo.mcmahan, GRAY, 10, {}, 1_663_370),
        (zoo.mcmahan, GRAY, 10, {"padding": "valid"}, 582_026),
        (zoo.mcmahan, COLOUR, 10, {}, 878_538),
        (zoo.mcmahan, COLOUR, 10, {"padding": "same"}, 2_156_490),
        (zoo.cifar_small, COLOUR, 10, {}, 107_690),
        (zoo.fmnist_small, GRAY, 10, {}, 117_066),
        (zoo.fmnist_large, GRAY, 10, {}, 422_026),
        (zoo.lenet5, COLOUR, 10, {"depth": 2}, 52_246),
        (zoo.lenet5, COLOUR, 100, {"depth": 2}, 63_136),
        (zoo.lenet5, GRAY, 10, {"depth": 2}, 34_666),
        (zoo.lenet5, GRAY, 62, {"depth": 2}, 40_958),
        (zoo.lenet5, COLOUR, 10, {}, 62_050),
        (zoo.lenet5, COLOUR, 100, {}, 69_700),
        (zoo.lenet5, GRAY, 10, {}, 44_470),
        (zoo.lenet5, GRAY, 62, {}, 48_890),
        (zoo.lenet5, COLOUR, 10, {"depth": 4}, 67_290),
        (zoo.lenet5, COLOUR, 100, {"depth": 4}, 73_140),
        (zoo.lenet5, GRAY, 10, {"depth": 4}, 49_710),
        (zoo.lenet5, GRAY, 62, {"depth": 4}, 53_090),
        (zoo.lenet5, COLOUR, 10, {"norm": "none"}, 62_006),
        (zoo.lenet, GRAY, 10, {}, 44_426),
        (zoo.lenet, COLOUR, 10, {}, 62_006),
        (zoo.alexnet, (28, 28, 3), 10, {}, 20_126_538),
        (zoo.alexnet, COLOUR, 10, {}, 23_272_266),
        (zoo.cnn1, COLOUR, 10, {}, 97_384),
        (zoo.cnn2, COLOUR, 10, {}, 228_712),
        (zoo.cnn3, COLOUR, 10, {}, 2_510_178),
        (zoo.cnn4, COLOUR, 10, {}, 5_980_938),
        (zoo.resnet9, COLOUR, 10, {}, 6_573_130),
        # 48 and 16 numbers a patch, 64 and 16 positions, encoders of four d x d and two d x 4d, norms, biases
        (zoo.vit, COLOUR, 10, {}, 5_362_378),
        (
            zoo.vit,
            (16, 16, 1),
            3,
            {"depth": 1},
            16 * 192 + 192 + 16 * 192 + 12 * 192**2 + 13 * 192 + 384 + 579,
        ),
        # PFLlib's, whose 26 steps of 64 channels are flattened
        (
            zoo.harcnn,
            (1, 128, 9),
            6,
            {},
            9 * 9 * 32 + 32 + 9 * 32 * 64 + 64 + 1665 * 1024 + 1025 * 512 + 513 * 6,
        ),
        (zoo.resnet18, COLOUR, 10, {}, 11_173_962),
        # As public implementations count them for ImageNet's classes; ShuffleNet's first unit is narrower.
        (zoo.shufflenet, COLOUR, 1000, {}, 2_278_604 - 3_230),
        (zoo.mobilenet_v1, COLOUR, 1000, {}, 4_231_976),
        (zoo.mobilenet_v2, COLOUR, 1000, {}, 3_504_872),
        (zoo.mobilenet_v3, COLOUR, 1000, {}, 2_542_856),
        (zoo.resnet50, COLOUR, 10, {}, 23_520_842),
        (zoo.resnet101, COLOUR, 10, {}, 42_512_970),
        (zoo.resnet152, COLOUR, 10, {}, 58_156_618),
        long(zoo.densenet121, COLOUR, 10, {}, 6_956_298),
        long(zoo.densenet161, COLOUR, 10, {}, 26_482_378),
        long(zoo.densenet169, COLOUR, 10, {}, 12_493_322),
        long(zoo.densenet201, COLOUR, 10, {}, 18_104_330),
    ],
)
def test_networks_have_the_parameter_counts_of_the_papers(factory, shape, classes, options, size):
    model = factory(shape=shape, classes=classes, **options)
    assert model.size == size
    assert model.names[-1] == "classifier" and model.note == ""
    twin = factory(shape=shape, classes=classes, **options)
    assert model == twin and hash(model) == hash(twin)
    assert model != factory(shape=shape, classes=classes, **options, width=0.5)


@pytest.mark.parametrize(
    ("name", "more"),
    {
        "resnet18": 11_181_642 - 11_173_962,
        "resnet50": 23_528_522 - 23_520_842,
        "resnet101": 42_520_650 - 42_512_970,
        "resnet152": 58_164_298 - 58_156_618,
        "densenet121": 6_964_106 - 6_956_298,
        "densenet161": 26_494_090 - 26_482_378,
        "densenet169": 12_501_130 - 12_493_322,
        "densenet201": 18_112_138 - 18_104_330,
    }.items(),
)
def test_the_stem_for_large_images_is_the_only_difference(name, more):
    small, large = (getattr(zoo, name)(shape=COLOUR, classes=10, stem=stem) for stem in ("cifar", "imagenet"))
    assert small.blocks[1:] == large.blocks[1:]
    stems = (dataclasses.replace(model, blocks=model.blocks[:1]).size for model in (large, small))
    assert np.subtract(*stems) == more


@pytest.mark.parametrize("norm", ["batch", "none"])
@pytest.mark.parametrize(
    "name", [name for name in zoo.__all__ if "norm" in inspect.signature(getattr(zoo, name)).parameters]
)
def test_the_norm_option_decides_whether_a_network_has_batchnorm(name, norm):
    model = getattr(zoo, name)(shape=COLOUR, classes=10, norm=norm)
    assert model.normalised == (norm == "batch")


@pytest.mark.parametrize(
    ("factory", "blocks", "full"),
    [
        (zoo.cnn1, 4, 97_384),
        (zoo.cnn2, 5, 228_712),
        (zoo.cnn3, 9, 2_510_178),
        (zoo.cnn4, 10, 5_980_938),
        (zoo.mobilenet_v1, 15, 3_217_226),
        (zoo.mobilenet_v2, 20, 2_236_682),
        (zoo.mobilenet_v3, 15, 1_528_106),
    ],
)
@pytest.mark.parametrize("width", [long(0.003), 0.37, long(4.0)])
def test_pfedclub_networks_have_their_blocks_at_any_width(factory, blocks, full, width):
    """Their parameters grow with the square of the width; the least are single channels."""
    model = factory(shape=COLOUR, classes=10, width=width)
    assert len(model.blocks) == blocks
    assert model.size / full == pytest.approx(width**2, rel=0.12, abs=0.0016)


@pytest.mark.parametrize(  # every kind of block; those of deep networks are tested above
    "name",
    ["cnn4"]
    + [long(f"mobilenet_v{number}") for number in (1, 3)]
    + [long(name) for name in ("alexnet", "lenet5", "mlp", "resnet9", "resnet18", "shufflenet")],
)
def test_stacked_clients_learn_inside_scan(name):
    model = brief(getattr(zoo, name)(shape=(8, 8, 1), classes=3, width=0.1))
    clients = jax.jit(jax.vmap(model.init))(jax.random.split(jax.random.key(0), 2))
    x, y = normal(1, 6, 8, 8, 1), jnp.arange(6, dtype=jnp.int32) % 3

    def loss(params, stats, key):
        logits, stats = model.apply(params, stats, x, train=True, key=key)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).mean(), stats

    def step(weights, key):
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(*weights, key)
        params = jax.tree.map(lambda p, g: p - 0.05 * g, weights.params, grads)
        return type(weights)(params, stats), value

    @jax.jit
    def train(clients, keys):
        return lax.scan(lambda w, k: jax.vmap(step, (0, None))(w, k), clients, keys)

    trained, losses = train(clients, jax.random.split(jax.random.key(2), 30))
    assert jax.tree.structure(trained) == jax.tree.structure(clients)
    assert np.isfinite(losses).all()
    assert (losses[-5:].mean(axis=0) < losses[:5].mean(axis=0)).all()


def test_small_images_are_resized_to_the_minimum():
    model = zoo.lenet5(shape=(8, 8, 1), classes=3)
    assert model.note == "lenet5 takes images of at least 16x16; 8x8 images are resized to 16x16."
    assert model.names == ("input", *LENET.names)
    weights, x = some_weights(model), normal(1, 2, 8, 8, 1)
    assert weights.params["input"] == weights.stats["input"] == {}
    resized = jax.image.resize(x, (2, 16, 16, 1), "bilinear")
    expected, _ = run(LENET, weights, resized, train=False)
    np.testing.assert_allclose(run(model, weights, x, train=False)[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "least"),
    [("cifar_small", 16), ("fmnist_small", 12), ("fmnist_large", 8), ("lenet5", 16),
     ("lenet", 16), ("alexnet", 15), ("cnn1", 16), ("cnn2", 32), ("cnn3", 8), ("cnn4", 8),
     ("resnet9", 8), ("mcmahan", 4), ("resnet18", 1), ("shufflenet", 1), ("mobilenet_v1", 1),
     ("mobilenet_v2", 1), ("mobilenet_v3", 1), ("mlp", 1)],
)  # fmt: skip
def test_the_minimum_is_the_smallest_image_that_leaves_a_pixel(name, least):
    factory = getattr(zoo, name)
    side = least if name == "mlp" else max(least, 2)  # an image of one pixel is a vector, and not convolved
    model = factory(shape=(side, side, 1), classes=3, width=0.05)
    assert model.note == "" and model.size > 0
    if least > 1:
        smaller = factory(shape=(least - 1, least, 1), classes=3, width=0.05)
        assert f"at least {least}x{least}" in smaller.note
        # Without the adapter the convolutions would leave nothing.
        convs = part(smaller, *(name for name in smaller.names if name.startswith("conv")))
        convs = dataclasses.replace(convs, convolution="plain")  # takes images smaller than a kernel, too
        weights = jax.eval_shape(convs.init, jax.random.key(0))
        maps, _ = jax.eval_shape(
            functools.partial(convs.apply, train=False), *weights, jnp.ones((1, *smaller.shape))
        )
        assert maps.shape[1] == 0


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (zoo.lenet5, {"norm": "bach"}, "did you mean 'batch'"),
        (zoo.mcmahan, {"padding": "vald"}, "did you mean 'valid'"),
        (zoo.lenet5, {"depth": 5}, "2, 3 or 4"),
        (zoo.mlp, {"hidden": 0}, "at least one hidden"),
        (zoo.mlp, {"width": 0.0}, "positive factor"),
        (zoo.cnn1, {"dropout": 1.0}, "probability"),
        (zoo.cnn4, {"channel_dropout": -0.1}, "channel_dropout is -0.1; give a probability"),
        (zoo.resnet18, {"shape": (32, 32)}, "height, width, channels"),
        (zoo.resnet18, {"classes": 0}, "at least one"),
        (zoo.densenet121, {"stem": "imagenett"}, "did you mean 'imagenet'"),
    ],
)
def test_invalid_options_are_refused_by_name(factory, options, message):
    with pytest.raises(JaxflError, match=message):
        factory(**{"shape": COLOUR, "classes": 10, **options})


# ---- a chosen number of features


@pytest.mark.parametrize(("given", "wanted"), [(6, 3), (7, 3), (5, 4), (5, 1), (4, 4)])
def test_features_are_averaged_over_windows_that_may_overlap(given, wanted):
    z = np.asarray(normal(0, 2, given))
    expected = np.empty((2, wanted))
    for i in range(wanted):
        first, end = math.floor(i * given / wanted), math.ceil((i + 1) * given / wanted)
        expected[:, i] = z[:, first:end].mean(1)
    found = AdaptiveMean(wanted).apply({}, z, train=True, mask=None)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("features", "adapter", "note"),
    [
        (20, AdaptiveMean(20), "Its 84 features are averaged to 20."),
        (84, None, ""),
        (90, Linear(90), "Its 84 features are mapped to 90."),
    ],
)
def test_a_choice_sets_how_many_features_the_classifier_gets(features, adapter, note):
    model = zoo.build(f"lenet5,features={features}", shape=(16, 16, 1), classes=3)
    more = 84 * features + features if isinstance(adapter, Linear) else 0
    assert model.name == f"lenet5,features={features}" and model.note == note
    assert model.blocks[:4] == LENET.blocks[:4] and model.head.shape == (features,)
    assert [block.module for block in model.blocks[4:-1]] == ([adapter] if adapter else [])
    assert model.size == LENET.size + more + (features - 84) * 3
    assert model.convolution_count == LENET.convolution_count == 2

    weights, x = some_weights(model), normal(1, 4, 16, 16, 1)
    before, _ = run(LENET.body, weights, x, train=False)
    z, _ = run(model.body, weights, x, train=False)
    if adapter:
        params = weights.params["adapter"]
        assert bool(params) == (more > 0)
        before = adapter.apply({"params": params}, before, train=False, mask=None)
    np.testing.assert_allclose(z, before, atol=1e-6)
    taps, expected = (jax.jit(functools.partial(m.taps, depths=(1, 2))) for m in (model, LENET.body))
    assert_close(taps(*weights, x), expected(*weights, x), atol=1e-6)


def test_small_images_and_few_features_are_both_noted():
    model = zoo.build("lenet5,features=20", shape=(8, 8, 1), classes=3)
    assert model.names == ("input", *LENET.names[:-1], "adapter", "classifier")
    assert model.note.endswith("are resized to 16x16. Its 84 features are averaged to 20.")


OWN_NETWORK = """
from jaxfl.models import Block, Model
from jaxfl.models.blocks import ConvBlock, DenseBlock, Linear

def vectors(*, shape, classes):
    return Model("own", (Block("body", DenseBlock(4)), Block("last", Linear(classes))), shape, classes)

def maps(*, shape, classes):
    return Model("own", (Block("body", ConvBlock(4, 1)), Block("last", DenseBlock(classes))), shape, classes)

def adapting(*, shape, classes):
    return Model("own", (Block("adapter", DenseBlock(4)), Block("last", Linear(classes))), shape, classes)
"""


def test_features_of_own_networks_are_adapted_in_the_same_way(tmp_path):
    file = tmp_path / "adapted.py"
    file.write_text(OWN_NETWORK)
    model = zoo.build(f"{file}:vectors,features=3", shape=(4, 4, 1), classes=2)
    assert model.name == "own,features=3" and model.names == ("body", "adapter", "last")
    for name, message in [
        ("maps", r"gives maps of shape \(4, 4, 4\) to its last block, but features=3 needs vectors"),
        ("adapting", "two blocks of one name: adapter, adapter, last; rename one"),
    ]:
        with pytest.raises(JaxflError, match=message):
            zoo.build(f"{file}:{name},features=3", shape=(4, 4, 1), classes=2)


def test_a_form_follows_the_default_dtype():
    model = zoo.mlp(shape=(2, 2, 1), classes=2, hidden=3)

    def dtypes():
        return {leaf.dtype for leaf in jax.tree.leaves(model.form)}

    assert dtypes() == {jnp.dtype("float32")}
    with jax.enable_x64(True):
        assert dtypes() == {jnp.dtype("float64")}
        require_flattening(model)  # its cached blocks must follow, too


def test_a_name_shows_all_options_or_none():
    """A network of the zoo is called as in `--models` if its name shows an option at all."""
    names = "mcmahan,width=0.5,features=64", "mlp,hidden=3,clients=1", "lenet5,clients=2"
    setup, partition = Setup.of(models=names), SimpleNamespace(train=[()] * 4, outputs=10)
    built = build_models(setup, (28, 28, 1), partition)
    assert [model.name for model, _ in built] == ["mcmahan,width=0.5,features=64", "mlp", "lenet5"]
