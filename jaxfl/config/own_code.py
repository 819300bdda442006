"""The user's own code: how it is loaded and called, and how its errors are distinguished from ours."""

import contextlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxfl.errors import JaxflError, nearest

PACKAGE = Path(__file__).parents[1]
USER = "jaxfl_user_"  # begins the names of users' modules
LIBRARIES = {Path(path) for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))}

_folders = {}  # of loaded files, each with the files of helpers that these have imported from there
_loaded = {}  # modules by file and content: an object that is named twice is one object, with one program
_helpers = {}  # what was in the files of helpers when these were loaded


class OwnCodeError(JaxflError):
    """An error inside the user's own code; `__cause__` is that error, with the frames of their files."""


@contextlib.contextmanager
def own_code() -> Iterator[None]:
    """Turn an error in the user's own code into an `OwnCodeError`; usable as a decorator, too.

    Errors that involve none of the user's files are not changed, nor are those of the device.
    """
    try:
        yield
    except (JaxflError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        frames = _own_frames(error)
        if not frames:
            raise
        *_, raised_in = traceback.walk_tb(error.__traceback__)
        where = f"{_line(frames[-1])}, in {frames[-1].tb_frame.f_code.co_name}"
        # What jaxfl refuses there has a sentence, and one of these types.
        refused = Path(raised_in[0].f_code.co_filename).is_relative_to(PACKAGE)
        refused &= type(error) in (TypeError, ValueError) and bool(str(error))
        words = first_line(error) if refused else in_a_line(error)
        trace = None
        for frame in reversed(frames):
            trace = types.TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        cause = error.with_traceback(trace)
        notes = getattr(cause, "__notes__", [])
        cause.__notes__ = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]  # none is left
        raise OwnCodeError(f"{where}: {words}.") from cause


def load(path: Path, attribute: str) -> Any:
    """Load an object from a Python file; modules beside the file are found by their names.

    Raises:
      JaxflError: if there is no such file, it does not load, or lacks the object.
    """
    if not path.is_file():
        raise JaxflError(f"There is no file {path.absolute()} to take {attribute!r} from; check the path.")
    known = path.resolve(), path.read_bytes()
    _forget_changed_helpers()
    if known not in _loaded:
        _loaded[known] = _executed(path)
    module = sys.modules[f"{USER}{path.stem}"] = _loaded[known]
    if not hasattr(module, attribute):
        raise JaxflError(f"{path} has no {attribute!r}; {nearest(attribute, vars(module))}")
    return getattr(module, attribute)


def _executed(path: Path) -> types.ModuleType:
    module_name = f"{USER}{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec and spec.loader  # as for every file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    _forget_bytecode(path)
    try:
        with _helpers_of(path.resolve().parent):
            spec.loader.exec_module(module)
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise JaxflError(f"{path} does not load: {where}: {error.msg}.") from error
    except (Exception, SystemExit) as error:
        frames = _own_frames(error)
        where = f" ({_line(frames[-1])})" if frames else ""
        raise JaxflError(f"{path} does not load: {in_a_line(error)}{where}.") from error
    return module


@contextlib.contextmanager
def _helpers_of(folder: Path) -> Iterator[None]:
    """Find modules in a folder first, rather than those of the same name beside another file."""
    others = {name: name.partition(".")[0] for name in beside(_folders.keys() - {folder})}
    here = {top for top in {*others.values()} if (folder / f"{top}.py").is_file() or (folder / top).is_dir()}
    _forget(name for name, top in others.items() if top in here)
    _folders.setdefault(folder, set())
    importlib.invalidate_caches()
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before
        _folders[folder].update(beside([folder]).values())
        for file in beside(_folders).values():
            _helpers.setdefault(file, _content(file))


def helpers(folders: Collection[Path]) -> set[Path]:
    """Return the files of modules that the user's files in some folders have imported from there."""
    return {*beside(folders).values()}.union(*(_folders.get(folder, ()) for folder in folders))


def beside(folders: Collection[Path]) -> dict[str, Path]:
    """Return the files of imported modules that lie in some folders or in packages there, by their names.

    The module a.b of a folder is a/b.py there, or a/b/__init__.py. Neither this script nor jaxfl nor the
    user's files themselves, which are loaded by path, are among them.
    """
    known, found = tuple(map(str, folders)), {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if not file or name == "__main__" or name.startswith(USER) or name.partition(".")[0] == PACKAGE.name:
            continue
        place = os.path.normpath(file)
        if not place.startswith(known):  # almost all of thousands
            continue
        depth = 1 + name.count(".") + (os.path.basename(place) == "__init__.py")
        if {*folders}.intersection([*Path(place).parents][:depth]):
            found[name] = Path(place)
    return found


def _forget(names: Iterable[str]) -> None:
    """Let modules be imported anew, and the packages around them that have no __init__.py."""
    names = {*names}
    for name in [*names]:
        while name := name.rpartition(".")[0]:
            if getattr(sys.modules.get(name), "__file__", None) is None:
                names.add(name)
    for name in names & sys.modules.keys():
        package, _, attribute = name.rpartition(".")
        if package in sys.modules:  # ``from package import module`` would find the old one there
            vars(sys.modules[package]).pop(attribute, None)
        del sys.modules[name]


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def _forget_changed_helpers() -> None:
    """Load all own modules anew if the file of a helper has changed since: any of them may have used it."""
    changed = [file for file, before in _helpers.items() if _content(file) != before]
    if changed:
        for file in changed:
            _forget_bytecode(file)
        _forget(beside(_folders))
        for files in _folders.values():
            files.clear()
        _helpers.clear()
        _loaded.clear()


def _forget_bytecode(file: Path) -> None:
    """Delete a file's bytecode: Python reads it if the length and the second of the change are the same."""
    with contextlib.suppress(OSError, NotImplementedError):
        Path(importlib.util.cache_from_source(str(file))).unlink()


def require_call(what: str, function: Callable, *arguments: str, **options: Any) -> None:
    """Refuse a function that cannot be called with arguments of these names, by position and by name.

    `what` says in the message what the function is.

    Raises:
      JaxflError: naming its file and line, its parameters and those that it must have.
    """
    wanted = ", ".join([*arguments, *(f"{name}=" for name in options)])
    if not callable(function):
        raise JaxflError(f"{what} is {function!r}; give a function of ({wanted}).")
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments, **options)
    except ValueError:  # some functions written in C do not tell their parameters
        return
    except TypeError as error:
        raise JaxflError(
            f"{line_of(function)}: {what} has the parameters {signature}, but is called with ({wanted}): "
            f"{error}."
        ) from None


def line_of(thing: Any) -> str:
    """Return ``my.py, line 12`` where a function or a class is defined."""
    thing = inspect.unwrap(thing)
    thing = getattr(thing, "func", thing)  # of a partial
    code = getattr(thing, "__code__", None)
    if code:
        return f"{code.co_filename}, line {code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(thing)}, line {inspect.getsourcelines(thing)[1]}"
    except (OSError, TypeError):
        return getattr(thing, "__name__", repr(thing))


def _own_frames(error: BaseException) -> list[types.TracebackType]:
    """Return the parts of an error's traceback in the user's files, the outermost first."""
    found, trace = [], error.__traceback__
    while trace:
        file = Path(trace.tb_frame.f_code.co_filename)
        ours = any(file.is_relative_to(folder) for folder in (PACKAGE, *LIBRARIES))
        if not ours and not file.name.startswith("<frozen"):
            found.append(trace)
        trace = trace.tb_next
    return found


def _line(frame: types.TracebackType) -> str:
    return f"{frame.tb_frame.f_code.co_filename}, line {frame.tb_lineno}"


TRACED = (
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
)


def in_a_line(error: BaseException) -> str:
    """Return ``NameError: name 'x' is not defined``, with what the first line lacks."""
    return f"{type(error).__name__}: {first_line(error)}".rstrip(": ")


def first_line(error: BaseException) -> str:
    """Return an error's first line without a full stop, and what it lacks."""
    first, _, more = str(error).strip().partition("\n")
    if isinstance(error, TRACED):
        first = (
            "a value that is traced is used where a known number is needed; choose with jnp.where or cond, "
            "loop with fori_loop or scan, and compute with jax.numpy"
        )
    elif first.startswith("pytree structure error"):  # where and how they differ is below
        first += " " + " ".join(more.split())[:300]
    return first.rstrip(".: ")
