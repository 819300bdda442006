"""The command in processes of its own, which are killed at moments that tests choose.

Importing jaxfl, and what it imports only for runs, takes seconds, so one process does it and forks for every
command. A child writes to a pipe when it reaches its moment; its parent waits for the delay and kills it,
wherever it is by then.
"""

import functools
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path
from typing import NamedTuple

import jax

from jaxfl import cli
from jaxfl.core import engine
from jaxfl.data import saved_partition
from jaxfl.folder import checkpoint, store
from jaxfl.machine import files
from jaxfl.mechanisms.reassembly import teachers


class Moment(NamedTuple):
    """When a process is killed: `delay` seconds after call number `number` of a function begins."""

    name: str  # a key of MOMENTS
    number: int = 1
    delay: float = 0.0


class Ended(NamedTuple):
    """The end of a command: its exit code, negative for a signal, and its standard error."""

    code: int
    error: str


# The function at whose call the moment is: a module and a name in it. None: the start of the process.
MOMENTS = {
    "anywhere": None,
    "making the folder": (saved_partition, "save"),
    "in a chunk of rounds": (engine, "of_rounds"),
    "in the server's step": (teachers, "take_apart"),
    "in an evaluation": (engine, "evaluate"),
    "in a line of metrics": (store, "append_metrics"),
    "writing matrices": (store, "write_about_clients"),
    "writing a checkpoint": (checkpoint, "save"),
    "deleting an old checkpoint": (checkpoint, "shutil"),
    "writing pictures and the result": (files, "write_pictures"),
    "cutting back for a resume": (store, "trim"),
}


def press(monkeypatch, times=1, evaluation=3, number=signal.SIGINT):
    """Send this process SIGINT, as Ctrl-C does, or another signal, during an evaluation."""
    evaluate, calls = engine.evaluate, itertools.count(1)

    def pressed(*arguments):
        if next(calls) == evaluation:
            for _ in range(times):
                signal.raise_signal(number)
        return evaluate(*arguments)

    monkeypatch.setattr(engine, "evaluate", pressed)


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of processes with one device, which compile as this one and share its cache."""
    return {
        **os.environ,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or str(folder / "cache"),
    }


def half_a_line(knock):
    """Return a `store.append_metrics` that stops within the last line."""

    def append(folder, records):
        whole = "".join(json.dumps(record) + "\n" for record in records)
        with (folder / store.METRICS).open("a") as file:
            file.write(whole[: -len(whole) // 3])
        knock()
        time.sleep(60)

    return append


def half_a_folder(knock):
    """Return a `shutil` whose rmtree stops after it has deleted one file, if there is one."""

    def rmtree(folder):
        for path in [path for path in sorted(folder.rglob("*")) if path.is_file()][:1]:
            path.unlink()
        knock()
        time.sleep(60)

    return types.SimpleNamespace(rmtree=rmtree)


HALVES = {"in a line of metrics": half_a_line, "deleting an old checkpoint": half_a_folder}


def prepare(moment: Moment, knock) -> None:
    """Make this process call `knock` at its moment."""
    if MOMENTS[moment.name] is None:
        knock()
        return
    module, name = MOMENTS[moment.name]
    usual, half = getattr(module, name), HALVES.get(moment.name)
    calls = itertools.count(1)

    def reached():
        return next(calls) == moment.number

    def watched(*arguments, **options):
        if not reached():
            return usual(*arguments, **options)
        if half:
            return half(knock)(*arguments, **options)
        knock()
        return usual(*arguments, **options)

    if isinstance(usual, types.ModuleType):
        halved = half(knock).rmtree
        watched = types.SimpleNamespace(rmtree=lambda path: (halved if reached() else shutil.rmtree)(path))
    setattr(module, name, watched)


class Commands:
    """A process that forks for every command, see the module.

    Use it as a context manager, which ends the process.
    """

    def __init__(self, folder: Path, environment: dict[str, str]):
        """Start the process in `folder`."""
        self._log = folder / "stderr"
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __call__(self, arguments: list[str], moment: Moment | None = None) -> Ended:
        """Run a command; kill it at the moment, if that comes before its end."""
        json.dump([arguments, moment], self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Ended(int(self._process.stdout.readline()), self._log.read_text())


def serve(log: str) -> None:
    """Run the command in each line of stdin, in a fork."""
    for line in sys.stdin:
        arguments, moment = json.loads(line)
        moment = moment and Moment(*moment)
        knocks, door = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX is imported, but has no threads before its first array
            child = os.fork()
        if child == 0:
            os.close(knocks)
            command(arguments, moment, functools.partial(os.write, door, b"!"), log)
        os.close(door)
        if moment and select.select([knocks], [], [])[0] and os.read(knocks, 1):
            time.sleep(moment.delay)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(knocks)
        print(os.waitstatus_to_exitcode(status), flush=True)


def command(arguments: list[str], moment: Moment | None, knock, log: str) -> None:
    """Run the command `jaxfl` in this process, and end it."""
    code = 1
    try:
        with open(log, "w") as error, open(os.devnull, "w") as nothing:
            os.dup2(error.fileno(), 2)
            os.dup2(nothing.fileno(), 1)
        if moment:
            prepare(moment, knock)
        sys.argv = ["jaxfl", *arguments]
        cli.entry()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    from matplotlib import figure  # noqa: F401
    from orbax.checkpoint import v1  # noqa: F401

    from jaxfl.results import drawings  # noqa: F401

    serve(sys.argv[1])
