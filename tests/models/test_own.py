"""Networks of the user's own: those that docs/networks.md shows, and those that are refused."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    CLASSES,
    SHAPE,
    applied,
    assert_same,
    cohort,
    differ,
    federate,
    initial,
    long,
    tiny_partition,
    tiny_source,
)
from flax import nnx
from flax.traverse_util import unflatten_dict

import jaxfl
from jaxfl import fl
from jaxfl.algorithms.sharing.fedrod import with_personal_head
from jaxfl.cli import main
from jaxfl.core.job import traced
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.class_means import require_classes_last
from jaxfl.mechanisms.reassembly.networks import require_flattening
from jaxfl.models import Weights, zoo
from jaxfl.models.blocks import ConvBlock, DenseBlock
from jaxfl.models.build import plain_cnn
from jaxfl.models.model import TokenShape
from jaxfl.models.named import by_architecture, fit
from jaxfl.models.own import from_equinox, from_functions, from_linen, from_nnx, named_arrays
from jaxfl.models.shape_check import check, noted
from jaxfl.registry import METHODS

DOCUMENT = Path(__file__).parents[2] / "docs" / "networks.md"
WIDTH = 2


def shown():
    """Return the code blocks of the document by their first lines."""
    blocks = re.findall(r"```python\n# (.*?)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return dict(blocks)


def zoo_net(shape, classes, width):
    return plain_cnn("zoo-net", [ConvBlock(width, 3, 1, 2)], [DenseBlock(16)], shape=shape, classes=classes)


@pytest.fixture(scope="module")
def networks():
    """Return {kind: the same small network}."""
    names = {}
    for where, code in shown().items():
        if where.startswith("my_net.py"):
            exec(compile(code, where, "exec"), names)
    made = {
        kind: names[f"{kind}_net"](SHAPE, CLASSES, width=WIDTH)
        for kind in ("linen", "nnx", "equinox", "plain")
    }
    return made | {"zoo": zoo_net(SHAPE, CLASSES, WIDTH)}


def as_kind(kind, params):
    """Return parameters of the Linen network in the form of another kind."""
    if kind == "zoo":
        names = {"conv": ("conv1", "conv"), "dense": ("fc1", "linear")}
        own = {block: {layer: params[name]} for name, (block, layer) in names.items()}
        return own | {"classifier": params["head"]}
    if kind != "equinox":
        return params

    def flat(kernel):  # pixels are counted channel by channel
        return kernel.reshape(4, 4, WIDTH, -1).transpose(2, 0, 1, 3).reshape(kernel.shape).T

    conv, dense, head = (params[name] for name in ("conv", "dense", "head"))
    return {
        "conv": {"weight": conv["kernel"].transpose(3, 2, 0, 1), "bias": conv["bias"].reshape(-1, 1, 1)},
        "dense": {"weight": flat(dense["kernel"]), "bias": dense["bias"]},
        "head": {"weight": head["kernel"].T, "bias": head["bias"]},
    }


@pytest.fixture(scope="module")
def linen_weights(networks):
    return jax.tree.map(lambda leaf: 2 * leaf, networks["linen"].init(jax.random.key(0)).params)


def one_round(model, params):
    """Return features, logits, and weights and losses after a round of FedAvg with padded batches."""
    source = tiny_source()
    federation = federate(source, tiny_partition(source), ((model, 5),))
    config = METHODS["fedavg"].config(epochs=2, batch_size=4)
    algorithm = METHODS["fedavg"].build(config)
    state = algorithm.init(jax.random.key(0), federation, traced(config))
    stats = {name: {} for name in model.names}
    (group,) = state.shared
    assert jax.tree.map(jnp.shape, group.params) == jax.tree.map(jnp.shape, params)
    state = state._replace(shared=(group._replace(params=params),))
    x = jnp.asarray(source.images[:3], jnp.result_type(float))

    @jax.jit
    def everything(state, params):
        z, _ = model.body.apply(params, stats, x, train=False)
        logits, _ = model.head.apply(params, stats, z, train=False)
        new, info = algorithm.step(jax.random.key(1), state, federation, cohort(federation, (0, 1, 3)))
        return z, logits, new.shared[0].params, info.loss

    return everything(state, params)


@pytest.fixture(scope="module")
def of_linen(networks, linen_weights):
    return one_round(networks["linen"], linen_weights)


@pytest.mark.parametrize("kind", ["nnx", "equinox", long("plain"), long("zoo")])
def test_a_network_gives_the_same_results_in_every_library(networks, linen_weights, of_linen, kind):
    z, logits, after, loss = of_linen
    own = one_round(networks[kind], as_kind(kind, linen_weights))
    expected = z, logits, as_kind(kind, after), loss
    assert jax.tree.structure(own) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    moved = jax.tree.map(lambda one, other: np.abs(one - other).max(), after, linen_weights)
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox", "plain"])
def test_clients_may_draw_their_own_weights(networks, kind):
    """As `--initial own` does: one program draws those of all clients."""
    model, keys = networks[kind], jax.random.split(jax.random.key(0), 2)
    together = jax.jit(jax.vmap(model.init))(keys)
    for i, key in enumerate(keys):
        assert_same(jax.tree.map(lambda leaf: leaf[i], together), jax.jit(model.init)(key), tolerance=1e-6)  # noqa: B023


# ---- statistics, dropout, and what a layer is called with


class Linen(nn.Module):
    """A network with a leaf of its own."""

    @nn.compact
    def __call__(self, x, deterministic):
        """Map (B, 3) to (B, 2)."""
        x = nn.relu(
            nn.BatchNorm(use_running_average=deterministic, name="norm")(nn.Dense(4, name="first")(x))
        )
        offset = self.param("offset", nn.initializers.ones, (1, 4))
        x = nn.Dropout(0.5, deterministic=deterministic)(x + offset)
        return nn.Dense(2, name="head")(x)


class Nnx(nnx.Module):
    """A network with a list of layers."""

    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.layers = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])

    def __call__(self, x):
        """Map (B, 3) to (B, 2)."""
        x = jax.nn.relu(self.norm(self.first(x)))
        for layer in self.layers:
            x = layer(x)
        return x


class Equinox(eqx.Module):
    """A network with a flag among its statistics."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        one, other = jax.random.split(key)
        self.first, self.head = eqx.nn.Linear(3, 4, key=one), eqx.nn.Linear(4, 2, key=other)
        self.norm, self.drop = eqx.nn.BatchNorm(4, "batch", mode="ema"), eqx.nn.Dropout(0.5)

    def __call__(self, x, state, key):
        """Map (3,) to (2,)."""
        x, state = self.norm(self.first(x), state)
        return self.head(self.drop(jax.nn.relu(x), key=key)), state


def test_a_block_that_does_not_train_gets_no_key_for_dropout():
    keys = {}

    def functions(name):
        def apply(params, x, key):
            keys[name] = key
            return x @ params["w"]

        return lambda key, x: {"w": jnp.eye(x.shape[-1], 3)}, apply

    model = from_functions("own", {name: functions(name) for name in ("body", "head")}, (3,), 3)
    params, stats = model.init(jax.random.key(0))
    model.apply(params, stats, jnp.ones((2, 3)), train=("head",), key=jax.random.key(1))
    assert keys["body"] is None and keys["head"] is not None


def test_a_kernel_beside_statistics_is_no_norm():
    def init(key, x):
        params = {"kernel": jnp.ones((3, 3)), "scale": jnp.ones((1, 3))}
        return Weights(params, {"mean": jnp.zeros((1, 3))})

    def apply(params, x, stats, train, mask):
        return (x @ params["kernel"] - stats["mean"]) * params["scale"], stats

    model = from_functions("own", {"both": (init, apply), "head": functions()["head"]}, (3,), 2)
    paths = [("params", "both", "kernel"), ("params", "both", "scale"), ("stats", "both", "mean")]
    assert [*map(fl.norms(model), [*paths, ("params", "head", "kernel")])] == [False, True, True, False]


def test_a_head_that_does_not_end_in_classes_is_refused():
    require_classes_last(from_linen("own", Linen(), (3,), 2), "pFedSim")
    with pytest.raises(JaxflError, match="pFedSim uses the classes .* block 'head' of own"):
        require_classes_last(from_equinox("own", Equinox, (3,), 2), "pFedSim")


class Pooling(nn.Module):
    """A convolution, a dense layer that pools its map or flattens it, and a head."""

    flat: bool

    @nn.compact
    def __call__(self, x):
        """Map (B, 4, 4, 1) to (B, 2)."""
        x = Pooled(flat=self.flat, name="dense")(nn.Conv(4, (3, 3), name="conv")(x))
        return nn.Dense(2, name="head")(x)


class Pooled(nn.Module):
    """A dense layer of the mean of a map, or of the map as a vector."""

    flat: bool

    @nn.compact
    def __call__(self, x):
        """Map (B, h, w, c) to (B, 3)."""
        return nn.Dense(3)(x.reshape(len(x), -1) if self.flat else x.mean((1, 2)))


def test_dense_blocks_that_cannot_take_maps_as_vectors_are_refused_for_reassembly():
    require_flattening(from_linen("own", Pooling(flat=True), (4, 4, 1), 2))
    with pytest.raises(JaxflError, match="'dense' does not take maps"):
        require_flattening(from_linen("own", Pooling(flat=False), (4, 4, 1), 2))


def functions():
    def init(key, x):
        return Weights({"scale": jnp.ones((1, 3))}, {"mean": jnp.zeros((1, 3))})

    def norm(params, x, stats, train, mask, key):
        if train:
            real = jnp.ones(len(x)) if mask is None else mask.astype(float)
            mean = (x * real[:, None]).sum(0, keepdims=True) / real.sum()
            stats = {"mean": 0.9 * stats["mean"] + 0.1 * mean}
            x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)
        return (x - stats["mean"]) * params["scale"], stats

    head = lambda key, x: {"kernel": jax.random.normal(key, (3, 2))}, lambda params, x: x @ params["kernel"]  # noqa: E731
    return {"norm": (init, norm), "head": head}


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: from_linen("own", Linen(), (3,), 2), ("first", "norm", "head")),
        (lambda: from_nnx("own", Nnx, (3,), 2), ("first", "layers_1")),
        (lambda: from_equinox("own", Equinox, (3,), 2), ("first", "head")),
        (lambda: from_functions("own", functions(), (3,), 2), ("norm", "head")),
    ],
    ids=["linen", "nnx", "equinox", "functions"],
)
def test_statistics_ignore_padding_and_dropout_depends_on_the_key(make, names):
    """Statistics ignore padding; dropout is off outside training and depends on the key."""
    model = make()
    assert model.names == names
    weights, mask = initial(model), jnp.arange(4) < 2
    x = jax.random.normal(jax.random.key(1), (4, 3))
    assert [name for name in names if weights.stats[name]] == [names[-2]]

    @jax.jit
    @jax.vmap
    def train(key, x):
        return model.apply(*weights, x, train=True, key=key, mask=mask)

    keys = jax.random.split(jax.random.key(2), 2)
    padded = jnp.stack([x, jnp.where(mask[:, None], x, 9.0)])
    (logits, others), stats = train(keys[jnp.array([0, 0])], padded)
    np.testing.assert_allclose(logits[:2], others[:2], rtol=1e-6)
    for before, leaf in zip(jax.tree.leaves(weights.stats), jax.tree.leaves(stats), strict=True):
        np.testing.assert_allclose(leaf[0], leaf[1], rtol=1e-6)
        assert np.abs(leaf[0] - before).max() > 1e-4
    (logits, others), _ = train(keys, jnp.stack([x, x]))
    assert np.abs(logits[:2] - others[:2]).max() > 1e-3
    z, _ = applied(model.body.apply, *weights, x, train=False)
    whole, stats = applied(model.apply, *weights, x, train=False)
    np.testing.assert_array_equal(applied(model.head.apply, *weights, z, train=False)[0], whole)
    assert jax.tree.all(jax.tree.map(np.array_equal, stats, weights.stats))
    if model.names[0] == "first":
        with pytest.raises(JaxflError, match="[Pp]ass a key to train it"):
            model.apply(*weights, x, train=True)


class Recurrent(nnx.Module):
    """A recurrent layer, which is given a key for its first state of zeros."""

    def __init__(self, rngs):
        self.steps = nnx.RNN(nnx.LSTMCell(3, 4, rngs=rngs))
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        """Map (B, 5, 3) to (B, 2)."""
        return self.head(self.steps(x)[:, -1])


def test_a_first_state_of_zeros_is_no_draw():
    model, x = from_nnx("own", Recurrent, (5, 3), 2), jax.random.normal(jax.random.key(1), (4, 5, 3))
    assert model.names == ("steps", "head")
    module, weights = Recurrent(nnx.Rngs(jax.random.key(0))), initial(model)
    arrays = by_architecture(named_arrays(model, module))[""]
    params = fit(arrays, model, [0])[0].shared.params
    y = applied(model.apply, params, weights.stats, x, train=False)[0]
    np.testing.assert_allclose(y, module(x), rtol=1e-5, atol=1e-6)


class LinenMaps(nn.Module):
    """A convolution with BatchNorm, the mean over pixels, and a head."""

    @nn.compact
    def __call__(self, x, train):
        """Map (B, H, W, 1) to (B, 2)."""
        x = nn.remat(LinenPart, static_argnums=(2,))(name="part")(x, train)
        return nn.Dense(2, name="head")(x.mean((1, 2)))


class LinenPart(nn.Module):
    """A convolution with BatchNorm."""

    @nn.compact
    def __call__(self, x, train):
        """Map (B, H, W, 1) to (B, H, W, 3)."""
        return nn.BatchNorm(use_running_average=not train)(nn.Conv(3, (3, 3))(x))


class NnxMaps(nnx.Module):
    """The same."""

    def __init__(self, rngs):
        self.part = nnx.Sequential(nnx.Conv(1, 3, (3, 3), rngs=rngs), nnx.BatchNorm(3, rngs=rngs))
        self.head = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        """Map (B, H, W, 1) to (B, 2)."""
        return self.head(self.part(x).mean((1, 2)))


class EquinoxMaps(eqx.Module):
    """The same."""

    part: eqx.nn.Sequential
    head: eqx.nn.Linear

    def __init__(self, key):
        conv = eqx.nn.Conv2d(1, 3, 3, padding=1, key=key)
        self.part = eqx.nn.Sequential([conv, eqx.nn.BatchNorm(3, "batch", mode="ema")])
        self.head = eqx.nn.Linear(3, 2, key=key)

    def __call__(self, x, state):
        """Map (1, H, W) to (2,)."""
        x, state = self.part(x, state)
        return self.head(x.mean((1, 2))), state


@pytest.mark.parametrize(
    "make",
    [
        lambda *form: from_linen("own", LinenMaps(), *form),
        lambda *form: from_nnx("own", NnxMaps, *form),
        lambda *form: from_equinox("own", EquinoxMaps, *form),
    ],
    ids=["linen", "nnx", "equinox"],
)
def test_batchnorm_of_single_pixels_cannot_train_on_one_row(make):
    """Then rows differ in their means only, in maps of several pixels in their variances too."""
    for side, needing, differing in ((2, 0, 2), (1, 1, 1)):
        model = make((side, side, 1), 2)
        weights, rows = initial(model), jax.random.normal(jax.random.key(1), (2, 1, *model.shape))
        one, other = (jax.tree.leaves(applied(model.apply, *weights, x, train=True)[1]) for x in rows)
        assert sum(map(differ, one, other)) == differing
        assert len(model.needing_two_rows) == needing


def test_statistics_of_ones_own_need_two_rows():
    assert from_functions("own", functions(), (3,), 2).needing_two_rows == {"norm"}


# ---- where blocks begin


class Residual(nn.Module):
    """A network with a connection around a layer, and a layer that is called twice."""

    @nn.compact
    def __call__(self, x):
        """Map (B, 3) to (B, 2)."""
        x = nn.Dense(3, name="first")(x)
        y = nn.Dense(3, name="around")(nn.relu(x))
        shared = nn.Dense(3, name="twice")
        return nn.Dense(2, name="head")(shared(shared(x + y)))


@pytest.mark.parametrize("named", [False, True])
def test_a_layer_is_found_whether_or_not_its_input_is_named(named):
    """Linen and NNX name it differently."""

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.Dense(4, name="dense")(x.reshape(len(x), -1))
            norm, head = (
                nn.BatchNorm(use_running_average=not train, name="norm"),
                nn.Dense(CLASSES, name="head"),
            )
            return head(inputs=norm(x=x)) if named else head(norm(x))

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.head = nnx.Linear(64, 4, rngs=rngs), nnx.Linear(4, CLASSES, rngs=rngs)

        def __call__(self, x):
            x = self.dense(x.reshape(len(x), -1))
            return self.head(inputs=x) if named else self.head(x)

    for model in (from_linen("net", Linen(), SHAPE, CLASSES), from_nnx("net", Nnx, SHAPE, CLASSES)):
        assert model.names[-2:] == ("dense", "head")
        weights = initial(model)
        assert applied(model.apply, *weights, jnp.ones((2, *SHAPE)), train=True)[0].shape == (2, CLASSES)


class NLinear(nn.Module):
    """Zeng et al. 2023: without its last value, which is added again."""

    @nn.compact
    def __call__(self, x):
        """Map (B, ...) to outputs."""
        x = x.reshape(len(x), -1)
        return nn.Dense(CLASSES, name="linear")(x - x[:, -1:]) + x[:, -1:]


class WideAndDeep(nn.Module):
    """A linear layer beside two others."""

    @nn.compact
    def __call__(self, x):
        """Map (B, ...) to outputs."""
        x = x.reshape(len(x), -1)
        h = nn.relu(nn.Dense(5, name="fc1")(x))
        return nn.Dense(CLASSES, name="deep")(h) + nn.Dense(CLASSES, name="wide")(x)


class Tied(nn.Module):
    """What embeds tokens also scores them."""

    @nn.compact
    def __call__(self, x):
        """Map (B, ...) to outputs."""
        embed = nn.Embed(6, 8, name="embed")
        return embed.attend(jnp.tanh(nn.Dense(8, name="ff")(embed(jnp.maximum(x, 0)))))


@pytest.mark.parametrize(
    ("net", "shape", "head"),
    [
        (NLinear(), SHAPE, None),
        (WideAndDeep(), SHAPE, None),
        (WideAndDeep(), SHAPE, "fc1"),
        (Tied(), TokenShape((9,)), None),
    ],
)
def test_a_connection_around_the_first_layer_is_kept(net, shape, head):
    classes = 6 if len(shape) == 1 else CLASSES
    model = from_linen("net", net, shape, classes, head=head)
    key, (height, *others) = jax.random.key(0), shape
    x = jax.random.normal(key, (4, *shape)) if others else jax.random.randint(key, (4, height), 0, 6)
    variables = net.init(key, x)
    arrays = {tuple(name.split("/")): leaf for name, leaf in named_arrays(model, variables).items()}
    params = unflatten_dict(arrays)["params"]
    found, _ = applied(model.apply, params, dict.fromkeys(model.names, {}), x, train=False)
    np.testing.assert_allclose(found, net.apply(variables, x), rtol=1e-5, atol=1e-6)


def test_a_connection_that_exists_only_in_training_is_kept():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            a = nn.Dense(4, name="a")(x.reshape(len(x), -1))
            b = nn.Dense(4, name="b")(a)
            return nn.Dense(CLASSES, name="head")(a + b if train else b)

    model = from_linen("net", Net(), SHAPE, CLASSES)
    assert model.names == ("a", "head")  # the connection bypasses b
    weights, x = initial(model), jnp.arange(128.0).reshape(2, *SHAPE)
    params = {**weights.params["a"], "head": weights.params["head"]}
    for train in (False, True):
        np.testing.assert_allclose(
            applied(model.apply, *weights, x, train=train)[0],
            applied(Net().apply, {"params": params}, x, train=train),
            rtol=1e-5,
        )


class Folded(nn.Module):
    """A network whose first layer takes the rows of an image as separate examples."""

    norm: bool = False

    @nn.compact
    def __call__(self, x, train=False):
        """Map (B, 8, 8, 1) to (B, CLASSES)."""
        y = nn.Dense(5, name="row")(x.reshape(-1, 8))
        y = nn.BatchNorm(use_running_average=not train, name="norm")(y) if self.norm else y
        y = nn.Dense(4, name="hidden")(y.reshape(len(x), -1))
        return nn.Dense(CLASSES, name="head")(nn.relu(y))


def test_an_axis_may_be_folded_into_the_batch_but_not_before_batchnorm():
    """Blocks after it take any number of examples; BatchNorm of its rows, which no mask fits, is refused."""
    model = from_linen("net", Folded(), SHAPE, CLASSES)
    assert model.names == ("hidden", "head")
    weights, x = initial(model), jnp.arange(5 * 64.0).reshape(5, *SHAPE)
    params = {**weights.params["hidden"], "head": weights.params["head"]}
    expected = applied(Folded().apply, {"params": params}, x)
    np.testing.assert_allclose(applied(model.apply, *weights, x, train=False)[0], expected, rtol=1e-5)
    with pytest.raises(
        JaxflError, match=r"BatchNorm is given 24 rows for a batch of 3; give it \(B, ..., C\)"
    ):
        check("net", from_linen("net", Folded(norm=True), SHAPE, CLASSES), SHAPE, CLASSES)


class Ends(nn.Module):
    """A network with a norm after its classifier."""

    @nn.compact
    def __call__(self, x, train=False):
        """Map (B, 8, 8, 1) to (B, CLASSES)."""
        x = nn.Dense(CLASSES, name="head")(nn.Dense(4, name="dense")(x.reshape(len(x), -1)))
        return nn.BatchNorm(use_running_average=not train, name="norm")(x)


class InTraining(nn.Module):
    """A network with a layer that is called only in training."""

    @nn.compact
    def __call__(self, x, train=False):
        """Map (B, 8, 8, 1) to (B, CLASSES)."""
        x = nn.Dense(4, name="dense")(x.reshape(len(x), -1))
        x = nn.Dropout(0.2, deterministic=False, name="drop")(x) if train else x
        return nn.Dense(CLASSES, name="head")(x)


def test_a_norm_after_the_classifier_belongs_to_the_head():
    assert from_linen("net", Ends(), SHAPE, CLASSES).names == ("dense", "head")


def scaled(params, x):
    """Map (B, 8, 8, 1) to (B, CLASSES)."""
    return x.reshape(len(x), -1)[:, :CLASSES] * params["w"][None]


def test_a_network_with_all_weights_in_its_head_is_noted(tmp_path):
    (tmp_path / "my.py").write_text(
        "import flax.linen as nn\nfrom jaxfl.models.own import from_linen\n\n\n"
        "class Net(nn.Module):\n    classes: int\n\n    @nn.compact\n    def __call__(self, x):\n"
        "        layers = [nn.Dense(3), nn.Dense(self.classes)]\n"
        "        return nn.Sequential(layers, name='all')(x.reshape(len(x), -1))\n\n\n"
        "def net(shape, classes):\n    return from_linen('net', Net(classes), shape, classes)\n"
    )
    model = zoo.build(f"{tmp_path}/my.py:net", shape=SHAPE, classes=CLASSES)
    assert model.names == ("input", "all") and "last block, 'all': methods whose clients keep" in model.note
    only = from_functions("own", {"only": (lambda key, x: {"w": jnp.ones(3)}, scaled)}, SHAPE, CLASSES)
    assert "last block, 'only'" in noted(only).note
    assert only.body.shapes == () and only.body.size == 0


LAYERS = ("first", "second", "value", "gate", "head", "unseen")


def gated(layer):
    """Return two layers, two side by side, the head, and a layer whose output is not returned."""

    def forward(x):
        x = jax.nn.relu(layer("second")(jax.nn.relu(layer("first")(x))))
        z = layer("value")(x) * jax.nn.sigmoid(layer("gate")(x))
        y = layer("head")(z)
        layer("unseen")(z)
        return y

    return forward


class GatedLinen(nn.Module):
    """Linen's."""

    @nn.compact
    def __call__(self, x):
        """Map (B, 3) to (B, 2)."""
        return gated(lambda name: nn.Dense(2 if name == "head" else 3, name=name))(x)


class GatedNnx(nnx.Module):
    """NNX's."""

    def __init__(self, rngs):
        for name in LAYERS:
            setattr(self, name, nnx.Linear(3, 2 if name == "head" else 3, rngs=rngs))

    def __call__(self, x):
        """Map (B, 3) to (B, 2)."""
        return gated(lambda name: getattr(self, name))(x)


class GatedEquinox(eqx.Module):
    """Equinox's."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    value: eqx.nn.Linear
    gate: eqx.nn.Linear
    head: eqx.nn.Linear
    unseen: eqx.nn.Linear

    def __init__(self, key):
        for name in LAYERS:
            setattr(self, name, eqx.nn.Linear(3, 2 if name == "head" else 3, key=key))

    def __call__(self, x):
        """Map (3,) to (2,)."""
        return gated(lambda name: getattr(self, name))(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_linen("own", GatedLinen(), (3,), 2),
        lambda: from_nnx("own", GatedNnx, (3,), 2),
        lambda: from_equinox("own", GatedEquinox, (3,), 2),
    ],
    ids=["linen", "nnx", "equinox"],
)
def test_layers_side_by_side_are_in_the_block_that_computes_them(make):
    """They lie behind the first block, and the head is followed by a layer whose output goes nowhere."""
    model = make()
    assert model.names == ("first", "second", "head")
    params, stats = initial(model)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)
    of = {"first": params["first"]} | params["second"] | params["head"]

    def dense(name):
        kernel = of[name]["kernel"] if "kernel" in of[name] else of[name]["weight"].T
        return lambda x: x @ kernel + of[name]["bias"][None]

    x = jax.random.normal(jax.random.key(1), (4, 3))
    expected = gated(dense)(x)
    np.testing.assert_allclose(applied(model.apply, params, stats, x, train=False)[0], expected, rtol=1e-5)


def test_a_block_begins_where_the_network_is_a_chain():
    model = from_linen("own", Residual(), (3,), 2)
    assert model.names == ("first", "twice", "head")
    assert set(initial(model).params["first"]) == {"first", "around"}
    assert from_linen("own", Residual(), (3,), 2, blocks=("head",)).names == ("first", "head")
    assert from_linen("own", Residual(), (3,), 2, head="twice").names == ("first", "twice")
    assert from_linen("own", nn.Sequential([nn.Dense(2)]), (3,), 2).names == ("input", "layers_0")


def run(apply):
    """Return the outputs of a block of plain functions."""
    model = from_functions("own", {"head": (lambda key, x: {"w": jnp.ones(2)}, apply)}, (3,), 2)
    return model.apply(*initial(model), jnp.ones((1, 3)), train=False)


def drawn(params):
    """Return a network of plain functions with these parameters."""
    return from_functions("own", {"head": (lambda key, x: params, lambda params, x: x)}, (3,), 2)


class Counting(nn.Module):
    """A network whose statistics hold a whole number."""

    @nn.compact
    def __call__(self, x):
        """Map (B, 3) to (B, 2)."""
        self.variable("batch_stats", "count", lambda: jnp.zeros((), int))
        return nn.Dense(2)(x)


class Twofold(nn.Module):
    """A network that returns its features as well."""

    @nn.compact
    def __call__(self, x):
        """Map (B, 3) to (B, 2) and (B, 3)."""
        return nn.Dense(2)(x), x


class Normed(nn.Module):
    """A network whose flag has the name that BatchNorm has for its opposite."""

    @nn.compact
    def __call__(self, x, use_running_average=True):
        """Map (B, 3) to (B, 2)."""
        x = nn.BatchNorm(use_running_average=use_running_average)(nn.Dense(2)(x))
        return nn.Dense(2)(x)


class Dropping(nn.Module):
    """A network whose dropout has a flag with a name of its own."""

    @nn.compact
    def __call__(self, x, is_train=False):
        """Map (B, 3) to (B, 2)."""
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not is_train)(nn.Dense(4)(x)))


class Always(nn.Module):
    """A network that normalises by its batch in evaluation as well."""

    @nn.compact
    def __call__(self, x):
        """Map (B, 3) to (B, 2)."""
        return nn.Dense(2)(nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x)))


class SwitchedNnx(nnx.Module):
    """A network whose BatchNorm follows `nnx.Module.train`, or a flag with a name of its own."""

    def __init__(self, rngs, follows="mode"):
        self.first, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.last, self.follows = nnx.Linear(4, 2, rngs=rngs), follows

    def __call__(self, x, is_train=False):
        """Map (B, 3) to (B, 2)."""
        own = {"use_running_average": not is_train} if self.follows == "flag" else {}
        return self.last(self.norm(self.first(x), **own))


class AlwaysNnx(SwitchedNnx):
    """The same, whose BatchNorm always normalises by its batch."""

    def __call__(self, x):
        """Map (B, 3) to (B, 2)."""
        return self.last(self.norm(self.first(x), use_running_average=False))


class DroppingEquinox(eqx.Module):
    """A network whose dropout has a flag with a name of its own."""

    first: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self, key):
        self.first, self.drop = eqx.nn.Linear(3, 2, key=key), eqx.nn.Dropout(0.5)

    def __call__(self, x, key=None, is_train=False):
        """Map (3,) to (2,)."""
        return self.drop(self.first(x), key=key, inference=not is_train)


class Wrapped(nn.Module):
    """A network with BatchNorm in a part that a transformation of Linen wraps."""

    wrap: Callable = nn.remat
    learns: bool = True

    @nn.compact
    def __call__(self, x, train=False):
        """Map (B, 3) to (B, 2)."""
        x = self.wrap(Part, static_argnums=(2,))(name="part")(x, train or not self.learns)
        return nn.Dense(2, name="head")(x)


class Part(nn.Module):
    """A dense layer and BatchNorm."""

    @nn.compact
    def __call__(self, x, train):
        """Map (B, 3) to (B, 4)."""
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))


@pytest.mark.parametrize("wrap", [nn.remat, nn.jit])
def test_batchnorm_may_be_wrapped_by_a_transformation(wrap):
    model = from_linen("own", Wrapped(wrap), (3,), 2)
    assert model.names == ("input", "head")  # a block cannot begin inside
    weights, x = initial(model), jnp.arange(12.0).reshape(4, 3)
    variables = {
        "params": {"part": weights.params["input"], "head": weights.params["head"]},
        "batch_stats": {"part": weights.stats["input"]},
    }
    for train in (False, True):
        y, after = applied(model.apply, *weights, x, train=train)
        expected, stats = applied(Wrapped(wrap).apply, variables, x, train=train, mutable=["batch_stats"])
        np.testing.assert_allclose(y, expected, rtol=1e-5)
        assert_same(after["input"], stats["batch_stats"]["part"])
    with pytest.raises(JaxflError, match="own changes its BatchNorm statistics in evaluation as well"):
        from_linen("own", Wrapped(wrap, learns=False), (3,), 2)


class Plain(nnx.Module):
    """A network with an array that is neither a parameter nor a statistic."""

    def __init__(self, rngs):
        self.scale, self.head = jnp.ones(3), nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        """Map (B, 3) to (B, 2)."""
        return self.head(x * self.scale)


class TwofoldEquinox(eqx.Module):
    """The same in Equinox, without a state."""

    head: eqx.nn.Linear

    def __init__(self, key):
        self.head = eqx.nn.Linear(3, 2, key=key)

    def __call__(self, x):
        """Map (3,) to (2,) and (3,)."""
        return self.head(x), x


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: from_linen("own", Residual(), (3,), 2, head="around"),
            "no block of own can begin with 'around': a connection bypasses it",
        ),
        (
            lambda: from_linen("own", Residual(), (3,), 2, head="twice", blocks=("head",)),
            "'head' is called after the head of own, which begins with 'twice'; name one before it",
        ),
        (
            lambda: from_linen("own", Residual(), (3,), 2, head="haed"),
            "calls no layer 'haed'; did you mean 'head'",
        ),
        (
            lambda: from_linen("own", zoo.mlp, (3,), 2),
            "own is a function; give from_linen a flax.linen.Module",
        ),
        (
            lambda: from_linen("own", InTraining(), SHAPE, CLASSES),
            "own calls different layers in training (dense, drop, head) and in use (dense, head)",
        ),
        (
            lambda: from_functions("own", {}, (3,), 2),
            "The blocks of own are {}; give from_functions a dict of",
        ),
        (lambda: run(lambda params, x, stats: x), "apply returns an array; return a pair (y, stats)"),
        (lambda: run(lambda params, x: (x, {})), "apply returns a tuple; return an array alone"),
        (lambda: from_nnx("own", lambda rngs: 3, (3,), 2), "make must return a flax.nnx.Module"),
        (lambda: from_nnx("own", Plain, (3,), 2), "the module has variables (scale) besides parameters"),
        (lambda: from_equinox("own", lambda: 3, (3,), 2), "has the parameters (), but is called with (key)"),
        (
            lambda: from_functions("own", {"head": (lambda key, x: [x], lambda params, x: x)}, (3,), 2).size,
            "init returns a list; return a dict",
        ),
        (lambda: drawn({"a/b": jnp.ones(2)}).size, "init names an array 'a/b'; leave out the slash"),
        (
            lambda: drawn({0: jnp.ones(2)}).size,
            "init returns entries that are not all arrays by name; return a dict",
        ),
        (lambda: drawn({"w": jnp.ones(2, int)}).size, "w is int32; make it a float"),
        (lambda: drawn({"w": jnp.ones(2, jnp.bfloat16)}).size, "w is bfloat16, too coarse to be trained"),
        (
            lambda: from_linen("own", Residual(), (3,), 2, blocks="head"),
            "the blocks of own must be a list of names, not 'head'",
        ),
        (lambda: from_linen("own", Twofold(), (3,), 2), "it returns a tuple, not an array of floats"),
        (
            lambda: from_linen("own", Normed(), (3,), 2),
            "own has the parameter use_running_average, which stays at its default in training",
        ),
        (lambda: from_linen("own", Dropping(), (3,), 2), "own has the parameter is_train, which stays"),
        (
            lambda: from_linen("own", Always(), (3,), 2),
            "own changes its BatchNorm statistics in evaluation as well",
        ),
        (
            lambda: from_nnx("own", lambda rngs: SwitchedNnx(rngs, "flag"), (3,), 2),
            "own has the parameter is_train, which stays",
        ),
        (
            lambda: from_nnx("own", AlwaysNnx, (3,), 2),
            "own changes its BatchNorm statistics in evaluation as well",
        ),
        (
            lambda: from_equinox("own", DroppingEquinox, (3,), 2),
            "own has the parameter is_train, which stays",
        ),
        (lambda: from_equinox("own", TwofoldEquinox, (3,), 2), "it returns a tuple, not an array of floats"),
        (lambda: from_linen("own", Counting(), (3,), 2).size, "count is int32; make it a float"),
        (lambda: run(lambda params, x: x > 0), "returns an array of bool, not an array of floats"),
    ],
)
def test_invalid_networks_are_refused(make, sentence):
    with pytest.raises(JaxflError) as caught:
        make()
    assert sentence in str(caught.value)


def test_a_network_that_follows_its_mode_may_have_flags_of_other_meaning():
    assert from_nnx("own", SwitchedNnx, (3,), 2).names


def test_fedrod_refuses_a_network_with_a_block_of_its_own_name():
    """Its second head would overwrite that block."""
    head = functions()["head"]
    model = from_functions("own", {"personal": head}, (3,), 2)
    with pytest.raises(JaxflError, match="FedRoD adds a block personal, but own has one"):
        with_personal_head(None, model, initial(model), None)


# ---- in a run


def test_a_module_in_place_of_a_function_is_refused(tmp_path, capsys):
    (tmp_path / "my.py").write_text(
        "import flax.linen as nn\n\n\nclass Net(nn.Module):\n    pass\n\n\n"
        "def returns(shape, classes):\n    return Net()\n"
    )
    for name in ("Net", "returns"):
        with pytest.raises(SystemExit):
            main(f"run fedavg --dataset digits --models {tmp_path}/my.py:{name}".split())
        said = capsys.readouterr().err
        assert "my.py, line 4: " in said and "from_linen(NAME, MODULE, shape, classes)" in said


@pytest.mark.parametrize("runs", [False, long(True)])
def test_the_pretrained_weights_of_the_document_fit_its_network(tmp_path, monkeypatch, capsys, runs):
    """The weights have the names of the model's leaves, and `jaxfl list` shows the network's options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_net", raising=False)
    if not runs:
        monkeypatch.setattr(jaxfl, "run", lambda *arguments, **options: None)
    code = shown()
    (tmp_path / "my_net.py").write_text(code["my_net.py, Flax Linen"])
    names = {}
    short = code["pretrain.py"].replace("rounds=2", "rounds=1, clients=2, epochs=1")
    exec(compile(short, "pretrain.py", "exec"), names)
    if runs:
        assert "linen-net starts from pretrained.npz" in capsys.readouterr().out
    model = names["linen_net"](names["shape"], names["classes"])
    arrays = by_architecture(dict(np.load("pretrained.npz")))[""]
    weights, misfits = fit(arrays, model, [0])
    assert not misfits
    assert_same(weights.shared.params, jax.device_get(names["variables"]["params"]))
    main(["list", "my_net.py:linen_net"])
    said = " ".join(capsys.readouterr().out.split())
    assert "width │ 8 │ Channels of the convolution." in said


class Rescaled(nn.Module):
    """Layers whose weights Flax names by paths, such as Dense_0/kernel/sigma."""

    @nn.compact
    def __call__(self, x, train=False):
        """Return logits."""
        x = nn.SpectralNorm(nn.Dense(4))(x.reshape(len(x), -1), update_stats=train)
        return nn.Dense(CLASSES)(nn.WeightNorm(nn.Dense(4))(nn.relu(x)))


def test_weights_that_flax_names_by_paths_are_read_from_files():
    """The names of a file give them back; an exported block has parameters and statistics in one."""
    module, x = Rescaled(), jax.random.normal(jax.random.key(1), (2, *SHAPE))
    model, variables = from_linen("rescaled", module, SHAPE, CLASSES), module.init(jax.random.key(0), x)
    arrays = named_arrays(model, variables)
    (weights, _), misfits = fit(by_architecture(arrays)[""], model, [0])
    assert not misfits
    exported = {path.partition("/")[2]: array for path, array in arrays.items()}
    both = unflatten_dict(exported, sep="/")
    for given in (weights, Weights(both, both)):
        y = model.apply(*given, x, train=False)[0]
        np.testing.assert_allclose(y, module.apply(variables, x), rtol=1e-5, atol=1e-6)
