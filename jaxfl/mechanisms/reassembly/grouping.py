"""Functionality groups: blocks that do something similar (pFedClub, section 3.2.1).

Both functions return labels (B,) int, 0 to K - 1, one per block; K may be smaller than asked for.
"""

import numpy as np

from jaxfl.mechanisms.reassembly.signatures import Signatures, cka, gram

ITERATIONS = 10


def kmeans(signatures: Signatures, groups: int, rng: np.random.Generator) -> np.ndarray:
    """Group blocks by Lloyd's iterations under eq. 1, as in the authors' code.

    A block's point is the pair of its activations. A group's centre is the element-wise mean of its members'
    pairs, narrower ones padded with a constant. The distance is 1 / sim (infinite where sim is 0). Centres
    start at random blocks; a group that loses all its blocks is dropped. CKA centres its arguments, which
    turns a constant into zeros, so features that are centred already are padded with zeros.
    """
    blocks = len(signatures.before)
    members = rng.choice(blocks, min(groups, blocks), replace=False)[:, None]
    labels = np.full(blocks, -1)
    for _ in range(ITERATIONS):
        before, after = (  # the many first: a product of few long rows with many takes five times as long
            cka(signatures.grams, _centres(signatures, side, members))[side]
            for side in (signatures.before, signatures.after)
        )
        nearest = np.unique((before + after).argmax(axis=1), return_inverse=True)[1]
        if np.array_equal(nearest, labels):
            break  # converged
        labels = nearest
        members = [np.flatnonzero(labels == k) for k in range(labels.max() + 1)]
    return labels


def kmedoids(similarity: np.ndarray, groups: int) -> np.ndarray:
    """Group blocks around K medoids, to which all blocks together are as similar (B, B) as possible.

    Kaufman and Rousseeuw 1990, "Finding Groups in Data", chapter 2: medoids are added greedily (BUILD), then
    the best exchange of one of them is made until none helps (SWAP). Nothing is random, and unlike K-means it
    takes no means of features whose coordinates are unrelated.
    """
    blocks = range(len(similarity))

    def served(medoids):
        return similarity[:, medoids].max(axis=1).sum(dtype=float)

    medoids = []
    for _ in range(min(groups, len(blocks))):
        medoids = max(([*medoids, b] for b in blocks if b not in medoids), key=served)
    while True:
        exchanges = (
            [*medoids[:k], b, *medoids[k + 1 :]]
            for k in range(len(medoids))
            for b in blocks
            if b not in medoids
        )
        best = max(exchanges, key=served, default=medoids)
        if served(best) <= served(medoids):
            return np.unique(similarity[:, medoids].argmax(axis=1), return_inverse=True)[1]
        medoids = best


def _centres(signatures, side, members):
    """Return Gram matrices (K, n, n) of the groups' mean activations before or after their blocks."""
    return np.stack([gram(_mean([signatures.features[a] for a in side[own]])) for own in members])


def _mean(features):
    """Return the element-wise mean of arrays (n, d) of different d, padded with zeros: (n, max d)."""
    total = np.zeros((len(features[0]), max(x.shape[1] for x in features)), features[0].dtype)
    for x in features:
        total[:, : x.shape[1]] += x
    return total / len(features)
