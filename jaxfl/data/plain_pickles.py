"""Pickles of other programs, of which only numbers, words, lists, dicts and NumPy arrays are read.

A pickle names the functions that make its values, and unpickling calls them. Here each name stands for
something of this file's own: what makes an array keeps its bytes and its type, of which NumPy reads plain
numbers. Any other name ends the reading, so nothing of what a file's author wrote is imported or called.
"""

import re
from collections.abc import Callable
from pathlib import Path
from pickle import Unpickler
from typing import IO, Any

import numpy as np

from jaxfl.errors import JaxflError


def read(path: Path, stream: IO[bytes], array: Callable[[np.ndarray], Any] = lambda found: found) -> Any:
    """Return the value of a pickle; an array of objects as the list of these, or the only one.

    `array` says what stands for an array of numbers.

    Raises:
      JaxflError: if it is damaged, or needs anything else to be imported.
    """

    class Type:  # numpy.dtype("f4", ...), whose state has the order of bytes
        def __init__(self, word, *_):
            self.word = word

        def __setstate__(self, state):
            self.word = re.sub("[|=]", "", state[1]) + self.word

    class Array:  # numpy._reconstruct(...), whose state has all the rest
        def __init__(self, *_):
            pass

        def __setstate__(self, state):
            _, self.shape, self.type, self.fortran, self.content = state

    def whole(content, kind, shape=(), order="C"):  # numpy._frombuffer(...), of pickle's protocol 5
        made = Array()
        made.__setstate__((1, shape, kind, order == "F", content))
        return made

    class Plain(Unpickler):
        def find_class(self, module, name):
            if module.partition(".")[0] != "numpy" or name not in known:
                raise ValueError(f"{module}.{name}")
            return known[name]

    def plain(value):
        match value:
            case Array() if value.type.word.startswith("O"):
                return plain(value.content if value.shape else value.content[0])
            case Array():
                if not re.fullmatch(r"[<>]?[biufU]\d+", value.type.word):
                    raise ValueError(value.type.word)
                found = np.frombuffer(value.content, np.dtype(value.type.word))
                return array(found.reshape(value.shape, order="F" if value.fortran else "C"))
            case dict():
                return {plain(key): plain(entry) for key, entry in value.items()}
            case list() | tuple():
                return [*map(plain, value)]
            case None | bool() | int() | float() | str() | bytes():
                return value
        raise ValueError(type(value).__name__)

    known = {"dtype": Type, "ndarray": None, "_reconstruct": Array, "_frombuffer": whole}
    known["scalar"] = lambda kind, content: whole(content, kind)  # numpy.int64(7), say
    try:
        return plain(Plain(stream).load())
    except Exception as error:  # a damaged pickle can raise any
        raise JaxflError(
            f"{path} is damaged, or holds more than lists and arrays of numbers ({error}); "
            "docs/data.md says how to convert it."
        ) from None
