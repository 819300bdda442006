"""Configurations as data: dataclasses whose fields carry their default, their range and their help."""

import dataclasses
import math
import typing

import jax

from jaxfl.errors import JaxflError


@typing.dataclass_transform(frozen_default=True)
def options(cls: type) -> type:
    """Make a class a method's configuration: a frozen dataclass that is a pytree.

    Its float fields are leaves: traced, so a change of a rate does not recompile. All other fields are
    static: they select a program.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    types = typing.get_type_hints(cls)
    floats = [field.name for field in dataclasses.fields(cls) if types[field.name] is float]
    others = [field.name for field in dataclasses.fields(cls) if types[field.name] is not float]
    return jax.tree_util.register_dataclass(cls, floats, others)


def within(interval: str, default) -> typing.Any:
    """A numeric field with its range: ``lr: float = within("(0, inf)", 0.05)``."""
    return dataclasses.field(default=default, metadata={"interval": interval})


def check(name: str, config) -> None:
    """Refuse numbers outside of their ranges.

    Args:
      name: whose options they are, for the message.
      config: a dataclass instance.

    Raises:
      JaxflError: naming the option, its range and the value.
    """
    for field in dataclasses.fields(config):
        interval, value = field.metadata.get("interval"), getattr(config, field.name)
        if interval and value is not None and not _inside(value, interval):
            flag = field.name.replace("_", "-")
            raise JaxflError(f"{name}: --{flag} must lie in {interval}, but is {value}.")


def _inside(value: float, interval: str) -> bool:
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below and not math.isnan(value)
