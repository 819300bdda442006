"""From blocks in a row to a network: its layers, its size, and its weights before training."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal

import jax
import numpy as np

from jaxfl.errors import JaxflError
from jaxfl.mechanisms.reassembly import stitching
from jaxfl.mechanisms.reassembly.networks import BlockRef, Network
from jaxfl.mechanisms.reassembly.parts import Chain, Part, counted
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
      stitch: small layers, see `stitching.between`, "joint" where a block does not follow the one that it
        follows in its own model, "shape" where shapes differ; or "dense" layers before every block and at
        the end, as in the authors' code of pFedHR.

    Raises:
      JaxflError: if a dense layer is too large.
    """
    found, before, dense = [], None, stitch == "dense"
    for block in blocks:
        if _is_stitched(stitch, before, shape, block):
            between = shape, block.input_shape
            found.append(_dense(*between) if dense else stitching.between(*between, block.kind == "fc"))
        found.append(block)
        before, shape = block, block.output_shape
    if dense:
        found.append(_dense(shape, (classes,)))
    elif shape != (classes,):
        found.append(Stitch(shape, (classes,), relu=False))
    return found


def _is_stitched(stitch: str, before: BlockRef | None, shape: tuple[int, ...], block: BlockRef) -> bool:
    """Return whether a stitching layer comes before a block; `before` is None for images, of this shape."""
    if stitch == "joint":
        here = (before.client, before.index) if before else (block.client, -1)
        return here != (block.client, block.index - 1)
    return stitch == "dense" or not stitching.fits(shape, block.input_shape, block.kind == "fc")


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

    The networks whose blocks are used are by client id. Small stitches start by least squares on images, if
    some have been `seen`.
    """
    network, own = (), ()
    for layer, after in zip_longest(layers, layers[1:]):
        if isinstance(layer, BlockRef):
            own = networks[layer.client].parts
            part = own[layer.index]
        else:
            if isinstance(after, BlockRef):  # otherwise logits, which are those of the last block's model
                own = networks[after.client].parts[: after.index]
            part = Part(layer, Weights(_start(layer, network, own, rng, seen), {}))
        network = (*network, part)
    return network


def _start(stitch: Stitch, before: Chain, own: Chain, rng: np.random.Generator, seen: Seen | None) -> dict:
    """Return the first weights of a stitch, which follows some parts and stands for a model's own ones."""
    if seen is None or stitch.dense:
        return stitching.initial(jax.random.key(int(rng.integers(2**31))), stitch)
    return counted(stitching.least_squares, stitch, seen.through(before), seen.through(own))
