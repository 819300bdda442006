"""pFedClub: a server assembles a teacher for every client from blocks of all clients' networks.

Wang et al. 2024, "Controllable Heterogeneous Model Aggregation for Personalized Federated Learning", NeurIPS,
section 3. Clients have networks of any architecture, w_m; D_p is a set of public images. In a round

    w_m <- SGD over CE(w_m) + lam KL(softmax w*_m || softmax w_m)                          eq. 5, E epochs
    blocks of all w_m into K groups by what they do on D_p                                            eq. 1
    candidates c_{m,s} from blocks of the groups of w_m's own;        `cmsr`
    stitching layers between their frozen blocks, trained on D_p                                 eqs. 2, 3
    w*_m <- argmax_s mean over D_p of cos(logits of w_m, logits of c_{m,s})                           eq. 4

and w*_m teaches client m when it takes part again; see `jaxfl.mechanisms.reassembly`. Eq. 5 prints the
divergence the other way round than its source. Labels of D_p are used with ``labelled`` (eq. 2); otherwise
eq. 3 compares two random views of each image, within mini-batches of `server_batch` images and not over all
of D_p at once.

The paper completes every candidate by stitching, and says that far fewer parameters are new in those that end
with the client's own blocks (section 3.2.3). So a stitch comes wherever a block does not follow the one that
it follows in its own model (``stitch="joint"``). With ``stitch="shape"`` one comes only where shapes differ,
and blocks of networks alike have nothing to train between them. The paper does not say how stitches start:
here by least squares, as in the technique that it cites (``stitch_start="least-squares"``).
"""

import math
from collections.abc import Callable
from typing import Any

from jaxfl import fl
from jaxfl.algorithms.reassembly.cmsr import Anchor, bounded, cmsr, describe, identity


@fl.options
class PFedClub(fl.reassembly.Reassembly):
    """Options of pFedClub; `candidates` is S_max, drawn at random from all candidates."""

    anchor: Anchor = "random"
    """The first block: a random one of its group, the most similar one, or one with the smallest index."""
    order: bool = True
    """Whether blocks keep the order of their own models (without: "noc")."""
    completion: bool = True
    """Whether the client's own blocks complete a candidate (without: "nbc")."""


def build(config: PFedClub, eta: Callable[[Any], float] = lambda options: math.inf) -> fl.Algorithm:
    """Learn from teachers, which the server assembles between rounds; ``eta(options)`` is read in each."""

    def assemble(server):
        bound = 1 + float(eta(server.options))
        return {client: teacher_of(config, server, client, bound) for client in server.cohort}

    return fl.reassembly.learning_from_teachers(config, assemble, trains=fl.reassembly.is_stitch)


def teacher_of(
    config: PFedClub, server: fl.reassembly.Server, client: int, bound: float
) -> fl.reassembly.Teacher:
    """Return client m's teacher w*_m of at most bound |w_m| parameters (sections 3.2.2 and 3.2.3)."""
    own, largest = identity(client, server.pool), bound * server.networks[client].size

    def search():
        return cmsr(
            client,
            server.pool,
            server.rng,
            anchor=config.anchor,
            ordered=config.order,
            complete=config.completion,
            most=config.candidates,
        )

    with fl.reassembly.timed(server.seconds, "search"):
        candidates = bounded(
            search, lambda candidate: fl.reassembly.size(server, candidate.blocks), largest, own
        )
    with fl.reassembly.timed(server.seconds, "stitching"):
        networks = fl.reassembly.tuned(server, [candidate.blocks for candidate in candidates])
    with fl.reassembly.timed(server.seconds, "matching"):
        best, alpha = fl.reassembly.match(server.logits[client], fl.reassembly.logits_of(server, networks))
    chosen = candidates[best]
    return fl.reassembly.Teacher(
        networks[best], fl.reassembly.size(server, chosen.blocks), describe(own), describe(chosen), alpha
    )


pfedclub = fl.Method(
    "pfedclub", build, PFedClub, needs=("public",), pictures={"assembled.png": fl.reassembly.draw_assembled}
)
