"""Fingerprints of the code that computes a run: jaxfl and the user's own files.

A code is {"package": fingerprint, "files": {path: fingerprint}}. A run's configuration holds the code that
began it. Another code that took over is in the metrics, at the first round that it computed.
"""

import functools
import hashlib
from collections.abc import Collection
from pathlib import Path

from jaxfl.config.own_code import helpers
from jaxfl.errors import JaxflError
from jaxfl.folder.config import own_objects
from jaxfl.folder.moved_paths import moved_code
from jaxfl.folder.used_source import needed
from jaxfl.machine.processes import on_first_process


def present(config: dict) -> dict:
    """Return this process's code: jaxfl, the user's files in a configuration, and what these import.

    Call this when they are loaded: modules beside them count only if they have been imported.
    """
    named = own_objects(config)
    # The script that runs this and files that another run names are not part of this run.
    near = [path for path in helpers({own.resolve().parent for own in named}) if path.suffix == ".py"]
    whole = {path.resolve() for path in near}  # what others take from these files is not known
    used = {path.resolve(): () if path.resolve() in whole else names for path, names in named.items()}
    files = {path: _fingerprint(path, used.get(path, ())) for path in sorted({*whole, *used})}
    return {"package": _package(), "files": {str(path): fingerprint for path, fingerprint in files.items()}}


def latest(folder: Path, config: dict, metrics: list[dict]) -> dict:
    """Return the code that computed the last of some rounds.

    Files that have moved with the run's folder have the paths where they are now.
    """
    then = next((record["code"] for record in reversed(metrics) if "code" in record), config["code"])
    return moved_code(folder, config, then)


def history(config: dict, metrics: list[dict]) -> list[dict]:
    """Return all codes of a run, each with the first round that it computed."""
    begun = [] if "code" in metrics[0] else [{"round": 1} | config["code"]]
    return begun + [{"round": record["round"]} | record["code"] for record in metrics if "code" in record]


@on_first_process
def same(then: dict, now: dict) -> bool:
    """Return whether a run's code is unchanged, so that no new code needs to be recorded.

    Call this when `now` has been loaded: the user's files are read again.
    """
    return then["package"] == now["package"] and not changed(then)


def same_package(then: dict) -> bool:
    """Return whether jaxfl itself is unchanged."""
    return then["package"] == _package()


@on_first_process
def refuse_changed(folder: Path, then: dict) -> None:
    """Refuse to go on if the user's files have changed.

    Raises:
      JaxflError: naming the first changed file.
    """
    if files := changed(then):
        if not Path(files[0]).exists():
            raise JaxflError(
                f"{files[0]}, which {folder} was computed with, is missing; put it back (a copy is in "
                f"{folder}/code)."
            )
        raise JaxflError(
            f"{files[0]} has changed since {folder} was computed (a copy from then is in {folder}/code); "
            f"restore it, remove {folder} to train again, or add --changed-code (from Python "
            "changed_code=True) to continue with the new version."
        )


def changed(code: dict) -> list[str]:
    """Return the user's files that have changed."""

    def same(path, then):
        names, _, _ = then.partition(":")
        return then == _fingerprint(path, names.split("+"))

    return [path for path, then in code["files"].items() if not same(Path(path), then)]


def _fingerprint(path: Path, names: Collection[str]) -> str | None:
    """Return the names of what is used of a Python file, and the digest of what that depends on."""
    if not path.is_file():
        return None
    names = sorted(filter(None, names))
    text = needed(path.read_text(encoding="utf-8", errors="replace"), names)
    return f"{'+'.join(names)}:{hashlib.sha256(text.encode()).hexdigest()}"


_ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def _package() -> str:
    """Return the fingerprint of all source files of jaxfl."""
    digest = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        of_file = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(_ROOT)} {of_file}".encode())
    return digest.hexdigest()
