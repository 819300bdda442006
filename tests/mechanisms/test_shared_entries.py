"""Entries that several architectures share: which slice of a network a narrower one is."""

import jax
import numpy as np
import pytest
from conftest import assert_same

from jaxfl.mechanisms.shared_entries import add_up, hand_out, slices
from jaxfl.models import zoo
from jaxfl.models.blocks import BasicBlock, ConvBlock, DenseBlock
from jaxfl.models.build import network, scaled
from jaxfl.models.model import Block, Weights
from jaxfl.models.slices import cut
from jaxfl.models.zoo.densenet import DenseLayer, Transition
from jaxfl.models.zoo.mobilenet import InvertedResidual


def varied(width):
    """Return a network with what is hard in those of the zoo: sums, gates, concatenations, flattening."""
    modules = {
        "stem": ConvBlock(scaled(width, 6), 3, 1, norm=True),
        "basic": BasicBlock(scaled(width, 6), 2),
        "inverted": InvertedResidual(scaled(width, 4), scaled(width, 8), squeezed=scaled(width, 2)),
        "dense1": DenseLayer(scaled(width, 8)),
        "dense2": DenseLayer(scaled(width, 4)),
        "transition": Transition(),
        "flat": DenseBlock(scaled(width, 10)),
    }
    body = [Block(name, module) for name, module in modules.items()]
    return network(f"blocks,width={width}", body, shape=(8, 8, 1), classes=3)


def recurrent(width):
    """Return gated recurrent units that say what follows each token."""
    return zoo.build(
        f"gru,embedding=4,hidden=6,width={width}", shape=(5,), classes=7, vocabulary=7, every_token=True
    )


def along_steps(width):
    """Return convolutions along the steps of a signal."""
    return zoo.build(f"harcnn,kernel=3,width={width / 32}", shape=(1, 11, 2), classes=3)


@pytest.mark.parametrize("family", [varied, recurrent, along_steps])
def test_a_slice_is_the_wider_network_without_its_other_channels(family):
    models = narrow, wide = family(0.5), family(1)
    rng, places, nothing = np.random.default_rng(0), slices(models), Weights({}, {})

    def draw(leaf):
        return rng.uniform(0.5, 2, leaf.shape).astype(np.float32)

    weights = jax.tree.map(draw, narrow.form)
    zero = nothing, jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), wide.form)
    whole = jax.jit(lambda weights: add_up((weights, nothing), places, zero))(weights)
    assert_same(hand_out(whole, places, (weights, zero[1]))[0], weights)

    x = rng.integers(0, 7, (2, *narrow.shape)) if narrow.tokens else draw(np.empty((2, *narrow.shape)))
    of_narrow, of_wide = (
        jax.jit(lambda w, model=model: model.apply(w.params, w.stats, x, train=False)[0])(w)
        for model, w in zip(models, (weights, whole[1]), strict=True)
    )
    np.testing.assert_allclose(of_narrow, of_wide, rtol=1e-5)


def test_layers_before_a_concatenation_keep_their_first_channels():
    """Layers do so although the concatenation has as many channels, which are not the first ones."""
    narrow, wide = varied(0.5), varied(1)
    paths = (
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(narrow.form.params["dense2"])
    )
    found = dict(zip(paths, cut_of(wide, narrow, "dense2"), strict=True))
    joined = [0, 1, 4, 5, 6, 7]  # of the inverted block and of dense1
    assert found["['conv1']['kernel']"][-1] == found["['conv1']['norm']['scale']"][-1] == slice(8)
    assert found["['conv2']['kernel']"][-2:] == (slice(8), slice(2))
    assert found["['conv1']['kernel']"][-2].tolist() == found["['norm']['bias']"][0].tolist() == joined


def cut_of(wide, narrow, block):
    """Return the slices of the leaves of a block's parameters."""
    places = zip(jax.tree.leaves_with_path(narrow.form), cut(wide, narrow), strict=True)
    return [place for (path, _), place in places if (str(path[0]), path[1].key) == (".params", block)]
