"""The table of a frame: methods, settings and what is shown along its rows and columns."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from jaxfl.results.frame import Case, Draw, Entry, Frame, by_case, words
from jaxfl.results.measures import Measure
from jaxfl.results.notes import listed, on_differences, on_measures
from jaxfl.results.paired import UNPAIRED, Difference, paired
from jaxfl.results.table import NOTHING, Cell, Table, alike, mean_of


def pivot(
    frame: Frame,
    measures: Sequence[Measure],
    place: Callable[[str, Mapping[str, str], Measure], tuple[str, str]],
    *,
    judged: Collection[Measure],
    cases: Sequence[Case] = (),
    against: str | None = None,
    rival: str = "",
    minus: str = "{} minus {}",
    of_rows: str = "method",
) -> Table:
    """Return a table of means over seeds, with notes on what it shows.

    Args:
      frame: runs.
      measures: what is shown.
      place: returns the row and the column of a measure of a method in a setting, {axis: value in words}.
      judged: measures of which the best of several methods in a setting stands out, and which are compared.
      cases: methods in settings, in the order of rows; by default that of the frame.
      against: a method. Columns after the judged ones say how far the others are above it, in pairs of the
        same rows, seed and partition, see `jaxfl.results.paired`.
      rival: what that method is called, if not by its label.
      minus: title of such a column, from that of the compared one and the rival.
      of_rows: title of the column that names the rows.
    """
    found = by_case(frame)
    cases = [*cases] or [*found]
    places = {(case, what.title): place(case[0], dict(case[1]), what) for case in cases for what in measures}
    cells, best = {}, set()
    for what in measures:
        own = {
            case: mean_of([what.value(run.result) for run in runs.values()]) for case, runs in found.items()
        }
        there = [places[case, what.title] for case in own]
        cells |= zip(there, alike([*own.values()]), strict=True)
        best |= {places[case, what.title] for case in _best(own, what)} if what in judged else set()
    rows, columns = (  # in which anything stands
        [title for title in dict.fromkeys(titles) if title in there]
        for titles, there in zip(zip(*places.values(), strict=True), zip(*cells, strict=True), strict=True)
    )
    gaps: dict[str, Cell | Difference] = dict.fromkeys(columns, NOTHING)
    notes = on_measures(frame, measures)
    if against:
        differences, more = _compared(found, cases, judged, against, rival or against)
        apart = {column: minus.format(column, rival or against) for column in columns}
        cells |= {(places[where][0], apart[places[where][1]]): each for where, each in differences.items()}
        last = max(columns.index(places[case, what.title][1]) for case in found for what in judged)
        there = {column for _, column in cells}
        after = dict.fromkeys([title for title in apart.values() if title in there], UNPAIRED)
        gaps = dict([*gaps.items()][: last + 1]) | after | gaps
        notes += more
    body = [(row, [cells.get((row, column), gap) for column, gap in gaps.items()]) for row in rows]
    standing_out = [
        (i, j) for i, row in enumerate(rows) for j, column in enumerate(gaps) if (row, column) in best
    ]
    return Table([*gaps], body, tuple(notes), standing_out, of_rows)


def _best(cells: Mapping[Case, Cell], what: Measure) -> list[Case]:
    """Return the best of several methods in every setting."""
    means, best = {}, []
    for case, cell in cells.items():
        if not math.isnan(cell.mean):
            means.setdefault(case[1], {})[case] = cell.mean
    for known in means.values():
        if what.better and len(known) > 1:
            best += [case for case, mean in known.items() if mean == what.better(known.values())]
    return best


def _compared(
    found: Mapping[Case, Mapping[Draw, Entry]],
    cases: Sequence[Case],
    judged: Collection[Measure],
    against: str,
    rival: str,
) -> tuple[dict[tuple[Case, str], Difference], list[str]]:
    """Return the differences from one method in each setting, by case and title, and notes on them."""
    differences, labels, without, unlike, unpaired = {}, {}, {}, [], []
    for case in cases:
        method, setting = case
        if method == against or case not in found:
            continue
        if (against, setting) not in found:
            without[",".join(value for _, value in setting)] = None
            continue
        ours, others = found[case], found[against, setting]
        common = [draw for draw in ours if draw in others]
        alike = [draw for draw in common if ours[draw].sums == others[draw].sums]
        unlike += [words(case)] if len(alike) < len(common) else []
        unpaired += [] if common else [words(case)]
        own, theirs = ({draw: runs[draw].result for draw in alike} for runs in (ours, others))
        for what in judged:
            difference = differences[case, what.title] = paired(own, theirs, what.value, what.clients)
            labels[f"{words(case)} {what.name if len(judged) > 1 else ''}".rstrip()] = difference
    notes = on_differences(rival, labels)
    if without:
        where = f" in {listed([*without])}" if all(without) else ""
        notes.append(f"Nothing is compared with {rival}{where}: no run of it has finished.")
    if unlike:
        notes.append(f"Minus {rival}: runs on other rows are not paired: {listed(unlike)}.")
    if unpaired:
        notes.append(f"Minus {rival}: runs without a seed in common are not paired: {listed(unpaired)}.")
    return differences, notes
