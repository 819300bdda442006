"""Text as rows of tokens: words or characters of a vocabulary."""

import collections
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxfl.errors import JaxflError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # the token 0, of what the vocabulary lacks
MOST = 10_000  # words of a vocabulary: the most frequent ones
PIECES: Mapping[str, Callable[[str], list[str]]] = {
    "words": lambda text: re.findall(r"\w+|[^\w\s]", text.lower()),  # and punctuation marks
    "characters": list,
}


def vocabulary(rows: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return what tokens 0, 1, 2, ... stand for: `UNKNOWN`, and the most frequent pieces in their order."""
    times = collections.Counter(piece for row in rows for piece in row)
    return (UNKNOWN, *sorted(sorted(times, key=lambda piece: (-times[piece], piece))[: MOST - 1]))


def encoded(rows: Sequence[Sequence[str]], words: Sequence[str], length: int) -> np.ndarray:
    """Return the first pieces of each row as tokens (N, length) int32, -1 after the end of a row."""
    number = {word: token for token, word in enumerate(words)}
    tokens = np.full((len(rows), length), -1, np.int32)
    for row, pieces in zip(tokens, rows, strict=True):
        row[: len(pieces)] = [number.get(piece, 0) for piece in pieces[:length]]
    return tokens


def pieces_of(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the function that cuts a text into the pieces of a vocabulary: characters, if all are single."""
    return PIECES["characters" if max(map(len, words)) == 1 else "words"]


def require_length(name: str, length: int) -> int:
    """Return the option `length`, a number of tokens.

    Raises:
      JaxflError: if it is below 2.
    """
    if length < 2:
        raise JaxflError(f"{name}: length={length}; a row has at least 2 tokens.")
    return length
