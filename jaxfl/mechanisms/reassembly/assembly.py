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
from jaxfl.mechanisms.reassembly.stitching import Stitch
from jaxfl.models.model import Weights

LARGEST_STITCH = 2**28  # weights: a gigabyte, and training needs five times as much


def layers(
    blocks: Sequence[BlockRef],
    shape: tuple[int, ...],
    classes: int,
    stitch: Literal["fit", "dense"] = "fit",
) -> list[BlockRef | Stitch]:
    """Return blocks with the stitching layers between them, from images to logits.

    Args:
      blocks: in the order in which they are applied.
      shape: shape of an image.
      classes: number of logits.
      stitch: "fit" stitches where shapes differ, see `stitching.between`; "dense" puts a dense linear layer
        before every block and at the end, as the authors' code of pFedHR does.

    Raises:
      JaxflError: if a dense layer is too large.
    """
    found, dense = [], stitch == "dense"
    for block in blocks:
        if dense:
            found.append(_dense(shape, block.input_shape))
        elif between := stitching.between(shape, block.input_shape, vector=block.kind == "fc"):
            found.append(between)
        found.append(block)
        shape = block.output_shape
    if dense:
        found.append(_dense(shape, (classes,)))
    elif shape != (classes,):
        found.append(Stitch(shape, (classes,), relu=False))
    return found


def _dense(source: tuple[int, ...], target: tuple[int, ...]) -> Stitch:
    stitch = Stitch(source, target, relu=False, dense=True)
    if stitch.size > LARGEST_STITCH:
        raise JaxflError(
            f"A dense stitching layer from {source} to {target} has too many weights ({stitch.size:,}); "
            "choose stitch=fit or networks whose maps are smaller."
        )
    return stitch


def size(layers: Sequence[BlockRef | Stitch]) -> int:
    """Return |c|, the number of parameters of a network, with those of its stitching layers."""
    return sum(layer.size if isinstance(layer, Stitch) else layer.parameters for layer in layers)


def assemble(
    layers: Sequence[BlockRef | Stitch], networks: Mapping[int, Network], rng: np.random.Generator
) -> Chain:
    """Build a network: blocks with their clients' weights, stitches with new ones.

    Args:
      layers: see `layers`.
      networks: by client id, the networks whose blocks are used.
      rng: draws the stitches' weights.
    """

    def part(layer):
        if isinstance(layer, Stitch):
            return Part(
                layer, Weights(stitching.initial(jax.random.key(int(rng.integers(2**31))), layer), {})
            )
        return networks[layer.client].parts[layer.index]

    return tuple(map(part, layers))
