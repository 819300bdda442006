"""Early ends of a run that save its rounds: Ctrl-C, SIGTERM, and a time limit.

The first signal lets the rounds in progress end and be saved, the second one ends at once. Schedulers send
SIGTERM to every process of a job, so those of one moment count as one.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from jaxfl.machine.processes import greatest

# Exit codes; of several reasons the greatest counts. In sysexits.h the first means: try again later.
OUT_OF_TIME, CTRL_C, TERMINATED = 75, 128 + signal.SIGINT, 128 + signal.SIGTERM
ONE_MOMENT = 1.0  # seconds

_deadline = ContextVar("deadline", default=math.inf)  # by time.monotonic()
_request: ContextVar["StopRequest | None"] = ContextVar("request", default=None)  # of nested `deferred`
_signals: ContextVar[list[int] | None] = ContextVar("signals", default=None)  # exit codes, see `heeded`


class Interrupted(KeyboardInterrupt):
    """An early end of a run on request; the message says how to go on.

    The command line prints the message and exits with `code`.
    """

    def __init__(self, message: str, code: int = CTRL_C):
        super().__init__(message)
        self.code = code


def reason(code: int) -> str:
    """Return the clause of a sentence that says why runs have stopped, empty after a signal."""
    return ", because the next rounds would not end within --max-seconds" if code == OUT_OF_TIME else ""


class StopRequest:
    """A handler of SIGINT and SIGTERM that also knows the deadline."""

    def __init__(self):
        self._code, self._noted_at, self._longest = 0, -math.inf, 0.0

    @property
    def made(self) -> int:
        """The reason to stop now as an exit code; 0 to go on.

        Several processes ask together, and stop when any of them is to stop.
        """
        late = time.monotonic() + self._longest > _deadline.get()
        return greatest(self._code or (OUT_OF_TIME if late else 0))

    def measured(self, seconds: float) -> None:
        """Note how long a chunk of rounds took; another is not begun if it would end too late."""
        self._longest = max(self._longest, seconds)

    def __call__(self, number, frame):
        """Note the first signal, obey the second.

        Raises:
          KeyboardInterrupt: at the second signal.
        """
        now = time.monotonic()
        if self._code:
            if number == signal.SIGTERM and now - self._noted_at < ONE_MOMENT:
                return
            raise Interrupted("Stopped.", 128 + number)
        self._code, self._noted_at = 128 + number, now
        if (signals := _signals.get()) is not None:
            signals.append(self._code)
        again = "press Ctrl-C again to end" if number == signal.SIGINT else "another SIGTERM ends"
        # Not by print, which this handler may have interrupted.
        os.write(2, f"\nThe rounds in progress will end and be saved; {again} at once.\n".encode())


@contextlib.contextmanager
def _holding(variable: ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def limited(seconds: float | None) -> contextlib.AbstractContextManager[None]:
    """Stop runs within the block after some seconds, in time to be saved; if None, as an enclosing block."""
    return _holding(_deadline, _deadline.get() if seconds is None else time.monotonic() + seconds)


def terminable() -> contextlib.AbstractContextManager[None]:
    """Raise `Interrupted` at a SIGTERM within the block, as Ctrl-C raises KeyboardInterrupt."""
    return _handling({signal.SIGTERM: _terminate})


def _terminate(number, frame):
    raise Interrupted("Stopped.", TERMINATED)


@contextlib.contextmanager
def deferred() -> Iterator[StopRequest]:
    """Hold the signals back within the block: loops check `StopRequest.made` between two steps.

    Signals that other code handles or ignores are left alone. Nothing changes outside of the main thread
    either, because only that one gets signals. Nested blocks share one `StopRequest`.
    """
    request = _request.get()
    if request:
        yield request
        return
    request = StopRequest()
    with _holding(_request, request), _handling({signal.SIGINT: request, signal.SIGTERM: request}):
        yield request


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """Raise `Interrupted` after a block that a signal could not stop, because its last rounds ran."""
    signals: list[int] = []
    with _holding(_signals, signals):
        yield
    if signals:
        raise Interrupted("All rounds were done and saved when this was to stop.", signals[0])


@contextlib.contextmanager
def _handling(handlers: dict) -> Iterator[None]:
    """Handle those of the given signals that no other code handles."""
    free = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.getsignal(number) for number in handlers}
    ours = [number for number in handlers if before[number] in (free[number], _terminate)]
    if threading.current_thread() is not threading.main_thread():
        ours = []
    for number in ours:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
