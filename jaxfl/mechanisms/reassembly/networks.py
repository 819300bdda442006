"""Clients' networks taken apart: blocks with their shapes, and their activations on public images."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import flops
from jaxfl.core.client_map import gather, map_clients
from jaxfl.core.examples import sweep, visiting
from jaxfl.core.protocol import Cohort
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.reassembly.parts import Chain, Part
from jaxfl.models.model import Model, Weights


class Block(NamedTuple):
    """A block of an architecture.

    Args:
      model: a slice of the architecture; a block without parameters, such as resizing, is part of the next.
      kind: "conv" or "fc".
      output_shape: of one example.
      end: its place among the architecture's blocks, and so that of its output.
    """

    model: Model
    kind: str
    output_shape: tuple[int, ...]
    end: int


@dataclasses.dataclass(frozen=True)
class Network:
    """The network of a client."""

    client: int  # its id
    group: int  # number of its architecture
    position: int  # the client's within the group
    blocks: tuple[Block, ...]  # blocks of the architecture
    weights: Weights  # weights of the client

    @property
    def size(self) -> int:
        """|w_m|, the number of parameters."""
        return sum(block.model.size for block in self.blocks)

    @functools.cached_property
    def parts(self) -> Chain:
        """The blocks with their weights: the same parts for all networks made of them."""
        return tuple(Part(block.model, weights_of(self, r)) for r, block in enumerate(self.blocks))


@functools.lru_cache(maxsize=64)
def blocks_of(model: Model) -> tuple[Block, ...]:
    """Return the blocks of an architecture, in order."""
    found, start, shape = [], 0, model.shape
    for place in range(len(model.blocks)):
        # Without the name, all architectures that have such a block share its programs.
        piece = dataclasses.replace(model.part(start, place + 1), name="block", note="")
        if piece.size == 0:
            continue
        like = piece.form
        kernels = [leaf for leaf in jax.tree.leaves(like.params) if leaf.ndim > 2]
        start, shape = place + 1, piece.output
        found.append(Block(piece, "conv" if kernels else "fc", shape, place))
    return tuple(found)


def require_flattening(model: Model) -> None:
    """Refuse an architecture with a dense block that takes only maps, not the vectors of stitches."""
    for block in blocks_of(model):
        if block.kind == "conv":
            continue
        x = jax.ShapeDtypeStruct((1, math.prod(block.model.shape)), jnp.result_type(float))
        try:
            y, _ = jax.eval_shape(functools.partial(block.model.apply, train=False), *block.model.form, x)
        except Exception:  # of any kind: the block may be the user's own
            y = None
        if y is None or y.shape[1:] != block.output_shape:
            name, _ = block.model.blocks[-1]
            raise JaxflError(
                f"Blocks of {model.name} must be able to follow other blocks, but the dense block {name!r} "
                f"does not take maps {block.model.shape} as vectors; pool in a separate block, or flatten in "
                "that one."
            )


def networks(weights: PerGroup, federation: Federation, cohort: Cohort) -> dict[int, Network]:
    """Return a cohort's networks by client id, in that order; weights (n_g, ...) per group."""
    found = {}
    for client, g, position, _ in taken_places(federation, cohort):
        own = jax.tree.map(lambda leaf: on_one_device(leaf[position]), weights[g])  # noqa: B023
        found[client] = Network(client, g, position, blocks_of(federation.models[g]), own)
    return found


def taken_places(federation: Federation, cohort: Cohort) -> list[tuple[int, int, int, int]]:
    """Return a cohort's clients in order of id: (id, group, position in it, place in the cohort)."""
    return sorted(
        (int(group.id[slots.index[place]]), g, int(slots.index[place]), int(place))
        for g, (group, slots) in enumerate(zip(federation.groups, cohort.groups, strict=True))
        for place in np.flatnonzero(slots.mask)
    )


def weights_of(network: Network, index: int) -> Weights:
    """Return the weights of one of a network's blocks."""
    names = network.blocks[index].model.names
    params, stats = ({name: part[name] for name in names} for part in network.weights)
    return Weights(params, stats)


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


def references(all_networks: Sequence[Network], labels: np.ndarray) -> tuple[BlockRef, ...]:
    """Return references to all blocks, network by network; labels (B,) are their groups."""
    blocks = ((network, r, block) for network in all_networks for r, block in enumerate(network.blocks))
    return tuple(
        BlockRef(
            network.client,
            r,
            block.kind,
            int(label),
            block.model.size,
            block.model.shape,
            block.output_shape,
        )
        for (network, r, block), label in zip(blocks, labels, strict=True)
    )


def describe(blocks: Sequence[BlockRef]) -> list[dict]:
    """Return blocks in their order, for JSON."""
    return [block._asdict() for block in blocks]


class Look(NamedTuple):
    """A network's outputs on public images."""

    activations: tuple[np.ndarray, ...]
    """R + 1 arrays (n, d): the images and the output of every block, maps averaged over space, as
    `jaxfl.mechanisms.reassembly.signatures` takes them."""
    logits: np.ndarray  # (P, C)


def look(weights: PerGroup, federation: Federation, cohort: Cohort, some) -> dict[int, Look]:
    """Return the outputs of a cohort's networks on the public images, by client id.

    Weights are (n_g, ...) per group; activations are those on `some` (n,) int32 of the images.
    """
    seen, operations = jax.device_get(_look(weights, federation, cohort, some))
    flops.add(operations)
    return {
        client: jax.tree.map(lambda leaf: leaf[place], seen[g])  # noqa: B023
        for client, g, _, place in taken_places(federation, cohort)
    }


def on_one_device(array: jax.Array) -> jax.Array:
    """Return the first device's copy of an array that several devices hold in full."""
    return array.addressable_data(0)


@jax.jit
@flops.with_operations
def _look(weights, federation, cohort, some):
    def client(key, client, nothing, own):
        visitor = visiting(client, federation.public)
        ends = [block.end for block in blocks_of(client.model)]

        def of_batch(x):
            outputs, _ = client.model.outputs(*own, x, train=False)
            return tuple(y.mean(tuple(range(1, y.ndim - 1))) for y in (x, *(outputs[end] for end in ends)))

        outputs = sweep(of_batch, visitor.rows, visitor.size, federation)
        return Look(tuple(y[some] for y in outputs), outputs[-1])

    with flops.on_server():
        seen = map_clients(client, jax.random.key(0), federation, cohort, own=gather(weights, cohort))
    return federation.keep_replicated(seen)
