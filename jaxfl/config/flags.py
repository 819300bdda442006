"""Flags on the command line: a section for each dataclass of options, a flag for each option."""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jaxfl.config.options import Option, declared, explained, own_first
from jaxfl.config.values import WORDS, alternatives, entry_type, text
from jaxfl.errors import JaxflError


def parse_flags(program: str, arguments: list[str], *sections: Any) -> tuple[dict[str, Any], list[str]]:
    """Divide words into flags with their words, and others; print the help if asked for it, and end.

    The values of the sections, dataclasses that may have dataclasses as fields, are shown as defaults.

    Returns:
      What is written, by option: a word, several in a list, or whether a switch is on; of an option that is
      given twice the last. And the words that belong to no flag.

    Raises:
      JaxflError: if a flag lacks a value, or a switch has one.
    """
    parser = _Parser(f"jaxfl {program}", usage="%(prog)s [--option value ...]", allow_abbrev=False)
    helped = {"-h", "--help"} & {*arguments}
    for section in itertools.chain(*map(_parts, sections)):
        cls = type(section)
        group = parser.add_argument_group((cls.__doc__ or "").rstrip("."))
        sentences = explained(cls) if helped else {}
        for option in map(declared(cls).__getitem__, own_first(cls)):
            if not alternatives(option.type) or _flag(option) in parser._option_string_actions:
                continue  # only for Python, or one of several methods that have it
            default = text(getattr(section, option.name))
            what = sentences.get(option.name, "") + f" (default: {default})" * bool(default)
            group.add_argument(_flag(option), help=what.replace("%", "%%"), **_form(option))
    asked, others = parser.parse_known_args([_dashed(word) for word in arguments])
    return vars(asked), others


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """Refuse a flag without a value, or a switch with one."""
        flag = message.removeprefix("argument ").partition(":")[0].partition("/")[0]
        wrong = "is a switch and takes no value" if "ignored" in message else "needs a value"
        raise JaxflError(f"{self.prog}: {flag} {wrong}.")


def _parts(section: Any) -> Iterator[Any]:
    """Yield the dataclasses within one, or itself if it has none."""
    parts = [value for value in vars(section).values() if dataclasses.is_dataclass(value)]
    yield from parts or [section]


def _flag(option: Option) -> str:
    return f"--{option.name.replace('_', '-')}"


def _dashed(word: str) -> str:
    """Return a flag with ``-`` where it is written with ``_``; any other word as it is."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def _form(option: Option) -> dict[str, Any]:
    """Return how many words a flag takes, and what help calls them; without a flag nothing is asked for."""
    if option.type is bool:
        return {"action": argparse.BooleanOptionalAction, "default": argparse.SUPPRESS}
    entries = [entry_type(kind) for kind in alternatives(option.type) if entry_type(kind) is not None]
    metavar = _metavar(entries[0] if entries else option.type)
    return {"nargs": "*" if entries else None, "metavar": metavar, "default": argparse.SUPPRESS}


def _metavar(annotation: Any) -> str:
    """Return ``INT``, ``{sgd,adam}`` or ``INT|{none}``."""
    allowed = alternatives(annotation)
    types = [kind.__name__.upper() for kind in allowed if kind in WORDS]
    values = ",".join(text(kind) for kind in allowed if kind not in WORDS)
    return "|".join([*types, *([f"{{{values}}}"] if values else [])])
