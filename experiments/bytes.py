"""The bytes that a client sends and receives in a round of thirteen methods: ledger beside formula.

    python experiments/bytes.py

Each method runs for three rounds of digits on two architectures. In the last round the ledger of every client
is compared with a formula. The table is bytes.md; a wrong formula ends the script with both numbers.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jaxfl
from jaxfl.deployed.load import Loaded

PAGE = Path(__file__).with_suffix(".md")
CLIENTS, HIDDEN, PIXELS, CLASSES = 4, (32, 16), 64, 10
SETUP = {"dataset": "digits", "clients": CLIENTS, "rounds": 3, "eval_every": 3, "epochs": 1, "quiet": True}
SETUP |= {"partition": "classes,classes_per_client=4,samples_per_client=20", "public": "held-out,share=0.1"}
MODELS = tuple(f"mlp,hidden={hidden}" for hidden in HIDDEN)
AS_MANY_FEATURES = tuple(f"{model},features=24" for model in MODELS)


class Row(NamedTuple):
    """A method with options, and formulas for the four-byte numbers that a client sends and receives."""

    method: str
    up: str
    down: str
    models: tuple[str, ...] = MODELS


# Formulas are Python, so that the table shows what was computed.
PRUNED = "(D + 1) * h // {} + C * (h // {} + 1) + 1"
ROWS = [
    Row("fedmd", "R * C", "R * (C + 1)"),
    Row("sim-pfd", "R * C", "R * (C + 1)"),
    Row("topk-pfd,neighbours=2", "R * C", "R * (C + 1)"),
    Row("fccl,public_batch=32", "R // 32 * 32 * C", "R // 32 * 32 * (C + 1)"),
    Row("feddf", "P", "P"),
    Row("pfeddf", "P", "P"),
    Row("fedkemf", "p", "p"),
    Row("fedproto", "k * (d + 2)", "K * (d + 1)", AS_MANY_FEATURES),
    Row("fedgh", "k * (d + 1)", "C * (d + 1)", AS_MANY_FEATURES),
    Row("heterofl", "P", "P"),
    Row("flexifed", "P", "P"),
    Row("hermes,prune=0.5,threshold=0,target_ratio=0.01", PRUNED.format(8, 8), PRUNED.format(4, 4)),
    Row("pfedhr,server_epochs=0,groups=2,shortest=2,longest=2", "P", "T"),
]
LEGEND = """
D: pixels. C: classes. P: numbers in the client's network, p: in the smallest one, h: its hidden units. d:
features before the classifier. k: classes that the client has, K: that some client has. R: public images of a
round; C + 1 means that their row numbers are sent, too. T: numbers in the client's last teacher. Hermes
prunes half of the units in each of the three rounds; its last number is the mask, 32 units a number.
"""


def checked(row: Row, folder: Path) -> list[str]:
    """Return the cells of a row: formulas, and the bytes of the first and the last client."""
    run = jaxfl.run(row.method, models=row.models, run_dir=folder / row.method.partition(",")[0], **SETUP)
    last, cells = run.metrics[-1], [f"`{row.method}`"]
    labels = [set(run.source.labels[rows]) for rows in run.partition.train]
    teachers = {of_client["client"]: of_client["teacher"] for of_client in taught_before(run)}
    for way, formula in (("up", row.up), ("down", row.down)):
        shown = []
        for client, counted in sorted(zip(last["clients"], last[f"client_bytes_{way}"], strict=True)):
            h = HIDDEN[client * len(HIDDEN) // CLIENTS]
            facts = {"h": h, "D": PIXELS, "C": CLASSES, "d": 24, "R": len(run.partition.public)}
            facts |= {"P": network(h), "p": network(min(HIDDEN)), "T": teachers.get(client)}
            facts |= {"k": len(labels[client]), "K": len(set().union(*labels))}
            expected = 4 * eval(formula, facts)
            if counted != expected:
                raise SystemExit(f"{row.method}, {client}: {counted} bytes {way}, not {expected}, {formula}.")
            shown.append(f"{counted:,}")
        cells += [f"`{formula}`", f"{shown[0]}, {shown[-1]}"]
    return cells


def network(hidden: int) -> int:
    """Return the number of parameters of a network."""
    return (PIXELS + 1) * hidden + (hidden + 1) * CLASSES


def taught_before(run: Loaded) -> list[dict]:
    """Return the teachers assembled in the last round but one."""
    assembled: Any = run.findings.get("assembled")
    return assembled[-2] if assembled else []


def main():
    """Run all methods and write the page."""
    head = ["method", "up, numbers", "bytes of two clients", "down, numbers", "bytes of two clients"]
    with tempfile.TemporaryDirectory() as folder:
        rows = [head, ["---"] * len(head), *(checked(row, Path(folder)) for row in ROWS)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    about = (
        "Made by `python experiments/bytes.py`: the third round of two\n"
        "MLPs on digits, four clients; a number has four bytes."
    )
    PAGE.write_text(f"# Bytes of a client in a round\n\n{about}\n\n{table}\n{LEGEND}")


if __name__ == "__main__":
    main()
