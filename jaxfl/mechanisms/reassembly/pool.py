"""References to blocks that are taken apart and put together, and the pool of a round."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class BlockRef(NamedTuple):
    """Block B_{m,r}: its origin and its properties, without its weights.

    Args:
      client: m, the client whose model it is part of.
      index: r, its place in that model, from 0.
      kind: "conv" or "fc".
      group: k, the functionality group G_k that it belongs to.
      parameters: number of its parameters.
      input_shape: of one example, (h, w, c) or (d,).
      output_shape: of one example.
    """

    client: int
    index: int
    kind: str
    group: int
    parameters: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]


class Pool(NamedTuple):
    """All blocks that may be put together in a round.

    Args:
      blocks: B of them, in any order.
      similarity: (B, B), similarity of two blocks, in the order of `blocks`; see `signatures`.
    """

    blocks: tuple[BlockRef, ...]
    similarity: np.ndarray

    def own(self, client: int) -> tuple[BlockRef, ...]:
        """Return the blocks of a client's model, from first to last."""
        return tuple(sorted((b for b in self.blocks if b.client == client), key=lambda b: b.index))


def describe(blocks: Sequence[BlockRef]) -> list[dict]:
    """Return blocks in their order, for JSON."""
    return [block._asdict() for block in blocks]
