"""Tables of many runs: mean and standard deviation over seeds, in four formats."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from jaxfl.errors import JaxflError, nearest
from jaxfl.machine import markdown
from jaxfl.runs.paired import Difference


class Cell(NamedTuple):
    """A mean over seeds, NaN without a value, and its sample standard deviation, None for a single seed."""

    mean: float
    std: float | None

    def text(self, between: str = " ± ") -> str:
        """Return ``91.27 ± 0.31``, small numbers as ``0.0281``, or a dash without a value."""
        if math.isnan(self.mean):
            return "-"
        small = 1e-6 < abs(self.mean) < 0.1  # such as the megabytes of class means; below, it is rounding
        decimals = 2 - math.floor(math.log10(abs(self.mean))) if small else 2
        return f"{self.mean:.{decimals}f}" + ("" if self.std is None else f"{between}{self.std:.{decimals}f}")


OF_ACCURACY = {  # of the deployed models, beside the mean: title, and name in a result
    "std": ("std over clients %", "std"),
    "lowest": ("lowest client %", "lowest"),
    "worst-tenth": ("worst tenth %", "worst_tenth"),
    "pooled": ("pooled %", "pooled"),
    "macro-f1": ("macro F1 %", "macro_f1"),
    "validation": ("validation %", "validation"),
}
IN_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "&%_#${}"}
    | {"\\": "\\textbackslash{}", "^": "\\textasciicircum{}", "~": "\\textasciitilde{}"}
    | {"|": "\\textbar{}", "<": "\\textless{}", ">": "\\textgreater{}"}
)
SHOWN = (*OF_ACCURACY, "per-class", "flops", "lost")  # on request
MOST_COLUMNS = 12  # of a table that is not transposed in a terminal
_NEWCOMERS = (
    ("newcomers received %", lambda r: _of_newcomers(r, "received")),
    ("newcomers joined %", lambda r: _of_newcomers(r, "personal")),
)


def _sent_nothing(newcomers: dict | None) -> bool:
    return newcomers is not None and newcomers["bytes_down"] == newcomers["bytes_up"] == 0


def _of_newcomers(result: dict, moment: str) -> float:
    known = result.get("newcomers")
    return 100 * known[moment]["mean"] if known else np.nan


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


def check_columns(show: Sequence[str]) -> None:
    """Refuse unknown columns.

    Raises:
      JaxflError: naming the first one, and a similar known one.
    """
    for name in show:
        if name not in SHOWN:
            raise JaxflError(f"There is no column {name!r}; {nearest(name, SHOWN)}")


def tabulate(results: list[tuple[str, dict]], show: Sequence[str] = ()) -> Table:
    """Gather results by label, in the order in which labels first appear.

    Args:
      results: pairs (label, result); results of one label are its seeds.
      show: further columns, of `SHOWN`.

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
    targets = list(dict.fromkeys(target for _, result in results for target in result.get("targets", {})))
    seeds = defaultdict(list)
    for label, result in results:
        seeds[label].append(result)
    groups = list(dict.fromkeys(g for _, r in results for g in r["accuracy"]["per_group"]))
    columns: list[tuple[str, Callable]] = [
        ("accuracy %", lambda r: 100 * r["accuracy"]["mean"]),
        *(column for name in show for column in _on_request(name, [result for _, result in results])),
        *(
            (g, lambda r, g=g: 100 * r["accuracy"]["per_group"].get(g, np.nan))
            for g in (groups if len(groups) > 1 else ())
        ),
        ("received %", lambda r: 100 * r["received"]["mean"]),
        *(
            _on_request("lost", [])
            if "lost" not in show and any(r.get("lost_answers") for _, r in results)
            else ()
        ),
        *(_NEWCOMERS if any(result.get("newcomers") for _, result in results) else ()),
        ("MB up", lambda r: r["bytes_up"] / 1e6),
        ("MB down", lambda r: r["bytes_down"] / 1e6),
    ]
    if any(result["simulated_seconds"] for _, result in results):
        columns.append(("simulated s", lambda r: r["simulated_seconds"] or np.nan))
    for target in targets:
        timed = any(result["simulated_seconds"] for _, result in results)
        columns += _until(target, counted="flops" in show, timed=timed)
    rows = [
        (label, [cell([value(result) for result in of_label]) for _, value in columns])
        for label, of_label in seeds.items()
    ]
    notes = [_reaching(label, target, of_label) for target in targets for label, of_label in seeds.items()]
    notes += [
        f"{label} sends newcomers nothing: before joining they have their initial weights."
        for label, of_label in seeds.items()
        if any(_sent_nothing(result.get("newcomers")) for result in of_label)
    ]
    validated = _on_request("validation", []) if "validation" in show else []
    notes += notes_on_empty(validated, [result for _, result in results])
    accuracies = [cells[0].mean for _, cells in rows]
    best = [(number, 0) for number, mean in enumerate(accuracies) if mean == np.nanmax(accuracies)]
    return Table([title for title, _ in columns], rows, tuple(filter(None, notes)), best)


def absent(metrics: list[dict]) -> tuple[int, int]:
    """Return how many clients of a run are scored but answered in no round, and how many are scored."""
    known = {i for i, share in enumerate(metrics[-1]["accuracy"]["per_client"]) if share is not None}
    answered = (set(record["clients"]).difference(record.get("lost", ())) for record in metrics)
    return len(known.difference(*answered)), len(known)


def notes_on_absent(of_runs: Sequence[tuple[int, int]]) -> list[str]:
    """Return a note if clients that are scored have answered in no round, see `absent`."""
    if not any(missing for missing, _ in of_runs):
        return []
    number, clients = (
        " to ".join(map(str, sorted({min(numbers), max(numbers)}))) for numbers in zip(*of_runs, strict=True)
    )
    return [
        f"{number} of {clients} clients took part in no round of their run, or all their answers were lost; "
        "what they keep is still as it began, and their accuracies count (see rounds and lost in a run's "
        "clients.csv)."
    ]


def notes_on_empty(columns: Sequence[tuple[str, Callable]], results: Sequence[dict]) -> list[str]:
    """Return a note for each of these columns, accuracies on validation rows, if no run has such rows."""
    return [
        f"{title}: no run has validation rows; clients hold some out with --validation-fraction."
        for title, value in columns
        if all(math.isnan(value(result)) for result in results)
    ]


class Measure(NamedTuple):
    """A value by which results are compared.

    Args:
      title: its name in words, with its unit.
      value: returns it for a result.
      of_clients: returns it for every client by id, None for newcomers; None if clients have no such value.
      better: returns the best of some values; None if none is best.
    """

    title: str
    value: Callable[[dict], float]
    of_clients: Callable[[dict], list[float | None]] | None = None
    better: Callable[[Sequence[float]], float] | None = None


def measure(name: str, target: float | None = None) -> Measure:
    """Return what a study shows.

    Args:
      name: one of `known_measures`.
      target: the accuracy, for the title of what is spent until it is reached.

    Raises:
      JaxflError: if the name is unknown.
    """
    known = known_measures(target)
    if name not in known:
        raise JaxflError(f"A study cannot show {name!r}; {nearest(name, known)}")
    return known[name]


def known_measures(target: float | None = None) -> dict[str, Measure]:
    """Return all that a study can show, by name: accuracies, costs, and what `SHOWN` has of one column."""
    reached = "the target" if target is None else f"{100 * target:g} %"
    known = {}
    for moment, title in (("accuracy", "accuracy, mean over clients %"), ("received", "received %")):
        known[moment] = Measure(
            title,
            lambda r, moment=moment: 100 * r[moment]["mean"],
            lambda r, moment=moment: [_percent(share) for share in r[moment]["per_client"]],
            max,
        )
    better = dict.fromkeys(OF_ACCURACY, max) | {"std": min}
    for name in SHOWN:
        for title, value in _on_request(name, []) if name != "per-class" else ():
            known[name] = Measure(title, value, None, better.get(name))
    known["megabytes"] = Measure("MB sent and received", lambda r: (r["bytes_up"] + r["bytes_down"]) / 1e6)
    spent = {
        "rounds": ("rounds", 1, ("round",)),
        "megabytes": ("MB", 1e6, ("bytes_up", "bytes_down")),
        "flops": ("GFLOP", 1e9, ("flops",)),
        "simulated-seconds": ("simulated s", 1, ("simulated_seconds",)),
    }
    for name, (unit, scale, of) in spent.items():
        known[f"{name}-to-target"] = Measure(
            f"{unit} to {reached}", lambda r, of=of, scale=scale: _to_target(r, *of) / scale, None, min
        )
    return known


def _to_target(result: dict, *names: str) -> float:
    """Return what a run has spent until it reached its target, NaN with several, see `_spent`."""
    (target, *others) = result.get("targets", {}).values() or [{}]
    return _spent({} if others else target, *names)


def _spent(until: dict, *names: str) -> float:
    """Return the sum of some entries of what was spent until a target; NaN if it was not reached."""
    return float(sum(np.nan if until.get(name) is None else until[name] for name in names))


def _on_request(name: str, results: list[dict]) -> list[tuple[str, Callable]]:
    """Return the columns of one name in `SHOWN`; runs of an earlier jaxfl lack some values."""
    if name == "flops":
        return [("GFLOP", lambda r: r["flops"] / 1e9)]
    if name == "lost":
        return [("lost answers", lambda r: r.get("lost_answers") or 0)]
    if name != "per-class":
        title, key = OF_ACCURACY[name]
        return [(title, lambda r: _percent(r["accuracy"].get(key)))]
    classes = max(len(result["accuracy"].get("per_class", ())) for result in results)

    def of_class(result, c):
        known = result["accuracy"].get("per_class", ())
        return _percent(known[c]) if c < len(known) else np.nan

    return [(f"class {c} %", lambda r, c=c: of_class(r, c)) for c in range(classes)]


def _percent(share: float | None) -> float:
    return np.nan if share is None else 100 * share


def _until(target: str, counted: bool, timed: bool) -> list[tuple[str, Callable]]:
    """Return the columns that say what was spent until a target was reached."""

    def spent(result, *names):
        return _spent(result.get("targets", {}).get(target, {}), *names)

    accuracy = f"{100 * float(target):g} %"
    columns = [
        (f"rounds to {accuracy}", lambda r: spent(r, "round")),
        (f"MB to {accuracy}", lambda r: spent(r, "bytes_up", "bytes_down") / 1e6),
    ]
    columns += [(f"GFLOP to {accuracy}", lambda r: spent(r, "flops") / 1e9)] if counted else []
    columns += [(f"simulated s to {accuracy}", lambda r: spent(r, "simulated_seconds"))] if timed else []
    return columns


def _reaching(label: str, target: str, results: list[dict]) -> str | None:
    """Return a note if only some of several runs reach a target: there is no mean over all."""
    number = sum(result["targets"][target]["round"] is not None for result in results)
    if number in (0, len(results)):
        return None
    return f"{label} reaches {100 * float(target):g} % in {number} of {len(results)} runs."


def cell(values: Sequence[float]) -> Cell:
    """Return the mean of a value over repetitions, and its standard deviation if there are several."""
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Cell(float(np.mean(values)), std)


def as_text(table: Table) -> RichTable:
    """Return the table for a terminal, the best cells in bold; with too many columns it is transposed."""
    labels = [label for label, _ in table.rows]
    texts = [
        [
            Text(cell.text(), "bold" if (row, column) in table.best else "")
            for column, cell in enumerate(cells)
        ]
        for row, (_, cells) in enumerate(table.rows)
    ]
    wide = len(table.titles) > MOST_COLUMNS
    titles = (table.of_rows, *(labels if wide else table.titles))
    columns = (Column(Text(title), overflow="fold") for title in titles)  # labels may have brackets
    caption = Text("\n".join(table.notes)) if table.notes else None
    drawn = RichTable(*columns, caption=caption, caption_justify="left")
    lines = (
        zip(table.titles, *texts, strict=True)
        if wide
        else map(lambda label, of_label: (label, *of_label), labels, texts)
    )
    for line in lines:
        drawn.add_row(*line)
    return drawn


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
        return f"${cell.mean:+.2f}{'' if math.isnan(cell.low) or cell.inside else '^{*}'}$"

    lines = [[table.of_rows, *(title.translate(IN_LATEX) for title in table.titles)]]
    for row, (label, cells) in enumerate(table.rows):
        texts = [typeset(cell, (row, column) in table.best) for column, cell in enumerate(cells)]
        lines.append([label.translate(IN_LATEX), *texts])
    head, *body = (" & ".join(line) + " \\\\\n" for line in lines)
    notes = ["Needs \\usepackage{booktabs}.", *table.notes]
    if any(isinstance(cell, Difference) for _, cells in table.rows for cell in cells):
        notes.append("A star: the interval, which is in the CSV file, does not contain 0.")
        notes.append("A single pair, and pairs that are all the same, have no interval.")
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
        return "" if part is None or math.isnan(part) else f"{part:.4f}"

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    _, first = table.rows[0]
    titles = zip(table.titles, first, strict=True)
    writer.writerow([table.of_rows, *(f"{title}{kind}" for title, cell in titles for kind in parts(cell))])
    for label, cells in table.rows:
        writer.writerow([label, *(text(part) for cell in cells for part in parts(cell).values())])
    return out.getvalue()
