"""Flags on the command line: dataclasses in, dataclasses out. Values are read like those of choices."""

import dataclasses
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jaxfl.config.options import (
    WORDS,
    alternatives,
    entries,
    helps,
    hints,
    matches,
    own_first,
    parse,
    text,
)
from jaxfl.errors import JaxflError


def parse_flags(program: str, arguments: list[str], **defaults: Any) -> tuple[list[Any], list[str]]:
    """Read flags into dataclasses like `defaults`, flat: one flag per field, a section for each.

    Args:
      program: ``run fedper``, for the help.
      arguments: words; with --help among them, the help is printed and the process ends.
      **defaults: dataclass instances, perhaps with dataclasses as fields.

    Returns:
      The dataclasses, and the words that are not their flags.

    Raises:
      JaxflError: if a value does not fit. Of an option that is given twice the last one counts.
    """
    shown = {name: _in_words(default) for name, default in defaults.items()}
    fields = [(name, type(default), dataclasses.field(default=default)) for name, default in shown.items()]
    flat: Any = Annotated[_dataclass("Options", fields), tyro.conf.OmitArgPrefixes]
    try:
        parsed, unknown = tyro.cli(
            flat,
            prog=f"jaxfl {program}",
            args=arguments,
            return_unknown_args=True,
            registry=REGISTRY,
        )
    except _Misread as error:
        annotations = {name: of for default in defaults.values() for name, of in hints(type(default)).items()}
        raise JaxflError(f"{_flag_before(error, arguments, annotations)} {error}.") from None
    return [_with_values(default, getattr(parsed, name)) for name, default in defaults.items()], unknown


def _in_words(default: Any) -> Any:
    """Return a dataclass with the same fields and values, inherited ones last, and sentences in one line."""
    cls, helped, annotations, fields = type(default), helps(type(default)), hints(type(default)), []
    for name in own_first(cls):
        value = getattr(default, name)
        if dataclasses.is_dataclass(value):
            value = _in_words(value)
            kind = type(value)
        else:
            kind = Annotated[annotations[name], tyro.conf.arg(help=helped.get(name, ""))]
        fields.append((name, kind, dataclasses.field(default=value)))
    view = _dataclass(cls.__name__, fields)
    view.__doc__ = cls.__doc__
    return view()


def _dataclass(name: str, fields: list[tuple]) -> type:
    """Return a new dataclass, in whose source, which it lacks, Tyro does not look for sentences."""
    made = dataclasses.make_dataclass(name, fields, frozen=True)
    made.__module__ = "builtins"
    return made


def _with_values(default: Any, view: Any) -> Any:
    """Return a dataclass with the values of its `_in_words`."""
    values = {
        name: _with_values(getattr(default, name), value) if dataclasses.is_dataclass(value) else value
        for name, value in vars(view).items()
    }
    return dataclasses.replace(default, **values)


REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def _of_option(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Return how an option's value is read and shown, except a bool, which is a flag and its negation."""
    annotation, entry = info.type, entries(info.type)
    if annotation is bool or not alternatives(annotation):
        return None
    return PrimitiveConstructorSpec(
        nargs=1 if entry is None else "*",
        metavar=_metavar(annotation) if entry is None else f"[{_metavar(entry)} ...]",
        instance_from_str=lambda words: (
            _read(annotation, words[0]) if entry is None else tuple(_read(entry, word) for word in words)
        ),
        is_instance=lambda value: matches(value, annotation),
        str_from_instance=lambda value: [text(value)] if entry is None else [*map(text, value)],
    )


class _Misread(Exception):
    """A word that is no value of its option; Tyro would print a frame of many lines."""

    def __init__(self, annotation: Any, word: str, reason: str):
        super().__init__(reason)
        self.annotation, self.word = annotation, word


def _read(annotation: Any, word: str) -> Any:
    try:
        return parse(annotation, word)
    except ValueError as error:
        raise _Misread(annotation, word, str(error)) from None


def _flag_before(error: _Misread, arguments: list[str], annotations: dict[str, Any]) -> str:
    """Return the flag whose value was misread: of several with that value, the first of that type."""
    found, flag = [], "An option"
    for word in arguments:
        if word.startswith("--"):
            flag, _, word = word.partition("=")
        if word == error.word:
            found.append(flag)
    alike = [flag for flag in found if annotations.get(flag[2:].replace("-", "_")) == error.annotation]
    return next(iter(alike or found), "An option")


def _metavar(annotation: Any) -> str:
    """Return ``INT``, ``{sgd,adam}`` or ``INT|{none}``."""
    allowed = alternatives(annotation)
    types = [kind.__name__.upper() for kind in allowed if kind in WORDS]
    values = ",".join(text(kind) for kind in allowed if kind not in WORDS)
    return "|".join([*types, *([f"{{{values}}}"] if values else [])])
