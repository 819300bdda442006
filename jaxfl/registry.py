"""Every built-in method, model and partition, by name; and the user's own, by file.

A *choice* is written ``name`` or ``name,option=value,option=value``. In place of a name stands
``path/to/file.py:object`` for one that is not part of jaxfl: it is used exactly like a built-in one.
"""

import difflib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxfl.algorithms.compfl import compfl
from jaxfl.algorithms.ditto import ditto
from jaxfl.algorithms.fedavg import fedavg, fedavg_ft
from jaxfl.algorithms.fedbabu import fedbabu
from jaxfl.algorithms.fedper import fedper
from jaxfl.algorithms.fedrep import fedrep
from jaxfl.algorithms.fedrod import fedrod
from jaxfl.algorithms.lg_fedavg import lg_fedavg
from jaxfl.algorithms.local import local
from jaxfl.data import partitioners
from jaxfl.errors import JaxflError
from jaxfl.models import zoo
from jaxfl.types import Method

METHODS = {
    method.name: method
    for method in (
        local,
        fedavg,
        fedavg_ft,
        lg_fedavg,
        fedper,
        fedrep,
        fedbabu,
        ditto,
        fedrod,
        compfl,
    )
}
DATASETS = {
    "digits": "1,797 handwritten digits, 8x8, ten classes; comes with scikit-learn",
    "cifar10, mnist, fashion_mnist, svhn_cropped, ...": "any image classification set of "
    "tensorflow-datasets, by its name",
    "emnist/byclass": "a configuration of a set",
    "cifar100:coarse_label": "another label of a set",
    "path/to/file.npz": "arrays images (N, H, W[, C]), labels (N,), and perhaps split",
    "path/to/folder": "a sub-folder of images per class, perhaps below train/ and test/",
    "path/to/my.py:source": "a function of your own: data_dir -> jaxfl.data.sources.Source",
}
GIVEN = ("shape", "classes")  # what every model is built for; not the user's to choose
MODELS = {name: getattr(zoo, name) for name in zoo.__all__}
PARTITIONS = partitioners.PARTITIONS


def method(choice: str) -> tuple[Method, dict[str, Any]]:
    """The method of a choice and its options: ``"compfl,kd=false"`` -> (compfl, {"kd": False})."""
    name, options = split(choice)
    found = lookup("method", METHODS, name)
    if not isinstance(found, Method):
        raise JaxflError(f"{name} is a {type(found).__name__}, not a jaxfl.Method; name one of these.")
    return found, convert(found.name, typing.get_type_hints(found.config), options)


def function(kind: str, table: Mapping[str, Callable], choice: str) -> tuple[str, Callable, dict]:
    """The function of a choice, and its options as keyword arguments."""
    name, options = split(choice)
    found = lookup(kind, table, name)
    return name, found, convert(name, keywords(found), options)


def keywords(function: Callable) -> dict[str, Any]:
    """A function's options with their types: its keyword-only parameters that are not `GIVEN`."""
    types = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: types.get(p.name, str)
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name not in GIVEN
    }


def split(choice: str) -> tuple[str, dict[str, str]]:
    """``"name,a=1,b=2"`` -> ("name", {"a": "1", "b": "2"})."""
    name, *pairs = choice.split(",")
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise JaxflError(f"{pair!r} in {choice!r} is not an option; write it as option=value.")
        options[key.strip().replace("-", "_")] = value.strip()
    return name.strip(), options


def lookup(kind: str, table: Mapping[str, Any], name: str) -> Any:
    """An entry by name, or the object that ``file.py:object`` names."""
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py"):
        found = from_file(Path(path), attribute)
        if kind != "method" and not callable(found):
            raise JaxflError(
                f"{name} is a {type(found).__name__}; name a function that makes a {kind}."
            )
        return found
    if name.endswith(".py"):
        raise JaxflError(f"{name} is a file; add which {kind} in it you mean: {name}:NAME.")
    if name not in table:
        raise JaxflError(f"There is no {kind} {name!r}; {nearest(name, table)}")
    return table[name]


def from_file(path: Path, attribute: str) -> Any:
    """Load an object from a Python file."""
    if not path.is_file():
        raise JaxflError(f"There is no file {path} to take {attribute!r} from; check the path.")
    module_name = f"jaxfl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise JaxflError(f"{path} does not load: {type(error).__name__}: {error}.") from error
    if not hasattr(module, attribute):
        raise JaxflError(f"{path} has no {attribute!r}; {nearest(attribute, vars(module))}")
    return getattr(module, attribute)


def convert(name: str, types: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    """Option strings as values of the annotated types."""
    for key in options:
        if key not in types:
            raise JaxflError(f"{name} has no option {key!r}; {nearest(key, types)}")
    return {key: _convert(name, key, types[key], value) for key, value in options.items()}


def _convert(name: str, key: str, annotation: Any, text: str) -> Any:
    choices = typing.get_args(annotation)
    if type(None) in choices:  # X | None
        if text.lower() == "none":
            return None
        annotation, choices = choices[0], typing.get_args(choices[0])
    if annotation is bool:
        text, choices = text.lower(), ("true", "false")
    if choices:
        if text not in choices:
            raise JaxflError(f"{name}: {key} is one of {', '.join(choices)}, not {text!r}.")
        return text == "true" if annotation is bool else text
    try:
        return annotation(text)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}.get(annotation, annotation.__name__)
        raise JaxflError(f"{name}: {key} must be {kind}, not {text!r}.") from None


def nearest(name: str, known) -> str:
    """End of a sentence: what the user may have meant, or the list of what there is."""
    known = [entry for entry in known if not entry.startswith("_")]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known are {', '.join(known)}." if known else "there are none."
