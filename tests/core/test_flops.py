"""Floating-point operations: counts by hand, and their reports by rounds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, SIZES, long

from core.conftest import CLIENTS, HIDDEN
from jaxfl.core import flops
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.core.engine import Chunk
from jaxfl.core.examples import own_rows, sweep
from jaxfl.core.flops import Operations
from jaxfl.core.job import traced
from jaxfl.core.protocol import Cohort, Info, Slots
from jaxfl.core.rounds import Report, as_programs
from jaxfl.core.score import Score
from jaxfl.core.training import Training, fit
from jaxfl.machine.clock import of_clients, profile
from jaxfl.models import norms, zoo
from jaxfl.registry import METHODS
from jaxfl.results.result import joined, records
from jaxfl.tasks.classes import Counts

INPUTS = 64
OWNERS = (0, 0, 0, 1, 1)  # the group of each client
EPOCHS, BATCH = 2, 3  # batches of unequal size
KEY = jax.random.key(0)


def reports(federation, choice, participation=1.0, rounds=1, **options):
    """Return what the rounds of a method report, and their cohorts."""
    method = METHODS[choice]
    config = method.config(epochs=EPOCHS, batch_size=BATCH, **options)
    cohorts = draw_cohorts(CLIENTS, participation, rounds, seed=3)
    programs = as_programs(method.build(config))
    state = jax.tree.map(jnp.copy, programs.algorithm.init(KEY, federation, traced(config)))
    of_rounds = Cohort(np.arange(rounds, dtype=np.int32), cohorts, rounds)
    _, found = programs.rounds(KEY, state, federation, of_rounds)
    return [jax.tree.map(lambda leaf, t=t: leaf[t], found) for t in range(rounds)], cohorts


def multiplications(hidden):
    """Return the multiplications of one row: (in the first layer, in the second)."""
    return INPUTS * hidden, hidden * CLASSES


def update(hidden):
    """Return the operations of one row in a step: forward, gradients of both kernels and the hidden units."""
    first, second = multiplications(hidden)
    return 2 * (2 * first + 3 * second)


def test_operations_of_fedavg_with_absent_clients_match_a_count_by_hand(federation):
    done, cohorts = reports(federation, "fedavg", participation=0.6, rounds=4)
    assert any((~slots.mask).any() for slots in cohorts)
    for t, report in enumerate(done):
        assert report.flops.server == 0
        for g, (slots, group) in enumerate(zip(cohorts, federation.groups, strict=True)):
            present = slots.index[t][slots.mask[t]]
            expected = np.zeros(len(group.id))
            expected[present] = EPOCHS * np.asarray(group.size)[present] * update(HIDDEN[g])
            np.testing.assert_array_equal(report.flops.clients[g], expected)


def test_operations_of_fedrep_match_a_count_by_hand(federation):
    """The head phase runs the feature extractor only forward."""
    ((report,), _) = reports(federation, "fedrep", head_epochs=3)
    for g, hidden in enumerate(HIDDEN):
        first, second = multiplications(hidden)
        head, body = 2 * (first + 2 * second), 2 * (2 * first + 2 * second)
        rows = np.array([size for size, owner in zip(SIZES, OWNERS, strict=True) if owner == g])
        np.testing.assert_array_equal(report.flops.clients[g], rows * (3 * head + EPOCHS * body))


def test_operations_of_the_server_are_not_counted_for_clients(federation):
    """FedDF's server runs all networks, two products of each on every image, and distils."""
    public, passes = len(federation.public), 2
    ((alone,), _) = reports(federation, "fedavg")
    ((fused,), _) = reports(federation, "feddf", server_epochs=passes)
    for g in range(len(CLIENTS)):
        np.testing.assert_array_equal(fused.flops.clients[g], alone.flops.clients[g])
    heard = sum(n * 2 * sum(multiplications(hidden)) for n, hidden in zip(CLIENTS, HIDDEN, strict=True))
    assert fused.flops.server == public * (heard + passes * sum(map(update, HIDDEN)))


@pytest.mark.long
def test_operations_of_two_client_maps_add_up(federation):
    """Ditto trains two models per client; Local with its schedule `all` trains all clients in any round."""
    ((alone,), _) = reports(federation, "fedavg")
    ((twice,), _) = reports(federation, "ditto", personal_epochs=EPOCHS)
    ((everyone,), _) = reports(federation, "local", participation=0.4, local_schedule="all")
    ((side_by_side,), _) = reports(dataclasses.replace(federation, clients_at_once=2), "fedavg")
    for g in range(len(CLIENTS)):
        np.testing.assert_array_equal(twice.flops.clients[g], 2 * alone.flops.clients[g])
        np.testing.assert_array_equal(everyone.flops.clients[g], alone.flops.clients[g])
        np.testing.assert_array_equal(side_by_side.flops.clients[g], alone.flops.clients[g])


def test_only_processed_rows_count(federation):
    client = jax.tree.map(lambda leaf: leaf[0], federation.groups[0])
    client = dataclasses.replace(client, federation=federation)
    size = int(client.size)
    assert size % BATCH == 1

    def counted(*needing):
        def update(carry, batch, key):
            norms.report(needing)
            return carry, (batch.x.reshape(BATCH, INPUTS) @ jnp.ones(INPUTS)).sum()

        with flops.collect() as amounts:
            rows = own_rows(client, Training())
            fit(update, (), KEY, rows, epochs=EPOCHS, batch_size=BATCH)
            sweep(
                lambda x: x.reshape(len(x), INPUTS) @ jnp.ones(INPUTS), client.rows, client.size, federation
            )
        return [float(amount) for _, amount in amounts]

    passed = size * 2 * INPUTS
    assert counted() == [EPOCHS * passed, passed]
    assert counted("a block that cannot train on one row") == [EPOCHS * (size - 1) * 2 * INPUTS, passed]


def test_operations_in_loops_count_as_often_as_they_run():
    """A convolution in a loop over rows costs its closed form, and a cond its dearer branch."""
    batch, height, width, channels, features = 2, 5, 4, 3, 7
    x = jax.ShapeDtypeStruct((height, batch, width, channels), jnp.float32)
    kernel = jax.ShapeDtypeStruct((channels, features), jnp.float32)
    closed_form = 2 * batch * height * width * channels * features

    out = jnp.zeros((height, batch, width, features))

    def by_rows(x, kernel):
        return jax.lax.fori_loop(0, height, lambda i, out: out.at[i].set(x[i] @ kernel), out)

    def as_conv(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel[None, None], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def branches(x, kernel):
        return jax.lax.cond(
            x.sum() > 0, by_rows, lambda x, kernel: as_conv(x, kernel[:, :1]) + out, x, kernel
        )

    for f in by_rows, as_conv, jax.checkpoint(by_rows), jax.jit(by_rows), branches:
        assert flops.of(f, x, kernel) == closed_form

    def transposed(x, kernel):
        return jax.lax.conv_transpose(x, kernel[None, None], (2, 2), "SAME").sum()

    gradients = jax.value_and_grad(transposed, (0, 1))
    assert flops.of(gradients, x, kernel) == 3 * flops.of(transposed, x, kernel) == 3 * closed_form


@pytest.mark.parametrize("make", [zoo.lenet5, long(zoo.resnet18)])  # the latter with padding and strides
def test_a_network_costs_the_same_with_every_convolution(make):
    network = make(shape=(16, 16, 1), classes=3)

    def cost(convolution):
        model = dataclasses.replace(network, convolution=convolution)
        weights = jax.eval_shape(model.init, jax.random.key(0))

        def loss(params, stats, x):
            return model.apply(params, stats, x, train=True)[0].sum()

        return flops.of(jax.grad(loss, argnums=(0, 2)), *weights, jnp.ones((2, 16, 16, 1)))

    assert cost("rows") == cost("patches") == cost("plain") > 0


def test_a_round_takes_as_long_as_its_slowest_client(federation):
    names = {"mlp": {"mlp"}, "mlp,hidden=4": {"my.py:net"}}
    known = profile(["mlp=100:10", "my.py:net=1e3:5"], names)
    sizes = [len(group.id) for group in federation.groups]
    devices = of_clients(list(known.values()), sizes, 0.0, np.random.default_rng(0))
    chunk = Chunk(0, None, [REPORT], None, 0.0, 0.0)
    cohorts = (
        Slots(np.array([[2, 0]]), np.full((1, 2), True)),
        Slots(np.array([[1, 2]]), np.array([[True, False]])),
    )
    other = dataclasses.replace(federation.groups[1].model, name="mlp,hidden=4")
    groups = federation.groups[0], dataclasses.replace(federation.groups[1], model=other)
    (line,) = records(chunk, dataclasses.replace(federation, groups=groups), cohorts, 0.0, devices)
    assert line["clients"] == [0, 2, 4] and line["client_flops"] == [10.0, 30.0, 5e3]
    # Operations by FLOP/s and bytes by bytes/s of clients 0, 2 and 4.
    assert line["simulated_seconds"] == pytest.approx(max(0.1 + 1.2, 0.3 + 1.6, 5 + 3.2))


def test_messages_are_counted_beyond_32_bits_and_idle_clients_have_no_loss(federation):
    info = REPORT.info._replace(
        up=({2**30: np.array([9, 0]), 5: np.array([1, 1])}, {2**30: np.array([2, 0]), 5: np.array([0, 0])}),
        loss=(np.array([1.0, 5.0]), np.array([3.0, 0.0])),
        idle=(np.array([False, True]), np.array([False, False])),
    )
    chunk = Chunk(0, None, [REPORT._replace(info=info)], None, 0.0, 0.0)
    cohorts = (
        Slots(np.array([[2, 0]]), np.full((1, 2), True)),
        Slots(np.array([[1, 2]]), np.array([[True, False]])),
    )
    (line,) = records(chunk, federation, cohorts, 0.0)
    assert line["client_bytes_up"] == [4 * 5, 4 * (9 * 2**30 + 5), 8 * 2**30]
    assert line["bytes_up"] == sum(line["client_bytes_up"])
    assert line["client_loss"] == [None, 1.0, 3.0] and line["loss"] == 2.0
    # Clients 2 and 4 have no counted operation, and only client 2 has no step.
    of_two = info._replace(idle=None, loss=(np.array([0.0, 5.0]), np.array([3.0, 0.0])))
    untrained = Operations((np.array([1e1, 2e1, 0.0]), np.array([4e3, 0.0])), np.float64(0))
    report = REPORT._replace(flops=untrained, info=of_two)
    (line,) = records(chunk._replace(reports=[report]), federation, cohorts, 0.0)
    assert line["client_loss"] == [5.0, None, 3.0] and line["loss"] == 4.0
    nobody = info._replace(idle=(np.array([True, True]), np.array([True, True])))
    (line,) = records(chunk._replace(reports=[REPORT._replace(info=nobody)]), federation, cohorts, 0.0)
    assert line["loss"] is None


REPORT = Report(
    Info(
        loss=(np.ones(2), np.ones(2)),
        up=(np.array([3, 1]), np.array([2, 0])),
        down=(np.array([1, 2]), np.array([2, 0])),
    ),
    Operations((np.array([10.0, 20.0, 30.0]), np.array([0.0, 5e3])), np.float64(0)),
    {},
)


def test_lost_clients_are_in_no_score_of_their_cohort(federation):
    """Their places are empty when the round is scored."""
    nothing = np.zeros(2, int)
    scores = tuple(
        Score(
            Counts(np.array(right)[:, None], np.array(rows)[:, None], np.zeros((2, 1), int)),
            Counts(*np.zeros((3, 2, 1), int)),
            nothing,
            nothing,
        )
        for right, rows in (([0, 1], [0, 4]), ([3, 0], [4, 0]))
    )
    lost = np.array([True, False]), np.array([False, False])
    report = REPORT._replace(lost=lost, scores={"received": scores})
    cohorts = (
        Slots(np.array([[2, 0]]), np.full((1, 2), True)),
        Slots(np.array([[1, 2]]), np.array([[True, False]])),
    )
    (line,) = records(Chunk(0, None, [report], None, 0.0, 0.0), federation, cohorts, 0.0)
    assert line["lost"] == [2] and line["cohort"] == {"received": {"mean": 0.5, "pooled": 0.5}}


def test_traffic_of_newcomers_is_reported_with_their_ids(federation):
    slots = Slots(np.array([2, 0]), np.full(2, True)), Slots(np.array([1, 2]), np.array([True, False]))
    found = joined(REPORT, Cohort(np.int32(0), slots, 1), federation)
    assert found == {"clients": [2, 0, 4], "bytes_up": 4 * (3 + 1 + 2), "bytes_down": 4 * (1 + 2 + 2)}
