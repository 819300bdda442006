"""Mistakes that a user may make: each name is refused, or its error is shown."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import own
from own import Dense, build

import jaxfl
from jaxfl.fl import (
    Memory,
    Phase,
    descend,
    gather,
    local_training,
    map_and_sum,
    map_clients,
    own_models,
    own_rows,
    per_group,
    scatter,
    sent_up,
    sharing,
)
from jaxfl.models import Block, Model


def method(build=build, config=own.FedProx, **more):
    return jaxfl.Method("wrong", build, config, "a mistake", **more)


def with_step(change):
    """Return FedProx with a step that does one thing differently."""

    def altered(config):
        right = build(config)

        def step(key, state, federation, cohort):  # altered
            return change(*right.step(key, state, federation, cohort))

        return right._replace(step=step)

    return method(altered)


def with_host(change):
    """Return FedProx with a host step that returns `change(state, info)`."""

    def host(key, state, federation, cohort):
        nobody = per_group(lambda slots: np.zeros(len(slots.mask), np.int32), cohort.groups)
        return change(state, jaxfl.Info((), nobody, nobody))

    return method(lambda config: build(config)._replace(host=host))


def with_predict(predict):
    def altered(config):
        right = build(config)

        def receive(key, state, federation, cohort):
            return tuple(jaxfl.Predictor(w, None, predict) for w in state[1])

        return right._replace(receive=receive, personal=receive)

    return method(altered)


def keeps_a_key(config):
    right = build(config)
    return right._replace(init=lambda key, federation, hyper: (right.init(key, federation, hyper), key))


class Own(NamedTuple):
    """A state with a model of each client."""

    hyper: Any
    weights: Any


def keeps_the_cohort_alone(config):
    def init(key, federation, hyper):
        return Own(hyper, own_models.start(key, federation))

    def step(key, state, federation, cohort):  # without scatter
        start = gather(state.weights, cohort)
        weights, loss = own_models.train(key, federation, cohort, start, state.hyper)
        nothing = sent_up(cohort, (0,) * len(loss))
        return Own(state.hyper, weights), jaxfl.Info(loss, nothing, nothing)

    return jaxfl.Algorithm(init, own_models.personal, step, own_models.personal)


forgets_the_others = method(keeps_the_cohort_alone)
a_key_in_the_state = method(keeps_a_key)
adds_to_the_state = with_step(lambda state, info: ((*state, jnp.zeros(3)), info))
changes_a_shape = with_step(lambda state, info: (jax.tree.map(lambda leaf: leaf[None], state), info))
changes_a_container = with_step(lambda state, info: ([*state], info))
reports_nothing = with_step(lambda state, info: state)
reports_a_mean = with_step(lambda state, info: (state, info._replace(loss=info.loss[0].mean())))
reports_floats = with_step(lambda state, info: (state, info._replace(up=info.loss)))
reports_text = with_step(lambda state, info: (state, "fine"))
finds_an_array = with_step(
    lambda state, info: (state, info._replace(findings={"lost": {"loss": info.loss[0]}}))
)
host_reports_nothing = with_host(lambda state, info: state)
host_counts_once = with_host(lambda state, info: (state, info._replace(up=np.int32(3))))
host_changes_a_dtype = with_host(
    lambda state, info: (jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state), info)
)
host_finds_a_set = with_host(
    lambda state, info: (state, info._replace(findings={"whom": {1}, "what": np.array(["text"])}))
)
host_keeps_a_number = with_host(lambda state, info: (jax.tree.map(lambda leaf: 0.5, state), info))
trains_a_number = with_step(lambda state, info: (state, info._replace(trained=3)))
losses = []
keeps_a_loss = with_step(lambda state, info: losses.append(info.loss) or (state, info))
lacks_up = with_step(lambda state, info: (state, jaxfl.Info(info.loss, down=info.down)))
predicts_a_tuple = with_predict(lambda model, shared, own, x: model.apply(*shared, x, train=False))
predicts_labels = with_predict(
    lambda model, shared, own, x: model.apply(*shared, x, train=False)[0].argmax(1)
)
predicts_whole_numbers = with_predict(
    lambda model, shared, own, x: model.apply(*shared, x, train=False)[0].astype(int)
)
predicts_by_params = with_predict(lambda model, shared, own, x: shared.parms @ x)
predicts_otherwise = with_predict(lambda model, x: x)


def with_training(train):
    """Return FedProx with an extra training of each client, whose result is unused."""

    def altered(config):
        right = build(config)

        def step(key, state, federation, cohort):
            hyper, received = state

            def client(key, client, start, own):
                return train(start, key, own_rows(client, hyper), hyper)

            map_clients(client, key, federation, cohort, received)
            return right.step(key, state, federation, cohort)

        return right._replace(step=step)

    return method(altered)


def with_loss(loss):
    return with_training(lambda *start: descend(loss, *start).loss)


def value_alone(weights, batch, key):
    return jnp.zeros(())


def value_of_rows(weights, batch, key):
    return jnp.zeros(len(batch.y)), weights.stats


def no_statistics(weights, batch, key):
    return jnp.zeros(()), None


def keyless(weights, batch):
    return jnp.zeros(()), weights.stats


def fine(weights, batch, key):
    return jnp.zeros(()), weights.stats


def gathers_nothing(config):
    right = build(config)

    def step(key, state, federation, cohort):
        everyones = tuple(jnp.zeros((len(group.id) + 1, 2)) for group in federation.groups)
        map_clients(lambda key, client, shared, own: own, key, federation, cohort, own=everyones)
        return right.step(key, state, federation, cohort)

    return right._replace(step=step)


def scatters_one(config):
    right = build(config)

    def step(key, state, federation, cohort):
        scatter((0.0, 0.0), cohort, 0.0)
        return right.step(key, state, federation, cohort)

    return right._replace(step=step)


def sums_integers(config):
    right = build(config)

    def step(key, state, federation, cohort):
        ones = per_group(lambda slots: jnp.ones(slots.mask.shape), cohort.groups)
        map_and_sum(lambda key, client, *_: (None, client.size), key, federation, cohort, ones)
        return right.step(key, state, federation, cohort)

    return right._replace(step=step)


def sums_nothing(config):
    right = build(config)

    def step(key, state, federation, cohort):
        ones = per_group(lambda slots: jnp.ones(slots.mask.shape), cohort.groups)
        map_and_sum(lambda key, client, *_: client.size, key, federation, cohort, ones)
        return right.step(key, state, federation, cohort)

    return right._replace(step=step)


def undecided(path):
    path[1] == "head"  # noqa: B015


def forgetful(participant):
    return None, None


def hoarding(participant, trained):
    return trained.weights, None


def counting(participant, trained):
    return None, trained.steps


def first_memory(model, shared, hyper):
    return shared


def alone(shared, server, means, hyper):
    return means.shared


def parameters(shared, server, means, hyper):
    return means.shared.params, server


def speechless(key, participant):
    return None


def halved(key, participant):
    trained = local_training(jaxfl.Training())(key, participant)
    return trained._replace(weights=jax.tree.map(lambda leaf: leaf.astype("float16"), trained.weights))


def unknown_blocks(model):
    return (Phase(("head",), 1),)


def of_five(state):
    return {"similarity": jnp.zeros((5, 5))}


trains_nothing = method(lambda config: sharing(config, train=speechless))
trains_half = method(lambda config: sharing(config, train=halved))
trains_unknown = method(lambda config: sharing(config, train=local_training(config, phases=unknown_blocks)))
other_pairs = method(lambda config: build(config)._replace(matrices=of_five))
outside = jaxfl.Method("../outside", build, own.FedProx, "a mistake")
integers = method(sums_integers)
no_parts = method(sums_nothing)
keeps_a_word = method(lambda config: sharing(config, keep=lambda model: "classifier"))
forgets_to_return = method(lambda config: sharing(config, keep=lambda model: undecided))
updates_alone = method(lambda config: sharing(config, memory=Memory(update=forgetful)))
aggregates_alone = method(lambda config: sharing(config, memory=Memory(aggregate=alone)))
aggregates_parameters = method(lambda config: sharing(config, memory=Memory(aggregate=parameters)))
remembers_more = method(lambda config: sharing(config, memory=Memory(update=hoarding)))
sends_integers = method(lambda config: sharing(config, memory=Memory(update=counting)))
needs_a_word = method(needs=lambda config: "public")
ungathered = method(gathers_nothing)
unsplit = method(scatters_one)
returns_a_value_alone = with_loss(value_alone)
takes_no_key = with_loss(keyless)
returns_a_value_of_rows = with_loss(value_of_rows)
returns_no_statistics = with_loss(no_statistics)
loops_outside = with_training(
    lambda start, *rest: jax.lax.fori_loop(0, 2, lambda i, w: descend(fine, w, *rest).weights, start)
)
reads_a_rate = method(lambda config: build(config) if config.mu > 0 else None)
reads_a_rate_in_jax = method(lambda config: build(config) if jnp.maximum(config.mu, 0) else None)
half_epochs = with_training(lambda *given: descend(fine, *given, epochs=jnp.float32(0.5)).weights)
one_architecture = with_step(lambda state, info: (state, per_group(lambda *_: 0, info.loss, (0,))))
remembers_once = method(lambda config: sharing(config, memory=Memory(client=first_memory)))


few_arguments = method(lambda config: build(config)._replace(personal=lambda key, state: None))
builds_nothing = method(lambda config: None)


def divides(config):
    right = build(config)

    def step(key, state, federation, cohort):
        return broken(state)

    def broken(state):
        return state["weights"]

    return right._replace(step=step)


breaks = method(divides)


@jaxfl.options
class Rounds(jaxfl.Training):
    """Options with the name of one that all runs have."""

    rounds: int = 3
    """Of its own."""


class Undecorated(jaxfl.Training):
    """Options without their decorator."""

    mu: float = 0.1


@dataclasses.dataclass(frozen=True)
class Dataclass(jaxfl.Training):
    """Options with the standard library's decorator."""

    mu: float = 0.1


undecorated = method(config=Undecorated)
a_dataclass = method(config=Dataclass)
takes_a_name = method(config=Rounds)
no_options = method(config=dict)
already_built = method(build(own.FedProx()))


def two_arguments(labels, clients):
    return []


def three_entries(labels, clients, rng, *, classes: int = 3):
    return [1, 2, classes]


def beyond_the_data(labels, clients, rng):
    return [range(3)] * (clients - 1) + [[99999]]


def no_schedule(length):
    return 0.5


def divides_by_zero(labels, clients, rng):
    return 1 // 0


def source_of_nothing():
    return None


def source_breaks(data_dir):
    return open(data_dir)


class Maskless(nn.Module):
    """A layer that forgets the mask."""

    @nn.compact  # maskless
    def __call__(self, x, train):
        """(B, H, W, C) -> (B, 2)."""
        return nn.Dense(2)(x.reshape(len(x), -1))


class Breaking(nn.Module):
    """A layer with a mistake in it."""

    @nn.compact
    def __call__(self, x, *, train, mask):
        """(B, H, W, C) -> (B, 2)."""
        return nn.Dense(2)(x.reshape(7, -1))


def maskless(*, shape, classes):
    return Model("maskless", (Block("body", Maskless()), Block("classifier", Dense(classes))), shape, classes)


def breaking(*, shape, classes):
    return Model("breaking", (Block("body", Breaking()), Block("classifier", Dense(classes))), shape, classes)


def outputs(*, shape, classes):
    return Model(
        "outputs", (Block("body", Dense(4)), Block("classifier", Dense(classes + 1))), shape, classes
    )


def listed(*, shape, classes):
    return Model("listed", (Block("body", Dense([4])), Block("classifier", Dense(classes))), shape, classes)


def blocks(*, shape, classes):
    return Model("blocks", (Block("body", 3),), shape, classes)


def positional(shape):
    return None
