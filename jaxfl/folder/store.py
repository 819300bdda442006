"""Run folders, each of which holds all that a report or a resume needs: docs/run-folder.md lists the files.

A process may be killed at any moment. So what a resume reads is written as NAME.part and moved to its place
when complete, except metrics.jsonl, whose lines are read up to the first incomplete one. Of several processes
only the first reads and writes the folder, and broadcasts what it has read. But all of them read checkpoints,
and each writes its shard of what is divided among them.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxfl.data import npz, saved_partition
from jaxfl.data.partition import Partition
from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError
from jaxfl.folder.records import Code, Config, Result, Round, as_type
from jaxfl.machine.files import as_json, below, reads, replacing, unfinished, writes
from jaxfl.machine.processes import on_first_process

T = TypeVar("T")
CONFIG, PARTITION, METRICS, RESULT = "config.json", "partition.npz", "metrics.jsonl", "result.json"
STUDY = "study.csv"
TOPOLOGY = "topology.txt"
INITIAL = "initial.npz"
# Options that a run may change, and where its configuration keeps their first values.
BEGUN = {"rounds": "begun_for", "devices": "begun_on", "data_dir": "begun_in"}
LONGEST_NAME = 200  # bytes, of the 255 that file systems allow: endings are added
OWNER, LOCK, TURN = "owner.json", "owner.lock", "turn.lock"
COMMAND, END = "command.json", "comparison.json"
CHECKPOINTS, CODE = "checkpoints", "code"
ABOUT_CLIENTS = ("matrices", "embeddings")
LOGS = ("tensorboard", "wandb")


@writes
def check_free(folder: Path) -> None:
    """Refuse a folder for a new run that is in use.

    Raises:
      JaxflError: if it holds anything except what killed starts left behind.
    """
    if (folder / CONFIG).exists():
        raise JaxflError(
            f"{folder} already holds a run; choose another --run-dir, or continue it with "
            f"`jaxfl resume {shlex.quote(str(folder))}` (from Python jaxfl.load({str(folder)!r}) opens it, "
            f"jaxfl.resume({str(folder)!r}) continues it, and another run_dir begins anew)."
        )
    if folder.exists() and not (folder.is_dir() and all(map(_of_no_run, below(folder)))):
        raise JaxflError(f"{folder} already holds something else; choose another --run-dir.")


def _of_no_run(path: Path) -> bool:
    """Return whether a path is of a run about to begin, or killed before it had a configuration."""
    begun = [folder for folder in path.parents if unfinished(folder / CONFIG).exists()]
    fits = path.is_dir() or path.name in (OWNER, LOCK, TURN)
    return fits or any(not (folder / CONFIG).exists() for folder in begun)


@writes
def begin(
    folder: Path, config: Config, partition: Partition, source: Source, links: Any, initial: dict[str, Any]
) -> None:
    """Make the folder of a new run.

    Its links are (N, N) bool, (0, 0) without a graph; its initial weights are named arrays, none if all are
    fresh.

    Raises:
      JaxflError: if the folder is in use, or cannot be written.
    """
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / CONFIG) as file:  # in place last, which makes the folder a run
        file.write(as_json(config))
        keep_code(folder, 1, config["code"])
        saved_partition.save(folder / PARTITION, partition, source)
        if links.size:
            from jaxfl.data import (
                graphs as topology,  # here, so that runs without links do not wait for networkx
            )

            (folder / TOPOLOGY).write_text(topology.as_text(np.asarray(links)))
        if initial:
            with (folder / INITIAL).open("wb") as arrays:
                np.savez(arrays, **initial)


@writes
def lengthen(folder: Path, config: Config, rounds: int) -> None:
    """Let a run continue past its end, with more rounds, after those done that are kept.

    Checkpoints stay marked with the first number of rounds.
    """
    old = read_json(folder / CONFIG, Config)
    (folder / RESULT).unlink(missing_ok=True)  # first: a run without a result counts as stopped
    kept = trim(folder, rounds)
    for record in kept:
        record.pop("newcomers", None)
    _replace_metrics(folder, kept)
    with replacing(folder / CONFIG) as file:
        file.write(as_json({BEGUN["rounds"]: old["options"]["rounds"]} | old | config))


@writes
def change(folder: Path, option: str, value: Any) -> Config:
    """Change an option of `BEGUN` in a configuration, which keeps the first value as well, and return it."""
    old = read_json(folder / CONFIG, Config)
    first, options = {BEGUN[option]: old["options"].get(option)}, old["options"] | {option: value}
    config = as_type(Config, {**first, **old, "options": options})
    with replacing(folder / CONFIG) as file:
        file.write(as_json(config))
    return config


@writes
def keep_code(folder: Path, round_: int, code: Code) -> None:
    """Copy the user's files that compute a run from some round on."""
    paths = [Path(path) for path in code["files"]]
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    for path in paths:
        copy = folder / CODE / f"round-{round_}" / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


@on_first_process
def free_folder(name: str, dataset: str = "") -> Path:
    """Return the first of runs/NAME-DATASET, runs/NAME-DATASET-2, ... that does not exist."""
    dataset = dataset.partition(",")[0]
    if "." in dataset:  # a file: its folder and its ending do not matter
        dataset = Path(dataset).stem
    stem = "-".join(filter(None, [name, *re.split("[/:]", dataset)]))
    folder, number = Path("runs") / stem, 2
    while folder.exists():
        folder, number = Path("runs") / f"{stem}-{number}", number + 1
    return folder


def file_name(label: str) -> str:
    """Return a label as the name of a file or a folder, which file systems limit to 255 bytes."""
    name = "".join(mark if mark.isalnum() or mark in "-_=.+" else "-" for mark in label)
    if len(name.encode()) <= LONGEST_NAME:
        return name
    begins = name.encode()[: LONGEST_NAME - 9].decode(errors="ignore")
    return f"{begins}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


@reads
def holds(folder: Path, name: str) -> bool:
    """Return whether a folder holds the file `name`."""
    return (folder / name).exists()


def read_json(path: Path, kind: type[T]) -> T:
    """Read a file of a folder whose values must fit a type of `jaxfl.folder.records`.

    Raises:
      JaxflError: if it is missing or damaged.
    """
    if not path.is_file():
        if (path.parent / STUDY).exists():
            raise JaxflError(f"{path.parent} is a study; name a comparison in it, or read its runs.csv.")
        if next(path.parent.glob(f"*/seed-*/{CONFIG}"), None):
            raise JaxflError(
                f"{path.parent} is a comparison; name one of the runs in it, METHOD/seed-S, or repeat its "
                "command to go on with all of them."
            )
        if one := next(path.parent.glob(f"seed-*/{CONFIG}"), None):
            raise JaxflError(f"{path.parent} holds a method's runs; name one of them, such as {one.parent}.")
        if not path.parent.exists():
            raise JaxflError(f"There is no folder {path.parent}.")
        raise JaxflError(f"{path.parent} is not a run folder: it has no {path.name}.")
    try:
        return as_type(kind, json.loads(path.read_bytes()))
    except (RecursionError, ValueError) as error:
        raise JaxflError(f"{path} is damaged ({error}); restore it from a copy.") from None


@reads
def read_config(folder: Path) -> Config:
    """Read a run's configuration.

    Raises:
      JaxflError: if the folder holds no run or a link that leads out of it, or the file is damaged.
    """
    if not (folder / CONFIG).exists() and unfinished(folder / CONFIG).exists():
        raise JaxflError(f"{folder} was stopped before it began; repeat the command that began it.")
    _refuse_links(folder)
    return read_json(folder / CONFIG, Config)


def _refuse_links(folder: Path) -> None:
    """Refuse links out of a run folder, which may come from somebody else: a resume writes and deletes there.

    Links within log folders are allowed: W&B links to its cache.
    """
    for entry in folder.glob("*"):
        for path in (entry, *(below(entry) if entry.name not in LOGS else ())):
            if path.is_symlink() and not (path.exists() and inside(path, folder)):
                raise JaxflError(
                    f"{path} is a link that leads out of the run folder or nowhere; replace it with what it "
                    "points to."
                )


def inside(path: Path, folder: Path) -> bool:
    """Return whether a path is in a folder when links are followed, which may form a cycle."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


@reads
def checksums(folder: Path) -> tuple[tuple, str]:
    """Return the checksums of a run's data, labels and images, and that of its partition.

    The images' is None if an earlier version has begun the run.
    """
    arrays = npz.read(folder / PARTITION, required=("checksum",))
    rows = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays)))
    return (int(arrays["checksum"]), read_config(folder)["data"].get("checksum")), rows.hexdigest()


@reads
def read_finished(folder: Path) -> tuple[Result, list[Round]]:
    """Read a finished run's result, and the metrics of all its rounds.

    Raises:
      JaxflError: if one of them is missing or damaged.
    """
    result, metrics = read_json(folder / RESULT, Result), read_metrics(folder)
    if not 0 < len(metrics) == result["rounds"]:
        known = f"{len(metrics)} of {result['rounds']} rounds can be read"
        raise JaxflError(
            f"{folder / METRICS} is damaged ({known}); restore it from a copy, or delete {folder / RESULT} "
            f"and resume {folder} to compute the missing ones."
        )
    return result, metrics


@writes
def append_metrics(folder: Path, records: list[Round]) -> None:
    """Append one line per round and flush it to the disk."""
    with (folder / METRICS).open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())


@writes
def write_about_clients(folder: Path, kind: str, rounds: int, arrays: dict[str, Any]) -> None:
    """Write a method's matrices or embeddings after some rounds, by name."""
    path = folder / kind / f"{rounds}.npz"
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        np.savez_compressed(file, **arrays)


@reads
def read_about_clients(folder: Path, kind: str, rounds: int | None = None) -> dict[str, np.ndarray]:
    """Read what `write_about_clients` wrote, by default last; nothing if the method has none."""
    numbers = [int(path.stem) for path in (folder / kind).glob("*.npz") if path.stem.isdecimal()]
    last = max(numbers, default=0) if rounds is None else rounds
    return npz.read(folder / kind / f"{last}.npz", required=()) if numbers else {}


@reads
def read_partition(folder: Path) -> Partition:
    """Read a run's partition without its data."""
    return saved_partition.read(folder / PARTITION)


@reads
def read_metrics(folder: Path, rounds: int | None = None) -> list[Round]:
    """Read the records of the first `rounds` rounds, all by default.

    They end before a damaged line, which a crash has cut short or somebody has changed.
    """
    path = folder / METRICS
    lines = path.read_bytes().splitlines()[:rounds] if path.exists() else []
    records = []
    for line in lines:
        try:
            record = as_type(Round, json.loads(line))
        except (RecursionError, ValueError):
            break
        if record["round"] != len(records) + 1:
            break
        records.append(record)
    return records


def _number(path: Path) -> str:
    return path.name.removeprefix("round-")


@writes
def trim(folder: Path, rounds: int) -> list[Round]:
    """Drop what was written after `rounds` rounds, and return the records that are left."""
    kept = read_metrics(folder, rounds)
    _replace_metrics(folder, kept)
    for path in (path for kind in ABOUT_CLIENTS for path in (folder / kind).glob("*.npz")):
        if not path.stem.isdecimal() or int(path.stem) > rounds:
            path.unlink()
    for path in (folder / CODE).glob("round-*"):
        if not _number(path).isdecimal() or int(_number(path)) > max(1, rounds):
            shutil.rmtree(path)
    return kept


def _replace_metrics(folder: Path, records: list[Round]) -> None:
    with replacing(folder / METRICS) as file:
        file.writelines(f"{json.dumps(record)}\n".encode() for record in records)


def fingerprint(config: Config) -> str:
    """Return a hash of a configuration: the method and all its options, as the run was begun."""
    options = dict(config["options"])
    for name, begun in BEGUN.items():
        if begun in config:
            options[name] = config[begun]
    chosen = {"method": config["method"], "options": options}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]
