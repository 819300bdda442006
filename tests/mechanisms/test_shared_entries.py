"""Entries that several architectures share: which part of a network a narrower one is."""

import jax
import numpy as np
from conftest import assert_same

from jaxfl.mechanisms.shared_entries import add_up, hand_out, slices
from jaxfl.models.blocks import BasicBlock, ConvBlock, DenseBlock
from jaxfl.models.build import network, scaled
from jaxfl.models.model import Block, Weights
from jaxfl.models.zoo.densenet import DenseLayer, Transition
from jaxfl.models.zoo.mobilenet import InvertedResidual


def varied(width):
    """A network that has what is hard in those of the zoo: sums, gates, concatenations, flattening."""
    modules = {
        "stem": ConvBlock(scaled(width, 6), 3, 1, norm=True),
        "basic": BasicBlock(scaled(width, 6), 2),
        "inverted": InvertedResidual(scaled(width, 4), scaled(width, 8), squeezed=scaled(width, 2)),
        "dense1": DenseLayer(scaled(width, 4)),
        "dense2": DenseLayer(scaled(width, 4)),
        "transition": Transition(),
        "flat": DenseBlock(scaled(width, 10)),
    }
    body = [Block(name, module) for name, module in modules.items()]
    return network(f"blocks,width={width}", body, shape=(8, 8, 1), classes=3)


def test_a_slice_is_the_wider_network_without_its_other_channels():
    models = narrow, wide = varied(0.5), varied(1)
    rng, places, nothing = np.random.default_rng(0), slices(models), Weights({}, {})

    def draw(leaf):
        return rng.uniform(0.5, 2, leaf.shape).astype(np.float32)

    weights = jax.tree.map(draw, narrow.form)
    zero = nothing, jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), wide.form)
    whole = jax.jit(lambda weights: add_up((weights, nothing), places, zero))(weights)
    assert_same(hand_out(whole, places, (weights, zero[1]))[0], weights)

    x = draw(np.empty((2, *narrow.shape)))
    of_narrow, of_wide = (
        jax.jit(lambda w, model=model: model.apply(w.params, w.stats, x, train=False)[0])(w)
        for model, w in zip(models, (weights, whole[1]), strict=True)
    )
    np.testing.assert_allclose(of_narrow, of_wide, rtol=1e-5)
