"""All measurements of an accelerator, in parts that can be resumed.

A part is a `jaxfl bench` command in a separate process. One that hangs, or that the system ends for lack of
memory, does not end the others, and a part's environment holds only for it. All write to one folder:

    ends.json                of every part that has ended how it did, its command and its seconds
    W2.json, W2.png          what a part has measured
    W2.unfinished.json       the same, as far as it came, of one that was cut short
    W2.log                   what it printed
    summary.md               what all of it says

This process computes nothing and holds no device: the parts need all of its memory.
"""

import dataclasses
import importlib.util
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxfl.bench.report import UNFINISHED
from jaxfl.bench.summary import summary
from jaxfl.config import choices
from jaxfl.config.options import check, within
from jaxfl.errors import JaxflError
from jaxfl.machine import files
from jaxfl.runs.interrupt import OUT_OF_TIME, Interrupted
from jaxfl.runs.owner import owned
from jaxfl.runs.store import CONFIG


class Part(NamedTuple):
    """A question, and the command that answers it.

    Args:
      asks: the question.
      command: words after `jaxfl bench`.
      limit_s: seconds after which it is ended; what it has measured by then is kept.
      environment: variables that it sets; flags of XLA are added to those already set.
    """

    asks: str
    command: str
    limit_s: int
    environment: Mapping[str, str] = {}


ENDS = "ends.json"
COMMAND = (sys.executable, "-m", "jaxfl", "bench")
LONGEST_S, ALL_S = 8 * 60, 25 * 60  # of a part, and of all: a job's time is limited

LIKELY = 'auto plain bfloat16 "ten at once"'  # ways to be faster than `auto` on an accelerator
# Otherwise the second process would find what the first one has compiled, and its choices of kernels.
ANEW = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
DETERMINISTIC = ANEW | {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}
TRAINED = "W2 --methods fedavg --no-torch --repetitions 3 --checksum"

# The most useful first: a job may end early. Limits follow the times of an H200 and an H100, as far as they
# are known. All that a command measures in turn is lost when its time is over, so none measures much; what
# it has compiled is found again.
PARTS = {
    "W2": Part("How much faster than a PyTorch loop is a small CNN?", "W2 --repetitions 3", 130),
    "W3": Part(
        "And a larger one, also with fewer digits?",
        "W3 --repetitions 2 --strategies auto tf32 bfloat16",
        100,
    ),
    "W4": Part("And a thousand MLPs?", "W4 --repetitions 3", 70),
    "W2-ways": Part(
        "Which way is the best for small batches?",
        f"W2 --methods fedavg --no-torch --rounds-per-repetition 5 --strategies {LIKELY}",
        70,
    ),
    "W3-ways": Part(
        "And for large ones?",
        'W3 --no-torch --rounds-per-repetition 2 --strategies auto plain "ten at once"',
        50,
    ),
    "resnet18": Part(
        "How much of the device do ResNet-18 clients use?", "resnet18 --no-torch --repetitions 3", 100
    ),
    "resnet18-ways": Part(
        "And with fewer digits?",
        "resnet18 --no-torch --repetitions 3 --strategies auto tf32 bfloat16",
        110,
    ),
    "resnet18-plain": Part(
        "And with XLA's own convolution?",
        "resnet18 --no-torch --repetitions 3 --strategies auto plain",
        70,
    ),
    "W1-ways": Part(
        "Which way is the best for unequal clients?",
        f"W1 --methods fedavg --repetitions 3 --strategies {LIKELY}",
        80,
    ),
    "W4-ways": Part(
        "And for a thousand clients, and several seeds?",
        "W4 --no-torch --rounds-per-repetition 10 --strategies auto bfloat16 "
        '"one at a time" "ten at once" "devices 1..all" "5 seeds"',
        70,
    ),
    "W5": Part(
        "What does a mixed federation with ResNet-18 cost?",
        "W5 --no-torch --repetitions 3 --strategies auto bfloat16",
        110,
    ),
    "lenet5-own": Part(
        "How many LeNet5 clients fit, and is a refusal survived?",
        "lenet5-own --no-torch --repetitions 1 --grow 32768 262144",
        170,
    ),
    "resnet18-own": Part(
        "How many ResNet-18 clients fit?",
        'resnet18-own --no-torch --repetitions 1 --strategies "ten at once" --grow 1024 4096',
        150,
    ),
    "default-1": Part("Are two processes equal to the bit?", TRAINED, 40, ANEW),
    "default-2": Part("The second of them.", TRAINED, 40, ANEW),
    "deterministic-1": Part("And with XLA's flag, at which price?", TRAINED, 40, DETERMINISTIC),
    "deterministic-2": Part("The second of them.", TRAINED, 40, DETERMINISTIC),
    "methods": Part(
        "What does an operation cost in each method, as far as time allows?", "methods --repetitions 2", 60
    ),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """All measurements of an accelerator, in parts of minutes."""

    out: Path | None = None
    """The folder for records and summary. Repeating a command that was cut short continues it."""
    parts: tuple[str, ...] = ()
    """Names of parts to run, also those that have ended before; by default all that have not."""
    max_seconds: float | None = within("(0, inf)", None)
    """Begin no part that may end later than this many seconds from now; exit with code 75 if some are
    left."""
    small: bool = False
    """Rehearse all of it with four clients in each, and eight minutes for each part, as a CPU compiles
    slowly: no figure is worth reading."""
    data_dir: Path | None = None
    """Where tensorflow-datasets keeps its data, or mnist.npz and cifar10.npz are; random images take the
    place of a set that is missing."""


def measure_device(options: Device, say: Callable[[str], None]) -> str:
    """Measure the parts that are left.

    Args:
      options: which parts, and the folder.
      say: called with messages about the progress.

    Returns:
      The results so far, as Markdown, which is also in summary.md.

    Raises:
      JaxflError: if there is no such part, or the folder cannot be used.
      Interrupted: if parts are left after `max_seconds`.
    """
    check("bench device", options)
    if options.out is None:
        raise JaxflError("Say where to write: jaxfl bench device --out FOLDER.")
    chosen = {name: choices.lookup("part", PARTS, name) for name in options.parts or PARTS}
    if options.small:
        chosen = {name: part._replace(limit_s=LONGEST_S) for name, part in chosen.items()}
    begun, folder, later = time.monotonic(), options.out, []
    with owned(folder):
        ends = _ends(folder, options.small)
        text = summarised(folder, ends)
        for name, part in chosen.items():
            if name in ends and name not in options.parts:
                continue
            left = math.inf if options.max_seconds is None else options.max_seconds - time.monotonic() + begun
            if part.limit_s > left:
                later.append(name)
                continue
            say(f"{name}: {part.asks} (at most {part.limit_s} s)")
            ends |= {name: _end(folder, name, part, options)}
            files.write_json(folder / ENDS, ends)
            text = summarised(folder, ends)
            say(f"{name}: {ends[name]['seconds']:.0f} s. {ends[name]['ended']}")
    if later:
        how = f"{len(later)} parts are left, because the next may not end within --max-seconds"
        again = f"with --parts {' '.join(later)}" if options.parts else f"as it is ({' '.join(later)})"
        raise Interrupted(f"{how}; repeat the command {again} to go on.", OUT_OF_TIME)
    return text


def _ends(folder: Path, small: bool) -> dict[str, dict]:
    """Return how the parts in a folder have ended.

    Raises:
      JaxflError: if the folder holds a run, is damaged, or is a rehearsal where this is none, or the reverse.
    """
    if (folder / CONFIG).exists():
        raise JaxflError(f"{folder} holds a run; choose another folder for --out.")
    try:
        ends = _read(folder / ENDS, {})
        _ = [(end["asks"], float(end["seconds"]), end["ended"]) for end in ends.values()]
        others = [name for name, end in ends.items() if ("--small" in shlex.split(end["command"])) != small]
    except (ValueError, TypeError, AttributeError, KeyError):
        raise JaxflError(
            f"{folder / ENDS} is damaged; delete it, and all parts are measured again."
        ) from None
    if others:
        what = "was measured without --small" if small else "is a rehearsal (--small)"
        raise JaxflError(f"{folder} {what} ({' '.join(others)}); choose another folder for --out.")
    return ends


def summarised(folder: Path, ends: dict[str, dict]) -> str:
    """Write the folder's summary so far, and return it."""
    text = summary(ends, {name: _records(folder, name) for name in ends})
    files.write_texts(folder, {"summary.md": text})
    return text


def _end(folder: Path, name: str, part: Part, options: Device) -> dict[str, Any]:
    """Run a part to its end, and return how it ended."""
    words = [*shlex.split(part.command), "--out", str(folder / f"{name}.json")]
    words += ["--small"] if options.small else []
    words += ["--data-dir", str(options.data_dir)] if options.data_dir else []
    if importlib.util.find_spec("torch") is None and "--no-torch" not in words:
        words.append("--no-torch")
    environment, log, begun = _environment(part), folder / f"{name}.log", time.monotonic()
    with log.open("wb") as printed:
        # The command, as a user would start it.
        process = subprocess.Popen(
            [*COMMAND, *words], stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=environment
        )
        try:
            code = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
    return {
        "asks": part.asks,
        "command": shlex.join(["jaxfl", "bench", *words]),
        "environment": dict(part.environment),
        "limit_s": part.limit_s,
        "seconds": time.monotonic() - begun,
        "ended": _how(code, part, folder, name),
    }


def _environment(part: Part) -> dict[str, str]:
    flags = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), part.environment.get("XLA_FLAGS")]))
    return {**os.environ, **part.environment, "XLA_FLAGS": flags}


def _how(code: int | None, part: Part, folder: Path, name: str) -> str:
    """Return how a process has ended, in a sentence: its own if it printed one."""
    if code is None:
        kept = len(_records(folder, name)) or "no"
        return f"Its limit of {part.limit_s} s was reached; it had written {kept} records by then."
    if code == 0:
        return "Done."
    log = folder / f"{name}.log"
    sentences = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("jaxfl: ")]
    if sentences:
        return sentences[-1].removeprefix("jaxfl: ")
    how = f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    return f"It {how}; {log.name} has what it printed."


def _records(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return a part's records, or those that it had when it was cut short, perhaps in an earlier try."""
    whole = folder / f"{name}.json"
    return _read(whole.with_suffix(UNFINISHED), None) or _read(whole, [])


def _read(path: Path, otherwise: Any) -> Any:
    """Return what a JSON file holds, which is written at once, or `otherwise` without a file."""
    return json.loads(path.read_text()) if path.exists() else otherwise
