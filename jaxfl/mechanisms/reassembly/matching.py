"""The choice of the teacher among the candidates (pFedClub, section 3.2.3)."""

from collections.abc import Sequence

import numpy as np


def mean_cosine(own: np.ndarray, other: np.ndarray) -> float:
    """Return eq. 4: the mean over the public images of the cosine between logits (n, C) and (n, C).

    Logits of length 0 have cosine 0. If some are not finite, the mean is -1, the least possible.
    """
    own, other = np.asarray(own, float), np.asarray(other, float)
    if not (np.isfinite(own).all() and np.isfinite(other).all()):
        return -1.0
    length = np.linalg.norm(own, axis=1) * np.linalg.norm(other, axis=1)
    return float(((own * other).sum(axis=1) / np.where(length > 0, length, 1)).mean())


def match(own: np.ndarray, candidates: Sequence[np.ndarray]) -> tuple[int, np.ndarray]:
    """Choose a client's teacher: the candidate whose logits are most similar to those of its model.

    Logits (n, C) are those on the public images, of candidates after stitching.

    Returns:
      The candidate's number, the first of equals, and alpha (S,), the similarities of all S candidates.
    """
    alpha = np.array([mean_cosine(own, logits) for logits in candidates])
    return int(alpha.argmax()), alpha
