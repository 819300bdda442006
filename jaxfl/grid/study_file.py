"""Files of studies: methods under several settings, described in TOML."""

import itertools
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxfl import registry
from jaxfl.config import choices
from jaxfl.config.asked import read_options
from jaxfl.config.command_options import Seeds
from jaxfl.config.options import Option, declared
from jaxfl.config.setup import Setup, is_saved
from jaxfl.config.values import as_path
from jaxfl.core.training import Training
from jaxfl.errors import JaxflError, nearest
from jaxfl.folder import store
from jaxfl.folder.variant import Variant
from jaxfl.grid.plan import check_distinct
from jaxfl.grid.resolve import resolve
from jaxfl.machine import files
from jaxfl.results.measures import SHOWN, known_measures, measure
from jaxfl.results.paired import matching_label
from jaxfl.results.result import NO_VALIDATION
from jaxfl.results.tuned import check_tuned, label_without

METHOD = "method"  # the axis that every study has
SHOW = "show"  # and the one of studies that show several things


class Study(NamedTuple):
    """The content of a study's file."""

    title: str
    methods: tuple[str, ...]  # choices of methods, with options
    claim: str = ""  # what the study is to show, in a line
    power: str = ""
    """What decides whether it can: steps of distillation beside local ones, the imbalance, how good teachers
    are, the smallest difference that its seeds tell from none. Printed beside the claim."""
    options: Mapping[str, Any] = {}  # of every run, by name
    axes: Mapping[str, list] = {}
    """Further options by name, each with its values. Values may be tables of options that change together,
    {clients = 50, participation = 0.4}; then the name is free."""
    seeds: int = 1  # number of repetitions of every run
    partition_seeds: int = 1  # number of repetitions of all of that, on other divisions of the data
    columns: str = METHOD
    """The axis whose values are the table's columns; `METHOD` or, if several things are shown, `SHOW` too."""
    show: tuple[str, ...] = ("accuracy",)  # what the table shows, see `jaxfl.results.measures.measure`
    select: Literal["last", "validation"] = "last"  # whose accuracies, see `jaxfl.results.result.selected`
    tune: tuple[str, ...] = ()
    """Options; of the methods and settings that differ only in these, the table has the best ones, see
    `jaxfl.results.tuned`."""
    against: str = ""
    """The method with which the others are compared in further columns, see `jaxfl.results.paired`."""
    names: Mapping[str, str] = {}
    """What the table calls methods (fedavg), settings (lr=0.1) and what it shows (accuracy)."""

    @property
    def repetitions(self) -> Seeds:
        """How often every run is repeated."""
        return Seeds(self.seeds, self.partition_seeds)


def read(path: str | Path) -> Study:
    """Read a study from a TOML file.

    Raises:
      JaxflError: naming what the file lacks, or has too much of, or what is not an option or a value of it.
    """
    path = as_path(path)
    if not path.is_file():
        known, name = found_below(STUDIES), path.with_suffix("").as_posix().removeprefix(f"{STUDIES}/")
        hint = nearest(name, known) if known else "check the path, which ends in .toml."
        raise JaxflError(f"There is no study {path}; {hint}")
    study = _typed(path, _read_toml(path))
    _check_axes(path, study.axes, study.options)
    if SHOW in {*study.options, *options_along(study.axes)}:
        raise JaxflError(f"{path}: write show beside methods, where it is for tables and runs alike.")
    axes = {name: [_ordered(value, values) for value in values] for name, values in study.axes.items()}
    for name, values in [("methods", study.methods), (SHOW, study.show), *axes.items()]:
        folders = [store.file_name(setting_name({name: value})) for value in values]
        for i, value in enumerate(values):
            if folders[i] in folders[:i]:
                raise JaxflError(f"{path}: {name} has {value_text(value)} twice; write it once.")
    kept = [name for name in axes if name not in study.tune]
    known = (METHOD, *kept, *([SHOW] if len(study.show) > 1 else []))
    columns = study.columns or known[-1]
    if columns not in known:
        raise JaxflError(f"{path}: there is no axis {columns!r}; {nearest(columns, known)}")
    study = study._replace(axes=axes, columns=columns)
    for name in study.show:
        measure(name)
    check_tuned(study.tune, itertools.chain(axes, *(choices.split(choice)[1] for choice in study.methods)))
    if study.against:
        against = matching_label(study.against, untuned(study))
        if against is None:
            raise JaxflError(
                f"{path}: no method {study.against!r} is compared; {nearest(study.against, untuned(study))}"
            )
        study = study._replace(against=against)
    study = study._replace(names=_named(path, study))
    for choice, name in itertools.product(study.methods, options_along(axes)):
        if name in choices.split(choice)[1]:
            raise JaxflError(f"{path}: {choice} sets {name}, which is also an axis; leave it out of one.")
    for setting in settings(study):
        variants, setup = planned(study, setting)
        check_distinct(variants)
        if study.tune and not (setup.partition.validation_fraction or is_saved(setup.partition.partition)):
            raise JaxflError(f"{path}: tune: {NO_VALIDATION}")
        number = len(setup.run.target)
        if number != 1 and (names := [name for name in study.show if name.endswith("to-target")]):
            raise JaxflError(
                f"{path} shows {names[0]}, but has {number or 'no'} target{'s' * (number > 1)}; give it one, "
                "as in target = [0.5] among its options, or as an axis, target = [[0.5], [0.6]]."
            )
    return study


def _typed(path: Path, written: dict[str, Any]) -> Study:
    """Return what a file says, with texts in one line; without columns if it names none."""
    types = typing.get_type_hints(Study)
    known = {name: Option(name, kind, Study._field_defaults.get(name)) for name, kind in types.items()}
    content = {"title": path.stem, "methods": (), "columns": ""}
    content |= read_options(str(path), known | declared(Seeds), written, mark="")
    for name, value in content.items():
        if isinstance(value, str):  # a note of a table is one line
            content[name] = " ".join(value.split())
    study = Study(**content)
    for name in ("options", "axes", "names"):
        if not isinstance(getattr(study, name), dict):
            raise JaxflError(f"{path}: {name} must be a table; write [{name}] and below it name = value.")
    for name in ("methods", SHOW):
        if not getattr(study, name):
            raise JaxflError(f'{path}: {name} is empty; write {name} = "NAME" or {name} = ["NAME", "NAME"].')
    return study


def _check_axes(path: Path, axes: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse axes that are options as well, repetitions, or no lists of values."""
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise JaxflError(f"{path}: the axis {name} is not a list of values; write {name} = [..., ...].")
        if any(isinstance(value, dict) for value in values):
            if not all(
                isinstance(value, dict) and value.keys() == values[0].keys() != set() for value in values
            ):
                raise JaxflError(f"{path}: the values of the axis {name} must be tables of the same options.")
            taken = {METHOD, SHOW, "seed", "partition_seed", *known_measures(), *options}
            if name in taken or not name.strip():
                raise JaxflError(
                    f"{path}: an axis of tables cannot be called {name!r}; give it another name."
                )
    along = options_along(axes)
    for name in along:
        if name in ("seed", "partition_seed"):
            raise JaxflError(f"{path}: {name} cannot be an axis; {name}s = 3 repeats every run three times.")
        if name in options:
            raise JaxflError(f"{path}: {name} is an option and an axis; leave it out of one.")
        if along.count(name) > 1:
            raise JaxflError(f"{path}: {name} is in two axes; leave it out of one.")


def _named(path: Path, study: Study) -> dict[str, str]:
    """Return other names as lines of text; refuse those of nothing, and those that two things would share."""
    values = [{name: value} for name, values in study.axes.items() for value in values]
    known = [*untuned(study), *map(setting_name, values), *study.show]
    for name, other in study.names.items():
        if name not in known:
            raise JaxflError(f"{path}: names has {name!r}, which is in no table; {nearest(name, known)}")
        if not (isinstance(other, str) and other.strip()):
            raise JaxflError(f"{path}: the name of {name} must be a text, but is {other!r}.")
    names = {name: " ".join(other.split()) for name, other in study.names.items()}
    titles = {name: measure(name).title for name in study.show}
    called = [names.get(name, titles.get(name, name)) for name in known]
    for name, other in zip(known, called, strict=True):
        if called.count(other) > 1:
            raise JaxflError(f"{path}: {name} is not the only one that names calls {other!r}.")
    return names


STUDIES = Path("experiments")  # where a checkout has them


def file_of(name: str) -> Path:
    """Return the file of a study: a path that ends in .toml, or the name of one below `STUDIES`."""
    return Path(name) if name.endswith(".toml") else STUDIES / f"{name}.toml"


def found_below(folder: Path) -> dict[str, Study]:
    """Return the studies of a folder by their names, which are their paths without the ending.

    TOML files that name no methods are not studies.
    """
    paths = [path for path in sorted(folder.rglob("*.toml")) if "methods" in _read_toml(path)]
    return {path.relative_to(folder).with_suffix("").as_posix(): read(path) for path in paths}


def usual_folder(path: Path) -> Path:
    """Return the default folder of a study's runs, named after the file and the folder that it is in.

    >>> str(usual_folder(Path("experiments/digits/label-skew.toml")))
    'runs/digits-label-skew'
    """
    beside = "" if path.parent == Path() else path.resolve().parent.name
    return Path("runs") / "-".join(filter(None, [beside, path.stem]))


def untuned(study: Study) -> list[str]:
    """Return the methods as the table names them: without the options that are tuned, each once."""
    return list(dict.fromkeys(label_without(choice, study.tune) for choice in study.methods))


def settings(study: Study) -> list[dict[str, Any]]:
    """Return every combination of the axes' values; a single empty one if there are no axes."""
    return [dict(zip(study.axes, values, strict=True)) for values in itertools.product(*study.axes.values())]


def options_of(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return a setting's options.

    >>> options_of({"alpha": 0.1, "size": {"clients": 50, "participation": 0.4}})
    {'alpha': 0.1, 'clients': 50, 'participation': 0.4}
    """
    options = {}
    for name, value in setting.items():
        options |= value if isinstance(value, dict) else {name: value}
    return options


def _ordered(value: Any, values: list) -> Any:
    """Return a table with its options in the order of the axis's first value; all else as it is."""
    return {name: value[name] for name in values[0]} if isinstance(value, dict) else value


def options_along(axes: Mapping[str, list]) -> list[str]:
    """Return the names of the options that axes change."""
    return [option for name, values in axes.items() for option in options_of({name: values[0]})]


def setting_name(setting: Mapping[str, Any]) -> str:
    """Return a setting in words, which are also the name of its folder.

    >>> setting_name({"partition": "dirichlet,alpha=0.1", "models": ["mlp", "lenet5"]})
    'partition=dirichlet,alpha=0.1,models=mlp+lenet5'
    """
    return ",".join(f"{name}={value_text(value)}" for name, value in options_of(setting).items())


def value_text(value: Any) -> str:
    """Return an axis's value as a text."""
    if isinstance(value, dict):
        return setting_name(value)
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def planned(study: Study, setting: Mapping[str, Any]) -> tuple[list[Variant], Setup]:
    """Return the methods of a setting, and the setup of all of them, see `resolve`."""
    shown = [name for name in study.show if name in SHOWN]
    return resolve(study.title, study.methods, {**study.options, **options_of(setting), "show": shown})


def without_axis(study: Study) -> list[tuple[str, str]]:
    """Return the methods and axes, of two values or more, along which all options of the method are equal."""
    shared, found = {*declared(Setup), *declared(Training)}, []
    for choice, (axis, values) in itertools.product(study.methods, study.axes.items()):
        known = shared | {*declared(registry.method(choice)[0].config)}
        having = [{n: v for n, v in options_of({axis: value}).items() if n in known} for value in values]
        if having.count(having[0]) == len(values) > 1:
            found.append((choice, axis))
    return found


def _read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(files.read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise JaxflError(f"{path} is not valid TOML: {error}.") from error
