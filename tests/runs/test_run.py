"""Runs on disk: what a folder holds, what a comparison writes, and runs that were stopped and resumed.

Most tests look at one comparison of two methods and two seeds. While it ran, every run was copied just
before each of its checkpoints: these copies are stopped runs.
"""

import csv
import errno
import itertools
import json
import re
import shutil
import statistics
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.stats
from conftest import comparable, drawing, long, tiny_source
from folders import copied_before_checkpoints, metrics, state

import jaxfl
from jaxfl import cli, registry
from jaxfl.config import choices
from jaxfl.config.command_options import Seeds
from jaxfl.config.setup import Setup
from jaxfl.core import flops
from jaxfl.core.cohorts import draw_cohorts, draw_newcomers
from jaxfl.data.public import adapt
from jaxfl.errors import JaxflError
from jaxfl.folder import checkpoint, owner, store
from jaxfl.folder.config import at_own_default, described
from jaxfl.folder.variant import choose
from jaxfl.grid import compare as comparisons
from jaxfl.grid import execute
from jaxfl.grid.plan import Planned, sentences
from jaxfl.grid.resolve import check_setup
from jaxfl.machine import files
from jaxfl.mechanisms.reassembly.picture import draw_assembled
from jaxfl.results import drawings, frame
from jaxfl.results.frame import untrained
from jaxfl.results.notes import OTHER_DATA, OTHER_ROWS, on_code, on_runs, on_untrained
from jaxfl.results.table import Cell
from jaxfl.runs import prepare
from jaxfl.runs.open import rates_depend_on_length, rounds_kept
from jaxfl.runs.recorded_data import require_same_public

METHODS = ("fedavg", "compfl,kd=false")
SEEDS = (3, 4)  # with both, some rounds' two clients are of one architecture
ROUNDS, EVERY = 6, 2
FILES = {"config.json", "metrics.jsonl", "result.json", "checkpoints", "partition.npz"}
FILES |= {"clients.csv", "partition.png", "curves.png", "loss.png", "architectures.png"}
FEDERATION = (
    "--partition classes,classes_per_client=2,samples_per_client=10 --clients 4 --participation 0.5 "
    f"--epochs 1 --rounds {ROUNDS} --eval-every {EVERY} --models mlp,hidden=3"
).split()
UNLIKE = [*FEDERATION, "mlp,hidden=4"]


@pytest.fixture(scope="module")
def compared(dataset, tmp_path_factory):
    """Return a folder with compared/METHOD/seed-S/, the comparison, and stopped/METHOD/seed-S/ROUNDS."""
    folder = tmp_path_factory.mktemp("runs")

    def stopped(run, rounds):
        return folder / "stopped" / run.relative_to(folder / "compared") / str(rounds)

    with copied_before_checkpoints(stopped), drawing("curves.png"):
        compare(dataset, folder / "compared")
    return folder


def compare(dataset, folder, *options):
    seeds = ["--seed", "3", "--seeds", "2", "--run-dir", str(folder)]
    cli.main(["compare", *METHODS, *dataset, *UNLIKE, *seeds, *options])


def runs(folder):
    """Return the folders of all runs, method by method."""
    return [folder / "compared" / name(method) / f"seed-{seed}" for method in METHODS for seed in SEEDS]


def name(method):
    """Return the name of a method's folder."""
    return method.replace(",", "-")


def read(path):
    return json.loads(path.read_text())


def assert_same_run(folder, other):
    assert metrics(folder) == metrics(other)
    assert comparable(read(folder / "result.json")) == comparable(read(other / "result.json"))
    assert (folder / "clients.csv").read_text() == (other / "clients.csv").read_text()
    left, right = state(folder), state(other)
    assert left.keys() == right.keys()
    assert all(left[leaf].tobytes() == right[leaf].tobytes() for leaf in left)
    assert {path.name for path in folder.iterdir()} >= FILES
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"4", "6"}


# --- one run


def test_a_run_folder_has_configuration_metrics_and_result(compared):
    for folder in runs(compared):
        assert {path.name for path in folder.iterdir()} == FILES
        assert {path.name for path in (folder / "checkpoints").iterdir()} == {"4", "6"}
        assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")

        config = read(folder / "config.json")
        assert config["label"] in METHODS and config["label"].startswith(config["method"])
        assert config["options"]["rounds"] == ROUNDS and config["options"]["clients_at_once"] >= 1
        assert config["environment"]["jax"] == jax.__version__
        assert config["environment"].keys() >= {"python", "flax", "optax", "numpy", "device"}
        models = [(model["name"], model["clients"], model["note"]) for model in config["models"]]
        assert models == [("mlp,hidden=3", 2, ""), ("mlp,hidden=4", 2, "")]
        inputs, classes = 64, 3
        assert config["models"][0]["parameters"] == (inputs + 1) * 3 + (3 + 1) * classes

        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
        assert [line["round"] for line in lines if "accuracy" in line] == [2, 4, 6]
        for line in lines:
            assert len(line["clients"]) == 2  # half of four
            assert line["loss"] == pytest.approx(np.mean(line["client_loss"]))
            assert line["bytes_up"] == sum(line["client_bytes_up"])
            assert line["bytes_down"] == sum(line["client_bytes_down"])
            assert "cohort" not in line

        result = read(folder / "result.json")
        assert result["method"] == config["label"] and result["rounds"] == ROUNDS
        means = [line["accuracy"]["mean"] for line in lines if "accuracy" in line]
        assert result["summary"]["last"] == means[-1] and result["summary"]["best_test"] == max(means)
        assert result["summary"]["mean_last_10_evaluations"] == pytest.approx(np.mean(means))
        assert result["bytes_up"] == sum(line["bytes_up"] for line in lines) > 0
        assert result["bytes_down"] == sum(line["bytes_down"] for line in lines) > 0
        assert result["flops"] == sum(line["flops"] for line in lines) > 0
        assert all(line["flops"] == pytest.approx(sum(line["client_flops"])) for line in lines)
        assert result["seconds"].keys() - {"rest"} == {"compile", "train", "evaluate", "write"}
        accuracy = result["accuracy"]
        assert accuracy == lines[-1]["accuracy"]
        of_client = accuracy["per_client"]
        assert len(of_client) == 4 and all(0 <= value <= 1 for value in of_client)
        assert accuracy["mean"] == pytest.approx(np.mean(of_client))
        assert accuracy["per_group"] == pytest.approx(
            {"mlp,hidden=3": np.mean(of_client[:2]), "mlp,hidden=4": np.mean(of_client[2:])}
        )


def test_a_run_that_diverges_ends_in_one_sentence(dataset, tmp_path, capsys):
    options = ["--lr", "1e8", "--run-dir", str(tmp_path / "run")]  # finite after two rounds, not after four
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "fedavg", *dataset, *FEDERATION, *options])
    written = (tmp_path / "run" / "metrics.jsonl").read_text()
    *before, last = [json.loads(line, parse_constant=pytest.fail) for line in written.splitlines()]
    assert before and all(None not in line["client_loss"] for line in before)
    client = last["clients"][last["client_loss"].index(None)]
    sentence = capsys.readouterr().err
    assert end.value.code == 2 and sentence.count("\n") == 1
    assert f"of client {client} is not finite in round {last['round']};" in sentence
    assert checkpoint.saved(tmp_path / "run") == [2]


def test_preparation_counts_for_the_first_round(dataset, tmp_path):
    """A preparation counts for the first round; cohorts are also scored right after training."""
    fedavg = registry.METHODS["fedavg"]

    def build(config):
        algorithm = fedavg.build(config)

        def step(key, state, federation, cohort):
            state, info = algorithm.step(key, state, federation, cohort)
            return state, info._replace(trained=algorithm.receive(key, state, federation, cohort))

        return algorithm._replace(step=step, prepare=algorithm.step)

    options = {"partition": "classes,classes_per_client=2,samples_per_client=10", "clients": 4, "epochs": 1}
    options |= {"participation": 0.5, "models": "mlp,hidden=3", "rounds": 2, "eval_every": 1}
    options |= {"device_profile": "mlp=1e6:1e3", "score_cohort": True, "dataset": dataset[1]}
    result = jaxfl.run(fedavg._replace(build=build), run_dir=tmp_path / "run", **options).result
    first, second = metrics(tmp_path / "run")
    before = first["preparation"]
    assert before.keys() == {"bytes_up", "bytes_down", "flops", "simulated_seconds"}
    for name in ("bytes_up", "bytes_down", "flops"):
        of_round = sum(first[f"client_{name}"])
        assert before[name] == 2 * of_round > 0  # all four clients, with equally many rows, instead of two
        assert first[name] == before[name] + of_round
        assert result[name] == first[name] + second[name]
    assert first["simulated_seconds"] == pytest.approx(2 * second["simulated_seconds"])
    assert "preparation" not in second and second["bytes_up"] == sum(second["client_bytes_up"])
    for line in (first, second):
        assert list(line["cohort"]) == ["received", "trained", "personal"]
        assert line["cohort"]["trained"] == line["cohort"]["personal"]


def test_a_loss_is_known_where_no_operation_is_counted(dataset, tmp_path):
    """As in a method that takes its gradients itself; only a client without a step has no loss."""
    fedavg = registry.METHODS["fedavg"]

    def build(config):
        algorithm = fedavg.build(config)

        def step(key, state, federation, cohort):
            with flops.collect():  # they reach no ledger
                return algorithm.step(key, state, federation, cohort)

        return algorithm._replace(step=step)

    options = {"partition": "iid", "clients": 2, "models": "mlp,hidden=3", "rounds": 1, "epochs": 1}
    run = jaxfl.run(fedavg._replace(build=build), run_dir=tmp_path / "run", dataset=dataset[1], **options)
    (line,) = metrics(tmp_path / "run")
    assert line["flops"] == 0 and None not in line["client_loss"] and np.isfinite(run.loss).all()


# --- compare and report


def test_methods_share_partition_and_cohorts(compared):
    partitions, cohorts = [], []
    for folder in runs(compared):
        with np.load(folder / "partition.npz") as file:
            partitions.append({key: file[key].tolist() for key in file.files})
        cohorts.append([line["clients"] for line in metrics(folder)])
    assert partitions.count(partitions[0]) == 4
    assert cohorts[0] == cohorts[2] and cohorts[1] == cohorts[3]  # of the two methods, per seed
    assert cohorts[0] != cohorts[1]


def test_the_second_seed_compiles_nothing(compared):
    results = [read(folder / "result.json") for folder in runs(compared)]
    assert results[0]["compilations"] > 0 and results[2]["compilations"] > 0
    assert results[1]["compilations"] == results[3]["compilations"] == 0
    assert results[1]["seconds"]["compile"] == results[3]["seconds"]["compile"] == 0


def test_another_rate_compiles_nothing_and_cohorts_are_scored(dataset, tmp_path):
    folder, methods = tmp_path / "compared", ["fedavg", "fedavg,lr=0.2"]
    options = ["--batch-size", "7", "--score-cohort", "--run-dir", str(folder)]  # no other test's programs
    cli.main(["compare", *methods, *dataset, *FEDERATION, *options])
    first, second = (folder / name(method) / "seed-0" for method in methods)
    one, other = read(first / "result.json"), read(second / "result.json")
    assert one["compilations"] > 0 and one["seconds"]["compile"] > 0
    assert other["compilations"] == other["seconds"]["compile"] == 0
    assert metrics(first)[0]["loss"] != metrics(second)[0]["loss"]

    scores = [line["cohort"] for line in metrics(first)]
    assert all(of_moment.keys() == {"mean", "pooled"} for score in scores for of_moment in score.values())
    published = np.mean([score["received"]["pooled"] for score in scores])
    assert one["summary"]["cohort_received_pooled_mean_last_10"] == pytest.approx(published)
    last = metrics(first)[-1]
    of_cohort = [last["accuracy"]["per_client"][client] for client in last["clients"]]
    assert last["cohort"]["personal"]["mean"] == pytest.approx(np.mean(of_cohort))

    table = jaxfl.report(folder, show=("trained", "teacher"))  # FedAvg has no teachers
    (_, (_, trained, teacher, *_)), _ = table.rows
    assert table.titles[1:3] == ["trained %", "teacher %"]
    assert trained.mean == pytest.approx(100 * np.mean([score["trained"]["mean"] for score in scores]))
    assert np.isnan(teacher.mean) and any("no run has scores of what teaches" in note for note in table.notes)


def test_a_method_that_computes_with_a_rate_while_it_is_built_is_refused():
    fedavg = registry.METHODS["fedavg"]
    method = fedavg._replace(build=lambda config: fedavg.build(config) if 2 * config.lr > 1 else None)
    with pytest.raises(JaxflError, match="read it from the configuration that init is given as hyper"):
        choose(method)


def tables(folder):
    """Return the three tables of a folder as rows of cells; those of the .csv by column."""
    with (folder / "table.csv").open() as file:
        head, *rows = csv.reader(file)
    by_csv = [dict(zip(head, row, strict=True)) for row in rows]

    marks, *lines = (folder / "table.md").read_text().partition("\n\n")[0].splitlines()  # notes are below
    assert set(lines[0]) <= set("|- ")
    by_markdown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (marks, *lines[1:])]

    tex = (folder / "table.tex").read_text().splitlines()
    begin, *body, end = (line for line in tex if not line.startswith("% "))  # notes
    rules = ["\\toprule", "\\midrule", "\\bottomrule"]
    lines = [line for line in body if line not in rules]
    assert [line for line in body if line in rules] == rules
    assert begin == "\\begin{tabular}{l" + "r" * (len(by_markdown[0]) - 1) + "}"
    assert end == "\\end{tabular}" and all(line.endswith(" \\\\") for line in lines)
    plain = [line[:-3].replace("{\\scriptsize$\\pm$}", " ± ").replace("\\%", "%") for line in lines]
    plain = [re.sub(r"\\textbf{([^{}]*)}", r"\1", line) for line in plain]
    assert not set("".join(plain)) & set("\\{}$#_")  # characters that LaTeX would take for commands
    by_latex = [[cell.strip() for cell in line.split("&")] for line in plain]
    return by_csv, by_markdown, by_latex


def test_the_tables_agree_with_the_results(compared):
    by_csv, by_markdown, by_latex = tables(compared / "compared")
    assert by_latex == by_markdown
    assert [row["method"] for row in by_csv] == [row[0] for row in by_markdown[1:]] == list(METHODS)
    for method, row, cells in zip(METHODS, by_csv, by_markdown[1:], strict=True):
        folder = compared / "compared" / name(method)
        results = [read(folder / f"seed-{seed}" / "result.json") for seed in SEEDS]
        columns = {
            "accuracy %": [100 * result["accuracy"]["mean"] for result in results],
            "mlp,hidden=3": [100 * r["accuracy"]["per_group"]["mlp,hidden=3"] for r in results],
            "mlp,hidden=4": [100 * r["accuracy"]["per_group"]["mlp,hidden=4"] for r in results],
            "received %": [100 * result["received"]["mean"] for result in results],
            "MB up": [result["bytes_up"] / 1e6 for result in results],
            "MB down": [result["bytes_down"] / 1e6 for result in results],
        }
        assert by_markdown[0] == ["method", *columns]
        for column, values in columns.items():
            mean, std = statistics.mean(values), statistics.stdev(values)
            assert float(row[column]) == pytest.approx(mean, abs=1e-4)
            assert float(row[f"{column} std"]) == pytest.approx(std, abs=1e-4)
        mean, std = (statistics.mean(columns["MB up"]), statistics.stdev(columns["MB up"]))
        assert cells[5] == Cell(mean, std).text()
    assert (compared / "compared" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_of_a_report_can_be_without_pixels(compared, tmp_path, drawn):
    jaxfl.report(compared / "compared", out=tmp_path / "out", pictures="pdf")
    pictures = [path for path in (tmp_path / "out").iterdir() if not path.name.startswith("table")]
    assert {"curves.pdf", "bytes.pdf"} <= {path.name for path in pictures}
    assert all(path.read_bytes().startswith(b"%PDF") for path in pictures)


def test_usual_columns_can_be_left_out(compared, tmp_path):
    table = jaxfl.report(compared / "compared", out=tmp_path / "out", hide=["received", "megabytes"])
    assert table.titles == ["accuracy %", "mlp,hidden=3", "mlp,hidden=4"]
    assert not any("received" in note for note in table.notes)
    with pytest.raises(jaxfl.JaxflError, match="--hide must be a tuple of architectures or received"):
        jaxfl.report(compared / "compared", out=tmp_path / "out", hide="bytes")


def test_a_report_has_the_tables_of_the_comparison(compared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [str(folder) for folder in runs(compared)]
    cli.main(["report", *folders, folders[0]])  # a run that is named twice counts once
    for table in ("table.csv", "table.md", "table.tex"):
        made = (tmp_path / "runs" / "report" / table).read_text()
        assert made == (compared / "compared" / table).read_text()
    cli.main(["report", *folders])
    assert (tmp_path / "runs" / "report-2" / "table.csv").exists()
    cli.main(["report", folders[0]])  # a run's folder keeps its own files
    assert (tmp_path / "runs" / "report-3" / "table.csv").exists()
    assert not (Path(folders[0]) / "table.csv").exists()


def test_rows_are_in_the_order_in_which_methods_are_named(compared, tmp_path):
    """Rows follow the comparison's order; a run that has not finished is named in a note."""
    shutil.copytree(compared / "compared", tmp_path / "copy")
    end = read(tmp_path / "copy" / "comparison.json")
    assert end["order"] == [name(method) for method in METHODS]
    end["order"].reverse()
    (tmp_path / "copy" / "comparison.json").write_text(json.dumps(end))
    (tmp_path / "copy" / name(METHODS[0]) / f"seed-{SEEDS[0]}" / "result.json").unlink()
    table = jaxfl.report(tmp_path / "copy")
    assert [label for label, _ in table.rows] == list(METHODS)[::-1]
    spread, missing, _, left_out = table.notes
    assert (
        "over up to 2 seeds" in spread and missing == f"1 of the runs are missing: {METHODS[0]} has 1 of 2."
    )
    assert left_out.startswith("Left out: 1 run has not finished")


def test_report_averages_only_over_seeds(compared, tmp_path):
    for number, lr in enumerate((0.05, 0.1)):
        altered(runs(compared)[0], tmp_path / str(number), lr=lr, seed=number)
    cli.main(["report", str(tmp_path)])
    by_csv, *_ = tables(tmp_path)
    assert sorted(row["method"] for row in by_csv) == ["fedavg,lr=0.05", "fedavg,lr=0.1"]
    assert [row["accuracy % std"] for row in by_csv] == ["", ""]


def altered(run, copy, **options):
    """Copy a run, with other options in its configuration."""
    shutil.copytree(run, copy)
    config = read(copy / "config.json")
    config["options"] |= options
    (copy / "config.json").write_text(json.dumps(config))


def test_report_averages_seeds_whose_options_differ_without_effect(compared, tmp_path):
    first, second, *_ = runs(compared)
    altered(first, tmp_path / "first")
    altered(second, tmp_path / "second", data_dir="/elsewhere", clients_at_once=3, checkpoint_every=4)
    cli.main(["report", str(tmp_path)])
    (row,), *_ = tables(tmp_path)
    assert row["method"] == "fedavg" and row["accuracy % std"] != ""


def test_report_shows_options_of_all_methods_in_which_runs_differ(compared, tmp_path):
    """Labels show them, also of two methods; a note says if data or partitions differ."""
    fedavg, _, compfl, _ = runs(compared)
    altered(fedavg, tmp_path / "a")
    altered(compfl, tmp_path / "b", participation=0.25, lr=0.1)
    cli.main(["report", str(tmp_path), "--out", str(tmp_path / "out")])
    by_csv, *_ = tables(tmp_path / "out")
    assert {row["method"] for row in by_csv} == {
        "fedavg,participation=0.5,lr=0.05",
        "compfl,kd=false,participation=0.25,lr=0.1",
    }
    assert "comparable" not in (tmp_path / "out" / "table.md").read_text()
    assert not (tmp_path / "table.csv").exists()

    with np.load(tmp_path / "b" / "partition.npz") as file:
        arrays = dict(file)
    for change, words in (
        ({"test": arrays["test"][::-1]}, "partitions"),
        ({"checksum": 0 * arrays["checksum"]}, "data"),
    ):
        np.savez(tmp_path / "b" / "partition.npz", **arrays | change)
        noted, _ = jaxfl.report(tmp_path).notes
        assert f"have different {words}" in noted and noted in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("values", [("mlp,hidden=8", "mlp,hidden=12"), ("my.py:net", "My.py:net")])
def test_labels_distinguish_texts(values):
    variants = [choose("fedkemf", None, {"knowledge": value}) for value in values]
    shown = [f"[{value}]" if "," in value else value for value in values]
    labels = [f"fedkemf,knowledge={value}" for value in shown]
    assert [variant.label for variant in variants] == labels
    assert [choose(label).config for label in labels] == [variant.config for variant in variants]
    assert frame.labels([described(variant, Setup()) for variant in variants]) == labels


def test_options_within_a_value_are_not_those_of_the_run():
    variant = choose("fedkemf,knowledge=[cnn1,dropout=0.2]")
    rates = (0.1, 0.3)
    labels = frame.labels([described(variant, Setup.of(dropout=rate)) for rate in rates])
    assert labels == [f"{variant.label},dropout={rate}" for rate in rates]
    two = ("mlp,hidden=8", "mlp,hidden=8+mlp,hidden=9")
    labels = frame.labels([described(choose("fedavg"), Setup.of(models=models.split("+"))) for models in two])
    assert [choices.split(label) for label in labels] == [("fedavg", {"models": models}) for models in two]


def test_a_path_is_not_shortened_to_the_name_of_something_else():
    names = ("digits", "/data/digits")
    labels = frame.labels([described(choose("fedavg"), Setup.of(dataset=name)) for name in names])
    assert labels == ["fedavg,dataset=digits", "fedavg,dataset=/data/digits"]
    names = ("digits", "/data/more/x", "/data/more/y")
    labels = frame.labels([described(choose("fedavg"), Setup.of(dataset=name)) for name in names])
    assert labels == ["fedavg,dataset=digits", "fedavg,dataset=x", "fedavg,dataset=y"]


def test_labels_leave_out_what_a_saved_partition_has_settled():
    variant = choose("fedavg")
    drawn = Setup.of(test="own", validation_fraction=0.2, public="none")
    labels = frame.labels([described(variant, setup) for setup in (drawn, Setup.of(partition="a.npz"))])
    assert labels == ["fedavg,partition=classes", "fedavg,partition=a.npz"]


def test_a_whole_number_may_stand_for_a_large_float():
    assert choose("fedprox", mu=10**10).config.mu == 10**10
    with pytest.raises(JaxflError, match="--steps must be at most 2147483647"):
        choose("fedprox", steps=10**10)


def test_report_says_how_much_better_the_others_are(compared, tmp_path):
    """A pair is a seed, with a single common seed a client; the differences are the same from Python."""
    folder, (fedavg, compfl) = compared / "compared", METHODS
    cli.main(["report", str(folder), "--against", fedavg, "--out", str(tmp_path / "both")])
    results = [read(run / "result.json") for run in runs(compared)]
    ours, theirs = (
        [100 * result["accuracy"]["mean"] for result in results if result["method"] == method]
        for method in (compfl, fedavg)
    )
    low, high = scipy.stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    (_, (_, empty, *_)), (_, (_, difference, *_)) = jaxfl.load(folder).against(fedavg).rows
    assert empty.text() == "-"
    assert difference[:3] == pytest.approx((np.mean(ours) - np.mean(theirs), low, high))
    with (tmp_path / "both" / "table.csv").open() as file:
        _, row = csv.DictReader(file)
    assert float(row["minus fedavg low"]) == pytest.approx(low, abs=1e-4)

    one, _, other, later = runs(compared)
    table = jaxfl.report(one, other, against=compfl, out=tmp_path / "one")
    assert table.rows[0][1][1][3:] == (4, "clients") and "over 4 clients of one seed" in table.notes[-1]
    lonely = jaxfl.report(one, later, against=compfl, out=tmp_path / "lonely")
    assert lonely.notes[1:] == (
        "Minus compfl,kd=false: runs without a seed in common are not paired: fedavg.",
    )
    assert lonely.rows[0][1][1].text() == "-"


@pytest.mark.parametrize("partition_seed", [0, 1])
def test_a_report_does_not_pair_runs_of_other_partitions(compared, tmp_path, partition_seed):
    """A note says so, whether options differ or only rows."""
    one, _, other, _ = runs(compared)
    altered(other, tmp_path / "other", partition_seed=partition_seed)
    with np.load(other / "partition.npz") as file:
        arrays = dict(file)
    np.savez(tmp_path / "other" / "partition.npz", **arrays | {"test": arrays["test"][::-1]})
    against = "fedavg" + ",partition_seed=0" * partition_seed
    table = jaxfl.report(one, tmp_path / "other", against=against, out=tmp_path)
    why = "without a seed in common" if partition_seed else "on other rows"
    assert [cells[1].text() for _, cells in table.rows] == ["-", "-"]
    assert OTHER_ROWS in table.notes and f"Minus {against}: runs {why} are not paired: " in table.notes[-1]


def test_a_comparison_over_partitions(dataset, tmp_path):
    """Every partition has every seed; a method has one row, and a note says what its spread is over."""
    words = ["local", *dataset, *FEDERATION, "--rounds", "2", "--seeds", "2", "--partition-seeds", "2"]
    cli.main(["compare", *words, "--run-dir", str(tmp_path / "four")])
    cells = sorted(path.parent for path in tmp_path.glob("four/local/*/result.json"))
    assert [cell.name for cell in cells] == [f"seed-{s}{p}" for s in (0, 1) for p in ("", "-partition-1")]
    rows = [(cell / "partition.npz").read_bytes() for cell in cells]
    assert rows[0] == rows[2] != rows[1] == rows[3]
    accuracies = [100 * read(cell / "result.json")["accuracy"]["mean"] for cell in cells]
    (row,) = csv.DictReader((tmp_path / "four" / "table.csv").read_text().splitlines())
    assert float(row["accuracy %"]) == pytest.approx(statistics.mean(accuracies), abs=1e-4)
    assert float(row["accuracy % std"]) == pytest.approx(statistics.stdev(accuracies), abs=1e-4)
    assert "over 2 partitions with 2 seeds each." in (tmp_path / "four" / "table.md").read_text()

    shutil.rmtree(cells[3])  # partitions with different seeds have rows of their own
    assert [label for label, _ in jaxfl.report(tmp_path / "four", out=tmp_path / "out").rows] == [
        "local,partition_seed=0",
        "local,partition_seed=1",
    ]
    cli.main(["compare", *words, "--run-dir", str(tmp_path / "four")])
    assert metrics(cells[3])
    saved = f"{cells[0]}/partition.npz"
    with pytest.raises(JaxflError, match="--partition-seeds does not change the saved"):
        jaxfl.compare("local", partition=saved, partition_seeds=2)
    check_setup(Setup.of(partition=saved, partition_seed=1, newcomers=0.5))  # it draws the newcomers


def test_report_counts_copies_once_and_refuses_other_runs_of_one_label(
    compared, tmp_path, capsys, monkeypatch
):
    for copy in ("a", "b"):
        altered(runs(compared)[0], tmp_path / copy)
    cli.main(["report", str(tmp_path)])
    (row,), *_ = tables(tmp_path)
    assert row["accuracy % std"] == ""
    with monkeypatch.context() as patch:  # also if accuracies are of another evaluation than the last
        patch.setattr(
            frame, "selected", lambda result, *_: result | {"accuracy": result["accuracy"] | {"mean": 0.125}}
        )
        assert jaxfl.report(tmp_path, select="validation").rows[0][1][0].mean == 12.5
    result = read(tmp_path / "b" / "result.json")
    result["accuracy"]["mean"] /= 2
    (tmp_path / "b" / "result.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(tmp_path)])
    assert end.value.code == 2
    assert "are both fedavg with the same seed; report one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choice", "options", "label"),
    [
        ("compfl", {"lam": 0.5, "lr": 0.1}, "compfl,lam=0.5"),
        ("compfl,kd=false", {}, "compfl,kd=false"),
        ("fedavg", {"lr": 0.1}, "fedavg"),
        ("fedavg,lr=0.1", {}, "fedavg,lr=0.1"),
    ],
)
def test_labels_show_own_options_and_those_of_the_choice(choice, options, label):
    assert choose(choice, **options).label == label


@pytest.mark.parametrize(
    ("method", "options", "known"),
    [
        ("feddyn", {"clip_norm": 10.0}, {"clip_norm"}),
        ("feddyn", {"clip_norm": None}, set()),
        ("fedavg", {"clip_norm": None}, set()),
        ("/home/me/my.py:method", {"clip_norm": 10.0}, set()),
    ],
)
def test_options_at_a_methods_own_default_are_found(method, options, known):
    assert at_own_default({"method": method, "options": options}) == known


def test_a_comparison_is_continued(compared, dataset, tmp_path, capsys):
    folder, original = tmp_path / "compared", compared / "compared"
    shutil.copytree(original, folder)
    kept, lost, stopped, _ = (folder / run.relative_to(original) for run in runs(compared))
    shutil.rmtree(lost)
    (stopped / "result.json").unlink()
    shutil.rmtree(stopped / "checkpoints" / "6")
    (folder / "table.csv").unlink()
    before = (kept / "result.json").stat().st_mtime_ns

    with pytest.raises(SystemExit) as end:
        compare(dataset, folder, "--lr", "0.01")
    assert end.value.code == 2 and not lost.exists()
    assert "was begun with lr 0.05, not 0.01; choose another --run-dir" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare(dataset, folder, "--rounds", str(ROUNDS + 1))
    assert "compfl,kd=false has rounds that depend on the length of the run" in capsys.readouterr().err
    assert read(kept / "config.json")["options"]["rounds"] == ROUNDS  # fedavg's have not become longer either
    with pytest.raises(SystemExit):
        compare(dataset, folder, "--rounds", str(ROUNDS - 1))
    assert "and cannot become shorter; ask for 6 rounds" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare(dataset, folder, "--seeds", "1")
    assert "seed-4 is not a run of this comparison; name its method and seed as well" in (
        capsys.readouterr().err
    )

    command = (folder / "command.json").rename(tmp_path / "command.json")
    with pytest.raises(JaxflError, match="compared is a comparison; name one of .*, or repeat its command"):
        jaxfl.resume(folder)
    command.rename(folder / "command.json")
    cli.main(["resume", str(folder)])  # as the command was, without those that were refused
    assert (kept / "result.json").stat().st_mtime_ns == before
    for continued in (lost, stopped):
        assert_same_run(continued, original / continued.relative_to(folder))
    rows, other = ((path / "table.csv").read_text().splitlines() for path in (folder, original))
    assert sorted(rows) == sorted(other)


@pytest.mark.long
def test_a_comparison_of_more_rounds_makes_its_runs_longer(dataset, tmp_path):
    words = ["compare", "fedavg", *dataset, *UNLIKE, "--seeds", "2"]
    for folder, rounds in (("run", 2), ("run", ROUNDS), ("whole", ROUNDS)):
        cli.main([*words, "--rounds", str(rounds), "--run-dir", str(tmp_path / folder)])
    for seed in ("seed-0", "seed-1"):
        assert_same_run(*(tmp_path / folder / "fedavg" / seed for folder in ("run", "whole")))


def test_a_comparison_outlives_runs_that_diverge_or_cannot_begin(dataset, tmp_path, capsys):
    """What cannot begin is reported before the others train, although it is named after them."""
    methods = ["fedavg,lr=1e30", "fedavg", "fedproto"]
    with pytest.raises(SystemExit) as end:
        cli.main(["compare", *methods, *dataset, *UNLIKE, "--run-dir", str(tmp_path / "compared")])
    assert end.value.code == 2
    said = capsys.readouterr()
    assert "2 of 3 runs have not finished: fedproto: " in said.err and said.err.count("\n") == 1
    assert "fedavg,lr=1e+30: the loss of client" in said.err
    hopeless = "Left out: fedproto: The method compares mean features of classes"
    assert said.out.count(hopeless) == 2 and said.out.index(hopeless) < said.out.index("as one program")
    by_csv, *_ = tables(tmp_path / "compared")
    assert [row["method"] for row in by_csv] == ["fedavg"]
    assert not (tmp_path / "compared" / "fedproto").exists()


def test_a_failure_is_said_once_with_its_seeds():
    planned = comparisons.plan(Path("all"), [choose("fedavg"), choose("local")], Setup(), Seeds(3))
    lost = {run: JaxflError(f"{run.parent.name}: diverged, see {run}") for run in planned}
    del lost[Path("all/local/seed-1")]
    told = ["fedavg: diverged, see their folders", "local (seed 0; seed 2): diverged, see their folders"]
    assert sentences(planned, lost) == told
    run = Path("all/local/seed-2")
    assert sentences(planned, {run: lost[run]}) == [f"local (seed 2): diverged, see {run}"]


def test_only_methods_with_a_complete_row_are_compared_against():
    variants = [choose("fedavg"), choose("local")]
    of_seeds, of_partitions = (
        comparisons.plan(Path("all"), variants, Setup(), Seeds(*n)) for n in ((2, 1), (1, 2))
    )
    assert comparisons._complete_labels(of_partitions, [*of_partitions], ()) == {"fedavg", "local"}
    *most, last = of_partitions
    assert last.parent.name == "local" and comparisons._complete_labels(of_partitions, most, ()) == set()
    *most, last = of_seeds
    assert last.parent.name == "local" and comparisons._complete_labels(of_seeds, most, ()) == {"fedavg"}


# --- resume


@pytest.mark.parametrize("rounds", [2, 4, 6])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_stopped_before_a_checkpoint_resumes_to_the_same_bits(compared, tmp_path, method, rounds):
    """From round 4 on there is an earlier checkpoint to start from; at round 2 there is none."""
    folder = tmp_path / "run"
    shutil.copytree(compared / "stopped" / name(method) / "seed-4" / str(rounds), folder)
    assert len(metrics(folder)) == rounds and checkpoint.saved(folder) == [*range(2, rounds, 2)]
    cli.main(["resume", str(folder)])
    assert_same_run(folder, compared / "compared" / name(method) / "seed-4")


def test_a_run_that_is_made_longer_has_the_bits_of_a_long_one(dataset, tmp_path):
    """A lengthened run is like one begun for all rounds, even if it ended between two evaluations.

    Later cohorts have more clients of an architecture, answers are lost, and rates follow a schedule.
    """
    run, whole, seed = tmp_path / "run", tmp_path / "whole", 5
    short, long = (
        [slots.mask.sum(1).max() for slots in draw_cohorts((2, 2), 0.5, rounds, seed)]
        for rounds in (3, ROUNDS)
    )
    assert short != long
    words = ["run", "fedavg", *dataset, *UNLIKE, "--seed", str(seed), "--dropout", "0.5"]
    words += ["--schedule", f"cosine,rounds={ROUNDS},warmup=2"]
    cli.main([*words, "--rounds", "3", "--run-dir", str(run)])
    cli.main([*words, "--run-dir", str(whole)])
    assert len(metrics(run)) == read(run / "result.json")["rounds"] == 3
    last = shutil.copytree(run, tmp_path / "last")
    shutil.rmtree(last / "checkpoints" / "2")  # as with --keep-checkpoints 1
    with pytest.raises(JaxflError, match="would go on from round 2 of .*, which has no checkpoint of it"):
        jaxfl.resume(last, rounds=ROUNDS)
    assert [path.name for path in (last / "checkpoints").iterdir()] == ["3"]
    shutil.rmtree(last / "checkpoints" / "3")
    with pytest.raises(JaxflError, match="would go on from round 2 of .*, which has no checkpoint of it"):
        jaxfl.resume(last, rounds=ROUNDS)  # what has finished is never begun anew
    (last / "result.json").unlink()
    assert rounds_kept(last, Setup.of(eval_every=2), ROUNDS) == 0
    cli.main(["resume", str(run), "--rounds", str(ROUNDS - 1)])
    (run / "result.json").unlink()  # stopped, and made still longer
    assert jaxfl.resume(run, rounds=ROUNDS).result["rounds"] == ROUNDS
    assert_same_run(run, whole)
    assert read(run / "config.json")["options"] == read(whole / "config.json")["options"]
    assert read(run / "config.json")["begun_for"] == 3
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(JaxflError, match="is a run of 6 rounds; --rounds 4 cannot make it shorter"):
        jaxfl.resume(run, rounds=4)
    assert (run / "metrics.jsonl").read_bytes() == before
    lost = [len(line["lost"]) for line in metrics(run)]
    assert 0 < sum(lost) == read(run / "result.json")["lost_answers"] and max(lost) == 2
    assert all((line["loss"] is None) == (len(line["lost"]) == 2) for line in metrics(run))
    setup = Setup.of(schedule="cosine", rounds=3)
    assert rates_depend_on_length(setup, 4)
    assert not rates_depend_on_length(setup.replace(schedule="step,every=2"), 4)


def test_a_folder_made_anew_belongs_to_its_new_owner(tmp_path):
    first, second = owner.owned(tmp_path / "run"), owner.owned(tmp_path / "run")
    with first:
        shutil.rmtree(tmp_path / "run")  # as after a run that never began
        second.__enter__()
    assert owner.is_owned(tmp_path / "run")
    second.__exit__(None, None, None)
    assert not (tmp_path / "run").exists()


def test_an_owner_lets_go_of_a_disk_that_has_become_read_only(tmp_path, monkeypatch):
    """What has failed is told, and not that its lock cannot be removed either."""

    def refused(path, missing_ok=False):
        raise PermissionError(errno.EROFS, "Read-only file system", str(path))

    with pytest.raises(JaxflError, match="metrics cannot be written"), owner.owned(tmp_path / "run"):
        monkeypatch.setattr(Path, "unlink", refused)
        raise JaxflError("metrics cannot be written")
    assert not owner.is_owned(tmp_path / "run")


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_devices(dataset, tmp_path):
    words = ["run", "local", *dataset, *FEDERATION, "--devices"]
    cli.main([*words, "1", "--run-dir", str(tmp_path / "one")])
    cli.main([*words, "2", "--rounds", "2", "--run-dir", str(tmp_path / "moved")])
    assert jaxfl.resume(tmp_path / "moved", rounds=4, devices=1).result["rounds"] == 4
    cli.main(["resume", str(tmp_path / "moved"), "--rounds", str(ROUNDS)])
    assert [line.get("devices") for line in metrics(tmp_path / "moved")] == [None, None, 1, None, None, None]
    config = read(tmp_path / "moved" / "config.json")
    assert (config["begun_on"], config["options"]["devices"]) == (2, 1)
    elsewhere = config | {"options": config["options"] | {"devices": 9}}
    assert store.fingerprint(elsewhere) == store.fingerprint(config)
    assert store.fingerprint(elsewhere | {"begun_on": 9}) != store.fingerprint(config)
    one, moved = state(tmp_path / "one"), state(tmp_path / "moved")
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), one, moved)


def test_a_run_of_a_method_that_reads_its_length_is_not_made_longer(compared, tmp_path):
    run = shutil.copytree(runs(compared)[2], tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(JaxflError, match="compfl,kd=false has rounds that depend on the length"):
        jaxfl.resume(run, rounds=ROUNDS + 2)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_resume_of_a_finished_run_changes_nothing(compared, capsys):
    folder = runs(compared)[0]

    def files():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}

    before = files()
    cli.main(["resume", str(folder)])
    accuracy = 100 * read(folder / "result.json")["accuracy"]["mean"]
    assert f"{accuracy:.2f}" in capsys.readouterr().out
    assert files() == before


@drawing("findings.png", "assembled.png")
@pytest.mark.parametrize("method", ["draftfed", long("pfedclub")])
def test_methods_with_public_images_resume(dataset, tmp_path, method):
    """Methods resume to the same bits, also pFedClub, whose server assembles teachers between rounds."""
    original, folder = tmp_path / "original", tmp_path / "stopped"
    models = ["--models", "mlp,hidden=3", "mcmahan,width=0.06"]
    cli.main(["run", method, *dataset, *UNLIKE, *models, "--run-dir", str(original)])
    assert len(metrics(original)) == ROUNDS
    shutil.copytree(original, folder)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "6")
    cli.main(["resume", str(folder)])
    assert_same_run(folder, original)
    if method == "pfedclub":
        for picture in ("findings.png", "assembled.png"):
            assert (folder / picture).read_bytes().startswith(b"\x89PNG")
        for line in metrics(original):
            assert [of_client["client"] for of_client in line["findings"]["assembled"]] == line["clients"]
        assert sum(line["bytes_down"] for line in metrics(original)) > 0


def test_other_public_images_are_refused():
    """Those of another set may change while a run is stopped."""
    source = tiny_source()
    one, other = (adapt(tiny_source(seed), source, seed=0, size=5).checksum for seed in (0, 1))
    then = {"public": 5, "public_checksum": one}
    require_same_public(Path("run"), then, 5, one)
    for number, others in ((4, one), (5, other)):
        with pytest.raises(JaxflError, match="run was begun with (5|other) public images"):
            require_same_public(Path("run"), then, number, others)


def test_a_begun_run_keeps_its_scores_and_takes_other_checkpoints(compared, tmp_path):
    altered(runs(compared)[0], folder := tmp_path / "run", show=["loss"], checkpoint_every=3)
    entry = Planned(choose("fedavg"), Setup.of(show=["auc"], keep_checkpoints=9))
    machine = execute._as_begun(folder, entry).setup.machine
    assert (machine.show, machine.keep_checkpoints, machine.checkpoint_every) == (("loss",), 9, 3)


@drawing("topology.png")
@pytest.mark.long
def test_a_run_keeps_its_links_when_their_file_changes(dataset, tmp_path):
    edges, original, folder = tmp_path / "edges.txt", tmp_path / "original", tmp_path / "stopped"
    clients = int(dict(zip(FEDERATION, FEDERATION[1:], strict=False))["--clients"])
    edges.write_text("".join(f"{i} {i + 1}\n" for i in range(clients - 1)))
    # With this seed two cohorts have linked clients.
    words = [*dataset, *UNLIKE, "--topology", str(edges), "--seed", "1"]
    cli.main(["run", "dfedavg", *words, "--run-dir", str(original)])
    links = edges.read_text()
    assert (original / "topology.txt").read_text() == links
    assert (original / "topology.png").read_bytes().startswith(b"\x89PNG")
    shutil.copytree(original, folder)
    edges.write_text("0 2\n0 3\n1 2\n")
    cli.main(["run", "dfedavg", *words, "--run-dir", str(tmp_path / "others")])
    losses, of_others = (
        [line["client_loss"] for line in metrics(run)] for run in (original, tmp_path / "others")
    )
    assert losses != of_others
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "6")
    cli.main(["resume", str(folder)])
    assert_same_run(folder, original)
    cli.main(["run", "--from", str(original), "--run-dir", str(tmp_path / "repeated")])
    assert {(tmp_path / name / "topology.txt").read_text() for name in ("stopped", "repeated")} == {links}
    assert metrics(tmp_path / "repeated")[-1]["accuracy"] == metrics(original)[-1]["accuracy"]
    cli.main(["run", "--from", str(original), "--seed", "5", "--run-dir", str(tmp_path / "other")])
    assert metrics(tmp_path / "other")[0]["client_loss"] != metrics(original)[0]["client_loss"]
    repeated, other = (read(tmp_path / name / "config.json")["options"] for name in ("repeated", "other"))
    assert other == repeated | {"seed": 5}


def test_only_methods_that_use_links_have_them(dataset, tmp_path):
    """In a comparison with --topology, a run of FedAvg has no links and can be repeated without them."""
    words = [*dataset, *FEDERATION, "--topology", "ring", "--run-dir", str(tmp_path / "both")]
    cli.main(["compare", "fedavg", "dfedavg", *words])
    names = [line.split(",")[0] for line in (tmp_path / "both" / "table.csv").read_text().splitlines()[1:]]
    assert names == ["fedavg", "dfedavg"]
    fedavg, dfedavg = (tmp_path / "both" / name / "seed-0" for name in ("fedavg", "dfedavg"))
    assert read(fedavg / "config.json")["options"]["topology"] == "none"
    assert not (fedavg / "topology.txt").exists() and not (fedavg / "topology.png").exists()
    assert (dfedavg / "topology.txt").exists()
    cli.main(["run", "--from", str(fedavg), "--run-dir", str(tmp_path / "again")])
    assert metrics(tmp_path / "again")[-1]["accuracy"] == metrics(fedavg)[-1]["accuracy"]
    cli.main(["compare", "fedavg", "dfedavg", "local", *words])  # continues the comparison


def test_a_resume_computes_on_this_machine_as_the_run_did(dataset, tmp_path, monkeypatch):
    """A resume uses the run's devices, clients at once and convolution."""
    folder, proceed, used = tmp_path / "two", execute.proceed, []

    def spied(job, *arguments, **options):
        federation = job.federation
        convolution = federation.groups[0].model.convolution
        used.append((federation.devices, federation.clients_at_once, convolution))
        return proceed(job, *arguments, **options)

    monkeypatch.setattr(execute, "proceed", spied)
    cli.main(["run", "fedavg", *dataset, *UNLIKE, "--run-dir", str(tmp_path / "one")])
    words = ["--devices", "2", "--clients-at-once", "2", "--convolution", "patches"]
    cli.main(["run", "fedavg", *dataset, *UNLIKE, *words, "--run-dir", str(folder)])
    (folder / "result.json").unlink()
    cli.main(["resume", str(folder)])
    assert used == [(1, 1, "auto"), (2, 2, "patches"), (2, 2, "patches")]


@drawing("matrices.png")
def test_every_checkpoint_has_its_matrices(dataset, tmp_path, monkeypatch):
    """Every checkpoint has its matrices, even if the run stops right after the last one."""
    save, folder = checkpoint.save, tmp_path / "mnfl"

    def save_and_stop(path, rounds, *rest):
        save(path, rounds, *rest)
        if rounds == ROUNDS:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", save_and_stop)
    with pytest.raises(SystemExit):
        cli.main(["run", "mnfl-homogeneous", *dataset, *FEDERATION, "--run-dir", str(folder)])
    cli.main(["resume", str(folder)])
    assert [path.name for path in sorted((folder / "matrices").iterdir())] == ["2.npz", "4.npz", "6.npz"]
    assert (folder / "matrices.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("clients", [1, 41])
def test_pictures_are_drawn_of_one_and_of_many_clients(drawn, tmp_path, clients):
    def network(client):
        blocks = [{"client": client, "index": 0, "group": 0, "kind": "fc"}]
        return {"client": client, "model": 9, "teacher": 9, "own": blocks, "blocks": blocks}

    counts = np.random.default_rng(0).integers(1, 9, (clients, 3))
    counts[20:21] = 0  # who never trains
    links = np.ones((clients, clients), bool)
    pictures = {
        "topology.png": lambda: drawings.draw_topology(links, ["mlp"] * (clients - 1) + ["lenet5"]),
        "matrices.png": lambda: drawings.draw_matrices({"teachers": np.eye(clients)}, counts),
        "embeddings.png": lambda: drawings.draw_embeddings({"mlp": counts[:, :2]}, {"mlp": counts}),
        "assembled.png": lambda: draw_assembled({"assembled": [*map(network, range(clients))]}),
    }
    files.write_pictures(tmp_path, pictures)
    assert len(list(tmp_path.iterdir())) == len(pictures)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    files.write_pictures(tmp_path, {"matrices.png": lambda: None})  # that of an earlier report goes
    assert not (tmp_path / "matrices.png").exists()


def test_partitions_are_averaged_where_every_experiment_has_all_of_them():
    """If one experiment lacks a draw, partitions are not averaged."""
    draws = [*itertools.product((0, 1), (0, 1))]
    number = {0: 1, 1: 1.0}  # from Python and from a shell
    runs = [
        ({"method": method, "lam": number[draw[1]], "partition_seed": draw[1]}, draw)
        for method in "ab"
        for draw in draws
    ]
    assert frame._crossed(*map(list, zip(*runs, strict=True)))
    assert not frame._crossed(*map(list, zip(*runs[:-1], strict=True)))
    assert not frame._crossed(*map(list, zip(*runs[::2], strict=True)))  # of a single partition


@pytest.mark.parametrize(
    ("checksums", "draws", "words"),
    [
        ([(1, 1), (1, 2)], [(0, 0), (0, 1)], []),
        ([(1, 1), (1, 2)], [(0, 0), (1, 0)], [OTHER_ROWS]),
        ([(1, 1), (2, 2)], [(0, 0), (0, 1)], [OTHER_DATA]),
    ],
)
def test_a_report_notes_runs_with_different_data_or_partitions(checksums, draws, words):
    """A note says if data differ, or rows that should be of one partition."""
    found = [
        frame.Entry("local", (), draw, {}, [], ([], 1), sums, Path())
        for draw, sums in zip(draws, checksums, strict=True)
    ]
    assert on_runs(found)[1:] == words


def test_finished_runs_of_a_method_that_is_an_object_are_kept_with_a_warning(dataset, tmp_path, capsys):
    """What such a method does is in no file, so an edit of it cannot be seen."""
    mine = registry.METHODS["fedavg"]._replace(name="mine")
    options = {
        "dataset": dataset[1],
        "partition": "iid",
        "clients": 2,
        "models": ("mlp",),
        "rounds": 1,
    }
    logged = []
    for _ in range(2):
        jaxfl.compare(mine, run_dir=tmp_path / "compared", log=lambda *line: logged.append(line), **options)
    assert "1 of 1 runs in" in (said := "".join(capsys.readouterr())) and "an object, whose edits" in said
    assert len(logged) == 1  # a run that had finished is not logged again


def test_a_run_has_other_data_if_its_images_differ(compared, tmp_path):
    one, *_ = runs(compared)
    altered(one, tmp_path / "other")
    assert store.checksums(tmp_path / "other") == store.checksums(one)
    config = read(tmp_path / "other" / "config.json")
    config["data"]["mean"] = [2 * mean for mean in config["data"]["mean"]]  # of training rows
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert store.checksums(tmp_path / "other") == store.checksums(one)
    config["data"]["checksum"] = "another"
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    (data, rows), (others, same) = store.checksums(one), store.checksums(tmp_path / "other")
    assert data != others and rows == same


QUICK = ["--models", "mlp,hidden=3", "--rounds", "2", "--eval-every", "1", "--epochs", "1"]


def users(folder, **arrays):
    """Write images of four users, 12 each, the last of whom is the test part; return the options."""
    whose, rng = np.repeat(["ann", "bob", "cyd", "dan"], 12), np.random.default_rng(0)
    labels = rng.integers(0, 3, 48)
    images = (60 * labels[:, None, None] + rng.integers(0, 99, (48, 5, 5))).astype(np.uint8)
    arrays = {"images": images, "labels": labels, "user": whose, "split": whose != "dan"} | arrays
    np.savez(folder / "users.npz", **arrays)
    return ["--dataset", str(folder / "users.npz"), "--partition", "natural,column=user"]


def test_users_of_the_test_part_never_train(tmp_path, capsys):
    """What was decided is said, and in the configuration; who never trains is scored as a newcomer."""
    options = [*users(tmp_path), *QUICK, "--run-dir", str(tmp_path / "run")]
    cli.main(["run", "fedavg", *options])
    said = " ".join(capsys.readouterr().out.split())
    assert "natural,column=user, --test split: 3 clients with 9 training and 3 test rows each" in said
    assert "they train on 27 rows: 27 of 36 images" in said
    assert "Clients without training rows (dan) never train: newcomers." in said
    assert "Clients without test rows in the data (ann, bob, cyd) are tested on some of their other" in said
    assert read(tmp_path / "run" / "config.json")["options"]["test"] == "split"
    with (tmp_path / "run" / "clients.csv").open() as file:
        rows = [(row["name"], row["newcomer"], row["train_rows"]) for row in csv.DictReader(file)]
    assert rows == [("ann", "0", "9"), ("bob", "0", "9"), ("cyd", "0", "9"), ("dan", "1", "0")]
    last = metrics(tmp_path / "run")[-1]
    assert last["accuracy"]["per_client"][3] is None and last["newcomers"]["clients"] == [3]
    run = jaxfl.load(tmp_path / "run")
    rows = run.partition.test[3]
    right = run.models[3].predict(run.source.images[rows]) == run.source.labels[rows]
    assert [right.mean()] == last["newcomers"]["received"]["per_client"]
    cli.main(["partition", *users(tmp_path), "--test", "own", "--run-dir", str(tmp_path / "own")])
    assert "they train on 9 of the data's own test rows" in " ".join(capsys.readouterr().out.split())


def test_newcomers_do_not_count_in_the_normalisation_of_files_for_other_programs(tmp_path):
    options = "--test own --newcomers 0.25 --models mlp,hidden=3 --format pfllib --run-dir"
    cli.main(["partition", *users(tmp_path), *options.split(), str(tmp_path / "parts")])
    (joins,) = draw_newcomers([4], 0.25, seed=0)
    files = [tmp_path / "parts" / "pfllib" / "train" / f"{i}.npz" for i in np.flatnonzero(~joins)]
    seen = np.concatenate([np.load(file, allow_pickle=True)["data"].item()["x"] for file in files])
    np.testing.assert_allclose([seen.mean(), seen.std()], [0, 1], atol=1e-6)


def test_users_with_too_few_rows_are_counted(tmp_path, capsys):
    whose = np.repeat(["ann", "eve", "bob", "cyd", "dan"], [10, 2, 12, 12, 12])
    command = ["partition", *users(tmp_path, user=whose), "--run-dir", str(tmp_path / "parts")]
    cli.main(command)
    said = "1 of 5 values of user have fewer than min_samples rows, and are no clients."
    assert said in " ".join(capsys.readouterr().out.split())
    cli.main([*command[:-1], str(tmp_path / "three"), "--clients", "3"])  # others are left out on purpose
    assert "Left out" not in capsys.readouterr().out


def test_nobody_trains_an_architecture_of_only_newcomers(tmp_path):
    with pytest.raises(JaxflError, match="Nobody would train mlp,hidden=4: all of its clients are newcomers"):
        jaxfl.run(
            "fedavg",
            dataset=users(tmp_path)[1],
            partition="natural,column=user",
            models=["mlp,hidden=3,clients=3", "mlp,hidden=4,clients=1"],
            run_dir=tmp_path / "run",
            quiet=True,
        )


def test_images_on_which_nobody_trains_do_not_change_training(tmp_path):
    """A run's moments are recorded: it goes on with them, and so do its models and its repetitions."""
    options = [*users(tmp_path), *QUICK, "--run-dir"]
    cli.main(["run", "fedavg", *options, str(tmp_path / "one")])
    one = jaxfl.load(tmp_path / "one")
    seen, apart = one.source.images[np.concatenate(one.partition.train)], np.concatenate(one.partition.test)
    np.testing.assert_allclose(one.config["data"]["mean"], [seen.mean()], rtol=1e-6)
    np.testing.assert_allclose(one.config["data"]["std"], [seen.std()], rtol=1e-6)
    arrays = dict(np.load(tmp_path / "users.npz"))
    arrays["images"][apart] = 255 - arrays["images"][apart]  # the rows are in the file's order
    cli.main(["run", "fedavg", *users(tmp_path, **arrays), *QUICK, "--run-dir", str(tmp_path / "two")])
    assert jaxfl.load(tmp_path / "two").loss.tolist() == one.loss.tolist()
    users(tmp_path)
    config = read(tmp_path / "one" / "config.json")
    config["data"]["mean"] = [7.0]  # as of an earlier version, which had the moments of other rows
    (tmp_path / "one" / "config.json").write_text(json.dumps(config))
    setup = Setup.of(dataset=options[1], partition=options[3], models=("mlp,hidden=3",))
    assert prepare.prepare(setup, tmp_path / "one").federation.mean.item() == 7
    assert jaxfl.load(tmp_path / "one").models[0].images.mean.item() == 7


def test_a_report_notes_runs_with_different_code():
    def of(*files, package="1"):
        return {"code": [{"package": "0", "files": {}}, {"package": package, "files": dict(files)}]}

    same = [of(("/a/my.py", "1")), of(("/b/my.py", "1"))]
    assert on_code({"mine": same, "other": [of(("/a/my.py", "2"))]}) == []
    (note,) = on_code({"mine": [*same, of(("/a/my.py", "2"))]})
    assert note == "The runs of mine were computed by different versions of your code."
    (note,) = on_code({"mine": same, "other": [of(package="2")]})
    assert note == "These runs were computed by different versions of jaxfl."


def test_a_report_notes_clients_that_have_not_trained():
    def of_run(*cohorts, new=(), idle=()):
        shares = [None if client in new else 0.5 for client in range(4)]
        losses = [[None if client in idle else 1.0 for client in cohort] for cohort in cohorts]
        rounds = zip(map(list, cohorts), losses, strict=True)
        scored = {"accuracy": {"per_client": shares}}
        return [{"clients": ids, "client_loss": told} | scored for ids, told in rounds]

    everyone, some, newcomers = of_run((0, 1), (2, 3)), of_run((0, 1), (1, 0)), of_run((0, 1, 2), new=[3])
    assert not on_untrained([untrained(everyone)]) and not on_untrained([untrained(newcomers)])
    (note,) = on_untrained([*map(untrained, (everyone, some, newcomers))])
    assert note.startswith("0 to 2 of 3 to 4 clients have trained in no round of their run (by id 2, 3): no")
    assert untrained(of_run((0, 1), (2, 3), idle=[1, 2])) == ([1, 2], 4)  # a lost answer has no loss, either


@pytest.mark.parametrize(
    ("options", "silent"),
    [
        (["--models", "mlp,norm=batch"], "1 of 4 clients have trained in no round of their run (by id 2)"),
        (["--participation", "0.25"], "2 of 4 clients have trained in no round of their run (by id 0, 1)"),
        (["--dropout", "0.6"], "2 of 4 clients have trained in no round of their run (by id 1, 2)"),
        ([], None),
    ],
)
def test_clients_that_never_train_are_named(tmp_path, capsys, options, silent):
    """A single row is no batch for BatchNorm; others are never drawn, or lose all their answers."""
    source = tiny_source()
    np.savez(tmp_path / "tiny.npz", images=source.images, labels=source.labels, split=source.train)
    ends = [(0, 10), (10, 20), (20, 21), (21, 40)]
    rows = [{"train": [*range(*own)], "val": [], "test": [40 + i]} for i, own in enumerate(ends)]
    (tmp_path / "rows.json").write_text(json.dumps({"data_indices": rows}))
    words = f"--partition {tmp_path}/rows.json --rounds 2 --eval-every 1 --models mlp"
    words += f" --dataset {tmp_path}/tiny.npz --run-dir {tmp_path}/run"
    cli.main(["run", "fedavg", *words.split(), *options])
    printed = " ".join(capsys.readouterr().out.split())
    assert (silent in printed) if silent else "have trained" not in printed, printed
