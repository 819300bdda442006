"""Scores besides the mean accuracy of clients, and newcomers, who join after training."""

import csv
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long, tiny_models, tiny_partition, tiny_source
from sklearn.metrics import (
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    precision_score,
    recall_score,
    roc_auc_score,
)

import jaxfl
from jaxfl.core.cohorts import draw_cohorts, draw_newcomers, these_clients
from jaxfl.core.score import Score
from jaxfl.data.federate import federate, set_apart
from jaxfl.errors import JaxflError
from jaxfl.fl import Method, Training, local_training, task_loss
from jaxfl.folder import store
from jaxfl.machine.clock import Device
from jaxfl.mechanisms.mixing import among
from jaxfl.mechanisms.sharing import Memory, sharing
from jaxfl.registry import METHODS
from jaxfl.results.clients import as_csv
from jaxfl.results.frame import Entry
from jaxfl.results.measures import SCORES
from jaxfl.results.notes import on_measures
from jaxfl.results.result import result as summarised
from jaxfl.results.result import selected
from jaxfl.results.scores import accuracy, cohort_accuracy, success, teacher_accuracy
from jaxfl.tasks.class_rows import Rows, auc
from jaxfl.tasks.classes import CLASSES, Counts, balanced, macro_f1

SIZES = (7, 10)


def test_macro_f1_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    truth, taken_for = rng.integers(0, 4, 40), rng.integers(2, 6, 40)  # some classes are only predicted
    counts = [np.bincount(which, minlength=7) for which in (truth[truth == taken_for], truth, taken_for)]
    assert macro_f1(*(count[None] for count in counts)) == pytest.approx(
        f1_score(truth, taken_for, average="macro")
    )


def test_balanced_accuracy_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    truth, taken_for = np.array([0, 2, 3])[rng.integers(0, 3, 40)], rng.integers(2, 4, 40)
    right, rows = (np.bincount(which, minlength=7)[None] for which in (truth[truth == taken_for], truth))
    assert balanced(SimpleNamespace(right=right, rows=rows)) == pytest.approx(
        balanced_accuracy_score(truth, taken_for)
    )


def test_newcomers_are_drawn_from_every_architecture_and_are_in_no_cohort():
    newcomers = draw_newcomers(SIZES, 0.3, seed=4)
    assert [of_group.sum() for of_group in newcomers] == [2, 3]
    assert any((a != b).any() for a, b in zip(newcomers, draw_newcomers(SIZES, 0.3, seed=5), strict=True))
    cohorts = draw_cohorts(SIZES, 0.5, 40, 4, newcomers)
    for slots, of_group in zip(cohorts, newcomers, strict=True):
        assert set(np.unique(slots.index[slots.mask])) == set(np.flatnonzero(~of_group))
    assert (sum(slots.mask.sum(1) for slots in cohorts) == 6).all()  # half of twelve


def test_newcomers_are_in_no_mixture_before_they_join():
    """Neither pools beyond the cohort nor shares of all clients include newcomers before they join."""
    source = tiny_source()
    federation = federate(source, tiny_partition(source), tiny_models())
    apart = set_apart(federation, [np.array([False, True, False]), np.array([False, True])])
    cohort = these_clients(apart, [np.array([True, True, False]), np.array([True, False])], rounds=1)
    pool = dataclasses.replace(cohort, among_all=True)
    found = [slots.index[slots.mask].tolist() for slots in jax.device_get(among(apart, pool).groups)]
    assert found == [[0, 2], [0]]
    assert rows_per_class(apart) == rows_per_class(federation)
    assert apart.training_rows.tolist() == [12, 1]
    shares = []
    memory = Memory(aggregate=lambda w, h, means, hyper: (shares.append(means.participation), (w, h))[1])
    config = METHODS["fedavg"].config(epochs=1)
    algorithm = sharing(config, memory=memory)
    state = algorithm.init(jax.random.key(0), apart, config)
    members = these_clients(apart, [np.array([True, False, True]), np.array([True, False])], rounds=1)
    joining = these_clients(apart, list(apart.newcomers), rounds=1)
    for whose in (members, joining):
        algorithm.step(jax.random.key(1), state, apart, whose)
    found = [float(of_group) for of_group in shares]
    assert found == pytest.approx([1, 1, 1 / 3, 1 / 2])  # newcomers are clients once they join


def rows_per_class(federation):
    return federation.rows_per_class().tolist()


@pytest.fixture(scope="module")
def chosen(dataset):
    """Return the options of a run of four clients, two of them newcomers."""
    _, name = dataset
    return {
        "dataset": name,
        "partition": "classes,classes_per_client=3,samples_per_client=10",
        "labels": "independent",
        "clients": 4,
        "models": ["mlp,hidden=3", "mlp,hidden=4"],
        "rounds": 4,
        "eval_every": 2,
        "epochs": 1,
        "devices": 1,
        "newcomers": 0.5,
        "schedule": "step,every=3",
        "quiet": True,
    }


@pytest.mark.parametrize(("method", "state"), [("fedper", "device"), long("fedavg", "host")])
def test_scores_of_rows_are_those_of_scikit_learn(chosen, tmp_path, method, state):
    """They are of the deployed models and their clients' own rows, without newcomers."""
    show = [
        "balanced",
        "auc",
        "precision",
        "recall",
        "loss",
        "validation-loss",
        "ece",
        "confusion",
        "lowest",
        "per-class",
    ]
    more = {"validation_fraction": 0.3, "client_state": state, "show": show, "run_dir": tmp_path / "run"}
    run = jaxfl.run(method, **chosen | more)
    new, expected, confusion = (
        run.result["newcomers"]["clients"],
        {metric.name: [] for metric in CLASSES.metrics if not metric.recorded},
        0,
    )
    for client in range(4):
        if client in new:
            continue
        rows, checked = run.partition.test[client], run.partition.validation[client]
        truth, classes = run.source.labels[rows], run.source.classes
        likely = run.models[client].probabilities(run.source.images[rows]).astype(float)
        taken_for = run.models[client].predict(run.source.images[rows])
        own = np.unique(truth)
        known = likely[:, own] / likely[:, own].sum(1, keepdims=True)
        binary = {"y_score": known[:, 1]} if len(own) == 2 else {"y_score": known, "multi_class": "ovr"}
        expected["auc"].append(roc_auc_score(truth, **binary))
        expected["balanced"].append(recall_score(truth, taken_for, labels=own, average="macro"))
        expected["precision"].append(precision_score(truth, taken_for, average="macro", zero_division=0))
        expected["recall"].append(recall_score(truth, taken_for, average="macro", zero_division=0))
        expected["loss"].append(-np.log(likely[np.arange(len(rows)), truth]).mean())
        expected["ece"].append(calibration_error(likely.max(1), taken_for == truth))
        of_checked = run.models[client].probabilities(run.source.images[checked]).astype(float)
        truths = run.source.labels[checked]
        expected["validation-loss"].append(-np.log(of_checked[np.arange(len(checked)), truths]).mean())
        confusion = confusion + confusion_matrix(truth, taken_for, labels=[*range(classes), -1])[:-1]
    accuracy = run.result["accuracy"]
    assert accuracy["scores"].keys() == expected.keys()
    for name, found in accuracy["scores"].items():
        assert [found["per_client"][client] for client in new] == [None] * 2
        assert [v for v in found["per_client"] if v is not None] == pytest.approx(expected[name], rel=1e-5)
        assert found["mean"] == pytest.approx(np.mean(expected[name]), rel=1e-5)
    assert accuracy["confusion"] == confusion.tolist()
    written = np.loadtxt(
        run.folder / "confusion.csv", delimiter=",", skiprows=1, usecols=range(2, classes + 3)
    )
    assert (written == confusion).all()

    last, table = run.frame().iloc[-1], jaxfl.report(run.folder, out=tmp_path / "out", show=show)
    (_, cells), scores = table.rows[0], {name: score["mean"] for name, score in accuracy["scores"].items()}
    shown = dict(zip(table.titles, (cell.mean for cell in cells), strict=True))
    assert shown["AUC %"] == pytest.approx(100 * scores["auc"]) and shown["test loss"] == scores["loss"]
    assert {name: last[f"scores/{name}"] for name in scores} == pytest.approx(scores)
    assert last["scores/lowest"] == pytest.approx(accuracy["lowest"])
    assert last["per-class/class 0"] == pytest.approx(accuracy["per_class"][0])
    assert run.frame().attrs["lr"] == run.config["options"]["lr"]
    assert {"confusion.csv", "confusion.png"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_the_auc_is_of_the_classes_that_a_client_has():
    truth, likely = np.array([0, 2, 2, 0]), np.array([0.5, 0.25, 0.25])[None] * np.arange(1, 5)[:, None] / 4
    rows = Rows(truth, np.log(likely), truth, likely.max(1))
    assert auc(rows) == np.mean([roc_auc_score(truth == c, likely[:, c]) for c in (0, 2)])
    assert np.isnan(auc(rows._replace(truth=np.zeros(4, int))))


def calibration_error(confidence, right):
    """Return the expected calibration error of rows (m,), bin by bin as the paper defines it."""
    error, ends = 0, np.linspace(0, 1, 16)
    for low, high in itertools.pairwise(ends):
        if (inside := (confidence > low) & (confidence <= high)).any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


def test_the_calibration_error_counts_outputs_without_a_class():
    """The client knows classes 2 and 0; its output 2 stands for none, and is chosen for some rows."""
    rng = np.random.default_rng(0)
    truth, likely = rng.choice([0, 2], 40), rng.dirichlet([0.3] * 3, 40)
    predicted = np.array([2, 0, -1])[likely.argmax(1)]
    rows = dict(
        test_rows=np.arange(40)[None],
        test_size=[40],
        validation_rows=np.zeros((1, 0), int),
        validation_size=[0],
    )
    group = SimpleNamespace(id=[0], relabel=[[1, -1, 0]], **rows)
    here = {"labels": truth, "counted": np.array([True]), "models": [SimpleNamespace(name="mlp")]}
    federation: Any = SimpleNamespace(groups=[group], task=CLASSES, **here)
    counts = [np.bincount(which, minlength=3)[None] for which in (truth[truth == predicted], truth, truth)]
    logs = [(np.log(likely)[None], np.zeros((1, 0, 3)))]
    found = accuracy([score_of(*counts)], federation, ["ece"], logs)
    assert (predicted < 0).any()
    expected = calibration_error(likely.max(1), predicted == truth)
    assert found["scores"]["ece"]["per_client"] == [pytest.approx(expected)]


def score_of(*counts):
    """Return the score of clients without validation rows."""
    nothing = np.zeros(len(counts[0]), int)
    return Score(Counts(*counts), Counts(*(np.zeros_like(of) for of in counts)), nothing, nothing)


@pytest.fixture(scope="module")
def run(chosen, tmp_path_factory):
    return jaxfl.run("fedper", run_dir=tmp_path_factory.mktemp("runs") / "fedper", **chosen)


def test_a_score_that_no_run_has_computed_is_a_dash_and_a_note(run, tmp_path):
    assert "scores" not in run.result["accuracy"]
    table = jaxfl.report(run.folder, out=tmp_path / "out", show=["auc", "confusion"])
    assert table.rows[0][1][1].text() == "-"
    note = "AUC %: no run has a value; runs that begin with --show auc do, where clients have rows for it."
    assert note in table.notes
    both = ({}, {"scores": {"auc": {"mean": 0.5}}})
    results: Any = [run.result | {"accuracy": run.result["accuracy"] | more} for more in both]
    frame = [
        Entry("fedper", (), (seed, 0), result, [], ([], 4), (0, 0), run.folder)
        for seed, result in enumerate(results)
    ]
    assert on_measures(frame, [SCORES["auc"]]) == ["AUC % is known of fedper in 1 of 2 runs."]


def test_scores_are_those_of_the_predictions(run):
    """Scores are those of FedPer's models, with untrained heads of newcomers and labels of each client."""
    accuracy, newcomers = run.result["accuracy"], run.result["newcomers"]
    new = newcomers["clients"]
    members = [client for client in range(4) if client not in new]
    assert len(new) == 2 and not set(new) & {c for record in run.metrics for c in record["clients"]}

    truth = {i: run.source.labels[run.partition.test[i]] for i in range(4)}
    answers = {i: run.models[i].predict(run.source.images[run.partition.test[i]]) for i in range(4)}
    alone = {i: (truth[i] == answers[i]).mean() for i in range(4)}
    of_members = [np.concatenate([of[i] for i in members]) for of in (truth, answers)]
    f1 = [f1_score(truth[i], answers[i], average="macro") for i in members]
    assert accuracy["per_client"] == [None if i in new else pytest.approx(alone[i]) for i in range(4)]
    assert accuracy["mean"] == pytest.approx(np.mean([alone[i] for i in members]))
    assert accuracy["lowest"] == pytest.approx(min(alone[i] for i in members))
    assert accuracy["macro_f1"] == pytest.approx(np.mean(f1))
    assert accuracy["pooled"] == pytest.approx((of_members[0] == of_members[1]).mean())
    classes = np.unique(of_members[0])
    recalls = recall_score(*of_members, labels=classes, average=None)
    assert [accuracy["per_class"][c] for c in classes] == pytest.approx(recalls)
    assert all(x is None for c, x in enumerate(accuracy["per_class"]) if c not in classes)

    assert newcomers["received"]["per_client"] == pytest.approx([alone[i] for i in new])
    assert newcomers["bytes_down"] > 0
    with (run.folder / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["newcomer"]) for row in rows] == [int(i in new) for i in range(4)]
    shown = [float(row["accuracy"]) for row in rows]
    assert [shown[i] for i in new] == newcomers["personal"]["per_client"]
    assert [shown[i] for i in members] == pytest.approx([alone[i] for i in members])
    assert sum(int(row["bytes_up"]) for row in rows) == run.result["bytes_up"]
    assert [int(row["rounds"]) for row in rows] == [0 if i in new else 4 for i in range(4)]


def test_newcomers_who_diverge_end_the_run(chosen, tmp_path):
    """Their predictions would count as class 0; the rounds of the others are written down."""

    def build(config):
        def objective(participant, blocks):
            plain = task_loss(participant.model, blocks)

            def overflowing(weights, batch, key):
                value, stats = plain(weights, batch, key)
                return value * jnp.where(participant.client.newcomer, jnp.inf, 1.0), stats

            return overflowing

        return sharing(config, train=local_training(config, objective=objective))

    method, alike = Method("overflowing", build, Training, "newcomers overflow"), {"models": "mlp,hidden=3"}
    with pytest.raises(JaxflError, match="the loss of client [0-9] is not finite in round 4; lower --lr"):
        jaxfl.run(method, run_dir=tmp_path, **chosen | alike)
    assert len(store.read_metrics(tmp_path)) == 4 and not store.holds(tmp_path, store.RESULT)


def test_the_table_of_clients_adds_up_their_rounds():
    """Client 3 answers in both rounds, the first time too late; client 4 has joined at the end."""
    source, (small, large) = tiny_source(), tiny_models()
    federation = federate(source, tiny_partition(source), (small, large))
    spent = [[(1, 3), (5, 7), (11, 13), (17, 19)], [(3, 0), (23, 29), (31, 37), (41, 43)]]
    names = ("clients", "client_bytes_up", "client_bytes_down", "client_flops")
    records: list[dict[str, Any]] = [dict(zip(names, of_round, strict=True)) for of_round in spent]
    records[0]["lost"] = [3]
    records[1] |= {
        "accuracy": {
            "per_client": [0.1, 0.2, 0.3, 0.4, None],
            "macro_f1_per_client": [0.5, 0.6, 0.7, 0.8, None],
        },
        "received": {"per_client": [0.11, 0.21, 0.31, 0.41, None]},
        "newcomers": {
            "clients": [4],
            "personal": {"per_client": [0.9]},
            "received": {"per_client": [0.91]},
        },
    }
    speeds = (
        Device(np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])),
        Device(np.array([7.0, 8.0]), np.array([9.0, 10.0])),
    )
    text = as_csv(records, federation, names=("a", "b", "c", "d", "e"), client_devices=speeds)
    rows = list(csv.DictReader(text.splitlines()))
    expected = dict(
        client="3 4",
        name="d e",
        architecture="cnn cnn",
        newcomer="0 1",
        train_rows="1 6",
        test_rows="17 16",
        accuracy="0.4 0.9",
        received="0.41 0.91",
        macro_f1="0.8 ",
        rounds="2 0",
        lost="1 0",
        bytes_up="30 0",
        bytes_down="44 0",
        flops="60 0",
        flops_per_s="7.0 8.0",
        bytes_per_s="9.0 10.0",
    )
    assert rows[0].keys() == expected.keys()
    assert [[row[column] for row in rows[3:]] for column in expected] == [
        cells.split(" ") for cells in expected.values()
    ]
    assert [row["bytes_up"] for row in rows[:3]] == ["29", "5", "0"]


@pytest.mark.long
def test_joining_leaves_the_run_as_it_is(chosen, tmp_path):
    """A run that has ended with newcomers goes on like one that was begun for more rounds."""
    short = jaxfl.run("local", run_dir=tmp_path / "short", **chosen)
    _, note = jaxfl.report(tmp_path / "short").notes
    assert note.startswith("local sends newcomers nothing")
    longer = jaxfl.resume(short.folder, rounds=6, quiet=True)
    whole = jaxfl.run("local", run_dir=tmp_path / "whole", **chosen | {"rounds": 6})
    assert longer.result["newcomers"] == whole.result["newcomers"]
    np.testing.assert_array_equal(longer.personal.per_client, whole.personal.per_client)
    joined = longer.result["newcomers"]
    assert joined["trained"] == joined["personal"]
    with pytest.raises(jaxfl.JaxflError, match="newcomers 0.2 selects no client: the largest .* has 2"):
        jaxfl.run("local", run_dir=tmp_path / "none", **chosen | {"newcomers": 0.2})
    assert not (tmp_path / "none").exists()


def test_numbers_over_clients_leave_out_newcomers():
    """Newcomers, the last client of each architecture, do not count; the worst tenth of twenty is two."""
    right, newcomer = np.arange(22).reshape(2, 11, 1), np.arange(11) == 10
    checked = np.where(np.arange(11) % 2, 4, 0) + 4 * newcomer  # half of the clients have no validation rows
    groups = [SimpleNamespace(id=np.arange(11) + 11 * g) for g in range(2)]
    models = [SimpleNamespace(name=name) for name in ("narrow", "wide")]
    counted = np.tile(~newcomer, 2)
    federation: Any = SimpleNamespace(groups=groups, models=models, counted=counted, task=CLASSES)
    rows = np.full((11, 1), 40)
    validation = Counts(np.where(newcomer, 1, 3 * (checked > 0))[:, None], *[checked[:, None]] * 2)
    scores = [Score(Counts(of_group, rows, rows), validation, checked, newcomer) for of_group in right]
    found, members = accuracy(scores, federation), right[:, :10, 0] / 40
    assert found["worst_tenth"] == pytest.approx(np.mean([0, 1]) / 40)
    assert found["std"] == pytest.approx(np.std(members))
    assert found["per_group"] == pytest.approx(dict(zip(("narrow", "wide"), members.mean(1), strict=True)))
    assert found["validation"] == pytest.approx(3 / 4)


def test_a_cohort_is_pooled_over_rows():
    right, rows = np.array([[1, 0], [3, 3]]), np.array([[1, 1], [4, 4]])
    scores, mask = [score_of(right, rows, rows)], [np.ones(2, bool)]
    assert cohort_accuracy(CLASSES, scores, mask) == pytest.approx(
        {"mean": (1 / 2 + 6 / 8) / 2, "pooled": 7 / 10}
    )


def test_teachers_are_compared_with_the_models_of_those_clients_that_have_one():
    """The second client has no teacher, the last one is absent."""
    rows = np.full((4, 1), 10)
    own, teacher = (
        [score_of(np.array(right)[:, None], rows, rows)._replace(finite=np.array([1, finite, 1, 1], bool))]
        for right, finite in (([4, 9, 5, 1], 1), ([7, 0, 6, 10], 0))
    )
    present = [np.array([1, 1, 1, 0], bool)]
    found = teacher_accuracy(CLASSES, teacher, own, present)
    assert found == {"teacher": pytest.approx({"mean": 0.65, "pooled": 0.65, "lead": 0.2})}
    assert teacher_accuracy(CLASSES, teacher, None, present)["teacher"].keys() == {"mean", "pooled"}
    assert teacher_accuracy(CLASSES, teacher, own, [np.array([0, 1, 0, 0], bool)]) == {}


def test_a_backdoor_succeeds_on_the_rows_that_there_are():
    """A client whose rows are all of the target has none to try, and is left out."""
    right, rows = np.array([[1, 0], [0, 0], [3, 0]]), np.array([[2, 0], [0, 0], [3, 1]])
    score = Score(Counts(right, rows, rows), None, None, None)
    everybody = SimpleNamespace(counted=np.ones(3, bool))
    assert success([score], everybody) == (0.5 + 0.75) / 2
    assert success([score], SimpleNamespace(counted=np.array([False, True, False]))) is None


def test_a_summary_is_of_the_last_ten_and_of_the_best():
    """In these metrics the best model by validation rows is not the best by test rows."""
    means, validations = np.arange(12) / 20, [0.1, 0.2, 0.9, *[0.3] * 9]
    spent = {"bytes_up": 1, "bytes_down": 2, "flops": 3.0, "simulated_seconds": 0.5, "lost": [3, 4]}
    metrics = [
        {
            "round": t + 1,
            "seconds": {"train": 1.0, "write": 0.5 * t},
            "accuracy": {"mean": means[t], "validation": validations[t]},
            "received": {"mean": t / 30},
            "cohort": {"received": {"pooled": t / 100}, "personal": {"pooled": 1.0}},
        }
        | spent
        for t in range(12)
    ]
    metrics[-1]["cohort"]["teacher"] = {"mean": 0.7, "lead": -0.1}  # the first round that has one
    config = {"label": "fedavg", "options": {"seed": 0, "rounds": 12}, "code": {"package": "", "files": {}}}
    config["data"] = {}
    found = summarised(config, metrics, 0)
    assert found["seconds"] == {"train": 12, "write": 33}
    assert (found["simulated_seconds"], found["lost_answers"], found["bytes_down"]) == (6, 24, 24)
    assert found["summary"] == pytest.approx(
        {
            "last": means[-1],
            "mean_last_10_evaluations": np.mean(means[2:]),
            "best_validation": means[2],
            "best_test": means[-1],
            "cohort_received_pooled_mean_last_10": np.mean(np.arange(2, 12) / 100),
        }
    )
    assert found["cohort"] == {
        "received": {"pooled": pytest.approx(0.065)},
        "personal": {"pooled": 1},
        "teacher": {"mean": 0.7, "lead": -0.1},
    }
    then = selected(found, metrics, "validation")
    assert (then["accuracy"], then["received"]) == (metrics[2]["accuracy"], {"mean": 2 / 30})
    assert {**then, "accuracy": found["accuracy"], "received": found["received"]} == found
    assert selected(found, metrics, "last") == found
    metrics[2]["attack_success"] = 0.25  # at the same evaluation
    assert selected({**found, "attack_success": 0.75}, metrics, "validation")["attack_success"] == 0.25
    metrics[0]["accuracy"]["validation"] = None
    with pytest.raises(JaxflError, match="^fedavg: clients have no validation rows to choose"):
        selected(found, metrics, "validation")
