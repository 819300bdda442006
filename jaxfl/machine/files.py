"""Files on a disk, written by one process for all; an error of the system becomes a sentence.

Files that are needed to continue take their place only when complete (`replacing`).
"""

import contextlib
import errno
import functools
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxfl.errors import JaxflError
from jaxfl.machine.processes import on_first_process

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def unwritable(where: str | Path, error: Exception) -> JaxflError:
    """Return the error about a failed write."""
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    closed = {errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EEXIST}
    room = "" if getattr(error, "errno", None) in closed else "free some space or "
    return JaxflError(f"{where} cannot be written ({reason}); {room}choose another place.")


def unreadable(where: str | Path, error: OSError) -> JaxflError:
    """Return the error about a failed read."""
    return JaxflError(f"{where} cannot be read ({error.strerror or error}); check its permissions.")


def read_text(path: Path) -> str:
    """Return the content of a text file in UTF-8; a byte order mark, as some editors put first, is left out.

    Raises:
      JaxflError: if it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise JaxflError(f"There is no file {path}.") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise JaxflError(f"{path} is not a text file ({error}); store it as UTF-8.") from error


def _border(sentence: Callable[[Path, OSError], JaxflError]) -> Callable:
    """Make a decorator by which process 0 acts for all, and an error of the system becomes a sentence."""

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
def replacing(path: Path, begun: Path | None = None):
    """Open a binary file that replaces another at once: a reader sees the old one or the new one.

    It is `begun` elsewhere, by default at `unfinished`.
    """
    begun = begun or unfinished(path)
    try:
        with begun.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(begun, path)
    except OSError as error:
        error.filename = path  # which is what could not be written
        raise


def cache_folder() -> Path:
    """Return the user's folder of compiled programs, measurements and decoded data of all runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxfl"


def below(folder: Path, name: str = "", linked: bool = False) -> Iterator[Path]:
    """Yield what a folder holds at any depth, or only what has a name; also in folders that are `linked`.

    Another process may work there: what it removes meanwhile is left out. So are folders that cannot be
    entered.
    """
    for place, folders, others in os.walk(folder, followlinks=linked):
        yield from (Path(place, each) for each in (*folders, *others) if name in ("", each))


def unfinished(path: Path) -> Path:
    """Return the path of a file before it takes its place."""
    return path.with_suffix(".part")


@writes
def write_json(path: Path, value: Any) -> None:
    """Write JSON at once."""
    with replacing(path) as file:
        file.write(as_json(value))


@writes
def write_texts(folder: Path, texts: Mapping[str, str | None]) -> None:
    """Write text files by name into a folder that need not exist yet; None deletes one.

    Another process may do so as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = f"{socket.gethostname()}-{os.getpid()}"
    for name, text in texts.items():
        if text is None:
            (folder / name).unlink(missing_ok=True)
            continue
        with replacing(folder / name, folder / f".{name}.{own}") as file:
            file.write(text.encode(errors="backslashreplace"))  # it may name a folder that is not UTF-8


@writes
def write_bytes(path: Path, content: bytes) -> None:
    """Write a file into a folder that need not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content)


@writes
def check_empty(folder: Path) -> None:
    """Refuse a folder for new files that is not empty."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise JaxflError(f"{folder} already holds something; choose another folder.")


@writes
def write_pictures(folder: Path, pictures: dict[str, Callable[[], "Figure | None"]]) -> None:
    """Write pictures by name, whose ending is the format; one with nothing to draw is deleted."""
    for name, draw in pictures.items():
        figure = draw()
        if figure is None:
            (folder / name).unlink(missing_ok=True)
        else:
            figure.savefig(folder / name, format=name.rpartition(".")[2])


def as_json(value: Any) -> bytes:
    """Return the content of a JSON file."""
    return f"{json.dumps(value, indent=1)}\n".encode()
