"""What a person asks for, by option: in flags, choices, Python, TOML or JSON."""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from jaxfl.config.options import Option, declared
from jaxfl.errors import JaxflError, nearest

Asked = Mapping[str, Any]  # by name: words, or values
Made = TypeVar("Made")
ELSEWHERE = {  # what PFLlib, FL-bench, Flower and others call some options
    "lr": ("learning-rate", "local-learning-rate", "local-lr"),
    "epochs": ("local-epochs", "local-epoch", "ls"),
    "clients": ("num-clients", "client-num", "nc"),
    "participation": ("join-ratio", "fraction-fit", "jr"),
    "rounds": ("global-rounds", "global-epoch", "num-rounds", "gr"),
    "models": ("model",),
    "batch-size": ("local-batch-size", "lbs"),
    "eval-every": ("eg",),
    "dropout": ("client-drop-rate", "cdr"),
    "newcomers": ("num-new-clients",),
    "dataset": ("data",),
    "run-dir": ("out", "output-dir", "save-dir"),
}


def elsewhere(name: str, known: Collection[str]) -> str | None:
    """Return what another program's option is called here, spelled as in `known`; None if not known."""
    ours = next((ours for ours, theirs in ELSEWHERE.items() if name.replace("_", "-") in theirs), None)
    return next((one for one in known if one.replace("_", "-") == ours), None)


def read_options(whose: str, known: Mapping[str, Option], asked: Asked, mark: str = "--") -> dict[str, Any]:
    """Return the values that are asked for, by name.

    `whose` options they are says the message, with `mark` before their names: as flags by default.

    Raises:
      JaxflError: if there is no such option, or its value has another type or is out of range.
    """
    require_known(whose, known, asked)
    values = {}
    for name, written in asked.items():
        try:
            values[name] = known[name].read(written)
        except ValueError as error:
            spelled = mark + (name.replace("_", "-") if mark else name)
            raise JaxflError(f"{whose}: {spelled} {error}.") from None
    return values


def require_known(whose: str, known: Collection[str], asked: Collection[str]) -> None:
    """Refuse an option that is not known."""
    for name in asked:
        if name not in known:
            ours = elsewhere(name, known)
            advice = f"here it is {ours!r}." if ours else nearest(name, known)
            raise JaxflError(f"{whose} has no option {name!r}; {advice}")


def make(cls: type[Made], whose: str, asked: Asked) -> Made:
    """Return an instance of a class of options with its own ones of those asked for, see `read_options`."""
    known = declared(cls)
    return cls(**read_options(whose, known, {name: asked[name] for name in known.keys() & asked.keys()}))
