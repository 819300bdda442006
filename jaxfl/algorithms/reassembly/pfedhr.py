"""pFedHR: a server assembles a few networks of clients' blocks; each client learns from the one most like it.

Wang et al. 2023, "Towards Personalized Federated Learning via Heterogeneous Model Reassembly", NeurIPS,
arXiv:2308.08643; its description in pFedClub, its successor; the authors' code
(github.com/JackqqWang/pfedHR). Clients have networks of any architecture, w_m; D_p is a set of public images.
In a round

    w_m <- SGD over CE(w_m) + lam KL(softmax w*_m || softmax w_m)                                  E epochs
    blocks of all w_m into K groups by what they do on D_p
    candidates c_1..c_S for all clients: of 4, 5, 6, 4, ... blocks, at least one of every group
    stitching layers before every block and at the end; all of c_s trained on D_p
    w*_m <- argmax_s mean over D_p of cos(logits of w_m, logits of c_s)

and w*_m teaches client m when it takes part again; see `jaxfl.mechanisms.reassembly`. Unlike in
pFedClub, candidates belong to no client, and all of their weights are trained.

Stitching layers are those of the code, dense linear maps, also before the first block: from w x h x c numbers
to as many they have (w h c)^2 weights, so that most of a teacher is stitches. They start at random. With
``stitch="joint"`` or "shape" they are pFedClub's small ones, see `jaxfl.algorithms.reassembly.pfedclub`.

Where paper and code differ: The paper freezes the blocks and trains the stitches; the code trains all, as we
do. In the code candidates share their blocks with each other and with the clients' models, so that each
training changes all of them, and the clients' models are fine-tuned on D_p before they are compared. Here
every candidate trains copies, and w_m stays as the client sent it. If a draw lacks a kind of block, the code
goes back to the least length; we draw again. The code orders blocks by their number among those of their
kind, we by their place in their model. The code's server learns from mini-batches of 8 images, ours of 64
(`server_batch`): without labels a view is held against 126 others, there against 14. The clients' side
follows pFedClub's paper, where pFedHR is a baseline.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxfl import fl

BlockRef = fl.reassembly.BlockRef
Pool = fl.reassembly.Pool


@fl.options
class PFedHR(fl.reassembly.Reassembly):
    """Options of pFedHR; `candidates` is S, the number of networks from which all teachers are chosen."""

    stitch: Literal["joint", "shape", "dense"] = "dense"
    """Stitching layers: dense ones before all blocks, or small ones where their origins or shapes differ."""
    shortest: int = fl.within("[1, inf)", 4)
    """Blocks of the first candidate; each next one has one more. There are at least as many as groups."""
    longest: int = fl.within("[1, inf)", 6)
    """Blocks of the longest candidate; the next one is again the shortest."""


def build(config: PFedHR) -> fl.Algorithm:
    """Learn from teachers, which the server assembles and matches between rounds."""
    if config.shortest > config.longest:
        raise fl.JaxflError(
            f"--shortest {config.shortest} is more than --longest {config.longest}; lower --shortest or "
            "raise --longest."
        )
    lengths = range(config.shortest, config.longest + 1)

    def assemble(server: fl.reassembly.Server) -> dict[int, fl.reassembly.Teacher]:
        with fl.reassembly.timed(server.seconds, "search"):
            chosen = candidates(server.pool, server.rng, lengths, config.candidates)
        with fl.reassembly.timed(server.seconds, "stitching"):
            networks = fl.reassembly.tuned(server, chosen)
        with fl.reassembly.timed(server.seconds, "matching"):
            logits = fl.reassembly.logits_of(server, networks)
            matches = {client: fl.reassembly.match(server.logits[client], logits) for client in server.cohort}
        return {
            client: fl.reassembly.Teacher(
                networks[best],
                fl.reassembly.size(server, chosen[best]),
                fl.reassembly.describe(server.pool.own(client)),
                fl.reassembly.describe(chosen[best]),
                alpha,
            )
            for client, (best, alpha) in matches.items()
        }

    return fl.reassembly.learning_from_teachers(config, assemble, trains=fl.reassembly.every_part)


def candidates(
    pool: Pool, rng: np.random.Generator, lengths: Sequence[int], number: int
) -> list[tuple[BlockRef, ...]]:
    """Draw sequences of blocks, of these lengths in turn."""
    in_turn = itertools.islice(itertools.cycle(lengths), number)
    return [candidate(pool, rng, length) for length in in_turn]


def candidate(pool: Pool, rng: np.random.Generator, length: int) -> tuple[BlockRef, ...]:
    """Draw blocks, at least one of every group and of every kind, in an order that makes a network.

    Convolutions come before dense blocks; each kind is ordered by the blocks' places in their own models.
    There are more than `length` if there are more groups or kinds, fewer if the pool is smaller.
    """
    kinds = {block.kind for block in pool.blocks}
    while True:
        blocks = draw(pool, rng, max(length, len(kinds)))
        if {block.kind for block in blocks} == kinds:
            return tuple(sorted(blocks, key=lambda block: (block.kind != "conv", block.index)))


def draw(pool: Pool, rng: np.random.Generator, length: int) -> list[BlockRef]:
    """Draw one block of each group, and the missing number from all others; no block is drawn twice."""
    groups = [[b for b in pool.blocks if b.group == k] for k in sorted({b.group for b in pool.blocks})]
    chosen = [group[rng.integers(len(group))] for group in groups]
    others = [block for block in pool.blocks if block not in chosen]
    more = rng.permutation(len(others))[: max(0, length - len(chosen))]
    return chosen + [others[i] for i in more]


pfedhr = fl.Method(
    "pfedhr", build, PFedHR, needs=("public",), pictures={"assembled.png": fl.reassembly.draw_assembled}
)
