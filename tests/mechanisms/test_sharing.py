"""Which leaves stay on a client, by their paths."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest
from conftest import long

from jaxfl.core import tree
from jaxfl.core.training import Trained, Training
from jaxfl.mechanisms import sharing
from jaxfl.mechanisms.sharing import Phase, body, every_leaf, head, local_training, no_leaf, norms, separate
from jaxfl.models import zoo
from jaxfl.models.model import Weights


def kept(model, keep, bn_stats="aggregate"):
    """The paths of the leaves that stay, of parameters and statistics."""
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
    """By what they are, not by their names: a DenseNet calls one last_norm."""
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


def test_training_in_phases_has_the_steps_of_all_and_the_loss_of_the_last(monkeypatch):
    model = zoo.mlp(shape=(8, 8, 1), classes=3)
    ways = iter([Trained("first", 2.0, 3), Trained("second", 1.0, 4)])
    monkeypatch.setattr(sharing, "descend", lambda *_, **__: next(ways))
    monkeypatch.setattr(sharing, "own_rows", lambda *_: None)
    train = local_training(Training(), phases=lambda model: (Phase(("fc1",), 1), Phase(("classifier",), 1)))
    participant: Any = SimpleNamespace(model=model, client=None, hyper=None, received=None)
    assert train(None, participant, None) == Trained("second", 1.0, 7)
