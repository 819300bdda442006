"""Configurations as data: dataclasses whose fields carry their default, their range and their help."""

import dataclasses
import itertools
import math
import types
import typing
from pathlib import Path
from typing import Any

import jax

from jaxfl.errors import JaxflError

WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    tuple[str, ...]: "a tuple of texts",
}


@typing.dataclass_transform(frozen_default=True)
def options(cls: type) -> type:
    """Make a class a method's configuration: a frozen dataclass that is a pytree.

    Its float fields are leaves: traced, so a change of a rate does not recompile (None where a float may be
    None selects a program). All other fields are static: they select a program.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    floats = [name for name in names if hints[name] in (float, float | None)]
    return jax.tree_util.register_dataclass(cls, floats, [name for name in names if name not in floats])


class Unread:
    """Stands for a rate while a method is built; its value comes later, with `hyper`."""

    def _refuse(self, *_):
        raise JaxflError(
            "A method's build computes with a float option, which is traced and may change without a new "
            "program; read it from the configuration that init is given as hyper."
        )

    __float__ = __int__ = __bool__ = __neg__ = __jax_array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __abs__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __hash__ = __format__ = __array__ = _refuse
    __pow__ = __rpow__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse


def static(**options):
    """A dataclass field that is part of the program, not data: jit recompiles when it changes."""
    return dataclasses.field(metadata={"static": True}, **options)


def within(interval: str, default) -> Any:
    """A numeric field with its range: ``lr: float = within("(0, inf)", 0.05)``."""
    return dataclasses.field(default=default, metadata={"interval": interval})


def check(name: str, config) -> None:
    """Refuse values of another type than the field's, and numbers outside of their ranges.

    Args:
      name: whose options they are, for the message.
      config: a dataclass instance.

    Raises:
      JaxflError: naming the option, what it must be and the value.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, allowed = getattr(config, field.name), alternatives(hints[field.name])
        flag = "--" + field.name.replace("_", "-")
        if allowed and not any(_is(value, kind) for kind in allowed):
            raise JaxflError(f"{name}: {flag} must be {wanted(allowed)}, but is {value!r}.")
        interval = field.metadata.get("interval")
        if interval and value is not None and not _inside(value, interval):
            raise JaxflError(f"{name}: {flag} must lie in {interval}, but is {value}.")


def alternatives(annotation: Any) -> tuple:
    """What an annotation allows: keys of `WORDS`, and the values of a Literal, of bool and of None.

    It is empty for an annotation that is not made of these, which is then nobody's to check but the author's.
    """
    if annotation is bool:
        return True, False
    if annotation is types.NoneType:
        return (None,)
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return parts
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        of_parts = [alternatives(part) for part in parts]
        return tuple(itertools.chain(*of_parts)) if all(of_parts) else ()
    return (annotation,) if annotation in WORDS else ()


def wanted(allowed: tuple) -> str:
    """`alternatives` in words: ``a whole number or none``."""
    return " or ".join(
        WORDS.get(kind) or (kind if isinstance(kind, str) else str(kind).lower()) for kind in allowed
    )


def _is(value: Any, kind: Any) -> bool:
    if kind == tuple[str, ...]:
        return isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)
    if kind in (int, float):  # True is no number
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind in WORDS:
        return isinstance(value, kind)
    return type(value) is type(kind) and value == kind


def _inside(value: float, interval: str) -> bool:
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below and not math.isnan(value)
