"""Paired differences between methods with their intervals, and the tables that show them."""

import io
import math
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from jaxfl.errors import JaxflError
from jaxfl.grid.compare import check_distinct
from jaxfl.results.measures import measure, usual_columns
from jaxfl.results.notes import on_differences
from jaxfl.results.paired import UNPAIRED, Difference, interval, label_of, paired
from jaxfl.results.table import (
    Cell,
    Table,
    alike,
    as_csv,
    as_latex,
    as_markdown,
    as_text,
)

VALUE, CLIENTS = measure("accuracy").value, measure("accuracy").clients
OURS, THEIRS = [0.91, 0.93, 0.88, 0.94], [0.90, 0.91, 0.88, 0.91]


def result(mean, per_client=None):
    return {"accuracy": {"mean": mean, "per_client": per_client or [mean]}}


def of_scipy(ours, theirs):
    """Return SciPy's mean and interval of the differences of two samples, in percent."""
    low, high = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    return tuple(100 * np.array([np.mean(ours) - np.mean(theirs), low, high]))


@pytest.mark.parametrize("seeds", [range(4), [3, 1, 0, 2]])
def test_runs_pair_by_their_seeds_whatever_the_order(seeds):
    """Runs are paired by seed in whatever order; seeds of only one method are left out."""
    ours = {(seed, 7): result(OURS[seed]) for seed in seeds} | {(8, 7): result(0.1)}
    theirs = {(9, 7): result(0.9)} | {(seed, 7): result(THEIRS[seed]) for seed in range(4)}
    found = paired(ours, theirs, VALUE, CLIENTS)
    assert found[:3] == pytest.approx(of_scipy(OURS, THEIRS))
    assert found[3:] == (4, "seeds") and found.inside
    assert paired(theirs, ours, VALUE)[:3] == pytest.approx([-found.mean, -found.high, -found.low])


def test_one_seed_pairs_clients_and_leaves_newcomers_out():
    ours, theirs = [0.5, 0.75, None, 1.0], [0.25, 0.75, None, 0.5]
    found = paired({(0, 0): result(0.8, ours)}, {(0, 0): result(0.5, theirs)}, VALUE, CLIENTS)
    assert found[:3] == pytest.approx(of_scipy([0.5, 0.75, 1.0], [0.25, 0.75, 0.5]))
    assert found[3:] == (3, "clients")
    alone = paired({(0, 0): result(0.8)}, {(0, 0): result(0.5)}, VALUE)
    assert alone.text() == "+30.00" and alone.of == "seeds"


def test_seeds_pair_over_the_clients_that_both_runs_have():
    """Clients that are newcomers in one run, here the best of the other, are left out of the pair."""
    ours = {(seed, 0): result(mean, [mean, None]) for seed, mean in enumerate(OURS)}
    theirs = {(seed, 0): result((mean + 1) / 2, [mean, 1.0]) for seed, mean in enumerate(THEIRS)}
    assert paired(ours, theirs, VALUE, CLIENTS)[:3] == pytest.approx(of_scipy(OURS, THEIRS))


def test_several_partitions_are_the_pairs():
    """Several partitions are the pairs, because seeds of one partition are not independent."""
    draws = [(seed, partition) for partition in (0, 1) for seed in (0, 1)]
    others = [0.5, *THEIRS[1:]]
    ours, theirs = (
        {d: result(m) for d, m in zip(draws, accuracies, strict=True)} for accuracies in (OURS, others)
    )
    found = paired(ours, theirs, VALUE)
    means = [np.mean(np.reshape(accuracies, (2, 2)), 1) for accuracies in (OURS, others)]
    assert found[:3] == pytest.approx(of_scipy(*means)) and found[3:] == (2, "partitions")


def test_runs_that_cannot_be_paired_have_no_difference():
    assert paired({(0, 0): result(0.5)}, {(1, 0): result(0.5)}, VALUE, CLIENTS) is UNPAIRED
    assert UNPAIRED.text() == "-" and not on_differences("fedavg", {"local": UNPAIRED})


def test_notes_say_over_which_pairs_a_difference_is():
    kinds = {"a": Difference(1.0, 0.5, 1.5, 3, "seeds"), "b": Difference(1.0, 0.5, 1.5, 20, "clients")}
    (alone,) = on_differences("m0", {"a": kinds["a"]})
    assert alone.startswith("Minus m0: ")
    seeds, clients = on_differences("m0", kinds)
    assert seeds.startswith("Minus m0 (a): ") and clients.startswith("Minus m0 (b): ")
    (single,) = on_differences("m0", {"a": Difference(1.0, np.nan, np.nan, 1, "seeds")})
    assert "no interval" in single and "Student" not in single
    assert not on_differences("m0", {"a": Difference(np.nan, np.nan, np.nan, 2, "seeds")})


@pytest.mark.parametrize(
    ("differences", "text"),
    [
        ([1.0, 2.0, 3.0], "+2.00 [-0.48, +4.48], inside the spread"),
        ([-1.9, -2.0, -2.1], "-2.00 [-2.25, -1.75]"),
        ([0.0, 0.0], "+0.00 [+0.00, +0.00], inside the spread"),
        ([0.5, 0.5], "+0.50 in every pair"),  # as of bytes
        ([-0.0029, -0.0029], "-0.00290 in every pair"),
        ([0.001, 0.002, 0.003], "+0.00200 [-0.00048, +0.00448], inside the spread"),
    ],
)
def test_a_difference_says_whether_it_is_inside_the_spread(differences, text):
    assert interval(differences, "seeds").text() == text


def test_tables_hold_the_ends_of_intervals():
    differences = [UNPAIRED, Difference(-1.5, -2.0, 0.25, 3, "seeds")]
    rows = [
        (f"m{i}", [Cell(90.0, None), difference, Cell(1.0, 0.5)]) for i, difference in enumerate(differences)
    ]
    notes = on_differences("m0", dict(zip(("m0", "m1"), differences, strict=True)))
    table = Table(["accuracy %", "minus m0", "MB up"], rows, tuple(notes))
    head, first, second = as_csv(table).splitlines()
    assert head == "method,accuracy %,accuracy % std,minus m0,minus m0 low,minus m0 high,MB up,MB up std"
    assert first == "m0,90.0000,,,,,1.0000,0.5000"
    assert second == "m1,90.0000,,-1.5000,-2.0000,0.2500,1.0000,0.5000"
    assert "| -1.50 [-2.00, +0.25], inside the spread |" in as_markdown(table)
    assert "Student's t over 3 seeds." in as_markdown(table)
    assert "m1 & 90.00 & $-1.50$ & 1.00" in as_latex(table)
    apart = table._replace(rows=[("m1", [Cell(90.0, None), Difference(-1.5, -2.0, -0.1, 3, "seeds")])])
    assert "m1 & 90.00 & $-1.50^{*}$" in as_latex(apart)


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (91.268, 0.314, "91.27 ± 0.31"),
        (0.1, None, "0.10"),
        (0.02812, 0.0004, "0.0281 ± 0.0004"),
        (0.0, 0.0, "0.00 ± 0.00"),
        (1.4e-15, None, "0.00"),  # only rounding
        (math.nan, None, "-"),
    ],
)
def test_a_small_number_keeps_three_digits(mean, std, text):
    assert Cell(mean, std).text() == text


def test_labels_keep_the_form_of_a_table():
    bracketed = [(r"[12] \| a", [Cell(1.0, None)]), ("*ours", [Cell(1.0, None)])]
    table = Table(["100 %"], [(r"a^2~{x}$y$\b|c_d#e&f", [Cell(1.0, None)]), *bracketed])
    assert r"| a^2~{x}$y$\\b\|c_d#e&f | 1.00 |" in as_markdown(table)
    assert r"| [12] \\\| a | 1.00 |" in as_markdown(table)
    assert "\n{}[12] " in as_latex(table) and "\n{}*ours" in as_latex(table)  # no arguments of \midrule or \\
    written = (
        r"a\textasciicircum{}2\textasciitilde{}\{x\}\$y\$\textbackslash{}b\textbar{}c\_d\#e\&f & 1.00 \\"
    )
    assert written in as_latex(table) and r"100 \%" in as_latex(table)


WIDE = Table(
    ["accuracy %", "minus fedavg", "MB up"],
    [
        ("fedavg", [Cell(56.43, 6.67), Difference(math.nan, 0.0, 0.0, 2, "seeds"), Cell(3.14, 0.0)]),
        ("[fed]rod-plus", [Cell(73.71, 4.04), Difference(17.29, -6.31, 40.88, 2, "seeds"), Cell(3.0, 0.01)]),
    ],
    best=[(1, 0)],
)


@pytest.mark.parametrize(
    ("width", "first", "whole"),
    [
        (90, "method accuracy % minus fedavg MB up", True),
        (57, "method accuracy % minus fedavg MB up", True),  # the difference takes several lines
        (56, "method fedavg [fed]rod-plus", True),
        (43, "method fedavg [fed]rod-plus", True),
        (42, "method accuracy %", True),  # in three tables
        (26, "method accuracy %", False),
    ],
)
def test_a_table_keeps_names_and_numbers_whole_if_the_terminal_allows(width, first, whole):
    console = Console(width=width, file=io.StringIO(), markup=True)
    drawn = as_text(WIDE, width)
    console.print(drawn)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    tables = drawn.renderables
    assert " ".join(str(column.header) for column in tables[0].columns) == first
    pieces = ("56.43 ± 6.67", "73.71 ± 4.04", "3.00 ± 0.01", "[-6.31,", "+40.88],", "[fed]rod-plus")
    assert all(any(piece in line for line in lines) for piece in pieces) == whole
    cells = [cell for one in tables for column in one.columns for cell in column.cells]
    bold = [cell.plain for cell in cells if str(cell.style) == "bold"]
    assert bold == ["73.71 ± 4.04"]


def test_figures_of_one_measure_have_equally_many_decimals():
    texts = [shown.text() for shown in alike([Cell(0.0483, 0.0), Cell(0.1, 0.0), Cell(math.nan, math.nan)])]
    assert texts == ["0.0483", "0.1000", "-"]  # what never deviates has no deviation
    assert [shown.text() for shown in alike([Cell(91.0, 0.0), Cell(3.0, 0.5)])] == [
        "91.00 ± 0.00",
        "3.00 ± 0.50",
    ]


def test_methods_that_would_share_a_folder_are_refused():
    one, other = (
        SimpleNamespace(name=None, label=label, method=label, config=None) for label in ("prox*", "prox'")
    )
    check_distinct([one])
    with pytest.raises(JaxflError, match=r"prox\* and prox' are two methods .* share a folder, prox-;"):
        check_distinct([one, other])
    with pytest.raises(JaxflError, match="is named twice"):
        check_distinct([one, one])


def test_a_row_is_found_by_its_label_even_if_it_has_an_option_twice():
    twice = "local,models=mlp,clients=5+mlp,hidden=20,clients=15"
    labels = [twice, "ditto,lam=1.0"]
    assert label_of(twice, labels) == twice
    assert label_of("ditto,lam=1", labels) == "ditto,lam=1.0"
    with pytest.raises(JaxflError, match="no such row in the table; did you mean 'ditto,lam=1.0'"):
        label_of("dito,lam=1.0", labels)
    longer = ["fedavg,lr=0.05", "mine,lr=0.01"]  # a table tells a method from others by more options
    assert label_of("fedavg", [*longer, *longer]) == "fedavg,lr=0.05"  # of two seeds
    with pytest.raises(JaxflError, match="no such row"):
        label_of("fedavg", [*longer, "fedavg,lr=0.1"])


def test_columns_have_units_and_include_those_of_newcomers():
    """Columns have units, here mega for a million, also in studies, and there are some of newcomers."""
    spent = {"round": 2, "bytes_up": 10**6, "bytes_down": 4 * 10**6, "flops": 3e9, "simulated_seconds": None}
    found = {
        "accuracy": {"mean": 0.5, "per_group": {"mlp": 0.5}},
        "received": {"mean": 0.4},
        "newcomers": {
            "received": {"mean": 0.1},
            "trained": {"mean": 0.2},
            "personal": {"mean": 0.3},
            "bytes_up": 0,
            "bytes_down": 1,
        },
        "bytes_up": 2 * 10**6,
        "bytes_down": 3 * 10**6,
        "flops": 7e9,
        "simulated_seconds": None,
        "targets": {"0.5": spent},
    }
    assert {what.title: what.value(found) for what in usual_columns([found], ["flops"], ())} == pytest.approx(
        {
            "accuracy %": 50,
            "GFLOP": 7,
            "received %": 40,
            "newcomers received %": 10,
            "newcomers joined %": 30,
            "MB up": 2,
            "MB down": 3,
            "rounds to 50 %": 2,
            "MB to 50 %": 5,
            "GFLOP to 50 %": 3,
        }
    )
    wanted = {
        "megabytes": 5,
        "megabytes-to-target": 5,
        "flops": 7,
        "flops-to-target": 3,
        "rounds-to-target": 2,
    }
    assert {name: measure(name).value(found) for name in wanted} == pytest.approx(wanted)
