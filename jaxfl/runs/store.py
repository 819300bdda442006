"""A run is a folder, and nothing that a report or a resume needs is outside of it.

Of several processes the first alone reads and writes it.

Its files are

    config.json      options, models, versions, device
    partition.npz    whose rows are whose
    metrics.jsonl    one object per round, flushed
    checkpoints/     one folder per checkpoint, named by the rounds done
    matrices/        an .npz per checkpoint, of methods that know about pairs of clients
    result.json      the summary, once the run has ended
    curves.png, findings.png, assembled.png, matrices.png
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.data import npz
from jaxfl.errors import JaxflError, writing
from jaxfl.processes import by_first

CONFIG, PARTITION, METRICS, RESULT = "config.json", "partition.npz", "metrics.jsonl", "result.json"
CHECKPOINTS, MATRICES = "checkpoints", "matrices"
# Options that runs of one experiment may differ in.
INCIDENTAL = ("seed", "data_dir", "clients_at_once", "devices", "convolution", "checkpoint_every")


@by_first
def check_free(folder: Path) -> None:
    """Refuse a folder for a new run that is in use.

    Raises:
      JaxflError: if it holds anything.
    """
    with writing(folder):
        if (folder / CONFIG).exists():
            raise JaxflError(
                f"{folder} already holds a run; choose another --run-dir, or continue it with "
                f"`jaxfl resume {folder}`."
            )
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise JaxflError(f"{folder} already holds something else; choose another --run-dir.")


@by_first
def create(folder: Path) -> Path:
    """Make a folder for a new run.

    Returns:
      The outermost folder that had to be made, for `discard`; the folder itself if it was there.

    Raises:
      JaxflError: if it is in use, or cannot be written.
    """
    check_free(folder)
    with writing(folder):
        made = folder
        while not made.parent.exists():
            made = made.parent
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / CONFIG
        probe.write_text("")
        probe.unlink()
    return made


@by_first
def discard(folder: Path, made: Path) -> None:
    """Undo `create`: remove a run and the folders made around it, unless these hold something else by now."""
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):
        while folder != made:
            folder = folder.parent
            folder.rmdir()


@by_first
def free_folder(name: str, dataset: str = "") -> Path:
    """The first of runs/NAME-DATASET, runs/NAME-DATASET-2, ... that does not exist."""
    if "." in dataset:  # a file: its folder and its ending do not matter
        dataset = Path(dataset).stem
    stem = "-".join(filter(None, [name, *re.split("[/:]", dataset)]))
    folder, number = Path("runs") / stem, 2
    while folder.exists():
        folder, number = Path("runs") / f"{stem}-{number}", number + 1
    return folder


@by_first
def holds(folder: Path, name: str) -> bool:
    """Whether a run has one of its files."""
    return (folder / name).exists()


@by_first
def write_json(path: Path, value: Any) -> None:
    """Write JSON at once: a reader sees the old file or the new one."""
    with writing(path):
        part = path.with_suffix(".part")
        part.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(part, path)


@by_first
def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
      JaxflError: if the file is missing or is not JSON.
    """
    if not path.is_file():
        raise JaxflError(f"{path.parent} is not a run folder: it has no {path.name}.")
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise JaxflError(f"{path} is damaged ({error}); restore it from a copy.") from None


def read_config(folder: Path) -> dict:
    """Read a run's configuration.

    Raises:
      JaxflError: if the folder holds no run, or the file is damaged.
    """
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict) or not {"method", "label", "options", "environment"} <= set(config):
        raise JaxflError(f"{folder / CONFIG} is damaged (it lacks entries); restore it from a copy.")
    return config


@by_first
def append_metrics(folder: Path, records: list[dict]) -> None:
    """Append one line per round and flush it to the disk."""
    with writing(folder / METRICS), (folder / METRICS).open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())


@by_first
def write_matrices(folder: Path, rounds: int, matrices: dict[str, np.ndarray]) -> None:
    """Write arrays (N, N) by name, as they are after some rounds."""
    path = folder / MATRICES / f"{rounds}.npz"
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        np.savez_compressed(path, **matrices)


@by_first
def read_matrices(folder: Path, rounds: int) -> dict[str, np.ndarray]:
    """Read what `write_matrices` wrote."""
    return npz.read(folder / MATRICES / f"{rounds}.npz", required=())


@by_first
def read_metrics(folder: Path, rounds: int | None = None) -> list[dict]:
    """The lines of the first `rounds` rounds (all by default); a line cut short by a crash is left out."""
    path = folder / METRICS
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [record for record in records if rounds is None or record["round"] <= rounds]


@by_first
def keep_metrics(folder: Path, rounds: int) -> list[dict]:
    """Drop the lines after `rounds` rounds, before a run continues from a checkpoint."""
    kept = read_metrics(folder, rounds)
    path = folder / METRICS
    with writing(path):
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(part, path)
    return kept


def experiment(config: dict) -> dict:
    """What a run tries: its method and its options. Runs in which this is equal are seeds of one another."""
    options = {name: value for name, value in config["options"].items() if name not in INCIDENTAL}
    # Methods that came as Python objects are known by their label alone.
    return {"method": config["method"] or config["label"]} | options


def fingerprint(config: dict) -> str:
    """Tells configurations apart: a hash of the method and all its options."""
    chosen = {name: config[name] for name in ("method", "options")}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]
