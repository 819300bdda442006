"""From blocks in a row to a network: its layers, its size, and its weights before training."""

from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np

from jaxfl.errors import JaxflError
from jaxfl.mechanisms.reassembly import stitching
from jaxfl.mechanisms.reassembly.blocks import BlockRef
from jaxfl.mechanisms.reassembly.chain import Chain, Part
from jaxfl.mechanisms.reassembly.networks import Network
from jaxfl.mechanisms.reassembly.seen import Seen
from jaxfl.mechanisms.reassembly.stitching import Stitch
from jaxfl.models.model import Weights

LARGEST_STITCH = 2**28  # weights: a gigabyte, and training needs five times as much


def layers(
    blocks: Sequence[BlockRef],
    shape: tuple[int, ...],
    classes: int,
    stitch: Literal["joint", "shape", "dense"],
) -> list[BlockRef | Stitch]:
    """Return blocks with the stitching layers between them, from images to logits.

    Args:
      blocks: in the order in which they are applied.
      shape: shape of an image.
      classes: number of logits.
      stitch: "joint" stitches blocks that are no neighbours in their own model, "shape" those whose shapes
        differ, both by `stitching.between`; "dense" puts a dense linear layer before every block and at the
        end, as the authors' code of pFedHR does.

    Raises:
      JaxflError: if a dense layer is too large.
    """
    found, before, dense = [], None, stitch == "dense"
    for block in blocks:
        joint = shape, block.input_shape, block.kind == "fc"
        if dense:
            found.append(_dense(shape, block.input_shape))
        elif not (_follows(block, before) if stitch == "joint" else stitching.fits(*joint)):
            found.append(stitching.between(*joint))
        found.append(block)
        before, shape = block, block.output_shape
    if dense:
        found.append(_dense(shape, (classes,)))
    elif shape != (classes,):
        found.append(Stitch(shape, (classes,), relu=False))
    return found


def _follows(block: BlockRef, before: BlockRef | None) -> bool:
    """Return whether another block, or None for the images, is before this one in its own model too."""
    if before is None:
        return block.index == 0
    return (before.client, before.index + 1) == (block.client, block.index)


def _dense(source: tuple[int, ...], target: tuple[int, ...]) -> Stitch:
    stitch = Stitch(source, target, relu=False, dense=True)
    if stitch.size > LARGEST_STITCH:
        raise JaxflError(
            f"A dense stitching layer from {source} to {target} has too many weights ({stitch.size:,}); "
            "choose stitch=joint or networks whose maps are smaller."
        )
    return stitch


def size(layers: Sequence[BlockRef | Stitch]) -> int:
    """Return |c|, the number of parameters of a network, with those of its stitching layers."""
    return sum(layer.size if isinstance(layer, Stitch) else layer.parameters for layer in layers)


def assemble(
    layers: Sequence[BlockRef | Stitch],
    networks: Mapping[int, Network],
    rng: np.random.Generator,
    seen: Seen | None = None,
) -> Chain:
    """Build a network: blocks with their clients' weights, stitches with new ones.

    Args:
      layers: see `layers`.
      networks: by client id, the networks whose blocks are used.
      rng: draws the weights of stitches.
      seen: images to which small stitches are fitted instead, see `stitching.least_squares`; each to what it
        gets in this network.
    """
    network = ()
    for place, layer in enumerate(layers):
        if isinstance(layer, BlockRef):
            part = networks[layer.client].parts[layer.index]
        elif seen and not layer.dense:
            given, wanted = seen.through(network), seen.through(_used_to(layers, place, networks))
            params = seen.parts.program(stitching.fitting, layer).counted(given, wanted)
            part = Part(layer, Weights(params, {}))
        else:
            key = jax.random.key(int(rng.integers(2**31)))
            part = Part(layer, Weights(stitching.initial(key, layer), {}))
        network = (*network, part)
    return network


def _used_to(layers: Sequence[BlockRef | Stitch], place: int, networks: Mapping[int, Network]) -> Chain:
    """Return what the block after a stitch follows in its own model; at the end, the last block's model."""
    if place + 1 < len(layers):
        block = layers[place + 1]
        return networks[block.client].parts[: block.index]
    return networks[layers[place - 1].client].parts
