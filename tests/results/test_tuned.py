"""Grids of which a table has the best by validation rows: those of comparisons, of reports and of studies."""

import pytest

import jaxfl
from jaxfl.errors import JaxflError
from jaxfl.grid import study_file, study_table
from jaxfl.results.tuned import apart, best_of

OPTIONS = {"models": ["mlp,hidden=3"], "clients": 4, "rounds": 2, "eval_every": 2, "epochs": 1}


def result(validation, mean):
    return {"accuracy": {"validation": validation, "mean": mean, "per_client": [mean]}}


def test_the_best_is_the_one_with_the_largest_mean_on_validation_rows():
    places = ("fedavg,lr=0.1", "fedavg,lr=0.2", "fedavg,lr=0.3", "local")
    runs = ([0.5, 0.9], [0.8, 0.8], [0.8, 0.8], [0.1])
    of_place = {
        place: {(seed, 0): result(share, 1 - share) for seed, share in enumerate(shares)}
        for place, shares in zip(places, runs, strict=True)
    }
    grid = {place: apart(place, ["lr"]) for place in places}
    assert best_of(grid, of_place) == {"fedavg,lr=0.2": "fedavg", "local": "local"}


def test_a_comparison_has_a_row_for_each_method(dataset, tmp_path):
    folder, tune = tmp_path / "grid", {"tune": "lr", "against": "local"}
    methods, grid = ("fedavg,lr=1e-4", "fedavg,lr=0.5", "local"), {"dataset": dataset[1], **OPTIONS}
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
        assert said == f"The best on validation rows: {best.removeprefix('fedavg,')} for fedavg."
    assert made.table.titles[1] == "minus local"


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
    study, results = study_file.read(path), {}
    for i, setting in enumerate(study_file.settings(study)):
        for choice in study.methods:
            share = (i + 1) / 8 if choice.startswith("fedavg") else 0.5 + float(choice[-1]) / 8
            of_run = result(share, share / 2) | {
                "data": 0,
                "rows": 0,
                "untrained": ([], 4),
                "code": [{"files": {}}],
            }
            results[study_file.setting_name(setting), choice] = {(0, 0): of_run}
    table = study_table.tabulate(study_table.Cells(study, results))
    assert table.titles == ["clients=4", "clients=5", "clients=4 minus fedavg", "clients=5 minus fedavg"]
    means = {label: [cell.mean for cell in cells[:2]] for label, cells in table.rows}
    assert means == {"fedavg": pytest.approx([18.75, 25]), "fedprox": pytest.approx([31.25, 31.25])}
    assert "lr=0.2 for fedavg clients=4; " in "".join(table.notes)

    path.write_text(STUDY.replace("validation_fraction", "test_fraction"))
    with pytest.raises(JaxflError, match="tune: clients have no validation rows"):
        study_file.read(path)
