"""Activations before and after blocks on the public images, and the similarity of blocks (pFedClub, eq. 1).

A block is described by the activations before and after it. Two blocks are compared by linear CKA (Kornblith
et al. 2019, arXiv:1905.00414): with K = H X X^T H, H centring over the n images,

    CKA(X, Y) = <K_x, K_y> / (||K_x|| ||K_y||)         Frobenius; 0 where a norm is 0
    sim(a, b) = CKA(X_a, X_b) + CKA(Y_a, Y_b)          X before the block, Y after it

CKA ignores rotation and scale of the features, so blocks of different widths can be compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Signatures(NamedTuple):
    """The activations of all models of a round, and those before and after each block.

    Neighbouring blocks share an activation: a model of R blocks has R + 1. All are float32: 4 n (n + d) bytes
    per activation. With n = 1,000 its Gram matrix takes 4 megabytes, whatever d.
    """

    features: tuple[np.ndarray, ...]  # A arrays (n, d) centred over the images; d differs
    grams: np.ndarray  # (A, n, n), see `gram`
    before: np.ndarray  # (B,) int, the activation that each block takes
    after: np.ndarray  # (B,) int, the activation that it gives


def signatures(models: Sequence[Sequence[np.ndarray]]) -> Signatures:
    """Return the signatures of all blocks, model by model and within a model from first to last.

    Args:
      models: for each, the R + 1 activations on the same n public images in evaluation mode: the images
        themselves and the output of every block. They are maps (n, h, w, c), or their means over space
        (n, c), or vectors (n, d).
    """
    numbers = np.split(np.arange(sum(map(len, models))), np.cumsum([len(model) for model in models])[:-1])
    pooled = tuple(features(activation) for model in models for activation in model)
    images = len(pooled[0])
    grams = np.empty((len(pooled), images, images), np.float32)  # filled in place: by far the largest part
    for i, x in enumerate(pooled):
        grams[i] = gram(x)
    return Signatures(
        pooled,
        grams,
        np.concatenate([own[:-1] for own in numbers]),
        np.concatenate([own[1:] for own in numbers]),
    )


def features(activation: np.ndarray) -> np.ndarray:
    """Average maps over space and centre over images: (n, h, w, c) or (n, d) -> (n, c) or (n, d) float32.

    An activation that is not finite, from a model that diverged, becomes 0: it is similar to nothing.
    """
    x = np.asarray(activation, np.float32)
    if not np.isfinite(x).all():
        return np.zeros((x.shape[0], x.shape[-1]), np.float32)
    # In double precision the mean of equal numbers is that number: a dead feature becomes exactly 0.
    x = x.mean(axis=tuple(range(1, x.ndim - 1)), dtype=float)
    return (x - x.mean(axis=0)).astype(np.float32)


def gram(features: np.ndarray) -> np.ndarray:
    """Return the centred Gram matrix over its Frobenius norm, or 0 if that is 0: (n, d) centred -> (n, n)."""
    x = _over_norm(features)  # first, so that no square of a square overflows
    return _over_norm(x @ x.T)


def cka(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return linear CKA of all pairs: (a, n, n), (b, n, n), each from `gram`, -> (a, b) in [0, 1]."""
    return x.reshape(len(x), -1) @ y.reshape(len(y), -1).T


def similarity(signatures: Signatures) -> np.ndarray:
    """Return eq. 1 for all pairs of blocks: (B, B) in [0, 2]."""
    alike = cka(signatures.grams, signatures.grams)
    before, after = (alike[np.ix_(side, side)] for side in (signatures.before, signatures.after))
    return before + after


def _over_norm(x):
    norm = np.linalg.norm(x)
    return x / norm if norm > 0 else np.zeros_like(x)
