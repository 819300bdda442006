"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells may hold any text of one line; it ends without a line break."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|")
