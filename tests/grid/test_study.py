"""Studies from files: which runs are made, which are kept, and what the table says."""

import csv
import io
import itertools
import os
import shutil
import signal
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import drawing

from jaxfl import cli, terminal
from jaxfl.config.setup import Setup
from jaxfl.errors import JaxflError
from jaxfl.folder import owner, several_runs, store
from jaxfl.grid import study, study_file, study_table
from jaxfl.results import watch
from jaxfl.results.charts import draw_grid, draw_panels, draw_table
from jaxfl.results.frame import by_case
from jaxfl.results.notes import OTHER_DATA
from jaxfl.results.table import as_latex
from jaxfl.runs.interrupt import Interrupted
from jaxfl.runs.observer import Observer, Terms

TEXT = """
title = "Toy"
methods = ["fedprox", "local"]

[options]
dataset = "{dataset}"
models = ["mlp,hidden=3"]
clients = 4
rounds = 2
eval_every = 2
epochs = 1
devices = 1

[axes]
mu = [0.0, 1.0]
partition = ["iid", "classes,classes_per_client=3,samples_per_client=10", "classes,classes_per_client=99"]
"""


@pytest.fixture(scope="module")
def toy(dataset, tmp_path_factory):
    """Run a study whose last partition is impossible; return it and its folder."""
    path = tmp_path_factory.mktemp("study") / "toy.toml"
    path.write_text(TEXT.format(dataset=dataset[1]))
    found = study.read(path)
    said = []
    with drawing("study.png"):
        _, failures = study.run(
            found, path.parent / "whole", terms=Terms(observer=Observer(warned=said.append))
        )
    assert (
        "local has no option that differs along the axis mu" in said[0]
        and 'methods = ["NAME,mu=0.0", ...]' in said[0]
    )
    assert len(failures) == 2 and all("classes_per_client is 99" in failure for failure in failures)
    return found, path.parent / "whole"


def refused(capsys, *words):
    """Run a command that ends with an error; return what it printed and its last sentence."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words])
    assert end.value.code == 2
    printed = capsys.readouterr()
    return printed.out, printed.err.splitlines()[-1]


def rows(folder, name="study.csv"):
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


def results(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob(store.RESULT)}


def test_the_table_has_every_setting_of_every_method(toy):
    found, folder = toy
    table = rows(folder)
    assert [row.pop("method") for row in table] == [
        f"{method} mu={mu}" for method in ("fedprox", "local") for mu in (0.0, 1.0)
    ]
    for row, mu in zip(table[:2], (0.0, 1.0), strict=True):
        for partition in found.axes["partition"][:2]:
            setting = study_file.setting_name({"mu": mu, "partition": partition})
            (run,) = (folder / store.file_name(setting)).glob("fedprox*/seed-0")
            result, _ = store.read_finished(run)
            assert store.read_config(run)["options"]["mu"] == mu
            assert float(row[f"partition={partition}"]) == pytest.approx(
                100 * result["accuracy"]["mean"], abs=1e-4
            )
    said = (folder / "study.md").read_text()
    assert (
        "4 of the runs are missing: fedprox mu=0.0,partition=classes,classes_per_client=99 has 0 of 1;"
        in said
    )
    assert (folder / "study.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_compares_with_one_method(toy):
    """Differences are over clients where there is one seed; the method itself has a dash."""
    found, folder = toy
    frame = study.finished(found, folder)
    results = {case: runs[0, 0].result["accuracy"] for case, runs in by_case(frame).items()}
    table = study_table.tabulate(found._replace(against="local"), frame)
    assert table.titles[2:] == [f"{title} minus local" for title in table.titles[:2]]
    for row, (label, (*_, first, second)) in enumerate(table.rows):
        assert label.startswith("fedprox" if row < 2 else "local")
        if row >= 2:
            assert first.text() == second.text() == "-"
            continue
        setting = study_table.in_words(study.settings(found)[3 * row])
        ours, theirs = (np.array(results[method, setting]["per_client"]) for method in found.methods)
        assert first[3:] == (4, "clients")
        assert first.mean == pytest.approx(100 * (ours - theirs).mean())
    assert "Minus local" in table.notes[-1]


@pytest.mark.parametrize("columns", ["show", "method", "mu"])
def test_what_is_shown_may_be_several_things(toy, columns):
    """They are one more axis: every value stands once in the table, in the row and column that name it."""
    found, folder = toy
    shown = {"accuracy": "accuracy, mean over clients %", "megabytes": "MB sent and received"}
    study_of = found._replace(show=tuple(shown), columns=columns, axes={"mu": [0.0, 1.0]})
    partition = ("partition", study_file.setting_name({"partition": found.axes["partition"][0]}))
    frame = [
        run._replace(setting=run.setting[:1])
        for run in study.finished(found, folder)
        if partition in run.setting
    ]
    table = study_table.tabulate(study_of, frame)
    assert len(table.rows) * len(table.titles) == 8
    moved = [run._replace(sums=(i, 0)) for i, run in enumerate(frame)]
    assert OTHER_DATA in study_table.tabulate(study_of, moved).notes and OTHER_DATA not in table.notes
    for run, title in itertools.product(frame, shown.values()):
        words = {"method": run.method, **dict(run.setting), "show": title}
        column = words.pop(columns)
        (cells,) = (cells for row, cells in table.rows if all(word in row for word in words.values()))
        sent = (run.result["bytes_up"] + run.result["bytes_down"]) / 1e6
        wanted = 100 * run.result["accuracy"]["mean"] if title.startswith("acc") else sent
        assert cells[table.titles.index(column)].mean == pytest.approx(wanted)
    assert draw_panels(table, "Toy").axes


def test_every_run_has_a_row_of_its_own(toy):
    """Settings and seeds are columns, in percent and megabytes as in tables."""
    found, folder = toy
    lines = rows(folder, "runs.csv")
    runs = by_case(study.finished(found, folder))
    assert len(lines) == 8
    for line in lines:
        setting = study_table.in_words({name: line[name] for name in found.axes})
        result = runs[line["method"], setting][0, 0].result
        assert line["seed"] == line["partition_seed"] == "0" and not line["validation"]
        assert float(line["worst-tenth"]) == pytest.approx(100 * result["accuracy"]["worst_tenth"], 1e-5)
        assert float(line["flops"]) == pytest.approx(result["flops"] / 1e9, 1e-5)


def test_the_best_method_of_each_setting_stands_out_and_names_are_those_of_the_file(toy):
    found, folder = toy
    mu = "mu=0.0"
    names = {"fedprox": "FedProx", mu: "$\\mu$ = 0", "std": "spread (std)"}
    study_of = found._replace(names=names, show=("accuracy", "std"), columns="method", against="local")
    table = study_table.tabulate(study_of, study.finished(study_of, folder))
    assert table.titles == ["FedProx", "local", "FedProx minus local"]
    assert len(table.best) >= len(table.rows) == 8
    assert table.notes[0].endswith("; spread (std).")
    for i, (label, cells) in enumerate(table.rows):
        better = min if "std" in label else max
        means = [cell.mean for cell in cells[:2]]
        assert [(i, j) in table.best for j in range(2)] == [mean == better(means) for mean in means]
    text = as_latex(table)
    assert text.count("\\textbf") == len(table.best) and "\\$\\textbackslash{}mu\\$ = 0," in text
    lines = [line for line in text.splitlines() if "&" in line][1:]
    for line, (_, cells) in zip(lines, table.rows, strict=True):
        difference = cells[2]
        star = "^{*}" if np.isfinite(difference.low) and not difference.inside else ""
        assert line.endswith(f"& ${difference.mean:+.2f}{star}$ \\\\")


def test_a_study_goes_on_when_its_axes_change_places_and_needs_no_data_when_it_has_finished(toy, tmp_path):
    found, whole = toy
    shutil.copytree(whole, tmp_path / "copy")
    possible = {"mu": [0.0, 1.0], "partition": found.axes["partition"][:2]}
    turned = found._replace(axes=dict(reversed(possible.items())))
    missing = turned._replace(options=found.options | {"devices": 99})
    for other in turned, missing:
        table, failures = study.run(other, tmp_path / "copy")
        assert table is not None and not failures and len(results(tmp_path / "copy")) == 8


def test_runs_without_validation_rows_are_left_out_of_a_table_that_selects_by_them(toy):
    found, whole = toy
    assert not study.finished(found._replace(select="validation"), whole)


def test_accuracies_on_validation_rows_that_nobody_has_are_explained(toy):
    found, whole = toy
    shown = found._replace(show=("accuracy", "validation"), names={"accuracy": "not validation %"})
    table = study_table.tabulate(shown, study.finished(shown, whole))
    assert [note for note in table.notes if "no run has validation rows" in note] == [
        "validation %: no run has validation rows; clients hold some out with --validation-fraction."
    ]


def test_a_method_that_cannot_begin_does_not_end_the_others(dataset, tmp_path):
    """FedMD without public images ends alone; the failure names the setting and the method."""
    text = TEXT.format(dataset=dataset[1]).partition("[axes]")[0].replace("fedprox", "fedmd")
    axes = '[axes]\npartition = ["iid"]\npublic = ["none"]\n'
    (tmp_path / "toy.toml").write_text(text + axes)
    table, failures = study.run(study.read(tmp_path / "toy.toml"), tmp_path / "toy")
    (sentence,) = failures
    assert sentence.startswith("partition=iid,public=none: fedmd: The method needs public images")
    assert table is not None and [label for label, _ in table.rows] == ["local partition=iid"]


def test_finished_runs_are_kept(toy, tmp_path):
    found, whole = toy
    before = results(whole)
    assert len(before) == 8
    (lost,) = (whole / store.file_name(study_file.setting_name(study.settings(found)[0]))).glob(
        "local/seed-0"
    )
    shutil.copytree(whole, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / lost.relative_to(whole))
    kept = results(tmp_path / "copy")
    study.run(found._replace(options=found.options | {"rounds": "2"}), tmp_path / "copy")  # in words, as well
    after = results(tmp_path / "copy")
    assert len(after) == 8 and kept.items() <= after.items()
    assert rows(tmp_path / "copy") == rows(whole)

    fewer = found._replace(methods=("fedprox",), columns="method")
    table, failures = study.run(fewer, tmp_path / "copy")  # runs no longer named stay, but in no table
    assert table is not None and table.titles == ["fedprox"] and not table.best
    assert results(tmp_path / "copy") == after and all("is 99" in failure for failure in failures)


@pytest.mark.parametrize("parts", [2, 5])
def test_parts_make_the_whole_study(toy, tmp_path, parts):
    """Each cell belongs to one part; the last part's tables are those of an undivided study."""
    found, whole = toy
    made = {}
    for number in range(parts, 0, -1):
        study.run(found, tmp_path, part=f"{number}/{parts}")
        assert made.items() <= results(tmp_path).items()
        made, before = results(tmp_path), len(made)
        assert number == 1 or before < len(made) < 8
    assert len(made) == 8
    for table in whole.rglob("*.csv"):
        assert (tmp_path / table.relative_to(whole)).read_text() == table.read_text(), table


def test_a_comparison_is_divided_by_its_methods(dataset, tmp_path, capsys):
    """Parts share a folder, a table names what other parts have not finished, and a failure is its part's."""
    common = [
        "compare",
        "local",
        "fedmd",
        "fedprox",
        "--dataset",
        str(dataset[1]),
        "--models",
        "mlp,hidden=3",
    ]
    common += ["--clients", "4", "--partition", "iid", "--public", "none"]
    common += ["--rounds", "2", "--eval-every", "2", "--epochs", "1"]
    _, sentence = refused(capsys, *common, "--part", "2/3")
    assert "name the folder that all parts share, with --run-dir" in sentence
    folder = tmp_path / "shared"
    common += ["--run-dir", str(folder)]

    def said(part):
        cli.main([*common, "--part", part])
        return " ".join(capsys.readouterr().out.split())

    assert "Not finished, left to other parts: 2 of 3 runs." in said("3/3")
    assert several_runs.end_of(folder)["failures"] == []
    _, sentence = refused(capsys, *common, "--part", "2/3")
    assert "1 of 1 runs have not finished: fedmd: The method needs public images" in sentence
    assert len(results(folder)) == 1
    assert "All methods are left to other parts." in said("4/4")
    assert "Not finished, left to other parts: 1 of 3 runs." in said("1/3")
    assert [row["method"] for row in rows(folder, "table.csv")] == ["local", "fedprox"]


def test_runs_are_found_while_another_process_removes_checkpoints(toy, monkeypatch):
    """Folders that vanish while they are listed are left out."""
    found, folder = toy
    run = next(folder.rglob(store.RESULT)).parent
    scan = os.scandir

    def vanishing(path):
        if str(path).endswith("tmp"):
            os.rmdir(path)
        return scan(path)

    for look in (
        lambda: store.read_config(run),
        lambda: study.finished(found, folder),
        lambda: watch._runs(folder),
    ):
        (run / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir(parents=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", vanishing)
            look()
        assert not (run / "checkpoints" / "9.orbax-checkpoint-tmp").exists()


def test_a_damaged_run_is_named_and_the_table_has_the_others(toy, tmp_path):
    found, whole = toy
    shutil.copytree(whole, tmp_path / "copy")
    damaged = sorted(results(tmp_path / "copy"))[0]
    damaged.write_text("{")
    table, failures = study.run(found, tmp_path / "copy")
    assert table is not None and "5 of the runs are missing" in table.notes[1]
    assert [failure for failure in failures if f"{damaged} is damaged" in failure]
    assert len(failures) == 3  # it is named once


def test_runs_on_other_rows_are_not_paired(toy):
    found, folder = toy
    first, *frame = study.finished(found, folder)
    moved = first._replace(sums=(first.sums[0], "others"))
    table = study_table.tabulate(found._replace(against="local"), [moved, *frame])
    assert table.rows[0][1][2].text() == "-" and table.rows[0][1][3].text() != "-"
    assert table.notes[-1].startswith("Minus local: runs on other rows are not paired: fedprox mu=0.0,")


def test_what_a_table_averages_or_cannot_compare_is_said(toy):
    """Versions of the user's own code, and a rival that has not finished."""
    found, folder = toy
    first, _, *frame = study.finished(found, folder)
    versions = [
        first._replace(
            draw=(seed, 0), result=first.result | {"code": [{"package": "", "files": {"my.py": then}}]}
        )
        for seed, then in enumerate(("before", "after"))
    ]
    notes = study_table.tabulate(found._replace(against="local"), [*versions, *frame]).notes
    setting = study_file.setting_name(study.settings(found)[0])
    assert f"The runs of fedprox {setting} were computed by different versions of your code." in notes
    assert notes[-1] == f"Nothing is compared with local in {setting}: no run of it has finished."


def test_a_cell_that_another_process_has_finished_is_no_failure(toy, tmp_path, monkeypatch):
    found, whole = toy
    shutil.copytree(whole, tmp_path / "copy")
    busy = types.SimpleNamespace(failures=["local: another process works there"])
    monkeypatch.setattr(study, "compare", lambda *_, **__: busy)
    _, failures = study.run(found, tmp_path / "copy")
    assert len(failures) == 2 and all("classes_per_client=99: local: another" in each for each in failures)

    def full(*_, **__):
        raise JaxflError("table.csv cannot be written")

    monkeypatch.setattr(study, "compare", full)
    _, failures = study.run(found, tmp_path / "copy")
    assert len(failures) == 6  # about settings, not about their runs


def test_a_setting_is_found_whatever_the_order_of_its_axes(toy, tmp_path):
    found, setting = toy[0], {axis: {name: 1} for axis, name in zip("xyz", "abc", strict=True)}
    assert study._folder(found, tmp_path, setting).name == "a=1-b=1-c=1"
    for other in ("mu=0.0", "c=1-a=1-b=2", "c=1-a=1-b=1"):
        (tmp_path / other).mkdir()
    assert study._folder(found, tmp_path, setting).name == "c=1-a=1-b=1"
    (tmp_path / "lr=1e-05-weight_decay=1e-06").mkdir()  # whose parts between hyphens are the same
    other = study._folder(found, tmp_path, {"lr": 1e-6, "weight_decay": 1e-5})
    assert other.name == "lr=1e-06-weight_decay=1e-05"
    (tmp_path / "partition=dirichlet-alpha=1-alpha=0.1").mkdir()  # FedDyn's alpha beside a partition's
    other = study._folder(found, tmp_path, {"partition": "dirichlet,alpha=0.1", "alpha": 1})
    assert other.name == "partition=dirichlet-alpha=0.1-alpha=1"
    other = study._folder(found, tmp_path, {"alpha": 0.1, "partition": "dirichlet,alpha=1"})
    assert other.name == "partition=dirichlet-alpha=1-alpha=0.1"


def test_the_bar_counts_all_settings_and_estimates_by_what_was_computed(monkeypatch, toy):
    """Rounds of earlier settings stay; kept runs, and rounds before a resume, took no time here."""
    bar, now = terminal.Bar(), [0.0]
    bar.get_time = lambda: now[0]
    monkeypatch.setattr(terminal, "announce", lambda *given: None)
    monkeypatch.setattr(bar, "start", lambda: None)
    look = bar.observer

    def shown():
        (task,) = bar.tasks
        return task.completed, task.total, terminal._TimeLeft().render(task).plain

    def rounds(first, last):
        return [{"round": t, "seconds": {"train": 1.0, "compile": 0.0}} for t in range(first, last + 1)]

    look.ahead(80)
    look.kept("fedavg, seed 0", rounds(1, 10))
    look.prepared(Setup.of(rounds=10), None, 4)
    assert shown() == (10, 80, "-:--:--")
    now[0] = 60.0  # ten rounds in a minute
    look.progressed("fedavg, seed 1", rounds(1, 4))
    look.progressed("fedper, seed 0", rounds(3, 8))
    assert shown() == (22, 80, "0:05:48")
    look.ahead(40)  # the rest of that setting has failed
    look.prepared(Setup.of(rounds=10), None, 4)
    look.progressed("fedavg, seed 0", rounds(1, 2))
    assert shown() == (24, 62, "0:03:10")


def test_names_are_plain_text_in_pictures(toy, drawn):
    """A name between dollars is no formula, which might be wrong."""
    found, folder = toy
    name = r"$\textsc{Ours}$"
    table = study_table.tabulate(found._replace(names={"fedprox": name}), study.finished(found, folder))
    for figure in draw_table(table, name, name), draw_panels(table, name), draw_grid(table, name, name):
        figure.savefig(io.BytesIO())


def test_processes_write_the_table_of_a_folder_in_turn(tmp_path):
    """The second one reads when the first has written."""
    order = []

    def second():
        with owner.in_turn(tmp_path):
            order.append("second")

    with owner.in_turn(tmp_path):
        other = threading.Thread(target=second)
        other.start()
        other.join(timeout=0.2)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
    with owner.in_turn(tmp_path / "not yet"):
        pass


def test_the_command_prints_the_table_and_what_has_not_finished(toy, tmp_path, capsys):
    _, whole = toy
    words = ["study", str(whole.parent / "toy.toml"), "--run-dir", str(tmp_path / "copy")]
    shutil.copytree(whole, tmp_path / "copy")
    with drawing("study.pdf"):
        said, sentence = refused(capsys, *words, "--part", "1/2", "--pictures", "pdf")
    assert "fedprox mu=0.0" in said and "study.pdf" in said
    failed = "Not all runs of the study have finished: mu=0.0,partition=classes,classes_per_client=99: "
    assert failed in sentence and "classes_per_client is 99" in sentence
    assert (tmp_path / "copy" / "study.pdf").read_bytes().startswith(b"%PDF")
    for part in "2", "1/two":
        _, sentence = refused(capsys, *words, "--part", part)
        assert f"--part '{part}' is not one of several parts" in sentence


def test_studies_are_found_by_their_names(monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    cli.main(["study", "--list"])
    assert "digits/label-skew" in capsys.readouterr().out
    assert "; did you mean 'fedcmd/table-2'?" in refused(capsys, "study", "fedcmd/table-22")[1]
    assert "There is no study my.toml" in refused(capsys, "study", "my.toml")[1]


def test_ctrl_c_in_the_last_rounds_of_a_setting_begins_no_other(toy, tmp_path):
    found, _ = toy

    def pressed(run, records):
        signal.raise_signal(signal.SIGINT)

    axes = {"partition": found.axes["partition"]}
    found = found._replace(methods=("local",), axes=axes, columns="method")
    with pytest.raises(Interrupted, match="has stopped in setting 2 of 3"):
        study.run(found, tmp_path / "run", terms=Terms(observer=Observer(progressed=pressed)))
    assert len(results(tmp_path / "run")) == 1
    edited = {"partition": ["classes,classes_per_client=2,samples_per_client=10"]}
    table, failures = study.run(found._replace(axes=edited), tmp_path / "run")
    assert table is not None and not failures


def test_the_table_has_no_runs_of_another_study(toy):
    """A file may be edited: its table leaves out runs that were begun with other options."""
    found, whole = toy
    for others in {"epochs": 2}, {"seed": 1}:
        assert not study.finished(found._replace(options=found.options | others), whole)
    fewer = found._replace(methods=("fedprox",))
    assert {run.method for run in study.finished(fewer, whole)} == {"fedprox"}


def test_cells_that_lack_runs_or_the_target_are_named(toy):
    found, whole = toy
    first, *frame = study.finished(found, whole)
    aiming = found._replace(show=("rounds-to-target",), options=found.options | {"target": [0.5]}, seeds=3)
    reached = [
        first._replace(draw=(seed, 0), result=first.result | {"targets": {"0.5": {"round": number}}})
        for seed, number in enumerate((2, None))
    ]
    what, spread, missing, missed = study_table.tabulate(aiming, [*reached, *frame]).notes
    cell = f"{first.method} {study_file.setting_name(study.settings(found)[0])}"
    assert what == "Toy: rounds to 50 %."
    assert spread == "Mean and sample standard deviation over up to 3 seeds."
    assert missing.startswith("27 of the runs are missing: ") and f"{cell} has 2 of 3; " in missing
    assert missing.endswith("; and 6 more.") and missed == f"50 % is reached by {cell} in 1 of 2 runs."


@pytest.mark.parametrize(
    ("path", "folder"),
    [("my.toml", "my"), ("a/b/my.toml", "b-my"), ("b/../my.toml", None), ("/a/my.toml", "a-my")],
)
def test_files_of_one_name_have_folders_of_their_own(path, folder):
    assert study.usual_folder(Path(path)).name == (folder or f"{Path.cwd().name}-my")


def test_targets_are_those_of_the_file(toy):
    """Targets of the file apply also to runs begun without one, and no round is repeated."""
    found, whole = toy

    def rounds(target):
        aiming = found._replace(show=("rounds-to-target",), options=found.options | {"target": target})
        return [
            cell.text()
            for _, cells in study_table.tabulate(aiming, study.finished(aiming, whole)).rows
            for cell in cells
        ]

    assert rounds([0.001]) == ["2.00"] * 8
    assert rounds([1.0]) == ["-"] * 8


def test_the_time_limit_is_of_the_whole_study(toy, tmp_path):
    """The message says how to continue the study, not one of its comparisons."""
    found, _ = toy
    with pytest.raises(
        Interrupted, match="The study in .* has stopped in setting 1 of 6: mu=0.0,"
    ) as stopped:
        study.run(found, tmp_path / "with space", terms=Terms(max_seconds=1e-9))
    assert f"--run-dir '{tmp_path}/with space', to continue" in str(stopped.value)
    assert not results(tmp_path)


def test_an_axis_may_change_several_options_together(toy, tmp_path):
    """Its settings are those of two axes, but not all combinations; names and tables are of the values."""
    found, whole = toy
    one, other = ({"mu": mu, "partition": found.axes["partition"][i]} for i, mu in enumerate((0.0, 1.0)))
    names = {study_file.setting_name(one): "both small"}
    pairs = found._replace(axes={"both": [one, other]}, columns="both", names=names)
    assert [study_file.planned(pairs, {"both": value}) for value in (one, other)] == [
        study_file.planned(found, value) for value in (one, other)
    ]
    table = study_table.tabulate(pairs, study.finished(pairs, whole))
    assert table.titles == ["both small", study_file.setting_name(other)]
    apart = study_table.tabulate(found, study.finished(found, whole))
    texts = {label: [cell.text() for cell in cells] for label, cells in apart.rows}
    for label, cells in table.rows:
        assert [cell.text() for cell in cells] == [texts[f"{label} mu=0.0"][0], texts[f"{label} mu=1.0"][1]]
    shutil.copytree(whole, tmp_path / "copy")
    before = results(tmp_path / "copy")
    moved = pairs._replace(axes={"both": [dict(reversed(value.items())) for value in (one, other)]}, names={})
    study.run(moved, tmp_path / "copy")  # in the same folders
    assert results(tmp_path / "copy") == before
    assert [row["both"] for row in rows(tmp_path / "copy", "runs.csv")] == 2 * [
        f"partition={value['partition']},mu={value['mu']}" for value in (one, other)
    ]
    assert not study_file.without_axis(pairs)
    for mu in (1.0, 0.0):
        axes = {"both": [{"mu": 0.0, "lr": 0.1}, {"mu": mu, "lr": 0.1}]}
        of_all = (("fedprox", "both"), ("local", "both"))
        assert study_file.without_axis(found._replace(axes=axes)) == [*of_all[0 if mu == 0 else 1 :]]


def test_settings_that_differ_in_targets_have_the_same_runs(toy, tmp_path):
    """The table has each target; a run that stops at its target is another one."""
    found, whole = toy
    pairs = [{"target": [target], "mu": mu} for target, mu in ((0.001, 0.0), (1.0, 0.0), (0.001, 1.0))]
    aiming = found._replace(
        show=("rounds-to-target",), axes={"x": pairs, "partition": found.axes["partition"][:1]}, columns="x"
    )
    shutil.copytree(whole, tmp_path / "copy")
    study.run(aiming, tmp_path / "copy")
    assert results(tmp_path / "copy").keys() == {
        tmp_path / "copy" / path.relative_to(whole) for path in results(whole)
    }
    table = study_table.tabulate(aiming, study.finished(aiming, tmp_path / "copy"))
    assert [[cell.text() for cell in cells] for _, cells in table.rows] == 2 * [["2.00", "-", "2.00"]]
    assert "rounds to the target" in table.notes[0]
    stopping = aiming._replace(options=aiming.options | {"stop_at_target": True})
    assert not study.finished(stopping, whole)


def test_a_setting_may_have_a_long_name(toy):
    found, whole = toy
    long = found._replace(axes={"models": [["mlp,hidden=3"], ["mlp,hidden=3,dropout=0.0"] * 20]})
    names = [store.file_name(study_file.setting_name(setting)) for setting in study.settings(long)]
    assert names[0] == "models=mlp-hidden=3" and names[1].startswith("models=mlp-hidden=3-dropout=0.0+mlp")
    assert len(names[1].encode()) <= 200 and store.file_name("é" * 300) != store.file_name("é" * 301)
    assert not study.finished(long, whole)


def test_every_study_of_the_papers_can_be_read():
    found = study.found_below(Path(__file__).parents[2] / "experiments")
    assert len(found) >= 70 and all(described.title and described.claim for described in found.values())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methods = []", "methods is empty; write methods = "),
        ('methods = ["fedavg"]\nmethod = 1', "has no option 'method'; did you mean 'methods'?"),
        ('methods = ["fedavg"]\n[axes]\nlr = 0.1', "the axis lr is not a list of values"),
        ('methods = ["fedavg"]\ncolumns = "lr"', "no axis 'lr'"),
        ('methods = ["fedavg"]\nagainst = "fedper"', "no method 'fedper' is compared; choose from fedavg"),
        ('methods = ["fedavg"]\nshow = "acuracy"', "cannot show 'acuracy'; did you mean 'accuracy'?"),
        (
            'methods = ["fedavg"]\n[axes]\nlam = [1.0]',
            "lam is an option of compfl, .* of which none is named",
        ),
        ('methods = ["fedavg"]\n[options]\nrounds = "many"', "rounds"),
        ('methods = ["fedavg"]\n[options]\nshow = ["auc"]', "write show beside methods"),
        ('methods = ["fedavg"]\n[axes]\nshow = [["auc"], []]', "write show beside methods"),
        ('methods = ["fedavgg"]', "no method 'fedavgg'; did you mean 'fedavg'?"),
        ("methods", "is not valid TOML"),
        ('methods = ["fedavg"]\nseeds = "three"', "seeds must be a whole number, not 'three'"),
        ('methods = ["fedavg"]\nseeds = 1.5', "seeds must be a whole number, not 1.5"),
        ('methods = ["fedavg"]\nshow = 3', "show must be a tuple of texts, not 3"),
        ('methods = ["fedavg"]\nshow = []', 'show is empty; write show = "NAME" or'),
        ('methods = ["fedavg"]\nshow = ["received", "received"]', "show has received twice"),
        ('methods = ["fedavg"]\nshow = ["received", "lowst"]', "cannot show 'lowst'; did you mean 'lowest'?"),
        ('methods = ["fedavg"]\ncolumns = "show"', "no axis 'show'"),
        ('methods = ["local", "local"]', "methods has local twice"),
        ('methods = ["local"]\n[axes]\nepochs = [1, 1]', "epochs has 1 twice"),
        ('methods = ["local"]\n[axes]\naugment = [["crop"], "crop"]', "augment has crop twice"),
        ('methods = ["compfl,kd=false"]\n[options]\nkd = true', "compfl,kd=false gives kd, which"),
        ('methods = ["ditto,lam=1"]\n[axes]\nlam = [0.1, 1.0]', "ditto,lam=1 sets lam, which is also"),
        ('methods = ["local"]\nshow = "rounds-to-target"', "but has no target; give it one"),
        (
            'methods = ["local"]\nshow = "flops-to-target"\n[options]\ntarget = [0.1, 0.2]',
            "but has 2 targets;",
        ),
        ('methods = ["local"]\n[axes]\nseed = [0, 1]', "seed cannot be an axis; seeds = 3"),
        ('methods = ["local"]\n[axes]\nx = [{seed = 0}, {seed = 1}]', "seed cannot be an axis; seeds = 3"),
        ('methods = ["local"]\n[axes]\nx = [{lr = 0.1}, {epochs = 1}]', "must be tables of the same options"),
        ('methods = ["local"]\n[axes]\nx = [{lr = 0.1}, 0.2]', "must be tables of the same options"),
        ('methods = ["local"]\n[axes]\nx = [{}]', "must be tables of the same options"),
        ('methods = ["local"]\n[axes]\nx = [{lr = 0.1}]\nlr = [0.1]', "lr is in two axes"),
        *(
            (f'methods = ["local"]\n[axes]\n{name} = [{{lr = 0.1}}]', f"tables cannot be called {called!r}")
            for name, called in [
                *((name, name) for name in ("method", "show", "seed", "lowest")),
                ('" "', " "),
            ]
        ),
        (
            'methods = ["local"]\n[axes]\nx = [{lr = 1.0, epochs = 1}, {epochs = 1, lr = 1.0}]',
            "lr=1.0,epochs=1 twice",
        ),
        ('methods = ["local", "local"]\n[axes]\nmethods = [{lr = 0.1}]', "methods has local twice"),
        ('methods = ["local,lr=1"]\n[axes]\nx = [{lr = 0.1}]', "local,lr=1 sets lr, which is also an axis"),
        ("methods = [1]", "methods must be a tuple of texts"),
        ('methods = ["local"]\noptions = 1', "options must be a table; write .options. and below it"),
        ('methods = ["local"]\nselect = "best"', "select must be last or validation, not 'best'"),
        (
            'methods = ["local"]\n[names]\nlocl = "Local"',
            "names has 'locl', which is in no table; did you mean",
        ),
        ('methods = ["local"]\n[names]\nlocal = 1', "the name of local must be a text, but is 1"),
        (
            'methods = ["local", "fedavg"]\n[names]\nlocal = "fedavg"',
            "local is not the only one that names calls",
        ),
        (
            'methods = ["local"]\nshow = ["accuracy", "received"]\n[names]\naccuracy = "received %"',
            "accuracy is not the only one that names calls 'received %'",
        ),
        ('methods = ["local"]\nseeds = 0', "seeds must lie in .1, 100000., but is 0"),
        ('methods = ["local"]\n[options]\nlr = 0.1\n[axes]\nlr = [0.2]', "lr is an option and an axis"),
        ('methods = ["fedprox", "fedprox,mu=0.01"]', "is named twice"),
        ('methods = ["local"]\n[axes]\npartition = ["iid", "dirichlet,beta=1"]', "beta"),
    ],
)
def test_files_that_are_not_a_study_are_refused(text, words, tmp_path):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(JaxflError, match=words.replace("?", r"\?")):
        study.read(tmp_path / "bad.toml")


def test_a_byte_order_mark_is_no_part_of_a_study(tmp_path):
    (tmp_path / "marked.toml").write_bytes(b'\xef\xbb\xbfmethods = ["local"]')
    assert study.read(str(tmp_path / "marked.toml")).methods == ("local",)


def test_options_that_toml_or_a_plain_text_cannot_hold(tmp_path):
    """A study can give none, which TOML lacks, and a network with options as an option of a method."""
    options = '[options]\nclip_norm = "none"\n[axes]\nknowledge = ["mlp,hidden=8", "mlp,hidden=12"]'
    (tmp_path / "networks.toml").write_text(f'methods = ["fedkemf", "local"]\n{options}')
    found = study.read(tmp_path / "networks.toml")
    planned = [study_file.planned(found, setting) for setting in study.settings(found)]
    of_fedkemf = [variants[0] for variants, _ in planned]
    assert [variant.config.knowledge for variant in of_fedkemf] == ["mlp,hidden=8", "mlp,hidden=12"]
    assert [variant.config.clip_norm for variant in of_fedkemf] == [None, None]
    assert of_fedkemf[0].label == "fedkemf,knowledge=[mlp,hidden=8]"


def test_a_folder_of_something_else_is_refused(toy, tmp_path):
    found, whole = toy
    (tmp_path / "notes.txt").write_text("mine")
    one_run = next(iter(results(whole))).parent
    for folder in (tmp_path, one_run):
        before = sorted(folder.rglob("*"))
        with pytest.raises(JaxflError, match=f"{folder} already holds"):
            study.run(found, folder)
        assert sorted(folder.rglob("*")) == before


def test_a_part_that_does_not_exist_is_refused(toy, tmp_path):
    for part, words in ("3/2", "--part '3/2' is not one of"), ("1/0", "--part '1/0' is not one of"):
        with pytest.raises(JaxflError, match=words):
            study.run(toy[0], tmp_path, part=part)


def test_results_of_several_partitions_are_kept_apart(toy, monkeypatch):
    """Every result is stored by the seed and partition seed of its plan."""
    found, whole = toy
    for name in ("is_begun", "provided"):
        monkeypatch.setattr(study, name, lambda first, _: first)
    monkeypatch.setattr(study.store, "holds", lambda *_: True)
    monkeypatch.setattr(
        study.store,
        "read_finished",
        lambda run: ({}, [{"accuracy": {"per_client": []}, "clients": [], "client_loss": []}]),
    )
    monkeypatch.setattr(study.store, "checksums", lambda run: ((run, ""), ""))
    frame = study.finished(found._replace(seeds=2, partition_seeds=3), whole)
    assert {tuple(sorted(runs)) for runs in by_case(frame).values()} == {
        tuple((seed, partition) for seed in range(2) for partition in range(3))
    }
