"""Ctrl-C: the first one lets the rounds in progress end and be saved, the second one ends at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from jaxfl.machine.processes import any_process


class Interrupted(KeyboardInterrupt):
    """A run that ended early because somebody asked for it; the message says how to go on.

    The command line prints the message and exits with code 130.
    """


class StopRequest:
    """A handler of SIGINT."""

    def __init__(self):
        self._noted = False

    @property
    def made(self) -> bool:
        """Whether it was called; several processes look together, and stop when any of them is asked to."""
        return any_process(self._noted)

    def __call__(self, number, frame):
        """Note the first signal, obey the second.

        Raises:
          KeyboardInterrupt: at the second signal.
        """
        if self._noted:
            raise KeyboardInterrupt
        self._noted = True
        # Not by print, which this handler may have interrupted.
        os.write(2, b"\nThe rounds in progress end and are saved; press Ctrl-C again to end at once.\n")


@contextlib.contextmanager
def deferred() -> Iterator[StopRequest]:
    """Within, a Ctrl-C interrupts nothing: whoever loops looks at `StopRequest.made` between two steps.

    Where somebody else handles or ignores the signal, and outside of the main thread, which alone gets
    signals, nothing changes. Nested, all see the same `StopRequest`.
    """
    before = signal.getsignal(signal.SIGINT)
    if isinstance(before, StopRequest):
        yield before
        return
    request = StopRequest()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if before is not signal.default_int_handler or not in_main_thread:
        yield request
        return
    signal.signal(signal.SIGINT, request)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)
