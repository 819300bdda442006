"""Plots of one or several runs, and of a method's findings."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from jaxfl.data.pictures import MOST_NAMED, name_classes
from jaxfl.folder.records import Round
from jaxfl.results.findings import over_rounds
from jaxfl.results.measures import PER_CLASS, SCORES_OF
from jaxfl.results.table import Cell, Table, alike
from jaxfl.tasks import task_of

LINES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "D")
HATCHES = ("", "//", "..", "xx")
LABEL_WIDTH = 40  # characters in a line of the legend, which must leave room for the curves
TICK_WIDTH = 20  # the same under a column of a heat map
WIDE = 30  # amounts whose largest is more times the smallest are drawn on a logarithmic axis
MOST_WRITTEN = 20  # classes with whose shares a confusion matrix has room for numbers
MOST_LINKED = 200  # clients whose links fit in a picture


def draw_curves(runs: dict[str, list[list[Round]]]) -> Figure:
    """Draw the task's score against rounds, against the bytes moved and, if known, against simulated time.

    Args:
      runs: for each label the metrics of its seeds. A line is their mean; with several seeds a band is their
        sample standard deviation, a bar after a single evaluation.
    """
    costs = {"megabytes sent and received": _megabytes}
    if any(_simulated_seconds(seeds[0][0]) for seeds in runs.values()):
        costs["simulated seconds"] = _simulated_seconds
    wrapped = _wrapped(runs)
    figure = Figure((6 * (1 + len(costs)), _height(wrapped)), layout="constrained", dpi=150)
    left, *others = figure.subplots(1, 1 + len(costs), sharey=True)
    whole = {name: [] for name in costs}  # what each run has spent at its end
    for number, (label, seeds) in enumerate(zip(wrapped, runs.values(), strict=True)):
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
                whole[name].append(spent.mean(0)[-1])
    _over_rounds(left)
    for axes, (name, amounts) in zip(others, whole.items(), strict=True):
        axes.set(xlabel=name)
        axes.grid(alpha=0.3)
        _from_zero(axes)
        _in_powers(axes, amounts)
    figure.legend(*left.get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    return figure


def _score_axis(record: Round) -> str:
    task = task_of(record["accuracy"])
    return f"{task.title}, mean over clients{' (%)' if task.percent else ''}"


def _shown(record: Round, value: float | None) -> float:
    """Return a score of a record as it is drawn: a share in percent, NaN where there is none."""
    value = np.nan if value is None else value
    return 100 * value if task_of(record["accuracy"]).percent else value


def draw_loss(runs: dict[str, list[list[Round]]]) -> Figure | None:
    """Draw the training loss against rounds, its mean over a round's clients; None without any.

    Args:
      runs: for each label the metrics of its seeds, as in `draw_curves`.
    """
    wrapped = _wrapped(runs)
    figure = Figure((8, _height(wrapped)), layout="constrained", dpi=150)
    axes = figure.add_subplot(ylabel="training loss, mean over the round's clients")
    for number, (label, seeds) in enumerate(zip(wrapped, runs.values(), strict=True)):
        rounds = range(1, 1 + min(map(len, seeds)))
        losses = [[metrics[t - 1]["loss"] for t in rounds] for metrics in seeds]
        _draw_line(axes, rounds, losses, number, label=label, marker="")
    _over_rounds(axes)
    figure.legend(fontsize="small", loc="outside right upper")
    return figure if any(np.isfinite(line.get_ydata()).any() for line in axes.lines) else None


def _scored(seeds: list[list[Round]]) -> tuple[list[int], list[list[Round]]]:
    """Return the rounds that all seeds have scores of, and the records of these rounds for each."""
    scored = [[record for record in metrics if "accuracy" in record] for metrics in seeds]
    length = min(map(len, scored))
    return [record["round"] for record in scored[0][:length]], [records[:length] for records in scored]


def _draw_line(axes, where, of_seeds, number: int, **more) -> None:
    """Draw the mean over seeds; with several also their sample standard deviation.

    It is a band, or a bar at a single point, where a band has no width.

    Args:
      axes: where it is drawn.
      where: (E,), places on the horizontal axis.
      of_seeds: (S, E), each seed's values; None where there is none.
      number: of the run, for its style.
      **more: further properties of the line.
    """
    values = np.array(of_seeds, float)
    mean, color = values.mean(0), f"C{number % 10}"
    axes.plot(where, mean, **_line(number) | more)
    if len(values) > 1:
        spread = values.std(0, ddof=1)
        if len(mean) > 1:
            axes.fill_between(where, mean - spread, mean + spread, color=color, alpha=0.15)
        else:
            axes.errorbar(where, mean, spread, color=color, capsize=3)


def _over_rounds(axes) -> None:
    axes.set(xlabel="round")
    _from_zero(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def _from_zero(axes) -> None:
    """Let the horizontal axis begin at 0, with a margin on the right also where all points are near it."""
    axes.update_datalim([(0, 0)], updatey=False)
    axes.autoscale_view()
    axes.set_xlim(left=0)


def _in_powers(axes, amounts: Iterable[float]) -> None:
    """Make the horizontal axis logarithmic if the amounts on it differ much; below them it goes to 0."""
    known = [amount for amount in amounts if amount > 0]
    if known and max(known) > WIDE * min(known):
        axes.set_xscale("symlog", linthresh=10 ** np.floor(np.log10(min(known))), linscale=0.4)
        axes.xaxis.set_major_formatter("{x:g}")


def _wrapped(labels: Iterable[str]) -> list[str]:
    """Wrap labels into lines that fit in a legend."""
    return [_in_lines(label, LABEL_WIDTH) for label in labels]


def _in_lines(label: str, width: int) -> str:
    """Wrap a plain text into lines of `width` characters, after spaces and commas; a $ begins no formula."""
    spaced = label.replace(", ", ",").replace(",", ", ")
    return textwrap.fill(spaced, width, break_long_words=False, break_on_hyphens=False).replace("$", "\\$")


def _height(legend: list[str]) -> float:
    """Return the height of a figure, in inches, in which a legend on the right fits."""
    return max(4.2, 0.4 + 0.21 * sum(1 + label.count("\n") for label in legend))


def _line(number: int) -> dict:
    """Return the style of a run's line; forty styles differ."""
    return {"marker": ".", "color": f"C{number % 10}", "linestyle": LINES[number // 10 % len(LINES)]}


def _bar(number: int) -> dict:
    """Return the style of a run's bars; forty styles differ."""
    return {"color": f"C{number % 10}", "hatch": HATCHES[number // 10 % len(HATCHES)]}


def _mark(number: int) -> dict:
    """Return the style of a run's points; forty styles differ."""
    return {"marker": MARKS[number // 10 % len(MARKS)], "color": f"C{number % 10}"}


def draw_metrics(
    runs: dict[str, list[list[Round]]], shown: Sequence[str], class_names: Sequence[str] = ()
) -> Figure | None:
    """Draw further scores of the deployed models against rounds, and every class at the last evaluation.

    Args:
      runs: for each label the metrics of its seeds, as in `draw_curves`.
      shown: names in `jaxfl.results.measures.SHOWN`; values of a whole run have no panel.
      class_names: the classes in words, if they have names.
    """
    found = (of_run[0][0]["accuracy"] for _, of_run in map(_scored, runs.values()) if of_run[0])
    first: Mapping = next(found, {})
    scores = SCORES_OF[task_of(first).name]
    panels = [name for name in shown if name in scores or (name == PER_CLASS and "per_class" in first)]
    if not panels:
        return None
    wrapped = _wrapped(runs)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    size = 5 * columns + 2, max(_height(wrapped), 4.2 * lines)
    figure = Figure(size, layout="constrained", dpi=150)
    for place, name in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, place)
        for number, seeds in enumerate(runs.values()):
            if name == PER_CLASS:
                scored = [[record for record in metrics if "accuracy" in record] for metrics in seeds]
                classes = [of_seed[-1]["accuracy"]["per_class"] for of_seed in scored if of_seed]
                _draw_classes(axes, classes, number, len(runs))
                continue
            rounds, scored = _scored(seeds)
            points = [[scores[name].value(record) for record in of_seed] for of_seed in scored]
            _draw_line(axes, rounds, points, number)
        if name == PER_CLASS:
            axes.set(xlabel="class", ylabel="accuracy at the last evaluation (%)")
            name_classes(axes.xaxis, class_names)
            axes.grid(alpha=0.3, axis="y")
        else:
            axes.set(ylabel=scores[name].title.replace(" %", " (%)"))
            _over_rounds(axes)
    marks = [Line2D([], [], **_line(number)) for number in range(len(runs))]
    figure.legend(marks, wrapped, fontsize="small", loc="outside right upper")
    return figure


def _draw_classes(axes, seeds: list[list[float | None]], number: int, runs: int) -> None:
    """Draw a bar per class beside those of the other runs: the mean over seeds, and their deviation."""
    classes = 100 * np.array(seeds, float)
    width = 0.8 / runs
    places = np.arange(classes.shape[1]) + width * (number - (runs - 1) / 2)
    spread = classes.std(0, ddof=1) if len(classes) > 1 else None
    axes.bar(places, classes.mean(0), width, yerr=spread, error_kw={"linewidth": 0.8}, **_bar(number))


def draw_confusion(
    matrices: Mapping[str, Sequence[Sequence[float]]], class_names: Sequence[str] = ()
) -> Figure | None:
    """Draw the share of each class's rows (a line) that models take for a class (a column); None without any.

    Args:
      matrices: by label (C, C + 1), numbers of rows, in the last column of those taken for no class.
      class_names: the classes in words, if they have names.
    """
    if not matrices:
        return None
    columns = min(3, len(matrices))
    lines, classes = -(-len(matrices) // columns), len(next(iter(matrices.values())))
    side = float(np.clip(0.42 * classes + 1.6, 4.2, 9))
    figure = Figure((side * columns + 1, side * lines), layout="constrained", dpi=150)
    for place, (label, matrix) in enumerate(matrices.items(), 1):
        counts = np.array(matrix, float)
        shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
        shares = shares if counts[:, -1].any() else shares[:, :-1]
        axes = figure.add_subplot(
            lines, columns, place, title=_in_lines(label, LABEL_WIDTH), xlabel="predicted", ylabel="class"
        )
        field = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
        for (row, column), share in np.ndenumerate(shares) if classes <= MOST_WRITTEN else ():
            colour = "white" if share > 50 else "black"
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", color=colour, fontsize="small")
        words = list(class_names) or [*map(str, range(classes))]
        name_classes(axes.yaxis, words)
        name_classes(axes.xaxis, [*words, "none"][: shares.shape[1]])
    figure.colorbar(field, ax=figure.axes, label="share of the class's test rows (%)")
    return figure


def draw_table(table: Table, title: str, unit: str) -> Figure:
    """Draw a table as points: a band for each column, with a point and standard deviation for each row.

    The axis begins where the points do, and not at zero, to show how far apart they are. Columns of
    differences are left out.
    """
    titles, rows = _of_means(table), len(table.rows)
    wrapped = _wrapped(label for label, _ in table.rows)
    named = [_in_lines(column, LABEL_WIDTH) for column in titles]
    lines = max(rows, *(1 + name.count("\n") for name in named)) + 0.8  # lines of a band
    width, least = (10, _height(wrapped)) if rows > 1 else (8, 2)  # one row needs no legend
    height = max(least, 1 + 0.19 * lines * len(titles))
    figure = Figure((width, height), layout="constrained", dpi=150)
    axes = figure.add_subplot(
        title=_in_lines(title, 2 * LABEL_WIDTH), xlabel=_in_lines(unit, 2 * LABEL_WIDTH)
    )
    places = np.arange(len(titles))
    everywhere = [cell.mean for _, of_row in table.rows for cell in of_row if isinstance(cell, Cell)]
    if "%" not in unit:
        _in_powers(axes, everywhere)
    for number, (_, of_row) in enumerate(table.rows):
        cells = [cell for cell in of_row if isinstance(cell, Cell)]
        at = places + (number - (rows - 1) / 2) / (rows + 1)
        spread = [np.nan if cell.std is None else cell.std for cell in cells]
        looks = {"label": wrapped[number], "linestyle": "", "capsize": 2, **_mark(number)}
        axes.errorbar([cell.mean for cell in cells], at, xerr=spread, **looks)
    for place in places[::2]:
        axes.axhspan(place - 0.5, place + 0.5, color="0.95", zorder=0)
    axes.set_yticks(places, named, fontsize="small")
    axes.set_ylim(len(titles) - 0.5, -0.5)  # the first one on top, as in tables
    axes.grid(alpha=0.3, axis="x")
    if rows > 1:
        figure.legend(fontsize="small", loc="outside right upper")
    return figure


def draw_panels(table: Table, title: str) -> Figure:
    """Draw a panel for each column of a table, with a point and standard deviation for each row.

    Columns of differences are left out.
    """
    titles, rows = _of_means(table), np.arange(len(table.rows))
    labels = _wrapped(label for label, _ in table.rows)
    figure = Figure((3 * len(titles) + 3, _height(labels)), layout="constrained", dpi=150)
    figure.suptitle(_in_lines(title, LABEL_WIDTH * len(titles)))
    panels = np.atleast_1d(figure.subplots(1, len(titles), sharey=True))
    of_rows = [[cell for cell in of_row if isinstance(cell, Cell)] for _, of_row in table.rows]
    for panel, name, cells in zip(panels, titles, zip(*of_rows, strict=True), strict=True):
        spread = [np.nan if cell.std is None else cell.std for cell in cells]
        panel.errorbar([cell.mean for cell in cells], rows, xerr=spread, linestyle="", marker="o", capsize=2)
        if "%" not in name:
            _in_powers(panel, (cell.mean for cell in cells))
        panel.set_xlabel(_in_lines(name, LABEL_WIDTH // 2))
        panel.grid(alpha=0.3)
    panels[0].set_yticks(rows, labels, fontsize="small")
    panels[0].set_ylim(len(rows) - 0.5, -0.5)  # the first one on top, as in tables
    return figure


def draw_grid(table: Table, title: str, unit: str) -> Figure | None:
    """Draw a table as a heat map with its means in it, without columns of differences; None without any."""
    titles = _of_means(table)
    cells = [[cell for cell in of_row if isinstance(cell, Cell)] for _, of_row in table.rows]
    means = np.array([[cell.mean for cell in of_row] for of_row in cells])
    if not np.isfinite(means).any():
        return None
    size = max(5, 1.5 * len(titles) + 3), max(3, 0.6 * len(means) + 1.5)
    figure = Figure(size, layout="constrained", dpi=150)
    axes = figure.add_subplot(title=_in_lines(title, LABEL_WIDTH))
    field = axes.imshow(means, cmap="viridis", aspect="auto")
    middle = (np.nanmin(means) + np.nanmax(means)) / 2
    for (row, column), mean in np.ndenumerate(means):
        if np.isfinite(mean):
            colour = "white" if mean < middle else "black"
            text = cells[row][column]._replace(std=None).text()
            axes.text(column, row, text, ha="center", va="center", color=colour)
    labels = _wrapped(label for label, _ in table.rows)
    axes.set_xticks(
        range(len(titles)), [_in_lines(column, TICK_WIDTH) for column in titles], fontsize="small"
    )
    axes.set_yticks(range(len(labels)), labels)
    figure.colorbar(field, label=_in_lines(unit, LABEL_WIDTH))
    return figure


def _of_means(table: Table) -> list[str]:
    """Return the titles of the columns that are not differences."""
    _, first = table.rows[0]
    return [title for title, cell in zip(table.titles, first, strict=True) if isinstance(cell, Cell)]


def draw_bytes(runs: dict[str, list[list[Round]]]) -> Figure | None:
    """Draw the megabytes that a whole run sends up and down, two bars for each label; None if there are none.

    Args:
      runs: for each label the metrics of its seeds, as in `draw_curves`; a bar is their mean.
    """
    figure = Figure((8, 0.5 * len(runs) + 1.6), layout="constrained", dpi=150)
    axes = figure.add_subplot(xlabel="megabytes in the whole run")
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
    axes.set_yticks(places, _wrapped(runs))
    axes.invert_yaxis()  # the first one on top, as in tables
    axes.grid(alpha=0.3, axis="x")
    _in_powers(axes, megabytes)
    axes.margins(x=0.12)  # room for the numbers
    figure.legend(fontsize="small", loc="outside right upper")
    return figure if any(megabytes) else None


def draw_architectures(runs: dict[str, list[list[Round]]]) -> Figure | None:
    """Draw the score against rounds, a panel for each architecture; None if there is only one.

    Args:
      runs: for each label the metrics of its seeds, as in `draw_curves`. A run has no line for an
        architecture that it lacks.
    """
    of_runs = {label: _scored(seeds) for label, seeds in runs.items()}
    scored = [record for _, seeds in of_runs.values() for records in seeds for record in records]
    names = list(dict.fromkeys(name for record in scored for name in record["accuracy"]["per_group"]))
    if len(names) < 2:
        return None
    figure = Figure((5 * len(names) + 2, _height(_wrapped(runs))), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(names), sharey=True)
    for number, (label, (rounds, seeds)) in enumerate(of_runs.items()):
        for axes, name in zip(panels, names, strict=True):
            of_seeds = [
                [_shown(record, record["accuracy"]["per_group"].get(name)) for record in records]
                for records in seeds
            ]
            if np.isfinite(of_seeds).any():
                _draw_line(axes, rounds, of_seeds, number, label=label)
    for axes, name in zip(panels, names, strict=True):
        axes.set(title=_in_lines(name, LABEL_WIDTH))
        _over_rounds(axes)
    panels[0].set_ylabel(_score_axis(scored[0]))
    known = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels]
    lines = {label: line for of_panel in known for line, label in of_panel}
    figure.legend(lines.values(), _wrapped(lines), fontsize="small", loc="outside right upper")
    return figure


def _megabytes(record: Round) -> float:
    return (record["bytes_up"] + record["bytes_down"]) / 1e6


def _simulated_seconds(record: Round) -> float:
    return record.get("simulated_seconds", 0.0)


def draw_findings(metrics: list[Round]) -> Figure | None:
    """Draw a panel of lines over rounds for each finding ``{line: number}`` of a run; None without any."""
    panels = {name: lines for name, lines in over_rounds(metrics).items() if isinstance(lines, dict)}
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure((4.5 * columns, 3.4 * rows), layout="constrained", dpi=150)
    rounds = [record["round"] for record in metrics]
    names = list(dict.fromkeys(line for lines in panels.values() for line in lines))  # one colour everywhere
    for place, (name, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place, ylabel=name, xlabel="round")
        for number, (line, values) in enumerate(lines.items()):
            colour, style = f"C{names.index(line) % 10}", LINES[number % len(LINES)]  # one hides no other
            axes.plot(rounds, values, color=colour, linestyle=style, label=line)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def draw_matrices(matrices: dict[str, np.ndarray], counts: np.ndarray) -> Figure:
    """Draw a heat map per matrix, clients with similar labels side by side.

    Args:
      matrices: by name, (N, N), by client ids.
      counts: (N, outputs), each client's training rows per label.
    """
    order = _by_labels(counts)
    named = order if len(order) <= MOST_NAMED else []
    figure = Figure((5.2 * len(matrices), 4.6), layout="constrained", dpi=150)
    for place, (name, matrix) in enumerate(matrices.items(), 1):
        axes = figure.add_subplot(1, len(matrices), place, title=name)
        field = axes.imshow(matrix[np.ix_(order, order)], cmap="viridis", interpolation="nearest")
        axes.set(xlabel="client m", ylabel="client n")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(len(named)), named, fontsize=6)
        figure.colorbar(field, label="weight of client m for client n")
    return figure


def draw_embeddings(
    embeddings: dict[str, np.ndarray], counts: dict[str, np.ndarray], class_names: Sequence[str] = ()
) -> Figure:
    """Draw a map of the clients of each architecture: two principal components of their vectors.

    Single numbers are drawn as they are, along a line for each client. A client's colour is the mixture of
    its labels' colours, so that clients with similar labels look alike.

    Args:
      embeddings: by architecture, (n_g, d).
      counts: by architecture in the order of ids, (n_g, outputs), each client's training rows per label.
      class_names: the labels in words, if they have names.
    """
    from sklearn.decomposition import PCA  # here: it loads SciPy, a second of every command

    figure = Figure((4.6 * len(embeddings) + 0.8, 4.2), layout="constrained", dpi=150)
    outputs = next(iter(counts.values())).shape[1]
    colours = colormaps["hsv"](np.arange(outputs) / outputs)[:, :3]
    first = 0  # the id of an architecture's first client
    for place, (name, of_labels) in enumerate(counts.items(), 1):
        vectors, alone = embeddings[name], embeddings[name].shape[1] == 1
        components = min(2, *vectors.shape)
        points = np.zeros((len(vectors), 2))  # fewer components leave an axis empty, and equal vectors both
        if alone:
            points = np.stack([vectors[:, 0], first + np.arange(len(vectors))], axis=1)
        elif (vectors != vectors[:1]).any():
            points[:, :components] = PCA(components, svd_solver="full").fit_transform(vectors)
        shares = _shares(of_labels)
        axes = figure.add_subplot(1, len(embeddings), place, title=name)
        axes.scatter(*points.T, c=shares @ colours, edgecolors="black", linewidths=0.4)
        if len(points) <= MOST_NAMED:
            for client, (x, y) in enumerate(points, first):
                axes.annotate(str(client), (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        first += len(vectors)
        axes.set(xlabel="number of the method" if alone else "first principal component")
        axes.set(ylabel="client" if alone else "second")
        axes.grid(alpha=0.3)
    if outputs <= MOST_NAMED:
        marks = [Line2D([], [], marker="o", linestyle="", color=colour) for colour in colours]
        named = _wrapped(class_names or map(str, range(outputs)))
        figure.legend(marks, named, title="label", fontsize="small", loc="outside right upper")
    return figure


def draw_topology(links: np.ndarray, models: list[str]) -> Figure | None:
    """Draw the graph of the clients, coloured by architecture; None if it does not fit.

    Args:
      links: (N, N) bool, which clients are linked.
      models: (N,), the architecture of each client.
    """
    import networkx  # here, so that runs without links do not wait for it

    if len(links) > MOST_LINKED:
        return None
    graph, names = networkx.from_numpy_array(links), list(dict.fromkeys(models))
    colours = [colormaps["tab10"](names.index(model) % 10) for model in models]
    figure = Figure((6, 5), layout="constrained", dpi=150)
    axes = figure.add_subplot(title=f"{len(links)} clients, {graph.number_of_edges()} links")
    places = networkx.circular_layout(graph)
    networkx.draw_networkx_edges(graph, places, ax=axes, alpha=0.3, width=0.7)
    small = len(links) > MOST_NAMED
    networkx.draw_networkx_nodes(graph, places, ax=axes, node_color=colours, node_size=40 if small else 220)
    if not small:
        networkx.draw_networkx_labels(graph, places, ax=axes, font_size=7, font_color="white")
    axes.set_axis_off()
    marks = [
        Line2D([], [], marker="o", linestyle="", color=colormaps["tab10"](i % 10)) for i in range(len(names))
    ]
    figure.legend(marks, names, fontsize="small", loc="outside right upper")
    return figure


def _by_labels(counts: np.ndarray) -> np.ndarray:
    """Order the clients so that neighbours have similar shares of labels."""
    from scipy.cluster.hierarchy import leaves_list, linkage  # here: it takes a quarter of a second to load

    if len(counts) < 3:
        return np.arange(len(counts))
    return leaves_list(linkage(_shares(counts), "average", optimal_ordering=len(counts) <= 500))


def _shares(counts: np.ndarray) -> np.ndarray:
    """Return the share of each label in every client's rows (N, outputs), 0 without rows."""
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)
