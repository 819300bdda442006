"""Rows of tokens: how they are read, and what networks make of those after the end of a row."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long

import jaxfl
from jaxfl.data.readers import load
from jaxfl.errors import JaxflError
from jaxfl.models import own, shape_check, zoo
from jaxfl.models.model import TokenShape
from jaxfl.models.zoo.gru import GRU
from jaxfl.models.zoo.tokens import real_places

ROWS, STEPS, WORDS = 60, 6, 9


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Return rows of words, in which those of a class say its own word more often."""
    rng = np.random.default_rng(seed)
    labels, lengths = np.arange(ROWS) % 3, rng.integers(1, STEPS + 1, ROWS)
    tokens = rng.integers(3, WORDS, (ROWS, STEPS))
    tokens[:, 0] = labels  # its own word
    tokens[0, :2] = [0, WORDS - 1]
    return {"tokens": tokens, "labels": labels, "lengths": np.maximum(lengths, np.r_[2, lengths[1:]])}


@pytest.fixture
def written(tmp_path):
    """Return a function that writes arrays and returns the name of the data set."""

    def write(**changed):
        path = tmp_path / "texts.npz"
        np.savez(path, **{name: value for name, value in (arrays() | changed).items() if value is not None})
        return str(path)

    return write


def test_tokens_end_where_their_lengths_say(written):
    source, given = load(written(split=np.ones(ROWS, bool))), arrays()
    assert (source.vocabulary, source.images.dtype, source.images.shape) == (WORDS, np.int32, (ROWS, STEPS))
    for row, tokens, length in zip(source.images, given["tokens"], given["lengths"], strict=True):
        assert row.tolist() == [*tokens[:length], *[-1] * (STEPS - length)]
    of_bytes = load(written(split=np.ones(ROWS, bool), tokens=given["tokens"].astype(np.uint8)))
    np.testing.assert_array_equal(of_bytes.images, source.images)
    padded = np.where(source.images < 0, 200, source.images)  # what is no token is not in the vocabulary
    assert load(written(split=np.ones(ROWS, bool), tokens=padded)).vocabulary == WORDS
    whole = load(written(lengths=None, split=np.ones(ROWS, bool)))
    np.testing.assert_array_equal(whole.images, given["tokens"])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"tokens": arrays()["tokens"] - 2}, "tokens run from -2 to 6, but a vocabulary of 7 has 0 to 6"),
        ({"tokens": arrays()["tokens"] + 0.5}, "tokens are float64 of shape"),
        ({"tokens": np.full((ROWS, STEPS), np.nan)}, "tokens are float64 of shape"),
        ({"tokens": np.zeros((ROWS, 2, 2), int)}, r"tokens have shape .*tokens are \(N, T\)"),
        ({"tokens": np.full((ROWS, STEPS), -1), "lengths": None}, "60 of 60 rows have no token"),
        ({"lengths": np.full(ROWS - 1, 2)}, r"lengths are int64 of shape \(59,\); give each of 60 rows"),
        ({"lengths": np.full(ROWS, 2.0)}, "lengths are float64"),
        ({"lengths": np.r_[0, np.ones(ROWS - 1, int)]}, "1 to 6 tokens; leave out the 1 empty texts"),
        (
            {"lengths": np.full(ROWS, STEPS + 1)},
            "lengths run from 7 to 7, but a row has 1 to 6 tokens; correct",
        ),
        ({"features": np.ones((ROWS, 2))}, "holds features and tokens"),
    ],
)
def test_wrong_tokens_are_refused(written, changed, sentence):
    with pytest.raises(JaxflError, match=sentence):
        load(written(**changed))


@pytest.mark.parametrize("every_token", [False, True])
@pytest.mark.parametrize("name", ["gru", "transformer"])
def test_what_follows_the_end_of_a_row_has_no_effect(name, every_token):
    """A row gives the same, however much room is after it; its own tokens and their places count.

    Outputs of every token depend on those up to it.
    """
    few, many = (
        zoo.build(f"{name},width=0.25", shape=(steps,), classes=3, vocabulary=WORDS, every_token=every_token)
        for steps in (4, 7)
    )
    w = jax.jit(many.init)(jax.random.key(0))
    cut = jax.tree.map_with_path(
        lambda path, leaf: leaf[:4] if "position" in jax.tree_util.keystr(path) else leaf, w
    )
    tokens = np.array([[1, 8, 3, 2], [5, 5, 0, 4]], np.int32)
    padded = np.pad(tokens, ((0, 0), (0, 3)), constant_values=-1)
    outputs = [
        np.asarray(outputs_of(model, weights, x))
        for model, weights, x in ((few, cut, tokens), (many, w, padded))
    ]
    if every_token:
        assert (outputs[1][:, 4:] == 0).all()
        outputs[1] = outputs[1][:, :4]
        other = outputs_of(few, cut, np.int32([[1, 8, 0, 2], [5, 5, 4, 4]]))
        np.testing.assert_allclose(other[:, :2], outputs[0][:, :2], rtol=1e-5, atol=1e-6)
        assert np.abs(other[:, 2:] - outputs[0][:, 2:]).min(1).max() > 1e-4
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    turned = outputs_of(few, cut, tokens[:, [1, 0, 2, 3]])
    assert np.abs(turned[0] - outputs[0][0]).max() > 1e-4


@functools.partial(jax.jit, static_argnums=0)
def outputs_of(model, w, x):
    """Return what a model says of rows of tokens."""
    return model.apply(w.params, w.stats, x, train=False)[0]


def test_gated_recurrent_units_are_those_of_the_paper():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 4)).astype(np.float32)
    x[1, 3:] = 0
    layer = GRU(3)
    variables = layer.init(jax.random.key(1), x, train=False, mask=None)
    p = jax.tree.map(np.asarray, variables["params"])
    assert np.asarray(real_places(x)).sum(1).tolist() == [5, 3]

    def sigmoid(a):
        return 1 / (1 + np.exp(-a))

    for row, steps, y in zip(x, (5, 3), layer.apply(variables, x, train=False, mask=None), strict=True):
        h = np.zeros(3)
        for t in range(steps):
            of = {
                g: row[t] @ p[f"from_{g}"]["kernel"] + p[f"from_{g}"]["bias"]
                for g in ("reset", "update", "new")
            }
            r, z = (sigmoid(of[g] + h @ p[f"state_{g}"]) for g in ("reset", "update"))
            n = np.tanh(of["new"] + r * (h @ p["state_new"] + p["state_bias"]))
            h = (1 - z) * n + z * h
        np.testing.assert_allclose(y, h, rtol=1e-5)


class Scan(nn.Module):
    """Scores of every token at each place, by those up to it: their sum, and two layers."""

    words: int

    @nn.compact
    def __call__(self, x, train=False):
        """Map tokens (B, T) to scores (B, T, words)."""
        z = nn.Embed(self.words, 5, name="embed")(jnp.maximum(x, 0)).cumsum(1)
        return nn.Dense(self.words, name="out")(nn.relu(nn.Dense(4, name="hidden")(z)))


def test_a_network_of_ones_own_may_say_what_follows_each_token():
    model = own.from_linen("scan", Scan(WORDS), TokenShape((STEPS,)), WORDS)
    assert model.names == ("embed", "hidden", "out") and model.output == (STEPS, WORDS)
    shape_check.check("scan", model, TokenShape((STEPS,)), WORDS, every_token=True)
    with pytest.raises(JaxflError, match=r"returns \(6, 9\) for an example, not \(9,\)"):
        shape_check.check("scan", model, TokenShape((STEPS,)), WORDS)
    with pytest.raises(JaxflError, match="the next token needs a score of every token at each place"):
        row = TokenShape((STEPS,))
        shape_check.check("bag", bag(row, WORDS), row, WORDS, every_token=True)


class Bag(nn.Module):
    """The mean of the words' vectors, and a classifier."""

    words: int
    classes: int

    @nn.compact
    def __call__(self, x, train=False):
        """Map tokens (B, T) to scores (B, classes)."""
        real = (x >= 0)[..., None]
        z = nn.Embed(self.words, 5, name="embed")(jnp.maximum(x, 0))
        z = jnp.where(real, z, 0).sum(1) / real.sum(1).astype(z.dtype)
        return nn.Dense(self.classes, name="out")(nn.relu(nn.Dense(4, name="hidden")(z)))


def bag(shape, classes):
    """Return the network of one's own; a block begins with its embedding."""
    return own.from_linen("bag", Bag(WORDS, classes), shape, classes)


def test_a_network_of_ones_own_may_begin_with_an_embedding():
    model = bag(TokenShape((STEPS,)), 3)
    assert model.names == ("embed", "hidden", "out") and model.tokens and not model.head.tokens
    w = model.init(jax.random.key(0))
    assert w.params["embed"]["embedding"].shape == (WORDS, 5)
    x = np.array([[1, 2, 3, -1, -1, -1]], np.int32)
    whole = Bag(WORDS, 3).apply({"params": w.params}, x)
    in_parts, _ = dataclasses.replace(model).outputs(w.params, w.stats, x, train=False)
    np.testing.assert_allclose(in_parts[-1], whole, rtol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", *map(long, ("fedper", "fedkemf,knowledge=[gru,width=0.125]"))])
def test_methods_learn_from_tokens(method, written, tmp_path):
    """The deployed models predict tokens as they were scored, with the metadata that the folder has."""
    network = tmp_path / "net.py"
    network.write_text(
        "from jaxfl.models.zoo.transformer import transformer\n"
        "def net(shape, classes, vocabulary):\n"
        "    of_tokens = dict(shape=shape, classes=classes, vocabulary=vocabulary)\n"
        "    return transformer(**of_tokens, width=0.125, heads=2, depth=1)\n"
    )
    options = dict(partition="iid", clients=2, devices=1, rounds=2, eval_every=1, epochs=2)
    options |= dict(lr=0.1, quiet=True)
    run = jaxfl.run(
        method, dataset=written(), models=[f"{network}:net"], run_dir=str(tmp_path / "run"), **options
    )
    client, rows = run.models[1], run.partition.test[1]
    tokens, labels = run.source.images[rows], run.source.labels[rows]
    assert (client.predict(tokens) == labels).mean() == pytest.approx(client.accuracy)
    assert client.plain(lambda: tokens)
    with pytest.raises(
        JaxflError, match=f"from 0 to {WORDS - 1}, and -1 after the end of a row, but .* to 9"
    ):
        client.predict(np.full((1, STEPS), WORDS))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"augment": ["flip"]}, "--augment flip changes images, but .* holds tokens"),
        ({"shift": ["noise"]}, "--shift noise changes images, but .* holds tokens"),
        ({"normalise": "feature"}, "--normalise feature: .* holds tokens, which are no amounts"),
        ({"public": "digits"}, "tokens of another set do not mean the same"),
        ({"models": ["mlp"]}, r"mlp takes images .* not \(6,\); tokens need a network that embeds them"),
        ({"method": "fedkemf", "knowledge": "mlp"}, r"mlp takes images .* not \(6,\); tokens need a network"),
        (
            {"models": ["harcnn"]},
            r"harcnn takes windows of a signal, .* not examples of shape \(6,\)",
        ),
        ({"models": ["gru"], "dataset": "digits"}, r"gru takes tokens, but the data are examples of shape"),
    ],
)
def test_what_is_for_images_is_refused(options, sentence, written, tmp_path):
    with pytest.raises(JaxflError, match=sentence):
        options = {"method": "fedavg", "dataset": written(), "clients": 2, "quiet": True} | options
        jaxfl.run(options.pop("method"), run_dir=str(tmp_path / "run"), **options)
