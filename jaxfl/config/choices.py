"""Choices written as text: ``name`` or ``name,option=value,option=value``.

In place of a name stands ``path/to/file.py:object`` for something that is not part of jaxfl: it is used
exactly like a built-in one.
"""

import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxfl.config.options import alternatives, parse
from jaxfl.errors import JaxflError, nearest

GIVEN = ("shape", "classes")  # what every model is built for; not the user's to choose


def function(kind: str, table: Mapping[str, Callable], choice: str) -> tuple[str, Callable, dict]:
    """The function of a choice, and its options as keyword arguments."""
    name, options = split(choice)
    found = lookup(kind, table, name)
    return name, found, convert(name, keywords(found), options)


def keywords(function: Callable) -> dict[str, Any]:
    """A function's options with their types: its keyword-only parameters that are not `GIVEN`."""
    types = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: types.get(p.name, str) for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in GIVEN
    }


def split(choice: str) -> tuple[str, dict[str, str]]:
    """``"name,a=1,b=2"`` -> ("name", {"a": "1", "b": "2"}); a file's path may hold commas."""
    file, py, rest = choice.rpartition(".py:")
    name, *pairs = rest.split(",")
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise JaxflError(f"{pair!r} in {choice!r} is not an option; write it as option=value.")
        options[key.strip().replace("-", "_")] = value.strip()
    return (file + py + name).strip(), options


def join(name: str, options: Mapping[str, str]) -> str:
    """The inverse of `split`."""
    return ",".join([name, *(f"{key}={value}" for key, value in options.items())])


def absolute(choice: str) -> str:
    """The choice with an absolute path where it names an object in a Python file."""
    file, py, rest = choice.rpartition(".py:")
    return f"{Path(file).resolve()}{py}{rest}" if py else choice


def lookup(kind: str, table: Mapping[str, Any], name: str) -> Any:
    """An entry by name, or the object that ``file.py:object`` names."""
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py"):
        found = from_file(Path(path), attribute)
        if kind != "method" and not callable(found):
            raise JaxflError(f"{name} is a {type(found).__name__}; name a function that makes a {kind}.")
        return found
    if name.endswith(".py"):
        raise JaxflError(f"{name} is a file; add which {kind} in it you mean: {name}:NAME.")
    if name not in table:
        raise JaxflError(f"There is no {kind} {name!r}; {nearest(name, table)}")
    return table[name]


def from_file(path: Path, attribute: str) -> Any:
    """Load an object from a Python file."""
    if not path.is_file():
        raise JaxflError(f"There is no file {path} to take {attribute!r} from; check the path.")
    module_name = f"jaxfl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise JaxflError(f"{path} does not load: {type(error).__name__}: {error}.") from error
    if not hasattr(module, attribute):
        raise JaxflError(f"{path} has no {attribute!r}; {nearest(attribute, vars(module))}")
    return getattr(module, attribute)


def convert(name: str, types: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    """Option strings as values of the annotated types."""
    values = {}
    for key, words in options.items():
        if key not in types:
            raise JaxflError(f"{name} has no option {key!r}; {nearest(key, types)}")
        if not alternatives(types[key]):
            raise JaxflError(
                f"{name}: {key} is annotated as {types[key]}, which is not read from text; annotate it as "
                "bool, int, float, str, Path, a Literal or a tuple of one of these."
            )
        try:
            values[key] = parse(types[key], words)
        except ValueError as error:
            raise JaxflError(f"{name}: {key} {error}.") from None
    return values
