"""The words after `jaxfl`: files of arguments, names first and flags after them."""

import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxfl import registry
from jaxfl.config import choices
from jaxfl.config.asked import elsewhere, make
from jaxfl.config.flags import parse_flags
from jaxfl.config.options import Option, declared
from jaxfl.config.setup import Setup
from jaxfl.config.values import alternatives
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


def parse(
    program: str, arguments: list[str], sections: Sequence[Any], *commands: type, compared: Sequence[str] = ()
) -> list[Any]:
    """Read flags: what is written for options of runs, by name, and an instance of each of `commands`.

    Help shows the values of `sections`, dataclasses of options of runs, as defaults; `commands` are classes
    of options of the command. Methods `compared` are named before the flags.

    Raises:
      JaxflError: if a word is no flag, or no value of one.
    """
    options = {name: option for part in sections for name, option in declared(type(part)).items()}
    known = options | {name: option for cls in commands for name, option in declared(cls).items()}
    asked, others = parse_flags(program, arguments, *sections, *(cls() for cls in commands))
    if others:
        refusal = _unknown_option if others[0].startswith("-") else _stray
        raise JaxflError(refusal(program, others[0], arguments, compared, known))
    made = [make(cls, f"jaxfl {program.partition(' ')[0]}", asked) for cls in commands]
    return [{name: asked[name] for name in asked if name in options}, *made]


def _unknown_option(
    program: str, word: str, arguments: list[str], compared: Sequence[str], known: Mapping[str, Option]
) -> str:
    flag, _, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    owners = registry.owners(name)
    if owners and program.startswith("resume"):
        return f"jaxfl resume has no option {flag}; a run keeps those that it was begun with, in config.json."
    if "--from" in program and name in declared(Setup):
        return (
            f"jaxfl {program} has no option {flag}; it is that of RUN. For another, begin both runs with it."
        )
    after = arguments[arguments.index(word) + 1 :] if word in arguments else []
    value = value or next((given for given in after[:1] if not given.startswith("--")), "VALUE")
    named = [part for given in arguments for part in given.split("=", 1)]
    meant = next((choice for choice in (*compared, *named) if _has_option(choice, name)), None)
    if meant or owners:
        whose = choices.split(meant)[0] if meant else ", ".join(owners)
        choice = meant or (owners[0] if compared else None)
        advice = f"write {choice},{name}={value}" if choice else f"see jaxfl {program} --help"
        return f"{flag} is an option of {whose}, not of jaxfl {program}; {advice}."
    flags = [option.replace("_", "-") for option in known]
    if ours := elsewhere(name, flags):
        return f"jaxfl {program} has no option {flag}; here it is --{ours}."
    return f"jaxfl {program} has no option {flag}; {nearest(flag.lstrip('-'), flags, '--')}"


def _has_option(word: str, name: str) -> bool:
    """Return whether a word is a choice of a method, partition, ... of jaxfl that has an option."""
    from jaxfl.cli import catalogue  # here: only messages need all that can be named

    found = catalogue.CHOICES.get(word.partition(",")[0])
    return found is not None and any(option == name for option, *_ in catalogue.options_of(found))


def _stray(
    program: str, word: str, arguments: list[str], compared: Sequence[str], known: Mapping[str, Option]
) -> str:
    """Return the message about a word that is no flag and no flag's value."""
    place = max(i for i, given in enumerate(arguments) if given == word or given.endswith(f"={word}"))
    flags = [name.partition("=")[0] for name in arguments[: place + 1] if name.startswith("-")]
    last = flags[-1].removeprefix("--").removeprefix("no-").replace("-", "_") if flags else ""
    kind = known[last].type if last in known else None
    option, equals, value = word.partition("=")
    advice = f"see jaxfl {program} --help"
    if equals and option.replace("-", "_") in known:
        advice = f"write --{option.replace('_', '-')} {value}"
    elif equals and str in alternatives(kind):
        advice = f"options follow a comma, {arguments[place - 1]},{word}"
    elif kind is bool:
        advice = f"{flags[-1]} is a switch and takes no value"
    elif kind is not None:
        advice = f"{flags[-1]} takes a single value"
        if last in declared(Training):
            choice = next(iter(compared), program.rpartition(" ")[2])
            before = arguments[place - 1].rpartition("=")[2]
            advice += f"; jaxfl compare {choice},{last}={{{before},{word}}} tries several"
    return f"jaxfl {program} does not know what to do with {word!r}; {advice}."


def names_and_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first flag, and all others."""
    count = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    return arguments[:count], arguments[count:]
