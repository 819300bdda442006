"""The one exception that jaxfl raises on purpose, and what several of its messages share."""

import difflib
import gc
from collections.abc import Iterable


class JaxflError(Exception):
    """An error that the user can mend. The message is one sentence: what is wrong, where, what to do.

    The command line prints the message and exits with code 2; from Python it is raised as it is.
    """


def without_traceback(error: JaxflError) -> JaxflError:
    """Return an error to be told later without its traceback, which would keep arrays in memory."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    gc.collect()  # some of them are in a cycle
    return error


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a sentence: what the user may have meant, with a prefix, or the known names."""
    known = [prefix + entry for entry in known if not entry.startswith("_")]
    by_lower = {entry.lower(): entry for entry in known}
    close = difflib.get_close_matches((prefix + name).lower(), by_lower, n=1, cutoff=0.65)
    if close:
        return f"did you mean {by_lower[close[0]]!r}?"
    if len(known) > 40:
        return f"none of the {len(known)} known names is similar."
    return f"choose from {', '.join(known)}." if known else "there are none."


class BeyondCohort(JaxflError):
    """Something needs all clients, where there is only a cohort: `jaxfl.core.host_state`."""


def beyond_cohort(what: str) -> BeyondCohort:
    """Return the error about something that needs all clients."""
    return BeyondCohort(
        f"{what}, but --client-state host keeps only a cohort in memory; leave out --client-state host."
    )
