"""What holds for runs on images holds for runs on text: resumes, programs, exports, weights, nodes."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import comparable, long

import jaxfl
from jaxfl.deployed import device as nodes
from jaxfl.folder import store

ROUNDS = 4
OPTIONS = dict(partition="natural,column=client,min_samples=1", models=["gru,embedding=3,hidden=4"], lr=0.3)
OPTIONS |= dict(rounds=ROUNDS, eval_every=2, epochs=1, batch_size=4, quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs a method with options, in a folder of its own."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "play.txt"
    text.write_text("\n\n".join(f"{who}:\n{word * 20}" for who, word in (("A", "tick "), ("B", "to "))))
    made = []

    def run(method, **options):
        made.append(folder / str(len(made)))
        given = {"dataset": f"{text},length=7"} | OPTIONS | options
        return jaxfl.run(method, run_dir=str(made[-1]), **given)

    return run


@pytest.fixture(scope="module")
def whole(run):
    return run("fedper")


def records(run):
    return [comparable(record) for record in store.read_metrics(run.folder)]


def test_a_run_goes_on_with_the_bits_of_a_whole_one(run, whole):
    short = run("fedper", rounds=2)
    assert records(jaxfl.resume(short.folder, rounds=ROUNDS)) == records(whole)


@pytest.mark.parametrize("options", [{"devices": 2}, long({"client_state": "host"})])
def test_a_run_computes_the_same_elsewhere(run, whole, options):
    found, expected = (jaxfl.final_weights(of.folder) for of in (run("fedper", **options), whole))
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_seeds_of_one_program_are_runs_alone(whole, tmp_path):
    options = OPTIONS | {"dataset": whole.config["options"]["dataset"]}
    jaxfl.compare("fedper", seeds=2, run_dir=str(tmp_path / "both"), **options)
    (first,) = (tmp_path / "both").rglob("*seed-0")
    for found, expected in zip(store.read_metrics(first), store.read_metrics(whole.folder), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["together"] == 2
    scores = found["accuracy"], expected["accuracy"]
    for entry in ("per_client", "token_accuracy_per_client"):
        assert scores[0][entry] == pytest.approx(scores[1][entry], rel=1e-3)


def test_exported_models_say_what_deployed_ones_say(whole, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    *_, card = whole.export(tmp_path, clients=[1])
    text = card.read_text()
    assert "pipeline_tag: text-generation" in text and "their perplexity on their own" in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"tokens": whole.source.images[:5]}
    exec(code, names)
    np.testing.assert_array_equal(names["following"], whole.models[1].predict(names["tokens"]))
    assert names["about"]["words"] == [*whole.source.words]


def test_clients_start_from_the_models_of_a_run(run, whole):
    still = run("local", rounds=1, eval_every=1, lr=1e-30, init_from=str(whole.folder))
    assert still.result["accuracy"]["per_client"] == pytest.approx(
        whole.result["accuracy"]["per_client"], rel=1e-5
    )


def test_another_alphabet_of_equal_size_is_said(run, whole, tmp_path, capsys):
    text = Path(whole.config["options"]["dataset"].partition(",")[0]).read_text()
    other = tmp_path / "other.txt"
    other.write_text(text.replace("t", "n"))
    run(
        "local", dataset=f"{other},length=7", rounds=1, eval_every=1, init_from=str(whole.folder), quiet=False
    )
    assert f"--init-from {whole.folder}: its text has other words;" in capsys.readouterr().err


def test_nodes_and_a_mean_compute_the_rounds_of_a_run(run):
    folder = run("fedavg", rounds=1, eval_every=1, weight_decay=0.0).folder
    clients, sent = [nodes.node(folder, client, 0) for client in (0, 1)], nodes.sent_first(folder, 0)
    trained = [me.train(sent, me.kept, 0, 1).sent for me in clients]
    weights = [me.weight for me in clients]
    mean = {name: np.average([one[name] for one in trained], axis=0, weights=weights) for name in sent}
    expected = jax.tree.leaves({name: leaf for name, leaf in sorted(jaxfl.final_weights(folder).items())})
    for ours, theirs in zip(jax.tree.leaves(mean), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    scores = [me.score(mean, me.kept, 0, 1).value for me in clients]
    assert scores == pytest.approx(jaxfl.load(folder).result["accuracy"]["per_client"], rel=1e-4)
