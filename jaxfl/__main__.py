"""``python -m jaxfl`` is the command `jaxfl`; Ctrl-C is handled before anything is loaded."""

import gc
import os
import signal


def entry() -> None:
    """Load the command and call it: the console script."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    gc.disable()  # objects that libraries make while they load stay: scanning them takes half a second
    try:
        import jax  # noqa: F401 - it reads its variables when it is loaded
    except ValueError as error:
        os.write(
            2, f"jaxfl: JAX refuses a variable of the environment: {error}; mend or unset it.\n".encode()
        )
        os._exit(2)
    from jaxfl.cli import entry

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, handler)
    entry()


def _stop(number, frame) -> None:
    """Exit at once: nothing is lost yet, and libraries that are loading may not let an exception through."""
    os.write(2, b"jaxfl: Stopped.\n")
    os._exit(130)


if __name__ == "__main__":
    entry()
