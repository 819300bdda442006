"""Tables as text, and lists and ranges in words."""

import csv
import io
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose cells may hold any text of one line; it ends without a line break."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|")


def as_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows, of which the first are the titles, as CSV text."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def few(names: Iterable[str], most: int = 5) -> str:
    """Return the first names of many."""
    first = [*itertools.islice(names, most + 1)]
    return ", ".join(first[:most]) + (", ..." if len(first) > most else "")


def span(numbers: Collection[int]) -> str:
    """Return the smallest and the largest of some numbers: ``20 to 35``, or only ``20``."""
    return " to ".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)}))
