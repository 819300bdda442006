"""Files that have moved together with a run's folder, such as a project that was copied to another machine.

A configuration has absolute paths. One that no longer exists is looked for at the same place as seen from the
run's folder: of ``/a/project/runs/x``, now ``/b/project/runs/x``, the file ``/a/project/data.npz`` may be
``/b/project/data.npz``.
"""

import re
from pathlib import Path
from typing import Any

from jaxfl.folder.records import Code, Config


def moved(folder: Path, config: Config, code: bool = False) -> Config:
    """Return a run's configuration with the paths that its files have now.

    Python files only if so asked: a folder may come from somebody else, with a file beside it that is best
    not executed, so the user must have named that file or agreed.
    """
    roots = _roots(folder, config)
    if roots is None:
        return config
    found = {name: _now(value, *roots, code) for name, value in config["options"].items()}
    return {**config, "method": _now(config["method"], *roots, code), "options": found}


def moved_code(folder: Path, config: Config, then: Code) -> Code:
    """Return a run's code, see `jaxfl.folder.code`, with the paths that its files have now."""
    roots = _roots(folder, config)
    if roots is None:
        return then
    files = {_now(path, *roots, True): fingerprint for path, fingerprint in then["files"].items()}
    return {**then, "files": files}


def _roots(folder: Path, config: Config) -> tuple[str, str] | None:
    """Return the folders above a run's, then and now, up to where these differ; None if it has not moved."""
    begun, now = Path(config.get("environment", {}).get("folder", folder.resolve())), folder.resolve()
    if begun == now:
        return None
    while begun.name and begun.name == now.name:
        begun, now = begun.parent, now.parent
    return str(begun).rstrip("/"), str(now).rstrip("/")


def _now(value: Any, old: str, new: str, code: bool) -> Any:
    """Return a text, or a list of texts, with the new paths of files that moved from `old` to `new`."""
    if isinstance(value, list):
        return [_now(entry, old, new, code) for entry in value]
    if not isinstance(value, str):
        return value

    def of_path(match):
        path = match[0]
        is_new = new + path.removeprefix(old)
        here = not Path(path).exists() and Path(is_new).exists()
        return is_new if here and (code or not path.endswith(".py")) else path

    return re.sub(rf"(?<![^=,:\[]){re.escape(old)}/[^,:\]]*", of_path, value)
