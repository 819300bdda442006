"""Clients of every method start from given weights: nothing that they start from is drawn at random."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from conftest import (
    assert_same,
    cohort,
    federate,
    long,
    tiny_links,
    tiny_models,
    tiny_partition,
    tiny_source,
    validating,
)

from jaxfl.core import tree
from jaxfl.core.deploy import of_clients
from jaxfl.core.job import traced
from jaxfl.core.protocol import Predictor
from jaxfl.models.named import ClientWeights
from jaxfl.registry import METHODS
from methods.cases import CASES

SHARED, OWN = 1.0, 2.0  # all values of an architecture, and of its first client; of the others 3, 4, ...
SECONDS = {  # methods whose initialisation takes seconds
    "compfl", "compfl-dd", "fedamp", "fedap", "fedcmd", "fedfomo", "hermes",
    "mnfl-homogeneous", "pfedhn", "pfedsim",
}  # fmt: skip
# Blocks that start with each client's own values, by method: all, the head, the body, none.
BEGUN = {
    "local": "all",
    "fedkemf": "all",
    "flexifed": "all",
    "hermes": "all",
    "fedper": "head",
    "fedgh": "body",
    "lg-fedavg": "body",
    "fedavg": "none",
    "heterofl": "none",
    "pfedbayes": "none",
    "pfedhn": "none",
    "pfedsim": "none",
}


def given(group):
    """Return weights of an architecture whose values identify their owners."""

    def filled(shape, value):
        return np.full(shape.shape, value, shape.dtype)

    def of_each(shape):
        return np.stack([filled(shape, OWN + i) for i in range(len(group.id))])

    leaves = group.model.form
    return ClientWeights(
        jax.tree.map(lambda shape: filled(shape, SHARED), leaves), jax.tree.map(of_each, leaves)
    )


@pytest.fixture(scope="module")
def federation():
    """Return clients of two architectures, three and two, with given weights."""
    source = tiny_source()
    plain = federate(source, validating(tiny_partition(source)), tiny_models(), links=tiny_links())
    return dataclasses.replace(plain, initial=tuple(map(given, plain.groups)))


@pytest.mark.parametrize("name", [long(name) if name in SECONDS else name for name in METHODS])
def test_clients_of_every_method_begin_with_given_weights(federation, name):
    method = METHODS[name]
    config = method.config(**CASES[name].short)
    algorithm = method.build(jax.tree.map(lambda rate: math.nan, config))
    state = algorithm.init(jax.random.key(0), federation, traced(config))
    everyone = cohort(federation, range(5))
    received = jax.device_get(jax.jit(algorithm.receive)(jax.random.key(1), state, federation, everyone))
    for model, group, predictor in zip(federation.models, federation.groups, received, strict=True):
        weights = of_clients(model, predictor)
        for part in weights:
            leaves = {tree.names(path): leaf for path, leaf in jax.tree.leaves_with_path(part.params)}
            for (block, *_), leaf in leaves.items():
                # A head may be made from prototypes; anything else is given, or a mean of what is given.
                if block in model.body.names:
                    assert leaf.min() >= SHARED and leaf.max() <= OWN + len(group.id)
        if name in BEGUN:
            blocks = {"all": model.names, "head": model.head.names, "body": model.body.names, "none": ()}
            for block in model.names:
                assert begun(weights, block, group) == (block in blocks[BEGUN[name]]), block


def begun(weights, block, group):
    """Return whether all clients have their own values of a block, or else all have the architecture's."""
    shared, own = (jax.tree.leaves(part.params.get(block)) for part in weights)
    for leaf in own:
        of_clients = [np.unique(of_client).tolist() for of_client in leaf]
        if of_clients != [[SHARED]] * len(group.id):
            assert of_clients == [[OWN + i] for i in range(len(group.id))]
            return True
    assert all((leaf == SHARED).all() for leaf in shared)
    return False


@pytest.mark.parametrize("name", [long(name) if name in SECONDS else name for name in BEGUN])
def test_clients_may_begin_with_draws_of_their_own(federation, name):
    """What they keep comes from a key of their own, what a server hands out is one draw."""
    method, key = METHODS[name], jax.random.key(0)
    apart = dataclasses.replace(federation, initial=None, apart=True)
    config = method.config(**CASES[name].short)
    algorithm = method.build(jax.tree.map(lambda rate: math.nan, config))
    state = algorithm.init(key, apart, traced(config))
    received = jax.jit(algorithm.receive)(jax.random.key(1), state, apart, cohort(federation, range(5)))
    for g, (model, predictor) in enumerate(zip(federation.models, jax.device_get(received), strict=True)):
        ids = np.asarray(federation.groups[g].id)
        draws = [initial(model, jax.random.fold_in(jax.random.fold_in(key, g), i)) for i in ids]
        weights = of_clients(model, predictor)
        expected = jax.tree.map(lambda *leaves: np.stack(leaves), *draws)
        own = {"all": model.names, "head": model.head.names, "body": model.body.names, "none": ()}[
            "none" if name == "fedbabu" else BEGUN[name]  # phi_0 is one for all
        ]
        for block in own:
            assert_same(weights.own.params[block], expected[block], tolerance=1e-6)
        if name != "pfedhn":  # whose hypernetwork generates another network for each client
            rest = [weights.own.params.get(block) for block in {*model.names} - {*own}]
            assert all((leaf == leaf[:1]).all() for leaf in jax.tree.leaves(rest))


@functools.partial(jax.jit, static_argnums=0)
def initial(model, key):
    """Return a model's initial parameters."""
    return model.init(key).params


def test_weights_computed_from_shared_ones_are_shared(federation):
    """Without leaves of their own all clients have one network, even if `predict` transforms it."""
    model, given_weights = federation.models[0], jax.device_get(federation.initial[0].shared)

    def halved(network, shared, own, x):
        w = jax.tree.map(lambda leaf: leaf / 2, shared)
        return network.apply(w.params, w.stats, x, train=False)[0]

    found = of_clients(model, Predictor(given_weights, None, halved))
    assert not jax.tree.leaves(found.own)
    assert {float(leaf.max()) for leaf in jax.tree.leaves(found.shared)} == {SHARED / 2}
