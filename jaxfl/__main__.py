"""``python -m jaxfl`` is the command `jaxfl`; nothing is loaded before a Ctrl-C has an answer."""

import gc
import os
import signal


def entry() -> None:
    """The console script: load the command, and hand over to it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    gc.disable()  # what libraries make while they load lives on: looking through it takes half a second
    from jaxfl.cli import entry

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, handler)
    entry()


def _stop(number, frame) -> None:
    """There is nothing yet to lose; libraries that are being loaded may not let an exception through."""
    os.write(2, b"jaxfl: Stopped.\n")
    os._exit(130)


if __name__ == "__main__":
    entry()
