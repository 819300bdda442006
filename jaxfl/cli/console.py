"""The console script: sets up the process, turns words into a command and errors into a sentence."""

import contextlib
import errno
import io
import itertools
import os
import signal
import sys
import traceback
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table as RichTable

from jaxfl.cli.commands import COMMANDS, call
from jaxfl.cli.words import expand
from jaxfl.config.own_code import OwnCodeError, own_code
from jaxfl.errors import JaxflError, nearest
from jaxfl.folder import several_runs
from jaxfl.grid.study_file import file_of, usual_folder
from jaxfl.machine.environment import versions
from jaxfl.machine.files import cache_folder
from jaxfl.machine.processes import explained_loss, leave
from jaxfl.machine.start import cpu_devices, start
from jaxfl.runs.interrupt import CTRL_C, Interrupted, terminable
from jaxfl.terminal import OUT


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exit with code 2 and one sentence if the user must mend something.

    After a Ctrl-C it exits with code 130, after a SIGTERM with 143, and with 75 if --max-seconds ended it.
    """
    try:
        with explained_loss(), terminable(), own_code():
            _dispatch(expand(sys.argv[1:] if arguments is None else arguments))
    except JaxflError as error:
        if isinstance(error, OwnCodeError):  # its cause has only the frames of the user's files
            traceback.print_exception(error.__cause__, chain=False)
        _say(str(error), style="red")
        leave(2)
    except OSError as error:  # such as a folder on the way to a file that only another user may enter
        if error.filename is None:
            if error.errno != errno.ENOSPC:
                raise
            _say(f"The output cannot be written: {error.strerror}.", style="red")
            sys.stdout = io.StringIO()  # what is left of it could not be written either
            leave(2)
        _say(f"{error.filename}: {error.strerror}; check its name and its permissions.", style="red")
        leave(2)
    except KeyboardInterrupt as stopped:
        _say(str(stopped) or "Stopped.")
        leave(stopped.code if isinstance(stopped, Interrupted) else CTRL_C)


def _say(sentence: str, style: str | None = None) -> None:
    Console(stderr=True, soft_wrap=True, markup=False, emoji=False).print(f"jaxfl: {sentence}", style=style)


def _dispatch(arguments: list[str]) -> None:
    word, *rest = arguments or ["--help"]
    if word in ("-h", "--help", "help"):
        OUT.print(_help(), highlight=False)
    elif word == "--version":
        OUT.print(", ".join(f"{name} {version}" for name, version in versions().items()), highlight=False)
    elif word not in COMMANDS:
        raise JaxflError(f"There is no command {word!r}; {nearest(word, COMMANDS)}")
    elif getattr(jax.config, "jax_disable_jit", False):
        raise JaxflError(
            "JAX_DISABLE_JIT is set, but rounds are compiled before they run; unset it. Within a round "
            "jax.debug.print shows values, and jax.debug.breakpoint stops."
        )
    else:
        call(word, rest)


def _help() -> RichTable:
    table = RichTable.grid(padding=(0, 3))
    for command in COMMANDS.values():
        table.add_row(f"jaxfl {command.usage}", command.does)
    table.add_row("", "")
    table.add_row("jaxfl --version", "of jaxfl and the packages it uses")
    table.add_row("@FILE", "stands for the arguments in a file")
    table.add_row("path/my.py:object", "stands for a method, model, data set or partition of your own")
    return table


def devices_of(arguments: list[str]) -> int:
    """Return how many devices a command needs on a CPU, see `cpu_devices`; `main` reports errors in it."""
    asked, before, processes, words = None, None, 1, []
    with contextlib.suppress(JaxflError, OSError):
        words = [part for word in expand(arguments) for part in word.split("=", 1)]
    for word, value in itertools.pairwise(words):
        with contextlib.suppress(JaxflError, KeyError, ValueError, OSError):
            if word == "--devices":
                asked = int(value)
            elif word == "--processes":
                processes = int(os.environ["SLURM_NTASKS"] if value == "auto" else value)  # where JAX asks
            elif word in ("resume", "--from", "--run-dir") or (word == "study" and "--run-dir" not in words):
                folder = usual_folder(file_of(value)) if word == "study" else Path(value)
                before = max(filter(None, [before, several_runs.devices_below(folder)]), default=None)
    return cpu_devices(asked, before, processes)


def entry() -> None:
    """Set up this process, then run `main`: the console script."""
    # Compiled programs are kept, so that the next run of the same shapes starts at once.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder()))
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    start(devices_of(sys.argv[1:]))
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may have what its encoding has not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        leave(128 + signal.SIGPIPE)
    except Exception:  # a fault of ours; of several processes, none waits for the others to end
        traceback.print_exc()
        leave(1)
