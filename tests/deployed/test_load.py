"""A run opened from Python: its numbers as arrays, models that predict on raw images, and their export."""

import dataclasses
import json
import re
import shutil
import sys
import types
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, long, tiny_cnn, tiny_source
from safetensors import safe_open
from safetensors.numpy import load_file

import jaxfl
from jaxfl import Predictor, cli, registry
from jaxfl.data import pictures
from jaxfl.deployed import export
from jaxfl.deployed.client_model import Deployed, Images
from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.models.applied import applied_weights
from jaxfl.results import curves
from jaxfl.results.result import findings

WORDS = np.array(["$cat", "ant", "bee"])  # of the classes
OPTIONS = (
    "--partition classes,classes_per_client=2,samples_per_client=10 --labels independent --clients 4 "
    "--participation 0.5 --models mlp,hidden=3 mlp,hidden=4 --epochs 10 --rounds 4 --eval-every 2 "
    "--devices 1"
)


def begun(folder, method, *options):
    """Run a method on a data set in the folder; return the loaded run."""
    source = tiny_source()
    data = folder / "tiny.npz"
    np.savez(data, images=source.images, labels=WORDS[source.labels], split=source.train)
    words = [*OPTIONS.split(), "--dataset", str(data), "--run-dir", str(folder / "run"), *options]
    cli.main(["run", method, *words])
    return jaxfl.load(folder / "run")


def assert_as_scored(run, recorded=None):
    """Assert that every client's model has the accuracy recorded for this client, by default at the end."""
    recorded = run.personal.per_client[-1] if recorded is None else recorded
    for model, rows, share in zip(run.models, run.partition.test, recorded, strict=True):
        assert (model.predict(SOURCE.images[rows]) == SOURCE.labels[rows]).mean() == share == model.accuracy


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run of FedPer without its images; every client numbers its two classes itself."""
    run = begun(tmp_path_factory.mktemp("load"), "fedper")
    (run.folder.parent / "tiny.npz").unlink()
    return run


SOURCE = tiny_source()


def test_numbers_of_a_run_are_arrays(run):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for moment, key in ((run.personal, "accuracy"), (run.received, "received")):
        assert moment.rounds.tolist() == [2, 4]
        assert moment.mean.tolist() == [lines[1][key]["mean"], lines[3][key]["mean"]]
        assert moment.per_client.shape == (2, 4)
        np.testing.assert_allclose(moment.per_client.mean(1), moment.mean)
    assert run.loss.tolist() == [line["loss"] for line in lines]
    assert run.bytes_up.sum() == run.result["bytes_up"] and run.bytes_down.shape == (4,)
    spent = {part: spent.sum() for part, spent in run.seconds.items()}
    assert spent | {"rest": run.result["seconds"]["rest"]} == pytest.approx(run.result["seconds"])
    assert run.matrices == run.embeddings == run.findings == {}
    assert str(run.folder) in repr(run) and "4 of 4 rounds" in repr(run)
    assert [len(rows) for rows in run.partition.train] == [10] * 4


def test_numbers_of_a_run_are_frames(run, monkeypatch):
    frame, clients = run.frame(), run.client_frame()
    assert frame.index.tolist() == [1, 2, 3, 4] and frame["loss"].tolist() == run.loss.tolist()
    assert frame["accuracy/personal"].dropna().to_dict() == dict(zip([2, 4], run.personal.mean, strict=True))
    last = clients[clients["round"] == 4].set_index("client")
    assert last["personal"].tolist() == run.personal.per_client[-1].tolist()
    parts = run.partition.train, run.partition.test
    assert [last[f"{name}_rows"].tolist() for name in ("train", "test")] == [
        [*map(len, part)] for part in parts
    ]
    assert last["architecture"].tolist() == ["mlp,hidden=3"] * 2 + ["mlp,hidden=4"] * 2
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(JaxflError, match=re.escape("pip install '.[pandas]' in a clone")):
        run.frame()


def test_models_predict_what_was_scored(run):
    """Models take raw images, give labels of the data set and reach the run's accuracy, without the data."""
    assert len(run.models) == 4
    assert any((model.relabel != np.arange(CLASSES)).any() for model in run.models)
    assert_as_scored(run)
    for model in run.models:
        everything = model.predict(SOURCE.images)  # also images of the class that the client lacks
        (known,) = np.nonzero(model.relabel >= 0)
        assert len(known) == 2 and set(everything) <= set(known)
        likely = model.probabilities(SOURCE.images[..., 0])  # grey images without an axis of channels
        assert likely.shape == (60, CLASSES) and (likely.argmax(1) == everything).all()
        np.testing.assert_allclose(likely.sum(1), 1, rtol=1e-5)
        assert (likely[:, model.relabel < 0] == 0).all()
        alone, together = model.scores(SOURCE.images[7:8]), model.scores(SOURCE.images)
        np.testing.assert_allclose(alone, together[7:8], rtol=1e-5, atol=1e-6)
    assert run.models[-1].client == 3 and [model.client for model in run.models[1:3]] == [1, 2]
    assert len(run.models[0].predict(SOURCE.images[:0])) == 0


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (SOURCE.images / 255, "not divided by anything.*, but these are float64"),
        (SOURCE.images.astype(int), "but these are int64"),
        (SOURCE.images[0], re.escape("takes images (B, 8, 8, 1), but these are (8, 8, 1)")),
        (SOURCE.images[:, :4], re.escape("these are (60, 4, 8, 1)")),
    ],
)
def test_images_that_are_refused(run, images, sentence):
    with pytest.raises(JaxflError, match=sentence):
        run.models[0].predict(images)


def test_vectors_of_integers_are_accepted_and_called_vectors(run):
    moments = np.zeros((1, 1, 1, 3), np.float32)
    model = dataclasses.replace(
        run.models[0], images=Images((1, 1, 3), np.dtype(np.float32), moments, moments)
    )
    found = model._checked([[1, 2, 300]])
    assert found.shape == (1, 1, 1, 3) and found.dtype == np.float32 and found.max() == 300
    with pytest.raises(JaxflError, match=re.escape("takes vectors (B, 3), but these are (1, 1, 1, 2)")):
        model._checked([[1, 2]])


def test_the_card_names_files_without_their_folders():
    options = ["/a/b/x.npz", "net.py:part,file=/a/b.txt,other=/c/d.txt", "hf:/data/set,label=a/b", 3]
    assert export._bare(options) == ["x.npz", "net.py:part,file=b.txt,other=d.txt", "hf:set,label=a/b", 3]


def test_missing_clients_data_and_checkpoints_are_refused(run, tmp_path):
    with pytest.raises(JaxflError, match="There is no client 4; .* has clients 0 to 3"):
        run.models[4]
    with pytest.raises(JaxflError, match=re.escape("There is no file")):
        _ = run.source
    shutil.copytree(run.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(JaxflError, match="has no checkpoint yet"):
        jaxfl.load(tmp_path / "run").models[0]


def test_models_of_any_evaluation_and_those_that_a_log_sees_are_as_scored(tmp_path, monkeypatch):
    """A log loads the models of its record: before a stop, after it, and of seeds that are one program."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def log(folder, record):
        if "accuracy" in record:
            assert_as_scored(jaxfl.load(folder, round=record["round"]), record["accuracy"]["per_client"])
            seen.append(record["round"])

    options = {"models": ["mlp,hidden=3", "mlp,hidden=4"], "clients": 4, "lr": 0.3, "epochs": 3, "rounds": 6}
    options |= {"devices": 1}
    options |= {"partition": "classes,classes_per_client=2,samples_per_client=10", "eval_every": 2}
    np.savez("tiny.npz", images=SOURCE.images, labels=SOURCE.labels, split=SOURCE.train)
    options |= {"dataset": "tiny.npz", "validation_fraction": 0.4, "run_dir": tmp_path / "runs"}
    made = jaxfl.compare("fedper", seeds=2, keep_checkpoints=2, log=log, quiet=True, **options)
    assert not made.failures
    assert seen == [2, 2, 4, 4, 6, 6]
    for (_, seed), run in made.runs.items():
        validated = [record["accuracy"]["validation"] for record in run.metrics if "accuracy" in record]
        best = [2, 4, 6][int(np.argmax(validated))]
        for number in (4, 6):
            at = jaxfl.load(run.folder, round=number)
            assert_as_scored(at, run.personal.per_client[number // 2 - 1])
        chosen = jaxfl.load(tmp_path / "runs", round="best").runs["fedper", seed]
        if best == 2:
            with pytest.raises(JaxflError, match=r"no checkpoint of round 2, only of 4, 6; .*--keep-check"):
                chosen.models[0]
        else:
            assert_as_scored(chosen, run.personal.per_client[best // 2 - 1])


@pytest.mark.parametrize("words", [("local", "--client-state", "host"), ("draftfed", "--labels", "unified")])
def test_models_of_host_state_or_public_images_need_no_data(tmp_path, words):
    run = begun(tmp_path, *words)
    (tmp_path / "tiny.npz").unlink()
    assert_as_scored(run)


def test_models_drawn_at_random_are_those_that_were_scored(tmp_path):
    """Models drawn at random are those that were scored, although every round draws others."""
    fedavg = registry.METHODS["fedavg"]

    def build(config):
        def guesses(key, state, federation, cohort):
            def of_group(group, slots):
                ids = group.id.at[slots.index].get(mode="clip")
                keys = jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
                return jaxfl.Predictor(None, jax.random.key_data(keys), guess)

            return tuple(map(of_group, federation.groups, cohort.groups))

        return fedavg.build(config)._replace(personal=guesses)

    def guess(model, shared, own, x):
        flat = x.reshape(len(x), -1)
        return flat @ jax.random.normal(jax.random.wrap_key_data(own), (flat.shape[1], model.classes))

    source = tiny_source()
    np.savez(tmp_path / "tiny.npz", images=source.images, labels=source.labels, split=source.train)
    options = {"clients": 10, "models": "mlp,hidden=3", "rounds": 4, "eval_every": 2, "epochs": 1}
    options |= {"devices": 1}
    made = jaxfl.run(
        fedavg._replace(build=build),
        run_dir=tmp_path / "run",
        dataset=tmp_path / "tiny.npz",
        partition="classes,classes_per_client=2,samples_per_client=4",
        quiet=True,
        **options,
    )
    assert (made.personal.per_client[0] != made.personal.per_client[1]).any()
    assert_as_scored(made)


@pytest.mark.parametrize(
    "method", ["fedavg-ft", long("compfl"), long("heterofl"), long("pfedbayes,samples=3")]
)
def test_models_that_are_fitted_to_images_need_them(tmp_path, method):
    """Models fitted to images predict with the data set, and are refused without it."""
    run = begun(tmp_path, method, "--models", "mlp,hidden=3")
    assert_as_scored(run)
    if "samples" in method:
        assert {"classifier", "classifier-2", "classifier-3"} < run.models[0].weights.keys()
        card = run.export(tmp_path / "export", [0])[-1].read_text()
        assert f'jaxfl.load("{run.folder}").models[0].predict(images)' in card and "zoo.build" not in card
        return
    (tmp_path / "tiny.npz").unlink()
    with pytest.raises(JaxflError, match="Models of .* need the data set: There is no file"):
        jaxfl.load(tmp_path / "run").models[0]


def test_findings_are_arrays_over_rounds():
    first = {"score": {"fc1": 1, "fc2": None}, "assembled": [{"client": 3}]}
    last = {"score": {"fc1": 3.5, "fc2": 4.0}, "assembled": []}
    found = findings([{"round": 1, "findings": first}, {"round": 2}, {"round": 3, "findings": last}])
    np.testing.assert_array_equal(found["score"]["fc1"], [1, np.nan, 3.5])
    np.testing.assert_array_equal(found["score"]["fc2"], [np.nan, np.nan, 4])
    assert found["assembled"] == [[{"client": 3}], None, []]


def test_a_model_gives_its_inner_outputs():
    """A model gives the outputs of all blocks and convolutions, unless several networks predict together."""
    model = tiny_cnn("cnn", norm=True)
    one, two = (model.init(jax.random.key(i)) for i in range(2))

    def alone(model, shared, own, x):
        return model.apply(shared.params, shared.stats, x, train=False)[0]

    def together(model, shared, own, x):
        return sum(alone(model, w, None, x) for w in shared)

    mean, std = (np.full((1, 1, 1, 1), value, np.float32) for value in (100, 50))
    images = Images((8, 8, 1), np.dtype("uint8"), mean, std)
    client = Deployed(3, model, images, np.arange(CLASSES), None, Predictor(one, None, alone))
    outputs, taps = client.outputs(SOURCE.images[:5]), client.taps(SOURCE.images[:5])
    assert list(outputs) == list(model.names) and list(taps) == [1] and taps[1].shape == (5, 8, 8, 4)
    pooled = np.maximum(taps[1], 0).reshape(5, 4, 2, 4, 2, 4).max((2, 4))
    np.testing.assert_allclose(outputs["conv1"], pooled, rtol=1e-5)
    np.testing.assert_allclose(outputs["classifier"], client.scores(SOURCE.images[:5]), rtol=1e-5)
    assert client.outputs(SOURCE.images[:0])["fc1"].shape == (0, 6)
    ensemble = dataclasses.replace(client, predictor=Predictor((one, two), None, together))
    with pytest.raises(
        JaxflError, match=re.escape("its cnn with several weights (classifier-2, conv1-2, fc1-2)")
    ):
        ensemble.taps(SOURCE.images[:5])


def test_a_run_remembers_where_its_data_are_now(run, tmp_path):
    """A run, even a finished one, keeps a new data_dir, and its checkpoints stay valid."""
    moved = shutil.copytree(run.folder, tmp_path / "moved")
    for place in ("here", "there"):
        jaxfl.resume(moved, data_dir=tmp_path / place, quiet=True)
    with pytest.raises(JaxflError, match=r"There is no file .*tiny\.npz"):
        jaxfl.resume(moved, data_dir=tmp_path / "nowhere", rounds=5, quiet=True)
    config = jaxfl.load(moved).config
    assert config["options"]["data_dir"] == f"{tmp_path}/there"
    assert config["begun_in"] == run.config["options"]["data_dir"]
    assert store.fingerprint(config) == store.fingerprint(run.config)


# --- export


def forward(arrays, x):
    """Return the outputs of an MLP, in plain NumPy."""
    hidden = np.maximum(x.reshape(len(x), -1) @ arrays["fc1/linear/kernel"] + arrays["fc1/linear/bias"], 0)
    return hidden @ arrays["classifier/kernel"] + arrays["classifier/bias"]


def test_an_export_predicts_without_jaxfl(run, tmp_path):
    files = run.export(tmp_path / "all")
    assert [file.name for file in files] == [*(f"client-{i}.safetensors" for i in range(4)), "README.md"]
    for model in run.models:
        file = tmp_path / "all" / f"client-{model.client}.safetensors"
        with safe_open(file, "numpy") as opened:
            about = {name: json.loads(text) for name, text in opened.metadata().items()}
        x = (SOURCE.images - np.float32(about["mean"])) / np.float32(about["std"])
        labels = np.array(about["classes"])[forward(load_file(file), x).argmax(1)]
        np.testing.assert_array_equal(labels, model.predict(SOURCE.images))
    with pytest.raises(JaxflError, match="already holds something"):
        run.export(tmp_path / "all")
    for clients, words in (([0, 4], "no client 4"), (["0"], "no client '0'"), ([], "of no clients")):
        with pytest.raises(JaxflError, match=words):
            run.export(tmp_path / "none", clients)
    assert not (tmp_path / "none").exists()


def test_the_card_says_how_to_load(run, tmp_path, monkeypatch, capsys):
    cli.main(["export", str(run.folder), "--client", "3", "--out", f"{tmp_path}/one"])
    assert "1 model (client-3.safetensors)" in " ".join(capsys.readouterr().out.split())
    card = (tmp_path / "one" / "README.md").read_text()
    accuracy = f"{100 * run.models[3].accuracy:.1f}"
    for part in (
        f"| client-3.safetensors | mlp,hidden=4 | 3 | {accuracy} |",
        "Arivazhagan",
        "pipeline_tag: image-classification",
        "# fedper on tiny.npz\n",
        '"dataset": "tiny.npz"',
        "| fc1 | (8, 8, 1) | (4) | linear/bias (4), linear/kernel (64, 4) |",
    ):
        assert part in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(tmp_path / "one")
    names = {"images": SOURCE.images}
    exec(code, names)
    np.testing.assert_array_equal(names["labels"], run.models[3].predict(SOURCE.images))
    with pytest.raises(SystemExit):
        cli.main(["export", str(run.folder)])
    assert "--out FOLDER" in capsys.readouterr().err


def test_words_of_the_data_name_the_classes(run, tmp_path):
    """In the columns of a table and in its picture, on a card and in the metadata of a file."""
    table = jaxfl.report(run.folder, out=tmp_path / "out", show="per-class")
    assert table.titles[1:4] == [f"class {word} %" for word in WORDS]
    figure = curves.draw_metrics({"fedper": [run.metrics]}, ["per-class"], run.result["class_names"])
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == [r"\$cat", "ant", "bee"]
    ticks = pictures.draw(np.eye(CLASSES, dtype=int), class_names=WORDS).axes[0].get_yticklabels()
    assert [tick.get_text() for tick in ticks] == [r"\$cat", "ant", "bee"]
    file, card = run.export(tmp_path / "one", clients=[3])
    with safe_open(file, "numpy") as opened:
        assert json.loads(opened.metadata()["class_names"]) == WORDS.tolist()
    assert "Their names are, from 0 on: $cat, ant, bee." in card.read_text()


def test_a_shared_model_is_exported_once(run, tmp_path):
    """A model that all clients share is one file, with the statistics of BatchNorm."""
    shared = begun(tmp_path, "fedavg", "--models", "mlp,hidden=3,norm=batch", "--labels", "unified")
    files = shared.export(tmp_path / "shared")
    assert [file.name for file in files] == ["mlp.safetensors", "README.md"]
    assert "| mlp | 0-3 |" in files[1].read_text()
    best, card = shared.export(tmp_path / "best", clients=shared.personal.per_client[-1].argmin())
    twice, again = shared.export(tmp_path / "twice", clients=[2, 2])
    assert best.name == twice.name and "2, 2" not in again.read_text()
    assert {"fc1/norm/scale", "fc1/norm/mean"} < load_file(files[0]).keys()
    arrays, model = load_file(files[0]), shared.models[0]
    (epsilon,) = re.findall(r"sqrt\(var \+ (.*?)\)", files[1].read_text())
    x = (SOURCE.images - model.images.mean) / model.images.std
    hidden = x.reshape(len(x), -1) @ arrays["fc1/linear/kernel"] + arrays["fc1/linear/bias"]
    shift, scale, bias = (arrays[f"fc1/norm/{name}"] for name in ("mean", "scale", "bias"))
    hidden = (hidden - shift) / np.sqrt(arrays["fc1/norm/var"] + float(epsilon)) * scale + bias
    scores = np.maximum(hidden, 0) @ arrays["classifier/kernel"] + arrays["classifier/bias"]
    np.testing.assert_allclose(model.scores(SOURCE.images), scores, rtol=1e-5, atol=1e-5)


def test_architectures_whose_files_would_have_one_name_are_not_exported(tmp_path):
    class Two(list):
        opened = SimpleNamespace(partition=SimpleNamespace(relabel=np.zeros((2, 3), int)))
        number = int

    models = Two(
        SimpleNamespace(model=SimpleNamespace(name=name), shared={"w": 1}, client=i)
        for i, name in enumerate(("Net A", "Net-A"))
    )
    with pytest.raises(JaxflError, match="Net A and Net-A would both be Net-A.safetensors"):
        export.export(models, tmp_path / "out", None, None)
    assert not (tmp_path / "out").exists()


IDS = """
import flax.linen as nn
import jax.numpy as jnp
from jaxfl.models.own import from_linen

class Bins(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        ids = jnp.round(10 * x.reshape(len(x), -1)).astype(int) + 22  # of 45: a number beyond 2.2 is none
        return nn.Dense(3)(nn.Embed(45, 4)(ids).mean(1))

def bins(shape, classes):
    return from_linen("bins", Bins(), shape, classes)
"""


def test_a_network_of_ids_is_tried_on_the_runs_own_rows(tmp_path, monkeypatch):
    """Random images are no ids: the network gives NaN, and the clients' own images decide."""
    (tmp_path / "net.py").write_text(IDS)
    run = begun(tmp_path, "fedavg", "--models", f"{tmp_path}/net.py:bins", "--labels", "unified")
    _, card = run.export(tmp_path / "all")
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    for file in (tmp_path / "net.py", *(tmp_path / "all").iterdir()):
        shutil.copy(file, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    names = {"images": SOURCE.images}
    exec(code, names)
    model = run.models[0]
    np.testing.assert_allclose(names["scores"], model.scores(SOURCE.images), rtol=1e-5, atol=1e-6)

    def masked(network, shared, own, x):
        return model.predictor.predict(network, shared, own, x) - jnp.array([[0.0, 9.0, 0.0]])

    other = dataclasses.replace(model, predictor=dataclasses.replace(model.predictor, predict=masked))
    assert not other.plain(lambda: SOURCE.images[:8])
    (tmp_path / "tiny.npz").unlink()
    with pytest.raises(JaxflError, match=r"There is no file .*tiny\.npz"):
        jaxfl.load(run.folder).export(tmp_path / "none")


def test_a_shared_model_is_exported_for_each_client_with_other_class_numbers(tmp_path):
    run = begun(tmp_path, "fedavg", "--models", "mlp,hidden=3", "--labels", "permuted")
    *files, card = run.export(tmp_path / "all")
    assert card.name == "README.md"
    for model, file in zip(run.models, files, strict=True):
        with safe_open(file, "numpy") as opened:
            assert json.loads(opened.metadata()["classes"]) == model.classes.tolist()


def test_a_weight_that_is_a_number_is_exported_as_one(run):
    leaves = types.SimpleNamespace(weights={"fc1": {"scale": jnp.float32(2.0)}})
    assert export._arrays(leaves)["fc1/scale"].shape == ()


# --- the weights of a prediction


def test_weights_are_those_that_blocks_are_applied_with():
    """Weights are found of one network, two heads on a body and samples in a loop, not of a stack."""
    model = tiny_cnn("cnn", norm=True)
    one, two = (model.init(jax.random.key(i)) for i in range(2))

    def plain(model, x):
        return model.apply(one.params, one.stats, x, train=False)[0]

    def heads(model, x):
        z = model.body.apply(one.params, one.stats, x, train=False)[0]
        return sum(model.head.apply(w.params, {}, z, train=False)[0] for w in (one, two, one))

    def samples(model, x):
        def sample(i):
            params = jax.tree.map(lambda leaf: leaf * i, one.params)
            return model.apply(params, one.stats, x, train=False)[0]

        return jax.lax.map(sample, jnp.arange(3.0))

    def side_by_side(model, x):
        both = jax.tree.map(lambda a, b: jnp.stack([a, b]), one, two)
        return jax.vmap(lambda w: model.apply(w.params, w.stats, x, train=False)[0])(both)

    found = applied_weights(model, plain)
    assert list(found) == list(model.names)
    assert found["conv1"]["conv"]["norm"].keys() == {"scale", "bias", "mean", "var"}
    np.testing.assert_array_equal(found["conv1"]["conv"]["kernel"], one.params["conv1"]["conv"]["kernel"])
    found = applied_weights(model, heads)
    assert list(found) == [*model.names, "classifier-2"]
    np.testing.assert_array_equal(found["classifier-2"]["kernel"], two.params["classifier"]["kernel"])
    found = applied_weights(model, samples)
    assert [name for name in found if "fc1" in name] == ["fc1", "fc1-2", "fc1-3"]
    with pytest.raises(JaxflError, match="several networks at once"):
        applied_weights(model, side_by_side)
