"""What mkdocs is told beside the pages in docs/: those of methods, networks, partitions, made from the code.

Also what stands elsewhere in the repository and is worth reading there: the guide for contributors, the
changelog, the experiments with their pictures. Links into the repository lead to these pages where there is
one, and are plain text else.
"""

import posixpath
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mkdocs.structure.files import File, Files

from jaxfl import registry
from jaxfl.config.options import Described, declared, described, own_first
from jaxfl.config.setup import DataOptions, MachineOptions, PartitionOptions, RunOptions
from jaxfl.core.protocol import Method
from jaxfl.core.schedule import SCHEDULES
from jaxfl.core.training import Training
from jaxfl.data.graphs import TOPOLOGIES
from jaxfl.data.partitioners import PARTITIONS
from jaxfl.data.shift import SHIFTS
from jaxfl.models.zoo import MODELS
from jaxfl.models.zoo import described as described_model

sys.path.insert(0, str(Path(__file__).parent))
from equations import as_markdown

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config) -> Files:
    """Add the pages that are made."""
    for path, content in pages().items():
        files.append(File.generated(config, path, content=content))
    for source, path in elsewhere().items():
        file = ROOT / source
        content = file.read_text() if file.suffix == ".md" else file.read_bytes()
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Turn links into the repository to the pages of the site."""
    made = {path: source for source, path in elsewhere().items()}
    path = page.file.src_uri
    here = posixpath.dirname(made.get(path, f"docs/{path}"))
    known = elsewhere() | {
        f"docs/{file.src_uri}": file.src_uri for file in files if not file.inclusion.is_excluded()
    }

    def replaced(found: re.Match) -> str:
        picture, label, target, anchor = found.groups()
        if ":" in target:
            return found[0]
        source = posixpath.normpath(posixpath.join(here, target))
        its_page = known.get(source) or known.get(f"{source}/README.md")
        if its_page is None:
            return label if label.startswith("`") else f"{label} (`{source}`)"
        return (
            f"{picture}[{label}]({posixpath.relpath(its_page, posixpath.dirname(path) or '.')}{anchor or ''})"
        )

    return LINK.sub(replaced, markdown)


def elsewhere() -> dict[str, str]:
    """Files of the repository, by their paths there, with their paths on the site."""
    found = dict(ELSEWHERE)
    for file in sorted((ROOT / "experiments").rglob("*")):
        if file.suffix in (".md", ".png"):
            source = file.relative_to(ROOT).as_posix()
            found[source] = source.replace("README.md", "index.md")
    return found


def pages() -> dict[str, str]:
    """The pages that are made from the code: Markdown by path."""
    made = {f"methods/{name}.md": method_page(method) for name, method in registry.METHODS.items()}
    made["methods/index.md"] = _methods()
    made["options.md"] = _options()
    made["networks-of-the-zoo.md"] = _catalogue(
        "Networks of the zoo", "`--models NAME,option=value`", MODELS, described_model
    )
    made["partitions.md"] = _catalogue(
        "Partitions, shifts, graphs, schedules",
        "`--partition NAME,option=value`, `--shift`, `--topology` and `--schedule` alike",
        {**PARTITIONS, **SHIFTS, **TOPOLOGIES, **SCHEDULES},
        described,
    )
    return made


def method_page(method: Method) -> str:
    """A method: what it does, its options, whom to cite."""
    module = sys.modules[method.build.__module__]
    config = method.config
    common, its = Training(), config()
    own = [
        n for n in own_first(config) if n not in declared(Training) or getattr(its, n) != getattr(common, n)
    ]
    parts = [
        f"# {method.name}",
        f"**{method.summary[:1].upper()}{method.summary[1:]}.** {method.paper}",
        f"```bash\njaxfl run {method.name} --dataset digits\n```",
        "## How it works",
        as_markdown(module.__doc__ or ""),
        f"Source: `{module.__name__.replace('.', '/')}.py`",
        "## Options and defaults of its own",
        _table(_rows_of(config, own)) if own else "None.",
        f"Those of [every method](../options.md#local-training) and of every run come beside them; "
        f"`jaxfl run {method.name} --help` shows all.",
    ]
    if method.bibtex:
        parts += ["## To cite", f"```bibtex\n{method.bibtex.strip()}\n```"]
    return "\n\n".join(parts)


def _methods() -> str:
    rows = [
        (f"[{name}]({name}.md)", method.summary, method.paper) for name, method in registry.METHODS.items()
    ]
    return "# Methods\n\nEach page is the method's own docstring.\n\n" + _rows(
        ("name", "idea", "source"), rows
    )


def _options() -> str:
    parts = [
        "# Options of every run\n\nFlags of the command, and keyword arguments in Python with `_` for `-`."
    ]
    for title, config in (
        ("Data", DataOptions),
        ("Partition", PartitionOptions),
        ("Run", RunOptions),
        ("Machine", MachineOptions),
        ("Local training", Training),
    ):
        parts.append(f"## {title}\n\n" + _table(_rows_of(config, list(declared(config)))))
    return "\n\n".join(parts)


def _rows_of(config: type, names: Sequence[str]) -> list[Described]:
    rows = {row.name: row for row in described(config)}
    return [rows[name] for name in names]


def _catalogue(title: str, use: str, table: dict[str, Callable], options: Callable) -> str:
    parts = [f"# {title}", f"Chosen by {use}."]
    for name, function in table.items():
        what = (function.__doc__ or "").strip().splitlines()[0]
        known = options(function)
        parts.append(f"## {name}\n\n{what}\n\n" + (_table(known) if known else "No options."))
    return "\n\n".join(parts)


def _table(options: Sequence[Described]) -> str:
    rows = [
        (f"`{one.name.replace('_', '-')}`", f"`{one.default}`" if one.default else "", one.what)
        for one in options
    ]
    return _rows(("option", "default", "what"), rows)


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells):
        return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"

    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])
