"""The deployment of a run: a folder that `flwr run` takes, whose clients train as those of the run do."""

import json
from pathlib import Path

from jaxfl.deployed.device import opened_at
from jaxfl.machine import files
from jaxfl.machine.environment import versions
from jaxfl.runs.open import require_same_rates

HERE = Path(__file__).parent
COPIED = "client_app.py", "server_app.py"


def write(run: Path, folder: Path, after: int | None = None) -> list[Path]:
    """Write an app for Flower that goes on with a run, or repeats it; return the paths of its files.

    Raises:
      JaxflError: if the folder holds anything or cannot be written, the run has no such state or several
        architectures, its method needs more than a server that averages, or the run is over and its schedule
        allows no more rounds.
    """
    run, folder = run.resolve(), folder.resolve()
    files.check_empty(folder)
    opened_run, averaged = opened_at(run, after)
    setup, method = opened_run.setup, opened_run.variant.method
    after = opened_run.record["round"] if after is None else after
    rounds = setup.run.rounds - after or setup.run.rounds
    if after + rounds > setup.run.rounds:
        require_same_rates(run, setup, after + rounds)
    values = {
        "run": str(run),
        "out": str(folder / "global.npz"),
        "after": after,
        "rounds": rounds,
        "length": after + rounds,
        "clients": len(opened_run.partition.train),
        "participation": setup.run.participation,
        "label": opened_run.variant.label,
        "title": f"{opened_run.variant.label} on {setup.data.dataset}",
        "summary": method.summary,
        "model": opened_run.federation.models[0].name,
        "begins": f"continues after its round {after}" if after else "begins with its first weights",
        "mean": "by their training rows" if averaged.by_rows else "equally",
        "jaxfl": versions()["jaxfl"],
    }
    # TOML and JSON write a value alike, except letters beyond the first 65,536, which JSON would cut in two.
    as_toml = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    contents = {name: (HERE / name).read_text() for name in COPIED}
    contents |= {"pyproject.toml": PROJECT.format(**as_toml), "README.md": README.format(**values)}
    for name, content in contents.items():
        files.write_bytes(folder / name, content.encode())
    return [folder / name for name in contents]


PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "jaxfl-app"
version = "1.0.0"
description = {title}
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]  # Flower would install what is named here; jaxfl is where Flower is

[tool.flwr.app]
publisher = "jaxfl"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
run = {run}  # where server and nodes read the run
after = {after}  # its rounds that are done
length = {length}  # rounds in all, which a schedule of rates may depend on
num-server-rounds = {rounds}
fraction-train = {participation}
clients = {clients}  # the server waits for this many
out = {out}  # the server's last mean
"""

README = """\
# {title}

{label}: {summary}. Written by jaxfl {jaxfl} from the run `{run}`; it {begins}. Architecture: {model}.

```bash
pip install 'flwr[simulation]'  # where jaxfl is
flwr run . local --stream --federation-config "num-supernodes={clients}"
```

`client_app.py` trains a client by jaxfl: the method's objective, optimiser and batches, which the run's seed
decides. It sends what the method shares; what is personal stays in the node's state. `server_app.py` is
Flower's own FedAvg; clients are weighted {mean}. The last mean is written to `out` (see
`pyproject.toml`), which `jaxfl run METHOD --init-from` takes.

On real nodes: put jaxfl and a copy of the run's folder on each, let `own_data` in `client_app.py` return the
node's images, and start `flower-supernode` with

    --node-config 'partition-id=3 run="/where/the/copy/is"'
"""
