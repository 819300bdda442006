"""Costs of a run until it first reaches an accuracy, and runs that stop there."""

import json
import shutil

import pytest
from conftest import comparable
from folders import copied_before_checkpoints, metrics

import jaxfl
from jaxfl import cli
from jaxfl.errors import JaxflError
from jaxfl.folder import checkpoint, store
from jaxfl.folder.config import experiment
from jaxfl.results.target import by_target, stops

ROUNDS = 8
FEDERATION = (
    "--partition classes,classes_per_client=3,samples_per_client=10 --clients 4 --models mlp,hidden=3 "
    f"mlp,hidden=4 --device-profile mlp,hidden=3=1e6:1e3 mlp,hidden=4=1e6:1e3 --rounds {ROUNDS} "
    "--eval-every 2 --lr 0.1 --epochs 1 --devices 1"
).split()
NOTHING = {"round": None, "bytes_up": None, "bytes_down": None, "flops": None, "simulated_seconds": None}


def record(number, mean=None, **more):
    """Return a round's metrics, with an accuracy if `mean` is given."""
    spent = {"bytes_up": 10 * number, "bytes_down": 1, "flops": 0.5}
    return {"round": number} | spent | ({} if mean is None else {"accuracy": {"mean": mean}}) | more


PLAIN = [record(1), record(2, 0.5), record(3), record(4, 0.7 - 1e-12), record(5), record(6, 0.6)]
TIMED = [record(1, 0.1, simulated_seconds=2.0), record(2, 0.3, simulated_seconds=3.0)]


@pytest.mark.parametrize(
    ("metrics", "target", "expected"),
    [
        (PLAIN, 0.4, {"round": 2, "bytes_up": 30, "bytes_down": 2, "flops": 1.0}),
        (PLAIN, 0.5, {"round": 2, "bytes_up": 30, "bytes_down": 2, "flops": 1.0}),
        (PLAIN, 0.7, {"round": 4, "bytes_up": 100, "bytes_down": 4, "flops": 2.0}),  # up to rounding
        (PLAIN, 0.71, {}),
        (TIMED, 0.2, {"round": 2, "bytes_up": 30, "bytes_down": 2, "flops": 1.0, "simulated_seconds": 5.0}),
        ([], 0.2, {}),
    ],
)
def test_costs_count_up_to_the_first_evaluation_that_reaches_a_target(metrics, target, expected):
    assert by_target(metrics, [target]) == {str(target): NOTHING | expected}
    assert bool(stops({"options": {"stop_at_target": True, "target": [target]}}, metrics)) == bool(expected)


@pytest.mark.parametrize(
    ("losses", "validations", "worse"),
    [  # losses of every round, validation accuracies of every second one
        ([9, 8, 7, 6], [0.5, 0.4], 1),
        ([9, 8, 7, 6, 5, 4], [0.5, 0.5, 0.5], 2),  # equally good is not better
        ([9, 8, 7, 6, 5, 4], [0.5, 0.4, 0.6], 0),
        ([3, 3, 2, None, 1, 4], [None] * 3, 1),  # means 3, 2 and 2.5
        ([None, None, 2, 1], [None] * 2, 0),
        ([], [], 0),
    ],
)
def test_patience_counts_the_evaluations_since_the_best_one(losses, validations, worse):
    rounds = [{"round": i, "loss": loss} for i, loss in enumerate(losses, 1)]
    for of_round, validation in zip(rounds[1::2], validations, strict=True):
        of_round["accuracy"] = {"validation": validation}
    for patience in (1, 2, 3):
        stopped = stops({"options": {"patience": patience}}, rounds)
        assert bool(stopped) == (worse >= patience)
        assert f"the last {worse} evaluations" in stopped or not stopped
    assert not stops({"options": {"patience": 1}, "beyond_target": True}, rounds)


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """Return a run of all rounds, two targets that it reaches before its end, and the later one's round."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    cli.main(["run", "fedper", *dataset, *FEDERATION, "--run-dir", str(folder)])
    means = [record["accuracy"]["mean"] for record in store.read_metrics(folder) if "accuracy" in record]
    first, later = means[0], max(means[:-1])
    assert first < later, means
    return folder, (first, later), 2 * means.index(later) + 2


@pytest.fixture(scope="module")
def stopped(dataset, whole, tmp_path_factory):
    """Return a folder of the same run, asked to stop, and of its copies just before each checkpoint."""
    _, targets, _ = whole
    folder = tmp_path_factory.mktemp("stopped")
    asked = ["--target", *map(str, targets), "--stop-at-target", "--run-dir", str(folder / "run")]
    with copied_before_checkpoints(lambda _, rounds: folder / str(rounds)):
        cli.main(["run", "fedper", *dataset, *FEDERATION, *asked])
    return folder


def result(folder):
    return comparable(json.loads((folder / "result.json").read_text()))


def test_a_run_stops_at_its_last_target(whole, stopped):
    full, targets, end = whole
    assert metrics(stopped / "run") == metrics(full)[:end]
    assert checkpoint.saved(stopped / "run")[-1] == end
    outcome = result(stopped / "run")
    assert (outcome["stopped"], outcome["rounds"]) == ("all targets were reached", end)
    assert result(full)["stopped"] is None
    first, later = (outcome["targets"][str(target)] for target in targets)
    assert (first["round"], later["round"]) == (2, end)
    assert (
        later["bytes_up"] == outcome["bytes_up"]
        and later["simulated_seconds"] == outcome["simulated_seconds"]
    )


def test_a_run_that_was_killed_stops_at_the_same_round(stopped, tmp_path):
    end = result(stopped / "run")["rounds"]
    before_the_last = shutil.copytree(stopped / str(end), tmp_path / "killed")
    before_its_result = shutil.copytree(stopped / "run", tmp_path / "unfinished")
    (before_its_result / "result.json").unlink()
    for killed in (before_the_last, before_its_result):
        cli.main(["resume", str(killed)])
        assert metrics(killed) == metrics(stopped / "run")
        assert result(killed) == result(stopped / "run")


def test_a_run_can_be_lengthened_beyond_the_target(whole, stopped, tmp_path):
    full, _, end = whole
    longer = shutil.copytree(stopped / "run", tmp_path / "longer")
    assert jaxfl.resume(longer).result["rounds"] == jaxfl.resume(longer, rounds=end).result["rounds"] == end
    cli.main(["resume", str(longer), "--rounds", str(ROUNDS)])
    assert metrics(longer) == metrics(full)
    outcome = result(longer)
    assert outcome["stopped"] is None and outcome["targets"] == result(stopped / "run")["targets"]
    assert jaxfl.resume(longer).result["rounds"] == ROUNDS
    went_on, ended = (experiment(store.read_config(run)) for run in (longer, stopped / "run"))
    assert (went_on["stop_at_target"], ended["stop_at_target"]) == (False, True)  # not averaged as seeds


def test_a_report_takes_targets_that_runs_were_not_given(whole, stopped, tmp_path):
    full, (first, later), end = whole
    table = jaxfl.report(full, target=(later, 1.0), out=tmp_path / "report")
    assert "MB to 100 %" in table.titles
    ((_, cells),) = table.rows
    by_title = dict(zip(table.titles, (cell.text() for cell in cells), strict=True))
    assert (
        by_title[f"rounds to {100 * later:g} %"] == f"{end:.2f}" and by_title["simulated s to 100 %"] == "-"
    )
    assert len(jaxfl.report(full, stopped / "run", target=first, out=tmp_path / "report").rows) == 2


def test_a_run_with_targets_is_no_other_experiment_unless_it_stops_at_them(whole, stopped):
    full, ended = (store.read_config(run) for run in (whole[0], stopped / "run"))
    asked = full | {"options": full["options"] | {"target": ended["options"]["target"]}}
    assert experiment(asked) == experiment(full) != experiment(ended)


def test_each_run_of_a_program_stops_when_it_reaches_the_target(whole, dataset, tmp_path):
    _, targets, end = whole
    options = ["--target", str(targets[1]), "--stop-at-target", "--run-dir", str(tmp_path / "both")]
    cli.main(["compare", "fedper", *dataset, *FEDERATION, *options, "--seeds", "2"])
    one, other = (result(tmp_path / "both" / "fedper" / f"seed-{seed}") for seed in (0, 1))
    assert one["rounds"] == end and other["rounds"] == ROUNDS
    table = jaxfl.report(tmp_path / "both", target=targets[1])
    assert table.notes[0] == "Mean and sample standard deviation over 2 seeds."
    assert table.notes[2:] == (f"{100 * targets[1]:g} % is reached by fedper in 1 of 2 runs.",)
    with pytest.raises(JaxflError, match="may be ended by --patience or --stop-at-target, so no comparison"):
        jaxfl.resume(tmp_path / "both", rounds=ROUNDS + 1)
