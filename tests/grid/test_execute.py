"""Runs that share a program: each computes what it computes alone, whatever happens to the others."""

import json
import shutil
import weakref

import jax
import numpy as np
import pytest
from conftest import comparable
from killing import press

import jaxfl
from jaxfl import cli
from jaxfl.core import memory
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.errors import JaxflError
from jaxfl.folder import checkpoint, store, variant
from jaxfl.grid import execute
from jaxfl.results.notes import SELECTED
from jaxfl.results.watch import progress
from jaxfl.runs import loop as run_loop

TOLERANCE = 1e-6  # on a CPU there is no difference, but XLA does not promise an order of sums
ROUNDS = 6
FEDERATION = (
    "--partition classes,classes_per_client=2,samples_per_client=10 --clients 5 --participation 0.4 "
    f"--epochs 1 --batch-size 3 --rounds {ROUNDS} --eval-every 2 --devices 1"
).split()
GRID = ("fedper,lr=0.05", "fedper,lr=0.2")
SEEDS = (4, 5)  # whose cohorts have places for unlike numbers of clients
OWN = """
import numpy as np

from jaxfl import Info, registry

fedper = registry.METHODS["fedper"]


def build(config):
    def host(key, state, federation, cohort):
        nothing = tuple(np.zeros(len(slots.mask), np.int32) for slots in cohort.groups)
        return state, Info((), up=nothing, down=nothing)

    return fedper.build(config)._replace(host=host)


hosted = fedper._replace(name="hosted", build=build)
"""


@pytest.fixture(scope="module")
def options(dataset):
    """Return the options of a federation of tiny images with one architecture."""
    return [*dataset, *FEDERATION, "--models", "mlp,hidden=3"]


@pytest.fixture(scope="module")
def unlike(options):
    """Return the same with two architectures, of which cohorts have different numbers of clients."""
    return [*options, "mlp,hidden=4"]


@pytest.fixture(scope="module")
def alone(unlike, tmp_path_factory):
    """Return the metrics of every run of the grid when it runs alone, by choice and seed."""
    folder, found = tmp_path_factory.mktemp("alone"), {}
    for choice in GRID:
        for seed in SEEDS:
            where = folder / choice / str(seed)
            cli.main(["run", choice, *unlike, "--seed", str(seed), "--run-dir", str(where)])
            found[choice, seed] = store.read_metrics(where)
    return found


def compare(options, folder, *choices):
    seeds = ["--seed", str(SEEDS[0]), "--seeds", str(len(SEEDS)), "--run-dir", str(folder)]
    cli.main(["compare", *choices, *options, *seeds])


def folder_of(folder, choice, seed):
    return folder / choice.replace(",", "-") / f"seed-{seed}"


def assert_as_if_alone(folder, alone):
    for (choice, seed), expected in alone.items():
        found = store.read_metrics(folder_of(folder, choice, seed))
        assert len(found) == ROUNDS
        for record, other in zip(found, expected, strict=True):
            assert_equal(record, other)


def assert_equal(record, other):
    """Compare two records of one round."""
    left, right = comparable(record), comparable(other)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for found, expected in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        number = not isinstance(expected, str)
        assert found == (pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE) if number else expected)


def result(folder, choice, seed):
    return json.loads((folder_of(folder, choice, seed) / "result.json").read_text())


def test_a_grid_with_seeds_is_one_program_with_the_metrics_of_runs_alone(unlike, alone, tmp_path, capsys):
    assert len({json.dumps([record["loss"] for record in records]) for records in alone.values()}) == 4
    fullest = [
        [slots.mask.sum(1).max() for slots in draw_cohorts((3, 2), 0.4, ROUNDS, seed)] for seed in SEEDS
    ]
    assert fullest[0] != fullest[1]
    compare(unlike, tmp_path / "run", *GRID)
    assert "fedper,lr=0.05 fedper,lr=0.2: 4 runs as one program\n" in capsys.readouterr().out
    assert_as_if_alone(tmp_path / "run", alone)

    last = [store.read_metrics(folder_of(tmp_path / "run", *of_run))[-1] for of_run in alone]
    assert [record["together"] for record in last] == [4, 4, 4, 4]
    # `jaxfl watch` shows the joint time of all four, in which compilation counts once.
    its_part = sum(last[0]["seconds"][part] for part in ("train", "evaluate", "write"))
    seen = progress(folder_of(tmp_path / "run", GRID[0], SEEDS[0]))
    assert seen.speed == pytest.approx(2 / (4 * its_part))
    assert seen.busy == pytest.approx(4 * its_part + last[0]["seconds"]["compile"])

    results = [result(tmp_path / "run", *of_run) for of_run in alone]
    assert len({of_run["seconds"]["train"] for of_run in results}) == 1
    assert sum(of_run["compilations"] > 0 for of_run in results) == 1  # of the shared program
    assert sum(of_run["seconds"]["compile"] > 0 for of_run in results) == 1


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 1])
def test_runs_of_one_program_have_newcomers_on_any_devices(unlike, tmp_path, devices):
    """A run in a shared program has the newcomers that it has alone."""
    words = [*unlike, "--newcomers", "0.4", "--rounds", "2", "--devices", str(devices)]
    compare(words, tmp_path / "compared", GRID[0])
    cli.main(["run", GRID[0], *words, "--seed", str(SEEDS[0]), "--run-dir", str(tmp_path / "alone")])
    found = store.read_metrics(folder_of(tmp_path / "compared", GRID[0], SEEDS[0]))
    expected = store.read_metrics(tmp_path / "alone")
    assert found[-1]["newcomers"]["clients"]
    for record, other in zip(found, expected, strict=True):
        assert_equal(record, other)


@pytest.mark.long
@pytest.mark.parametrize("checkpoints", [(4, 4, 4, 4), (2, 4, 2, 4)])
def test_stopped_runs_share_a_program_again(unlike, alone, tmp_path, capsys, monkeypatch, checkpoints):
    """Stopped runs share a program again with those at the same round, and the command says so."""
    together, proceed = [], execute.proceed

    def spied(job, runs, *arguments):
        together.append([run.done for run in runs])
        return proceed(job, runs, *arguments)

    monkeypatch.setattr(execute, "proceed", spied)
    compare([*unlike, "--keep-checkpoints", "3"], tmp_path / "run", *GRID)
    for of_run, last in zip(alone, checkpoints, strict=True):
        folder = folder_of(tmp_path / "run", *of_run)
        (folder / "result.json").unlink()
        for later in range(last + 2, ROUNDS + 1, 2):
            shutil.rmtree(folder / "checkpoints" / str(later))

    capsys.readouterr()
    compare([*unlike, "--keep-checkpoints", "3"], tmp_path / "run", *GRID)
    assert together[0] == [0, 0, 0, 0]
    assert together[1:] == ([[4, 4, 4, 4]] if len(set(checkpoints)) == 1 else [[2, 2], [4, 4]])
    both = "fedper,lr=0.05 fedper,lr=0.2"
    said = (
        [f"{both}: 4 runs as one program"] if len(together) == 2 else [f"{both}: 2 runs as one program"] * 2
    )
    assert [line for line in capsys.readouterr().out.splitlines() if "program" in line] == said
    assert_as_if_alone(tmp_path / "run", alone)
    assert all(checkpoint.saved(folder_of(tmp_path / "run", *of_run))[-1] == ROUNDS for of_run in alone)


def test_a_run_that_diverges_does_not_end_the_others(unlike, alone, tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare(unlike, tmp_path / "run", GRID[0], "fedper,lr=1e8")
    said = capsys.readouterr()
    assert "fedper,lr=0.05 fedper,lr=100000000.0: 4 runs as one program\n" in said.out
    assert "2 of 4 runs have not finished: fedper,lr=100000000.0 (seed 4): the loss of client" in said.err
    assert_as_if_alone(tmp_path / "run", {of_run: alone[of_run] for of_run in alone if of_run[0] == GRID[0]})
    for seed in SEEDS:
        ended = folder_of(tmp_path / "run", "fedper,lr=100000000.0", seed)
        assert 0 < len(store.read_metrics(ended)) < ROUNDS and not (ended / "result.json").exists()


@pytest.mark.long
def test_a_program_has_as_many_runs_as_fit_in_memory(unlike, alone, tmp_path, capsys, monkeypatch):
    tried, peak_bytes = [], memory.peak_bytes

    def spied(compiled):
        tried.append(peak_bytes(compiled))
        return tried[-1]

    monkeypatch.setattr(memory, "peak_bytes", spied)
    monkeypatch.setattr(memory, "available_to_several", lambda federation: 0)
    compare(unlike, tmp_path / "none", *GRID)
    (four,) = tried  # by this measure two cannot fit, so they are not tried; one alone always runs
    because = "because two do not fit in memory together"
    assert f"4 runs one after another, {because}" in capsys.readouterr().out

    monkeypatch.setattr(memory, "available_to_several", lambda federation: four - 1)
    compare(unlike, tmp_path / "two", *GRID)
    assert tried[1] == four > tried[2]
    because = "because more do not fit in memory together"
    assert f"4 runs as programs of 2, {because}" in capsys.readouterr().out
    for folder in ("none", "two"):
        assert_as_if_alone(tmp_path / folder, alone)


def test_runs_with_a_host_step_run_one_after_another(options, tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    compare(options, tmp_path / "run", f"{tmp_path}/own.py:hosted")
    because = "because the server's step is outside of the compiled program"
    assert f"hosted: 2 runs one after another, {because}" in capsys.readouterr().out
    assert all((tmp_path / "run" / "hosted" / f"seed-{seed}" / "result.json").exists() for seed in SEEDS)


def test_memory_is_freed_after_a_method_runs_out_of_it(options, tmp_path, capsys, monkeypatch):
    """The state of a run that did not fit is freed, or the next runs would not fit either."""
    simulate, refused, gone = run_loop.simulate, [], []

    def refusing(*arguments):
        if refused:
            gone.append(refused[0]() is None)
            yield from simulate(*arguments)
            return
        state = np.zeros(3)  # as a run holds its own
        refused.append(weakref.ref(state))
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")

    monkeypatch.setattr(run_loop, "simulate", refusing)
    with pytest.raises(SystemExit):
        compare(options, tmp_path / "run", "fedper", "local")
    assert "2 of 4 runs have not finished: fedper: A device's memory ran out" in capsys.readouterr().err
    assert gone == [True]


def test_ctrl_c_in_the_last_rounds_of_a_run_begins_no_other(options, tmp_path, capsys, monkeypatch):
    press(monkeypatch, evaluation=ROUNDS // 2)
    monkeypatch.setattr(memory, "most_that_fit", lambda *arguments: 1)
    with pytest.raises(SystemExit) as end:
        compare(options, tmp_path / "run", *GRID)
    assert end.value.code == 130 and "stopped with 1 of 4 runs finished" in capsys.readouterr().err
    assert len(list((tmp_path / "run").rglob("config.json"))) == 1


def test_ctrl_c_in_the_last_rounds_on_a_partition_begins_no_other(options, tmp_path, capsys, monkeypatch):
    prepare, prepared = execute.prepare, []
    press(monkeypatch, evaluation=1)
    monkeypatch.setattr(execute, "prepare", lambda *given: prepared.append(given) or prepare(*given))
    short = ["--rounds", "2", "--partition-seeds", "2", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        cli.main(["compare", GRID[0], *options, *short])
    assert end.value.code == 130 and "stopped with 1 of 2 runs finished" in capsys.readouterr().err
    assert [path.parent.name for path in (tmp_path / "run").rglob("config.json")] == ["seed-0"]
    assert len(prepared) == 1  # a stop does not wait for the next one's images


def test_an_impossible_partition_does_not_end_the_others(options, tmp_path, capsys, monkeypatch):
    """It is named, the others have a table; only if all are impossible, the command ends with the reason."""
    prepare, impossible = execute.prepare, {1}

    def prepared(setup, *given):
        if (number := setup.partition.partition_seed) in impossible:
            raise JaxflError(f"None of 1000 draws fits partition {number}.")
        return prepare(setup, *given)

    monkeypatch.setattr(execute, "prepare", prepared)
    short = ["--rounds", "2", "--partition-seeds", "3", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        cli.main(["compare", GRID[0], *options, *short])
    said = capsys.readouterr()
    assert "1 of 3 runs have not finished: fedper,lr=0.05 (seed 0, partition seed 1): None of" in said.err
    assert "Left out: " in said.out and len(list((tmp_path / "run").rglob("result.json"))) == 2
    impossible |= {0, 2}
    with pytest.raises(SystemExit):
        cli.main(["compare", GRID[0], *options, *short[:-1], str(tmp_path / "other")])
    assert capsys.readouterr().err == "jaxfl: None of 1000 draws fits partition 2.\n"


def test_runs_that_were_removed_are_trained_again(options, tmp_path, capsys):
    """Also if no run is left beside the tables."""
    again = [*options, "--rounds", "2", "--run-dir", str(tmp_path / "run")]
    cli.main(["compare", "local", *again])
    shutil.rmtree(tmp_path / "run" / "local")
    cli.main(["compare", "local", *again])
    assert result(tmp_path / "run", "local", 0)["rounds"] == 2


def test_a_damaged_run_does_not_end_the_comparison(options, tmp_path, capsys):
    """It is named, and the table has the others; so is one that another part has left."""
    again = ["compare", "local", "fedper", *options, "--rounds", "2", "--run-dir", str(tmp_path / "run")]
    cli.main(again)
    (tmp_path / "run" / "local" / "seed-0" / "result.json").write_text("{")
    with pytest.raises(SystemExit):
        cli.main(again)
    said = capsys.readouterr()
    assert said.err.startswith("jaxfl: 1 of 2 runs have not finished: local: ") and "is damaged" in said.err
    assert "Left out: local: " in said.out
    cli.main([*again, "--part", "2/2"])
    assert "Not finished, left to other parts: 1 of 2 runs." in capsys.readouterr().out


def test_a_part_leaves_runs_of_fewer_rounds_to_the_others(options, tmp_path, capsys):
    """They are in no table until their own part has made them longer."""
    compared = ["compare", "local", "fedper", *options, "--run-dir", str(tmp_path / "run"), "--rounds"]
    cli.main([*compared, "2"])
    capsys.readouterr()
    cli.main([*compared, "4", "--part", "1/2"])
    said = capsys.readouterr().out
    assert (
        "Not finished, left to other parts: 1 of 2 runs." in said
        and "fedper" not in said.rpartition("method")[2]
    )
    cli.main([*compared, "4", "--part", "2/2"])
    assert len((tmp_path / "run" / "table.csv").read_text().splitlines()) == 3


def test_tables_of_a_comparison_stay_at_the_round_that_validation_rows_chose(options, tmp_path):
    """Of the comparison that was made and of the one that is opened, with differences and without."""
    chosen = {"validation_fraction": 0.3, "select": "validation", "run_dir": tmp_path / "run", "quiet": True}
    own = {"dataset": options[1], "partition": "iid", "clients": 3, "models": "mlp,hidden=3", "lr": 0.6}
    length = {"rounds": 6, "eval_every": 1, "epochs": 1}
    made = jaxfl.compare("local", "fedper", against="local", **chosen, **own, **length)
    opened = jaxfl.load(made.folder)
    for table in made.table, opened.table, made.against("local"), opened.against("local"):
        assert SELECTED in table.notes
        assert [cells[0] for _, cells in table.rows] == [cells[0] for _, cells in made.table.rows]
    assert made.against("local").rows == made.table.rows


def test_the_next_programs_are_compiled_while_runs_train(options, tmp_path, monkeypatch):
    begun, compile_ahead = [], execute._compile

    def spied(runs, *rest):
        begun.extend(folder.parent.name for folder in runs)
        compile_ahead(runs, *rest)

    monkeypatch.setattr(execute, "_compile", spied)
    for words, folder in (["compare", "local", "fedper"], "both"), (["run", "fedper"], "alone"):
        variant._kept_programs.cache_clear()
        cli.main([*words, *options, "--run-dir", str(tmp_path / folder)])
    assert begun == ["fedper"]
    ahead, alone = (store.read_finished(tmp_path / folder)[0] for folder in ("both/fedper/seed-0", "alone"))
    assert ahead["compilations"] == alone["compilations"] > 0
    assert ahead["accuracy"] == alone["accuracy"]
