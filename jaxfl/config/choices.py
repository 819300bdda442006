"""Choices written as text: ``name`` or ``name,option=value,option=value``.

In place of a name, ``path/to/file.py:object`` names something that is not part of jaxfl. It is used exactly
like a built-in one.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxfl.config.asked import read_options
from jaxfl.config.options import Option, declared
from jaxfl.config.own_code import load
from jaxfl.config.values import alternatives, entry_type
from jaxfl.errors import JaxflError, nearest

ELSEWHERE = {  # what papers and other programs call some choices
    "fedopt": "fedavg,server_optimizer=adam",
    "fedadam": "fedavg,server_optimizer=adam",
    "fedyogi": "fedavg,server_optimizer=yogi",
    "fedavgm": "fedavg,server_optimizer=sgd",
    "pathological": "shards",
    "pat": "shards",
    "noniid": "shards",
    "dir": "dirichlet",
}


def function(kind: str, table: Mapping[str, Callable], choice: str) -> tuple[str, Callable, dict]:
    """Return the name and function of a choice, and its options as keyword arguments.

    `kind` says in messages what the choice is of.
    """
    name, options = split(choice)
    found = lookup(kind, table, name)
    return name, found, convert(name, declared(found), options)


def split(choice: str) -> tuple[str, dict[str, str]]:
    """Return a choice's name and options as text.

    A file's path may hold commas, and so may a value in brackets, such as a network with options.

    >>> split("dirichlet,alpha=0.5,min-samples=4")
    ('dirichlet', {'alpha': '0.5', 'min_samples': '4'})
    >>> split("a,b.py:mine,k=1")
    ('a,b.py:mine', {'k': '1'})
    >>> split("fedkemf,knowledge=my.py:net")
    ('fedkemf', {'knowledge': 'my.py:net'})
    >>> split("fedkemf,knowledge=[mlp,hidden=16],lr=1")
    ('fedkemf', {'knowledge': 'mlp,hidden=16', 'lr': '1'})
    """
    path, rest = _file_and_rest(choice)
    name, *pairs = _divided(rest)
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise JaxflError(f"{pair!r} in {choice!r} is not an option; write it as option=value.")
        key = key.strip().replace("-", "_")
        if key in options:
            raise JaxflError(f"{choice!r} gives {key} twice; give it once.")
        value = value.strip()
        options[key] = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    return (path + name).strip(), options


def _divided(text: str) -> list[str]:
    """Split a text at its commas, except within brackets that begin a value.

    >>> _divided("a,k=[x,y=[1,2]],l=b]c")
    ['a', 'k=[x,y=[1,2]]', 'l=b]c']
    """
    parts, depth, start = [], 0, 0
    for place, mark in enumerate(text):
        if mark == "[" and (depth or text[place - 1 : place] == "="):
            depth += 1
        elif mark == "]" and depth:
            depth -= 1
        elif mark == "," and not depth:
            parts.append(text[start:place])
            start = place + 1
    if depth:
        raise JaxflError(f"{text!r} lacks a closing bracket; write option=[value,option=value].")
    return [*parts, text[start:]]


def join(name: str, options: Mapping[str, str]) -> str:
    """Return a choice as text, the inverse of `split`.

    >>> join("ditto", {"lam": "0.1"})
    'ditto,lam=0.1'
    """
    bracketed = {key for key, value in options.items() if "," in value or value.startswith("[")}
    values = {key: f"[{value}]" if key in bracketed else value for key, value in options.items()}
    return ",".join([name, *(f"{key}={value}" for key, value in values.items())])


def absolute(choice: str) -> str:
    """Return the choice with an absolute path if it names an object in a Python file."""
    path = file(choice)
    return f"{path.resolve()}:{_file_and_rest(choice)[1]}" if path else choice


def without_folder(choice: str) -> str:
    """Return the choice with its Python file's name without folders if it names an object in one."""
    path = file(choice)
    return f"{path.name}:{_file_and_rest(choice)[1]}" if path else choice


def file(choice: str) -> Path | None:
    """Return the Python file in which a choice names an object, or None."""
    path, _ = _file_and_rest(choice)
    return Path(path.removesuffix(":")) if path else None


def _file_and_rest(choice: str) -> tuple[str, str]:
    """Split a choice before the name of its object: ``path/to/file.py:``, or nothing if it names no file."""
    path, py, rest = choice.partition(".py:")
    # Of a path such as runs/fedavg,lr=0.1/my.py only the file system knows that it is one.
    in_option = re.match(r"[^,=]*,[\w-]+=", path) and not Path(f"{path}.py").is_file()
    return (path + py, rest) if py and not in_option else ("", choice)


def lookup(kind: str, table: Mapping[str, Any], name: str) -> Any:
    """Return an entry by name, or the object that ``file.py:object`` names."""
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py"):
        found = load(Path(path), attribute)
        if not kind.startswith("method") and not callable(found):
            raise JaxflError(f"{name} is a {type(found).__name__}; name a function that makes a {kind}.")
        return found
    if name.endswith(".py"):
        raise JaxflError(f"{name} is a file; add the name of the {kind} in it: {name}:NAME.")
    if name not in table:
        advice = f"options follow a comma, NAME,{name}." if "=" in name else nearest(name, table)
        ours = ELSEWHERE.get(name.lower(), "")
        if ours.partition(",")[0] in table:
            advice = f"here it is {ours}."
        raise JaxflError(f"There is no {kind} {name!r}; {advice}")
    return table[name]


def convert(name: str, known: Mapping[str, Option], options: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a choice's options, see `read_options`; ``+`` joins the entries of a tuple."""
    for key in options.keys() & known.keys():
        if not alternatives(known[key].type):
            raise JaxflError(
                f"{name}: {key} is annotated as {known[key].type}, which cannot be read from text; annotate "
                "it as bool, int, float, str, Path, a Literal or a tuple of one of these."
            )

    def written(key):
        words = options[key]
        several = key in known and any(entry_type(kind) is not None for kind in alternatives(known[key].type))
        return [*filter(None, words.split("+"))] if several and ("+" in words or not words) else words

    return read_options(name, known, {key: written(key) for key in options}, mark="")
