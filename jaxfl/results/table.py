"""Tables of many runs: mean and standard deviation over seeds, in four formats."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Group
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from jaxfl.machine import texts
from jaxfl.results.paired import Difference, decimals


class Cell(NamedTuple):
    """A mean over seeds, NaN without a value, and its sample standard deviation, None for a single seed.

    `digits` is the number of decimals in a text, by default its own. A `steady` one is of a measure that
    never deviates, and has no deviation in a text. See `alike`.
    """

    mean: float
    std: float | None
    digits: int | None = None
    steady: bool = False

    def text(self, between: str = " ± ") -> str:
        """Return ``91.27 ± 0.31``, small numbers as ``0.0281``, or a dash without a value."""
        if math.isnan(self.mean):
            return "-"
        digits = decimals(self.mean) if self.digits is None else self.digits
        spread = "" if self.std is None or self.steady else f"{between}{self.std:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


NOTHING = Cell(math.nan, None)


def alike(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of one measure with equally many decimals, without deviations if none deviates."""
    digits = max((decimals(cell.mean) for cell in cells), default=2)
    steady = all(not cell.std or cell.std < 1e-9 * cell.mean for cell in cells if not math.isnan(cell.mean))
    return [cell._replace(digits=digits, steady=steady) for cell in cells]


def mean_of(values: Sequence[float]) -> Cell:
    """Return the mean of a value over repetitions, and its standard deviation if there are several."""
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Cell(float(np.mean(values)), std)


IN_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "&%_#${}"}
    | {"\\": "\\textbackslash{}", "^": "\\textasciicircum{}", "~": "\\textasciitilde{}"}
    | {"|": "\\textbar{}", "<": "\\textless{}", ">": "\\textgreater{}"}
)


class Table(NamedTuple):
    """Rows of a label and cells, with a title per column; as text it is Markdown.

    The first column has means. `notes` concern all rows: what the spread is over, what is not comparable.
    `best` are cells that stand out in a terminal and in LaTeX, as numbers of their row and column. `of_rows`
    is the title of the label column.
    """

    titles: list[str]
    rows: Sequence[tuple[str, Sequence[Cell | Difference]]]
    notes: tuple[str, ...] = ()
    best: Collection[tuple[int, int]] = ()
    of_rows: str = "method"

    def __str__(self) -> str:
        return as_markdown(self)


def as_text(table: Table, width: int) -> Group:
    """Return the table for a terminal with this many columns of text, the best cells in bold.

    It is transposed if only that keeps all names and numbers in one piece. Where neither way does, it is
    divided into several with some of the columns each.
    """
    heads = [Text(title) for title in (table.of_rows, *table.titles)]  # labels may have brackets
    rows = [
        [
            Text(label),
            *(Text(cell.text(), "bold" if (i, k) in table.best else "") for k, cell in enumerate(cells)),
        ]
        for i, (label, cells) in enumerate(table.rows)
    ]
    upright = [*zip(heads, *rows, strict=True)]  # columns
    fitting = [way for way in (upright, [heads, *rows]) if _span(map(_unbroken, way)) <= width]
    labels, *others = next(iter(fitting), upright)
    parts = [[labels]]
    for column in others:
        if len(parts[-1]) > 1 and _span(map(_unbroken, [*parts[-1], column])) > width:
            parts.append([labels])
        parts[-1].append(column)
    drawn = [_part(columns, width) for columns in parts]
    return Group(*drawn, *map(Text, table.notes))


def _part(columns: Sequence[Sequence[Text]], width: int) -> RichTable:
    """Return a table of some columns with their titles; where even these do not fit, it breaks names."""
    room = width - _span(map(_unbroken, columns))
    widths = _widths(columns, room) if room >= 0 else [None] * len(columns)
    titles, *lines = zip(*columns, strict=True)
    drawn = RichTable(
        *(Column(title, overflow="fold", width=w) for title, w in zip(titles, widths, strict=True))
    )
    for line in lines:
        drawn.add_row(*line)
    return drawn


def _unbroken(texts: Sequence[Text]) -> int:
    """Return the width of the longest part that stays in one piece: a word, or a mean with its deviation."""
    return max(len(part) for text in texts for part in re.split("(?<!±) (?!±)", text.plain))


def _span(widths: Iterable[int]) -> int:
    """Return the width of a table with columns of these widths, and borders."""
    return sum(width + 3 for width in widths) + 1


def _widths(columns: Sequence[Sequence[Text]], room: int) -> list[int]:
    """Return the width of each column: what stays in one piece, and a fair share of the room that is left."""
    widths = [*map(_unbroken, columns)]
    wishes = [max(map(len, texts)) - width for texts, width in zip(columns, widths, strict=True)]
    for served, i in enumerate(sorted(range(len(columns)), key=wishes.__getitem__)):
        more = min(wishes[i], room // (len(columns) - served))
        widths[i] += more
        room -= more
    return widths


def as_markdown(table: Table) -> str:
    """Return a Markdown table."""
    lines = [[label, *(cell.text() for cell in cells)] for label, cells in table.rows]
    paragraphs = [texts.markdown([table.of_rows, *table.titles], lines), *table.notes]
    return "\n\n".join(paragraphs) + "\n"


def as_latex(table: Table) -> str:
    """Return a LaTeX tabular for the package booktabs, the best cells in bold.

    A difference has a star if its interval does not contain 0; the ends of intervals are left to CSV.
    """

    def typeset(cell, stands_out):
        if isinstance(cell, Cell):
            text = cell.text("{\\scriptsize$\\pm$}")
            return f"\\textbf{{{text}}}" if stands_out else text
        if math.isnan(cell.mean):
            return cell.text()
        return f"${cell.number(cell.mean)}{'' if math.isnan(cell.low) or cell.inside else '^{*}'}$"

    lines = [[table.of_rows, *(title.translate(IN_LATEX) for title in table.titles)]]
    for row, (label, cells) in enumerate(table.rows):
        texts = [typeset(cell, (row, column) in table.best) for column, cell in enumerate(cells)]
        opens = "{}" if label[:1] in ("[", "*") else ""  # else an argument of \\midrule or \\
        lines.append([opens + label.translate(IN_LATEX), *texts])
    head, *body = (" & ".join(line) + " \\\\\n" for line in lines)
    notes = ["Needs \\usepackage{booktabs}.", *table.notes]
    if any(isinstance(cell, Difference) for _, cells in table.rows for cell in cells):
        notes.append("A star: the interval, which is in the CSV file, does not contain 0.")
        notes.append(
            "A single pair, and pairs that all differ by the same number other than 0, have no interval."
        )
    comments = "".join(f"% {' '.join(note.split())}\n" for note in notes)
    columns = "l" + "r" * len(table.titles)
    lines = [
        f"\\begin{{tabular}}{{{columns}}}\n",
        "\\toprule\n",
        head,
        "\\midrule\n",
        *body,
        "\\bottomrule\n",
    ]
    return comments + "".join(lines) + "\\end{tabular}\n"


def as_csv(table: Table) -> str:
    """Return CSV text; means, standard deviations and the ends of intervals have columns of their own."""

    def parts(cell):
        if isinstance(cell, Cell):
            return {"": cell.mean, " std": cell.std}
        return {"": cell.mean, " low": cell.low, " high": cell.high}

    def text(part):
        return "" if part is None or math.isnan(part) else f"{part:.{2 + decimals(part)}f}"

    _, first = table.rows[0]
    titles = zip(table.titles, first, strict=True)
    rows = [[table.of_rows, *(f"{title}{kind}" for title, cell in titles for kind in parts(cell))]]
    for label, cells in table.rows:
        rows.append([label, *(text(part) for cell in cells for part in parts(cell).values())])
    return texts.as_csv(rows)


def written(table: Table, name: str) -> dict[str, str]:
    """Return a table as the texts of its files, CSV, Markdown and LaTeX."""
    forms = {"csv": as_csv, "md": as_markdown, "tex": as_latex}
    return {f"{name}.{ending}": form(table) for ending, form in forms.items()}


def confusion_csv(matrices: Mapping[str, Sequence[Sequence[float]]], class_names: Sequence[str] = ()) -> str:
    """Return CSV text of confusion matrices by method: a row per class, a column for what it is taken for."""
    classes = len(next(iter(matrices.values())))
    names = list(class_names) or [*range(classes)]
    rows = [["method", "class", *(f"as {name}" for name in names), "as none"]]
    for label, matrix in matrices.items():
        rows += [[label, name, *counts] for name, counts in zip(names, matrix, strict=True)]
    return texts.as_csv(rows)
