"""Trials of a method: checks on five tiny clients, within seconds, that it keeps every method's promises.

`jaxfl.core.protocol_check` checks shapes before every run. This module checks what only shows in numbers: a
mean over empty places, a client that trains although it is absent, a draw by NumPy that becomes a constant.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.config.own_code import OwnCodeError, own_code
from jaxfl.core import tree
from jaxfl.core.advance import with_host_info
from jaxfl.core.job import traced
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Algorithm, Cohort, Info, Slots
from jaxfl.core.protocol_check import check
from jaxfl.core.schedule import at_rate, is_options
from jaxfl.data.federation import Federation, federate
from jaxfl.data.partition import Partition
from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError
from jaxfl.folder.variant import Variant, variant_of
from jaxfl.mechanisms.sharing import sharing
from jaxfl.models import zoo

SHAPE, CLASSES = (8, 8, 1), 3
SIZES = (7, 4, 5, 1, 6)  # training rows: with BatchNorm a single one is no batch
EVERYONE, SOME, FIRST_ONLY = range(5), (1, 0, 3), (0, 1, 2)  # clients 3 and 4 have another architecture
ROUNDS = 3
OPTIONS = {"batch_size": 3}  # so that a client has several mini-batches
TOLERANCE = 1e-5  # relative to 1 + |number|, where sums may have another order


class Round(NamedTuple):
    """Everything that a method computes in a round; logits after `step`, per group (k_g, images, outputs)."""

    state: Any
    info: Info
    trained: tuple | None
    received: tuple
    personal: tuple


class Trial(NamedTuple):
    """A method on its five clients, after a round of all of them.

    Args:
      variant: the method with its options.
      algorithm: what the method builds.
      play: the program ``(key, state, federation, cohort) -> Round``, without a host step.
      federation: the clients.
      state: state after that round.
      stacked: the state's tree, True where a leaf has one entry per client.
    """

    variant: Variant
    algorithm: Algorithm
    play: Program
    federation: Federation
    state: Any
    stacked: Any


class Found(NamedTuple):
    """A finding about a promise.

    Args:
      promise: the promise in words.
      seen: what speaks against it; empty if it is kept.
      broken: whether that breaks it; otherwise the author should look, and it may be right.
    """

    promise: str
    seen: str
    broken: bool


def tried(variant: Variant) -> Iterable[Found]:
    """Yield the finding about each promise.

    Args:
      variant: the method with its options.

    Raises:
      JaxflError: if the method does not keep the protocol: nothing can be tried then.
    """
    try:
        with own_code():
            trial = begin(variant)
    except JaxflError as error:
        error.args = (f"{error} None of {len(PROMISES)} promises could be tried.",)
        raise
    for sentence, promise in PROMISES.items():
        seen = _seen(promise, trial)
        yield Found(sentence, seen, broken=bool(seen))
    for sentence, expectation in EXPECTATIONS.items():
        yield Found(sentence, _seen(expectation, trial), broken=False)


def _seen(promise: Callable[[Trial], str | None], trial: Trial) -> str:
    """Return what speaks against a promise, also an error; empty if it is kept."""
    try:
        with own_code():
            return promise(trial) or ""
    except JaxflError as error:
        return str(error)


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


def clients() -> Federation:
    """Return unequal clients of two architectures, one with BatchNorm; an image's mean gives its class."""
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
        public=rows[30:40],
    )
    source = Source("a trial's", images.astype(np.uint8), labels, rows < 40, CLASSES)
    models = [zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=5, norm=norm) for norm in ("none", "batch")]
    linked = ~np.eye(len(SIZES), dtype=bool)
    return federate(source, partition, [(models[0], 3), (models[1], 2)], links=linked)


def cohort(federation: Federation, ids: Iterable[int], places: int = 0) -> Cohort:
    """Return the last round's cohort of these client ids, in this order, with `places` more empty places."""

    def slots(group):
        position = {int(i): place for place, i in enumerate(np.asarray(group.id))}
        present, room = [position[i] for i in ids if i in position], len(group.id) + places
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


# ---- promises: each returns what was seen if it is not kept


def stays_finite(trial: Trial) -> str | None:
    """Check that all numbers are finite, even if no client of an architecture takes part."""
    for present in (EVERYONE, SOME, FIRST_ONLY):
        chosen = cohort(trial.federation, present)
        done, numbers = played(trial, jax.random.key(2), trial.state, chosen), ", ".join(map(str, present))
        for path, leaf in jax.tree.leaves_with_path(done.state):
            if not np.isfinite(leaf).all():
                return f"state{jax.tree_util.keystr(path)} is not finite after a round with clients {numbers}"
        scores = {"received": done.received, "trained": done.trained, "deployed": done.personal}
        of_places = {"the loss": [np.isfinite(loss) for loss in done.info.loss]}
        for moment, of_groups in scores.items():  # -inf is the logarithm of 0
            is_number = [(np.asarray(logits) < np.inf).all((1, 2)) for logits in of_groups or ()]
            of_places[f"a score as {moment}"] = is_number
        for what, of_groups in of_places.items():
            for group, slots, fine in zip(trial.federation.groups, chosen.groups, of_groups, strict=False):
                for place in np.flatnonzero(slots.mask & ~fine):  # an empty place may hold anything
                    who = group.id[slots.index[place]]
                    return f"{what} of client {who} is not finite in a round with clients {numbers}"


def is_repeatable(trial: Trial) -> str | None:
    """Check that tracing again gives the same program: what Python draws or counts would change it."""
    arguments = trial.state, trial.federation, cohort(trial.federation, EVERYONE)
    hyper = traced(trial.variant.config)

    def program(f, *arguments):
        made = jax.make_jaxpr(lambda key: f(key, *arguments))(jax.random.key(0))  # new, as JAX caches traces
        return re.sub("0x[0-9a-f]+", "", str(made)), made.consts

    of_init = trial.algorithm.init, trial.federation, hyper
    for name, of_it in {"init": of_init, "step": (trial.algorithm.step, *arguments)}.items():
        (first, constants), (second, others) = program(*of_it), program(*of_it)
        if first != second or differ(constants, others):
            return (
                f"{name} is a different program when it is traced again: draw with the key, not with random "
                "or np.random"
            )
    if trial.algorithm.host:
        key, state, _, everyone = jax.random.key(2), *arguments
        again = [played(trial, key, state, everyone).state for _ in range(2)]
        sentence = "host gives a different state{} when a round is repeated: draw with the key"
        return _apart(again[0], again[1], sentence, 0)
    return None


def ignores_empty_places(trial: Trial) -> str | None:
    """Check that empty places of a cohort have no effect: it may have any number of them."""
    federation, key = trial.federation, jax.random.key(2)
    usual = played(trial, key, trial.state, cohort(federation, SOME))
    padded = played(trial, key, trial.state, cohort(federation, SOME, places=2))
    return _apart(padded.state, usual.state, "two more empty places change state{}")


def ignores_padding(trial: Trial) -> str | None:
    """Check that the padding of a client's list of rows, up to the longest list, has no effect."""

    def padded_otherwise(group):
        numbers = np.arange(group.rows.shape[1], dtype=np.int32)[None]
        other = (group.rows + 17 + 3 * numbers) % np.int32(60)
        return dataclasses.replace(group, rows=jnp.where(numbers < group.size[:, None], group.rows, other))

    return _changes_with(
        padded_otherwise,
        trial,
        "with other images in the places after a client's own rows{} changes: mean(values, batch) and "
        "rows < size leave them out",
    )


def ignores_test_rows(trial: Trial) -> str | None:
    """Check that the rows on which clients are scored have no effect on what they learn."""

    def tested_otherwise(group):
        return dataclasses.replace(group, test_rows=(group.test_rows + 17) % np.int32(60))

    return _changes_with(
        tested_otherwise,
        trial,
        "with other test rows of the clients{} changes: only scores may see them; for rows to choose by, "
        'declare needs=("validation",)',
    )


def _changes_with(otherwise: Callable, trial: Trial, sentence: str) -> str | None:
    """Return which result changes, in a sentence, with clients (groups) made `otherwise`."""

    def outcome(federation):
        """Return results after two rounds: a teacher's outputs for padding may be kept, but not used."""
        changed = trial._replace(federation=federation)
        first = played(changed, jax.random.key(2), trial.state, cohort(federation, EVERYONE))
        done = played(changed, jax.random.key(3), first.state, cohort(federation, EVERYONE))
        return {"loss": done.info.loss} | {name: getattr(done, name) for name in ("received", "personal")}

    other = dataclasses.replace(trial.federation, groups=tuple(map(otherwise, trial.federation.groups)))
    return _apart(outcome(other), outcome(trial.federation), sentence)


def leaves_the_absent_alone(trial: Trial) -> str | None:
    """Check that absent clients keep their own state, and what pairs of them share."""
    ids = [np.asarray(group.id) for group in trial.federation.groups]
    ids.append(np.concatenate(ids))
    absent = {
        len(of_group): np.flatnonzero(~np.isin(of_group, SOME)) for of_group in ids
    }  # by the number of clients

    def theirs(state):
        def of_leaf(stacked, leaf):
            if not stacked:
                return None
            rows = absent[len(leaf)]
            return leaf[rows], leaf[:, rows] if leaf.shape[:2] == 2 * (len(SIZES),) else None

        return jax.tree.map(of_leaf, trial.stacked, state)

    some = cohort(trial.federation, SOME)
    after = played(trial, jax.random.key(2), trial.state, some).state
    return _apart(
        theirs(after), theirs(trial.state), "state{} of clients who are not in the round changes", 0
    )


def counts_what_is_sent(trial: Trial) -> str | None:
    """Check that an absent client sends and receives nothing."""
    some = cohort(trial.federation, SOME)
    info = played(trial, jax.random.key(2), trial.state, some).info
    for way in ("up", "down"):
        for slots, counted in zip(some.groups, getattr(info, way), strict=True):
            if any(np.asarray(leaf)[~slots.mask].any() for leaf in jax.tree.leaves(counted)):
                return f"Info.{way} counts clients who are not in the round"


def takes_common_options(trial: Trial) -> str | None:
    """Check that it runs with other options that every method has, or refuses them by name."""
    _, _, method, config, _ = trial.variant
    try:
        local = variant_of(trial.variant.name, method, dataclasses.replace(config, bn_stats="local"))
        check(local.algorithm, trial.federation, traced(local.config), ROUNDS)
    except JaxflError as error:
        if isinstance(error, OwnCodeError) or not re.search("bn.stats", str(error)):
            return f"with --bn-stats local: {error}"
    try:
        scheduled = trial.algorithm._replace(step=at_rate(trial.algorithm.step, 0.5))
        check(scheduled, trial.federation, traced(config), ROUNDS)
    except JaxflError as error:
        return str(error)


def uses_every_rate(trial: Trial) -> str | None:
    """Check that another value of a float option changes the result of a few rounds, or the initial state."""
    usual, everyone = rates(trial.state), cohort(trial.federation, EVERYONE)

    def outcome(state):
        for number in range(ROUNDS):
            key = jax.random.fold_in(jax.random.key(2), number)
            done = played(trial, key, state, everyone)
            state = done.state
        info = done.info._replace(findings={})  # a host step's findings include its seconds
        return done._replace(state=with_rates(state, usual), info=info)

    same = outcome(trial.state)
    others = {name: {name: 0.46 + 0.47 * rate} for name, rate in usual.items()}  # within the ranges of all

    def initial(changed):
        """Return the initial state with other rates, except for these themselves."""
        hyper = dataclasses.replace(traced(trial.variant.config), **traced(changed))
        return with_rates(trial.algorithm.init(jax.random.key(0), trial.federation, hyper), usual)

    idle = [
        name
        for name, changed in others.items()
        if not differ(outcome(with_rates(trial.state, changed)), same)
        and not differ(initial(changed), initial({}))
    ]
    if idle:
        names = ", ".join(idle)
        return (
            f"nothing depends on {names} in three rounds: fine if only a rare case or another option reads it"
        )


def is_not_fedavg(trial: Trial) -> str | None:
    """Check that after a few rounds of all clients models are not those of FedAvg with the same options."""
    algorithm, hyper = sharing(trial.variant.config), traced(trial.variant.config)
    plain = trial._replace(algorithm=algorithm, play=Program(whole_round(algorithm)))

    def models(trial):
        state = trial.algorithm.init(jax.random.key(0), trial.federation, hyper)
        for t in range(ROUNDS):
            done = played(trial, jax.random.key(t), state, cohort(trial.federation, EVERYONE))
            state = done.state
        return done.received, done.personal

    if _apart(models(trial), models(plain), "differs"):
        return None
    return (
        f"after {ROUNDS} rounds the models are those of FedAvg: fine if an option or a rare case makes the "
        "difference"
    )


PROMISES: dict[str, Callable[[Trial], str | None]] = {
    "all numbers are finite, whoever takes part": stays_finite,
    "initial state and rounds are the same when they are repeated": is_repeatable,
    "empty places of a cohort have no effect": ignores_empty_places,
    "rows that pad a client's list have no effect": ignores_padding,
    "test rows have no effect": ignores_test_rows,
    "clients who are absent keep what they have": leaves_the_absent_alone,
    "bytes are only those of clients who take part": counts_what_is_sent,
    "it takes --bn-stats local and --schedule, or says why not": takes_common_options,
}
EXPECTATIONS: dict[str, Callable[[Trial], str | None]] = {
    "every rate has an effect": uses_every_rate,
    "it is not FedAvg": is_not_fedavg,
}


# ---- helpers


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


def _apart(one, other, sentence: str, tolerance: float = TOLERANCE) -> str | None:
    """Return a sentence about the first leaf in which two trees differ; None if they do not."""
    found = jax.tree.leaves_with_path(one)
    for (path, a), b in zip(found, jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if not np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return sentence.format(jax.tree_util.keystr(path))
    return None
