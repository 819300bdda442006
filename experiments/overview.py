"""Pages of verdicts on the papers' tables and figures, made from the files of this folder.

    python experiments/overview.py

Each folder with an items.toml gets a page verdicts.md, and README.md here gets a table of all items. For each
item items.toml has what it shows, the paper's claim, the study or command that repeats it, a verdict and its
reason. It holds no figures. They are read from the tables that runs have left, CSV or Markdown: `figures`
names the file, the column and the rows.
"""

import csv
import statistics
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
VERDICTS = ("agrees", "differs", "cannot be told at this scale", "not run")
BEGIN, END = "<!-- overview: made by overview.py -->\n", "<!-- end of overview -->\n"


class Figures(NamedTuple):
    """A column of an item's figures.

    Args:
      title: title of the column; figures with the same title share a column.
      file: a file of results, or README.md.
      column: title of the column in the file's table.
      rows: {label on the page: beginning of the row in the table}, cells divided by " | ".
      under: heading of a page, without its marks, below which the table is.
      table: number of the table there, from 1 on.
    """

    title: str
    file: str
    column: str
    rows: dict[str, str]
    under: str = ""
    table: int = 1


class Item(NamedTuple):
    """A table or figure of a paper.

    Args:
      name: its number in the paper.
      shows: content of the table or figure.
      claim: the paper's claim, in a line.
      verdict: one of `VERDICTS`.
      reason: the answer in a sentence, then the evidence, or what is missing.
      study: TOML file here that repeats it, without its ending.
      at_scale: those at the paper's own scale, where what has run is smaller.
      more: further studies, such as on another data set.
      command: command behind the kept results, where no study made them.
      setups: argument files here.
      seeds: number of seeds, in words where figures differ; 0 where nothing has run.
      commit: commit of the code that gave the figures.
      machine: hardware and versions, where no linked page has them.
      figures: columns of results.
      pictures: image files of results.
    """

    name: str
    shows: str
    claim: str
    verdict: str
    reason: str
    study: str = ""
    at_scale: list[str] = []
    more: list[str] = []
    command: str = ""
    setups: list[str] = []
    seeds: int | str = 0
    commit: str = ""
    machine: str = ""
    figures: list[Figures] = []
    pictures: list[str] = []


class Paper(NamedTuple):
    """The content of an items.toml.

    Args:
      folder: folder of the paper.
      title: name of the method, or of the experiment.
      source: source of the claims.
      note: remark on tables and figures that are no items.
      items: items in the order of the paper.
    """

    folder: Path
    title: str
    source: str
    note: str
    items: list[Item]


def main() -> None:
    """Write all pages."""
    for path, text in pages().items():
        path.write_text(text)
        print(path)


def pages() -> dict[Path, str]:
    """Return the text of every page by its path."""
    papers = [read(path.parent) for path in sorted(HERE.glob("*/items.toml"))]
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    made = {paper.folder / "verdicts.md": page(paper) for paper in papers}
    return made | {readme: before + BEGIN + overview(papers) + END + after}


def read(folder: Path) -> Paper:
    """Read and check a paper's items."""
    said = tomllib.loads((folder / "items.toml").read_text())
    items = [
        Item(**entries | {"figures": [figures_of(figures) for figures in entries.get("figures", [])]})
        for entries in said["item"]
    ]
    for item in items:
        check(folder, item)
    return Paper(folder, said["title"], said["source"], said.get("note", ""), items)


def figures_of(said: dict[str, Any]) -> Figures:
    """Return a column of figures; rows may be a list, where page and table share labels."""
    rows = said["rows"]
    return Figures(**{**said, "rows": rows if isinstance(rows, dict) else {row: row for row in rows}})


def check(folder: Path, item: Item) -> None:
    """Exit on missing files, and on verdicts without results."""
    where = f"{folder / 'items.toml'}, {item.name}:"
    if item.verdict not in VERDICTS:
        raise SystemExit(f"{where} {item.verdict!r} is no verdict; they are {', '.join(VERDICTS)}.")
    studies = [study for study in (item.study, *item.at_scale, *item.more) if study]
    files = [f"{study}.toml" for study in studies] + item.setups
    for file in [*files, *map(kept, item.pictures), *(kept(figures.file) for figures in item.figures)]:
        if not (folder / file).is_file():
            raise SystemExit(f"{where} there is no {folder / file}.")
    has_run = item.verdict != "not run"
    if any(bool(figures) != has_run for figures in (item.seeds, item.commit, item.figures)):
        raise SystemExit(f"{where} what has run, and nothing else, has figures, seeds and a commit.")


def kept(file: str) -> str:
    """Return where a paper's folder has the file of some figures."""
    return file if file == "README.md" else f"results/{file}"


def page(paper: Paper) -> str:
    """Return a paper's verdicts, one section for each item."""
    parts = [
        f"# Verdicts on {paper.title}",
        f"{paper.source} {paper.note}".strip(),
        "The verdicts are explained [beside the overview](../README.md#every-table-and-figure). "
        "Made by `python experiments/overview.py` from items.toml and the tables that are kept here. "
        "Each command takes `--data-dir DIR` as well, where tensorflow-datasets keeps its data.",
    ]
    return "\n\n".join(parts + [section(paper.folder, item) for item in paper.items]) + "\n"


def section(folder: Path, item: Item) -> str:
    """Return the section of an item."""
    commit = f"commit {item.commit}" if item.commit else ""
    made = "; ".join(filter(None, [", ".join(filter(None, [_seeds(item), commit])), item.machine]))
    parts = [
        f"## {item.name}",
        f"{item.shows} **Claim:** {item.claim}",
        f"**Verdict: {item.verdict}**{f' ({made})' if made else ''}. {item.reason}",
    ]
    commands = [item.command] * bool(item.command)
    commands += [f"jaxfl study {folder.name}/{study}" for study in (item.study, *item.more) if study]
    if commands:
        parts.append("```bash\n" + "\n".join(commands) + "\n```")
    if item.at_scale:
        larger = ", ".join(f"`jaxfl study {folder.name}/{study}`" for study in item.at_scale)
        parts.append(f"At the paper's scale: {larger}.")
    if item.setups:
        parts.append("Setup: " + ", ".join(f"[{name}]({name})" for name in item.setups) + ".")
    if item.figures:
        files = list(dict.fromkeys(figures.file for figures in item.figures))
        parts += [
            as_markdown(gather(folder, item)),
            "Read from " + ", ".join(f"[{file}]({kept(file)})" for file in files) + ".",
        ]
    parts += [f"![{item.name}]({kept(picture)})" for picture in item.pictures]
    return "\n\n".join(parts)


def _seeds(item: Item) -> str:
    match item.seeds:
        case int(number):
            return {0: "", 1: "one seed"}.get(number, f"{number} seeds")
        case words:
            return words


def gather(folder: Path, item: Item) -> list[list[str]]:
    """Return an item's figures as lines of cells, the titles first."""
    titles = list(dict.fromkeys(figures.title for figures in item.figures))
    cells = {label: {} for figures in item.figures for label in figures.rows}
    for figures in item.figures:
        for label, row in figures.rows.items():
            if figures.title in cells[label]:
                raise SystemExit(f"{folder}, {item.name}: two figures are {figures.title!r} of {label!r}")
            cells[label][figures.title] = figure(folder, item, figures, row)
    body = [[label, *(of_row.get(title, "") for title in titles)] for label, of_row in cells.items()]
    return [["", *titles], *body]


def figure(folder: Path, item: Item, figures: Figures, row: str) -> str:
    """Return a figure as kept, or mean and deviation over the lines of a CSV with one line per seed."""
    head, *lines = (from_csv if figures.file.endswith(".csv") else from_markdown)(
        folder / kept(figures.file), figures
    )
    found = [line for line in lines if f"{' | '.join(line)} | ".startswith(f"{row} | ")]
    of_seeds = "seed" in head and figures.file.endswith(".csv")
    seeds = {line[head.index("seed")] for line in found} if of_seeds else {""}
    if figures.column not in head or not found or len(seeds) < len(found):
        raise SystemExit(f"{folder / figures.file} has no one figure of {row!r} under {figures.column!r}.")
    if of_seeds and isinstance(item.seeds, int) and len(found) != item.seeds:
        raise SystemExit(
            f"{folder / figures.file} has {len(found)} seeds of {row}, and items.toml says {item.seeds} of "
            f"{item.name}: look at its verdict again."
        )
    place, spread = head.index(figures.column), f"{figures.column} std"
    texts = [line[place] for line in found]
    if not figures.file.endswith(".csv"):
        return texts[0]
    if not all(texts):  # such as a target that was not reached
        return "-"
    values = [float(text) for text in texts]
    std = found[0][head.index(spread)] if spread in head else ""
    deviation = statistics.stdev(values) if len(values) > 1 else float(std) if std else None
    return f"{statistics.mean(values):.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def from_csv(path: Path, figures: Figures) -> list[list[str]]:
    """Read the lines of a CSV."""
    with path.open() as file:
        return [*csv.reader(file)]


def from_markdown(path: Path, figures: Figures) -> list[list[str]]:
    """Read the lines of a table under a heading of a page, or anywhere on it."""
    lines, at = path.read_text().splitlines(), 0
    if figures.under:
        headings = [line.lstrip("#").strip() if line.startswith("#") else None for line in lines]
        if figures.under not in headings:
            raise SystemExit(f"{path} has no heading {figures.under!r}.")
        at = headings.index(figures.under) + 1
    tables, begun = [], False
    for line in lines[at:]:
        if line.startswith("#") and figures.under:
            break
        if line.startswith("|"):
            tables += [] if begun else [[]]
            tables[-1].append([cell.strip().strip("*`") for cell in line.strip().strip("|").split("|")])
        begun = line.startswith("|")
    if len(tables) < figures.table:
        raise SystemExit(f"{path} has no table {figures.table} under {figures.under!r}.")
    head, _, *body = tables[figures.table - 1]
    return [head, *body]


def overview(papers: list[Paper]) -> str:
    """Return the numbers of items per verdict, and all items at a glance, as two tables."""
    counts = {paper.title: Counter(item.verdict for item in paper.items) for paper in papers}
    lines = [["", *VERDICTS, "items"]]
    lines += [
        [name, *(str(of[verdict]) for verdict in VERDICTS), str(of.total())] for name, of in counts.items()
    ]
    all_of_them = sum(counts.values(), Counter())
    lines += [["all", *(str(all_of_them[verdict]) for verdict in VERDICTS), str(all_of_them.total())]]
    glance = [["", "item", "claim", "study", "verdict", "seeds"]]
    for paper in papers:
        for item in paper.items:
            anchor = item.name.lower().replace(" ", "-")
            link = f"[{item.name}]({paper.folder.name}/verdicts.md#{anchor})"
            study = f"`{paper.folder.name}/{item.study}`" if item.study else ""
            glance.append([paper.title, link, item.claim, study, item.verdict, str(item.seeds or "")])
    return f"{as_markdown(lines)}\n\n{as_markdown(glance)}\n"


def as_markdown(lines: list[list[str]]) -> str:
    """Return lines of cells as a Markdown table, the first line its head."""
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *body])


if __name__ == "__main__":
    main()
