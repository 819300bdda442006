"""Equinox modules as models."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxfl.config.own_code import line_of, require_call
from jaxfl.errors import JaxflError
from jaxfl.models.model import Model, Weights, plain
from jaxfl.models.norms import counted
from jaxfl.models.own.chain import chain
from jaxfl.models.own.functions import accepted
from jaxfl.models.own.intercept import intercepted, layers
from jaxfl.models.own.modes import modes, require_modes
from jaxfl.models.own.walk import Network, Path

BATCH = "batch"  # the axis that BatchNorm averages over


def from_equinox(
    name: str,
    make: Callable[[jax.Array], Any],
    shape: tuple[int, ...],
    classes: int,
    *,
    head: str | None = None,
    blocks: Sequence[str] | None = None,
) -> Model:
    """Make a model of an Equinox module: ``make(key)(x)`` maps one image (C, H, W) to logits (classes,).

    The module is mapped over a batch under the axis name "batch", which its BatchNorm must use. If its
    `__call__` has the parameters ``state`` and ``key``, it gets them; with a state it returns ``(y, state)``.
    Dropout is off in evaluation. Equinox's BatchNorm has no mask: an epoch's last batch, if it is shorter
    than others, is filled up with its own rows, taken in turn.

    `make` makes the module, ``lambda key: Net(key=key)``. All else is as in `from_linen`; a layer is named
    by its attribute, ``layers_0`` the first entry of a list.

    Raises:
      JaxflError: naming file and line, if the module cannot be made or called like this, a block cannot begin
        with such a layer, or it holds arrays that are not floats.
    """
    if isinstance(make, eqx.Module):
        raise JaxflError(
            f"{line_of(type(make))}: make is a module; give a function that makes it, lambda key: "
            "Net(key=key)."
        )
    require_call("make", make, "key")
    network = Equinox(make, plain(shape))
    if not issubclass(network.kind, eqx.Module):
        raise JaxflError(f"{line_of(make)}: make must return an equinox.Module.")
    require_modes(network.kind, **accepted(network.kind.__call__, {"state": ..., "key": ...}))
    return chain(name, network, classes, head=head, blocks=blocks)


@dataclasses.dataclass(frozen=True)
class Equinox(Network):
    """An Equinox module as a `Network`."""

    make: Callable
    shape: tuple[int, ...]
    batched = False

    @property
    def kind(self):
        """Class of the module."""
        return type(self._abstract[0])

    def inward(self, x):
        """Convert (B, H, W, C) to (B, C, H, W)."""
        return jnp.moveaxis(x, -1, 1) if x.ndim == 4 else x

    def outward(self, y):
        """Convert (B, C, H, W) to (B, H, W, C)."""
        return jnp.moveaxis(y, 1, -1) if y.ndim == 4 else y

    def draw(self, key):
        """Draw the module's initial weights."""
        module, state = eqx.nn.make_with_state(self.make)(key)
        for path, leaf in named(eqx.filter(module, eqx.is_array)).items():
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise JaxflError(
                    f"{line_of(self.kind)}: {'/'.join(path)} is an array of {leaf.dtype}; make it one of "
                    "floats, or a static field."
                )
        return self.given(module, state)

    def given(self, module, state=None):
        """Return the weights of a module and its state."""
        arrays = named(eqx.filter(module, eqx.is_inexact_array))
        return Weights(arrays, floats(state_paths(module, state), state) if state else {})

    def run(self, weights, x, walk, *, train, key, mask):
        """Run the module, on one example each, with its layers' calls intercepted."""
        form, state_form = self._abstract
        shapes, rest = eqx.partition(form, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        arrays = [weights.params[path] for path in named(shapes)]
        module = eqx.combine(jax.tree.unflatten(jax.tree.structure(shapes), arrays), rest)
        module = eqx.nn.inference_mode(module, not train)
        paths = state_paths(form, state_form)
        state = like(state_form, [weights.stats[path] for path in paths])
        names = {id(layer): name for name, layer in layers(module, eqx.Module).items()}
        norms = list(filter(_is_norm, jax.tree.leaves(module, is_leaf=_is_norm)))

        def one(x, z, key):
            newest = state

            def through(called):
                nonlocal newest

                def intercept(layer, call, inputs, options):
                    nonlocal newest
                    if _is_norm(layer):
                        call = counted(call, 0)
                    if id(layer) not in names:
                        return call(*inputs, **options)
                    newest = newest_of([newest, *inputs, *options.values()])
                    if not inputs:
                        return call(**options)
                    value, *others = inputs

                    def alone(value):
                        nonlocal newest
                        y = call(value, *others, **options)
                        newest = newest_of([newest, *(y if isinstance(y, tuple) else ())])
                        return exchanged(y, eqx.nn.State, None)

                    return exchanged(called(names[id(layer)], layer, value, alone), type(None), newest)

                with intercepted([*layers(module, eqx.Module).values(), *norms], intercept):
                    given = accepted(module.__call__, {"state": state, "key": key})
                    y = module(x, **given, **modes(module.__call__, train))
                if isinstance(y, tuple) and [type(entry) for entry in y[1:]] == [eqx.nn.State]:
                    y, newest = y[0], newest_of([newest, y[1]])
                return y

            return dataclasses.replace(walk, z=z).through(through), newest

        z = x if walk.start is None else walk.z
        if train and mask is not None:
            x, z = x[filled(mask)], z[filled(mask)]
        keys = None if key is None else jax.random.split(key, len(x))
        try:
            y, new = jax.vmap(
                one, in_axes=(0, 0, None if key is None else 0), out_axes=(0, None), axis_name=BATCH
            )(x, z, keys)
        except RuntimeError as error:
            if key is not None or "key" not in str(error):
                raise
            raise JaxflError(f"{line_of(self.kind)}: {error} Pass a key to train it.") from None
        return y, floats(paths, new)

    @functools.cached_property
    def _abstract(self) -> tuple[Any, eqx.nn.State]:
        return eqx.filter_eval_shape(eqx.nn.make_with_state(self.make), jax.random.key(0))


def filled(mask: jax.Array) -> jax.Array:
    """Return rows of a batch (B,): real ones in their places, and again, in turn, in those of padding."""
    rows = jnp.arange(len(mask), dtype=jnp.int32)
    first = jnp.argsort(~mask).astype(jnp.int32)  # real rows first, in order
    return jnp.where(mask, rows, first[rows % jnp.maximum(mask.sum(dtype=jnp.int32), 1)])


# ---- weights and states


def named(module: Any) -> dict[Path, Any]:
    """Return the arrays of a module by their paths."""
    return {_path(path): leaf for path, leaf in jax.tree.leaves_with_path(module)}


def state_paths(module: Any, state: eqx.nn.State) -> list[Path]:
    """Return the paths of a state's arrays, in order: beside the parameters of the layer that has them."""
    found = []
    for path, index in jax.tree.leaves_with_path(module, is_leaf=_is_index):
        if _is_index(index):
            *layer, name = _path(path)
            count = len(jax.tree.leaves(state.get(index)))
            found += [(*layer, f"{name}_{i}" if count > 1 else name) for i in range(count)]
    return found


def floats(paths: list[Path], state: eqx.nn.State) -> dict[Path, jax.Array]:
    """Return the arrays of a state, by paths, as floats, because those of clients are averaged."""
    dtype = jnp.result_type(float)
    return {path: leaf.astype(dtype) for path, leaf in zip(paths, jax.tree.leaves(state), strict=True)}


def like(form: eqx.nn.State, leaves: list[jax.Array]) -> eqx.nn.State:
    """Invert `floats`; flags and counters are rounded."""

    def cast(leaf, array):
        array = array if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.round(array)
        return array.astype(leaf.dtype)

    shapes, structure = jax.tree.flatten(form)
    return jax.tree.unflatten(structure, list(map(cast, shapes, leaves)))


def newest_of(values: list[Any]) -> eqx.nn.State:
    """Return the last state among some values."""
    return [value for value in values if isinstance(value, eqx.nn.State)][-1]


def exchanged(y: Any, kind: type, new: Any) -> Any:
    """Return a layer's output with `new` in place of everything of a kind."""
    return tuple(new if isinstance(part, kind) else part for part in y) if isinstance(y, tuple) else y


def _is_index(leaf: Any) -> bool:
    return isinstance(leaf, eqx.nn.StateIndex)


def _is_norm(layer: Any) -> bool:
    return isinstance(layer, eqx.nn.BatchNorm)


def _path(path) -> Path:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
