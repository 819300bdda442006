"""Files on a disk, written by one process for all; what the system refuses is a sentence.

What is read again to go on takes its place when it is complete (`replacing`).
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxfl.errors import JaxflError, unreadable, unwritable
from jaxfl.machine.processes import on_first_process

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _border(sentence: Callable[[Path, OSError], JaxflError]) -> Callable:
    """Where process 0 acts for all of them, and where what the system refuses becomes a sentence."""

    def of(f):
        @functools.wraps(f)
        def on_disk(folder, *args, **kwargs):
            try:
                return f(folder, *args, **kwargs)
            except OSError as error:
                raise sentence(error.filename or folder, error) from error

        return on_first_process(on_disk)

    return of


reads, writes = _border(unreadable), _border(unwritable)


@contextlib.contextmanager
def replacing(path: Path):
    """A binary file that takes the place of another at once: a reader sees the old one or the new one."""
    try:
        with unfinished(path).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished(path), path)
    except OSError as error:
        error.filename = path  # which is what could not be written
        raise


def unfinished(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_suffix(".part")


@writes
def write_json(path: Path, value: Any) -> None:
    """Write JSON at once."""
    with replacing(path) as file:
        file.write(as_json(value))


@writes
def write_texts(folder: Path, texts: dict[str, str]) -> None:
    """Write files of text by their names, into a folder that need not be there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)


@writes
def write_bytes(path: Path, content: bytes) -> None:
    """Write a file into a folder that need not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content)


@writes
def check_empty(folder: Path) -> None:
    """Refuse a folder for new files that holds any."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise JaxflError(f"{folder} already holds something; choose another folder.")


@writes
def write_pictures(folder: Path, pictures: dict[str, Callable[[], "Figure | None"]]) -> None:
    """Write PNGs by their names; one of which there is nothing to draw is left out."""
    for name, draw in pictures.items():
        figure = draw()
        if figure is not None:
            figure.savefig(folder / name, format="png")


def as_json(value: Any) -> bytes:
    """What a file of JSON holds."""
    return f"{json.dumps(value, indent=1)}\n".encode()
