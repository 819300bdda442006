"""Pictures of tables. Columns of differences are left out, and axes begin where the points do."""

import numpy as np
from matplotlib.figure import Figure

from jaxfl.results.panels import (
    LABEL_WIDTH,
    figure,
    height_of,
    in_lines,
    in_powers,
    legend,
    style,
    wrapped,
)
from jaxfl.results.table import Cell, Table

TICK_WIDTH = 20  # characters in a line under a column of a heat map


def draw_table(table: Table, title: str, unit: str) -> Figure:
    """Draw a band for each column, with a point and standard deviation for each row."""
    titles, labels, _, means, spread = _points(table)
    rows, named = len(labels), wrapped(titles)
    lines = max(rows, *(1 + name.count("\n") for name in named)) + 0.8  # lines of a band
    width, least = (10, height_of(labels)) if rows > 1 else (8, 2)  # one row needs no legend
    whole = figure(width, max(least, 1 + 0.19 * lines * len(titles)))
    axes = whole.add_subplot(title=in_lines(title, 2 * LABEL_WIDTH), xlabel=in_lines(unit, 2 * LABEL_WIDTH))
    places = np.arange(len(titles))
    if "%" not in unit:
        in_powers(axes, means.ravel())
    for number, label in enumerate(labels):
        at = places + (number - (rows - 1) / 2) / (rows + 1)
        looks = {"label": label, "linestyle": "", "capsize": 2, **style(number, "marker")}
        axes.errorbar(means[number], at, xerr=spread[number], **looks)
    for place in places[::2]:
        axes.axhspan(place - 0.5, place + 0.5, color="0.95", zorder=0)
    _name_rows(axes, places, named)
    axes.grid(alpha=0.3, axis="x")
    if rows > 1:
        legend(whole)
    return whole


def draw_panels(table: Table, title: str) -> Figure:
    """Draw a panel for each column, with a point and standard deviation for each row."""
    titles, labels, _, means, spread = _points(table)
    whole = figure(3 * len(titles) + 3, height_of(labels))
    whole.suptitle(in_lines(title, LABEL_WIDTH * len(titles)))
    panels, rows = np.atleast_1d(whole.subplots(1, len(titles), sharey=True)), np.arange(len(labels))
    for axes, name, points, either_side in zip(panels, titles, means.T, spread.T, strict=True):
        axes.errorbar(points, rows, xerr=either_side, linestyle="", marker="o", capsize=2)
        axes.locator_params(axis="x", nbins=4)  # a panel is narrow
        if "%" not in name:
            in_powers(axes, points)
        axes.set_xlabel(in_lines(name, LABEL_WIDTH // 2))
        axes.grid(alpha=0.3)
    _name_rows(panels[0], rows, labels)
    return whole


def draw_grid(table: Table, title: str, unit: str) -> Figure | None:
    """Draw a table as a heat map with its means in it; None without any."""
    titles, labels, cells, means, _ = _points(table)
    if not np.isfinite(means).any():
        return None
    whole = figure(max(5, 1.5 * len(titles) + 3), max(3, 0.6 * len(means) + 1.5))
    axes = whole.add_subplot(title=in_lines(title))
    field = axes.imshow(means, cmap="viridis", aspect="auto")
    middle = (np.nanmin(means) + np.nanmax(means)) / 2
    for (row, column), mean in np.ndenumerate(means):
        if np.isfinite(mean):
            text, colour = cells[row][column]._replace(std=None).text(), "white" if mean < middle else "black"
            axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(len(titles)), [in_lines(name, TICK_WIDTH) for name in titles], fontsize="small")
    axes.set_yticks(range(len(labels)), labels)
    whole.colorbar(field, label=in_lines(unit))
    return whole


def _points(table: Table) -> tuple[list[str], list[str], list[list[Cell]], np.ndarray, np.ndarray]:
    """Return titles, labels, cells, and their means (rows, columns) and deviations; NaN where is none."""
    _, first = table.rows[0]
    titles = [title for title, cell in zip(table.titles, first, strict=True) if isinstance(cell, Cell)]
    cells = [[cell for cell in row if isinstance(cell, Cell)] for _, row in table.rows]
    points = np.array([[(cell.mean, cell.std) for cell in row] for row in cells], float)
    return titles, wrapped(label for label, _ in table.rows), cells, points[..., 0], points[..., 1]


def _name_rows(axes, places: np.ndarray, names: list[str]) -> None:
    """Name the places of a vertical axis, the first one on top, as in tables."""
    axes.set_yticks(places, names, fontsize="small")
    axes.set_ylim(len(names) - 0.5, -0.5)
