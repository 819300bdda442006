"""The cost of drafts beside local learning: DraftFed's Table IV.

    jaxfl compare local draftfed,draft_epochs=0 draftfed @FILE.args --run-dir RUNS
    python experiments/draftfed/phases.py RUNS > experiments/draftfed/results/phases.csv

Local learning is all that Local does, drafts are what DraftFed does beyond it; without epochs of draft
learning it only prepares them. Operations are counted, seconds are measured without compilation, both over
all rounds. The compiler drops drafts that no client learns from, so seconds have no parts of drafts.
"""

import csv
import sys
from pathlib import Path

from jaxfl.grid.comparison import load


def main() -> None:
    """Print a line for each phase."""
    runs = {label: run for (label, _), run in load(Path(sys.argv[1])).runs.items()}
    local, prepared, all_ = (runs[name] for name in ("local", "draftfed,draft_epochs=0", "draftfed"))
    counted = {
        "local learning": flops(local),
        "preparing drafts": flops(prepared) - flops(local),
        "learning from drafts": flops(all_) - flops(prepared),
        "both": flops(all_) - flops(local),
    }
    measured = {"local learning": seconds(local), "both": seconds(all_) - seconds(local)}
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow(["phase", "GFLOP", "GFLOP, % of local", "seconds", "seconds, % of local"])
    for phase, operations in counted.items():
        took = measured.get(phase)
        cells = [f"{operations / 1e9:.1f}", f"{100 * operations / counted['local learning']:.1f}"]
        if took is not None:
            cells += [f"{took:.1f}", f"{100 * took / measured['local learning']:.1f}"]
        lines.writerow([phase, *cells, *[""] * (4 - len(cells))])


def flops(run) -> float:
    """Return the operations of a run's training."""
    return run.result["flops"]


def seconds(run) -> float:
    """Return the seconds of a run's rounds."""
    return float(run.seconds["train"].sum())


if __name__ == "__main__":
    main()
