"""Configurations as data: dataclasses whose fields carry their default, their range and their help."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docstring_parser
import jax

from jaxfl.errors import JaxflError

WORDS = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}
LONGEST_SHOWN = 60  # characters of a value in a message
LARGEST = {int: 2**31 - 1, float: 3.4e38}  # numbers that programs hold, in int32 and float32
SMALLEST = 1.2e-38  # above 0
_type_hints = functools.lru_cache(maxsize=256)(typing.get_type_hints)  # a study asks thousands of times
DECORATED = "__jaxfl_options__"  # attribute of a class that `options` has made a configuration


@typing.dataclass_transform(frozen_default=True)
def options(cls: type) -> type:
    """Make a class a method's configuration: a frozen dataclass that is a pytree.

    Its float fields are leaves: traced, so a change of a rate does not recompile (None where a float may be
    None selects a program). All other fields are static: they select a program.
    """
    cls.__doc__ = cls.__doc__ or f"Options of {cls.__name__}."  # else it would list all of them
    try:
        cls = dataclasses.dataclass(frozen=True)(cls)
    except (TypeError, ValueError) as error:  # no default, or one that can change
        raise JaxflError(
            f"The options of {cls.__name__} need defaults, each a number, a text, a tuple or None: {error}."
        ) from error
    _check_declared(cls)
    setattr(cls, DECORATED, True)
    rates = floats(cls)
    return jax.tree_util.register_dataclass(cls, rates, [name for name in hints(cls) if name not in rates])


def floats(cls: type) -> list[str]:
    """Return the names of a configuration's options that are floats: leaves of the pytree."""
    return [name for name, annotation in hints(cls).items() if annotation in (float, float | None)]


def _check_declared(cls: type) -> None:
    """Refuse options whose type does not fit the inherited one, and intervals that cannot be read.

    Raises:
      JaxflError: naming the class and the option.
    """
    known = hints(cls)
    for base in cls.__mro__[1:]:
        for name, kind in (hints(base) if dataclasses.is_dataclass(base) else {}).items():
            narrowed = set(alternatives(known[name])) <= set(alternatives(kind))
            if not narrowed and typing.get_origin(known[name]) is not typing.Literal:
                raise JaxflError(
                    f"The option {name!r} of {cls.__name__} is {_of_kind(known[name])}, but "
                    f"{_of_kind(kind)} in {base.__name__}, which it extends; "
                    "declare it as there, or rename it."
                )
    for field in dataclasses.fields(cls):
        interval = field.metadata.get("interval")
        try:
            _inside(0, interval or "[0, 1]")
        except (TypeError, ValueError, IndexError):
            raise JaxflError(
                f"The option {field.name!r} of {cls.__name__} lies in {interval!r}, which is not an "
                'interval; write one such as "[0, inf)".'
            ) from None


def _of_kind(annotation: Any) -> str:
    return wanted(alternatives(annotation)) or str(annotation)


class Unread:
    """A placeholder for a value that is not there; a method that computes with it is refused.

    Args:
      why: the reason, and what to do.
    """

    def __init__(self, why: str):
        self._why = why

    def _refuse(self, *_):
        raise TypeError(self._why)  # whose line in the method is found by `jaxfl.config.own_code`

    def __getattr__(self, name: str):
        """Refuse attributes of arrays, such as shape."""
        raise AttributeError(name) if name.startswith("_") else TypeError(self._why)

    __float__ = __int__ = __bool__ = __neg__ = _refuse
    __jax_array__ = property(_refuse)  # jax.numpy refuses what has it with a sentence of its own
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __abs__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __hash__ = __format__ = __array__ = _refuse
    __pow__ = __rpow__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse


def static(**options):
    """Make a dataclass field that is part of the program, not data: jit recompiles when it changes."""
    return dataclasses.field(metadata={"static": True}, **options)


def within(interval: str, default) -> Any:
    """Make a numeric field with its range: ``lr: float = within("(0, inf)", 0.05)``."""
    return dataclasses.field(default=default, metadata={"interval": interval})


def client_rate(interval: str, default) -> Any:
    """Make such a field for clients' learning rate, which a run's schedule changes: `jaxfl.core.schedule`."""
    return dataclasses.field(default=default, metadata={"interval": interval, "client_rate": True})


def client_rates(cls: type) -> list[str]:
    """Return the names of a dataclass's options that are learning rates of clients."""
    return [field.name for field in dataclasses.fields(cls) if field.metadata.get("client_rate")]


def hints(cls: type) -> dict[str, Any]:
    """Return a dataclass's annotations by option; the options of dataclasses in it take these ones' place."""
    found = {}
    try:
        annotations = _type_hints(cls)
    except NameError as error:
        raise JaxflError(f"An option of {cls.__name__} has an unknown type: {error}.") from None
    for name, annotation in annotations.items():
        part = isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
        found |= hints(annotation) if part else {name: annotation}
    return found


@functools.lru_cache(maxsize=256)
def helps(cls: type) -> dict[str, str]:
    """Return the sentence under each option of a dataclass, by name, if the source is available."""
    found = {}
    for part in reversed(cls.__mro__[:-1]):
        with contextlib.suppress(OSError, TypeError):  # of classes without a source
            parsed = docstring_parser.parse_from_object(part).params
            found |= {one.arg_name: " ".join(one.description.split()) for one in parsed if one.description}
    return found


def own_first(cls: type) -> list[str]:
    """Return the names of a dataclass's options: those that it adds before those that it inherits."""
    names = [field.name for field in dataclasses.fields(cls)]
    return sorted(names, key=lambda name: name not in vars(cls).get("__annotations__", {}))


def check(name: str, config) -> None:
    """Refuse values of another type than the field's, and numbers out of range.

    Args:
      name: owner of the options, for the message.
      config: a dataclass instance.

    Raises:
      JaxflError: naming the option, what it must be and the value.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    check_some(name, type(config), values)


def check_some(name: str, cls: type, values: Mapping[str, Any]) -> None:
    """Check some options of a dataclass, by name, as `check` does."""
    annotations = hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in values:
            continue
        value, annotation = values[field.name], annotations[field.name]
        flag = "--" + field.name.replace("_", "-")
        if not matches(value, annotation):
            has = repr(value)
            if len(has) > LONGEST_SHOWN:  # such as an array
                has = f"a {type(value).__name__}"
            raise JaxflError(f"{name}: {flag} must be {wanted(alternatives(annotation))}, but is {has}.")
        interval = field.metadata.get("interval")
        if interval and value is not None and not _inside(value, interval):
            raise JaxflError(f"{name}: {flag} must lie in {interval}, but is {value}.")
        if interval and value is not None and (limit := _limit(value, interval, alternatives(annotation))):
            raise JaxflError(f"{name}: {flag} must be {limit}, but is {value}.")


def alternatives(annotation: Any) -> tuple:
    """Return what an annotation allows: keys of `WORDS`, Literal values, a bool or None, `tuple[..., ...]`.

    It is empty for an annotation that is not made of these; only the author can check that one.
    """
    if annotation is bool:
        return True, False
    if annotation is types.NoneType:
        return (None,)
    parts, origin = typing.get_args(annotation), typing.get_origin(annotation)
    if origin is typing.Literal:
        return parts
    if origin in (typing.Union, types.UnionType):
        of_parts = [alternatives(part) for part in parts]
        return tuple(itertools.chain(*of_parts)) if all(of_parts) else ()
    readable = annotation in WORDS or (entries(annotation) is not None and alternatives(entries(annotation)))
    return (annotation,) if readable else ()


def entries(kind: Any) -> Any:
    """Return the type of the entries of ``tuple[..., ...]``, None for anything else."""
    match typing.get_origin(kind), typing.get_args(kind):
        case (origin, (entry, end)) if origin is tuple and end is ...:
            return entry


def wanted(allowed: tuple) -> str:
    """Return `alternatives` in words: ``a whole number or none``."""
    return " or ".join(map(_in_words, allowed))


def _in_words(kind: Any) -> str:
    if entries(kind) is not None:
        of_entry = wanted(alternatives(entries(kind)))
        return f"a tuple of {of_entry.removeprefix('a ')}{'s' if entries(kind) in WORDS else ''}"
    return WORDS.get(kind) or text(kind)


def parse(annotation: Any, words: str) -> Any:
    """Return the value that a text stands for, in a flag or a choice.

    Args:
      annotation: one with `alternatives`; a tuple's entries are joined by ``+``, and no text is no entry.
      words: ``3``, ``none``, ``crop+flip``.

    Raises:
      ValueError: saying what it must be.
    """
    allowed = alternatives(annotation)
    for kind in sorted(allowed, key=lambda kind: kind in WORDS):  # none before a text "none"
        with contextlib.suppress(ValueError):
            if entries(kind) is not None:
                return tuple(parse(entries(kind), word) for word in words.split("+") if word)
            if kind in WORDS:
                return as_path(words) if kind is Path else kind(words)
            if words.lower() == text(kind).lower():
                return kind
    raise ValueError(f"must be {wanted(allowed)}, not {words!r}")


def as_path(words: str | os.PathLike[str]) -> Path:
    """Return the path that a text stands for; a first ``~`` is the user's home.

    Raises:
      JaxflError: if it is neither text nor a path, is empty, or has bytes that no name of a file has.
    """
    words = os.fspath(words) if isinstance(words, os.PathLike) else words
    if not isinstance(words, str):
        raise JaxflError(f"A folder or file must be a path or a string, not {words!r}.")
    if not words or "\0" in words:
        raise JaxflError(f"{words!r} is not the name of a folder or file.")
    return Path(os.path.expanduser(words))


def text(value: Any) -> str:
    """Return the text that `parse` reads as this value."""
    if isinstance(value, tuple):
        return "+".join(map(text, value))
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def matches(value: Any, annotation: Any) -> bool:
    """Return whether a value is one of an annotation's `alternatives`, or there are none."""
    allowed = alternatives(annotation)
    return not allowed or any(_is(value, kind) for kind in allowed)


def _is(value: Any, kind: Any) -> bool:
    if entries(kind) is not None:
        return isinstance(value, tuple) and all(matches(entry, entries(kind)) for entry in value)
    if kind in (int, float):  # True is no number
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind in WORDS:
        return isinstance(value, kind)
    return type(value) is type(kind) and value == kind


def _limit(value: float, interval: str, allowed: tuple) -> str:
    """Say which limit of the numbers in a program a value in an interval breaks; nothing if none."""
    whole = float not in allowed and isinstance(value, int)
    largest = LARGEST[int if whole else float]
    if abs(value) > largest and "inf" in interval:
        return f"at most {largest}"
    return f"at least {SMALLEST:g} in size" if 0 < abs(value) < SMALLEST else ""


def _end(text: str) -> float:
    """Return the end of an interval; whole ones are exact, however large."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _inside(value: float, interval: str) -> bool:
    if interval[0] not in "[(" or interval[-1] not in ")]":
        raise ValueError(interval)
    low, high = map(_end, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below and not math.isnan(value)
