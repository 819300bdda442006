"""A model: an ordered tuple of named blocks, the last of which is one linear classifier.

All that personalised federated learning does to a network - keep the head, share the first layers,
mix some blocks, normalise locally - is a choice among these names. Parameters and BatchNorm
statistics are dicts keyed by them; the order of the blocks comes from the model alone, because JAX
sorts the keys of a dict.
"""

import dataclasses
import functools
import zlib
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from jaxfl.errors import JaxflError
from jaxfl.models.conv import suited, using


class Weights(NamedTuple):
    """What a model is run with: every block has an entry in both dicts, perhaps an empty one.

    Attributes:
        params: {block name: trained leaves}.
        stats: {block name: running BatchNorm statistics}.
    """

    params: dict
    stats: dict


class Block(NamedTuple):
    """A named part of a model.

    Attributes:
        name: Unique within the model.
        module: Called as `module(x, train=bool, mask=(B,) bool or None)`.
    """

    name: str
    module: nn.Module


@dataclasses.dataclass(frozen=True)
class Model:
    """A network without its weights; hashable, so it may be a static argument or a dict key.

    Attributes:
        name: The architecture's name.
        blocks: In the order in which they are applied.
        shape: Shape of one example that the first block takes: (H, W, C), or (d,) for a head.
        classes: Number of classes.
        note: One sentence that the user should read, or nothing.
        convolution: Its implementation, see `jaxfl.models.conv`; "auto" is what suits the backend
            and the shapes.
        precision: "full", or "bfloat16": the blocks compute in it, parameters and BatchNorm's statistics
            stay as they are.
    """

    name: str
    blocks: tuple[Block, ...]
    shape: tuple[int, ...]
    classes: int
    note: str = ""
    convolution: str = "auto"
    precision: str = "full"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the blocks, in order."""
        return tuple(block.name for block in self.blocks)

    @property
    def body(self) -> "Model":
        """The feature extractor: all blocks but the last; its output is z (B, d)."""
        return dataclasses.replace(self, blocks=self.blocks[:-1])

    @functools.cached_property
    def head(self) -> "Model":
        """The classifier: the last block, from z (B, d) to logits (B, classes)."""
        images = jax.ShapeDtypeStruct((1, *self.shape), jnp.result_type(float))
        z, _ = jax.eval_shape(functools.partial(self.body.apply, train=False), *self._like, images)
        return dataclasses.replace(self, blocks=self.blocks[-1:], shape=z.shape[1:])

    def init(self, key: jax.Array) -> Weights:
        """Draws initial weights; those of a block depend on `key` and on its own name only."""
        params, stats = {}, {}
        x = jax.ShapeDtypeStruct((1, *self.shape), jnp.result_type(float))
        for name, module in self.blocks:
            run = functools.partial(module.apply, train=False, mask=None)
            variables = module.lazy_init(_block_key(key, name), x, train=False, mask=None)
            x = jax.eval_shape(run, variables, x)
            params[name] = variables.get("params", {})
            stats[name] = variables.get("batch_stats", {})
        return Weights(params, stats)

    def apply(
        self,
        params: dict,
        stats: dict,
        x: jax.Array,
        *,
        train: bool | tuple[str, ...],
        key: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, dict]:
        """Runs the blocks in order.

        Args:
            params: Parameters of at least this model's blocks.
            stats: Statistics of at least this model's blocks.
            x: Images (B, H, W, C), or what the first block takes.
            train: Whether the blocks train, or the names of those that do. In the others BatchNorm
                and dropout are in evaluation mode.
            key: For dropout. A block's key depends on its name, not on its place in the model.
            mask: (B,) bool, True for real rows: only these enter the statistics of BatchNorm.

        Returns:
            The last block's output, (B, classes) for a whole model, and this model's statistics.

        Raises:
            JaxflError: If a block with dropout trains and there is no key.
        """
        outputs, updated = self.outputs(params, stats, x, train=train, key=key, mask=mask)
        return outputs[-1], updated

    def outputs(
        self,
        params: dict,
        stats: dict,
        x: jax.Array,
        *,
        train: bool | tuple[str, ...],
        key: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[tuple[jax.Array, ...], dict]:
        """Runs the blocks in order: as `apply`, but returns what every block puts out."""
        outputs, updated = [], {}
        params, x = self._reduced((params, x))
        for name, module in self.blocks:
            trains = train if isinstance(train, bool) else name in train
            try:
                with self._convolving(x.shape[0]):
                    x, new = module.apply(
                        {"params": params[name], "batch_stats": stats.get(name, {})},
                        x,
                        train=trains,
                        mask=mask,
                        rngs=None if key is None else {"dropout": _block_key(key, name)},
                        mutable=["batch_stats"],
                    )
            except InvalidRngError:
                raise JaxflError(
                    f"{self.name} has dropout in its block {name!r}; pass a key to train it."
                ) from None
            outputs.append(x.astype(jnp.result_type(float)))
            updated[name] = new.get("batch_stats", {})
        return tuple(outputs), updated

    def taps(self, params: dict, stats: dict, x: jax.Array, depths: tuple[int, ...]) -> tuple[jax.Array, ...]:
        """Returns inner outputs by depth, counted in convolutions of the main path.

        Args:
            params: As for `apply`.
            stats: As for `apply`.
            x: As for `apply`; the blocks run in evaluation mode.
            depths: 1 is the first convolution. An output is taken after norm and activation and
                before pooling; the last one of a `BasicBlock` before the sum with the shortcut.

        Returns:
            One (B, H', W', C') for each depth, in the order of `depths`.

        Raises:
            JaxflError: If the model has no convolution at one of the depths.
        """
        outputs = []
        params, x = self._reduced((params, x))
        for name, module in self.blocks:
            variables = {"params": params[name], "batch_stats": stats.get(name, {})}
            with self._convolving(x.shape[0]):
                x, new = module.apply(variables, x, train=False, mask=None, mutable=["intermediates"])
            outputs += new.get("intermediates", {}).get("convs", ())
        for depth in depths:
            if not 1 <= depth <= len(outputs):
                raise JaxflError(
                    f"{self.name} has {len(outputs)} convolutions, none at depth {depth}; "
                    f"choose depths from 1 to {len(outputs)}."
                )
        return tuple(outputs[depth - 1].astype(jnp.result_type(float)) for depth in depths)

    @functools.cached_property
    def size(self) -> int:
        """Number of parameters; BatchNorm's scale and bias count, its statistics do not."""
        return sum(leaf.size for leaf in jax.tree.leaves(self._like.params))

    @functools.cached_property
    def normalised(self) -> bool:
        """Whether the model has BatchNorm statistics."""
        return bool(jax.tree.leaves(self._like.stats))

    def _reduced(self, tree):
        """The same floats in the precision that blocks compute in."""
        if self.precision == "full":
            return tree
        return jax.tree.map(lambda leaf: leaf.astype(self.precision), tree)

    def _convolving(self, batch: int):
        """The context in which blocks are applied to so many examples."""
        return using(suited(batch, self._narrowest) if self.convolution == "auto" else self.convolution)

    @functools.cached_property
    def _narrowest(self) -> int:
        """The least output channels of the model's convolutions."""
        kernels = (leaf.shape for leaf in jax.tree.leaves(self._like.params) if leaf.ndim == 4)
        return min((shape[-1] for shape in kernels), default=1)

    @property
    def _like(self) -> Weights:
        """Shapes and dtypes of the weights."""
        return jax.eval_shape(self.init, jax.random.key(0))


def _block_key(key: jax.Array, name: str) -> jax.Array:
    """Returns the key of a block, the same in every slice of the model."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))
