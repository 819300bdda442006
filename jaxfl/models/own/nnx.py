"""Flax NNX modules as models."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.interpreters import partial_eval

from jaxfl.config.own_code import line_of, require_call
from jaxfl.errors import JaxflError
from jaxfl.models.model import Model, Weights, plain
from jaxfl.models.norms import counted
from jaxfl.models.own.chain import chain
from jaxfl.models.own.intercept import intercepted, layers
from jaxfl.models.own.modes import modes, require_modes
from jaxfl.models.own.walk import Network, Walk, images, leaves, real_rows


def from_nnx(
    name: str,
    make: Callable[[nnx.Rngs], nnx.Module],
    shape: tuple[int, ...],
    classes: int,
    *,
    head: str | None = None,
    blocks: Sequence[str] | None = None,
) -> Model:
    """Make a model of a Flax NNX module: ``make(rngs)(x)`` maps images (B, H, W, C) to logits (B, classes).

    It trains after its method ``train()``, not after ``eval()``; a parameter of its `__call__` may say so as
    well, as in `from_linen`. BatchNorm leaves out the padding of a batch. Each stream of random numbers has
    its own key.

    `make` makes the module, ``lambda rngs: Net(rngs=rngs)``. All else is as in `from_linen`; a layer is named
    by its attribute, ``layers_0`` the first entry of a list.

    Raises:
      JaxflError: naming file and line, if the module cannot be made or called like this, a block cannot begin
        with such a layer, or it has variables besides parameters (Param) and statistics (BatchStat).
    """
    if isinstance(make, nnx.Module):
        raise JaxflError(
            f"{line_of(type(make))}: make is a module; give a function that makes it, lambda rngs: "
            "Net(rngs=rngs)."
        )
    require_call("make", make, "rngs")
    network = Nnx(make, plain(shape))
    if not issubclass(network.kind, nnx.Module):
        raise JaxflError(f"{line_of(make)}: make must return a flax.nnx.Module.")
    require_modes(network.kind)
    return chain(name, network, classes, head=head, blocks=blocks)


class Parts(NamedTuple):
    """Parts of a module: its form, and its variables by their kinds."""

    graph: Any
    params: Any
    stats: Any
    draws: Any
    others: Any


def parted(module: nnx.Module) -> Parts:
    """Split a module into its parts."""
    return Parts(*nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngState, ...))


def named(state) -> dict[tuple[str, ...], Any]:
    """Return variables by their paths."""
    paths = [tuple(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    return dict(zip(paths, jax.tree.leaves(state), strict=True))


@dataclasses.dataclass(frozen=True)
class Nnx(Network):
    """An NNX module as a `Network`."""

    make: Callable
    shape: tuple[int, ...]

    @property
    def kind(self):
        """Class of the module."""
        return type(self._abstract)

    def draw(self, key):
        """Draw the module's initial weights."""
        return self.given(self.make(nnx.Rngs(key)))

    def given(self, module):
        """Return the weights of a module."""
        parts = parted(module)
        return Weights(named(parts.params), named(parts.stats))

    def run(self, weights, x, walk, *, train, key, mask):
        """Run the module with its layers' calls intercepted."""
        parts = self._form
        params, stats = (
            jax.tree.unflatten(jax.tree.structure(form), [part[path] for path in named(form)])
            for form, part in zip((parts.params, parts.stats), weights, strict=True)
        )
        draws = _drawing(parts.draws, key)
        counts = jax.tree.leaves(draws)
        module = nnx.merge(parts.graph, params, stats, draws)
        module.train() if train else module.eval()
        names = {id(layer): name for name, layer in layers(module, nnx.Module).items()}
        norms = [norm for _, norm in nnx.iter_modules(module) if isinstance(norm, nnx.BatchNorm)]

        def through(called):
            def intercept(layer, call, inputs, options):
                if isinstance(layer, nnx.BatchNorm):
                    call = counted(call, layer.axis)
                    if mask is not None:
                        options = {"mask": real_rows(mask, inputs[0], line_of(self.kind))} | options
                if id(layer) not in names or not inputs:
                    return call(*inputs, **options)
                value, *others = inputs
                return called(names[id(layer)], layer, value, lambda value: call(value, *others, **options))

            with intercepted([*layers(module, nnx.Module).values(), *norms], intercept):
                return module(x, **modes(module.__call__, train))

        y, after = walk.through(through), parted(module)
        drew = any(map(operator.is_not, counts, jax.tree.leaves(after.draws)))
        if key is None and drew and _depends_on_draws(self, train):
            raise JaxflError(
                f"{line_of(self.kind)}: {self.kind.__name__} draws at random; pass a key to train it."
            )
        return y, named(after.stats)

    @functools.cached_property
    def _form(self) -> Parts:
        parts = parted(self._abstract)
        plain = {  # arrays that are attributes themselves
            "/".join((*map(str, path), name))
            for path, part in nnx.iter_modules(self._abstract)
            for name, value in vars(part).items()
            if isinstance(value, jax.Array)
        }
        others = sorted({"/".join(path) for path in named(parts.others)} | plain)
        if others:
            raise JaxflError(
                f"{line_of(self.make)}: the module has variables ({', '.join(others)}) besides parameters "
                "(Param) and statistics (BatchStat); make them one of these, or compute them in __call__."
            )
        return parts

    @functools.cached_property
    def _abstract(self) -> nnx.Module:
        return nnx.eval_shape(lambda: self.make(nnx.Rngs(jax.random.key(0))))


@functools.cache
def _depends_on_draws(network: Nnx, train: bool) -> bool:
    """Return whether random numbers have an effect; the first state of an nnx.RNN is zeros, not drawn."""

    def run(key, weights, x):
        return network.run(weights, x, Walk(), train=train, key=key, mask=None)

    program = jax.make_jaxpr(run)(jax.random.key(0), leaves(network), images(network)).jaxpr
    return partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[1][0]


def _drawing(draws, key):
    """Return streams of random numbers that begin with a key."""
    key = jax.random.key(0) if key is None else key
    found, structure = jax.tree.flatten(draws)

    def start(i, leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(key, i) if is_key else jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.unflatten(structure, [start(i, leaf) for i, leaf in enumerate(found)])
