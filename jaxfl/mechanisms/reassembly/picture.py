"""A picture of the assembled networks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_DRAWN = 40  # clients whose networks fit into a picture


def draw_assembled(findings: dict) -> "Figure":
    """Draw the network of each of up to 40 clients as a row of blocks, and its teacher above it.

    Args:
      findings: findings of a round; "assembled" has per client {"client", "model", "teacher", "own": blocks,
        "blocks": blocks}, and per block its client, index, group and kind. Colours are groups; a frame marks
        a block of another client.
    """
    from matplotlib.figure import Figure  # here: listing and citing methods draw nothing
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    assembled = findings["assembled"][:MOST_DRAWN]
    longest = max(len(of_client[row]) for of_client in assembled for row in ("own", "blocks"))
    size = (2.5 + 0.75 * longest, 0.6 + 0.95 * len(assembled))
    figure = Figure(size, layout="constrained", dpi=150)
    axes = figure.add_subplot(xlabel="place")
    ticks = []
    for line, of_client in enumerate(assembled):
        for shift, row, parameters in ((0, "own", "model"), (0.4, "blocks", "teacher")):
            y = -line + shift
            ticks.append((y, f"client {of_client['client']}, {parameters}\n{of_client[parameters]:,}"))
            for x, block in enumerate(of_client[row]):
                other = block["client"] != of_client["client"]
                axes.barh(
                    y,
                    0.9,
                    0.34,
                    left=x + 0.55,
                    color=f"C{block['group'] % 10}",
                    alpha=0.5,
                    edgecolor="black" if other else "none",
                )
                axes.text(
                    x + 1,
                    y,
                    f"{block['client']}.{block['index'] + 1} {block['kind']}",
                    fontsize=6,
                    ha="center",
                    va="center",
                )
    groups = sorted({block["group"] for one in assembled for row in ("own", "blocks") for block in one[row]})
    marks = [Patch(color=f"C{group % 10}", alpha=0.5, label=f"group {group}") for group in groups]
    marks.append(Patch(facecolor="none", edgecolor="black", label="of another client"))
    figure.legend(
        handles=marks, fontsize=6, title="blocks: client.number", title_fontsize=6, loc="outside right upper"
    )
    axes.set_yticks(*zip(*ticks, strict=True), fontsize=6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
