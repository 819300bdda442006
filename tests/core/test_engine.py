"""The engine: cohorts, chunks, resumption, scoring, compilations, divergence and the host step."""

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    CLASSES,
    SHAPE,
    assert_same,
    cohort,
    comparable,
    differ,
    long,
    optimising,
    tiny_links,
    tiny_models,
    tiny_partition,
    tiny_source,
    validating,
)
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from methods.cases import CASES

from core.conftest import CLIENTS, CONFIG
from jaxfl.core import engine, flops, host_state, tree
from jaxfl.core.client_map import scatter
from jaxfl.core.cohorts import SPARE, align, all_clients, balance, by_client, draw_cohorts, draw_newcomers
from jaxfl.core.job import Job, traced
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Algorithm, Cohort, Info, Predictor, Slots
from jaxfl.core.rounds import Conditions, Report, as_programs
from jaxfl.core.score import Score, score
from jaxfl.core.streams import PUBLIC, SERVER, SHARED_BATCHES, streams
from jaxfl.core.traffic import LARGEST_MESSAGE, sent_up
from jaxfl.core.window import LISTS, around, on_host, round_on
from jaxfl.data.federate import federate, set_apart
from jaxfl.data.shift import Drawn
from jaxfl.errors import JaxflError
from jaxfl.machine import placement
from jaxfl.machine.clock import Deadline, Device
from jaxfl.machine.placement import AXIS, divided, mesh_of
from jaxfl.models import zoo
from jaxfl.models.conv import CONVOLUTIONS
from jaxfl.models.named import ClientWeights
from jaxfl.registry import METHODS
from jaxfl.tasks.classes import Counts

ROUNDS = 5
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def cohorts():
    """Return cohorts of three of the five clients in each round."""
    return draw_cohorts(CLIENTS, 0.6, ROUNDS, seed=3)


@pytest.fixture(scope="module")
def undisturbed(programs, federation, cohorts):
    """Return the chunks of an uninterrupted run that is scored after every round, with copied states."""
    run = simulate(programs, federation, CONFIG, cohorts, KEY, eval_every=1)
    return [chunk._replace(state=jax.device_get(chunk.state)) for chunk in run]


def simulate(programs, federation, config, cohorts, key, eval_every, start=0, state=None, **options):
    """Yield the chunks of a single run."""
    job = Job(programs, federation, [config], [cohorts], [key], eval_every, **options)
    for chunks in engine.simulate(job, start, None if state is None else [state]):
        assert list(chunks) == [0]
        yield chunks[0]


# ---- cohorts


def ids(cohorts, clients):
    """Return the ids of each round's clients."""
    starts = np.cumsum([0, *clients[:-1]])
    return [
        [
            int(start + i)
            for start, slots in zip(starts, cohorts, strict=True)
            for i in slots.index[t][slots.mask[t]]
        ]
        for t in range(len(cohorts[0].mask))
    ]


@pytest.mark.parametrize(("participation", "active"), [(1.0, 10), (0.7, 7), (0.3, 3), (0.29, 2), (0.01, 1)])
def test_a_cohort_has_its_size_and_no_client_twice(participation, active):
    for of_round in ids(draw_cohorts((4, 6), participation, 20, seed=1), (4, 6)):
        assert len(set(of_round)) == len(of_round) == active
        assert set(of_round) <= set(range(10))


def test_shares_of_clients_are_exact():
    """A share of 0.29 of 100 clients is 29, although the product of floats is less."""
    cohorts, newcomers = draw_cohorts((40, 60), 0.29, 1, seed=1), draw_newcomers((100,), 0.29, seed=1)
    assert sum(slots.mask.sum() for slots in cohorts) == newcomers[0].sum() == 29


def test_cohorts_depend_only_on_seed_and_round():
    longer = ids(draw_cohorts((10,), 0.4, 30, seed=1), (10,))
    assert ids(draw_cohorts((10,), 0.4, 12, seed=1), (10,)) == longer[:12]
    assert ids(draw_cohorts((10,), 0.4, 30, seed=2), (10,)) != longer
    assert len(set(map(tuple, longer))) > 1
    for clients in (4, 6), (1, 7, 2):
        assert ids(draw_cohorts(clients, 0.4, 30, seed=1), clients) == longer


def test_newcomers_are_drawn_by_group_and_seed_and_take_part_in_no_round():
    apart, others = (draw_newcomers((10, 10), 0.3, seed) for seed in (1, 2))
    assert differ(*apart) and differ(apart, others)
    drawn = ids(draw_cohorts((10, 10), 0.5, 20, 1, apart), (10, 10))
    assert {len(of_round) for of_round in drawn} == {7}  # half of the others
    assert sorted(set().union(*drawn)) == np.flatnonzero(~np.concatenate(apart)).tolist()


@pytest.mark.parametrize("rounds", [1, 20])
@pytest.mark.parametrize("seed", [1, 2])
def test_places_depend_neither_on_rounds_nor_on_the_seed(rounds, seed):
    """One by one there are as many as any round can need, so that sums over them keep their order."""
    clients, sizes = (4, 7), [np.arange(1, 5), np.arange(1, 8)]
    cohorts = draw_cohorts(clients, 0.5, rounds, seed)
    assert [slots.mask.shape for slots in cohorts] == [(rounds, 4), (rounds, 5)]
    for devices in (1, 2):
        balanced = balance(cohorts, sizes, Machine(devices))
        assert [slots.mask.shape for slots in balanced] == [(rounds, 4 * devices), (rounds, 5 * devices)]


def test_side_by_side_there_are_no_more_places_than_the_fullest_round_needs():
    clients = (4, 6)
    drawn = draw_cohorts(clients, 0.5, 20, seed=1)
    cohorts = balance(drawn, [np.ones(n) for n in clients], Machine(1, 8))
    for slots, n in zip(cohorts, clients, strict=True):
        counts = slots.mask.sum(1)
        assert slots.index.shape == slots.mask.shape == (20, counts.max())
        assert counts.min() < counts.max()
        assert (slots.index[~slots.mask] == n).all()
        assert (slots.index[slots.mask] < n).all()


class Machine(NamedTuple):
    """The part of a federation that balancing reads."""

    devices: int
    clients_at_once: int = 1


@given(
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=30),
    devices=st.integers(1, 5),
    participation=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_balancing_moves_clients_between_devices_and_nothing_else(sizes, devices, participation):
    drawn, sizes = draw_cohorts((len(sizes),), participation, 4, seed=0), np.array(sizes)
    (slots,) = balance(drawn, [sizes], Machine(devices))
    before, after = ids(drawn, (len(sizes),)), ids((slots,), (len(sizes),))
    assert [sorted(of_round) for of_round in after] == before
    assert (slots.index[~slots.mask] == len(sizes)).all()
    places = slots.mask.shape[1] // devices
    for stretches in slots.index.reshape(4, devices, places):
        rows = [sizes[stretch[stretch < len(sizes)]] for stretch in stretches]
        loads = [of_device.sum() for of_device in rows]
        # Greedy: without its last and smallest client, the fullest device would not be the fullest.
        fullest = rows[np.argmax(loads)]
        if max(map(len, rows)) < -(-max(map(len, before)) // devices) + SPARE:
            assert max(loads) - fullest[-1] <= min(loads)
        assert all((np.diff(of_device) <= 0).all() for of_device in rows)


# ---- chunks


@pytest.mark.parametrize(
    "name",
    [name if name == "fedper" else long(name) for name in METHODS],
)
@optimising()
def test_chunks_of_any_length_give_the_same_run(cohorts, name):
    """Chunks of one and of two rounds give the same bits; the fifth round is alone in a chunk of either."""
    method, source = METHODS[name], tiny_source()
    federation = federate(source, validating(tiny_partition(source)), tiny_models(), links=tiny_links())
    config = method.config(epochs=1, batch_size=4, **CASES[name].short)
    programs = as_programs(method.build(config))

    def run(eval_every):
        """Return the report of every round, and states and scores by the number of rounds before them."""
        reports, ends = [], {}
        for chunk in simulate(programs, federation, config, cohorts, KEY, eval_every=eval_every):
            for report in chunk.reports:
                findings = comparable({"findings": report.info.findings})
                reports.append(report._replace(info=report.info._replace(findings=findings)))
            ends[len(reports)] = jax.device_get(chunk.state), chunk.scores
        return reports, ends

    reports, ends = run(1)
    assert_same(run(2), (reports, {rounds: ends[rounds] for rounds in (2, 4, 5)}))


def test_a_run_that_is_over_yields_no_chunk_and_compiles_nothing(federation, cohorts):
    programs = as_programs(METHODS["fedper"].build(CONFIG))
    state = jax.eval_shape(programs.algorithm.init, KEY, federation, traced(CONFIG))
    assert not list(simulate(programs, federation, CONFIG, cohorts, KEY, 1, start=ROUNDS, state=state))
    assert programs.compilations == 0


def test_a_resumed_run_continues_like_the_uninterrupted_one(programs, federation, cohorts, undisturbed):
    start = 2
    resumed = simulate(
        programs,
        federation,
        CONFIG,
        cohorts,
        KEY,
        eval_every=1,
        start=start,
        state=undisturbed[start - 1].state,
    )
    for chunk, expected in zip(resumed, undisturbed[start:], strict=True):
        assert_same(
            (chunk.first, chunk.state, chunk.reports, chunk.scores),
            (expected.first, expected.state, expected.reports, expected.scores),
        )


def test_scoring_many_clients_in_parts_gives_the_same_scores(monkeypatch, programs, federation, undisturbed):
    def evaluate():
        last = undisturbed[-1]
        return engine.evaluate(programs, federation, last.state, KEY, ROUNDS - 1, ROUNDS)

    whole = evaluate()
    monkeypatch.setattr("jaxfl.core.cohorts.SCORED_AT_ONCE", 2)
    compilations = programs.compilations
    assert_same(evaluate(), whole)
    assert programs.compilations == compilations + 1
    for scores, n in zip(whole["personal"], CLIENTS, strict=True):
        assert scores.test.right.shape == (n, CLASSES)
        assert (scores.test.rows.sum(1) > 0).all()


@pytest.fixture(scope="module")
def kept_on_host(federation):
    """Return the same clients for runs whose clients' state is in host memory."""
    return on_host(federation)


@pytest.mark.parametrize("start", [0, long(2)])
def test_runs_with_client_state_on_the_host_are_the_same(programs, kept_on_host, cohorts, undisturbed, start):
    state = undisturbed[start - 1].state if start else None
    run = simulate(
        programs, kept_on_host, CONFIG, cohorts, KEY, eval_every=2, start=start, state=state, on_host=True
    )
    lasts = []
    for chunk in run:
        lasts.append(chunk.first + len(chunk.reports) - 1)
        expected = undisturbed[lasts[-1]]
        assert_same((chunk.state, chunk.scores), (expected.state, expected.scores))
        assert_same(
            chunk.reports,
            [report for one in undisturbed[chunk.first :] for report in one.reports][: len(chunk.reports)],
        )
    assert lasts == [1, 3, 4][start // 2 :]


def changed(**functions):
    """Return FedPer with changed functions: each returns ``change(returned, *arguments)``."""
    algorithm = METHODS["fedper"].build(CONFIG)

    def other(name, change):
        return lambda *arguments: change(getattr(algorithm, name)(*arguments), *arguments)

    return algorithm._replace(**{name: other(name, change) for name, change in functions.items()})


def of_kept(state, f):
    """Return the state with ``f(leaf)`` for each leaf that clients keep."""
    return state._replace(kept=jax.tree.map(f, state.kept))


@pytest.mark.parametrize("shift", [None, Drawn(("noise",), (np.arange(5) / 5,), 0)])
def test_a_window_has_only_the_images_of_its_clients(shift):
    """A window has its clients' images as they see them, the public ones, and one of the stranger."""
    source, models = tiny_source(), [(zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=4), 5)]
    partition = tiny_partition(source)
    federation = federate(source, partition, models, drawn=shift)
    window = around(on_host(federation), cohort(federation, [3, 1], places=[2])).federation
    there = {image.tobytes() for image in np.asarray(window.images)}
    for absent in 2, 4:
        assert not there & {image.tobytes() for image in source.images[partition.train[absent]]}
    assert not window.images[-1].any()

    def seen(where, place):
        client = jax.tree.map(lambda leaf: leaf[place], where.groups[0])
        lists = [getattr(client, name) for name in LISTS]
        return client.id, [(where.inputs(rows), where.outputs(client, rows)) for rows in lists]

    for place, i in (1, 1), (2, 3):  # place 0 is the stranger's
        assert_same(seen(window, place), seen(federation, i))
    assert_same(window.inputs(window.public), federation.inputs(federation.public))


def test_programs_of_windows_are_compiled_once(kept_on_host, cohorts):
    """A job with dropouts compiles all its programs in `engine.compiled`, and no others later."""
    programs = as_programs(METHODS["fedper"].build(CONFIG))
    dropped = Conditions(dropped=tuple(np.zeros((ROUNDS, n), bool) for n in CLIENTS))
    job = Job(programs, kept_on_host, [CONFIG], [cohorts], [KEY], 2, conditions=[dropped], on_host=True)
    engine.compiled(job)
    compilations = programs.compilations
    assert len(list(engine.simulate(job))) == 3
    assert programs.compilations == compilations


@pytest.mark.parametrize("at_once", [long(1), long(2)])  # `test_batch` compares whole runs
@optimising()
def test_seeds_in_one_program_give_the_same_as_separate_runs(programs, federation, at_once):
    """One after another, runs are the same to the bit; side by side, up to the order of sums."""
    federation = dataclasses.replace(federation, clients_at_once=at_once)
    sizes = [np.asarray(group.size) for group in federation.groups]
    drawn = [draw_cohorts(CLIENTS, 0.4, 2, seed) for seed in (3, 4, 5)]
    assert len({slots[0].mask.sum(1).max() for slots in drawn}) > 1
    joined = align([balance(cohorts, sizes, federation) for cohorts in drawn], federation)
    joined = jax.tree.map(lambda *leaves: np.stack(leaves), *joined)
    keys = jax.random.split(KEY, 3)
    states = [
        jax.tree.map(jnp.copy, programs.algorithm.init(key, federation, traced(CONFIG))) for key in keys
    ]
    numbers = np.arange(2, dtype=np.int32)
    tolerance = 0 if at_once == 1 else 1e-6

    together, _ = programs.rounds_of_runs(
        keys,
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
        federation,
        Cohort(np.tile(numbers, (3, 1)), joined, rounds=2),
    )
    for i, (key, state, cohorts) in enumerate(zip(keys, states, drawn, strict=True)):
        cohorts = Cohort(numbers, balance(cohorts, sizes, federation), rounds=2)
        alone, _ = programs.rounds(key, state, federation, cohorts)
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], together), alone, tolerance)


@pytest.mark.parametrize(
    "model",
    [
        long(zoo.mcmahan(shape=SHAPE, classes=CLASSES, width=0.06, padding="same")),
        long(zoo.lenet5(shape=SHAPE, classes=CLASSES, width=0.2)),
    ],
    ids=lambda model: model.name,
)
@optimising()
def test_runs_with_different_convolutions_differ_only_by_rounding(model):
    """After three rounds in float32, runs agree within the tolerance that docs/devices.md states."""
    config, source = METHODS["fedavg"].config(epochs=2, batch_size=3), tiny_source()
    programs = as_programs(METHODS["fedavg"].build(config))
    cohorts = draw_cohorts((5,), 0.6, 3, seed=3)

    def trained(convolution):
        models = [(dataclasses.replace(model, convolution=convolution), 5)]
        federation = federate(source, tiny_partition(source), models)
        run = simulate(programs, federation, config, cohorts, KEY, eval_every=3)
        (chunk,) = run
        return jax.device_get(chunk.state), [report.info for report in chunk.reports]

    first, *others = map(trained, CONVOLUTIONS)
    for other in others:
        assert_same(other, first, tolerance=1e-6)


# ---- several devices


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((7, 40, 12), (None, AXIS)),  # along the longest axis after the clients
        ((7, 3, 12), (None, None, AXIS)),  # the longest one that makes equal parts
        ((8, 3), (AXIS,)),  # no later axis makes equal parts
        ((15, 20), (None, AXIS)),  # of all clients of both architectures
        ((7, 3), ()),
        ((8,), ()),
        ((40, 12), ()),  # of the server
        ((), ()),
    ],
)
def test_arrays_of_clients_are_divided_among_devices(shape, spec):
    mesh = mesh_of(4)
    assert divided(mesh, shape, clients={7, 8, 15}).spec == PartitionSpec(*spec)
    of_runs = divided(mesh, (7, *shape), clients={7, 8, 15}, leading=1).spec
    assert of_runs == (PartitionSpec(None, *spec) if spec else PartitionSpec())


@pytest.mark.parametrize("few, whole", [(7 * 8 * 12, False), (7 * 8 * 12 + 1, True)])
def test_small_arrays_of_clients_stay_whole_however_many_runs_share_a_program(few, whole, monkeypatch):
    monkeypatch.setattr(placement, "FEW", few)
    for shape, leading in ((7, 8, 12), 0), ((3, 7, 8, 12), 1):
        where = divided(mesh_of(4), shape, clients={7, 15}, leading=leading)
        assert where.is_fully_replicated == whole


@pytest.mark.parametrize("devices", [1, 4])
def test_the_devices_of_a_cpu_share_one_copy_of_the_images(devices):
    source = tiny_source()
    source = source._replace(images=source.images.copy())
    models = [(zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=8), 5)]
    images = federate(source, tiny_partition(source), models, devices=devices).images
    kept = np.array(images)
    assert len({shard.data.unsafe_buffer_pointer() for shard in images.addressable_shards}) == 1
    assert len(images.addressable_shards) == devices
    source.images[:] = 0  # the caller may change its array
    np.testing.assert_array_equal(images, kept)


@pytest.mark.parametrize("seeds", [1, long(2)])
def test_each_device_holds_an_equal_share_of_the_clients_state(seeds):
    """Each device holds its share at first, after each round, and in a resumed run."""
    config, source = METHODS["local"].config(epochs=1, batch_size=4), tiny_source()
    models = [(zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=8), 5)]
    federation = federate(source, tiny_partition(source), models, devices=4)
    programs = as_programs(METHODS["local"].build(config))
    cohorts, keys = draw_cohorts((5,), 0.6, 2, seed=3), list(jax.random.split(KEY, seeds))
    cohorts = balance(cohorts, [np.asarray(federation.groups[0].size)], federation)
    job = Job(programs, federation, [config] * seeds, [cohorts] * seeds, keys, eval_every=1)

    def assert_shared(state):
        leaves = jax.tree.leaves(state.kept)
        held = [sum(leaf.addressable_shards[device].data.nbytes for leaf in leaves) for device in range(4)]
        assert len(set(held)) == 1 and held[0] < 1.1 * sum(leaf.nbytes for leaf in leaves) / 4

    assert_shared(engine.initial_state(programs, federation, config, KEY))
    kept = []
    for chunks in engine.simulate(job):
        for chunk in chunks.values():
            assert_shared(chunk.state)
        kept.append([jax.device_get(chunk.state) for chunk in chunks.values()])
    (resumed,) = engine.simulate(job, 1, kept[0])
    for chunk, expected in zip(resumed.values(), kept[1], strict=True):
        assert_shared(chunk.state)
        assert_same(chunk.state, expected)


# ---- scores of cohorts


@pytest.mark.parametrize(("choice", "options"), [long("fedper", {}), long("fedavg-ft", {"ft_epochs": 1})])
def test_scoring_cohorts_changes_no_bit_of_training(federation, choice, options):
    """With all clients in the cohort, the scores after a round are those of the evaluation."""
    method = METHODS[choice]
    config = method.config(epochs=1, batch_size=4, **options)
    programs = as_programs(method.build(config))
    everyone = draw_cohorts(CLIENTS, 1.0, 2, seed=3)

    def run(score_cohort):
        run = simulate(programs, federation, config, everyone, KEY, eval_every=2, score_cohort=score_cohort)
        (chunk,) = run
        return chunk._replace(train_seconds=0, evaluate_seconds=0)

    plain, scored = run(False), run(True)
    unscored = [report._replace(scores={}) for report in scored.reports]
    assert_same((scored.state, unscored, scored.scores), (plain.state, plain.reports, plain.scores))
    assert_same(scored.reports[-1].scores["personal"], scored.scores["personal"])
    if choice == "fedper":  # it trains only in rounds, so a client receives what it deployed before
        assert_same(scored.reports[1].scores["received"], scored.reports[0].scores["personal"])


@pytest.mark.parametrize("devices", [1, 2])
def test_a_shared_model_is_scored_like_a_copy_per_client(monkeypatch, devices):
    """Clients are unequal and number classes differently; one image is not finite; log 0 is a score."""
    monkeypatch.setattr("jaxfl.core.examples.SWEPT", 4)
    monkeypatch.setattr("jaxfl.core.score.SWEPT", 4)
    source = tiny_source()
    images = source.images.astype(np.float32)
    partition = tiny_partition(source)
    partition = partition._replace(
        test=tuple(rows[: 1 + 4 * i] for i, rows in enumerate(partition.test)),
        relabel=np.random.default_rng(0).permuted(partition.relabel, axis=1),
    )
    federation = federate(source._replace(images=images), partition, tiny_models(), devices=devices)
    images[partition.test[3][5]] = np.nan  # client 0's only test row is another
    federation = dataclasses.replace(federation, images=federation.replicate(jnp.asarray(images)))
    cohort = Cohort(np.int32(0), jax.tree.map(lambda leaf: leaf[0], draw_cohorts(CLIENTS, 0.8, 1, seed=0)), 1)
    weights = tuple(model.init(KEY) for model in federation.models)

    def predict(model, shared, own, x):
        weights = own if shared is None else shared
        return model.apply(weights.params, weights.stats, x, train=False)[0].at[:, 0].set(-jnp.inf)

    shared = tuple(Predictor(w, None, predict) for w in weights)
    copies = tuple(
        Predictor(None, tree.repeat(w, len(slots.mask)), predict)
        for w, slots in zip(weights, cohort.groups, strict=True)
    )
    scores = [jax.jit(lambda p=p: score(p, KEY, federation, cohort))() for p in (shared, copies)]
    assert_same(*scores)
    finite = np.concatenate([of_group.finite for of_group in scores[0]])
    assert finite.any() and not finite.all()
    assert sum(of_group.test.right.sum() for of_group in scores[0]) > 0


# ---- divergence


def test_divergence_names_round_and_client(programs, federation, cohorts):
    """A client's images are infinite; other clients diverge only after it has taken part."""
    group = federation.groups[1]
    client, rows = int(group.id[0]), group.rows[0, : int(group.size[0])]
    joins = next(t for t, present in enumerate(ids(cohorts, CLIENTS)) if client in present)
    assert joins == 3  # the first of the two rounds in the second chunk

    broken = dataclasses.replace(federation, images=federation.images.at[rows].set(jnp.inf))
    good, bad = simulate(programs, broken, CONFIG, cohorts, KEY, eval_every=3)
    assert good.diverged is None
    assert bad.diverged == (joins, client, "loss")
    assert bad.scores is None
    assert len(bad.reports) == 1


def test_divergence_of_an_absent_client_shows_in_its_predictions(programs, federation, cohorts, undisturbed):
    client, t = int(federation.groups[1].id[0]), 2
    assert client not in ids(cohorts, CLIENTS)[t]

    before = undisturbed[t - 1].state
    first, second = before.kept
    second = jax.tree.map(lambda leaf: np.stack([np.full_like(leaf[0], np.nan), leaf[1]]), second)
    broken = before._replace(kept=(first, second))
    (bad,) = simulate(programs, federation, CONFIG, cohorts, KEY, eval_every=1, start=t, state=broken)
    assert bad.diverged == (t, client, "predictions")
    assert bad.scores is None


# ---- the host step


class Count(NamedTuple):
    """The state of an algorithm that learns nothing."""

    steps: jax.Array  # () int32
    present: tuple  # per group (n_g,) bool, which clients took part in the last step
    added: jax.Array  # () int32, by the host step


def counting(calls):
    """Return an algorithm whose host step notes its calls and changes traffic, next loss and predictions."""

    def init(key, federation, hyper):
        zero = jnp.zeros((), jnp.int32)
        nobody = tuple(jnp.zeros(len(group.id), bool) for group in federation.groups)
        return Count(zero, nobody, zero)

    def present(state, cohort):
        nobody = jax.tree.map(jnp.zeros_like, state.present)
        return scatter(nobody, cohort, tuple(slots.mask for slots in cohort.groups))

    def report(cohort, loss, scalars):
        """Return the same loss for every client, and the same traffic for those that are present."""
        losses = tuple(jnp.full(slots.mask.shape, loss, float) for slots in cohort.groups)
        traffic = tuple(slots.mask.astype(jnp.int32) * scalars for slots in cohort.groups)
        return Info(losses, up=traffic, down=traffic)

    def step(key, state, federation, cohort):
        info = report(cohort, state.added, scalars=1)
        return Count(state.steps + 1, present(state, cohort), state.added), info

    def prepare(key, state, federation, cohort):
        return state, report(cohort, state.added, scalars=1)

    def host(key, state, federation, cohort):
        calls.append((int(cohort.round), int(state.steps)))
        assert_same(state.present, present(state, cohort))
        flops.add(jnp.ones(3))  # as by a client map
        jax.jit(lambda x: flops.add(x))(4.0)  # inside a program that does not return it: not counted
        return state._replace(added=state.added + 10), report(cohort, 0.0, scalars=10)

    def one_class(model, added, own, x):
        return jax.nn.one_hot(jnp.broadcast_to(added // 10 % model.classes, len(x)), model.classes)

    def predictors(key, state, federation, cohort):
        return tuple(Predictor(state.added, None, one_class) for _ in federation.groups)

    return Algorithm(init, predictors, step, predictors, host, prepare=prepare)


def rows_of_class(label, federation, cohorts, t):
    """Return the scores of clients that predict one class everywhere."""
    scores = []
    for group, slots in zip(federation.groups, cohorts, strict=True):
        rows = [
            group.test_rows[i][: group.test_size[i]] if present else group.test_rows[0][:0]
            for i, present in zip(slots.index[t], slots.mask[t], strict=True)
        ]
        counts = [np.bincount(federation.labels[of_client], minlength=CLASSES) for of_client in rows]
        there, its_class = np.array(counts, np.int32), np.arange(CLASSES) == label
        none = np.zeros(len(rows), np.int32)
        predicted = there.sum(1, keepdims=True, dtype=np.int32) * its_class
        unchecked = Counts(*[np.zeros_like(there)] * 3)
        scores.append(Score(Counts(there * its_class, there, predicted), unchecked, none, none == 0))
    return tuple(scores)


@pytest.fixture(scope="module")
def counted(federation, cohorts):
    """Return the chunks of a run with all phases, the calls of its host step, and all keys, in order."""
    calls, keys = [], []

    def is_key(given):
        there = isinstance(given, jax.Array) and not isinstance(given, jax.core.Tracer)
        return there and jnp.issubdtype(given.dtype, jax.dtypes.prng_key)

    def noting(f):
        def noted(*arguments):
            keys.extend(filter(is_key, arguments))
            return f(*arguments)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "__call__", noting(Program.__call__))
        programs = as_programs(counting(calls))
        algorithm = programs.algorithm
        programs = programs._replace(
            algorithm=algorithm._replace(init=noting(algorithm.init), host=noting(algorithm.host))
        )
        run = simulate(programs, federation, CONFIG, cohorts, KEY, eval_every=2, score_cohort=True)
        return list(run), calls, keys


def test_each_phase_of_a_run_has_its_own_stream(counted):
    _, _, keys = counted
    of, at = streams(KEY), jax.random.fold_in
    wanted = [of.init, of.prepare]
    for t in range(ROUNDS):
        wanted += [of.rounds, of.scores, at(of.host, t), at(of.scores, t)]
        wanted += [at(of.scores, t)] * (t in (1, 3, 4))  # of all clients, at the end of a chunk
    assert_same(jax.random.key_data(jnp.stack(keys)), jax.random.key_data(jnp.stack(wanted)))
    assert len(np.unique(jax.random.key_data(jnp.stack(of)), axis=0)) == len(of)
    assert len({PUBLIC, SERVER, SHARED_BATCHES}) == 3


def test_the_host_step_follows_every_round_with_its_cohort(federation, cohorts, counted):
    chunks, calls, _ = counted
    assert calls == [(t, t + 1) for t in range(ROUNDS)]  # rounds, and steps so far
    assert chunks[-1].state.added == 10 * ROUNDS
    for t, report in enumerate(report for chunk in chunks for report in chunk.reports):
        for loss, up, down, slots in zip(*report.info[:3], cohorts, strict=True):
            assert (loss == 10.0 * t).all()
            assert_same((up, down), (np.int32(11) * slots.mask[t],) * 2)
        assert report.flops.server == 3
        assert_same(report.scores["received"], rows_of_class(t % CLASSES, federation, cohorts, t))
        assert_same(report.scores["personal"], rows_of_class((t + 1) % CLASSES, federation, cohorts, t))


def test_bad_rows_of_one_client_do_not_reach_the_others():
    """Padding repeats a client's own rows, so an infinite image affects only its owner."""
    source = tiny_source()
    images = source.images.astype(np.float32)
    images[0] = np.inf  # a training row of client 0
    federation = federate(source, tiny_partition(source), tiny_models())
    federation = dataclasses.replace(federation, images=jnp.asarray(images))
    cohorts = draw_cohorts(CLIENTS, 1.0, 1, seed=0)
    config = METHODS["local"].config(epochs=1, batch_size=4)
    programs = as_programs(METHODS["local"].build(config))
    (chunk,) = simulate(programs, federation, config, cohorts, KEY, eval_every=1)
    loss = np.concatenate(chunk.reports[0].info.loss)
    assert chunk.diverged == (0, 0, "loss")
    assert np.isfinite(loss).tolist() == [False, True, True, True, True]


def test_a_message_that_the_ledger_cannot_count_is_refused():
    cohort = Cohort(np.int32(0), (Slots(np.arange(2, dtype=np.int32), np.array([True, False])),), rounds=1)

    def message(scalars):
        return (jax.ShapeDtypeStruct((scalars,), jnp.float32),)

    assert sent_up(cohort, message(LARGEST_MESSAGE))[0].tolist() == [LARGEST_MESSAGE, 0]
    with pytest.raises(JaxflError, match="2,147,483,648 scalars, more than the ledger counts"):
        sent_up(cohort, message(LARGEST_MESSAGE + 1))
    with pytest.raises(ValueError, match=r"a whole number of scalars, not 12\.5"):
        sent_up(cohort, (12.5,))
    assert sent_up(cohort, (jnp.array([3, 7], jnp.int32),))[0].tolist() == [3, 0]  # of each client


# ---- models right after training, and the phase before the first round


def disturbed(config):
    """Return FedAvg that reports made-up models right after training, which cost something to compute."""
    fedavg = METHODS["fedavg"].build(config)

    def step(key, state, federation, cohort):
        new, info = fedavg.step(key, state, federation, cohort)
        noise = jax.random.normal(key, (64, 64))
        amount = 3 * jnp.tanh((noise @ noise).mean())
        received = fedavg.receive(key, new, federation, cohort)
        made_up = [
            dataclasses.replace(one, shared=jax.tree.map(lambda leaf: leaf - amount, one.shared))
            for one in received
        ]
        return new, info._replace(trained=tuple(made_up))

    return fedavg._replace(step=step)


def test_models_right_after_training_are_scored_on_request_and_cost_nothing_otherwise(federation, cohorts):
    config = METHODS["fedavg"].config(epochs=1, batch_size=4)
    plain, told = (as_programs(build(config)) for build in (METHODS["fedavg"].build, disturbed))
    run = simulate(told, federation, config, cohorts, KEY, eval_every=ROUNDS, score_cohort=True)
    (chunk,) = run
    for t, report in enumerate(chunk.reports):
        assert report.info.trained is None
        assert report.scores.keys() == {"received", "trained", "personal"}
        for moment in report.scores.values():
            for of_group, slots in zip(moment, cohorts, strict=True):
                assert ((of_group.test.rows.sum(1) > 0) == slots.mask[t]).all()
    trained, received = (
        [sum(of_group.test.right.sum() for of_group in report.scores[moment]) for report in chunk.reports]
        for moment in ("trained", "received")
    )
    assert trained != received

    def cost(programs):
        job = Job(programs, federation, [config], [cohorts], [KEY], ROUNDS)
        compiled, *_ = engine.compiled(job)
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    assert cost(told) == cost(plain)


def test_the_phase_before_the_first_round_runs_once_with_all_clients(programs, federation, cohorts):
    """Only a new run has this phase, with all clients; runs in one program prepare as each alone."""
    fedper = METHODS["fedper"].build(CONFIG)
    seen = []

    def prepare(key, state, federation, cohort):
        seen.append(tuple(slots.mask.shape for slots in cohort.groups))
        return fedper.step(key, state, federation, cohort)

    prepared = as_programs(fedper._replace(prepare=prepare))
    keys = jax.random.split(KEY, 2)

    def alone(programs, key, **options):
        chunks = simulate(programs, federation, CONFIG, cohorts, key, eval_every=2, **options)
        return [chunk._replace(state=jax.device_get(chunk.state)) for chunk in chunks]

    runs = [alone(prepared, key) for key in keys]
    assert seen == [tuple((n,) for n in CLIENTS)]  # traced once
    for first, *later in runs:
        assert all(chunk.preparation is None for chunk in later)
        info, flops, scores, lost = first.preparation
        assert scores == {} and lost is None
        for up, of_group, n in zip(info.up, flops.clients, CLIENTS, strict=True):
            assert up.shape == of_group.shape == (n,) and (up > 0).all() and (of_group > 0).all()
    (unprepared, *_) = alone(programs, keys[0])
    assert unprepared.preparation is None
    assert (unprepared.reports[0].info.loss[0] != runs[0][0].reports[0].info.loss[0]).any()

    job = Job(prepared, federation, [CONFIG] * 2, [cohorts] * 2, keys, 2)
    for at, of_runs in enumerate(engine.simulate(job)):
        for i, chunk in of_runs.items():
            expected = runs[i][at]
            assert_same(
                (chunk.state, chunk.reports, chunk.scores, chunk.preparation),
                (expected.state, expected.reports, expected.scores, expected.preparation),
            )
    (resumed,) = alone(prepared, keys[0], start=4, state=runs[0][1].state)
    assert resumed.preparation is None
    assert_same(resumed.state, runs[0][2].state)
    assert prepared.prepare.compilations == 1 and programs.prepare is None


def test_clients_on_the_host_begin_with_the_weights_they_are_given(monkeypatch, kept_on_host):
    """Each client gets its own weights, also if not all are made at once."""
    numbers = [10.0 + np.asarray(group.id) for group in kept_on_host.groups]

    def init(key, federation, hyper):
        given = federation.initial or [
            ClientWeights({}, np.zeros(len(group.id))) for group in federation.groups
        ]
        return tuple(jnp.asarray(of_group.own) for of_group in given)

    given = tuple(ClientWeights({}, own) for own in numbers)
    monkeypatch.setattr("jaxfl.core.cohorts.SCORED_AT_ONCE", 2)
    state = host_state.initial(init, KEY, dataclasses.replace(kept_on_host, initial=given), None)
    assert_same(state.state, tuple(map(np.float32, numbers)))


def test_the_same_clients_drop_out_or_are_slow_in_a_window(kept_on_host):
    of_round = cohort(kept_on_host, (2, 4, 0), places=[3, 2])
    window, dropped = around(kept_on_host, of_round), tuple(np.arange(n)[None] == n - 1 for n in CLIENTS)
    devices = tuple(Device(np.arange(n), 10 + np.arange(n)) for n in CLIENTS)
    _, inside, conditions = round_on(window, Conditions(dropped=dropped, deadline=Deadline(5.0, devices)))
    assert conditions.deadline.seconds == 5.0
    for g, (slots, places) in enumerate(zip(of_round.groups, inside.groups, strict=True)):
        outside, there = slots.index[slots.mask], places.index[0, slots.mask]
        assert conditions.dropped[g][0, there].tolist() == dropped[g][0, outside].tolist()
        for before, after in zip(devices[g], conditions.deadline.devices[g], strict=True):
            assert len(after) == len(window.federation.groups[g].id)
            assert after[there].tolist() == before[outside].tolist()


def test_a_window_has_room_for_validation_rows():
    """A window has room even if most of its clients' rows are validation rows."""
    source, rows = tiny_source(), np.arange(40, 60, dtype=np.int32).reshape(5, 4)
    partition = tiny_partition(source, (1,) * 5)._replace(test=(*rows[:, :1],), validation=(*rows[:, 1:],))
    federation = federate(source, partition, [(zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=4), 5)])
    window = around(on_host(federation), cohort(federation, [3, 1], places=[2])).federation
    for place, i in (1, 1), (2, 3):  # place 0 is the stranger's
        found, expected = (
            where.inputs(where.groups[0].validation_rows[at])
            for where, at in ((window, place), (federation, i))
        )
        assert_same(found, expected)


def test_places_that_pad_runs_belong_to_no_client(federation):
    """Padding places are past the last client, so nothing is written from them."""
    counts = [len(group.id) for group in federation.groups]
    both = [
        tuple(Slots(np.arange(k, dtype=np.int32)[None], np.ones((1, k), bool)) for _ in counts)
        for k in (1, 2)
    ]
    fewer, _ = align(both, federation)
    for slots, n in zip(fewer, counts, strict=True):
        assert slots.index.tolist() == [[0, n]] and slots.mask.tolist() == [[True, False]]


def test_newcomers_join_at_the_rate_of_the_last_round(federation, cohorts):
    """Newcomers get the scheduled rate of the last round that was run, even if the run ends early."""
    seen, drawn = [], []

    def rounds(key, state, federation, of_rounds, score_key, conditions):
        seen.append((conditions.rate.tolist(), of_rounds.round.tolist(), of_rounds.among_all))
        drawn.extend([key, score_key])
        return state, Report(Info((np.zeros(1),), (), ()), (), {})

    apart = set_apart(federation, [np.arange(n) == n - 1 for n in CLIENTS])
    programs: Any = SimpleNamespace(algorithm=SimpleNamespace(host=None), rounds=rounds)
    factors = [Conditions(np.arange(1.0, ROUNDS + 1))]
    engine.join(Job(programs, apart, [CONFIG], [cohorts], [KEY], 2, conditions=factors), 0, {}, last=2)
    assert seen == [([3.0], [2], True)]
    own, _, scores = jax.random.split(streams(KEY).join, 3)
    assert_same(*(jax.random.key_data(jnp.stack(keys)) for keys in (drawn, [own, scores])))


def test_parts_are_joined_in_the_order_of_clients():
    """The order of places does not matter, and empty ones are left out."""
    first = Slots(np.array([2, 0]), np.array([True, True])), np.array([20, 0])
    second = Slots(np.array([3, 1]), np.array([False, True])), np.array([99, 10])
    assert by_client([first, second]).tolist() == [0, 10, 20]


def test_correctly_predicted_validation_rows_are_counted(federation):
    """The model predicts class 0 for every row."""
    rows = np.array([1, 0, 2], np.int32)
    groups = tuple(
        dataclasses.replace(
            group,
            validation_rows=jnp.tile(rows, (len(group.id), 1)),
            validation_size=jnp.full(len(group.id), 2, jnp.int32),
        )
        for group in federation.groups
    )
    known = dataclasses.replace(federation, groups=groups)
    zero = Predictor(
        {}, None, lambda model, shared, own, x: jax.nn.one_hot(jnp.zeros(len(x), jnp.int32), CLASSES)
    )
    found = jax.jit(lambda: score((zero,) * len(groups), KEY, known, all_clients(known, 1)))()
    right = (np.asarray(federation.labels)[rows[:2]] == 0).sum()
    for of_group in found:
        assert set(of_group.validation.right.sum(1).tolist()) == {right} != {2}
        assert set(of_group.validation_rows.tolist()) == {2}
