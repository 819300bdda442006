"""What the pictures of results have in common: panels, labels that fit, and a style for each run."""

import textwrap
from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

LINES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "D")
HATCHES = ("", "//", "..", "xx")
LABEL_WIDTH = 40  # characters in a line of the legend, which must leave room for the curves
WIDE = 30  # amounts whose largest is more times the smallest are drawn on a logarithmic axis


def figure(width: float, height: float) -> Figure:
    """Return an empty figure; its sides are in inches."""
    return Figure((width, height), layout="constrained", dpi=150)


def in_panels(number: int, width: float, height: float, *, right: float = 0, least: float = 0):
    """Return a figure and its panels, up to three in a line, each so wide and high in inches.

    On the right there is further room for a legend, and the figure has a least height.
    """
    columns = min(3, number)
    lines = -(-number // columns)
    whole = figure(width * columns + right, max(least, height * lines))
    return whole, [whole.add_subplot(lines, columns, place) for place in range(1, number + 1)]


def legend(whole: Figure, *marks_and_labels, **more) -> None:
    """Add a legend on the right, by default of all lines with a label."""
    whole.legend(*marks_and_labels, fontsize="small", loc="outside right upper", **more)


def in_lines(label: str, width: int = LABEL_WIDTH) -> str:
    """Wrap a plain text into lines of `width` characters, after spaces and commas; a $ begins no formula."""
    spaced = label.replace(", ", ",").replace(",", ", ")
    return textwrap.fill(spaced, width, break_long_words=False, break_on_hyphens=False).replace("$", "\\$")


def wrapped(labels: Iterable[str]) -> list[str]:
    """Wrap labels into lines that fit in a legend."""
    return [*map(in_lines, labels)]


def height_of(labels: list[str]) -> float:
    """Return the height of a figure, in inches, in which a legend on the right fits."""
    return max(4.2, 0.4 + 0.21 * sum(1 + label.count("\n") for label in labels))


def style(number: int, kind: str) -> dict:
    """Return how a run's "line", "marker" or "hatch" looks; forty runs differ."""
    kinds = {"line": ("linestyle", LINES), "marker": ("marker", MARKS), "hatch": ("hatch", HATCHES)}
    name, choices = kinds[kind]
    return {"color": f"C{number % 10}", name: choices[number // 10 % len(choices)]}


def below_rounds(axes) -> None:
    """Make the horizontal axis one of rounds."""
    axes.set(xlabel="round")
    from_zero(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def from_zero(axes) -> None:
    """Let the horizontal axis begin at 0, with a margin on the right also where all points are near it."""
    axes.update_datalim([(0, 0)], updatey=False)
    axes.autoscale_view()
    axes.set_xlim(left=0)


def in_powers(axes, amounts: Iterable[float]) -> None:
    """Make the horizontal axis logarithmic if the amounts on it differ much; below them it goes to 0."""
    known = [amount for amount in amounts if amount > 0]
    if known and max(known) > WIDE * min(known):
        axes.set_xscale("symlog", linthresh=10 ** np.floor(np.log10(min(known))), linscale=0.4)
        axes.xaxis.set_major_formatter("{x:g}")
