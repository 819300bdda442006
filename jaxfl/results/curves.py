"""Pictures of runs over their rounds. All take {label: the metrics of its seeds}.

A line is the mean over seeds; with several seeds a band is their sample standard deviation, a bar after a
single evaluation.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jaxfl.data.pictures import name_classes
from jaxfl.folder.records import Round
from jaxfl.results.measures import PER_CLASS, SCORES_OF
from jaxfl.results.panels import (
    below_rounds,
    figure,
    from_zero,
    height_of,
    in_lines,
    in_panels,
    in_powers,
    legend,
    style,
    wrapped,
)
from jaxfl.results.table import Cell, alike
from jaxfl.tasks import task_of

Runs = Mapping[str, list[list[Round]]]


def draw_curves(runs: Runs) -> Figure:
    """Draw the task's score against rounds, against the bytes moved and, if known, against simulated time."""
    costs = {"megabytes sent and received": _megabytes}
    if any(_simulated_seconds(seeds[0][0]) for seeds in runs.values()):
        costs["simulated seconds"] = _simulated_seconds
    labels = wrapped(runs)
    whole = figure(6 * (1 + len(costs)), height_of(labels))
    left, *others = whole.subplots(1, 1 + len(costs), sharey=True)
    spent_in_all = {name: [] for name in costs}  # by each run
    for number, (label, seeds) in enumerate(zip(labels, runs.values(), strict=True)):
        rounds, scored = _scored(seeds)
        if not rounds:
            continue
        left.set(ylabel=_score_axis(scored[0][0]))
        means = [[_shown(record, record["accuracy"]["mean"]) for record in records] for records in scored]
        _draw_line(left, rounds, means, number, label=label)
        for axes, (name, cost) in zip(others, costs.items(), strict=True):
            spent = np.array([np.cumsum([*map(cost, metrics)])[np.array(rounds) - 1] for metrics in seeds])
            if spent.any():
                _draw_line(axes, spent.mean(0), means, number)
                spent_in_all[name].append(spent.mean(0)[-1])
    below_rounds(left)
    for axes, (name, amounts) in zip(others, spent_in_all.items(), strict=True):
        axes.set(xlabel=name)
        axes.grid(alpha=0.3)
        from_zero(axes)
        in_powers(axes, amounts)
    legend(whole, *left.get_legend_handles_labels())
    return whole


def draw_loss(runs: Runs) -> Figure | None:
    """Draw the training loss against rounds, its mean over a round's clients; None without any."""
    labels = wrapped(runs)
    whole = figure(8, height_of(labels))
    axes = whole.add_subplot(ylabel="training loss, mean over the round's clients")
    for number, (label, seeds) in enumerate(zip(labels, runs.values(), strict=True)):
        rounds = range(1, 1 + min(map(len, seeds)))
        losses = [[metrics[t - 1]["loss"] for t in rounds] for metrics in seeds]
        _draw_line(axes, rounds, losses, number, label=label, marker="")
    below_rounds(axes)
    legend(whole)
    return whole if any(np.isfinite(line.get_ydata()).any() for line in axes.lines) else None


def draw_architectures(runs: Runs) -> Figure | None:
    """Draw the score against rounds, a panel for each architecture; None if there is only one.

    A run has no line for an architecture that it lacks.
    """
    of_runs = {label: _scored(seeds) for label, seeds in runs.items()}
    scored = [record for _, seeds in of_runs.values() for records in seeds for record in records]
    names = list(dict.fromkeys(name for record in scored for name in record["accuracy"]["per_group"]))
    if len(names) < 2:
        return None
    whole = figure(5 * len(names) + 2, height_of(wrapped(runs)))
    panels = whole.subplots(1, len(names), sharey=True)
    for number, (label, (rounds, seeds)) in enumerate(of_runs.items()):
        for axes, name in zip(panels, names, strict=True):
            of_seeds = [
                [_shown(record, record["accuracy"]["per_group"].get(name)) for record in records]
                for records in seeds
            ]
            if np.isfinite(of_seeds).any():
                _draw_line(axes, rounds, of_seeds, number, label=label)
    for axes, name in zip(panels, names, strict=True):
        axes.set(title=in_lines(name))
        below_rounds(axes)
    panels[0].set_ylabel(_score_axis(scored[0]))
    known = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels]
    lines = {label: line for of_panel in known for line, label in of_panel}
    legend(whole, lines.values(), wrapped(lines))
    return whole


def draw_metrics(runs: Runs, shown: Sequence[str], class_names: Sequence[str] = ()) -> Figure | None:
    """Draw further scores of the deployed models against rounds, and every class at the last evaluation.

    Those shown are in `jaxfl.results.measures.SHOWN`; values of a whole run have no panel.
    """
    found = (of_run[0][0]["accuracy"] for _, of_run in map(_scored, runs.values()) if of_run[0])
    first: Mapping = next(found, {})
    scores = SCORES_OF[task_of(first).name]
    names = [name for name in shown if name in scores or (name == PER_CLASS and "per_class" in first)]
    if not names:
        return None
    labels = wrapped(runs)
    whole, panels = in_panels(len(names), 5, 4.2, right=2, least=height_of(labels))
    for axes, name in zip(panels, names, strict=True):
        if name == PER_CLASS:
            _draw_classes(axes, runs, class_names)
            continue
        for number, seeds in enumerate(runs.values()):
            rounds, scored = _scored(seeds)
            points = [[scores[name].value(record) for record in of_seed] for of_seed in scored]
            _draw_line(axes, rounds, points, number)
        axes.set(ylabel=scores[name].title.replace(" %", " (%)"))
        below_rounds(axes)
    marks = [Line2D([], [], marker=".", **style(number, "line")) for number in range(len(runs))]
    legend(whole, marks, labels)
    return whole


def _draw_classes(axes, runs: Runs, class_names: Sequence[str]) -> None:
    """Draw a bar for each class and run: the mean over seeds at their last evaluation, and the deviation."""
    width = 0.8 / len(runs)
    for number, seeds in enumerate(runs.values()):
        scored = [[record for record in metrics if "accuracy" in record] for metrics in seeds]
        classes = 100 * np.array([of[-1]["accuracy"]["per_class"] for of in scored if of], float)
        places = np.arange(classes.shape[1]) + width * (number - (len(runs) - 1) / 2)
        spread = classes.std(0, ddof=1) if len(classes) > 1 else None
        looks = {"yerr": spread, "error_kw": {"linewidth": 0.8}, **style(number, "hatch")}
        axes.bar(places, classes.mean(0), width, **looks)
    axes.set(xlabel="class", ylabel="score at the last evaluation (%)")
    name_classes(axes.xaxis, class_names)
    axes.grid(alpha=0.3, axis="y")


def draw_bytes(runs: Runs) -> Figure | None:
    """Draw the megabytes that a whole run sends up and down, the mean over seeds; None if there are none."""
    whole = figure(8, 0.5 * len(runs) + 1.6)
    axes = whole.add_subplot(xlabel="megabytes in the whole run")
    places, ways = np.arange(len(runs)), ("bytes_up", "bytes_down")
    megabytes = [
        float(np.mean([sum(record[way] for record in metrics) for metrics in seeds])) / 1e6
        for way in ways
        for seeds in runs.values()
    ]
    texts = [shown.text() for shown in alike([Cell(amount, None) for amount in megabytes])]
    for number, way in enumerate(ways):  # beside each other: a logarithmic axis has no stacks
        part = slice(number * len(runs), (number + 1) * len(runs))
        bars = axes.barh(places + 0.4 * number - 0.2, megabytes[part], 0.4, label=way.removeprefix("bytes_"))
        axes.bar_label(bars, texts[part], padding=3, fontsize="small")
    axes.set_yticks(places, wrapped(runs))
    axes.invert_yaxis()  # the first one on top, as in tables
    axes.grid(alpha=0.3, axis="x")
    in_powers(axes, megabytes)
    axes.margins(x=0.12)  # room for the numbers
    legend(whole)
    return whole if any(megabytes) else None


def _draw_line(axes, where, of_seeds, number: int, **more) -> None:
    """Draw the mean over seeds, of_seeds (S, E), at places (E,); with several also their standard deviation.

    None stands for no value; the number of the run gives its style.
    """
    values = np.array(of_seeds, float)
    mean, looks = values.mean(0), style(number, "line")
    axes.plot(where, mean, **{"marker": "."} | looks | more)
    if len(values) > 1:
        spread = values.std(0, ddof=1)
        if len(mean) > 1:
            axes.fill_between(where, mean - spread, mean + spread, color=looks["color"], alpha=0.15)
        else:  # a band would have no width
            axes.errorbar(where, mean, spread, color=looks["color"], capsize=3)


def _scored(seeds: list[list[Round]]) -> tuple[list[int], list[list[Round]]]:
    """Return the rounds that all seeds have scores of, and the records of these rounds for each."""
    scored = [[record for record in metrics if "accuracy" in record] for metrics in seeds]
    length = min(map(len, scored))
    return [record["round"] for record in scored[0][:length]], [records[:length] for records in scored]


def _score_axis(record: Round) -> str:
    task = task_of(record["accuracy"])
    return f"{task.title}, mean over clients{' (%)' if task.percent else ''}"


def _shown(record: Round, value: float | None) -> float:
    """Return a score of a record as it is drawn: a share in percent, NaN where there is none."""
    value = np.nan if value is None else value
    return 100 * value if task_of(record["accuracy"]).percent else value


def _megabytes(record: Round) -> float:
    return (record["bytes_up"] + record["bytes_down"]) / 1e6


def _simulated_seconds(record: Round) -> float:
    return record.get("simulated_seconds", 0.0)
