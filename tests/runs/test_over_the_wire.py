"""Runs whose messages pass something on the wire: resumed, on several devices, with own functions."""

import csv
import json
import math

import dp_accounting as dp
import numpy as np
import pytest
from conftest import comparable, long
from dp_accounting import rdp
from folders import copied_before_checkpoints, metrics, state

import jaxfl
from jaxfl import cli

FEDERATION = ["--partition", "classes,classes_per_client=2,samples_per_client=10", "--clients", "6"]
FEDERATION += ["--participation", "0.5", "--models", "mlp,hidden=3"]
FEDERATION += ["--epochs", "1", "--rounds", "4", "--eval-every", "2"]
SENT = "--compress top-k,share=0.2,feedback=true --attack random,std=0.1,share=0.4 --aggregate median"


def read(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("scaffold", SENT),
        long("fedavg", "--privacy gaussian,noise=0.5 --sampling poisson --compress quantize,bits=4"),
        long("fedavg", "--attack backdoor,share=0.4 --aggregate krum,m=2"),
        ("fedrep", "--privacy rows,noise=0.5 --compress sign"),
        long("ditto", "--privacy gaussian,noise=0.2,adapt=0.5"),
        ("fedproto", "--compress top-k,share=0.2 --attack random,std=0.1,share=0.4"),
        long("dfedavg", "--compress quantize,bits=4 --attack sign-flip,share=0.4 --topology complete"),
    ],
    ids=["sent", "private", "poisoned", "rows", "adaptive", "class means", "neighbours"],
)
def test_a_run_over_the_wire_is_resumed_and_repeated_on_devices(method, options, dataset, tmp_path):
    """A run stopped after half of its rounds goes on to the same bits; four devices agree up to rounding."""
    words = ["run", method, *dataset, *FEDERATION, *options.split(), "--devices"]
    with copied_before_checkpoints(lambda folder, rounds: tmp_path / f"stopped-{rounds}"):
        cli.main([*words, "1", "--run-dir", str(tmp_path / "whole")])
    cli.main(["resume", str(tmp_path / "stopped-4")])
    assert metrics(tmp_path / "stopped-4") == metrics(tmp_path / "whole")
    resumed, whole = state(tmp_path / "stopped-4"), state(tmp_path / "whole")
    assert all(resumed[leaf].tobytes() == whole[leaf].tobytes() for leaf in whole)
    assert any("owed" in leaf for leaf in whole) == (options == SENT)
    cli.main([*words, "4", "--run-dir", str(tmp_path / "four")])
    four = state(tmp_path / "four")
    for leaf in whole:
        np.testing.assert_allclose(four[leaf], whole[leaf], rtol=2e-3, atol=2e-5, err_msg=leaf)
    one, other = (read(tmp_path / folder / "result.json") for folder in ("whole", "four"))
    assert one["bytes_up"] == other["bytes_up"]
    assert one.get("privacy") == other.get("privacy")


def test_attackers_are_listed_and_left_out_of_scores(dataset, tmp_path, capsys):
    folder = tmp_path / "run"
    words = [*dataset, *FEDERATION, "--models", "mlp,hidden=3", "mlp,hidden=4"]
    words += ["--attack", "backdoor,share=0.5", "--score-cohort", "--run-dir", str(folder)]
    cli.main(["run", "fedavg", *words])
    out = capsys.readouterr().out
    rows = [*csv.DictReader((folder / "clients.csv").read_text().splitlines())]
    attackers = [row["client"] for row in rows if row["attacker"] == "1"]
    assert len(attackers) == 3 and f"Attackers (backdoor,share=0.5): {', '.join(attackers)}." in out
    assert "attack success %" in out
    result = read(folder / "result.json")
    scored = [score for score in result["accuracy"]["per_client"] if score is not None]
    assert len(scored) == 3 and result["accuracy"]["mean"] == pytest.approx(np.mean(scored))
    assert 0 <= result["attack_success"] <= 1
    for record in metrics(folder):
        told = zip(record["clients"], record["client_loss"], strict=True)
        honest = [loss for client, loss in told if str(client) not in attackers]
        assert record["loss"] == (pytest.approx(np.mean(honest)) if honest else None)
        assert ("cohort" in record) == bool(honest)
    scored = [result["accuracy"]["per_client"][client] for client in record["clients"]]
    honest = [score for score in scored if score is not None]
    assert record["cohort"]["personal"]["mean"] == pytest.approx(np.mean(honest))
    assert jaxfl.load(folder).result["accuracy"] == result["accuracy"]


def test_epsilon_is_in_records_results_and_tables(dataset, tmp_path, capsys):
    folder, words = tmp_path / "run", ["--privacy", "gaussian,clip=1,delta=1e-4", "--target-epsilon", "9"]
    words += ["--sampling", "poisson"]
    cli.main(["run", "fedavg", *dataset, *FEDERATION, *words, "--run-dir", str(folder)])
    assert "epsilon" in capsys.readouterr().out
    first, last = (record["privacy"] for record in metrics(folder) if "privacy" in record)
    assert 8.9 < last["epsilon"] <= 9 and 0 < first["epsilon"] < last["epsilon"] and last["delta"] == 1e-4
    assert read(folder / "result.json")["privacy"] == last
    with pytest.raises(jaxfl.JaxflError, match="has noise for --target-epsilon 9 after 4 rounds"):
        jaxfl.resume(folder, rounds=6)


def test_epsilon_of_rows_is_that_of_all_noisy_steps(dataset, tmp_path):
    """Ditto trains twice in a round, on ten rows in batches of four: q = 0.4, and three steps an epoch."""
    folder, words = tmp_path / "run", ["--privacy", "rows,noise=2", "--batch-size", "4"]
    words += ["--participation", "1", "--run-dir", str(folder)]
    cli.main(["run", "ditto", *dataset, *FEDERATION, *words])
    for record in (record for record in metrics(folder) if "privacy" in record):
        event = dp.PoissonSampledDpEvent(0.4, dp.GaussianDpEvent(2.0))
        accountant = rdp.RdpAccountant().compose(event, 2 * 3 * record["round"])
        assert record["privacy"]["epsilon"] == accountant.get_epsilon(1e-5)


@pytest.mark.long
def test_several_seeds_are_one_program_over_the_wire(dataset, tmp_path):
    words = [*dataset, *FEDERATION, *SENT.split(), "--seed", "3"]
    cli.main(["compare", "fedavg", *words, "--seeds", "2", "--run-dir", str(tmp_path / "both")])
    cli.main(["run", "fedavg", *words, "--run-dir", str(tmp_path / "alone")])
    one, alone = tmp_path / "both" / "fedavg" / "seed-3", tmp_path / "alone"
    assert metrics(one) == metrics(alone)
    assert comparable(read(one / "result.json")) == comparable(read(alone / "result.json"))


OWN = """
import jax
import jax.numpy as jnp


def spoil(key, change, *, value=float("nan")):
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), change)


def first(messages, weights):
    return jax.tree.map(lambda leaf: leaf[weights.argmax()], messages)


def half(key, change):
    return jax.tree.map(lambda leaf: leaf[: len(leaf) // 2], change)
"""


def test_own_functions_and_messages_that_are_not_finite(dataset, tmp_path, monkeypatch):
    """A robust server leaves out and counts what is not finite; with a mean the run ends with a sentence."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    options = {
        "partition": FEDERATION[1],
        "clients": 6,
        "models": ["mlp,hidden=3"],
        "rounds": 2,
        "eval_every": 1,
    }
    options |= {"dataset": dataset[1], "epochs": 1, "attack": f"{own}:spoil,share=0.4"}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(jaxfl.JaxflError, match="the predictions of client 0 are not finite in round 1"):
        jaxfl.run("fedavg", run_dir=tmp_path / "mean", **options)
    for server in ("median", "own.py:first"):  # from now on named by an absolute path
        run = jaxfl.run("fedavg", run_dir=tmp_path / server[-4:], aggregate=server, **options)
        records = metrics(run.folder)
        assert [record["findings"] for record in records] == [{"messages": {"left out": 2}}] * 2
        assert all(math.isfinite(record["loss"]) for record in records)
        assert [sum(loss is None for loss in record["client_loss"]) for record in records] == [2, 2]
    assert jaxfl.load(run.folder).config["options"]["aggregate"] == f"{own}:first"
    with pytest.raises(jaxfl.JaxflError, match="own.py, line 14: half returns"):
        jaxfl.run("fedavg", run_dir=tmp_path / "half", **options | {"attack": f"{own}:half"})
