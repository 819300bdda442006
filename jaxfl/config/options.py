"""Options as data: dataclasses whose fields carry their default, their range and their sentence."""

import contextlib
import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import docstring_parser
import jax

from jaxfl.config.own_code import line_of
from jaxfl.config.values import alternatives, expected, read, text
from jaxfl.errors import JaxflError

LARGEST = {int: 2**31 - 1, float: 3.4e38}  # numbers that programs hold, in int32 and float32
SMALLEST = 1.2e-38  # above 0
DECORATED = "__jaxfl_options__"  # attribute of a class that `options` has made a configuration


class Option(NamedTuple):
    """What an option is: words, Python, TOML and JSON are read by this one description."""

    name: str  # its name; a flag has ``-`` in place of ``_``
    type: Any  # its annotation, see `values.alternatives`
    default: Any = dataclasses.MISSING  # its default, `dataclasses.MISSING` if it has none
    interval: str | None = None  # the range of a number, such as ``[0, inf)``

    def read(self, written: Any) -> Any:
        """Return the value that somebody has written, see `values.read`.

        Raises:
          ValueError: saying what it must be.
        """
        value = read(self.type, written)
        if value != self.default and "" in (value if isinstance(value, tuple) else [value]):
            raise ValueError("must not be empty")
        if isinstance(value, int | float) and (must := _refused(value, self.interval, self.type)):
            raise ValueError(f"must {must}, but is {value}")
        return value


@functools.lru_cache(maxsize=256)  # a study asks thousands of times
def declared(owner: Callable, given: tuple[str, ...] = ()) -> dict[str, Option]:
    """Return the options of a dataclass or a function by name.

    A dataclass has its fields; the options of dataclasses in it take these ones' place. A function has its
    parameters, except those in `given`, which jaxfl passes, and those by position without a default. If there
    is no annotation, the default gives the type.

    Raises:
      JaxflError: if an annotation cannot be read.
    """
    try:
        types = typing.get_type_hints(owner)
    except (NameError, TypeError) as error:
        raise JaxflError(f"{line_of(owner)}: the type of an option cannot be read: {error}.") from None
    found = {}
    if dataclasses.is_dataclass(owner):
        for field in dataclasses.fields(owner):
            kind = types[field.name]
            if dataclasses.is_dataclass(kind):
                found |= declared(kind)
            else:
                interval = field.metadata.get("interval")
                found[field.name] = Option(field.name, kind, field.default, interval)
        return found
    for name, p in inspect.signature(owner).parameters.items():
        has_default = p.default is not p.empty
        by_position = p.kind is p.POSITIONAL_OR_KEYWORD and has_default
        if name not in given and (p.kind is p.KEYWORD_ONLY or by_position):
            usual = type(p.default) if has_default and p.default is not None else str
            default = p.default if has_default else dataclasses.MISSING
            found[name] = Option(name, types.get(name, usual), default)
    return found


@functools.lru_cache(maxsize=256)
def explained(owner: Callable) -> dict[str, str]:
    """Return the sentences on the options of a dataclass or a function, if the source is available."""
    found = {}
    for part in reversed(owner.__mro__[:-1]) if isinstance(owner, type) else [owner]:
        with contextlib.suppress(OSError, TypeError):  # of classes without a source
            parsed = docstring_parser.parse_from_object(part).params
            found |= {one.arg_name: " ".join(one.description.split()) for one in parsed if one.description}
    return found


class Described(NamedTuple):
    """An option as help shows it: its name, its default as text, and its sentence."""

    name: str
    default: str
    what: str


def described(owner: Callable, known: Mapping[str, Option] | None = None) -> list[Described]:
    """Return the options of a dataclass, its own ones first, or of a function as help shows them."""
    known, sentences = declared(owner) if known is None else known, explained(owner)
    names = own_first(owner) if isinstance(owner, type) else known
    defaults = {name: known[name].default for name in names}
    return [
        Described(name, "" if default is dataclasses.MISSING else text(default), sentences.get(name, ""))
        for name, default in defaults.items()
    ]


def own_first(cls: type) -> list[str]:
    """Return the names of a dataclass's options: those that it adds before those that it inherits."""
    names = [field.name for field in dataclasses.fields(cls)]
    return sorted(names, key=lambda name: name not in vars(cls).get("__annotations__", {}))


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
    return jax.tree_util.register_dataclass(cls, rates, [name for name in declared(cls) if name not in rates])


def floats(cls: type) -> list[str]:
    """Return the names of a configuration's options that are floats: leaves of the pytree."""
    return [name for name, option in declared(cls).items() if option.type in (float, float | None)]


def _check_declared(cls: type) -> None:
    """Refuse options whose type does not fit the inherited one, and intervals that cannot be read."""
    for name, option in declared(cls).items():
        for base in cls.__mro__[1:-1]:
            kind = declared(base).get(name, option).type
            narrowed = {*alternatives(option.type)} <= {*alternatives(kind)}
            if not narrowed and typing.get_origin(option.type) is not typing.Literal:
                raise JaxflError(
                    f"The option {name!r} of {cls.__name__} is {expected(option.type)}, but {expected(kind)} "
                    f"in {base.__name__}, which it extends; declare it as there, or rename it."
                )
        try:
            _inside(0, option.interval or "[0, 1]")
        except (TypeError, ValueError, IndexError):
            raise JaxflError(
                f"The option {name!r} of {cls.__name__} lies in {option.interval!r}, which is not an "
                'interval; write one such as "[0, inf)".'
            ) from None
        try:
            option.read(option.default)
        except ValueError as error:
            raise JaxflError(f"The default of the option {name!r} of {cls.__name__} {error}.") from None


class Unread:
    """A placeholder for a value that is not there; a method that computes with it is told `why`."""

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
    __getitem__ = __len__ = __iter__ = _refuse
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


def _refused(value: float, interval: str | None, annotation: Any) -> str:
    """Say in which range a number must lie, or which limit of the numbers in a program it breaks."""
    if interval and not _inside(value, interval):
        return f"lie in {interval}"
    whole = isinstance(value, int) and float not in alternatives(annotation)
    largest = LARGEST[int if whole else float]
    if abs(value) > largest and "inf" in (interval or "inf" * whole):
        return f"be at most {largest}"
    return f"be at least {SMALLEST:g} in size" if interval and 0 < abs(value) < SMALLEST else ""


def _inside(value: float, interval: str) -> bool:
    if interval[0] not in "[(" or interval[-1] not in ")]":
        raise ValueError(interval)
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below and not math.isnan(value)
