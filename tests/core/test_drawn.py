"""Initial weights that are drawn piece by piece are those of one compiled program, bit by bit."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.core import drawn as drawing
from jaxfl.core.drawn import drawn
from jaxfl.models.zoo import lenet5, mlp


class Draws(NamedTuple):
    """Stands for a model."""

    init: Callable


def in_turn(key):
    leaves = []
    for size in (3, 2 * drawing.PIECES[0] + 5, 2 * drawing.PIECES[1] + 5, 0):
        key, own = jax.random.split(key)
        leaves.append(jax.random.normal(own, (size,)))
    return leaves


def within_control_flow(key):
    each = jax.vmap(lambda one: jax.random.uniform(one, (4,)))(jax.random.split(key, 3))
    (_, scanned) = jax.lax.scan(
        lambda one, _: (jax.random.fold_in(one, 1), jax.random.bits(one)), key, length=3
    )
    return each, scanned, jax.lax.cond(each[0, 0] > 0.5, jax.random.normal, jax.random.gumbel, key)


def of_other_kinds(key):
    old = jax.random.wrap_key_data(jax.random.key_data(key))
    later = jax.random.fold_in(old, jax.random.randint(key, (), 0, 9))  # a key that depends on a draw
    return (
        jax.random.normal(later, (5,)),
        jax.random.bits(key, (5,), jnp.uint8),
        jax.random.permutation(key, 7),
    )


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        lenet5(shape=(16, 16, 1), classes=3),
        mlp(shape=(700, 1, 1), classes=3),
        Draws(in_turn),
        Draws(within_control_flow),
        Draws(of_other_kinds),
    ],
    ids=["lenet5", "mlp", "in turn", "within control flow", "of other kinds"],
)
def test_the_bits_are_those_of_one_program(model, x64):
    with jax.enable_x64(x64):
        key = jax.random.key(7)
        for expected in (jax.jit(model.init)(key), jax.jit(lambda key: drawn(model, key))(key)):
            jax.tree.map(np.testing.assert_array_equal, drawn(model, key), expected)


GENERATORS = [("jax_default_prng_impl", "rbg"), ("jax_threefry_partitionable", False)]


@pytest.mark.parametrize("option, value", GENERATORS)
def test_other_generators_draw_as_they_do(option, value, monkeypatch):
    monkeypatch.setattr(drawing, "_piece", None)  # which is of the usual one
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        key = jax.random.key(7)
        jax.tree.map(np.testing.assert_array_equal, drawn(Draws(in_turn), key), jax.jit(in_turn)(key))
    finally:
        jax.config.update(option, before)


def test_the_program_of_a_network_draws_nothing(monkeypatch):
    """All bits come from outside, those of dropout and the like are not drawn."""
    drawn_outside = []

    def zeros(key, shape):
        drawn_outside.append(np.prod(shape))
        return np.zeros(shape, np.uint32)

    monkeypatch.setattr(drawing, "_bits", zeros)
    model = lenet5(shape=(16, 16, 1), classes=3)
    key = jax.random.key(7)
    changed = jax.tree.map(lambda one, other: np.any(one != other), drawn(model, key), model.init(key))
    assert len(drawn_outside) == sum(map(bool, jax.tree.leaves(changed))) == 10
