"""Pictures of tables, embeddings and bytes draw the given numbers."""

import numpy as np

from jaxfl.runs.paired import UNPAIRED
from jaxfl.runs.plot import draw_bytes, draw_embeddings, draw_grid, draw_table
from jaxfl.runs.table import Cell, Table


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
    for vectors in (np.full((3, 1), 0.5), np.ones((3, 2), bool)):
        (axes,) = draw_embeddings({"mlp": vectors}, counts).axes
        assert not axes.collections[0].get_offsets().any()


def test_bars_of_bytes_sum_over_runs_and_average_over_seeds():
    def run(*megabytes_up):
        return [{"bytes_up": up * 10**6, "bytes_down": 2 * 10**6} for up in megabytes_up]

    (axes,) = draw_bytes({"one": [run(1, 2), run(3, 4)], "two": [run(5), run(5)]}).axes
    up, down = ([(bar.get_x(), bar.get_width()) for bar in bars] for bars in axes.containers)
    assert np.allclose(up, [(0, 5), (0, 5)])
    assert np.allclose(down, [(5, 4), (5, 2)])
    assert draw_bytes({"alone": [[{"bytes_up": 0, "bytes_down": 0}]]}) is None
