"""The trial of a method finds mistakes, and finds nothing where nothing is wrong."""

import dataclasses
import random
import re

import jax
import jax.numpy as jnp
import pytest
from conftest import long
from methods.cases import CASES

from jaxfl.cli import main
from jaxfl.fl import (
    JaxflError,
    Memory,
    Method,
    Predictor,
    Training,
    head,
    local_training,
    options,
    per_group,
    sharing,
    tree,
)
from jaxfl.folder.variant import choose
from jaxfl.mechanisms.kept_leaves import no_leaf
from jaxfl.registry import METHODS
from jaxfl.runs import promises, trial


@options
class Mu(METHODS["fedper"].config):
    """Options of FedPer, and one without effect."""

    mu: float = 0.1
    """Nothing."""


def altered(change, config=METHODS["fedper"].config, begins=None):
    """Return FedPer with a change of ``(state, info)`` after each round, and perhaps of the first weights."""

    def build(config):
        right = METHODS["fedper"].build(config)

        def step(key, state, federation, cohort):
            return change(*right.step(key, state, federation, cohort), federation, cohort)

        def init(key, federation, hyper):
            return moved(right.init(key, federation, hyper), begins() if begins else 0)

        return right._replace(init=init, step=step)

    return Method("altered", build, config, "a mistake")


def moved(state, by):
    """Return the state with other shared weights."""
    return state._replace(shared=jax.tree.map(lambda leaf: leaf + by, state.shared))


def divides_by_those_there(state, info, federation, cohort):
    there = sum(slots.mask.sum(dtype=jnp.int32) for slots in cohort.groups[1:])
    return moved(state, 0 / there.astype(float)), info


def divides_by_steps(config):
    """Build a division by steps, which are 0 for the client with a single row under BatchNorm."""

    def update(participant, trained):
        return None, 1 / trained.steps.astype(float)

    def aggregate(shared, server, means, hyper):
        moved = jax.tree.map(lambda leaf: leaf + means.message, means.shared)
        return moved, server

    return sharing(config, memory=Memory(update=update, aggregate=aggregate))


def keeps_no_leaf(config):
    return sharing(config, keep=lambda model: lambda path: "head" in path)  # no block has this name


def remembers(of_client, keep=no_leaf):
    """Return FedAvg whose clients remember the mean of their models; `of_client` makes the next memory."""

    def mean(participant, trained):
        remembered = of_client(participant, trained.weights)
        return jax.tree.map(lambda m, w: (m + w) / 2, participant.memory, remembered), None

    def build(config):
        return sharing(config, keep=keep, memory=Memory(lambda model, shared, hyper: shared, update=mean))

    return Method("own", build, Training, "remembers")


def whole(participant, weights):
    return weights


def its_part(participant, weights):
    return tree.like(weights, participant.memory)


def refuses(config):
    if config.bn_stats == "local":
        raise JaxflError("own averages statistics; leave out bn_stats=local.")
    return sharing(config)


def without_hyper(config):
    """Build a method whose state lacks the options."""
    right = sharing(config)

    def step(key, state, federation, cohort):
        after, info = right.step(key, state._replace(hyper=Training()), federation, cohort)
        return after._replace(hyper=()), info

    return right._replace(init=lambda *given: right.init(*given)._replace(hyper=()), step=step)


@pytest.mark.parametrize(
    ("method", "seen"),
    [
        (
            remembers(whole),
            r"with --bn-stats local: .*, in mean: .*NoneType.*; in what is shared and remembered, None is a "
            r"leaf that stays .*: tree.combine\(memory, participant.received\) fills .*, and tree.like",
        ),
        (remembers(its_part), None),
        (Method("own", refuses, Training, "refuses"), None),
        (
            Method("own", without_hyper, Training, "no options"),
            "--schedule finds no learning rates",
        ),
    ],
)
def test_options_of_all_methods_are_taken_or_refused_by_name(method, seen):
    variant = choose(method, promises.OPTIONS)
    begun = trial.Trial(variant, variant.algorithm, None, trial.clients(), None, None)
    found = promises.takes_common_options(begun)
    assert re.search(seen, found) if seen else found is None


def test_a_memory_without_the_kept_leaves_is_named_with_its_cure():
    assert trial.begin(choose(remembers(its_part, head), promises.OPTIONS))
    with pytest.raises(JaxflError, match=r"\['classifier'\].*None is a leaf that stays .*tree.combine"):
        trial.begin(choose(remembers(whole, head), promises.OPTIONS))


def scored(there, elsewhere):
    """Return FedPer with one score for the clients of a cohort and another one in its empty places."""

    def predict(model, shared, own, x):
        return jnp.full((len(x), model.classes), own)

    def build(config):
        def personal(key, state, federation, cohort):
            own = per_group(lambda slots: jnp.where(slots.mask, there, elsewhere), cohort.groups)
            return per_group(lambda of_group: Predictor(None, of_group, predict), own)

        return METHODS["fedper"].build(config)._replace(personal=personal)

    return Method("scored", build, METHODS["fedper"].config, "a mistake")


def scored_by_chance():
    """Return FedPer whose deployed models are drawn by Python."""

    def predict(model, shared, own, x):
        return jnp.full((len(x), model.classes), random.random())

    def build(config):
        right = METHODS["fedper"].build(config)

        def personal(*arguments):
            return per_group(lambda one: dataclasses.replace(one, predict=predict), right.receive(*arguments))

        return right._replace(personal=personal)

    return Method("chance", build, METHODS["fedper"].config, "a mistake")


def draws_in_python(state, info, federation, cohort):
    return moved(state, random.random()), info


def means_over_places(state, info, federation, cohort):
    return moved(state, 1 / cohort.groups[0].mask.size), info


def reads_padding(state, info, federation, cohort):
    return moved(state, federation.labels[federation.groups[0].rows].astype(float).mean()), info


def tells_means_over_places(state, info, federation, cohort):
    return state, info._replace(findings={"loss": {"mean": info.loss[0].mean()}})


def averages_places(state, info, federation, cohort):
    group = federation.groups[0]
    own = jnp.arange(group.rows.shape[1])[None] < group.size[:, None]
    return moved(state, jnp.where(own, federation.labels[group.rows], 0).astype(float).mean()), info


def reads_test_rows(state, info, federation, cohort):
    return moved(state, federation.labels[federation.groups[0].test_rows].astype(float).mean()), info


def reads_test_sizes(state, info, federation, cohort):
    return moved(state, federation.groups[0].test_size.astype(float).mean()), info


def counts_ids(state, info, federation, cohort):
    return moved(state, 1 / len(federation.groups[0].id)), info


def touches_everybody(state, info, federation, cohort):
    return state._replace(kept=jax.tree.map(lambda leaf: leaf / 2, state.kept)), info


def reads_everybody(state, info, federation, cohort):
    return moved(state, 1e-2 * sum(leaf.sum() for leaf in jax.tree.leaves(state.kept))), info


def counts_rows(state, info, federation, cohort):
    return moved(state, 1 / federation.groups[0].size.sum().astype(float)), info


def receives_a_mixture(config):
    """Build FedPer whose clients receive heads with a part of all clients' heads."""
    right = METHODS["fedper"].build(config)

    def receive(key, state, federation, cohort):
        one, *others = right.receive(key, state, federation, cohort)
        mixed = jax.tree.map(lambda leaf, of_all: leaf + of_all.sum(), one.stacked, state.kept[0])
        return dataclasses.replace(one, stacked=mixed), *others

    return right._replace(receive=receive)


def begins_by_place(key, state, federation):
    return state._replace(kept=jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), state.kept))


def begun(change):
    """Return FedPer with a change of the state before its first round."""

    def build(config):
        right = METHODS["fedper"].build(config)

        def init(key, federation, hyper):
            return change(key, right.init(key, federation, hyper), federation)

        return right._replace(init=init)

    return Method("own", build, METHODS["fedper"].config, "a mistake")


def bills_everybody(state, info, federation, cohort):
    return state, info._replace(up=jax.tree.map(lambda leaf: leaf + 1, info.up))


def learns_from_losses(state, info, federation, cohort):
    return moved(state, sum(loss.sum() for loss in info.loss)), info


def draws_for_places(state, info, federation, cohort):
    """Draw one of the other clients of the round for each place."""
    here = cohort.groups[0].mask
    others = here[None] & ~jnp.eye(len(here), dtype=bool)
    drawn = jnp.where(others, jax.random.uniform(jax.random.key(0), others.shape), -1).argmax(1)
    learned = jnp.where(here, info.loss[0][drawn], 0)
    return moved(state, learned @ (1.0 + jnp.arange(len(here)).astype(float))), info


def with_one_key(config):
    """Build FedAvg whose clients train with the same key in every round."""
    train = local_training(config)
    return sharing(config, train=lambda key, participant: train(jax.random.key(0), participant))


def forgetful(config):
    """Build FedPer whose clients never store the heads that they have trained."""
    right = METHODS["fedper"].build(config)

    def step(key, state, federation, cohort):
        after, info = right.step(key, state, federation, cohort)
        return after._replace(kept=state.kept), info

    return right._replace(step=step)


def nothing(state, info, federation, cohort):
    return state, info


@pytest.mark.parametrize(
    ("method", "promise", "seen"),
    [
        long(altered(divides_by_those_there), promises.stays_finite, "state.shared[0].params"),
        long(
            Method("own", divides_by_steps, Training, "a mistake"),
            promises.stays_finite,
            "is not finite after a round with clients",
        ),
        long(scored(jnp.nan, 0.0), promises.stays_finite, "score as deployed of client 0 is not finite in"),
        long(altered(nothing, begins=random.random), promises.is_repeatable, "init is a different program"),
        long(
            altered(draws_in_python), promises.is_repeatable, "step is a different program when it is traced"
        ),
        long(
            altered(means_over_places), promises.ignores_empty_places, "empty places change state.shared[0]"
        ),
        long(altered(draws_for_places), promises.ignores_empty_places, "empty places change state.shared[0]"),
        long(altered(tells_means_over_places), promises.ignores_empty_places, "change ['findings']['loss']"),
        long(altered(reads_padding), promises.ignores_padding, "other images in more places after"),
        long(altered(averages_places), promises.ignores_padding, "in more places after a client's own rows"),
        (altered(learns_from_losses), promises.protects_rows, "--privacy rows['personal'][0] depends"),
        long(altered(reads_test_rows), promises.ignores_test_rows, "other test rows of the clients"),
        long(altered(reads_test_sizes), promises.ignores_test_rows, "other test rows of the clients"),
        long(
            scored_by_chance(), promises.is_repeatable, "receive, personal or predict is a different program"
        ),
        long(altered(counts_ids), promises.needs_only_its_cohort, ".shared[0].params"),
        long(
            altered(touches_everybody), promises.leaves_the_absent_alone, "state.kept[0].params['classifier']"
        ),
        long(begun(begins_by_place), promises.needs_only_its_cohort, "state.kept[0].params"),
        (altered(reads_everybody), promises.needs_only_its_cohort, "state.shared[0].params"),
        long(altered(counts_rows), promises.needs_only_its_cohort, "depends on clients that are not in its"),
        long(altered(touches_everybody), promises.needs_only_its_cohort, "a round writes to clients that"),
        long(
            Method("own", receives_a_mixture, METHODS["fedper"].config, "a mistake"),
            promises.needs_only_its_cohort,
            ".received[0] of a round depends on clients",
        ),
        (altered(bills_everybody), promises.counts_what_is_sent, "Info.up counts clients who are not"),
        long(altered(nothing, Mu), promises.uses_every_rate, "nothing depends on mu in three rounds"),
        long(
            Method("own", with_one_key, Training, "a mistake"),
            promises.draws_with_the_key,
            "with another key is the same",
        ),
        long(
            Method("own", forgetful, METHODS["fedper"].config, "a mistake"),
            promises.changes_its_state,
            "state.kept[0].params",
        ),
        long(Method("own", keeps_no_leaf, Training, "a mistake"), promises.is_not_fedavg, "those of FedAvg"),
    ],
)
def test_a_mistake_is_seen(method, promise, seen):
    assert seen in promise(trial.begin(choose(method, promises.OPTIONS)))


def test_a_method_that_refuses_private_rows_protects_them():
    def build(config):
        right = METHODS["fedper"].build(config)

        def step(key, state, federation, cohort):
            if federation.wire is not None:
                raise JaxflError("as `sweep` does, which reads rows one by one")
            return right.step(key, state, federation, cohort)

        return right._replace(step=step)

    method = Method("own", build, METHODS["fedper"].config, "a method")
    assert promises.protects_rows(trial.begin(choose(method, promises.OPTIONS))) is None


@pytest.mark.long
def test_nan_in_empty_places_and_the_logarithm_of_0_are_no_mistakes():
    assert promises.stays_finite(trial.begin(choose(scored(-jnp.inf, jnp.nan), promises.OPTIONS))) is None


@pytest.mark.long
def test_a_method_that_keeps_its_head_is_not_fedavg():
    assert promises.is_not_fedavg(trial.begin(choose("fedper", promises.OPTIONS))) is None


@pytest.mark.long
def test_a_method_that_begins_like_fedavg_is_not_fedavg():
    """The momentum of a server has no effect in the first round."""
    with_momentum = choose("fedavg,server_optimizer=sgd,server_momentum=0.9", promises.OPTIONS)
    assert promises.is_not_fedavg(trial.begin(with_momentum)) is None


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_built_in_methods_keep_what_they_promise(name):
    for found in promises.tried(choose(name, promises.OPTIONS | CASES[name].short)):
        assert not found.broken, found


def test_the_command_says_which_promises_are_broken(tmp_path, capsys, monkeypatch):
    """A draw by NumPy, another constant in every program, breaks one promise; that about bytes is kept."""
    kept = (promises.is_repeatable, promises.counts_what_is_sent)
    some = {name: promise for name, promise in promises.PROMISES.items() if promise in kept}
    monkeypatch.setattr(promises, "PROMISES", some)
    expectations = {"every rate has an effect": lambda trial: "nothing depends on mu"}
    monkeypatch.setattr(promises, "EXPECTATIONS", expectations)
    (tmp_path / "my.py").write_text(
        "import numpy as np\nfrom jaxfl.fl import *\n"
        "def train(key, participant):\n"
        "    trained = local_training(participant.hyper)(key, participant)\n"
        "    return trained._replace(loss=trained.loss + np.random.rand())\n"
        "my = Method('my', lambda config: sharing(config, train=train), Training, 'a mistake')\n"
    )
    with pytest.raises(SystemExit):
        main(["check", f"{tmp_path}/my.py:my,steps=3"])
    printed = capsys.readouterr()
    assert "my.py:my,steps=3 does not keep 1 of 3 promises" in printed.err and "again" in printed.out
    assert re.search(r"every rate has an effect\W+perhaps\W+nothing depends on mu", printed.out)


def test_an_error_breaks_only_the_promise_that_it_is_in(monkeypatch):
    """Here the number of places is divided by, which is 6 - 6 with two more of them."""

    def of_places(state, info, federation, cohort):
        return moved(state, 0 / (6 - cohort.groups[0].mask.size)), info

    kept = (promises.ignores_empty_places, promises.counts_what_is_sent)
    some = {name: promise for name, promise in promises.PROMISES.items() if promise in kept}
    monkeypatch.setattr(promises, "PROMISES", some)
    monkeypatch.setattr(promises, "EXPECTATIONS", {})
    first, second = promises.tried(choose(altered(of_places), promises.OPTIONS))
    assert first.broken and "line " in first.seen and "in of_places: ZeroDivisionError" in first.seen
    assert not second.broken
