"""Interception of calls of modules that are plain Python objects: those of NNX and of Equinox."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def layers(module: Any, kind: type) -> dict[str, Any]:
    """Return by name the modules among a module's attributes, or in lists, tuples and dicts of these."""
    found = {}

    def look(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, entry in value.items():
                look(f"{name}_{key}", entry)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for i, entry in enumerate(value):
                look(f"{name}_{i}", entry)
        elif isinstance(value, kind):
            found[name] = value

    for name, value in vars(module).items():
        look(name, value)
    return found


def in_front(call: Callable, inputs: tuple, options: dict) -> tuple[tuple, dict]:
    """Put the input of a call in front, also where it was named: ``head(inputs=x)``."""
    if inputs or not options:
        return inputs, options
    _, *parameters = inspect.signature(call).parameters.values()
    first = next((one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD), None)
    if first not in options:
        return inputs, options
    return (options[first],), {name: value for name, value in options.items() if name != first}


@contextlib.contextmanager
def intercepted(modules: list[Any], intercept: Callable) -> Iterator[None]:
    """Replace calls of some modules, within, by ``intercept(module, call, inputs, options)``.

    Their classes have another `__call__` meanwhile.
    """
    watched = {id(module) for module in modules}
    with contextlib.ExitStack() as stack:
        for kind in {type(module) for module in modules}:
            stack.enter_context(_replaced(kind, watched, intercept))
        yield


@contextlib.contextmanager
def _replaced(kind: type, watched: set[int], intercept: Callable) -> Iterator[None]:
    own, call = vars(kind).get("__call__"), kind.__call__

    def replacement(self, *inputs, **options):
        def plain(*inputs, **options):
            return call(self, *inputs, **options)

        inputs, options = in_front(call, inputs, options)
        return intercept(self, plain, inputs, options) if id(self) in watched else plain(*inputs, **options)

    type.__setattr__(kind, "__call__", replacement)
    try:
        yield
    finally:
        if own is None:
            type.__delattr__(kind, "__call__")
        else:
            type.__setattr__(kind, "__call__", own)
