"""pFedClub between rounds: networks taken apart, stitched together, trained and chosen as teachers."""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, PUBLIC, SHAPE, tiny_partition, tiny_source

from jaxfl.algorithms.reassembly.pfedclub import PFedClub, PFedClubPlus, State, build, from_teacher
from jaxfl.core.engine import traced
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.data.federation import Batch, federate
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.reassembly import assembly, stitching
from jaxfl.mechanisms.reassembly.assembly import Images
from jaxfl.mechanisms.reassembly.blocks import Candidate, Pool, identity
from jaxfl.mechanisms.reassembly.chain import Frozen, Learnt, Workshop, gradients, run
from jaxfl.mechanisms.reassembly.networks import Network, dismantled, networks, references, weights_of
from jaxfl.mechanisms.reassembly.stitching import Stitch
from jaxfl.mechanisms.reassembly.views import view
from jaxfl.models import zoo

pytestmark = pytest.mark.usefixtures("quick_compilation")

COLOUR = (32, 32, 3)
SOME = ((2, 0), (1,))  # clients of the two groups that are present, by position
ABSENT = ((1,), (0,))


@pytest.fixture(scope="module")
def workshop():
    """Blocks and shapes are the same in most tests: they share the programs."""
    return Workshop()


def own_weights(federation):
    """Models per group (n_g, ...), every client with its own."""
    keys = jax.random.split(jax.random.key(0), federation.clients)
    return tuple(jax.vmap(group.model.init)(keys[group.id]) for group in federation.groups)


def cohort(present):
    """A round with these clients, by position in their groups."""
    slots = [Slots(np.array(some, np.int32), np.ones(len(some), bool)) for some in present]
    return Cohort(np.int32(0), tuple(slots), rounds=1)


class Round(NamedTuple):
    """What a server step makes of a state."""

    before: State
    after: State
    findings: dict


def teach(federation, workshop, config, seed=0, present=SOME):
    """One server step."""
    state = build(config).init(jax.random.key(0), federation, traced(config))
    state = state._replace(weights=own_weights(federation))
    key = jax.random.key(seed)
    after, info = assembly.teach(key, state, federation, cohort(present), config, workshop)
    return Round(state, after, info.findings)


def candidate_of(federation, *places):
    """Networks, and a candidate of blocks (client, index); client 0 has an MLP, client 3 the small CNN."""
    found = networks(own_weights(federation), federation, cohort(((0,), (0,))))
    labels = np.zeros(sum(len(network.parts) for network in found), int)
    by_place = {(block.client, block.index): block for block in references(found, labels)}
    blocks = tuple(by_place[place] for place in places)
    candidate = Candidate(blocks, len(blocks), (0.0,) * len(blocks))
    return {network.client: network for network in found}, candidate


def public_images(federation):
    x = federation.inputs(federation.public)
    top = federation.images.max().astype(x.dtype)
    return Images(x, federation.labels[federation.public], federation.mean, federation.std, top)


def assert_same(one, other):
    """To the bit, dtypes and structure included."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), one, other)


# ---- blocks


@pytest.mark.parametrize(
    ("name", "conv", "fc"),
    [
        ("cnn1", 2, 2),
        ("cnn2", 3, 2),
        ("cnn3", 5, 4),
        ("cnn4", 6, 4),
        ("mobilenet_v1", 14, 1),
        ("mobilenet_v2", 19, 1),
        ("mobilenet_v3", 13, 2),
    ],
)
def test_the_papers_networks_are_taken_apart(name, conv, fc):
    model = getattr(zoo, name)(shape=COLOUR, classes=10, width=0.1)
    parts = dismantled(model)
    assert [part.kind for part in parts] == ["conv"] * conv + ["fc"] * fc
    assert sum(part.block.size for part in parts) == model.size
    assert [part.block.shape for part in parts] == [COLOUR, *(part.output_shape for part in parts[:-1])]
    assert parts[-1].output_shape == (10,)
    assert sum((part.block.names for part in parts), ()) == model.names


def test_resizing_is_part_of_the_block_behind_it():
    model = zoo.cnn1(shape=SHAPE, classes=CLASSES, width=0.05, norm="batch")
    parts = dismantled(model)
    assert [part.block.names for part in parts] == [("input", "conv1"), ("conv2",), ("fc1",), ("classifier",)]
    assert parts[0].block.shape == SHAPE


def test_a_chain_of_own_blocks_is_the_model(workshop):
    """With resizing, BatchNorm and dropout."""
    model = zoo.cnn1(shape=SHAPE, classes=CLASSES, width=0.05, norm="batch")
    weights = model.init(jax.random.key(0))
    weights = weights._replace(stats=jax.tree.map(lambda leaf: leaf + 0.3, weights.stats))
    network = Network(0, 0, 0, dismantled(model), weights)
    pool = Pool(references([network], np.zeros(4, int)), np.ones((4, 4)))
    own = assembly.layers(identity(0, pool), SHAPE, CLASSES)
    assert own == list(pool.blocks)
    x = jax.random.normal(jax.random.key(1), (5, *SHAPE))
    chain = tuple(Frozen(network.parts[r].block, weights_of(network, r)) for r in range(4))
    expected, _ = model.apply(*weights, x, train=False)
    np.testing.assert_allclose(run(workshop, chain, x), expected, rtol=1e-5, atol=1e-6)


# ---- stitching layers


def test_a_layer_fits_only_where_shapes_differ():
    assert stitching.between((4, 4, 2), (4, 4, 2), dense=True) is None
    assert stitching.between((5,), (5,), dense=True) is None
    assert stitching.between((5,), (4, 4, 2), dense=True) == Stitch((5,), (32,))
    assert stitching.between((5,), (4, 4, 2), dense=False) == Stitch((5,), (4, 4, 2))


KINDS = {  # (source, target): shape of W
    ((4, 4, 2), (8, 2, 3)): (2, 3),
    ((4, 3, 2), (31,)): (24, 31),
    ((5, 1, 2), (31,)): (2, 31),  # too large to be flattened
    ((5,), (31,)): (5, 31),
    ((5,), (4, 3, 2)): (5, 2),
}


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(("source", "target"), KINDS)
def test_a_layer_is_one_affine_map(source, target, relu):
    stitch = Stitch(source, target, relu)
    weights = stitching.initial(jax.random.key(0), stitch)
    kernel, bias = weights["kernel"], weights["bias"]
    assert kernel.shape == stitch.shape == KINDS[source, target]
    assert stitch.size == kernel.size + bias.size
    x = np.random.default_rng(0).normal(size=(2, *source)).astype(np.float32)
    seen = x
    if len(source) == 3 and len(target) == 1:
        seen = x.reshape(2, -1) if max(source[:2]) <= 4 else x.mean((1, 2))
    elif len(source) == 3:  # 4x4 to 8x2: every row twice, the means of two columns
        seen = x.repeat(2, 1).reshape(2, 8, 2, 2, 2).mean(3)
    y = seen @ np.asarray(kernel) + np.asarray(bias)
    if len(source) < len(target):
        y = np.broadcast_to(y[:, None, None], (2, *target))
    assert y.min() < 0
    expected = np.maximum(y, 0) if relu else y
    np.testing.assert_allclose(
        stitching.apply(stitch, weights, jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6
    )


def test_gradients_through_a_chain_are_those_of_the_composed_function(federation, workshop):
    members, candidate = candidate_of(federation, (3, 0), (3, 0), (0, 0), (3, 3), (3, 1))
    layers = assembly.layers(candidate, SHAPE, CLASSES)
    assert [(len(s.source), len(s.target), s.relu) for s in layers if isinstance(s, Stitch)] == [
        (3, 3, True),
        (3, 1, True),
        (1, 1, True),
        (1, 3, True),
        (3, 1, False),
    ]
    config, images = PFedClub(server_epochs=0), public_images(federation)
    rng = np.random.default_rng(0)
    chain = assembly.stitched(candidate, members, SHAPE, CLASSES, images, config, config, workshop, rng)
    # No ReLU stops the gradient of positive weights.
    chain = tuple(part._replace(weights=jax.tree.map(jnp.abs, part.weights)) for part in chain)
    places = [place for place, part in enumerate(chain) if isinstance(part, Learnt)]
    assert places == [1, 3, 5, 7, 9] and len(chain) == 10

    def loss(learnt):
        x = images.x
        for place, part in enumerate(chain):
            if isinstance(part, Learnt):
                x = stitching.apply(part.stitch, learnt[place], x)
            else:
                x, _ = part.block.apply(*part.weights, x, train=False)
        picked = jnp.take_along_axis(jax.nn.log_softmax(x), images.y[:, None], axis=1)
        return -picked.mean()

    expected = jax.jit(jax.grad(loss))({place: chain[place].weights for place in places})
    found = gradients(
        workshop, chain, images.x, lambda logits: assembly.cross_entropy_gradient(logits, images.y, None)
    )
    assert all(found[place] is None for place in range(len(chain)) if place not in places)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        {place: found[place] for place in places},
        expected,
    )


@pytest.mark.parametrize("labelled", [True, False])
def test_stitching_layers_learn_and_blocks_keep_their_bits(federation, workshop, labelled):
    members, candidate = candidate_of(federation, (3, 0), (0, 0), (3, 3))
    images, hyper = public_images(federation), PFedClub(server_lr=0.005)

    def stitched(epochs):
        config = PFedClub(server_epochs=epochs, server_batch=PUBLIC, labelled=labelled)
        rng = np.random.default_rng(1)
        return assembly.stitched(candidate, members, SHAPE, CLASSES, images, hyper, config, workshop, rng)

    before, after = stitched(0), stitched(60)
    frozen = [part.weights for part in after if isinstance(part, Frozen)]
    assert_same(frozen, [weights_of(members[block.client], block.index) for block in candidate.blocks])
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Learnt):
            moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), new.weights, old.weights)
            assert min(jax.tree.leaves(moved)) > 0

    def cross_entropy(chain):
        logits = run(workshop, chain, images.x)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), images.y[:, None], axis=1).mean()

    def contrast(chain, key):
        logits = run(workshop, chain, assembly.two_views(key, images))
        own = logits / jnp.linalg.norm(logits, axis=1, keepdims=True)
        alike = own @ own.T / hyper.tau - 1e9 * jnp.eye(2 * PUBLIC)  # nobody is its own partner
        partner = jnp.roll(jnp.arange(2 * PUBLIC), PUBLIC)
        return -jax.nn.log_softmax(alike)[jnp.arange(2 * PUBLIC), partner].mean()

    def loss(chain):
        if labelled:
            return cross_entropy(chain)
        return np.mean([contrast(chain, key) for key in jax.random.split(jax.random.key(0), 8)])

    assert loss(after) < loss(before) - 0.1


# ---- views


def test_views_are_images_and_differ():
    images = jax.random.uniform(jax.random.key(0), (6, 8, 8, 3))
    one, other = (view(jax.random.key(seed), images) for seed in (1, 2))
    assert one.shape == images.shape and one.dtype == images.dtype
    assert one.min() >= 0 and one.max() <= 1
    changed = np.abs(one - other).max((1, 2, 3))
    assert (changed > 0).all() and np.isfinite(changed).all()
    assert_same(one, view(jax.random.key(1), images))


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_two_views_of_an_image_belong_together(channels, workshop):
    """All images but one are black, and black stays black whatever view is taken."""
    values = np.zeros((4, 8, 8, channels), np.float32)
    values[2] = 200
    mean, std, top = (
        jnp.full((1, 1, 1, channels), 10.0),
        jnp.full((1, 1, 1, channels), 50.0),
        jnp.float32(250),
    )
    images = Images((values - mean) / std, jnp.zeros(4, jnp.int32), mean, std, top)
    config = PFedClub(labelled=False, server_batch=4, server_epochs=2)
    batches = list(assembly.mini_batches(images, config, workshop, np.random.default_rng(0)))
    assert len(batches) == 2
    for views, pairs in batches:
        bright = np.flatnonzero((views * std + mean).max((1, 2, 3)) > 1)
        assert views.shape == (8, 8, 8, channels) and len(bright) == 2
        assert pairs[bright[0]] == pairs[bright[1]] and sorted(pairs.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert (views * std + mean).min() > -1e-3 and (views * std + mean).max() < 250.01


# ---- a server step


@pytest.fixture(scope="module")
def taught(federation, workshop):
    return teach(federation, workshop, PFedClub(server_epochs=1))


def test_a_step_keeps_the_form_of_the_state_and_who_is_absent(taught):
    form = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (taught.before, taught.after))
    assert form[0] == form[1]
    assert_same(taught.after.weights, taught.before.weights)
    assert_same(taught.after.hyper, taught.before.hyper)
    for g, (present, absent) in enumerate(zip(SOME, ABSENT, strict=True)):
        lessons, has, sizes = (
            leaf[g] for leaf in (taught.after.lessons, taught.after.taught, taught.after.sizes)
        )
        assert np.isfinite(lessons).all()
        assert all(lessons[i].any() and has[i] and sizes[i] > 0 for i in present)
        assert not any(lessons[i].any() or has[i] or sizes[i] for i in absent)


def test_the_key_decides_and_the_places_of_clients_do_not(federation, workshop, taught):
    config = PFedClub(server_epochs=1)
    assert_same(teach(federation, workshop, config).after, taught.after)
    reordered = teach(federation, workshop, config, present=((0, 2), (1,)))
    assert_same(reordered.after, taught.after)
    assert reordered.findings["assembled"] == taught.findings["assembled"]
    other = teach(federation, workshop, config, seed=1)
    assert any(
        not np.array_equal(a, b) for a, b in zip(other.after.lessons, taught.after.lessons, strict=True)
    )


class Recording(Workshop):
    """A workshop that remembers which parts it was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = set()

    def forward(self, part, x):
        """As there."""
        self.asked.add(("forward", part[0], x.shape))
        return super().forward(part, x)

    def backward(self, part, x, dy):
        """As there."""
        self.asked.add(("backward", part[0], x.shape))
        return super().backward(part, x, dy)


def test_programs_belong_to_parts_and_not_to_assemblies(federation):
    recording, assemblies = Recording(), set()
    config = PFedClub(server_epochs=1, candidates=2, groups=2)
    for seed in range(3):
        findings = teach(federation, recording, config, seed).findings
        assemblies |= {
            tuple((block["client"], block["index"]) for block in of_client["blocks"])
            for of_client in findings["assembled"]
        }
    assert len(assemblies) > 5
    layers = {kind.shape for _, kind, _ in recording.asked if isinstance(kind, Stitch)}
    others = 2  # looking at the networks, and the loss
    assert recording.compilations <= len(recording.asked) + len(layers) + others
    before = recording.compilations
    for seed in range(3):
        teach(federation, recording, config, seed)
    assert recording.compilations == before


def test_teachers_of_the_plus_variant_never_exceed_their_bound(federation, workshop):
    exceeded = {}
    for config in (PFedClub, PFedClubPlus):
        options = config(server_epochs=0, candidates=3, groups=2)
        exceeded[config] = []
        for seed, present in itertools.product(range(4), (((0, 1, 2), (0, 1)), SOME)):
            done = teach(federation, workshop, options, seed, present)
            for of_client in done.findings["assembled"]:
                g, place = divmod(of_client["client"], 3)
                own, teacher = federation.models[g].size, int(done.after.sizes[g][place])
                # These networks have no statistics, so that their parameters are all that is sent.
                assert (of_client["model"], of_client["teacher"]) == (own, teacher)
                exceeded[config].append(teacher > 1.1 * own)
    assert any(exceeded[PFedClub]) and not any(exceeded[PFedClubPlus])


@pytest.mark.parametrize(
    "ablation", [{"anchor": "max"}, {"anchor": "min"}, {"order": False}, {"completion": False}]
)
def test_ablations_give_teachers_too(federation, workshop, ablation):
    done = teach(federation, workshop, PFedClub(server_epochs=1, groups=2, **ablation))
    lengths = [(len(one["blocks"]), len(one["own"])) for one in done.findings["assembled"]]
    assert all(got <= own for got, own in lengths)
    assert "completion" in ablation or all(got == own for got, own in lengths)
    for lessons, present in zip(done.after.lessons, SOME, strict=True):
        assert lessons[np.array(present)].any((1, 2)).all() and np.isfinite(lessons).all()


def test_unlabelled_images_and_medoids_do_as_well(federation, workshop):
    unlabelled = dataclasses.replace(federation, labelled=False)
    with pytest.raises(JaxflError, match="add labelled=false"):
        teach(unlabelled, workshop, PFedClub())
    done = teach(unlabelled, workshop, PFedClub(labelled=False, grouping="kmedoids", server_epochs=1))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(done.after.lessons))


# ---- the identity teacher


@pytest.fixture(scope="module")
def alone():
    """Clients of one architecture, one of whom is present; every block is a group of its own."""
    source = tiny_source()
    model = zoo.mcmahan(shape=SHAPE, classes=CLASSES, width=0.06, padding="same")
    return federate(source, tiny_partition(source, (5, 6)), [(model, 2)])


def test_one_client_alone_is_its_own_teacher(alone, workshop):
    done = teach(alone, workshop, PFedClub(candidates=1, groups=9), present=((1,),))
    (group,), (found,) = alone.groups, done.findings["assembled"]
    weights = jax.tree.map(lambda leaf: leaf[1], done.after.weights[0])
    x = alone.inputs(group.rows[1])
    logits, _ = group.model.apply(*weights, x, train=False)
    lessons = done.after.lessons[0][1]
    np.testing.assert_allclose(lessons, logits, rtol=1e-5, atol=1e-6)
    assert [(block["client"], block["index"]) for block in found["blocks"]] == [(1, r) for r in range(4)]
    assert found["phi"] == 0
    np.testing.assert_allclose(found["alpha"], [1], rtol=1e-5)
    assert done.after.sizes[0][1] == group.model.size

    # At the start it has nothing to teach.
    rows = jnp.arange(len(x), dtype=jnp.int32)
    batch = Batch(x, alone.labels[group.rows[1]], jnp.ones(len(rows), bool), rows)

    @jax.jit
    def gradient(lessons, lam):
        loss = from_teacher(group.model, lessons, lam)
        return jax.grad(lambda params: loss(weights._replace(params=params), batch, None)[0])(weights.params)

    without, own, other = (
        gradient(lessons, 0.0),
        gradient(lessons, 5.0),
        gradient(lessons.at[:, 0].add(1), 5.0),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), own, without)
    assert np.abs(other["classifier"]["kernel"] - without["classifier"]["kernel"]).max() > 1e-3
