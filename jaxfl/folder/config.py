"""The content of config.json: the choices of a run, written and restored.

It has absolute paths. A project may have been copied to another machine, so one that no longer exists is
looked for at the same place as seen from the run's folder: of ``/a/project/runs/x``, now
``/b/project/runs/x``, the file ``/a/project/data.npz`` may be ``/b/project/data.npz``.
"""

import json
import re
from pathlib import Path
from typing import Any

from jaxfl import registry
from jaxfl.config import choices
from jaxfl.config.asked import make
from jaxfl.config.options import declared
from jaxfl.config.setup import MachineOptions, PartitionOptions, Setup, is_edges, is_saved
from jaxfl.config.values import as_path
from jaxfl.core.training import Training
from jaxfl.data import readers
from jaxfl.data.partitioners import rule_of_test
from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.folder.records import Chosen, Code, Config
from jaxfl.folder.variant import Variant, variant_of


def described(variant: Variant, setup: Setup) -> Chosen:
    """Return the choices as a run's configuration holds them, with absolute paths."""
    return {
        "method": variant.name,
        "label": variant.label,
        "options": _plain(absolute(setup).flat()) | _plain(_with_absolute_paths(vars(variant.config))),
    }


def _with_absolute_paths(value: Any) -> Any:
    """Return options, of any type, such that they name the same files from everywhere."""
    match value:
        case str():
            return choices.absolute(value)
        case Path():
            return as_path(value).resolve()
        case tuple():
            return tuple(map(_with_absolute_paths, value))
        case dict():
            return {name: _with_absolute_paths(entry) for name, entry in value.items()}
    return value


def absolute(setup: Setup) -> Setup:
    """Return the same options with absolute paths, which name the same files from every directory."""
    data_dir = setup.machine.data_dir
    words = {name: value for name, value in setup.flat().items() if isinstance(value, str | tuple | Path)}
    setup = setup.replace(**_with_absolute_paths(words))
    dataset = readers.absolute(setup.data.dataset)
    partition = setup.partition.partition
    if is_saved(partition):
        partition = str(as_path(partition).resolve())
    elif partition.startswith("listed,"):
        name, options = choices.split(partition)
        files = {"file": str(as_path(options["file"]).resolve())} if "file" in options else {}
        partition = choices.join(name, options | files)
    public, options = choices.split(setup.data.public)
    if public not in ("auto", "none", "held-out"):
        public = readers.absolute(public)
    edges = setup.run.topology
    if is_edges(edges):
        edges = str(as_path(edges).resolve())
    init_from = (str(as_path(place).resolve()) for place in setup.run.init_from)
    return setup.replace(
        dataset=dataset,
        public=choices.join(public, options),
        data_dir=data_dir and as_path(data_dir).absolute(),  # unresolved: a link may change
        partition=partition,
        topology=edges,
        init_from=tuple(init_from),
    )


def restore(folder: Path, config: Config, changed_code: bool = False) -> tuple[Setup, Variant]:
    """Restore the setup and the variant that a run's configuration describes.

    The user's own files that have moved with the run are used only if code may have changed.

    Raises:
      JaxflError: if they cannot be found again, or their code is in the run folder, which is only data.
    """
    if config["method"] is None:
        raise JaxflError(
            f"{folder} was made from Python with a method of its own ({config['label']}); name it as "
            "path/to/file.py:object in a new run, which can be resumed and its models loaded."
        )
    setup = restore_setup(folder, config, changed_code)
    config = moved(folder, config, changed_code)
    assert config["method"]
    method, _ = registry.method(config["method"])
    known, options = declared(Setup) | declared(method.config), config["options"]
    for name in options:
        if name not in known:
            raise JaxflError(
                f"{folder / store.CONFIG} does not fit this version of jaxfl, in which {method.name} has no "
                f"option {name!r}; use jaxfl {config['environment'].get('jaxfl')}, which made the run."
            )
    found = variant_of(config["method"], method, make(method.config, method.name, options))
    return setup, found._replace(label=config["label"])


def restore_setup(folder: Path, config: Config, changed_code: bool = False) -> Setup:
    """Restore the setup that a run's configuration describes, whatever its method is.

    Raises:
      JaxflError: if it does not describe a setup, or its code is in the run folder, which is only data.
    """
    config = moved(folder, config, changed_code)
    _refuse_code_within(folder, config)
    # A missing option is newer than the run, which did what the default says.
    return Setup.of(**{name: value for name, value in config["options"].items() if name in declared(Setup)})


def experiment(config: Config | Chosen, beyond_target: bool = False) -> dict:
    """Return a run's method and options; runs that share them are repetitions with other seeds.

    Options newer than the run have their defaults. The user's code is not loaded for this.
    """
    options = _plain(Setup().flat()) | _usual(config) | config["options"]
    partition = {name: options[name] for name in ("partition", "test", "test_fraction")}
    options["test"] = rule_of_test(PartitionOptions(**partition))  # earlier runs kept "auto"
    if config.get("beyond_target", beyond_target):
        options |= {"stop_at_target": False, "patience": None}
    incidental = {"seed", *declared(MachineOptions), *(() if options["stop_at_target"] else ("target",))}
    options = {name: value for name, value in options.items() if name not in incidental}
    # Methods that came as Python objects are known only by their label.
    return {"method": config["method"] or config["label"]} | options


def at_own_default(config: Config) -> set[str]:
    """Return the options of local training that a run has at its built-in method's own default."""
    usual, own, options = _plain(vars(Training())), _usual(config), config["options"]
    return {name for name in usual if usual[name] != own[name] == options.get(name, own[name])}


def training_of(config: Config) -> dict[str, Any]:
    """Return the options of local training in which a run differs from its method's defaults."""
    usual, options = _usual(config), config["options"]
    chosen = {name: options.get(name, usual[name]) for name in declared(Training)}
    return {name: value for name, value in chosen.items() if value != usual[name]}


def own_objects(config: Config | Chosen) -> list[Path]:
    """Return the Python files of the user's methods, models, data sets, ... in a configuration."""
    values = [config["method"], *config["options"].values()]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    files = (choices.file(text) for text in texts if isinstance(text, str))
    return list(dict.fromkeys(filter(None, files)))


def _refuse_code_within(folder: Path, config: Config) -> None:
    """Refuse code in the run folder, which may come from somebody else: it is read, and never executed."""
    for path, now in zip(own_objects(config), own_objects(moved(folder, config, code=True)), strict=True):
        if path != now:
            raise JaxflError(
                f"{path}, which {folder} was computed with, is missing, and there is {now}; as both may come "
                "from somebody else, it is executed only if you add --changed-code (from Python "
                "changed_code=True), or name it in a command of your own."
            )
        if store.inside(path, folder) or not path.is_absolute():
            raise JaxflError(
                f"{folder / store.CONFIG} names code in the run folder itself ({path}), which is not "
                "executed; move that file and give its absolute path."
            )


def _usual(config: Config | Chosen) -> dict[str, Any]:
    """Return the defaults of a run's built-in method, or of local training if it is the user's own."""
    method = registry.METHODS.get(config["method"] or "")
    return _plain(vars(method.config() if method else Training()))


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as a JSON file gives them back."""
    return json.loads(json.dumps(options, default=str))


# ---- files that have moved together with a run's folder


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
