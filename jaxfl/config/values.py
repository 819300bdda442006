"""Values of options: read from words, Python, TOML and JSON alike, and written as text."""

import contextlib
import itertools
import os
import types
import typing
from pathlib import Path
from typing import Any

from jaxfl.errors import JaxflError

WORDS = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}
LONGEST_SHOWN = 60  # characters of a value in a message


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
        each = [alternatives(part) for part in parts]
        return tuple(itertools.chain(*each)) if all(each) else ()
    entry = entry_type(annotation)
    readable = annotation in WORDS or (entry is not None and alternatives(entry))
    return (annotation,) if readable else ()


def entry_type(annotation: Any) -> Any:
    """Return the type of the entries of ``tuple[..., ...]``, None for anything else."""
    match typing.get_origin(annotation), typing.get_args(annotation):
        case (origin, (entry, end)) if origin is tuple and end is ...:
            return entry


def expected(annotation: Any) -> str:
    """Return in words what a value must be: ``a whole number or none``."""
    return " or ".join(map(_in_words, alternatives(annotation))) or str(annotation)


def _in_words(kind: Any) -> str:
    entry = entry_type(kind)
    if entry is not None:
        return f"a tuple of {expected(entry).removeprefix('a ')}{'s' if entry in WORDS else ''}"
    return WORDS.get(kind) or text(kind)


def read(annotation: Any, written: Any) -> Any:
    """Return the value that somebody has written for an option of some type.

    It is written as words such as ``3``, ``none`` or ``sgd``, or is a value: an array of NumPy stands for its
    numbers, a list or a single entry for a tuple. What has no `alternatives` is taken as it is.

    Raises:
      ValueError: saying what it must be.
    """
    written = written.tolist() if hasattr(written, "tolist") else written  # of NumPy, JAX or pandas
    allowed = alternatives(annotation)
    if not allowed:
        return tuple(written) if isinstance(written, list) else written
    for kind in sorted(allowed, key=lambda kind: kind in WORDS):  # none before a text "none"
        with contextlib.suppress(ValueError):
            return _as(kind, written)
    shown = repr(written)
    if len(shown) > LONGEST_SHOWN:  # such as an array
        shown = f"a {type(written).__name__}"
    raise ValueError(f"must be {expected(annotation)}, not {shown}")


def _as(kind: Any, written: Any) -> Any:
    """Return what is written as one of an annotation's alternatives.

    Raises:
      ValueError: if it is none.
    """
    entry = entry_type(kind)
    if entry is not None:
        several = written if isinstance(written, list | tuple) else [written]
        return tuple(read(entry, each) for each in several)
    if kind is Path or (kind is str and isinstance(written, os.PathLike)):
        if isinstance(written, str | os.PathLike):
            return kind(as_path(written))
    elif isinstance(written, str):
        if kind in WORDS:
            return kind(written)
        if written.lower() == text(kind).lower():
            return kind
    elif kind in (int, float):  # a whole number stays one, and True is no number
        if isinstance(written, (int, kind)) and not isinstance(written, bool):
            return written
    elif type(written) is type(kind) and written == kind:
        return kind
    raise ValueError(written)


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
    """Return the words that `read` takes for this value; those of a tuple's entries are joined by ``+``."""
    if isinstance(value, tuple | list):
        return "+".join(map(text, value))
    return str(value).lower() if isinstance(value, bool | None) else str(value)
