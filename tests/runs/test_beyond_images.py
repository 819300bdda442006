"""What holds for runs on images holds for text and windows: resumes, programs, exports, weights, nodes."""

import re
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from conftest import long
from folders import copied_before_checkpoints, metrics, state

import jaxfl
from jaxfl.deployed import device as nodes
from jaxfl.folder import store

ROUNDS = 4
OPTIONS = dict(rounds=ROUNDS, eval_every=2, epochs=1, batch_size=4, quiet=True, keep_checkpoints=2, devices=1)


class Kind(NamedTuple):
    """Data that are not images: options of their runs, what their scores and the cards of exports say."""

    options: dict
    entry: str
    card: tuple[str, str]
    names: tuple[str, str]


def text(folder):
    """Return two roles, whose next character is to be predicted."""
    path = folder / "play.txt"
    path.write_text("\n\n".join(f"{who}:\n{word * 20}" for who, word in (("A", "tick "), ("B", "to "))))
    options = dict(dataset=f"{path},length=7", models=["gru,embedding=3,hidden=4"], lr=0.3)
    options |= dict(partition="natural,column=client,min_samples=1")
    says = "pipeline_tag: text-generation", "their perplexity on their own"
    return Kind(options, "token_accuracy_per_client", says, ("tokens", "following"))


def windows(folder):
    """Return windows of three subjects, with a number to be predicted of each."""
    rng = np.random.default_rng(0)
    signals, subject = rng.normal(size=(36, 12, 2)), np.arange(36) % 3
    np.savez(folder / "w.npz", windows=signals, labels=signals.mean((1, 2)) + subject, subject=subject)
    options = dict(dataset=str(folder / "w.npz"), models=["harcnn,width=0.01,kernel=3"], lr=0.01)
    options |= dict(partition="natural,column=subject")
    says = "pipeline_tag: image-regression", "their RMSE on their own"
    return Kind(options, "r2_per_client", says, ("images", "targets"))


KINDS = {"text": text, "windows": windows}
OFTEN = pytest.mark.parametrize("kind", [*KINDS], indirect=True)
EACH = pytest.mark.parametrize("kind", ["text", long("windows")], indirect=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def kind(request, folder):
    return KINDS[request.param](folder)


@pytest.fixture(scope="module")
def run(kind, folder):
    """Return a function that runs a method with options, in a folder of its own."""

    def run(method, **options):
        where = folder / str(len([*folder.iterdir()]))
        return jaxfl.run(method, run_dir=str(where), **OPTIONS | kind.options | options)

    return run


@pytest.fixture(scope="module")
def whole(run):
    """Return a run, of which there is a copy beside it from just before each checkpoint."""
    with copied_before_checkpoints(lambda folder, rounds: folder.with_name(f"{folder.name}-{rounds}")):
        return run("fedper")


@OFTEN
def test_a_stopped_run_goes_on_with_the_bits_of_a_whole_one(whole):
    stopped = whole.folder.with_name(f"{whole.folder.name}-{ROUNDS}")
    assert len(metrics(stopped)) == ROUNDS and state(stopped).keys() == state(whole.folder).keys()
    jaxfl.resume(stopped)
    assert metrics(stopped) == metrics(whole.folder)
    for name, leaf in state(whole.folder).items():
        assert state(stopped)[name].tobytes() == leaf.tobytes()


@EACH
@pytest.mark.parametrize("options", [{"devices": 2}, long({"client_state": "host"})])
def test_a_run_computes_the_same_elsewhere(run, whole, options):
    found, expected = (jaxfl.final_weights(of.folder) for of in (run("fedper", **options), whole))
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@OFTEN
def test_seeds_of_one_program_are_runs_alone(kind, whole, tmp_path):
    jaxfl.compare("fedper", seeds=2, run_dir=str(tmp_path / "both"), **OPTIONS | kind.options)
    (first,) = (tmp_path / "both").rglob("*seed-0")
    for found, expected in zip(store.read_metrics(first), store.read_metrics(whole.folder), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["together"] == 2
    scores = found["accuracy"], expected["accuracy"]
    for entry in ("per_client", kind.entry):
        assert scores[0][entry] == pytest.approx(scores[1][entry], rel=1e-3)


@OFTEN
def test_exported_models_say_what_deployed_ones_say(kind, whole, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    *_, card = whole.export(tmp_path, clients=[1])
    assert all(words in card.read_text() for words in kind.card)
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    given, said = kind.names
    names = {given: whole.source.images[:5]}
    exec(code, names)
    np.testing.assert_allclose(names[said], whole.models[1].predict(names[given]), rtol=1e-4, atol=1e-5)
    if whole.source.words:
        assert names["about"]["words"] == [*whole.source.words]


@EACH
def test_clients_start_from_the_models_of_a_run(run, whole):
    still = run("local", rounds=1, eval_every=1, lr=1e-30, init_from=str(whole.folder))
    assert still.result["accuracy"]["per_client"] == pytest.approx(
        whole.result["accuracy"]["per_client"], rel=1e-5
    )


@pytest.mark.parametrize("kind", ["text"], indirect=True)
def test_another_alphabet_of_equal_size_is_said(run, whole, tmp_path, capsys):
    text = Path(whole.config["options"]["dataset"].partition(",")[0]).read_text()
    other = tmp_path / "other.txt"
    other.write_text(text.replace("t", "n"))
    run(
        "local", dataset=f"{other},length=7", rounds=1, eval_every=1, init_from=str(whole.folder), quiet=False
    )
    assert f"--init-from {whole.folder}: its text has other words;" in capsys.readouterr().err


@pytest.mark.long
@EACH
def test_nodes_and_a_mean_compute_the_rounds_of_a_run(run):
    folder = run("fedavg", rounds=1, eval_every=1, weight_decay=0.0).folder
    clients = [nodes.node(folder, client, 0) for client in range(len(jaxfl.load(folder).partition.train))]
    sent = nodes.sent_first(folder, 0)
    trained = [me.train(sent, me.kept, 0, 1).sent for me in clients]
    weights = [me.weight for me in clients]
    mean = {name: np.average([one[name] for one in trained], axis=0, weights=weights) for name in sent}
    expected = jax.tree.leaves({name: leaf for name, leaf in sorted(jaxfl.final_weights(folder).items())})
    for ours, theirs in zip(jax.tree.leaves(mean), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    scores = [me.score(mean, me.kept, 0, 1).value for me in clients]
    assert scores == pytest.approx(jaxfl.load(folder).result["accuracy"]["per_client"], rel=1e-4)
