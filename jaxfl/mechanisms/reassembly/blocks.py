"""What pFedClub takes apart and puts together: references to blocks, the pool of a round, candidates."""

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
      similarity: (B, B), eq. 1, in the order of `blocks`.
    """

    blocks: tuple[BlockRef, ...]
    similarity: np.ndarray

    def own(self, client: int) -> tuple[BlockRef, ...]:
        """The blocks of a client's model, from first to last."""
        return tuple(sorted((b for b in self.blocks if b.client == client), key=lambda b: b.index))


class Candidate(NamedTuple):
    """A personalised model c_{m,s} before stitching.

    Args:
      blocks: in the order in which they are applied.
      substituted: how many of them, from the first on, were searched for; the rest completes the model.
      similarity: of each block to the client's own in whose place it stands, eq. 1.
    """

    blocks: tuple[BlockRef, ...]
    substituted: int
    similarity: tuple[float, ...]


def assemble(blocks: tuple[BlockRef, ...], substituted: int, client: int, pool: Pool) -> Candidate:
    """A candidate for a client; `blocks` may be fewer than the client's own."""
    place = {block: i for i, block in enumerate(pool.blocks)}
    pairs = zip(pool.own(client), blocks, strict=False)
    similarity = tuple(float(pool.similarity[place[own], place[block]]) for own, block in pairs)
    return Candidate(blocks, substituted, similarity)


def identity(client: int, pool: Pool) -> Candidate:
    """The client's own model as a candidate: nothing is substituted."""
    return assemble(pool.own(client), 0, client, pool)


def describe(candidate: Candidate) -> list[dict]:
    """What was assembled, block by block, for JSON."""
    return [
        {
            "client": block.client,
            "index": block.index,
            "kind": block.kind,
            "group": block.group,
            "parameters": block.parameters,
            "input_shape": list(block.input_shape),
            "output_shape": list(block.output_shape),
            "substituted": place < candidate.substituted,
            "similarity": similarity,
        }
        for place, (block, similarity) in enumerate(zip(candidate.blocks, candidate.similarity, strict=True))
    ]
