"""Options as given in Python or TOML files, converted to their types."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxfl.config.options import alternatives, as_path, check_some, entries, hints, matches
from jaxfl.config.setup import Setup
from jaxfl.errors import JaxflError, nearest

ELSEWHERE = {  # what PFLlib, FL-bench, Flower and others call some options
    "learning-rate": "lr",
    "local-learning-rate": "lr",
    "local-lr": "lr",
    "local-epochs": "epochs",
    "local-epoch": "epochs",
    "num-clients": "clients",
    "client-num": "clients",
    "join-ratio": "participation",
    "fraction-fit": "participation",
    "global-rounds": "rounds",
    "global-epoch": "rounds",
    "num-rounds": "rounds",
    "model": "models",
    "local-batch-size": "batch-size",
    "gr": "rounds",
    "ls": "epochs",
    "lbs": "batch-size",
    "nc": "clients",
    "jr": "participation",
    "eg": "eval-every",
    "cdr": "dropout",
    "client-drop-rate": "dropout",
    "num-new-clients": "newcomers",
    "data": "dataset",
    "out": "run-dir",
    "output-dir": "run-dir",
    "save-dir": "run-dir",
}


def elsewhere(name: str, known: Collection[str]) -> str | None:
    """Return what another program's option is called here, spelled as in `known`; None if not known."""
    ours = ELSEWHERE.get(name.replace("_", "-"), "")
    return next((one for one in known if one.replace("_", "-") == ours), None)


def divide(options: Mapping[str, Any], config: type, whose: str) -> tuple[Setup, dict[str, Any]]:
    """Divide options into the setup and those of a configuration.

    Args:
      options: by name; a list or a single value stands for a tuple, text for a path.
      config: a method's class of options, or that of all methods.
      whose: owner of the options, for the message.

    Raises:
      JaxflError: if an option belongs to neither.
    """
    of_setup, of_config = hints(Setup), hints(config)
    known = of_setup | of_config
    for name in options:
        if name not in known:
            ours = elsewhere(name, known)
            advice = f"here it is {ours!r}." if ours else nearest(name, sorted(known))
            raise JaxflError(f"{whose} has no option {name!r}; {advice}")
    normal = _normal(options, known)
    setup = Setup.of(**{name: value for name, value in normal.items() if name in of_setup})
    return setup, {name: value for name, value in normal.items() if name in of_config}


def stated(whose: str, *subjects: type, **options) -> dict[str, Any]:
    """Return some options of a command, converted to their types.

    Args:
      whose: owner of the options, for the message.
      subjects: the dataclasses that hold them, see `jaxfl.config.command_options`.
      **options: by name, as for `divide`.

    Raises:
      JaxflError: if an option has another type or is out of range.
    """
    known = {name: kind for subject in subjects for name, kind in hints(subject).items()}
    normal = _normal(options, known)
    for subject in subjects:
        check_some(whose, subject, normal)
    return normal


def _normal(options: Mapping[str, Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
    """Return what users write for options, converted to the options' types."""

    def normal(value, annotation):
        allowed = alternatives(annotation)
        match value:
            case _ if hasattr(value, "tolist"):  # of NumPy, JAX or pandas
                return normal(value.tolist(), annotation)
            case list() | tuple():
                kinds = [entries(kind) for kind in allowed if entries(kind) is not None]
                return tuple(normal(entry, kinds[0]) if kinds else entry for entry in value)
            case "none" if None in allowed and not matches(value, annotation):
                return None  # which TOML lacks
            case str() | Path() if Path in allowed:
                return as_path(value)
            case Path() if str in allowed:
                return str(value)
            case Path() if tuple[str, ...] in allowed:
                return (str(value),)
        single = [entries(kind) for kind in allowed if entries(kind) is not None]
        alone = not matches(value, annotation) and any(matches(value, kind) for kind in single)
        return (value,) if alone else value

    return {name: normal(value, annotations[name]) for name, value in options.items()}
