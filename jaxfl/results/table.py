"""Tables of many runs: mean and standard deviation over seeds, in four formats."""

import csv
import io
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Group
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from jaxfl.machine import markdown
from jaxfl.results.measures import (
    COHORT,
    COSTS,
    MEANS,
    SPENT,
    Measure,
    check_columns,
    columns,
    percent,
    until,
)
from jaxfl.results.paired import Difference, decimals

MOST_NAMED = 10  # clients in a note


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


def alike(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of one measure with equally many decimals, without deviations if none deviates."""
    digits = max((decimals(cell.mean) for cell in cells), default=2)
    steady = all(not cell.std or cell.std < 1e-9 * cell.mean for cell in cells if not math.isnan(cell.mean))
    return [cell._replace(digits=digits, steady=steady) for cell in cells]


IN_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "&%_#${}"}
    | {"\\": "\\textbackslash{}", "^": "\\textasciicircum{}", "~": "\\textasciitilde{}"}
    | {"|": "\\textbar{}", "<": "\\textless{}", ">": "\\textgreater{}"}
)
OF_NEWCOMERS = [
    Measure(title, lambda result, moment=moment: _mean_of_newcomers(result, moment))
    for title, moment in (("newcomers received %", "received"), ("newcomers joined %", "personal"))
]


def _mean_of_newcomers(result: dict, moment: str) -> float:
    known = result.get("newcomers")
    return percent(known[moment]["mean"] if known else None)


def _sent_nothing(newcomers: dict | None) -> bool:
    return newcomers is not None and newcomers["bytes_down"] == newcomers["bytes_up"] == 0


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


def tabulate(results: list[tuple[str, dict]], show: Sequence[str] = (), hide: Collection[str] = ()) -> Table:
    """Gather results by label, in the order in which labels first appear.

    Args:
      results: pairs (label, result); results of one label are its seeds.
      show: further columns, of `SHOWN`.
      hide: usual columns to leave out, of `jaxfl.config.command_options.Columns`.

    Returns:
      Accuracies in percent: of the deployed models, of those models per architecture if there are several,
      of the models as received before local training, and of newcomers' models as received and after joining;
      the megabytes (1e6 bytes) sent and received in the run; if clients' devices are known, the simulated
      seconds of the run; and for each target of the results what was spent until it was reached, a dash
      unless all runs of a label reach it. The best accuracy stands out.

    Raises:
      JaxflError: if there is no such column.
    """
    check_columns(show)
    every = [result for _, result in results]
    targets = list(dict.fromkeys(target for result in every for target in result.get("targets", {})))
    seeds = defaultdict(list)
    for label, result in results:
        seeds[label].append(result)
    timed = any(result["simulated_seconds"] for result in every)
    usual = {"architectures": _of_architectures(every), "received": [MEANS["received"]]}
    if "lost" not in show and any(result.get("lost_answers") for result in every):
        usual["lost"] = [COSTS["lost"]]
    if any(result.get("newcomers") for result in every):
        usual["newcomers"] = OF_NEWCOMERS
    usual["megabytes"] = [
        Measure("MB up", lambda result: result["bytes_up"] / 1e6),
        Measure("MB down", lambda result: result["bytes_down"] / 1e6),
    ]
    if timed:
        usual["simulated-seconds"] = [
            Measure("simulated s", lambda result: result["simulated_seconds"] or math.nan)
        ]
    asked = {"flops": "flops" in show, "simulated-seconds": timed}
    spent = [name for name in SPENT if asked.get(name, True)]
    usual["targets"] = [until(name, target, _percent_of(target)) for target in targets for name in spent]
    usual = {name: measures for name, measures in usual.items() if name not in hide}
    shown = [MEANS["accuracy"]._replace(title="accuracy %")]
    shown += [column for name in show for column in columns(name, every)]
    shown += itertools.chain(*usual.values())
    of_columns = [
        alike([cell([column.value(result) for result in of_label]) for of_label in seeds.values()])
        for column in shown
    ]
    rows = [*zip(seeds, map(list, zip(*of_columns, strict=True)), strict=True)]
    notes = []
    if "received" in usual:
        notes.append("received: the models that clients start a round from, scored before they train.")
    notes += [_reaching(label, target, of_label) for target in targets for label, of_label in seeds.items()]
    notes += [
        f"{label} sends newcomers nothing: before joining they have their initial weights."
        for label, of_label in seeds.items()
        if "newcomers" in usual and any(_sent_nothing(result.get("newcomers")) for result in of_label)
    ]
    if COHORT.keys() & show:
        notes.append(
            "Right after training and of teachers: means over the clients of each of the last ten rounds."
        )
    notes += notes_on_empty(shown, every)
    accuracies = [cells[0].mean for _, cells in rows]
    best = [(number, 0) for number, mean in enumerate(accuracies) if mean == np.nanmax(accuracies)]
    return Table([column.title for column in shown], rows, tuple(filter(None, notes)), best)


def untrained(metrics: list[dict]) -> tuple[list[int], int]:
    """Return which clients of a run are scored but have a loss in no round, and how many are scored."""
    known = {i for i, share in enumerate(metrics[-1]["accuracy"]["per_client"]) if share is not None}
    told = (zip(record["clients"], record["client_loss"], strict=True) for record in metrics)
    trained = {client for of_round in told for client, loss in of_round if loss is not None}
    return sorted(known - trained), len(known)


def notes_on_untrained(of_runs: Sequence[tuple[list[int], int]]) -> list[str]:
    """Return a note if clients that are scored have trained in no round, see `untrained`."""
    every = sorted({client for missing, _ in of_runs for client in missing})
    if not every:
        return []
    number, clients = (
        " to ".join(map(str, sorted({min(numbers), max(numbers)})))
        for numbers in zip(*((len(missing), known) for missing, known in of_runs), strict=True)
    )
    named = ", ".join(map(str, every[:MOST_NAMED])) + (", ..." if len(every) > MOST_NAMED else "")
    return [
        f"{number} of {clients} clients have trained in no round of their run (by id {named}): no round drew "
        "them, their answers were lost, or they had no batch to train on, such as a single row under "
        "BatchNorm. Unless their method trains others than a round's clients, what they keep is as it began, "
        "and their accuracies count."
    ]


def notes_on_code(results: Mapping[str, Sequence[dict]]) -> list[str]:
    """Return a note for each label whose runs ended with different versions of the user's own files."""
    notes = []
    for label, of_label in results.items():
        ends = [result["code"][-1]["files"] for result in of_label]
        versions = {tuple(sorted((Path(path).name, then or "") for path, then in of.items())) for of in ends}
        if len(versions) > 1:
            notes.append(f"The runs of {label} were computed by different versions of your code.")
    return notes


def notes_on_empty(columns: Sequence[Measure], results: Sequence[dict]) -> list[str]:
    """Return a note for each of these columns that says why it can be empty, if no run has a value."""
    return [
        f"{column.title}: {column.missing}."
        for column in columns
        if column.missing and all(math.isnan(column.value(result)) for result in results)
    ]


def _of_architectures(results: Sequence[dict]) -> list[Measure]:
    """Return the accuracy of each architecture's clients, if there are several architectures."""

    def of_architecture(name):
        return Measure(name, lambda result: percent(result["accuracy"]["per_group"].get(name)))

    names = list(dict.fromkeys(name for result in results for name in result["accuracy"]["per_group"]))
    return list(map(of_architecture, names)) if len(names) > 1 else []


def _percent_of(target: str) -> str:
    return f"{100 * float(target):g} %"


def _reaching(label: str, target: str, results: list[dict]) -> str | None:
    """Return a note if only some of several runs reach a target: there is no mean over all."""
    number = sum(result["targets"][target]["round"] is not None for result in results)
    if number in (0, len(results)):
        return None
    return f"{label} reaches {_percent_of(target)} in {number} of {len(results)} runs."


def cell(values: Sequence[float]) -> Cell:
    """Return the mean of a value over repetitions, and its standard deviation if there are several."""
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Cell(float(np.mean(values)), std)


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
    paragraphs = [markdown.table([table.of_rows, *table.titles], lines), *table.notes]
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
        return f"${cell.mean_text()}{'' if math.isnan(cell.low) or cell.inside else '^{*}'}$"

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

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    _, first = table.rows[0]
    titles = zip(table.titles, first, strict=True)
    writer.writerow([table.of_rows, *(f"{title}{kind}" for title, cell in titles for kind in parts(cell))])
    for label, cells in table.rows:
        writer.writerow([label, *(text(part) for cell in cells for part in parts(cell).values())])
    return out.getvalue()
