"""Fingerprints of the code that computes a run: jaxfl and the user's own files.

A run's configuration holds the code that began it. Another code that took over is in the metrics, at the
first round that it computed.
"""

import functools
import hashlib
from pathlib import Path

from jaxfl.config.own_code import helpers
from jaxfl.errors import JaxflError
from jaxfl.folder.config import moved_code, own_objects
from jaxfl.folder.records import Chosen, Code, Config, Round
from jaxfl.machine.processes import on_first_process


def present(config: Config | Chosen) -> Code:
    """Return this process's code: jaxfl, the user's files in a configuration, and what these import.

    Call this when they are loaded: modules beside them count only if they have been imported.
    """
    named = own_objects(config)
    # The script that runs this and files that another run names are not part of this run.
    near = [path for path in helpers({own.resolve().parent for own in named}) if path.suffix == ".py"]
    files = sorted({path.resolve() for path in (*named, *near)})
    return {"package": _package(), "files": {str(path): _digest(path) for path in files}}


def latest(folder: Path, config: Config, metrics: list[Round]) -> Code:
    """Return the code that computed the last of some rounds.

    Files that have moved with the run's folder have the paths where they are now.
    """
    then = next((record["code"] for record in reversed(metrics) if "code" in record), config["code"])
    return moved_code(folder, config, then)


def history(config: Config, metrics: list[Round]) -> list[Code]:
    """Return all codes of a run, each with the first round that it computed."""
    begun: list[Code] = [] if "code" in metrics[0] else [{"round": 1, **config["code"]}]
    return begun + [{"round": record["round"], **record["code"]} for record in metrics if "code" in record]


@on_first_process
def same(then: Code, now: Code) -> bool:
    """Return whether a run's code is unchanged, so that no new code needs to be recorded.

    Call this when `now` has been loaded: the user's files are read again.
    """
    return then["package"] == now["package"] and not changed(then)


def same_package(then: Code) -> bool:
    """Return whether jaxfl itself is unchanged."""
    return then["package"] == _package()


@on_first_process
def refuse_changed(folder: Path, then: Code) -> None:
    """Refuse to go on if the user's files have changed."""
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


def changed(code: Code) -> list[str]:
    """Return the user's files that have changed."""
    return [path for path, then in code["files"].items() if then != _digest(Path(path))]


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


_ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def _package() -> str:
    digest = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        digest.update(f"{path.relative_to(_ROOT)} {_digest(path)}".encode())
    return digest.hexdigest()
