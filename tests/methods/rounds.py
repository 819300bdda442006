"""Rounds of methods on tiny federations, for reductions: tests that two methods compute the same.

A batch holds all rows of a client, so that two methods that shuffle by different keys differ only by
rounding. Where they do the same work in the same order, they are equal to the bit.
"""

import functools
import math

import jax
from conftest import (
    CLASSES,
    SHAPE,
    SIZES,
    cohort,
    tiny_links,
    tiny_models,
    tiny_partition,
    tiny_source,
    validating,
)

from jaxfl.core import flops
from jaxfl.core.job import traced
from jaxfl.core.programs import Program
from jaxfl.data.federate import federate
from jaxfl.models import zoo
from jaxfl.registry import METHODS

TRAINING = {"epochs": 2, "batch_size": max(SIZES), "weight_decay": 0.1}
HIDDEN = 5
EVERYONE = range(len(SIZES))
COHORTS = (EVERYONE, (0, 3, 4), (1, 2))
ALWAYS = (EVERYONE,) * 3

# ---- federations


def federated(*models, sizes=SIZES, validates=False):
    """Return a federation with these pairs (model, clients)."""
    source = tiny_source()
    partition = tiny_partition(source, sizes)
    return federate(source, validating(partition) if validates else partition, models, links=tiny_links())


def mlp(**options):
    """Return the model of most of these clients."""
    return zoo.mlp(shape=SHAPE, classes=CLASSES, **{"hidden": HIDDEN} | options)


@functools.cache
def alike():
    """Return five clients of one architecture."""
    return federated((mlp(), len(SIZES)))


@functools.cache
def normalised():
    """Return the same with BatchNorm in the extractor; the client with a single row cannot train."""
    return federated((mlp(norm="batch"), len(SIZES)))


@functools.cache
def equal():
    """Return clients of one architecture with equally many rows."""
    return federated((mlp(), len(SIZES)), sizes=(max(SIZES),) * len(SIZES))


@functools.cache
def mixed():
    """Return clients of two architectures, the larger one first."""
    return federated((mlp(), 2), (mlp(hidden=4), 3))


@functools.cache
def convolving():
    """Return clients of two architectures, one of them with convolutions."""
    return federated(*tiny_models())


# ---- rounds


@functools.cache
def program(name, options):
    """Return one round of a method as a program; its rates come with the state, so they may be NaN here."""
    config = jax.tree.unflatten(options, [math.nan] * options.num_leaves)
    return Program(METHODS[name].build(config).step)


def initial(name, federation, **options):
    """Return a method's state before the first round."""
    config = METHODS[name].config(**options)
    return METHODS[name].build(config).init(jax.random.key(0), federation, traced(config))


def run(name, federation, cohorts=COHORTS, **options):
    """Run rounds of a method and return [(state, info) after each round]."""
    state, done = initial(name, federation, **options), []
    for t, present in enumerate(cohorts):
        state, info = one_round(name, state, federation, t, present, **options)
        done.append((state, info))
    return done


def one_round(name, state, federation, t, present, **options):
    """Return (state, info) after round t with the clients of these ids."""
    step = program(name, jax.tree.structure(METHODS[name].config(**options)))
    key = jax.random.fold_in(jax.random.key(1), t)
    return step(key, state, federation, cohort(federation, present, t, rounds=len(COHORTS)))


def billed(name, federation, present=EVERYONE, part="step", **options):
    """Return (up, down, operations) of a first round or of another part; nothing else is compiled of it."""
    config = METHODS[name].config(**options)
    algorithm = METHODS[name].build(config)

    @jax.jit
    def counted(key):
        state = algorithm.init(key, federation, traced(config))
        with flops.collect() as amounts:
            _, info = getattr(algorithm, part)(key, state, federation, cohort(federation, present))
        return info.up, info.down, flops.by_owner(amounts, [len(group.id) for group in federation.groups])

    return jax.device_get(counted(jax.random.key(0)))


def reported(info):
    """Return a round's loss and traffic."""
    return info.loss, info.up, info.down
