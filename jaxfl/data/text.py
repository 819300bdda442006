"""Files of text, whose speakers may be named, as rows of characters or of a tokenizer's tokens."""

import re
from pathlib import Path

import numpy as np

from jaxfl.config.values import as_path
from jaxfl.data.kept import How
from jaxfl.data.sources import Source, from_arrays
from jaxfl.data.vocabulary import content_of, cut_by, encoded, require_length, vocabulary
from jaxfl.errors import JaxflError
from jaxfl.machine.files import read_text

SUFFIX = ".txt"


def read_source(place: str, how: How, *, length: int = 80, tokenizer: Path | None = None) -> Source:
    """Read a text, of which the next character, or token, is to be predicted.

    A paragraph whose first line is a name and a colon, as in a play, is said by this speaker if a tenth of
    all or more name one, and rows have the speaker in their column `client`. What a speaker says is cut, in
    its order, into rows of `length` characters; a row begins with the last one of the row before. The last
    fifth of a speaker's rows is for testing. The vocabulary has the characters of all others.

    Args:
      place: path of the file.
      how: how it is read.
      length: number of characters, or tokens, in a row.
      tokenizer: file of a tokenizer of the package tokenizers, whose ids are the tokens, in place of
        characters; its vocabulary is that of the run.

    Raises:
      JaxflError: if the file cannot be read or has no text, or `from_arrays` refuses it.
    """
    length, content = require_length(place, length), content_of(tokenizer)
    cut, words = cut_by("characters", content)
    said = _by_speaker(read_text(as_path(place)))
    rows, speakers, train = [], [], []
    for speaker, pieces in ((speaker, cut(text)) for speaker, text in said.items()):
        of_speaker = [pieces[start : start + length] for start in range(0, len(pieces) - 1, length - 1)]
        rows += of_speaker
        speakers += [speaker] * len(of_speaker)
        train += [place < 0.8 * len(of_speaker) for place in range(len(of_speaker))]
    if not rows:
        raise JaxflError(f"{place} has no text; give it some characters.")
    words = words or vocabulary(row for row, trains in zip(rows, train, strict=True) if trains)
    tokens, known = encoded(rows, words, length), {}
    if len(said) > 1:
        known["client"] = np.array(speakers)
    of_text = {"words": words, "tokenizer": content, "pieces": "characters"}
    return from_arrays(how.name, tokens, None, np.array(train), 0, known, task=how.task, **of_text)


def _by_speaker(text: str) -> dict[str, str]:
    """Return what each speaker says, in the order of first lines; all of it by "" in a text without speakers.

    What stands before the first one, such as a title, is said by nobody. A text has speakers if a tenth of
    its paragraphs or more name one: "The letter read:" in a novel does not make it a play.
    """
    paragraphs = [*filter(None, re.split(r"\n\s*\n", text.strip("\n")))]
    firsts = [re.match(r"([^\n:]{1,60}):[ \t]*\n", paragraph + "\n") for paragraph in paragraphs]
    named = 10 * sum(map(bool, firsts)) >= len(firsts)
    said: dict[str, list[str]] = {}
    speaker = ""
    for paragraph, first in zip(paragraphs, firsts, strict=True):
        if named and first:
            speaker, paragraph = first[1].strip(), paragraph[first.end() :]
        said.setdefault(speaker, []).append(paragraph)
    named = len(said) > 1
    return {who: "\n".join(filter(None, parts)) for who, parts in said.items() if who or not named}
