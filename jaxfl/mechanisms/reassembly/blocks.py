"""What is taken apart and put together: references to blocks, and the pool of a round."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class BlockRef(NamedTuple):
    """Block B_{m,r}: where it comes from and what is known of it, without its weights.

    Args:
      client: m, the client whose model it is part of.
      index: r, its place in that model, from 0.
      kind: "conv" or "fc".
      group: k, the functionality group G_k that it belongs to.
      parameters: how many it has.
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
      similarity: (B, B), how alike two blocks are, in the order of `blocks`; see `signatures`.
    """

    blocks: tuple[BlockRef, ...]
    similarity: np.ndarray

    def own(self, client: int) -> tuple[BlockRef, ...]:
        """The blocks of a client's model, from first to last."""
        return tuple(sorted((b for b in self.blocks if b.client == client), key=lambda b: b.index))


def describe(blocks: Sequence[BlockRef]) -> list[dict]:
    """Blocks in their order, for JSON."""
    return [block._asdict() for block in blocks]
