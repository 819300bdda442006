"""Trials of a method: checks on five tiny clients, within seconds, that it keeps every method's promises.

`jaxfl.core.protocol_check` checks shapes before every run. This module checks what only shows in numbers: a
mean over empty places, a client that trains although it is absent, a draw by NumPy that becomes a constant.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.config.own_code import OwnCodeError, own_code
from jaxfl.config.setup import Setup
from jaxfl.core import host_state
from jaxfl.core.job import traced
from jaxfl.core.programs import Program
from jaxfl.core.protocol_check import check
from jaxfl.core.schedule import at_rate, is_options
from jaxfl.core.window import STRANGERS, on_host
from jaxfl.errors import BeyondCohort, JaxflError
from jaxfl.folder.variant import Variant, variant_of
from jaxfl.mechanisms.sharing import sharing
from jaxfl.mechanisms.wire import wire_of
from jaxfl.runs.trial import (
    CLASSES,
    EVERYONE,
    FIRST_ONLY,
    ROUNDS,
    SIZES,
    SOME,
    TRAINED_ON,
    Trial,
    apart,
    begin,
    clients,
    cohort,
    differ,
    last_of,
    played,
    rates,
    whole_round,
    with_rates,
)

OPTIONS = {"batch_size": 3}  # so that a client has several mini-batches
SAY_SO = "; call federation.require_all() where that is meant"


class Found(NamedTuple):
    """A finding about a promise."""

    promise: str  # the promise in words
    seen: str  # what speaks against it; empty if it is kept
    broken: bool  # whether that breaks it; otherwise the author should look, and it may be right


def tried(variant: Variant) -> Iterable[Found]:
    """Yield the finding about each promise.

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

    def program(f, *arguments):
        made = jax.make_jaxpr(lambda key: f(key, *arguments))(jax.random.key(0))  # new, as JAX caches traces
        return re.sub("0x[0-9a-f]+", "", str(made)), made.consts

    functions = {
        "init": (trial.algorithm.init, trial.federation, traced(trial.variant.config)),
        "step": (trial.algorithm.step, *arguments),
        "receive, personal or predict": (whole_round(trial.algorithm), *arguments),
    }
    for name, of_it in functions.items():
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
        return apart(again[0], again[1], sentence, 0)
    return None


def ignores_empty_places(trial: Trial) -> str | None:
    """Check that empty places of a cohort have no effect: it may have any number of them."""
    federation, key = trial.federation, jax.random.key(2)

    def outcome(chosen):
        done = played(trial, key, trial.state, chosen)
        told = {"loss": done.info.loss, "received": done.received, "personal": done.personal}
        masks = [slots.mask for slots in chosen.groups]
        real = {name: [leaf[m] for leaf, m in zip(of, masks, strict=True)] for name, of in told.items()}
        return done.state, real | {"findings": {} if trial.algorithm.host else done.info.findings}

    for present in (SOME, EVERYONE):  # what is drawn for each place shows only where a client has a choice
        usual, padded = (outcome(cohort(federation, present, places)) for places in (0, 2))
        for name, of_usual, of_padded in zip(("state", ""), usual, padded, strict=True):
            if changed := apart(of_padded, of_usual, f"two more empty places change {name}{{}}"):
                return changed


def ignores_padding(trial: Trial) -> str | None:
    """Check that neither length nor images of the padding of clients' lists of rows have an effect."""

    def padded_otherwise(group):
        rows = np.pad(group.rows, ((0, 0), (0, 2)))
        numbers = np.arange(rows.shape[1], dtype=np.int32)[None]
        other = (rows + 17 + 3 * numbers) % np.int32(60)
        return dataclasses.replace(group, rows=jnp.where(numbers < group.size[:, None], rows, other))

    return _changes_with(
        padded_otherwise,
        trial,
        "with other images in more places after a client's own rows{} changes: mean(values, batch) and "
        "rows < size leave them out",
    )


def ignores_test_rows(trial: Trial) -> str | None:
    """Check that the rows on which clients are scored have no effect on what they learn."""

    def tested_otherwise(group):
        return dataclasses.replace(
            group, test_rows=(group.test_rows + 17) % 60, test_size=group.test_size // 2
        )

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
        done = last_of(2, trial._replace(federation=federation))
        return {"loss": done.info.loss, "received": done.received, "personal": done.personal}

    other = dataclasses.replace(trial.federation, groups=tuple(map(otherwise, trial.federation.groups)))
    return apart(outcome(other), outcome(trial.federation), sentence)


def protects_rows(trial: Trial) -> str | None:
    """Check that a method that takes --privacy rows learns nothing of rows but their clipped gradients.

    The clip norm is so small that other rows must give the same state and models.
    """
    if "rows" not in trial.algorithm.wire:
        return None
    federation = clients(("none", "none"))
    wire = wire_of(Setup.of(privacy="rows,clip=1e-30,noise=0"), federation)
    federation = dataclasses.replace(federation, wire=wire)
    own = jnp.arange(len(federation.labels)) < TRAINED_ON.stop

    def outcome(federation):
        done = last_of(2, trial._replace(federation=federation))
        return {"state": done.state, "received": done.received, "personal": done.personal}

    def counted_otherwise(group):
        return dataclasses.replace(group, class_counts=jnp.roll(group.class_counts, 1, 1))

    other = dataclasses.replace(
        federation,
        images=jnp.where(own[:, None, None, None], 255 - federation.images, federation.images),
        labels=jnp.where(own, (federation.labels + 1) % CLASSES, federation.labels),
        groups=tuple(map(counted_otherwise, federation.groups)),
    )
    sentence = (
        "with --privacy rows{} depends on clients' rows in another way than by their clipped gradients: "
        'leave "rows" out of the wire of the Algorithm'
    )
    try:
        same = outcome(federation)
    except JaxflError:  # a run would be refused by the same sentence
        return None
    return apart(outcome(other), same, sentence, 1e-20)


def leaves_the_absent_alone(trial: Trial) -> str | None:
    """Check that absent clients keep their own state, and what pairs of them share."""
    ids = [np.asarray(group.id) for group in trial.federation.groups]
    ids.append(np.concatenate(ids))
    absent = {len(of_all): np.flatnonzero(~np.isin(of_all, SOME)) for of_all in ids}  # by their number

    def theirs(state):
        def of_leaf(stacked, leaf):
            if not stacked:
                return None
            rows = absent[len(leaf)]
            return leaf[rows], leaf[:, rows] if leaf.shape[:2] == 2 * (len(SIZES),) else None

        return jax.tree.map(of_leaf, trial.stacked, state)

    some = cohort(trial.federation, SOME)
    before, after = jax.device_get((trial.state, played(trial, jax.random.key(2), trial.state, some).state))
    return apart(theirs(after), theirs(before), "state{} of clients who are not in the round changes", 0)


def needs_only_its_cohort(trial: Trial) -> str | None:
    """Check that nothing reads or writes what belongs to clients outside a round's cohort, or says so.

    With --client-state host a method gets only some clients and an invented one, the *stranger*. The initial
    state must be the same beside a stranger. Two different ones must give the same round, whose server is
    that of all clients in one federation, and stay as they are.
    """
    algorithm, hyper = trial.algorithm, traced(trial.variant.config)
    if algorithm.host or algorithm.prepare:  # refused there
        return None
    federation, rounds = on_host(trial.federation), []
    key, state, chosen = jax.random.key(0), jax.device_get(trial.state), cohort(trial.federation, SOME)
    try:
        begun = host_state.initial(algorithm.init, key, federation, hyper).state
        sentence = "state{} before the first round depends on which clients there are" + SAY_SO
        if wrong := apart(begun, algorithm.init(key, trial.federation, hyper), sentence):
            return wrong
        kept = host_state.taken_over(algorithm.init, key, federation, hyper, state)
        for stranger in STRANGERS:
            some = host_state.seen(kept, federation, chosen, stranger)
            done = jax.device_get(trial.play(jax.random.key(2), *some))
            for owner, leaf in zip(jax.tree.leaves(kept.owners), jax.tree.leaves(done.state), strict=True):
                if owner != host_state.SERVER and (leaf[0] != np.asarray(stranger).astype(leaf.dtype)).any():
                    return f"a round writes to clients that are not in its cohort{SAY_SO}"
            state = jax.tree.map(
                lambda owner, leaf: leaf if owner == host_state.SERVER else leaf[1:], kept.owners, done.state
            )
            rounds.append(done._replace(state=state))
    except BeyondCohort:
        return None
    one, other = rounds
    sentence = "{} of a round depends on clients that are not in its cohort" + SAY_SO
    usual = trial.play(jax.random.key(2), trial.state, trial.federation, chosen)
    servers = [
        jax.tree.map(lambda who, leaf: leaf if who == host_state.SERVER else None, kept.owners, done.state)
        for done in (one, usual)
    ]
    return apart(one, other, sentence) or apart(servers[0], servers[1], sentence)


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
    usual = rates(trial.state)

    def outcome(state):
        done = last_of(ROUNDS, trial, state)
        info = done.info._replace(findings={})  # a host step's findings include its seconds
        return done._replace(state=with_rates(done.state, usual), info=info)

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
        reason = "fine if only a rare case or another option reads it"
        return f"nothing depends on {', '.join(idle)} in three rounds: {reason}"


def is_not_fedavg(trial: Trial) -> str | None:
    """Check that after a few rounds of all clients models are not those of FedAvg with the same options."""
    algorithm = sharing(trial.variant.config)
    plain = trial._replace(algorithm=algorithm, play=Program(whole_round(algorithm)))
    ours, theirs = last_of(ROUNDS, trial), last_of(ROUNDS, plain)
    if apart((ours.received, ours.personal), (theirs.received, theirs.personal), "differs"):
        return None
    reason = "fine if an option or a rare case makes the difference"
    return f"after {ROUNDS} rounds the models are those of FedAvg: {reason}"


def draws_with_the_key(trial: Trial) -> str | None:
    """Check that a round with another key is another one."""
    everyone = cohort(trial.federation, EVERYONE)
    one, other = (played(trial, jax.random.key(k), trial.state, everyone) for k in (2, 3))
    if not differ((one.state, one.info.loss), (other.state, other.info.loss)):
        return "a round with another key is the same: fine if it draws nothing, not even batches"


def changes_its_state(trial: Trial) -> str | None:
    """Check that all that is carried from round to round, except for options, changes in some rounds."""
    begun = trial.algorithm.init(jax.random.key(0), trial.federation, traced(trial.variant.config))
    leaves = jax.tree.leaves_with_path(begun, is_leaf=is_options)
    after = jax.tree.leaves(last_of(ROUNDS, trial).state, is_leaf=is_options)
    for (path, old), new in zip(leaves, after, strict=True):
        if not is_options(old) and np.size(old) and not differ(old, new):
            return f"three rounds leave state{jax.tree_util.keystr(path)} as it was: fine if that is meant"


PROMISES: dict[str, Callable[[Trial], str | None]] = {
    "all numbers are finite, whoever takes part": stays_finite,
    "initial state and rounds are the same when they are repeated": is_repeatable,
    "empty places of a cohort have no effect": ignores_empty_places,
    "rows that pad a client's list have no effect": ignores_padding,
    "test rows have no effect": ignores_test_rows,
    "it protects rows under --privacy rows, or does not say so": protects_rows,
    "clients who are absent keep what they have": leaves_the_absent_alone,
    "a round needs only its cohort, or says that it needs all": needs_only_its_cohort,
    "bytes are only those of clients who take part": counts_what_is_sent,
    "it takes --bn-stats local and --schedule, or says why not": takes_common_options,
}
EXPECTATIONS: dict[str, Callable[[Trial], str | None]] = {
    "every rate has an effect": uses_every_rate,
    "another key gives another round": draws_with_the_key,
    "what is carried from round to round changes": changes_its_state,
    "it is not FedAvg": is_not_fedavg,
}
