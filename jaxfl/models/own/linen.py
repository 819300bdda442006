"""Flax Linen modules as models."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxfl.config.own_code import in_a_line, line_of
from jaxfl.errors import JaxflError
from jaxfl.models.model import Model, Weights, are_tokens, input_dtype, plain
from jaxfl.models.own.chain import chain
from jaxfl.models.own.intercept import in_front
from jaxfl.models.own.modes import modes, require_modes
from jaxfl.models.own.walk import Network, Path, real_rows

COLLECTIONS = "params", "batch_stats"


def from_linen(
    name: str,
    module: nn.Module,
    shape: tuple[int, ...],
    classes: int,
    *,
    head: str | None = None,
    blocks: Sequence[str] | None = None,
) -> Model:
    """Make a model of a Flax Linen module: ``module(x)`` maps images (B, H, W, C) to logits (B, classes).

    Its `__call__` may have one more parameter that says whether it trains: ``train``, ``training`` or
    ``is_training``, or ``deterministic``, which is the opposite. BatchNorm leaves out the padding of a batch.
    Dropout gets a key.

    Args:
      name: name of the architecture.
      module: the network, not bound to weights.
      shape: (H, W, C) of an image.
      classes: number of classes.
      head: name of the layer with which the head begins; by default the last one with weights that does more
        than normalise.
      blocks: names of the layers with which blocks begin; by default all with weights where one can begin,
        except those that only normalise.

    Raises:
      JaxflError: naming file and line, if it cannot be called like this, a block cannot begin with such a
        layer, or it has variables besides parameters and statistics.
    """
    if not isinstance(module, nn.Module):
        raise JaxflError(f"{name} is a {type(module).__name__}; give from_linen a flax.linen.Module.")
    where = line_of(type(module))
    require_modes(type(module))
    fields = {field.name: getattr(module, field.name) for field in dataclasses.fields(module)}
    lists: Any = {field: tuple(value) for field, value in fields.items() if isinstance(value, list)}
    module = module.clone(**lists)  # as those of nn.Sequential
    try:
        hash(module)
    except TypeError as error:
        raise JaxflError(
            f"{where}: {name} has a field that can change ({in_a_line(error)}); write tuples for lists."
        ) from None
    return chain(name, Linen(module, plain(shape)), classes, head=head, blocks=blocks)


@dataclasses.dataclass(frozen=True)
class Linen(Network):
    """A Linen module as a `Network`."""

    module: nn.Module
    shape: tuple[int, ...]

    @property
    def kind(self):
        """Class of the module."""
        return type(self.module)

    def draw(self, key):
        """Draw initial weights by Linen's `init`."""
        x = jax.ShapeDtypeStruct((1, *self.shape), input_dtype(are_tokens(self.shape)))
        variables = nn.meta.unbox(self.module.lazy_init(key, x, **modes(self.module.__call__, False)))
        others = [collection for collection in variables if collection not in COLLECTIONS]
        if others:
            raise JaxflError(
                f"{line_of(self.kind)}: it has variables in {', '.join(others)}; a network has only "
                "parameters (params) and statistics (batch_stats)."
            )
        return self.given(variables)

    def given(self, variables):
        """Return the flat weights in variables that `init` or training returned."""
        variables = nn.meta.unbox(variables)
        return Weights(*(_flat(dict(variables.get(collection, {}))) for collection in COLLECTIONS))

    def run(self, weights, x, walk, *, train, key, mask):
        """Run the module with its layers' calls intercepted."""

        def forward(module, x):
            def through(called):
                def intercept(call, inputs, options, context):
                    if context.method_name != "__call__":
                        return call(*inputs, **options)
                    inputs, options = in_front(type(context.module).__call__, inputs, options)
                    if isinstance(context.module, nn.BatchNorm) and mask is not None:
                        rows = real_rows(mask, inputs[0], line_of(self.kind))
                        options = {"mask": rows} | options
                    if len(context.module.path) != 1 or not inputs:
                        return call(*inputs, **options)
                    value, *others = inputs
                    return called(
                        context.module.name,
                        context.module,
                        value,
                        lambda value: call(value, *others, **options),
                    )

                with nn.intercept_methods(intercept):
                    return module(x, **modes(module.__call__, train))

            return walk.through(through)

        variables = {
            collection: unflatten_dict({_with(path, "/", ":"): leaf for path, leaf in part.items()})
            for collection, part in zip(COLLECTIONS, weights, strict=True)
        }
        keys = None if key is None else {"dropout": key, "params": jax.random.fold_in(key, 0)}
        y, new = self.module.apply(variables, x, rngs=keys, mutable=["batch_stats"], method=forward)
        return y, _flat(new.get("batch_stats", {}))


def _flat(collection) -> dict[Path, Any]:
    """Return variables by their paths; Dense_0/kernel/scale, a single name of nn.WeightNorm, gets colons."""
    return {_with(path, ":", "/"): leaf for path, leaf in flatten_dict(collection).items()}


def _with(path: Path, new: str, old: str) -> Path:
    return tuple(name.replace(old, new) for name in path)
