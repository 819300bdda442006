"""Pictures of what a run leaves besides its scores: findings, matrices and vectors of clients, confusions."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from jaxfl.data.pictures import MOST_NAMED, name_classes
from jaxfl.folder.records import Round
from jaxfl.results.panels import LINES, figure, in_lines, in_panels, legend, wrapped
from jaxfl.results.result import findings

MOST_WRITTEN = 20  # classes with whose shares a confusion matrix has room for numbers
MOST_LINKED = 200  # clients whose links fit in a picture


def draw_findings(metrics: list[Round]) -> Figure | None:
    """Draw a panel of lines over rounds for each finding ``{line: number}`` of a run; None without any."""
    panels = {name: lines for name, lines in findings(metrics).items() if isinstance(lines, dict)}
    if not panels:
        return None
    whole, places = in_panels(len(panels), 4.5, 3.4)
    rounds = [record["round"] for record in metrics]
    names = list(dict.fromkeys(line for lines in panels.values() for line in lines))  # one colour everywhere
    for axes, (name, lines) in zip(places, panels.items(), strict=True):
        axes.set(ylabel=name, xlabel="round")
        for number, (line, values) in enumerate(lines.items()):
            colour, style = f"C{names.index(line) % 10}", LINES[number % len(LINES)]  # one hides no other
            axes.plot(rounds, values, color=colour, linestyle=style, label=line)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return whole


def draw_matrices(matrices: dict[str, np.ndarray], counts: np.ndarray) -> Figure:
    """Draw a heat map per matrix, clients with similar labels side by side.

    Args:
      matrices: by name, (N, N), by client ids.
      counts: (N, outputs), each client's training rows per label.
    """
    order = _by_labels(counts)
    named = order if len(order) <= MOST_NAMED else []
    whole, places = in_panels(len(matrices), 5.2, 4.6)
    for axes, (name, matrix) in zip(places, matrices.items(), strict=True):
        field = axes.imshow(matrix[np.ix_(order, order)], cmap="viridis", interpolation="nearest")
        axes.set(title=name, xlabel="client m", ylabel="client n")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(len(named)), named, fontsize=6)
        whole.colorbar(field, label="weight of client m for client n")
    return whole


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

    whole, places = in_panels(len(embeddings), 4.6, 4.2, right=0.8)
    outputs = next(iter(counts.values())).shape[1]
    colours = colormaps["hsv"](np.arange(outputs) / outputs)[:, :3]
    first = 0  # the id of an architecture's first client
    for axes, (name, of_labels) in zip(places, counts.items(), strict=True):
        vectors, alone = embeddings[name], embeddings[name].shape[1] == 1
        components = min(2, *vectors.shape)
        points = np.zeros((len(vectors), 2))  # fewer components leave an axis empty, and equal vectors both
        if alone:
            points = np.stack([vectors[:, 0], first + np.arange(len(vectors))], axis=1)
        elif (vectors != vectors[:1]).any():
            points[:, :components] = PCA(components, svd_solver="full").fit_transform(vectors)
        shares = _shares(of_labels)
        axes.scatter(*points.T, c=shares @ colours, edgecolors="black", linewidths=0.4)
        if len(points) <= MOST_NAMED:
            for client, (x, y) in enumerate(points, first):
                axes.annotate(str(client), (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        first += len(vectors)
        axes.set(title=name, xlabel="number of the method" if alone else "first principal component")
        axes.set(ylabel="client" if alone else "second")
        axes.grid(alpha=0.3)
    if outputs <= MOST_NAMED:
        marks = [Line2D([], [], marker="o", linestyle="", color=colour) for colour in colours]
        legend(whole, marks, wrapped(class_names or map(str, range(outputs))), title="label")
    return whole


def draw_topology(links: np.ndarray, models: list[str]) -> Figure | None:
    """Draw the links (N, N) of clients, coloured by their architectures (N,); None if they do not fit."""
    import networkx  # here, so that runs without links do not wait for it

    if len(links) > MOST_LINKED:
        return None
    graph, names = networkx.from_numpy_array(links), list(dict.fromkeys(models))
    colours = [colormaps["tab10"](names.index(model) % 10) for model in models]
    whole = figure(6, 5)
    axes = whole.add_subplot(title=f"{len(links)} clients, {graph.number_of_edges()} links")
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
    legend(whole, marks, names)
    return whole


def draw_confusion(
    matrices: Mapping[str, Sequence[Sequence[float]]], class_names: Sequence[str] = ()
) -> Figure | None:
    """Draw the share of each class's rows (a line) that models take for a class (a column); None without any.

    Matrices are by label (C, C + 1), numbers of rows, in the last column of those taken for no class.
    """
    if not matrices:
        return None
    classes = len(next(iter(matrices.values())))
    side = float(np.clip(0.42 * classes + 1.6, 4.2, 9))
    whole, panels = in_panels(len(matrices), side, side, right=1)
    for axes, (label, matrix) in zip(panels, matrices.items(), strict=True):
        counts = np.array(matrix, float)
        shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
        shares = shares if counts[:, -1].any() else shares[:, :-1]
        axes.set(title=in_lines(label), xlabel="predicted", ylabel="class")
        field = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
        for (row, column), share in np.ndenumerate(shares) if classes <= MOST_WRITTEN else ():
            colour = "white" if share > 50 else "black"
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", color=colour, fontsize="small")
        words = list(class_names) or [*map(str, range(classes))]
        name_classes(axes.yaxis, words)
        name_classes(axes.xaxis, [*words, "none"][: shares.shape[1]])
    whole.colorbar(field, ax=panels, label="share of the class's test rows (%)")
    return whole


def _by_labels(counts: np.ndarray) -> np.ndarray:
    """Order the clients so that neighbours have similar shares of labels."""
    from scipy.cluster.hierarchy import leaves_list, linkage  # here: it takes a quarter of a second to load

    if len(counts) < 3:
        return np.arange(len(counts))
    return leaves_list(linkage(_shares(counts), "average", optimal_ordering=len(counts) <= 500))


def _shares(counts: np.ndarray) -> np.ndarray:
    """Return the share of each label in every client's rows (N, outputs), 0 without rows."""
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)
