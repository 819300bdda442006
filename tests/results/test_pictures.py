"""Pictures of tables, embeddings and bytes draw the given numbers."""

import numpy as np

from jaxfl.results.charts import draw_grid, draw_table
from jaxfl.results.curves import draw_architectures, draw_bytes, draw_loss, draw_metrics
from jaxfl.results.drawings import draw_embeddings
from jaxfl.results.paired import UNPAIRED
from jaxfl.results.table import Cell, Table


def test_a_grid_has_the_means_and_is_empty_where_one_is_missing():
    rows = [
        ("lr=0.1", [Cell(50.0, None), Cell(60.25, None), UNPAIRED]),
        ("lr=0.2", [Cell(70.0, 1.0), Cell(float("nan"), None), UNPAIRED]),
    ]
    axes, _ = draw_grid(Table(["mu=0", "mu=1", "mu=1 minus other"], rows), "a study", "accuracy %").axes
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written == {(0, 0): "50.00", (1, 0): "60.25", (0, 1): "70.00"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["mu=0", "mu=1"]
    small = draw_grid(Table(["mu=0"], [("lr=0.1", [Cell(0.0281, None)])]), "megabytes", "MB")
    assert small is not None and [text.get_text() for text in small.axes[0].texts] == ["0.0281"]
    assert draw_grid(Table(["mu=0"], [("lr=0.1", [Cell(float("nan"), None)])]), "never reached", "MB") is None


def test_each_mean_is_a_point_with_its_spread_in_the_band_of_its_column():
    rows = [
        ("local", [Cell(80.0, 1.5), Cell(70.0, None), UNPAIRED]),
        ("fedavg", [Cell(81.0, 0.5), Cell(float("nan"), None), UNPAIRED]),
    ]
    figure = draw_table(Table(["alpha=0.1", "alpha=1", "alpha=1 minus local"], rows), "a study", "accuracy %")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["alpha=0.1", "alpha=1"]
    for points, (label, cells) in zip(axes.containers, rows, strict=True):
        line, _, (whiskers,) = points
        assert points.get_label() == label
        assert np.allclose(line.get_xdata().astype(float), [cell.mean for cell in cells[:2]], equal_nan=True)
        assert np.array_equal(np.round(line.get_ydata()), [0, 1])
        (left, _), (right, _) = whiskers.get_segments()[0]
        assert np.isclose((right - left) / 2, cells[0].std)
    assert axes.get_ylim() == (1.5, -0.5)


def test_equal_clients_are_at_one_point_of_a_map():
    counts = {"mlp": np.eye(3, dtype=int)}
    for vectors in (np.full((3, 2), 0.5), np.ones((3, 2), bool)):
        (axes,) = draw_embeddings({"mlp": vectors}, counts).axes
        assert not axes.collections[0].get_offsets().any()


def test_single_numbers_of_clients_are_drawn_as_they_are():
    numbers, pairs = np.array([[3.0], [-1.0]]), np.array([[0.0, 0.0], [3.0, 4.0]])
    counts = {"mlp": np.eye(2, dtype=int), "cnn": np.eye(2, dtype=int)}
    alone, mapped = draw_embeddings({"mlp": numbers, "cnn": pairs}, counts).axes
    assert alone.collections[0].get_offsets().tolist() == [[3.0, 0.0], [-1.0, 1.0]]
    first, second = mapped.collections[0].get_offsets()
    assert np.isclose(np.linalg.norm(first - second), 5)


def run(*megabytes_up, down=2):
    return [{"bytes_up": up * 10**6, "bytes_down": down * 10**6} for up in megabytes_up]


def test_bars_of_bytes_sum_over_runs_and_average_over_seeds():
    (axes,) = draw_bytes({"one": [run(1, 2), run(3, 4)], "two": [run(5), run(5)]}).axes
    up, down = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert np.allclose(up, [5, 5]) and np.allclose(down, [4, 2])
    assert axes.get_xscale() == "linear"
    (axes,) = draw_bytes({"one": [run(225)], "two": [run(0.6)], "none": [run(0, down=0)]}).axes
    assert axes.get_xscale() == "symlog" and axes.get_xlim()[0] == 0
    assert draw_bytes({"alone": [[{"bytes_up": 0, "bytes_down": 0}]]}) is None


def test_lines_have_the_mean_of_seeds_and_a_band_of_their_deviation():
    def seed(*shares):
        scores = [{"mean": share, "lowest": share / 2, "per_group": {"a": share, "b": 1}} for share in shares]
        of_rounds = [{"loss": 1 - share} for share in shares]
        return [
            {"round": t, "accuracy": score} | line
            for t, (score, line) in enumerate(zip(scores, of_rounds, strict=True), 1)
        ]

    runs = {"one": [seed(0.2, 0.5), seed(0.4, 0.5)]}
    for figure, means, deviation in (
        (draw_architectures(runs), [30, 50], 100 * 0.2 / np.sqrt(2)),
        (draw_metrics(runs, ["lowest"]), [15, 25], 100 * 0.1 / np.sqrt(2)),
        (draw_loss(runs), [0.7, 0.5], 0.2 / np.sqrt(2)),
    ):
        axes = figure.axes[0]
        assert np.allclose(axes.lines[0].get_ydata(), means)
        band = axes.collections[0].get_datalim(axes.transData)
        assert np.isclose(band.height, max(2 * deviation, abs(means[0] - means[1]) + deviation))
    assert draw_loss({"none": [[{"loss": None}]]}) is None
