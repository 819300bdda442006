"""The numbers that a client of Hermes sends as it prunes: DraftFed's Table I.

    jaxfl run hermes @FILE.args --run-dir RUN
    python experiments/draftfed/hermes.py RUN > experiments/draftfed/results/hermes.csv

Numbers have four bytes and include the mask. Beside them is the share of the network kept at that moment.
"""

import csv
import sys
from pathlib import Path

from jaxfl.deployed.load import load


def main() -> None:
    """Print a line for each round."""
    run = load(Path(sys.argv[1]))
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow(["round", "kept, %", "numbers sent"])
    for record in run.metrics:
        kept, (sent, *_) = record["findings"]["kept"]["mean"], record["client_bytes_up"]
        lines.writerow([record["round"], f"{100 * kept:.1f}", sent // 4])


if __name__ == "__main__":
    main()
