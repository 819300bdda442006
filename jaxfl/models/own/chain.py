"""A network written as one module, divided into blocks where it is a chain.

The module is watched while it calls its layers: the modules that are its attributes. A block begins where one
of them is called and covers everything up to the next block, including activations, pooling and reshaping
between two calls. To apply one block, the whole module is called: layers before the block return zeros, the
block's input replaces that of its first layer, and the call ends at the first layer of the next block. None
of the zeros affects the output, so the compiler drops everything computed with them.

So a block can begin only where everything after depends on nothing but that layer's input: no connection goes
around it, and no weights are used on both sides. The traced program shows both.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.interpreters import partial_eval

from jaxfl.config.own_code import line_of
from jaxfl.errors import JaxflError, nearest
from jaxfl.models.model import Block, Model, Weights, are_tokens
from jaxfl.models.own.functions import OwnBlock
from jaxfl.models.own.modes import require_switch
from jaxfl.models.own.walk import Network, Path, Walk, batched, calls, drawn, images, leaves

# ---- a block


@dataclasses.dataclass(frozen=True)
class Section(OwnBlock):
    """A block of a network."""

    network: Network  # network that it is part of
    start: int | None  # see `Walk`
    stop: int | None  # see `Walk`
    paths: frozenset[Path]  # paths of its leaves

    @property
    def kind(self):
        """Classes of the layers in it."""
        return "+".join(call.kind for call in calls(self.network)[self.start or 0 : self.stop])

    @property
    def where(self):
        """Place where the network is defined."""
        return line_of(self.network.kind)

    def draw(self, key, x):
        """Draw the whole network's weights and return the block's part.

        Raises:
          JaxflError: if the network gives it inputs of another shape.
        """
        taken = images(self.network) if self.start is None else calls(self.network)[self.start].input
        taken = taken if self.network.batched or self.start is None else batched(taken)
        wanted = jax.eval_shape(self.network.outward, taken).shape[1:]
        if x.shape[1:] != wanted:
            raise JaxflError(
                f"{self.where}: a block of {self.network.kind.__name__} ({self.kind}) takes "
                f"examples of shape {wanted}, not {x.shape[1:]}; give the network itself an option for that."
            )
        return Weights(*(self._named(part) for part in drawn(self.network, key)))

    def run(self, weights, x, *, train, key, mask):
        """Run the network from the block's first layer to the next one's."""
        everything = Weights(
            *(
                jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), whole)
                | self._own(whole, flatten_dict(part))
                for whole, part in zip(leaves(self.network), weights, strict=True)
            )
        )
        x = self.network.inward(x)
        image, walk = x, Walk(stop=self.stop)
        if self.start is not None:
            before = [_zeros(call.output, x) for call in calls(self.network, len(x))[: self.start]]
            walk = Walk(self.start, self.stop, x, before)
            image = _zeros(images(self.network, len(x)), x)
        y, stats = self.network.run(everything, image, walk, train=train, key=key, mask=mask)
        return self.network.outward(y), self._named(stats)

    @property
    def prefix(self) -> int:
        """Length of the prefix that all paths share: the name of the layer, if there is only one."""
        levels = zip(*(path[:-1] for path in self.paths), strict=False)
        return len(list(itertools.takewhile(lambda level: len(set(level)) == 1, levels)))

    def _own(self, whole: Collection[Path], part: dict[Path, Any]) -> dict[Path, Any]:
        """Return the leaves of a kind; an exported block has parameters and statistics in one."""
        return {path: part[path[self.prefix :]] for path in self.paths if path in whole}

    def _named(self, flat: dict[Path, Any]) -> dict:
        return unflatten_dict({path[self.prefix :]: flat[path] for path in flat if path in self.paths})


def _zeros(shapes: Any, x: jax.Array) -> Any:
    """Return arrays of 0 with these shapes; floats have the precision of x."""

    def of_leaf(leaf):
        return jnp.zeros(leaf.shape, x.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype)

    return jax.tree.map(of_leaf, shapes)


# ---- where blocks can begin


class Uses(NamedTuple):
    """Dependencies of the result of a part of a network."""

    paths: frozenset[Path]  # paths of the leaves that it uses, also for what only later parts take from it
    earlier: frozenset[int]  # numbers of the calls before the part whose outputs it uses; -1 is the image


def uses(network: Network, start: int | None, stop: int | None, with_outputs: bool = True) -> Uses:
    """Return what a part of a network depends on besides its input; arguments as in `Walk`."""
    found, weights, x = calls(network), leaves(network), images(network)
    z = x if start is None else found[start].input
    before = [call.output for call in found[: start or 0]]

    def part(weights, x, z, before):
        """Run the part in evaluation and in training, of which each may use what the other does not."""
        walk, key = Walk(start, stop, z, before, with_outputs=with_outputs), jax.random.key(0)
        return [
            network.run(weights, x, walk, train=train, key=key if train else None, mask=None)[0]
            for train in (False, True)
        ]

    if not network.batched and z is not x:
        z = batched(z)
    arguments = weights, x, z, before
    program = jax.make_jaxpr(part)(*arguments).jaxpr
    used = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[1]
    (params, stats), image, _, outputs = jax.tree.unflatten(jax.tree.structure(arguments), used)
    earlier = {i for i, output in enumerate(outputs) if any(jax.tree.leaves(output))}
    if image and start is not None:
        earlier.add(-1)
    return Uses(frozenset(path for path, is_used in (params | stats).items() if is_used), frozenset(earlier))


def chain(
    name: str, network: Network, classes: int, *, head: str | None = None, blocks: Sequence[str] | None = None
) -> Model:
    """Make a model of a network; `head` and `blocks` are as in `from_linen`.

    Raises:
      JaxflError: if there is no such layer, or a block cannot begin there.
    """
    where = line_of(network.kind)
    if isinstance(blocks, str):
        raise JaxflError(f"{where}: the blocks of {name} must be a list of names, not {blocks!r}.")
    found = calls(network)
    in_training = calls(network, train=True)
    if [call.layer for call in found] != [call.layer for call in in_training]:
        one, other = (", ".join(call.layer for call in of) for of in (in_training, found))
        raise JaxflError(
            f"{where}: {name} calls different layers in training ({one}) and in use ({other}); always call "
            "all of them, dropout with deterministic=not train."
        )
    require_switch(name, network)
    first = {}  # the first call of each layer
    for i, call in enumerate(found):
        first.setdefault(call.layer, i)
    places = [i for i, call in enumerate(found) if call.input is not None]
    # With outputs: a later part may use one that the result of its own part does not.
    parts = {ends: uses(network, *ends) for ends in itertools.pairwise([None, *places, None])}
    users = {}  # the parts that use a leaf
    for (start, _), part in parts.items():
        for path in part.paths:
            users.setdefault(path, []).append(-1 if start is None else start)

    @functools.cache
    def obstacle(i: int) -> str:
        """Return why no block can begin at a call, or nothing."""
        if i not in parts_from:
            return "it is not called with one batch of floats outside of every loop"
        if uses(network, i, None, with_outputs=False).earlier:
            return "a connection bypasses it"
        shared = next((path for path, of in users.items() if min(of) < i <= max(of)), None)
        return f"{'/'.join(shared)} is used before and after it" if shared else ""

    parts_from = {start: part for (start, _), part in parts.items() if start is not None}
    weighted = [i for i in places if parts_from[i].paths]
    for layer in [*(blocks or ()), *([head] if head else ())]:
        if layer not in first:
            raise JaxflError(f"{where}: {name} calls no layer {layer!r}; {nearest(layer, first)}")
    if not weighted:
        raise JaxflError(
            f"{where}: {name} calls no layer with weights that is an attribute of its own, outside of every "
            "loop and transformation; build it of such layers, or use from_functions."
        )
    shapes = {path: leaf.shape for part in leaves(network) for path, leaf in part.items()}

    def maps(i: int) -> bool:
        """Return whether a layer has more than vectors; one that only normalises begins no block."""
        return any(len(shapes[path]) > 1 for path in parts_from[i].paths)

    heads = [i for i in reversed(weighted) if maps(i)] or weighted[-1:]
    last = first[head] if head else next((i for i in heads if not obstacle(i)), weighted[0])

    by_default = [i for i in weighted if maps(i) and not obstacle(i)]
    wanted = [first[layer] for layer in blocks] if blocks else by_default
    for i in [last, *wanted]:
        if (why := obstacle(i)) and i != weighted[0]:
            raise JaxflError(
                f"{where}: no block of {name} can begin with {found[i].layer!r}: {why}; name another layer, "
                "or put all that belongs together into one module."
            )
    if blocks and (after := [i for i in wanted if i > last]):
        raise JaxflError(
            f"{where}: {found[after[0]].layer!r} is called after the head of {name}, which begins with "
            f"{found[last].layer!r}; name one before it, or another head."
        )
    # What embeds tokens is given no floats, and is all the same a block: it begins with the network.
    opening = -1 if are_tokens(network.shape) and parts[None, places[0]].paths else weighted[0]
    # Where a connection goes around the first layer, its block begins with the network.
    starts = sorted(i for i in {i for i in wanted if opening < i < last} | {last} if not obstacle(i))
    sections = []
    for start, stop in itertools.pairwise([None, *starts, None]):
        numbers = range(-1 if start is None else start, len(found) if stop is None else stop)
        own = (path for part in leaves(network) for path in part if _place(path, users) in numbers)
        titled = range(weighted[0]) if start is None and opening < 0 else weighted
        title = next((found[i].layer for i in titled if i in numbers), "input")
        sections.append(Block(title, Section(network, start, stop, frozenset(own))))
    tokens = are_tokens(network.shape)
    return Model(name, tuple(sections), tuple(network.shape), classes, tokens=tokens)


def _place(path: Path, users: dict[Path, list[int]]) -> int:
    """Return the first use of a leaf; for an unused one, such as a counter, that of its layer's leaves."""
    for length in range(len(path), 0, -1):
        near = [of[0] for other, of in users.items() if other[:length] == path[:length]]
        if near:
            return near[0]
    return -1
