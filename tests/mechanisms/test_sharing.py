"""Leaves that stay on a client, blocks that a method adds, training in phases."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import long

from jaxfl.core import tree
from jaxfl.core.cohorts import all_clients
from jaxfl.core.job import traced
from jaxfl.core.training import Trained, Training, forward, mean
from jaxfl.mechanisms import sharing
from jaxfl.mechanisms.kept_leaves import body, every_leaf, head, no_leaf, norms, separate
from jaxfl.mechanisms.sharing import Phase, local_training
from jaxfl.models import zoo
from jaxfl.models.model import Weights


def kept(model, keep, bn_stats="aggregate"):
    """Return the paths of the leaves that stay, of parameters and statistics."""
    weights = jax.eval_shape(model.init, jax.random.key(0))
    stays, shared = separate(weights, keep(model), bn_stats)
    paths = {tree.names(path) for path, _ in jax.tree.leaves_with_path(stays)}
    everything = {tree.names(path) for path, _ in jax.tree.leaves_with_path(weights)}
    others = {tree.names(path) for path, _ in jax.tree.leaves_with_path(shared)}
    assert isinstance(stays, Weights) and paths | others == everything and not paths & others
    return paths


@pytest.mark.parametrize(
    ("name", "options"),
    [long("densenet121", {}), ("resnet9", {"norm": "batch"}), ("lenet5", {"norm": "batch"})],
)
def test_layers_that_normalise_stay_with_scale_bias_and_statistics(name, options):
    """Norms are found by what they are, not by their names: a DenseNet calls one last_norm."""
    model = getattr(zoo, name)(shape=(32, 32, 3), classes=3, width=0.1, **options)
    found = kept(model, norms)
    assert {path[-1] for path in found} == {"scale", "bias", "mean", "var"}
    weights = jax.eval_shape(model.init, jax.random.key(0))
    scales = {
        tree.names(path) for path, _ in jax.tree.leaves_with_path(weights) if tree.names(path)[-1] == "scale"
    }
    assert {path for path in found if path[-1] == "scale"} == scales != set()
    assert not kept(zoo.mlp(shape=(8, 8, 1), classes=3), norms)


def test_head_and_body_are_complements_and_local_statistics_stay():
    model = zoo.mlp(shape=(8, 8, 1), classes=3, norm="batch")
    assert kept(model, head) | kept(model, body) == kept(model, every_leaf)
    assert not kept(model, head) & kept(model, body) and not kept(model, no_leaf)
    assert {path[0] for path in kept(model, no_leaf, "local")} == {"stats"}


def test_added_blocks_begin_with_the_options_and_train_like_all_others(federation):
    """The added block has a bias for each class."""

    def extend(key, model, weights, hyper):
        return weights._replace(params=weights.params | {"more": {"bias": jnp.full(model.classes, hyper.lr)}})

    def shifted(participant, blocks):
        def loss(weights, batch, key):
            logits, stats = forward(participant.model, weights, batch, key)
            values = optax.softmax_cross_entropy_with_integer_labels(
                logits + weights.params["more"]["bias"][None], batch.y
            )
            return mean(values, batch), stats

        return loss

    config = Training(lr=0.5, steps=1, batch_size=4)
    train = local_training(config, objective=shifted)
    algorithm = sharing.sharing(config, train=train, extend=extend)
    state = algorithm.init(jax.random.key(0), federation, traced(config))
    biases = [weights.params["more"]["bias"] for weights in state.shared]
    assert all((bias == 0.5).all() for bias in biases)
    after, _ = jax.jit(algorithm.step)(jax.random.key(1), state, federation, all_clients(federation, 1))
    moved = [weights.params["more"]["bias"] for weights in after.shared]
    assert all((bias != new).all() for bias, new in zip(biases, moved, strict=True))


def test_an_added_block_can_be_drawn_as_another_head(federation):
    """Its key is none of those that initial weights are drawn with, and differs between architectures."""
    drawn = []

    def extend(key, model, weights, hyper):
        drawn.append((key, model, weights))
        return weights

    sharing.sharing(Training(), extend=extend).init(jax.random.key(0), federation, traced(Training()))
    for key, model, weights in drawn:
        (head,) = model.head.names
        for own in (key, *jax.random.split(key)):
            kernel = model.head.init(own).params[head]["kernel"]
            assert not jnp.array_equal(kernel, weights.params[head]["kernel"])
    (first, *_), (second, *_) = drawn
    assert first != second


def test_the_default_loss_leaves_added_statistics_and_decays_added_parameters(federation):
    def extend(key, model, weights, hyper):
        seen = {"seen": {"count": jnp.full(2, 7.0)}}
        return Weights(weights.params | {"more": {"bias": jnp.ones(3)}}, weights.stats | seen)

    config = Training(lr=0.5, steps=1, batch_size=4, momentum=0.0, weight_decay=0.1)
    algorithm = sharing.sharing(config, extend=extend)
    state = algorithm.init(jax.random.key(0), federation, traced(config))
    after, _ = jax.jit(algorithm.step)(jax.random.key(1), state, federation, all_clients(federation, 1))
    for weights in after.shared:
        assert jnp.allclose(weights.params["more"]["bias"], 1 - 0.5 * 0.1)
        assert jnp.allclose(weights.stats["seen"]["count"], 7)


def test_training_in_phases_has_the_steps_of_all_and_the_loss_of_the_last(monkeypatch):
    model = zoo.mlp(shape=(8, 8, 1), classes=3)
    ways = iter([Trained("first", 2.0, 3), Trained("second", 1.0, 4)])
    monkeypatch.setattr(sharing, "descend", lambda *_, **__: next(ways))
    monkeypatch.setattr(sharing, "own_rows", lambda *_: None)
    train = local_training(Training(), phases=lambda model: (Phase(("fc1",), 1), Phase(("classifier",), 1)))
    participant: Any = SimpleNamespace(model=model, client=None, hyper=None, received=Weights({}, {}))
    assert train(None, participant) == Trained("second", 1.0, 7)
