"""Re-assembly without networks, against explicit formulas: signatures, groups, candidates, teachers."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from jaxfl.algorithms.reassembly.cmsr import (
    bounded,
    cmsr,
    continuations,
    describe,
    generate,
    identity,
    search,
)
from jaxfl.algorithms.reassembly.pfedhr import candidate, candidates, draw
from jaxfl.mechanisms.reassembly.grouping import ITERATIONS, kmeans, kmedoids
from jaxfl.mechanisms.reassembly.matching import match
from jaxfl.mechanisms.reassembly.networks import BlockRef, Pool
from jaxfl.mechanisms.reassembly.signatures import cka, features, gram, signatures, similarity

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=100, deadline=None)


def linear_cka(x, y):
    """Return CKA, with the centring matrix written out."""
    h = np.eye(len(x)) - 1 / len(x)
    k_x, k_y = (h @ z @ z.T @ h for z in (np.asarray(x, float), np.asarray(y, float)))
    return (k_x * k_y).sum() / (np.linalg.norm(k_x) * np.linalg.norm(k_y))


def models_of(rng, widths=((3, 5, 7, 4), (3, 6, 4), (3, 8, 2, 4)), images=20):
    """Return activations of models with blocks of different widths; the first two of a model are maps."""
    return [
        [
            rng.normal(1, 1, (images, 4 // 2**i, 4 // 2**i, d) if i < 2 else (images, d)).astype(np.float32)
            for i, d in enumerate(own)
        ]
        for own in widths
    ]


def block(client, index, group):
    return BlockRef(client, index, "conv", group, 10 * client + index, (4, 4, 3), (2, 2, 3))


def random_pool(seed, clients=4, depth=5, groups=3):
    """Return a pool of small models whose blocks are in random groups, in random order."""
    rng = np.random.default_rng(seed)
    blocks = [
        block(client, index, int(rng.integers(groups)))
        for client in range(clients)
        for index in range(rng.integers(1, depth + 1))
    ]
    half = rng.uniform(0, 1, (len(blocks), len(blocks)))
    return Pool(tuple(blocks[i] for i in rng.permutation(len(blocks))), half + half.T)


def all_tuples(own, anchor, pool, ordered):
    """Return all tuples of Algorithm 1, lines 1-20, by enumeration, and their length."""
    choices, q = [[anchor]], anchor.index
    for r in range(1, len(own)):
        group = [u for u in pool.blocks if u.group == own[r].group]
        allowed = [u for u in group if u.index > q] if ordered else group
        if allowed == []:
            break
        choices.append(allowed)
        q = min(u.index for u in allowed)
    tuples = itertools.product(*choices)
    if ordered:
        tuples = (t for t in tuples if all(a.index < b.index for a, b in itertools.pairwise(t)))
    return set(tuples), len(choices)


# --- signatures


def test_cka_matches_its_formula_and_ignores_rotation_scale_and_shift():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 6)), rng.normal(size=(30, 9))
    y[:, :3] += 2 * x[:, :3]
    rotation = np.linalg.qr(rng.normal(size=(9, 9)))[0]

    def fast(a, b):
        return cka(gram(features(a))[None], gram(features(b))[None])[0, 0]

    assert 0.2 < linear_cka(x, y) < 0.9
    for other in (y, y @ rotation, 1e-3 * y, 1e6 * y, y + np.arange(9), np.pad(y, ((0, 0), (0, 4)))):
        np.testing.assert_allclose(fast(x, other), linear_cka(x, y), rtol=1e-5)
    np.testing.assert_allclose(fast(x, x), 1, rtol=1e-5)
    assert abs(fast(x, y * np.arange(9)) - linear_cka(x, y)) > 0.01  # another linear map changes it


def test_similarity_is_eq_1_on_maps_averaged_over_space():
    models = models_of(np.random.default_rng(1))
    blocks = [pair for model in models for pair in itertools.pairwise(model)]
    pooled = [[x.mean((1, 2)) if x.ndim == 4 else x for x in pair] for pair in blocks]
    expected = [[linear_cka(a[0], b[0]) + linear_cka(a[1], b[1]) for b in pooled] for a in pooled]
    np.testing.assert_allclose(similarity(signatures(models)), expected, atol=1e-5)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, 0.1])
def test_constant_or_infinite_activations_are_similar_to_nothing(spoilt):
    (model, *_) = models_of(np.random.default_rng(2))
    broken = [*model[:2], np.full_like(model[2], spoilt), model[3]]
    alike = similarity(signatures([model, broken]))
    np.testing.assert_allclose(alike[0, 3], 2, rtol=1e-5)
    np.testing.assert_allclose(alike[1, 4], 1, rtol=1e-5)  # from their inputs alone
    np.testing.assert_allclose(alike[4, 4], 1, rtol=1e-5)  # even its own output is not similar to itself


# --- grouping


def planted(rng, groups=4, copies=6, images=40):
    """Return signatures and groups of blocks: noisy linear maps of a few features of each group."""
    latent = rng.normal(size=(groups, 2, images, 3))
    truth = rng.permutation(np.repeat(np.arange(groups), copies))

    def seen(z):
        d = rng.integers(4, 9)
        return z @ np.linalg.qr(rng.normal(size=(d, 3)))[0].T + rng.normal(0, 0.05, (images, d))

    return signatures([[seen(z) for z in latent[k]] for k in truth]), truth


def same_groups(a, b):
    return np.array_equal(np.equal.outer(a, a), np.equal.outer(b, b))


@pytest.mark.parametrize("seed", range(5))
def test_groupings_recover_planted_groups(seed):
    rng = np.random.default_rng(seed)
    found, truth = planted(rng)
    assert same_groups(kmedoids(similarity(found), 4), truth)
    # Lloyd's iterations find them if the initial centres are of different groups, which is up to chance.
    starts = [rng.choice(24, 4, replace=False) for rng in map(np.random.default_rng, range(100))]
    lucky = [s for s, start in enumerate(starts) if len(set(truth[start])) == 4]
    assert len(lucky) >= 5
    for s in lucky:
        assert same_groups(kmeans(found, 4, np.random.default_rng(s)), truth)


def test_kmedoids_nearly_always_finds_the_best_medoids():
    hits = 0
    for seed in range(20):  # without exchanges, the greedy choice is best for seven of these
        points = np.random.default_rng(seed).normal(size=(12, 2))
        distance = np.linalg.norm(points[:, None] - points, axis=-1)
        alike = 2 - distance / distance.max()
        best = max(itertools.combinations(range(12), 2), key=lambda pair: alike[:, pair].max(1).sum())
        hits += same_groups(kmedoids(alike, 2), alike[:, best].argmax(1))
    assert hits >= 17


@pytest.mark.parametrize("seed", range(20))
def test_kmeans_is_lloyd_on_padded_pairs(seed):
    """K-means follows the authors' recipe: pairs padded with ones, 1 / sim as distance, ten iterations."""
    models = models_of(np.random.default_rng(seed), widths=((3, 5, 7, 4), (3, 6, 4), (3, 8, 2, 4), (3, 4, 9)))
    points = []
    for model in models:
        pooled = [x.mean((1, 2)) if x.ndim == 4 else x for x in model]
        padded = [np.pad(x, ((0, 0), (0, 9 - x.shape[1])), constant_values=1) for x in pooled]
        points += [np.stack(pair) for pair in itertools.pairwise(padded)]
    centres = [points[i] for i in np.random.default_rng(seed).choice(len(points), 3, replace=False)]
    for _ in range(ITERATIONS):
        clusters = [[] for _ in centres]
        for i, point in enumerate(points):
            distance = [1 / (linear_cka(point[0], c[0]) + linear_cka(point[1], c[1])) for c in centres]
            clusters[np.argmin(distance)].append(i)
        clusters = [cluster for cluster in clusters if cluster]
        centres = [np.mean([points[i] for i in cluster], axis=0) for cluster in clusters]
    labels = kmeans(signatures(models), 3, np.random.default_rng(seed))
    assert [np.flatnonzero(labels == k).tolist() for k in range(labels.max() + 1)] == clusters


def test_there_are_no_more_groups_than_different_blocks():
    (model, *_) = models_of(np.random.default_rng(0))
    found = signatures([model, model])
    for labels in (kmeans(found, 9, np.random.default_rng(0)), kmedoids(similarity(found), 9)):
        np.testing.assert_array_equal(labels, [*labels[:3], *labels[:3]])
        assert set(labels) == {0, 1, 2}


# --- CMSR

# The example of the paper's Figure 2 by its text, with clients and blocks counted from 1. The anchor 4.2
# replaces 1.1; after index 2 the group of 1.2 has 2.3 and 3.3; after 3 the group of 1.3 has a block 4 and a
# block 5; after 4 the group of 1.4 has none, so 1.4 completes. Which client has which other block is
# our choice, and that these two are 3.4 and 4.5.
FIGURE_2 = {1: "1.1 2.1 3.1 4.1 4.2", 2: "1.2 2.3 3.2 3.3", 3: "1.3 3.4 4.3 4.5", 4: "1.4 2.2 4.4"}


def figure_2():
    blocks = [
        block(*map(int, name.split(".")), group)
        for group, names in FIGURE_2.items()
        for name in names.split()
    ]
    return Pool(tuple(blocks), np.ones((len(blocks), len(blocks))))


def names(blocks):
    return " ".join(f"{block.client}.{block.index}" for block in blocks)


def test_cmsr_finds_the_candidates_of_figure_2():
    pool = figure_2()
    own = pool.own(1)
    anchor = next(b for b in pool.blocks if names([b]) == "4.2")
    choices = search(own, anchor, pool, ordered=True)
    assert [names(found) for found in choices] == ["4.2", "2.3 3.3", "3.4 4.5"]
    drawn = [cmsr(1, pool, np.random.default_rng(seed)) for seed in range(500)]
    from_figure = [found for found in drawn if found[0].blocks[0] == anchor]
    for found in from_figure:
        assert {names(c.blocks) for c in found} == {
            f"4.2 {second} {third} 1.4" for second in ("2.3", "3.3") for third in ("3.4", "4.5")
        }
        assert all(c.substituted == 3 for c in found)
    anchors = [names(found[0].blocks[:1]) for found in drawn]
    assert chisquare([anchors.count(name) for name in FIGURE_2[1].split()]).pvalue > 0.01


@given(seed=seeds, ordered=st.booleans(), complete=st.booleans(), most=st.integers(1, 5))
@quick
def test_candidates_of_cmsr_keep_its_rules(seed, ordered, complete, most):
    pool = random_pool(seed)
    rng = np.random.default_rng(seed)
    for client in range(4):
        own = pool.own(client)
        found = cmsr(client, pool, rng, ordered=ordered, complete=complete, most=most)
        tuples, length = all_tuples(own, found[0].blocks[0], pool, ordered)
        assert {c.blocks[:length] for c in found} <= tuples
        assert {c.substituted for c in found} == {length}
        assert all(c.blocks[length:] == (own[length:] if complete else ()) for c in found)
        others = {t for t in tuples if t != own}
        assert len({c.blocks for c in found}) == len(found) == (min(most, len(others)) or 1)
        assert all((c.blocks == own) == (not others) for c in found)
        assert sum(continuations(search(own, found[0].blocks[0], pool, ordered), ordered)[0]) == len(tuples)


@given(seed=seeds)
@quick
def test_ablations_choose_the_most_similar_or_a_first_block_as_anchor(seed):
    pool = random_pool(seed)
    rng = np.random.default_rng(seed)
    first = pool.own(0)[0]
    group = [b for b in pool.blocks if b.group == first.group]
    most_similar = cmsr(0, pool, rng, anchor="max")[0]
    if len(group) == 1:
        assert most_similar.blocks[0] == first
    else:
        row = pool.similarity[pool.blocks.index(first)]
        others = [s for s, b in zip(row, pool.blocks, strict=True) if b in group and b != first]
        assert most_similar.blocks[0] != first and most_similar.similarity[0] == max(others)
    smallest = {b for b in group if b.index == 0}
    drawn = {cmsr(0, pool, rng, anchor="min")[0].blocks[0] for _ in range(60)}
    assert drawn == smallest


def test_every_tuple_is_equally_likely():
    # Taking one of two equally at each place would give the last tuple half of all draws.
    anchor, one, three, two, four = (block(1, index, 0) for index in (0, 1, 3, 2, 4))
    own = tuple(block(0, index, 0) for index in range(3))
    rng = np.random.default_rng(0)

    def draws(most):
        return [
            frozenset(names(t) for t in generate([[anchor], [one, three], [two, four]], own, rng, True, most))
            for _ in range(3000)
        ]

    tuples = ["1.0 1.1 1.2", "1.0 1.1 1.4", "1.0 1.3 1.4"]
    for most in (1, 2):
        drawn = draws(most)
        counts = [drawn.count(frozenset(kept)) for kept in itertools.combinations(tuples, most)]
        assert sum(counts) == 3000 and chisquare(counts).pvalue > 0.01
    assert set(draws(4)) == {frozenset(tuples)}


def test_candidates_are_drawn_from_products_too_large_to_enumerate():
    blocks = tuple(block(client, index, index) for client in range(20) for index in range(15))
    pool = Pool(blocks, np.ones((300, 300)))
    choices = search(pool.own(3), blocks[15], pool, ordered=True)
    assert sum(continuations(choices, ordered=True)[0]) == 20**14
    for seed in range(5):
        assert len(cmsr(3, pool, np.random.default_rng(seed), most=50)) == 50


@given(seed=seeds, eta=st.floats(-0.99, 0.5))
@quick
def test_no_candidate_exceeds_the_bound(seed, eta):
    pool = random_pool(seed)
    rng = np.random.default_rng(seed)

    def size(candidate):
        return 3 + sum(b.parameters for b in candidate.blocks)

    own = identity(2, pool)
    bound = (1 + eta) * sum(b.parameters for b in own.blocks)
    found = bounded(lambda: cmsr(2, pool, rng), size, bound, own)
    assert found == [own] or all(size(c) <= bound for c in found)


def test_a_search_under_a_bound_is_repeated_and_then_falls_back():
    pool = random_pool(0)
    small, large = identity(0, pool), identity(3, pool)
    runs = []

    def run(found):
        runs.append(found)
        return [large, small] if len(runs) == found else [large]

    def size(candidate):
        return 1 if candidate == small else 2

    assert bounded(lambda: run(3), size, 1.5, large) == [small] and len(runs) == 3
    runs.clear()
    assert bounded(lambda: run(11), size, 1.5, large) == [small] and len(runs) == 11
    runs.clear()
    assert bounded(lambda: run(12), size, 1.5, large) == [large] and len(runs) == 11


def test_the_description_of_a_candidate_is_complete():
    pool = random_pool(3)
    for found in (cmsr(1, pool, np.random.default_rng(0))[0], identity(1, pool)):
        blocks = json.loads(json.dumps(describe(found)))
        rebuilt = [
            BlockRef(*(tuple(v) if isinstance(v, list) else v for v in (entry[f] for f in BlockRef._fields)))
            for entry in blocks
        ]
        assert tuple(rebuilt) == found.blocks
        assert sum(entry["substituted"] for entry in blocks) == found.substituted
        place = pool.blocks.index
        pairs = zip(pool.own(1), found.blocks, strict=True)
        assert [entry["similarity"] for entry in blocks] == [
            pool.similarity[place(own), place(other)] for own, other in pairs
        ]


# --- candidates of pFedHR


def two_kinds(pool, rng):
    """Return the pool with some of its blocks made dense."""
    blocks = tuple(b._replace(kind=str(rng.choice(["conv", "fc"]))) for b in pool.blocks)
    return pool._replace(blocks=blocks)


@given(seed=seeds, length=st.integers(1, 8), groups=st.integers(1, 4))
@quick
def test_a_candidate_of_pfedhr_keeps_its_rules(seed, length, groups):
    rng = np.random.default_rng(seed)
    pool = two_kinds(random_pool(seed, groups=groups), rng)
    kinds, found = {b.kind for b in pool.blocks}, {b.group for b in pool.blocks}
    blocks = candidate(pool, rng, length)
    assert set(blocks) <= set(pool.blocks) and len(set(blocks)) == len(blocks)
    assert {b.group for b in blocks} == found and {b.kind for b in blocks} == kinds
    assert len(blocks) == min(max(length, len(found), len(kinds)), len(pool.blocks))
    conv = [b.index for b in blocks if b.kind == "conv"]
    dense = [b.index for b in blocks if b.kind == "fc"]
    assert [b.kind for b in blocks] == ["conv"] * len(conv) + ["fc"] * len(dense)
    assert conv == sorted(conv) and dense == sorted(dense)


def test_candidates_of_pfedhr_have_the_lengths_in_turn():
    pool = two_kinds(random_pool(0, depth=9), np.random.default_rng(0))
    found = candidates(pool, np.random.default_rng(0), range(4, 7), 8)
    assert [len(blocks) for blocks in found] == [4, 5, 6, 4, 5, 6, 4, 5]


def test_pfedhr_draws_evenly_within_groups_and_among_the_rest():
    blocks = tuple(block(client, index, index % 2) for client in range(2) for index in range(3))
    pool, rng = Pool(blocks, np.ones((6, 6))), np.random.default_rng(0)
    drawn = [draw(pool, rng, 3) for _ in range(3000)]
    assert [{b.group for b in found[:2]} for found in drawn] == [{0, 1}] * 3000
    for group, members in ((0, 4), (1, 2)):
        first = [found[group] for found in drawn]
        counts = [first.count(b) for b in blocks if b.group == group]
        assert len(counts) == members and chisquare(counts).pvalue > 0.01
    # Of the four that are left, three are of the group of four.
    assert chisquare([sum(found[2].group == k for found in drawn) for k in (0, 1)], [2250, 750]).pvalue > 0.01


# --- matching


def test_the_teacher_has_the_largest_mean_cosine():
    own = np.array([[1.0, 0], [0, 2]])
    half = np.array([[1.0, 1], [3, 3]])
    opposite, nothing, diverged = -own, 0 * own, np.full_like(own, np.nan)
    best, alpha = match(own, [opposite, half, nothing, diverged, 5 * half, np.ones((2, 2)) * [1, 0]])
    np.testing.assert_allclose(alpha, [-1, 0.5**0.5, 0, -1, 0.5**0.5, 0.5], rtol=1e-12)
    assert alpha[best] == alpha.max() and match(own, [nothing, own, own])[0] == 1
