"""Every built-in method by name: whatever stands in a file under `jaxfl.algorithms` is found there."""

import importlib
import pkgutil
import typing
from types import ModuleType
from typing import Any

from jaxfl import algorithms
from jaxfl.config import choices
from jaxfl.core.protocol import Method
from jaxfl.errors import JaxflError


def discover(package: ModuleType) -> dict[str, Method]:
    """The methods that the modules of a package define, by name, sorted.

    Raises:
      JaxflError: if two different methods have one name.
    """
    found = {}
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for entry in vars(importlib.import_module(info.name)).values():
            if not isinstance(entry, Method):
                continue
            other, _ = found.setdefault(entry.name, (entry, info.name))
            if other is not entry:
                raise JaxflError(
                    f"{info.name} and {found[entry.name][1]} both define a method {entry.name!r}; rename one."
                )
    return {name: found[name][0] for name in sorted(found)}


METHODS = discover(algorithms)


def method(choice: str) -> tuple[Method, dict[str, Any]]:
    """The method of a choice and its options: ``"compfl,kd=false"`` -> (compfl, {"kd": False})."""
    name, options = choices.split(choice)
    found = choices.lookup("method", METHODS, name)
    if not isinstance(found, Method):
        raise JaxflError(f"{name} is a {type(found).__name__}, not a jaxfl.Method; name one of these.")
    return found, choices.convert(found.name, typing.get_type_hints(found.config), options)
