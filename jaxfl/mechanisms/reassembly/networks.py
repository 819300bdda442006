"""Clients' networks taken apart: blocks with their shapes, and what they do on public images."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.client_map import gather, map_clients
from jaxfl.core.examples import sweep, visiting
from jaxfl.core.protocol import Cohort
from jaxfl.data.federation import Client, Federation, PerGroup
from jaxfl.mechanisms.reassembly.blocks import BlockRef
from jaxfl.mechanisms.reassembly.chain import CompiledParts
from jaxfl.models.model import Model, Weights


class Block(NamedTuple):
    """A block of an architecture.

    Args:
      model: a slice of the architecture; a block without parameters, such as resizing, is part of the next.
      kind: "conv" or "fc".
      output_shape: of one example.
      end: its place, and with it its output's, among the architecture's blocks.
    """

    model: Model
    kind: str
    output_shape: tuple[int, ...]
    end: int


class Network(NamedTuple):
    """The network of a client.

    Args:
      client: its id.
      group: number of its architecture.
      position: the client's within the group.
      blocks: the architecture's.
      weights: of the client.
    """

    client: int
    group: int
    position: int
    blocks: tuple[Block, ...]
    weights: Weights

    @property
    def size(self) -> int:
        """|w_m|, parameters."""
        return sum(block.model.size for block in self.blocks)


@functools.lru_cache(maxsize=64)
def blocks_of(model: Model) -> tuple[Block, ...]:
    """The blocks of an architecture, in order."""
    found, pending, shape = [], (), model.shape
    for place, block in enumerate(model.blocks):
        pending = (*pending, block)
        # All architectures that have such a block share its programs: the name is not part of it.
        piece = dataclasses.replace(model, name="block", blocks=pending, shape=shape, note="")
        if piece.size == 0:
            continue
        like = jax.eval_shape(piece.init, jax.random.key(0))
        x = jax.ShapeDtypeStruct((1, *shape), jnp.result_type(float))
        y, _ = jax.eval_shape(functools.partial(piece.apply, train=False), *like, x)
        kernels = [leaf for leaf in jax.tree.leaves(like.params) if leaf.ndim > 2]
        found.append(Block(piece, "conv" if kernels else "fc", y.shape[1:], place))
        pending, shape = (), y.shape[1:]
    return tuple(found)


def networks(weights: PerGroup, federation: Federation, cohort: Cohort) -> dict[int, Network]:
    """The networks of a cohort by the clients' ids, in their order; weights (n_g, ...) per group."""
    found = {}
    for g, (group, slots) in enumerate(zip(federation.groups, cohort.groups, strict=True)):
        for position in np.asarray(slots.index)[np.asarray(slots.mask)].tolist():
            own = jax.tree.map(lambda leaf: on_one_device(leaf[position]), weights[g])  # noqa: B023
            client = int(group.id[position])
            found[client] = Network(client, g, position, blocks_of(group.model), own)
    return dict(sorted(found.items()))


def weights_of(network: Network, index: int) -> Weights:
    """Those of one of its blocks."""
    names = network.blocks[index].model.names
    params, stats = ({name: part[name] for name in names} for part in network.weights)
    return Weights(params, stats)


def references(all_networks: Sequence[Network], labels: np.ndarray) -> tuple[BlockRef, ...]:
    """All blocks, network by network; labels (B,) are their groups."""
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


def activations(weights: Weights, client: Client, federation: Federation, rows) -> tuple[jax.Array, ...]:
    """What blocks take and put out on public images: the images and every output, maps averaged over space.

    Args:
      weights: of the client.
      client: with its model.
      federation: the images.
      rows: (n,) int32, of the federation's images.

    Returns:
      R + 1 arrays (n, d), as `jaxfl.mechanisms.reassembly.signatures` takes them; 0 of an absent client.
    """
    client = visiting(client, rows)
    ends = [block.end for block in blocks_of(client.model)]

    def of_batch(x):
        outputs, _ = client.model.outputs(*weights, x, train=False)
        return tuple(y.mean(tuple(range(1, y.ndim - 1))) for y in (x, *(outputs[end] for end in ends)))

    return sweep(of_batch, client.rows, client.size, federation)


def on_public_images(
    parts: CompiledParts, f: Callable, weights: PerGroup, federation: Federation, cohort: Cohort, rows
) -> dict[int, Any]:
    """What the networks of a cohort make of public images, by client id.

    Args:
      parts: the run's programs.
      f: ``(weights, client, federation, rows) -> arrays (n, ...)``, such as `activations` or
        `jaxfl.mechanisms.public_images.logits`.
      weights: (n_g, ...) per group.
      federation: clients and images.
      cohort: whose networks.
      rows: (n,) int32, of the federation's images.
    """
    seen = jax.device_get(parts.program(_of_clients, f)(weights, federation, cohort, rows))
    found = {}
    for group, slots, of_group in zip(federation.groups, cohort.groups, seen, strict=True):
        for place in np.flatnonzero(slots.mask):
            client = int(group.id[slots.index[place]])
            found[client] = jax.tree.map(lambda leaf: leaf[place], of_group)  # noqa: B023
    return found


def on_one_device(array: jax.Array) -> jax.Array:
    """A copy on the first device of an array that several hold in full."""
    return array.addressable_data(0)


def _of_clients(f: Callable) -> Callable:
    def look(weights, federation, cohort, rows):
        def client(key, client, nothing, own):
            return f(own, client, federation, rows)

        seen = map_clients(client, jax.random.key(0), federation, cohort, own=gather(weights, cohort))
        return federation.keep_replicated(seen)

    return look
