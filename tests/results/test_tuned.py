"""Grids of which a table has the best by validation rows: those of comparisons, of reports and of studies."""

from pathlib import Path

import pytest

import jaxfl
from jaxfl.errors import JaxflError
from jaxfl.grid import study_file, study_table
from jaxfl.results import tuned
from jaxfl.results.frame import Entry
from jaxfl.results.tuned import best

OPTIONS = {"models": ["mlp,hidden=3"], "clients": 4, "rounds": 2, "eval_every": 2, "epochs": 1}


def run(method, validation, mean, seed=0, setting=()):
    scores = {"validation": validation, "mean": mean, "per_client": [mean]}
    result = {"accuracy": scores, "code": [{"package": "", "files": {}}]}
    return Entry(method, setting, (seed, 0), result, [], ([], 4), (0, 0), Path())


def test_the_best_is_the_one_with_the_largest_mean_on_validation_rows():
    shares = {
        "fedavg,lr=0.1": [0.5, 0.9],
        "fedavg,lr=0.2": [0.8] * 2,
        "fedavg,lr=0.3": [0.8] * 2,
        "fedavg,lr=0.4": [0.95],  # which has lost a seed
        "local": [0.1],
    }
    frame = [
        run(label, share, 1 - share, seed)
        for label, of_label in shares.items()
        for seed, share in enumerate(of_label)
    ]
    kept, (said,) = best(frame, ["lr"])
    assert kept == [frame[2]._replace(method="fedavg"), frame[3]._replace(method="fedavg"), frame[-1]]
    assert said == "The best on validation rows: lr=0.2 for fedavg."


def test_a_default_that_is_best_is_named(monkeypatch):
    monkeypatch.setattr(tuned.store, "read_config", lambda folder: {"options": {"lr": 0.05}})
    (kept,), (said,) = best([run("ditto", 0.9, 0.1), run("ditto,lr=0.2", 0.8, 0.2)], ["lr"])
    assert kept.method == "ditto" and said == "The best on validation rows: lr=0.05 for ditto."


def test_a_comparison_has_a_row_for_each_method(dataset, tmp_path):
    folder, tune = tmp_path / "grid", {"tune": "lr", "against": "local"}
    methods, grid = ("fedavg", "fedavg,lr=0.5", "local"), {"dataset": dataset[1], **OPTIONS}
    with pytest.raises(JaxflError, match="--tune: clients have no validation rows to choose by"):
        jaxfl.compare(*methods, run_dir=folder, **tune, **grid)
    with pytest.raises(JaxflError, match="--tune mu: no row differs in it"):
        jaxfl.compare(*methods, run_dir=folder, tune="mu", validation_fraction=0.4, **grid)
    made = jaxfl.compare(*methods, run_dir=folder, validation_fraction=0.4, **tune, **grid)
    runs = {label: run.result["accuracy"] for (label, _), run in made.runs.items()}
    best = max(list(runs)[:2], key=lambda label: runs[label]["validation"])
    assert {made.runs[key].result["accuracy"]["validation"] for key in made.runs} != {
        runs[best]["validation"]
    }
    for table in made.table, jaxfl.load(folder).table, jaxfl.report(folder, out=tmp_path / "out", tune="lr"):
        assert [label for label, _ in table.rows] == ["fedavg", "local"]
        assert table.rows[0][1][0].mean == pytest.approx(100 * runs[best]["mean"])
        (said,) = [note for note in table.notes if note.startswith("The best on validation rows")]
        rate = {"fedavg": "lr=0.05"}.get(best, "lr=0.5")
        assert said == f"The best on validation rows: {rate} for fedavg."
    assert made.table.titles[1] == "minus local"
    alone = jaxfl.compare(
        *methods, run_dir=tmp_path / "parts", part="3/3", validation_fraction=0.4, tune="lr", **grid
    )
    assert [label for label, _ in alone.table.rows] == ["local"]  # nothing to tune has finished yet
    again = jaxfl.compare(*methods, run_dir=folder, validation_fraction=0.4, against="local", **grid).table
    longer = jaxfl.resume(folder, rounds=4, quiet=True).table  # what was asked last
    assert longer.titles == again.titles and len(longer.rows) == 3


STUDY = """
methods = ["fedavg", "fedprox,mu=0.1", "fedprox,mu=1"]
tune = ["lr", "mu"]
against = "fedavg"
[options]
dataset = "digits"
validation_fraction = 0.2
[axes]
lr = [0.1, 0.2]
clients = [4, 5]
"""


def test_a_study_has_the_best_of_each_setting(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(STUDY)
    study, frame = study_file.read(path), []
    for i, setting in enumerate(study_file.settings(study)):
        for choice in study.methods:
            share = (i + 1) / 8 if choice.startswith("fedavg") else 0.5 + float(choice[-1]) / 8
            frame.append(run(choice, share, share / 2, setting=study_table.in_words(setting)))
    table = study_table.tabulate(study, frame)
    assert table.titles == ["clients=4", "clients=5", "clients=4 minus fedavg", "clients=5 minus fedavg"]
    means = {label: [cell.mean for cell in cells[:2]] for label, cells in table.rows}
    assert means == {"fedavg": pytest.approx([18.75, 25]), "fedprox": pytest.approx([31.25, 31.25])}
    assert "lr=0.2 for fedavg clients=4; " in "".join(table.notes)

    path.write_text(STUDY.replace("validation_fraction", "test_fraction"))
    with pytest.raises(JaxflError, match="tune: clients have no validation rows"):
        study_file.read(path)
