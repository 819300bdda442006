"""Check, by shapes only, that jaxfl can run a network of the user's own."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from jaxfl.config.own_code import in_a_line, line_of, require_call
from jaxfl.errors import JaxflError
from jaxfl.models.model import Model
from jaxfl.models.own.functions import OwnBlock

EXAMPLES = 3
WRAPPERS = {  # by the package of a library's modules
    "flax.linen": "from_linen(NAME, MODULE, shape, classes)",
    "flax.nnx": "from_nnx(NAME, lambda rngs: MODULE, shape, classes)",
    "equinox": "from_equinox(NAME, lambda key: MODULE, shape, classes)",
}


def refuse_module(name: str, thing: Any) -> None:
    """Refuse a module of some library, or its class, in place of a model or its factory; say what to do."""
    kind = thing if isinstance(thing, type) else type(thing)
    for base in kind.__mro__:
        for package, wrapper in WRAPPERS.items():
            if base.__name__ == "Module" and f"{base.__module__}.".startswith(f"{package}."):
                raise JaxflError(
                    f"{line_of(kind)}: {name} is a module of {package}, {kind.__name__}; name a function "
                    f"(shape, classes) that returns jaxfl.models.own.{wrapper}."
                )


def check(name: str, model: Any, shape: tuple[int, ...], classes: int, every_token: bool = False) -> None:
    """Raise `JaxflError` if what a factory returned is no model for these images and classes.

    Raises:
      JaxflError: if it is not a `Model`, a block is not a Flax module or cannot be called as one, it takes
        other images, two blocks share a name, or it does not return (B, classes), or (B, T, classes).
    """
    refuse_module(f"what {name} returns", model)
    if not isinstance(model, Model):
        raise JaxflError(
            f"{name} returns a {type(model).__name__}, not a jaxfl.models.Model; jaxfl.models.own makes one "
            "of a module of Flax or Equinox, or of plain functions."
        )
    for each in (model.name, *model.names):
        if not isinstance(each, str) or not each:
            raise JaxflError(f"{name}: the names of a model and its blocks must be texts, not {each!r}.")
    if len(set(model.names)) < len(model.names):
        raise JaxflError(f"{name} has two blocks of one name: {', '.join(model.names)}; rename one.")
    for block in model.names:
        if "/" in block:  # it separates the names of leaves in files
            raise JaxflError(f"{name} has a block named {block!r}; leave the / out of its name.")
    for block, module in model.blocks:
        if isinstance(module, OwnBlock):
            continue
        if not isinstance(module, nn.Module):
            raise JaxflError(
                f"{name}: the block {block!r} is a {type(module).__name__}, not a flax.linen.Module."
            )
        require_call(
            f"{type(module).__name__}.__call__", type(module).__call__, "self", "x", train=..., mask=...
        )
        try:
            hash(module)
        except TypeError as error:
            raise JaxflError(
                f"{line_of(type(module))}: the block {block!r} of {name} has a field that can change "
                f"({in_a_line(error)}); write tuples for lists."
            ) from None
    if tuple(model.shape) != tuple(shape) or model.classes != classes:
        raise JaxflError(
            f"{name} returns a model of {model.classes} classes for examples of shape {tuple(model.shape)}; "
            f"build it for the classes={classes} and the shape={tuple(shape)} that it is given."
        )

    def forward(key, x, mask):
        weights = model.init(key)
        return model.apply(weights.params, weights.stats, x, train=True, key=key, mask=mask)[0]

    x = model.examples(EXAMPLES)
    mask = jax.ShapeDtypeStruct((EXAMPLES,), bool)
    logits = jax.eval_shape(forward, jax.random.key(0), x, mask)
    wanted = (*shape, classes) if every_token else (classes,)
    if logits.shape[1:] != wanted:
        raise JaxflError(
            f"{name} returns {logits.shape[1:]} for an example, not {wanted}: a score for each class; "
            + (
                "the next token needs a score of every token at each place."
                if every_token
                else "flatten or average its maps before the last layer."
                if len(logits.shape) > 2
                else f"give its last block {classes} features."
            )
        )


def noted(model: Model) -> Model:
    """Return the model, with a note if all of its weights are in its head."""
    *others, last = model.names
    if any(jax.tree.leaves(model.form.params[block]) for block in others):
        return model
    note = (
        f"All of its weights are in its last block, {last!r}: methods whose clients keep their "
        "heads share nothing of it. Divide it into blocks (docs/networks.md)."
    )
    return dataclasses.replace(model, note=f"{model.note} {note}".strip())
