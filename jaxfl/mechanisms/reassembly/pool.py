"""References to blocks that are taken apart and put together, and the pool of a round."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class BlockRef(NamedTuple):
    """Block B_{m,r}: its origin and its properties, without its weights."""

    client: int  # m, the client whose model it is part of
    index: int  # r, its place in that model, from 0
    kind: str  # "conv" or "fc"
    group: int  # k, the functionality group G_k that it belongs to
    parameters: int  # number of its parameters
    input_shape: tuple[int, ...]  # of one example, (h, w, c) or (d,)
    output_shape: tuple[int, ...]  # of one example


class Pool(NamedTuple):
    """All blocks that may be put together in a round."""

    blocks: tuple[BlockRef, ...]  # B of them, in any order
    similarity: np.ndarray  # (B, B), similarity of two blocks, in the order of `blocks`; see `signatures`

    def own(self, client: int) -> tuple[BlockRef, ...]:
        """Return the blocks of a client's model, from first to last."""
        return tuple(sorted((b for b in self.blocks if b.client == client), key=lambda b: b.index))


def describe(blocks: Sequence[BlockRef]) -> list[dict]:
    """Return blocks in their order, for JSON."""
    return [block._asdict() for block in blocks]
