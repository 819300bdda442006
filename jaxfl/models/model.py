"""A model: an ordered tuple of named blocks, the last of which is one linear classifier.

All that personalised federated learning does to a network - keep the head, share the first layers, mix some
blocks, normalise locally - is a choice among these names. Parameters and BatchNorm statistics are dicts keyed
by them. Only the model has the order of the blocks, because JAX sorts the keys of a dict.
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from jaxfl.errors import JaxflError
from jaxfl.models.blocks import CONVOLVED, DENSE
from jaxfl.models.conv import suited, using
from jaxfl.models.norms import report
from jaxfl.models.repeated import Outline, loop, outline, runs
from jaxfl.tasks import CLASSES, Task

# How each precision multiplies: by default, JAX uses fewer digits of float32 on accelerators.
PRODUCTS = {"full": "float32", "tf32": "tensorfloat32", "bfloat16": "default"}


class Weights(NamedTuple):
    """Parameters and statistics of a model: every block has an entry in both, perhaps an empty one.

    Attributes:
      params: {block name: trained leaves}.
      stats: {block name: running BatchNorm statistics}.
    """

    params: dict
    stats: dict


class Block(NamedTuple):
    """A named part of a model.

    Attributes:
      name: unique within the model.
      module: Flax Linen module, called as `module(x, train=bool, mask=(B,) bool or None)`, or an object with
        its `lazy_init` and `apply` (see `jaxfl.models.own`).
    """

    name: str
    module: Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A network without its weights; hashable, so it may be a static argument or a dict key.

    Attributes:
      name: name of the architecture.
      blocks: in the order in which they are applied.
      shape: shape of one example that the first block takes: (H, W, C), (T,) for tokens, or (d,) for a head.
      classes: number of classes, or of the outputs of another task.
      note: one sentence for the user to read, or nothing.
      convolution: implementation of convolutions, see `jaxfl.models.conv`; "auto" suits the backend and the
        shapes.
      precision: precision in which blocks compute, a key of `PRODUCTS`; parameters and BatchNorm's statistics
        keep theirs.
      task: what the outputs are for.
      tokens: whether the first block takes tokens (B, T): integers, -1 after the end of a row.
      choice: the choice, as in --models, that has made it; models that differ only in this are equal.
    """

    name: str
    blocks: tuple[Block, ...]
    shape: tuple[int, ...]
    classes: int
    note: str = ""
    convolution: str = "auto"
    precision: str = "full"
    task: Task = CLASSES
    tokens: bool = False
    choice: str = dataclasses.field(default="", compare=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the blocks, in order."""
        return tuple(block.name for block in self.blocks)

    @functools.cached_property
    def body(self) -> "Model":
        """The feature extractor: all blocks except the last; its output is z (B, d)."""
        return dataclasses.replace(self, blocks=self.blocks[:-1])

    @functools.cached_property
    def head(self) -> "Model":
        """The classifier: the last block, from z (B, d) to logits (B, classes)."""
        return self.part(len(self.blocks) - 1, len(self.blocks))

    def part(self, start: int, stop: int) -> "Model":
        """Return the model of the blocks from number `start` up to `stop`, without that."""
        blocks, tokens = self.blocks[start:stop], self.tokens and start == 0
        return dataclasses.replace(self, blocks=blocks, shape=self.shapes[start], tokens=tokens)

    def examples(self, number: int = 1) -> jax.ShapeDtypeStruct:
        """Return the form of a batch that the first block takes."""
        return jax.ShapeDtypeStruct((number, *self.shape), input_dtype(self.tokens))

    @property
    def form(self) -> Weights:
        """Shapes of its weights, and their dtypes under JAX's current default float dtype."""
        params, stats = {}, {}
        for i, (name, module) in enumerate(self.blocks):
            variables = outline(module, self.shapes[i], input_dtype(self.tokens and i == 0)).variables
            params[name], stats[name] = variables.get("params", {}), variables.get("batch_stats", {})
        return Weights(params, stats)

    def init(self, key: jax.Array) -> Weights:
        """Draw initial weights; those of a block depend only on `key` and on its name."""
        params, stats = {}, {}
        for i, (name, module) in enumerate(self.blocks):
            x = self.part(i, i + 1).examples()
            variables = module.lazy_init(_block_key(key, name), x, train=False, mask=None)
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
        """Run the blocks in order.

        Args:
          params: parameters of at least this model's blocks.
          stats: statistics of at least this model's blocks.
          x: images (B, H, W, C), or the first block's input.
          train: whether the blocks train, or the names of those that do. In the others BatchNorm and dropout
            are in evaluation mode.
          key: key for dropout; that of a block depends on its name, not on its place in the model.
          mask: (B,) bool, True for real rows: only these enter the statistics of BatchNorm.

        Returns:
          The last block's output, (B, classes) for a whole model, and this model's statistics.

        Raises:
          JaxflError: if a block with dropout trains and there is no key.
        """
        y, updated, _ = self.apply_with_taps(params, stats, x, (), train=train, key=key, mask=mask)
        return y, updated

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
        """Run the blocks in order, as `apply`, but return the output of every block."""
        found, updated = [], {}
        for i in range(len(self.blocks)):
            x, new = self.part(i, i + 1).apply(params, stats, x, train=train, key=key, mask=mask)
            found.append(x)
            updated |= new
        return tuple(found), updated

    def apply_with_taps(
        self,
        params: dict,
        stats: dict,
        x: jax.Array,
        depths: tuple[int, ...],
        *,
        train: bool | tuple[str, ...],
        key: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, dict, tuple[jax.Array, ...]]:
        """Run the blocks in order, as `apply`, and return inner outputs at `depths` as well.

        Depths are numbers of convolutions on the main path, without those of shortcuts; 1 is the first. The
        output of a convolution is taken after the norm if one follows directly, before activation, pooling
        and the sum with a shortcut; the last one of a DenseNet after its last norm.

        Returns:
          What `apply` returns, and one (B, H', W', C') for each depth, in the order of `depths`.

        Raises:
          JaxflError: if the model has no convolution at one of the depths, or as `apply`.
        """
        for depth in depths:
            if not 1 <= depth <= self.convolution_count:
                raise JaxflError(
                    f"{self.name} has {self.convolution_count} convolutions, none at depth {depth}; "
                    f"choose depths from 1 to {self.convolution_count}."
                )
        ends = list(itertools.accumulate(block.convolution_count for block in self._outlines))
        tapped = {bisect.bisect_left(ends, depth) for depth in depths}
        trains = [train if isinstance(train, bool) else name in train for name in self.names]
        report(self.needing_two_rows & {*itertools.compress(self.names, trains)})
        apart = [(trains[i], i if i in tapped else None) for i in range(len(self.blocks))]
        updated, taps = {}, {}
        params, x = self._reduced((params, x))
        for run in runs([block.module for block in self.blocks], self.shapes, apart):
            i, names = run[0], [self.names[i] for i in run]
            call = functools.partial(
                self._call, self.blocks[i], train=trains[i], mask=mask, tapped=i in tapped
            )
            variables = [{"params": params[name], "batch_stats": stats.get(name, {})} for name in names]
            keys = [_block_key(key, name) if trains[i] and key is not None else None for name in names]
            if len(run) == 1:
                x, new, left = call(variables[0], keys[0], x)
                updated[names[0]] = new
                taps |= enumerate(left, ends[i] - len(left) + 1)
            else:
                growth = self._outlines[i].output[-1] - self.shapes[i][-1]
                x, new = loop(call, variables, keys, growth, x)
                updated |= zip(names, new, strict=True)
        full = jnp.result_type(float)
        return x.astype(full), updated, tuple(taps[depth].astype(full) for depth in depths)

    def taps(self, params: dict, stats: dict, x: jax.Array, depths: tuple[int, ...]) -> tuple[jax.Array, ...]:
        """Return inner outputs in evaluation mode; when compiled, nothing after the deepest is computed.

        Arguments, returned outputs and errors are those of `apply_with_taps`.
        """
        return self.apply_with_taps(params, stats, x, depths, train=False)[2]

    def norm_inputs(self, params: dict, stats: dict, x: jax.Array) -> tuple[jax.Array, ...]:
        """Return what norms see of images (B, H, W, C) in evaluation mode, or would see if there were any.

        Returns:
          The output (B, H', W', C') of every convolution before its norm, those of shortcuts included;
          without convolutions, the output (B, d) of every hidden layer before its activation.
        """
        found = {CONVOLVED: [], DENSE: []}
        params, x = self._reduced((params, x))
        for name, module in self.body.blocks:
            variables = {"params": params[name], "batch_stats": stats.get(name, {})}
            with self._computing(x.shape[0]):
                applied: Any = module.apply(variables, x, train=False, mask=None, mutable=["intermediates"])
            x, left = applied
            for path, leaf in jax.tree.leaves_with_path(left):
                kinds = {entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)}
                for kind in kinds & found.keys():
                    found[kind].append(leaf.astype(jnp.result_type(float)))
        return tuple(found[CONVOLVED] or found[DENSE])

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Input shape of each block, for one example."""
        return (self.shape, *(block.output for block in self._outlines))[: len(self.blocks)]

    @property
    def output(self) -> tuple[int, ...]:
        """Output shape of the last block, for one example."""
        return self._outlines[-1].output

    @functools.cached_property
    def convolution_count(self) -> int:
        """Number of convolutions on the main path, the greatest depth of a tap."""
        return sum(block.convolution_count for block in self._outlines)

    @functools.cached_property
    def size(self) -> int:
        """Number of parameters; BatchNorm's scale and bias count, its statistics do not."""
        return sum(leaf.size for leaf in self._leaves("params"))

    @functools.cached_property
    def normalised(self) -> bool:
        """Whether the model has BatchNorm statistics."""
        return bool(self._leaves("batch_stats"))

    @functools.cached_property
    def needing_two_rows(self) -> frozenset[str]:
        """Names of the blocks that cannot train on a batch of one row, see `jaxfl.models.norms`."""
        needs = (block.needs_two_rows for block in self._outlines)
        return frozenset(itertools.compress(self.names, needs))

    def _call(
        self, block: Block, variables, key, x, *, train: bool, mask, tapped: bool
    ) -> tuple[jax.Array, dict, tuple]:
        """Apply one block; return its output, its statistics and, if it is tapped, its taps."""
        try:
            with self._computing(x.shape[0]):
                applied: Any = block.module.apply(
                    variables,
                    x,
                    train=train,
                    mask=mask,
                    rngs=None if key is None else {"dropout": key},
                    mutable=["batch_stats", "intermediates"] if tapped else ["batch_stats"],
                )
        except InvalidRngError:
            raise JaxflError(
                f"{self.name} has dropout in its block {block.name!r}; pass a key to train it."
            ) from None
        x, new = applied
        return x, new.get("batch_stats", {}), new.get("intermediates", {}).get("taps", ())

    def _reduced(self, tree):
        """Cast floats to the dtype in which blocks compute."""
        if self.precision != "bfloat16":
            return tree

        def reduced(leaf):
            return leaf.astype(jnp.bfloat16) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        return jax.tree.map(reduced, tree)

    def convolution_for(self, batch: int) -> str:
        """Return the implementation for a batch of this size, a key of `CONVOLUTIONS`."""
        return suited(batch, self._narrowest) if self.convolution == "auto" else self.convolution

    @contextlib.contextmanager
    def _computing(self, batch: int):
        """Set the context in which blocks are applied to a batch of this size."""
        with using(self.convolution_for(batch)), jax.default_matmul_precision(PRODUCTS[self.precision]):
            yield

    @functools.cached_property
    def _narrowest(self) -> int:
        """Smallest number of output channels of the model's convolutions."""
        kernels = (leaf.shape for leaf in self._leaves("params") if leaf.ndim == 4)
        return min((shape[-1] for shape in kernels), default=1)

    @functools.cached_property
    def _outlines(self) -> tuple[Outline, ...]:
        shape, found = self.shape, []
        for i, (_, module) in enumerate(self.blocks):
            found.append(outline(module, shape, input_dtype(self.tokens and i == 0)))
            shape = found[-1].output
        return tuple(found)

    def _leaves(self, collection: str) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of all parameters, or of all statistics."""
        return jax.tree.leaves([block.variables.get(collection, {}) for block in self._outlines])


def input_dtype(tokens: bool) -> jnp.dtype:
    """Return the type of what a block takes: tokens are int32, all else has JAX's default float type."""
    return jnp.dtype(jnp.int32) if tokens else jnp.dtype(jnp.result_type(float))


class TokenShape(tuple):
    """The shape (T,) of a row of tokens, as factories are given it: their networks get integers."""

    def __eq__(self, other):
        return type(other) is TokenShape and tuple(self) == tuple(other)

    def __hash__(self):
        return hash((TokenShape, tuple(self)))


def are_tokens(shape: Sequence[int]) -> bool:
    """Return whether a factory is given the shape of tokens."""
    return isinstance(shape, TokenShape)


def plain(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape as a tuple that still says whether it is of tokens."""
    return shape if isinstance(shape, TokenShape) else tuple(shape)


def _block_key(key: jax.Array, name: str) -> jax.Array:
    """Return the key of a block, the same in every slice of the model."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))
