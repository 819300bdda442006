"""Every built-in method by name: all that the files under `jaxfl.algorithms` define are found."""

import functools
import importlib
import itertools
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxfl import algorithms
from jaxfl.config import choices, own_code
from jaxfl.config.command_options import Columns, Limit, Logs, Profile, RunFolder, Seeds
from jaxfl.config.options import DECORATED, declared
from jaxfl.config.setup import Setup
from jaxfl.core.protocol import Method
from jaxfl.core.training import Training
from jaxfl.errors import JaxflError
from jaxfl.machine.processes import Processes

OF_COMMANDS = [  # further options, of the commands and of `jaxfl.run`
    *itertools.chain(*map(declared, (RunFolder, Logs, Profile, Limit, Seeds, Columns))),
    "method",
    "quiet",
]


def discover(package: ModuleType) -> dict[str, Method]:
    """Return the methods that the modules of a package define, by name, sorted.

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
    return {name: described(found[name][0]) for name in sorted(found)}


def described(method: Method) -> Method:
    """Fill in what is known of a method: summary and source from its file, BibTeX from references.bib."""
    text = getattr(method.build, "__globals__", {}).get("__doc__") or ""
    head, _, rest = text.partition("\n\n")
    title, _, summary = " ".join(head.split()).partition(": ")
    source = re.split(r"(?<!al)\. ", " ".join(rest.partition("\n\n")[0].split()))[0].rstrip(".")
    return method._replace(
        summary=method.summary or (summary or title).rstrip("."),
        paper=method.paper or (source if re.search(r"et al|\b(19|20)\d\d\b", source) else ""),
        bibtex=method.bibtex or "\n\n".join(references().get(method.name, [])),
    )


@functools.cache
def references() -> dict[str, list[str]]:
    """Return the entries of references.bib by method; their field `methods` names those that cite them."""
    found: dict[str, list[str]] = {}
    text = (Path(__file__).parent / "references.bib").read_text(encoding="utf-8")
    for head, names, rest in re.findall(r"(@.*\n)  methods=\{(.*)\},\n((?:.+\n?)+)", text):
        for name in names.split(", "):
            found.setdefault(name, []).append(head + rest.strip())
    return found


METHODS = discover(algorithms)


def owners(option: str) -> list[str]:
    """Return the names of the built-in methods that have an option."""
    return [method.name for method in METHODS.values() if option in declared(method.config)]


def method(choice: str | Method) -> tuple[Method, dict[str, Any]]:
    """Return the method of a choice and its options: ``"compfl,kd=false"`` -> (compfl, {"kd": False}).

    Raises:
      JaxflError: if there is no such method, the named object is no `Method`, or an option of its own has the
        name of one that all runs have.
    """
    if not isinstance(choice, str | Method):
        raise JaxflError(
            f"{choice!r} is not a method; give the name of one or a jaxfl.Method, one at a time."
        )
    name, options = choices.split(choice) if isinstance(choice, str) else (choice.name, {})
    found = choices.lookup("method", METHODS, name) if isinstance(choice, str) else choice
    if not isinstance(found, Method):
        raise JaxflError(
            f"{name} is a {type(found).__name__}, not a jaxfl.Method; name an object that is one."
        )
    if not isinstance(found.name, str) or not re.search(r"\w", found.name) or set(found.name) & {*"/\\,="}:
        raise JaxflError(
            f"The name of a method is part of its folders and tables; give it a word such as 'mine', not "
            f"{found.name!r}."
        )
    config = found.config
    if not (isinstance(config, type) and issubclass(config, Training) and DECORATED in vars(config)):
        raise JaxflError(f"{name}: config must be a subclass of jaxfl.Training, decorated by jaxfl.options.")
    if not callable(found.build):
        raise JaxflError(f"{name}: build must be a function that makes an Algorithm from a config.")
    own, shared = declared(found.config), [*declared(Setup), *declared(Processes), *OF_COMMANDS]
    for option in own:
        if option in shared:
            raise JaxflError(
                f"{own_code.line_of(found.config)}: {found.name} has its own option {option!r}, which is "
                f"also an option of every run (--{option.replace('_', '-')}); rename its own."
            )
    return described(found), choices.convert(found.name, own, options)
