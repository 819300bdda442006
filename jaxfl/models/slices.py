"""Slices of a network's leaves that form a narrower one: the first channels of every layer.

Diao et al. 2021, "HeteroFL", arXiv:2010.01264. Output channels of a layer are numbered from 0 in
both networks, and the narrower one has the first numbers. Its input channels may have other numbers:
flattened maps have the first ones at every pixel, and after a concatenation (a module that `extends`, see
`jaxfl.models.repeated`) each part has its own first ones. A module that says why it is `uncut` has no such
numbers.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.errors import JaxflError
from jaxfl.models.model import Model

Index = tuple  # of slices and arrays of positions, one for each axis of a leaf


class Numbers(NamedTuple):
    """Numbers, in the wide network, of the narrow network's channels in a block."""

    # {(input channels of the block, those in the wide network): (n,) int}
    taken: dict[tuple[int, int], np.ndarray]
    joined: dict[tuple[int, int], np.ndarray]  # the same of its output channels if it extends its input
    flat: np.ndarray  # numbers of its input as one vector


@functools.cache
def cut(wide: Model, narrow: Model) -> tuple[Index, ...]:
    """Return where the entries of a narrow network are in a wide one.

    Args:
      wide: wide network.
      narrow: network with blocks and leaves of the same names, and at most as many channels in each layer.

    Returns:
      An index for each of `jax.tree.leaves(narrow.init(key))`: the wide network's leaf, indexed, has its
      shape.

    Raises:
      JaxflError: if the narrow network is not a slice of the wide one.
    """
    numbers, modules = _of_blocks(wide, narrow), dict(narrow.blocks)
    leaves = jax.tree.leaves_with_path(narrow.form)
    made = {_layer(path) for path, leaf in leaves if leaf.ndim > 1}  # layers with channels of their own

    def met(path) -> dict[tuple[int, int], np.ndarray]:
        """Return the numbers of a layer's channels if they are not simply the first ones."""
        (block, layer), takers = _layer(path), getattr(modules[path[1].key], "extends", ())
        if not takers or layer in takers:
            return numbers[block].taken
        return {} if (block, layer) in made else numbers[block].joined

    def of_leaf(path: Any, leaf, whole) -> Index:
        block = path[1].key
        pixels = 2 if leaf.ndim > 2 else 0  # axes of a convolution's kernel
        lengths = list(zip(leaf.shape, whole.shape, strict=False))
        if leaf.ndim != whole.ndim or any(
            n > m or (n < m and i < pixels) for i, (n, m) in enumerate(lengths)
        ):
            _refuse(wide, narrow, f"its block {block!r} has more channels or another kernel")
        axes: list[Any] = [met(path).get(pair, np.arange(pair[0])) for pair in lengths]
        if leaf.ndim in (2, 4) or (leaf.ndim == 1 and _layer(path) in made):
            axes[-1] = np.arange(leaf.shape[-1])  # a kernel's output channels are numbered from 0
        if leaf.ndim == 2 and len(numbers[block].flat) == leaf.shape[0]:
            axes[0] = numbers[block].flat
        first = [np.array_equal(axis, np.arange(len(axis))) for axis in axes]
        if first.count(False) > 1:
            return np.ix_(*axes)
        return tuple(
            slice(len(axis)) if is_first else axis for axis, is_first in zip(axes, first, strict=True)
        )

    both = zip(leaves, jax.tree.leaves(wide.form), strict=True)
    return tuple(of_leaf(path, leaf, whole) for (path, leaf), whole in both)


def _layer(path: Any) -> tuple[str, str]:
    """Return the names of a leaf's block and of its layer in the block."""
    return path[1].key, path[2].key


def _of_blocks(wide: Model, narrow: Model) -> dict[str, Numbers]:
    of_wide, of_narrow = ((*model.shapes, model.output) for model in (wide, narrow))
    found, taken = {}, np.arange(narrow.shape[-1])
    for i, (block, module) in enumerate(narrow.blocks):
        *pixels, channels = of_wide[i]
        if pixels != list(of_narrow[i][:-1]):
            _refuse(wide, narrow, f"its block {block!r} takes maps of another size")
        if wide != narrow and (why := getattr(module, "uncut", "")):
            _refuse(wide, narrow, f"its block {block!r} {why}")
        flat = channels * np.arange(math.prod(pixels))[:, None] + taken[None]
        handed_on, joined = np.arange(of_narrow[i + 1][-1]), {}
        if getattr(module, "extends", ()):
            added = handed_on[: len(handed_on) - len(taken)]
            handed_on = np.concatenate([taken, channels + added])
            joined = {(len(handed_on), of_wide[i + 1][-1]): handed_on}
        found[block] = Numbers({(len(taken), channels): taken}, joined, flat.ravel())
        taken = handed_on
    return found


def _refuse(wide: Model, narrow: Model, why: str):
    raise JaxflError(
        f"{narrow.name} is not a part of {wide.name}, though their layers have the same names: {why}; give "
        "one network in several widths, such as --models cnn4 cnn4,width=0.5, or networks of other layers."
    )
