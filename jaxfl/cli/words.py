"""The words after `jaxfl`: files of arguments, names first and flags after them."""

import io
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxfl import registry
from jaxfl.config import choices
from jaxfl.config.flags import parse_flags
from jaxfl.config.given import elsewhere
from jaxfl.config.options import alternatives, hints
from jaxfl.core.training import Training
from jaxfl.errors import JaxflError, nearest
from jaxfl.machine.files import read_text


def expand(arguments: list[str]) -> list[str]:
    """Replace @FILE by the arguments in it, quoted as in a shell, on any number of lines; # starts a comment.

    Raises:
      JaxflError: if there is no such file, a quote is not closed, or a file names another one.
    """
    expanded = []
    for argument in arguments:
        if not argument.startswith("@"):
            expanded.append(argument)
            continue
        path = Path(argument[1:])
        if not path.is_file():
            raise JaxflError(f"There is no file {path} of arguments; check the path after @.")
        for number, line in enumerate(read_text(path).splitlines(), 1):
            try:
                words = _words(line)
            except ValueError as error:
                raise JaxflError(f"{path}, line {number}: {error}.") from None
            if another := next((word for word in words if word.startswith("@")), None):
                raise JaxflError(
                    f"{path}, line {number}: {another} is not read from within a file of arguments; name it "
                    "on the command line as well."
                )
            expanded += words
    return expanded


def _words(line: str) -> list[str]:
    """Return the words before a comment, which begins with a # that is neither quoted nor within a word."""
    read = io.StringIO(line)
    lexer = shlex.shlex(read, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = []
    while (rest := line[read.tell() :].lstrip()) and not rest.startswith("#"):
        words.append(lexer.get_token())
    return words


def parse(program: str, arguments: list[str], compared: Sequence[str] = (), **defaults: Any) -> list[Any]:
    """Parse flags into dataclasses like `defaults`; all words must be such flags."""
    parsed, unknown = parse_flags(program, arguments, **defaults)
    if unknown:
        if not unknown[0].startswith("-"):
            raise JaxflError(_stray(program, unknown[0], arguments, compared, defaults.values()))
        raise JaxflError(_unknown_option(program, unknown[0], arguments, compared, defaults.values()))
    return parsed


def _unknown_option(
    program: str, word: str, arguments: list[str], compared: Sequence[str], defaults: Iterable[Any]
) -> str:
    flag, _, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    owners = registry.owners(name)
    if owners and program.startswith("resume"):
        return f"jaxfl resume has no option {flag}; a run keeps those that it was begun with, in config.json."
    after = arguments[arguments.index(word) + 1 :]
    value = value or next((given for given in after[:1] if not given.startswith("--")), "VALUE")
    named = [part for given in arguments for part in given.split("=", 1)]
    meant = next((choice for choice in (*compared, *named) if _has_option(choice, name)), None)
    if meant or owners:
        whose = choices.split(meant)[0] if meant else ", ".join(owners)
        choice = meant or (owners[0] if compared else None)
        advice = f"write {choice},{name}={value}" if choice else f"see jaxfl {program} --help"
        return f"{flag} is an option of {whose}, not of jaxfl {program}; {advice}."
    known = [option.replace("_", "-") for part in defaults for option in hints(type(part))]
    if ours := elsewhere(name, known):
        return f"jaxfl {program} has no option {flag}; here it is --{ours}."
    return f"jaxfl {program} has no option {flag}; {nearest(flag.lstrip('-'), known, '--')}"


def _has_option(word: str, name: str) -> bool:
    """Return whether a word is a choice of a method, partition, ... of jaxfl that has an option."""
    from jaxfl.cli import catalogue  # here: only messages need all that can be named

    found = catalogue.CHOICES.get(word.partition(",")[0])
    return found is not None and any(option.name == name for option in catalogue.options_of(found))


def _stray(
    program: str, word: str, arguments: list[str], compared: Sequence[str], defaults: Iterable[Any]
) -> str:
    """Return the message about a word that is no flag and no flag's value."""
    place = max(i for i, given in enumerate(arguments) if given == word or given.endswith(f"={word}"))
    flags = [name.partition("=")[0] for name in arguments[: place + 1] if name.startswith("-")]
    kinds = {name.replace("_", "-"): kind for part in defaults for name, kind in hints(type(part)).items()}
    last = kinds.get(flags[-1].removeprefix("--").removeprefix("no-")) if flags else None
    option, equals, value = word.partition("=")
    advice = f"see jaxfl {program} --help"
    if equals and option.replace("_", "-") in kinds:
        advice = f"write --{option.replace('_', '-')} {value}"
    elif equals and last is not None and str in alternatives(last):
        advice = f"options follow a comma, {arguments[place - 1]},{word}"
    elif last is bool:
        advice = f"{flags[-1]} is a switch and takes no value"
    elif last is not None:
        advice = f"{flags[-1]} takes a single value"
        name = flags[-1].removeprefix("--").replace("-", "_")
        if any(name in hints(type(part)) for part in defaults if isinstance(part, Training)):
            choice = next(iter(compared), program.rpartition(" ")[2])
            before = arguments[place - 1].rpartition("=")[2]
            advice += f"; jaxfl compare {choice},{name}={{{before},{word}}} tries several"
    return f"jaxfl {program} does not know what to do with {word!r}; {advice}."


def given(arguments: list[str], options: Any) -> dict[str, Any]:
    """Return the parsed options whose flags are among the words, {name: value}."""
    flags = {word.partition("=")[0].replace("_", "-") for word in arguments}

    def spelled(name):
        flag = name.replace("_", "-")
        return {f"--{flag}", f"--no-{flag}"}

    return {name: value for name, value in vars(options).items() if spelled(name) & flags}


def names_and_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first flag, and all others."""
    count = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    return arguments[:count], arguments[count:]
