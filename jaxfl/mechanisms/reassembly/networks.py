"""Clients' networks taken apart: blocks with their shapes, and what they do on public images."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.examples import sweep
from jaxfl.mechanisms.reassembly.blocks import BlockRef
from jaxfl.models.model import Model, Weights


class Part(NamedTuple):
    """A block of an architecture.

    Args:
      block: a slice of the model; a block without parameters, such as resizing, is part of the next one.
      kind: "conv" or "fc".
      output_shape: of one example.
      end: its place, and with it its output's, among the model's blocks.
    """

    block: Model
    kind: str
    output_shape: tuple[int, ...]
    end: int


class Network(NamedTuple):
    """The network of a client of the round.

    Args:
      client: its id.
      group: number of its architecture.
      position: the client's within the group.
      parts: the architecture's blocks.
      weights: of the client.
    """

    client: int
    group: int
    position: int
    parts: tuple[Part, ...]
    weights: Weights

    @property
    def size(self) -> int:
        """|w_m|, parameters."""
        return sum(part.block.size for part in self.parts)


@functools.lru_cache(maxsize=64)
def dismantled(model: Model) -> tuple[Part, ...]:
    """The blocks of an architecture, in order."""
    parts, pending, shape = [], (), model.shape
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
        parts.append(Part(piece, "conv" if kernels else "fc", y.shape[1:], place))
        pending, shape = (), y.shape[1:]
    return tuple(parts)


def networks(weights: tuple, federation, cohort) -> list[Network]:
    """The networks of a cohort by the clients' ids, whatever their places; weights (n_g, ...) per group."""
    found = []
    for g, (group, slots) in enumerate(zip(federation.groups, cohort.groups, strict=True)):
        for position in np.asarray(slots.index)[np.asarray(slots.mask)].tolist():
            own = jax.tree.map(lambda leaf: on_one_device(leaf[position]), weights[g])  # noqa: B023
            client = int(group.id[position])
            found.append(Network(client, g, position, dismantled(group.model), own))
    return sorted(found, key=lambda network: network.client)


def weights_of(network: Network, index: int) -> Weights:
    """Those of one of its blocks."""
    names = network.parts[index].block.names
    params, stats = ({name: part[name] for name in names} for part in network.weights)
    return Weights(params, stats)


def references(all_networks: Sequence[Network], labels: np.ndarray) -> tuple[BlockRef, ...]:
    """All blocks, network by network; labels (B,) are their groups."""
    blocks = ((network, r, part) for network in all_networks for r, part in enumerate(network.parts))
    return tuple(
        BlockRef(
            network.client, r, part.kind, int(label), part.block.size, part.block.shape, part.output_shape
        )
        for (network, r, part), label in zip(blocks, labels, strict=True)
    )


def activations(model: Model, weights: Weights, rows, size, federation) -> tuple:
    """What blocks take and put out on public images: the images and every output, maps averaged over space.

    Args:
      model: of a client.
      weights: its own.
      rows: (R,) int32, of the federation's images.
      size: () int32, R, or 0 for an absent client.
      federation: the images.

    Returns:
      R + 1 arrays (R, d), as `jaxfl.mechanisms.reassembly.signatures` takes them.
    """

    def of_batch(x):
        outputs, _ = model.outputs(weights.params, weights.stats, x, train=False)
        ends = [part.end for part in dismantled(model)]
        return tuple(y.mean(tuple(range(1, y.ndim - 1))) for y in (x, *(outputs[end] for end in ends)))

    return sweep(of_batch, rows, size, federation)


def on_one_device(array: jax.Array) -> jax.Array:
    """A copy on the first device of an array that several hold in full."""
    return array.addressable_data(0)
