"""The table of tasks: definitions are scikit-learn's, and every method trains for a task or refuses it."""

import dataclasses
import functools
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES as OUTPUTS
from conftest import cohort, long, tiny_links, tiny_models, tiny_partition, tiny_source, validating
from methods.cases import short
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    log_loss,
    mean_absolute_error,
    r2_score,
    root_mean_squared_error,
)

import jaxfl
from jaxfl import tasks
from jaxfl.core.job import traced
from jaxfl.core.score import likelihoods, score
from jaxfl.data.federate import federate
from jaxfl.errors import JaxflError
from jaxfl.folder.variant import choose, needs_of
from jaxfl.mechanisms import own_models
from jaxfl.models import zoo
from jaxfl.registry import METHODS
from jaxfl.results.measures import measure
from jaxfl.results.scores import accuracy
from jaxfl.runs.engine_job import fit_to_machine
from jaxfl.runs.promises import whole_round
from jaxfl.tasks import labels as of_labels
from jaxfl.tasks import regression as of_regression

EVERYONE = range(5)


def tiny(task: tasks.Task, **changed):
    """Return the tiny clients with labels of another task; their networks have as many outputs."""
    source, rng = tiny_source(), np.random.default_rng(1)
    models = tiny_models()
    if task is tasks.NEXT_TOKEN:
        tokens = rng.integers(0, OUTPUTS, (60, 6))
        ends = rng.integers(2, 7, 60)
        tokens = np.where(np.arange(6) < ends[:, None], tokens, -1).astype(np.int32)
        labels, _ = task.read("tiny", None, tokens, OUTPUTS)
        source = source._replace(images=tokens, vocabulary=OUTPUTS)
        of_tokens = dict(shape=(6,), classes=OUTPUTS, vocabulary=OUTPUTS, every_token=True)
        gru = zoo.build("gru,embedding=4,hidden=5", **of_tokens)
        models = (gru, 3), (zoo.build("transformer,width=0.0625,heads=2,depth=1", **of_tokens), 2)
    elif task is tasks.LABELS:
        labels = rng.random((60, OUTPUTS)) < 0.4
    else:
        labels = rng.normal(50, 9, (60, OUTPUTS)).astype(np.float32)
    models = [(dataclasses.replace(model, task=task), n) for model, n in models]
    source = source._replace(labels=labels)
    return source, federate(source, validating(tiny_partition(source)), models, links=tiny_links())


def outputs_of(predictors, federation, partition):
    """Return the outputs of each client's model on its test rows."""

    @functools.partial(jax.jit, static_argnums=0)
    def of_all(model, w):
        images = federation.inputs(np.arange(60))
        return jax.vmap(lambda w: model.apply(w.params, w.stats, images, train=False)[0])(w)

    said = [of_all(model, p.stacked) for model, p in zip(federation.models, predictors, strict=True)]
    of_clients = itertools.chain(*(np.asarray(of_group, float) for of_group in said))
    return [outputs[rows] for outputs, rows in zip(of_clients, partition.test, strict=True)]


def scored(federation, *show):
    """Return initial models of all clients, and their scores."""
    present = cohort(federation, EVERYONE)

    @jax.jit
    def begun(key):
        predictors = own_models.predictors(own_models.start(key, federation))
        likely = likelihoods(predictors, key, federation, present) if show else ()
        return predictors, score(predictors, key, federation, present), likely

    predictors, scores, likely = jax.device_get(begun(jax.random.key(0)))
    return predictors, accuracy(scores, federation, show, likely)


def test_scores_of_a_regression_are_those_of_scikit_learn():
    """The last client's targets do not differ, and it has a single test row; targets have different units."""
    source, federation = tiny(tasks.REGRESSION)
    source = source._replace(labels=source.labels * np.float32([1, 100, 1e-27]))
    partition = tiny_partition(source)
    partition = partition._replace(test=(*partition.test[:4], partition.test[4][:1]))
    models = [(group.model, len(group.id)) for group in federation.groups]
    federation = federate(source, partition, models)
    predictors, found = scored(federation)

    truth = [source.labels[rows] for rows in partition.test]
    trained = source.labels[np.concatenate(partition.train)].astype(float)
    said = [out * trained.std(0) + trained.mean(0) for out in outputs_of(predictors, federation, partition)]
    rmse = [*map(root_mean_squared_error, truth, said)]
    assert found["task"] == "regression"
    assert found["per_client"] == pytest.approx(rmse, rel=1e-4)
    assert found["mean"] == pytest.approx(np.mean(rmse), rel=1e-4)
    assert found["std"] == pytest.approx(np.std(rmse), rel=1e-3)
    assert found["worst"] == found["worst_tenth"] == pytest.approx(max(rmse), rel=1e-4)
    everything = np.concatenate(truth), np.concatenate(said)
    assert found["pooled"] == pytest.approx(root_mean_squared_error(*everything), rel=1e-4)
    assert found["mae"] == pytest.approx(np.mean([*map(mean_absolute_error, truth, said)]), rel=1e-4)
    r2 = [r2_score(a, b) for a, b in zip(truth[:4], said[:4], strict=True)]
    assert found["r2_per_client"] == [*(pytest.approx(one, rel=1e-3) for one in r2), None]
    assert found["r2"] == pytest.approx(np.mean(r2), rel=1e-3)
    assert found["validation"] is None
    assert "per_class" not in found


def test_scores_of_labels_are_those_of_scikit_learn():
    source, federation = tiny(tasks.LABELS)
    partition = validating(tiny_partition(source))
    predictors, found = scored(federation, "average-precision")
    truth = [source.labels[rows] for rows in partition.test]
    outputs = outputs_of(predictors, federation, partition)
    said = [of_client > 0 for of_client in outputs]
    micro = [f1_score(*both, average="micro") for both in zip(truth, said, strict=True)]
    macro = [f1_score(*both, average="macro", zero_division=np.nan) for both in zip(truth, said, strict=True)]
    assert 0 < min(micro) < max(micro) and found["per_client"] == pytest.approx(micro)
    assert found["macro_f1_per_client"] == pytest.approx(macro)

    def precise(has, says):
        """Return the mean, over rows that have a label, of the share of those before them that do."""
        has = has[np.argsort(-says)]
        return (np.cumsum(has) / np.arange(1, len(has) + 1))[has].mean()

    each = [np.mean([*map(precise, has.T, says.T)]) for has, says in zip(truth, outputs, strict=True)]
    assert found["scores"]["average-precision"]["per_client"] == pytest.approx(each)
    none = np.zeros((2, 1), bool), np.zeros((2, 1))
    assert np.isnan(of_labels.average_precision(none))
    assert found["macro_f1"] == pytest.approx(np.mean(macro))
    everything = np.concatenate(truth), np.concatenate(said)
    assert found["pooled"] == pytest.approx(f1_score(*everything, average="micro"))
    assert found["per_class"] == pytest.approx(f1_score(*everything, average=None))
    first = [f1_score(t[:6], s[:6], average="micro") for t, s in zip(truth, said, strict=True)]
    assert found["validation"] == pytest.approx(np.mean(first))
    y, last = source.labels[:9], np.random.default_rng(0).normal(size=(9, OUTPUTS)).astype(np.float32)
    losses = [log_loss(y.T[k], jax.nn.sigmoid(last[:, k]), labels=[0, 1]) for k in range(OUTPUTS)]
    assert tasks.LABELS.losses(last, jnp.array(y)).mean() == pytest.approx(np.mean(losses), rel=1e-5)
    away = tasks.LABELS.apart(last, tasks.LABELS.soft(last), 2.0)
    np.testing.assert_allclose(tasks.LABELS.apart(last, tasks.LABELS.soft(last, 2.0), 2.0), 0, atol=1e-6)
    assert (np.array(away) > 0).all()


def test_scores_of_next_tokens_are_those_of_scikit_learn():
    """Only places that a token follows count; the ends of rows do not."""
    source, federation = tiny(tasks.NEXT_TOKEN)
    partition = tiny_partition(source)
    predictors, found = scored(federation)
    following = [source.images[rows][:, 1:] for rows in partition.test]
    truth = [tokens[tokens >= 0] for tokens in following]
    said = []
    for rows, outputs in zip(partition.test, outputs_of(predictors, federation, partition), strict=True):
        ends = (source.images[rows] >= 0).sum(1)
        said.append(np.concatenate([out[: end - 1] for out, end in zip(outputs, ends, strict=True)]))
        assert all((out[end:] == 0).all() for out, end in zip(outputs, ends, strict=True))

    def perplexity(t, z):
        return np.exp(log_loss(t, np.asarray(jax.nn.softmax(z)), labels=range(OUTPUTS)))

    assert found["per_client"] == pytest.approx([*map(perplexity, truth, said)], rel=1e-5)
    assert found["pooled"] == pytest.approx(perplexity(*map(np.concatenate, (truth, said))), rel=1e-5)
    right = [accuracy_score(t, z.argmax(1)) for t, z in zip(truth, said, strict=True)]
    assert found["token_accuracy_per_client"] == pytest.approx(right)
    assert found["token_accuracy"] == pytest.approx(np.mean(right))
    assert found["worst"] == max(found["per_client"])
    y, outputs = source.labels[:4], np.random.default_rng(0).normal(size=(4, 6, OUTPUTS)).astype(np.float32)
    likely = np.asarray(jax.nn.softmax(outputs))
    of_rows = [log_loss(t[t >= 0], p[t >= 0], labels=range(OUTPUTS)) for t, p in zip(y, likely, strict=True)]
    np.testing.assert_allclose(tasks.NEXT_TOKEN.losses(outputs, y), of_rows, rtol=1e-5)


@pytest.mark.parametrize(("error", "expected"), [(0.0, 1.0), (1.0, 0.0)])
def test_r2_of_targets_that_do_not_differ_is_that_of_scikit_learn(error, expected):
    truth, said = np.full(4, 3.0), np.full(4, 3.0 + error)
    sums = SimpleNamespace(squared=np.array([[4 * error**2]]), spread=np.zeros((1, 1)), rows=np.array([4]))
    assert of_regression.r2(sums) == r2_score(truth, said) == expected


@pytest.mark.parametrize("value", [3.7, 0.1, 5.00001])
def test_targets_that_do_not_differ_have_no_spread_beside_rounding(value):
    """Standardised as on a run; the mean of equal floats is rarely that float."""
    labels = np.full((1, 7, 1), (value - 2.1) / 0.3, np.float32)
    real, std = np.arange(9)[None] < 7, np.float32([0.3])
    padded = np.concatenate([labels, np.ones((1, 2, 1), np.float32)], 1)
    sums = jax.jit(of_regression._sum_errors)(padded, None, std, padded + np.float32(0.1), real)
    assert sums.spread == 0 and of_regression.r2(jax.device_get(sums)) == 0
    assert of_regression._explained(padded[0] + np.float32(0.1), padded[0], np.int32(7)) == 0


@pytest.mark.parametrize(
    ("task", "labels", "sentence"),
    [
        (tasks.REGRESSION, np.float32([[1, 10], [3, 10]]), "mean 2, 10 and deviation 1, 0, the RMSE of"),
        (tasks.LABELS, np.array([[1, 0], [1, 1]], bool), "Rows have 1.5 labels .* a micro F1 of 85.7 %"),
        (tasks.NEXT_TOKEN, np.int32([[0, 0, 2, -1], [2, 0, -1, -1], [2, -1, -1, -1]]), "a perplexity of 2."),
    ],
)
def test_chance_is_the_score_of_what_needs_no_network(task, labels, sentence):
    assert re.search(sentence, task.chance(labels))


def test_predictions_of_a_regression_are_compared_by_their_squared_distance():
    outputs, y = np.array([[1.0, 2.0], [0.0, -1.0]]), np.array([[0.0, 2.0], [3.0, -1.0]])
    assert tasks.REGRESSION.losses(outputs, y).tolist() == [0.5, 4.5]
    soft = tasks.REGRESSION.soft(y, 7.0)
    assert tasks.REGRESSION.apart(outputs, soft, 7.0).tolist() == [0.5, 4.5]
    quality = tasks.REGRESSION.quality(jnp.array(outputs), jnp.array(y), jnp.int32(2))
    assert quality == pytest.approx(r2_score(y, outputs))
    assert tasks.REGRESSION.quality(jnp.array(outputs), jnp.array(y), jnp.int32(0)) == 0


def test_predictions_of_classes_are_compared_by_the_divergence_of_softened_ones():
    outputs, other = np.array([[1.0, 2.0]]), np.array([[3.0, 0.0]])
    p, q = (np.exp(z / 2) / np.exp(z / 2).sum() for z in (other[0], outputs[0]))
    soft = tasks.CLASSES.soft(other, 2.0)
    assert soft[0].tolist() == pytest.approx(p)
    assert tasks.CLASSES.apart(outputs, soft, 2.0).tolist() == pytest.approx([(p * np.log(p / q)).sum()])


OFTEN = ("fedavg", "fedmd", "fedproto", "hermes", "pfedhr")  # one of each mechanism, also one that refuses
OF_TOKENS = "gru takes tokens|gru has neither convolutions nor hidden dense|of gru is not a kernel"
NOT_CLASSES = [task for task in tasks.TASKS.values() if task is not tasks.CLASSES]


@pytest.mark.parametrize("task", NOT_CLASSES, ids=lambda task: task.name)
@pytest.mark.parametrize(
    "name",
    [short(name) if name in OFTEN else long(short(name)) for name in METHODS]
    + [long("mnfl,matrix_loss=mse"), long("fedmd,signal=logit")],
)
def test_every_method_learns_a_task_or_refuses_it(name, task):
    """A method that refuses says so in one sentence before anything is compiled; all others train."""
    source, federation = tiny(task)
    variant = choose(name, {"epochs": 1, "batch_size": 3})
    if "classes" in needs_of(variant):
        with pytest.raises(JaxflError, match=f"needs classes, but the labels are for {task.name}"):
            fit_to_machine(variant, SimpleNamespace(machine=None), SimpleNamespace(source=source))
        return
    algorithm, key, everyone = variant.algorithm, jax.random.key(0), cohort(federation, EVERYONE)
    try:
        state = algorithm.init(key, federation, traced(variant.config))
        found = jax.jit(whole_round(algorithm))(key, state, federation, everyone)
    except JaxflError as error:  # because of what networks for tokens are made of
        assert task is tasks.NEXT_TOKEN and re.search(OF_TOKENS, str(error))
        return
    state = found.state
    if algorithm.host:
        state, _ = algorithm.host(key, state, federation, everyone)
    for loss, outputs, model in zip(found.info.loss, found.personal, federation.models, strict=True):
        assert np.isfinite(loss).all() and np.isfinite(outputs).all()
        assert outputs.shape[2:] == model.output
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(jax.device_get(state)))


def write(path, labels):
    """Write the tiny images with other labels, and return the path as a name."""
    source = tiny_source()
    np.savez(path, images=source.images, labels=labels, split=source.train)
    return str(path)


def test_a_regression_is_kept_reported_and_exported(tmp_path, monkeypatch):
    """The least error is the best: of methods, of evaluations, and of what reaches a target."""
    rng, means = np.random.default_rng(0), tiny_source().images.mean((1, 2, 3), dtype=float)
    name = write(tmp_path / "tiny.npz", np.stack([7 * means, rng.normal(size=60)], 1))
    options = dict(dataset=name, partition="iid", clients=3, models=["mlp,hidden=4"])
    options |= dict(rounds=4, eval_every=1, devices=1)
    options |= dict(validation_fraction=0.3, target=[300.0], keep_checkpoints=4, quiet=True)
    for method in ("fedavg", "local"):
        jaxfl.run(method, run_dir=str(tmp_path / method), **options)
    run = jaxfl.load(tmp_path / "fedavg")
    for model, rows, found in zip(run.models, run.partition.test, run.personal.per_client[-1], strict=True):
        said, truth = model.predict(run.source.images[rows]), run.source.labels[rows]
        assert root_mean_squared_error(truth, said) == pytest.approx(found, rel=1e-4) == model.accuracy
    reached = np.flatnonzero(run.personal.mean <= 300)[0] + 1
    assert run.result["targets"]["300.0"]["round"] == reached
    validated = [record["accuracy"]["validation"] for record in run.metrics]
    assert jaxfl.load(run.folder, round="best").models.opened.record["round"] == np.argmin(validated) + 1
    assert run.result["summary"]["best_test"] == run.personal.mean.min()
    assert (
        (run.folder / "clients.csv")
        .read_text()
        .startswith("client,architecture,newcomer,train_rows,test_rows,rmse")
    )

    table = jaxfl.report(run.folder, tmp_path / "local", out=tmp_path / "out", show=["mae", "worst", "auc"])
    assert table.titles[:4] == ["RMSE", "MAE", "worst client", "AUC %"]
    ends = [cells[0].mean for _, cells in table.rows]
    assert table.best == [(int(np.argmin(ends)), 0)]
    assert any("AUC %: it is no score of regression" in note for note in table.notes)
    assert measure("lowest", task=tasks.TASKS["regression"]).missing == "it is no score of regression"

    *_, card = run.export(tmp_path / "one", clients=[1])
    assert (
        "pipeline_tag: image-regression" in card.read_text() and "their RMSE on their own" in card.read_text()
    )
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path / "one")
    names = {"images": run.source.images[:9]}
    exec(code, names)
    np.testing.assert_allclose(names["targets"], run.models[1].predict(run.source.images[:9]), rtol=1e-4)


@pytest.mark.parametrize(
    ("labels", "options", "sentence"),
    [
        (
            np.arange(60.0),
            {},
            "labels are float64, but all of them whole: write --task regression for numbers, or",
        ),
        (
            np.r_[np.nan, np.ones(59)],
            {},
            "1 of 60 rows have NaN or an infinite value .* as their label; leave",
        ),
        (np.arange(60) / 7, {"task": "classes"}, "labels are float64, but --task classes numbers them"),
        (
            np.array(["a", "b"] * 30),
            {"task": "regression"},
            "labels are <U1, but --task regression takes numbers",
        ),
        (np.zeros(60, int), {}, "all rows are of one class, so there is nothing to learn"),
        (
            np.eye(3, dtype=int)[np.arange(60) % 3],
            {},
            "each row of labels .* has a single 1: make",
        ),
        (np.arange(60), {"task": "labels"}, r"labels have shape \(60,\), but --task labels takes \(60, k\)"),
        (
            np.full((60, 2), 2),
            {"task": "labels"},
            "takes a 0 or 1 for each label, but there are oth",
        ),
        (
            np.arange(60),
            {"task": "next-token"},
            "next-token takes tokens, but the data are of shape",
        ),
        (np.ones((60, 2, 2)) / 7, {}, r"labels have shape \(60, 2, 2\), not \(60,\) or \(60, targets\)"),
        (
            np.arange(60) / 7,
            {"labels": "permuted"},
            "--labels permuted needs classes, but the labels are for regre",
        ),
        (1e9 + np.arange(60) / 7, {}, "as float32 targets lose up to 8.*subtract a number from all"),
        (np.arange(60) / 7, {"target": [-3.0]}, "--target takes a RMSE above 0, but one is -3"),
        (
            np.arange(60) / 7,
            {"method": "fedproto"},
            "fedproto needs classes, but the labels are for regression",
        ),
    ],
)
def test_what_is_no_task_is_refused(labels, options, sentence, tmp_path):
    options = {"method": "fedavg", "clients": 3, "run_dir": str(tmp_path / "run"), "quiet": True} | options
    with pytest.raises(JaxflError, match=sentence):
        jaxfl.run(options.pop("method"), dataset=write(tmp_path / "tiny.npz", labels), **options)


def test_partitions_by_class_divide_a_regression_by_tenths():
    labels = np.random.default_rng(0).permutation(200).astype(np.float32)[:, None] + 0.5
    assert (tasks.strata(labels) == labels[:, 0] // 20).all()
    ties = np.float32([0, 0, 0, 0, 1, 1, 2, 2, 2, 2])[:, None]
    assert tasks.strata(ties).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]


def test_studies_show_the_scores_of_their_task():
    shown = measure("accuracy", None, tasks.REGRESSION)
    assert (shown.title, shown.better) == ("RMSE, mean over clients", min)
    assert shown.value({"accuracy": {"mean": 3.5}}) == 3.5
    assert measure("rounds-to-target", 300.0, tasks.REGRESSION).title == "rounds to RMSE 300"
    assert measure("accuracy").value({"accuracy": {"mean": 0.5}}) == 50
