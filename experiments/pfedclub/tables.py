"""The models that pFedClub's server assembled, and its seconds, from the folders of runs.

    python experiments/pfedclub/tables.py RUN [RUN ...]

Prints Markdown: the teachers' change in size per client (the paper's phi), statistics of candidates, and the
server's seconds a round. Runs of one method are its seeds, whose teachers and rounds are taken together. The
seconds leave out the first round, as its programs are not warm.
"""

import argparse
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

STEPS = ("signatures", "grouping", "search", "stitching", "matching", "teacher logits", "compilation")


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    arguments = parser.parse_args()
    of_label: dict[str, list[list[dict]]] = {}
    for run in arguments.runs:
        of_label.setdefault(json.loads((run / "config.json").read_text())["label"], []).append(read(run))
    labels, findings = list(of_label), list(of_label.values())
    assembled = [
        [found for rounds in seeds for each in rounds for found in each["assembled"]] for seeds in findings
    ]

    print_table(["client, parameters", *(f"{label}: mean, max" for label in labels)], sizes(assembled))
    columns = "candidates of a client: mean, least|blocks|substituted|their similarity|teachers in order"
    print_table(["", *columns.split("|"), "phi: mean, max"], map(candidates, labels, assembled))
    print_table(["seconds a round", *STEPS, "programs"], map(seconds, labels, findings))


def read(run: Path) -> list[dict]:
    """Read the findings of every round."""
    return [json.loads(line)["findings"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def sizes(assembled: list[list[dict]]) -> Iterable[list[str]]:
    """Yield a row per client: the change in size of its teachers."""
    parameters = {found["client"]: found["model"] for each in assembled for found in each}
    for client, size in sorted(parameters.items()):
        own = ([found["phi"] for found in each if found["client"] == client] for each in assembled)
        yield [f"{client}, {size:,}", *(change(phi) for phi in own)]


def candidates(label: str, found: list[dict]) -> list[str]:
    """Return statistics of a run's teachers and of the candidates from which they were chosen."""
    blocks = [each["blocks"] for each in found]
    substituted = [[block for block in each if block.get("substituted")] for each in blocks]
    ordered = [all(a["index"] < b["index"] for a, b in pairwise(each)) for each in blocks]
    alike = [block["similarity"] for each in substituted for block in each]
    counts = [each["candidates"] for each in found]
    return [
        label,
        f"{np.mean(counts):.2f}, {min(counts)}",
        f"{np.mean([*map(len, blocks)]):.2f}",
        f"{np.mean([*map(len, substituted)]):.2f}",
        f"{np.mean(alike):.2f}" if alike else "",
        f"{sum(ordered)} of {len(found)}",
        change([each["phi"] for each in found]),
    ]


def seconds(label: str, seeds: list[list[dict]]) -> list[str]:
    """Return the server's seconds in a round, step by step, and its number of compiled programs in a run."""
    warm = [each["server seconds"] for rounds in seeds for each in rounds[1:] or rounds]
    means = [np.mean([each[step] for each in warm]) for step in STEPS]
    programs = np.mean([rounds[-1]["compiled parts"]["programs"] for rounds in seeds])
    return [label, *(f"{mean:.2f}" for mean in means), f"{programs:.0f}"]


def change(phi: list[float]) -> str:
    """Return mean and largest change in size."""
    return f"{np.mean(phi):+.3f}, {max(phi):+.3f}" if phi else ""


def print_table(header: list[str], rows: Iterable[list[str]]) -> None:
    """Print rows as a Markdown table."""
    for row in (header, ["---"] * len(header), *rows):
        print("|", " | ".join(row), "|")
    print()


if __name__ == "__main__":
    main()
