"""A trial of a method: five tiny clients, a round of which is everything that a method computes in it."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import tree
from jaxfl.core.advance import with_host_info
from jaxfl.core.job import traced
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Algorithm, Cohort, Info, Slots
from jaxfl.core.protocol_check import check
from jaxfl.core.schedule import is_options
from jaxfl.data.federate import federate
from jaxfl.data.federation import Federation
from jaxfl.data.partition import Partition
from jaxfl.data.sources import Source
from jaxfl.folder.variant import Variant
from jaxfl.models import zoo
from jaxfl.models.build import NormName

SHAPE, CLASSES = (8, 8, 1), 3
SIZES = (7, 4, 5, 1, 6)  # training rows: with BatchNorm a single one is no batch
EVERYONE, SOME, FIRST_ONLY = range(5), (1, 0, 3), (0, 1, 2)  # clients 3 and 4 have another architecture
ROUNDS = 3
TOLERANCE = 1e-5  # relative to 1 + |number|, where sums may have another order


class Round(NamedTuple):
    """Everything that a method computes in a round; logits after `step`, per group (k_g, images, outputs)."""

    state: Any
    info: Info
    trained: tuple | None
    received: tuple
    personal: tuple


class Trial(NamedTuple):
    """A method on its five clients, after a round of all of them."""

    variant: Variant  # the method with its options
    algorithm: Algorithm  # what the method builds
    play: Program  # the program ``(key, state, federation, cohort) -> Round``, without a host step
    federation: Federation
    state: Any  # state after that round
    stacked: Any  # the state's tree, True where a leaf has one entry per client


def begin(variant: Variant) -> Trial:
    """Return a trial after its first round."""
    federation, algorithm = clients(), variant.algorithm
    check(algorithm, federation, traced(variant.config), ROUNDS)

    def start(federation):
        return algorithm.init(jax.random.key(0), federation, traced(variant.config))

    # What is twice as long with twice as many clients has one entry per client.
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), federation.groups)
    shapes = jax.eval_shape(start, federation)
    doubled = jax.eval_shape(start, dataclasses.replace(federation, groups=twice))
    counts = {len(SIZES), *(len(group.id) for group in federation.groups)}

    def of_clients(one, other):
        first, second = (leaf.shape[:1] for leaf in (one, other))
        return first != second and first[0] in counts and second[0] == 2 * first[0]

    stacked = jax.tree.map(of_clients, shapes, doubled)
    play, everyone = Program(whole_round(algorithm)), cohort(federation, EVERYONE)
    trial = Trial(variant, algorithm, play, federation, start(federation), stacked)
    return trial._replace(state=played(trial, jax.random.key(1), trial.state, everyone).state)


TRAINED_ON = range(30)  # rows that only clients train on


def clients(norms: tuple[NormName, ...] = ("none", "batch")) -> Federation:
    """Return unequal clients of two architectures with these norms; an image's mean gives its class."""
    rng, rows = np.random.default_rng(0), np.arange(60, dtype=np.int32)
    labels = rng.permutation(rows % CLASSES).astype(np.int32)
    images = rng.integers(0, 120, (60, *SHAPE)) + 60 * labels[:, None, None, None]
    ends, test = np.cumsum(SIZES), rows[40:]
    partition = Partition(
        train=tuple(rows[end - size : end] for size, end in zip(SIZES, ends, strict=True)),
        validation=(test[:6],) * len(SIZES),
        test=(test,) * len(SIZES),
        relabel=np.tile(np.arange(CLASSES, dtype=np.int32), (len(SIZES), 1)),
        outputs=CLASSES,
        public=rows[TRAINED_ON.stop : 40],
    )
    source = Source("a trial's", images.astype(np.uint8), labels, rows < 40, CLASSES)
    models = [zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=5, norm=norm) for norm in norms]
    linked = ~np.eye(len(SIZES), dtype=bool)
    return federate(source, partition, [(models[0], 3), (models[1], 2)], links=linked)


def cohort(federation: Federation, ids: Iterable[int], places: int = 0) -> Cohort:
    """Return the last round's cohort of these ids, in this order, with an empty place and `places` more."""

    def slots(group):
        position = {int(i): place for place, i in enumerate(np.asarray(group.id))}
        present, room = [position[i] for i in ids if i in position], len(group.id) + 1 + places
        index = present + [len(group.id)] * (room - len(present))
        return Slots(np.array(index, np.int32), np.arange(room) < len(present))

    return Cohort(np.int32(ROUNDS - 1), tuple(map(slots, federation.groups)), ROUNDS)


def whole_round(algorithm: Algorithm) -> Callable:
    """Return the function ``(key, state, federation, cohort) -> Round`` of an algorithm."""

    def logits(predictors, federation, cohort):
        x = federation.inputs(jnp.arange(40, 44))
        return tuple(
            jax.lax.map(
                lambda one: predictor.predict(model, predictor.shared, one[1], x),  # noqa: B023
                (slots.index, predictor.stacked),
            )
            for model, predictor, slots in zip(federation.models, predictors, cohort.groups, strict=True)
        )

    def play(key, state, federation, cohort):
        state, info = algorithm.step(key, state, federation, cohort)
        trained = info.trained and logits(info.trained, federation, cohort)
        info = info._replace(trained=None, teacher=None)
        received = logits(algorithm.receive(key, state, federation, cohort), federation, cohort)
        if algorithm.personal is algorithm.receive:  # not compiled twice
            return Round(state, info, trained, received, received)
        personal = logits(algorithm.personal(key, state, federation, cohort), federation, cohort)
        return Round(state, info, trained, received, personal)

    return play


def played(trial: Trial, key, state, cohort: Cohort) -> Round:
    """Run a round from some state, with its host step."""
    done = trial.play(key, state, trial.federation, cohort)
    if not trial.algorithm.host:
        return done
    state, more = trial.algorithm.host(key, done.state, trial.federation, cohort)
    return done._replace(state=jax.tree.map(jnp.asarray, state), info=with_host_info(done.info, more))


def last_of(rounds: int, trial: Trial, state: Any = None) -> Round:
    """Return the last of some rounds of all clients, from the initial state if no other one is given."""
    if state is None:
        state = trial.algorithm.init(jax.random.key(0), trial.federation, traced(trial.variant.config))
    for t in range(rounds):
        done = played(trial, jax.random.key(t), state, cohort(trial.federation, EVERYONE))
        state = done.state
    return done


def rates(state) -> dict[str, Any]:
    """Return the rates that a state carries, by name."""
    found = filter(is_options, jax.tree.leaves(state, is_leaf=is_options))
    return {name: rate for options in found for (name, *_), rate in tree.by_path(options).items()}


def with_rates(state, values: dict[str, Any]):
    """Return the state with other values of some rates."""
    return jax.tree.map(
        lambda node: dataclasses.replace(node, **traced(values)) if is_options(node) else node,
        state,
        is_leaf=is_options,
    )


def differ(one, other) -> bool:
    """Return whether two trees of arrays differ in any number."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any(not np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def apart(one, other, sentence: str, tolerance: float = TOLERANCE) -> str | None:
    """Return a sentence about the first leaf in which two trees differ; None if they do not."""
    found = jax.tree.leaves_with_path(one)
    for (path, a), b in zip(found, jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if not np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return sentence.format(jax.tree_util.keystr(path))
    return None
