"""Text as rows of tokens: words or characters of a vocabulary, or what a named tokenizer makes of it."""

import collections
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxfl.errors import JaxflError
from jaxfl.machine.files import read_text
from jaxfl.machine.packages import optional

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


def content_of(tokenizer: Path | None) -> str:
    """Return the content of a tokenizer's file, "" without one.

    Raises:
      JaxflError: if it cannot be read.
    """
    return "" if tokenizer is None else read_text(tokenizer)


def cut_by(tokens: str, tokenizer: str) -> tuple[Callable[[str], list[str]], tuple[str, ...]]:
    """Return the function that cuts a text into pieces, and what a tokenizer's ids stand for.

    A tokenizer adds no marks around a text here, such as ``[CLS]``, and does no padding or cutting.

    Args:
      tokens: a name in `PIECES`, whose vocabulary is yet to be made; it is () then.
      tokenizer: in their place the content of a ``tokenizer.json`` of the package tokenizers, or "".

    Raises:
      JaxflError: if that package is not installed, or does not understand it.
    """
    if not tokenizer:
        return PIECES[tokens], ()
    tokenizers = optional("tokenizers", "tokenizers", "tokenizer=FILE.json")
    try:
        named = tokenizers.Tokenizer.from_str(tokenizer)
    except Exception as error:  # the package has no type of its own
        raise JaxflError(
            f"tokenizer= names a file that the package tokenizers does not read ({error}); take a "
            "tokenizer.json of its Tokenizer.save."
        ) from None
    named.no_truncation()
    named.no_padding()
    words = tuple(named.id_to_token(i) or "" for i in range(max(named.get_vocab().values()) + 1))
    return lambda text: [words[i] for i in named.encode(text, add_special_tokens=False).ids], words


def require_length(name: str, length: int) -> int:
    """Return the option `length`, a number of tokens; `JaxflError` if it is below 2."""
    if length < 2:
        raise JaxflError(f"{name}: length={length}; a row has at least 2 tokens.")
    return length
