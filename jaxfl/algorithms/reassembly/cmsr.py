"""CMSR, controllable model searching and reproduction (pFedClub, section 3.2.2 and Algorithm 1).

For client m with blocks B_{m,1}..B_{m,R}:

1. anchor      the first block is some block B_{p,q} of the group of B_{m,1}
2. search      C[r] = the blocks of B_{m,r}'s group whose index in their own model exceeds q, then q <- the
               smallest such index; the search ends at the first r for which there is none
   generate    one block of each C[r], with strictly increasing indices (the order condition)
3. complete    the client's own blocks from that r on

The paper keeps all candidates. Their number grows exponentially with R, so here at most `most` are kept,
drawn uniformly without replacement. The candidate in which no block is substituted is dropped, unless it is
the only one.

The authors' published code holds no CMSR, so this follows the paper alone. Where it leaves room: the anchor
most similar to B_{m,1} is a different block, if its group has one. Completion starts with the block for which
nothing was found, as Figure 2 shows.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from jaxfl import fl

BlockRef = fl.reassembly.BlockRef
Pool = fl.reassembly.Pool
Anchor = Literal["random", "max", "min"]
Choices = list[list[BlockRef]]  # C[1]..C[r*]
RERUNS = 10  # of a search while no candidate is small enough


class Candidate(NamedTuple):
    """A personalised model c_{m,s} before stitching."""

    blocks: tuple[BlockRef, ...]  # the blocks, in the order in which they are applied
    substituted: int  # number of first blocks that were searched for; the rest completes the model
    similarity: tuple[float, ...]  # of each block to the client's own block that it replaces, eq. 1


def cmsr(
    client: int,
    pool: Pool,
    rng: np.random.Generator,
    *,
    anchor: Anchor = "random",
    ordered: bool = True,
    complete: bool = True,
    most: int = 4,
) -> list[Candidate]:
    """Return a client's candidates, at least one and all different.

    Args:
      client: m, the client's id.
      pool: the blocks of the round, the client's among them.
      rng: draws the anchor and the candidates.
      anchor: a random block of its group, or the ablations "max", the block most similar to the client's
        first one by eq. 1, and "min", a random one of those with the smallest index.
      ordered: False is the ablation "noc": every block of a group is a choice, in any order.
      complete: False is the ablation "nbc": a candidate ends where the search ended.
      most: S_max, maximum number of candidates.
    """
    own = pool.own(client)
    first = choose_anchor(own[0], pool, rng, anchor)
    choices = search(own, first, pool, ordered)
    rest = own[len(choices) :] if complete else ()
    chosen = generate(choices, own, rng, ordered, most)
    return [assemble(blocks + rest, len(choices), client, pool) for blocks in chosen]


def choose_anchor(first: BlockRef, pool: Pool, rng: np.random.Generator, rule: Anchor) -> BlockRef:
    """Choose the block that replaces the client's first one (step 1); see `cmsr` for the rules."""
    group = [block for block in pool.blocks if block.group == first.group]
    if rule == "max":
        others = [block for block in group if block != first]
        likeness = dict(zip(pool.blocks, pool.similarity[pool.blocks.index(first)], strict=True))
        return max(others, key=lambda block: likeness[block], default=first)
    if rule == "min":
        smallest = min(block.index for block in group)
        group = [block for block in group if block.index == smallest]
    return group[rng.integers(len(group))]


def search(own: Sequence[BlockRef], anchor: BlockRef, pool: Pool, ordered: bool) -> Choices:
    """Return the choices for each of the first r* places (step 2)."""
    choices, q = [[anchor]], anchor.index
    for block in own[1:]:
        found = [u for u in pool.blocks if u.group == block.group and (u.index > q or not ordered)]
        if not found:
            break
        choices.append(found)
        q = min(u.index for u in found)
    return choices


def generate(
    choices: Choices, own: Sequence[BlockRef], rng: np.random.Generator, ordered: bool, most: int
) -> list[tuple[BlockRef, ...]]:
    """Draw tuples of C[1] x ... x C[r*] that satisfy the order condition, all equally likely.

    A random walk takes the next block with a probability proportional to the number of tuples that continue
    from it. So every tuple is equally likely, no walk meets a dead end, and the product is never enumerated.
    A walk that was taken before is drawn again.
    """
    counts = continuations(choices, ordered)
    unchanged = tuple(own[: len(choices)])
    # If the anchor is the client's first block, every C[r] holds its own block, so its model is a tuple.
    others = sum(counts[0]) - (choices[0][0] == own[0])
    if others == 0:
        return [unchanged]
    chosen = {}  # a dict keeps the order of drawing, which a set does not
    while len(chosen) < min(most, others):
        blocks = _walk(choices, counts, rng, ordered)
        if blocks != unchanged:
            chosen[blocks] = None
    return list(chosen)


def continuations(choices: Choices, ordered: bool) -> list[list[int]]:
    """Count the ways to continue from each choice to the end, in Python integers, which never overflow."""
    counts = [[1] * len(choices[-1])]
    for here, after in reversed(list(pairwise(choices))):
        ways = list(zip(after, counts[0], strict=True))
        counts.insert(0, [sum(n for u, n in ways if u.index > block.index or not ordered) for block in here])
    return counts


def bounded(
    run: Callable[[], list[Candidate]], size: Callable[[Candidate], int], bound: float, fallback: Candidate
) -> list[Candidate]:
    """Return the candidates with |c| <= (1 + eta) |w_m| (pFedClub+, section 4.4).

    Args:
      run: one run of CMSR, repeated with a new anchor while no candidate is small enough, up to `RERUNS`
        times.
      size: |c|, number of parameters of a candidate with its stitching layers.
      bound: (1 + eta) |w_m|.
      fallback: the only candidate if none is found, usually the client's own model.
    """
    for _ in range(1 + RERUNS):
        small = [found for found in run() if size(found) <= bound]
        if small:
            return small
    return [fallback]


def assemble(blocks: tuple[BlockRef, ...], substituted: int, client: int, pool: Pool) -> Candidate:
    """Return a candidate for a client; `blocks` may be fewer than the client's own."""
    place = {block: i for i, block in enumerate(pool.blocks)}
    pairs = zip(pool.own(client), blocks, strict=False)
    similarity = tuple(float(pool.similarity[place[own], place[block]]) for own, block in pairs)
    return Candidate(blocks, substituted, similarity)


def identity(client: int, pool: Pool) -> Candidate:
    """Return the client's own model as a candidate, with nothing substituted."""
    return assemble(pool.own(client), 0, client, pool)


def describe(candidate: Candidate) -> list[dict]:
    """Return the candidate's blocks as dicts for JSON."""
    of_blocks = zip(fl.reassembly.describe(candidate.blocks), candidate.similarity, strict=True)
    return [
        block | {"substituted": place < candidate.substituted, "similarity": similarity}
        for place, (block, similarity) in enumerate(of_blocks)
    ]


def _walk(choices, counts, rng, ordered):
    """Draw one tuple that satisfies the order condition."""
    blocks, q = (), -1
    for here, ways in zip(choices, counts, strict=True):
        weights = [n if u.index > q or not ordered else 0 for u, n in zip(here, ways, strict=True)]
        total = sum(weights)
        chosen = here[rng.choice(len(here), p=[n / total for n in weights])]
        blocks, q = (*blocks, chosen), chosen.index
    return blocks
