"""The app for Flower: its files, and rounds with Flower's own strategy and messages."""

import importlib
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from jaxfl import cli
from jaxfl.core.node import sent_to_all
from jaxfl.deployed import device as nodes
from jaxfl.folder import store

CLIENTS = 3
OPTIONS = (
    f"--partition dirichlet,alpha=0.5 --clients {CLIENTS} --rounds 3 --models mlp,hidden=3 --devices 1 "
    "--epochs 2 --batch-size 4 --lr 0.1"
)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Flower's own
@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(("fedavg", ""), ("fedper", ""), ("per-fedavg", "")),
        ("fedper", "--dataset play.txt,length=7 --partition iid --models gru,embedding=3,hidden=4"),
        ("fedper", "--dataset subjects.npz --partition natural,column=subject --models harcnn,width=0.01"),
    ],
)
def test_flower_reproduces_the_rounds_of_a_run(method, options, dataset, tmp_path, monkeypatch):
    """Only the network between server and clients is replaced."""
    flower = pytest.importorskip("flwr.app")
    monkeypatch.chdir(tmp_path)
    Path("play.txt").write_text("tick tock " * 40)
    subject, signals = np.arange(36) % CLIENTS, np.random.default_rng(0).normal(size=(36, 30, 2))
    np.savez("subjects.npz", windows=signals, labels=np.arange(36) % 4, subject=subject)
    run, folder = tmp_path / "run", tmp_path / "app"
    cli.main(["run", method, *dataset, *OPTIONS.split(), *options.split(), "--run-dir", str(run)])
    cli.main(["flower", str(run), "--after", "0", "--out", str(folder)])
    project = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    server, clients = components(project, folder, monkeypatch)
    states = [
        flower.Context(1, i, {"partition-id": i}, flower.RecordDict(), project["config"])
        for i in range(CLIENTS)
    ]
    sizes = []

    class Grid:
        """A network that calls nodes as functions."""

        def get_node_ids(self):
            return range(CLIENTS)

        def send_and_receive(self, messages, timeout):
            replies = [clients(message, states[message.metadata.dst_node_id]) for message in messages]
            sizes.extend(size(reply) for reply in replies)
            return replies

    server(Grid(), flower.Context(1, 0, {}, flower.RecordDict(), project["config"]))
    opened, averaged = nodes.opened_at(run)
    expected, found = sent_to_all(averaged, opened.state), np.load(folder / "global.npz")
    assert set(found) == set(expected) and ("params/classifier/kernel" in expected) == (method != "fedper")
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-4, atol=1e-5)
    assert sum(sizes) == sum(record["bytes_up"] for record in store.read_metrics(run))


def components(project, folder, monkeypatch):
    """Return the server's and the clients' apps, as Flower finds them."""
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    identity.task_id, identity.run_id, identity.node_id = 1, 1, 1  # a SuperLink would set them
    monkeypatch.syspath_prepend(folder)
    found = []
    for name in ("serverapp", "clientapp"):
        module, _, attribute = project["components"][name].partition(":")
        sys.modules.pop(module, None)
        found.append(getattr(importlib.import_module(module), attribute))
    return found


def size(reply):
    """Return the bytes of the arrays in a message."""
    records = reply.content.array_records.values()
    return sum(array.numpy().nbytes for record in records for array in record.values())


def test_rounds_beyond_a_schedule_that_depends_on_the_length_are_refused(dataset, tmp_path, capsys):
    run = tmp_path / "run"
    cli.main(
        ["run", "fedavg", *dataset, *OPTIONS.split(), "--run-dir", str(run), "--schedule", "cosine,final=0.1"]
    )
    with pytest.raises(SystemExit):
        cli.main(["flower", str(run), "--out", str(tmp_path / "app")])
    assert "--schedule cosine,final=0.1 depends on the length of the run" in capsys.readouterr().err
    assert not (tmp_path / "app").exists()
    cli.main(["flower", str(run), "--out", str(tmp_path / "app"), "--after", "0"])


def test_an_app_is_four_files_that_name_the_run(dataset, tmp_path, capsys):
    run, folder = tmp_path / "läuft 🏃", tmp_path / "app"
    cli.main(["run", "fedavg", *dataset, *OPTIONS.split(), "--run-dir", str(run), "--participation", "0.7"])
    cli.main(["flower", str(run), "--out", str(folder)])
    assert f"{folder}: client_app.py, server_app.py, pyproject.toml, README.md" in capsys.readouterr().out
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config == {
        "run": str(run),
        "after": 3,
        "length": 6,
        "num-server-rounds": 3,
        "fraction-train": 0.7,
        "clients": CLIENTS,
        "out": str(folder / "global.npz"),
    }
    assert "continues after its round 3" in (folder / "README.md").read_text()
    with pytest.raises(SystemExit):
        cli.main(["flower", str(run), "--out", str(folder)])
    assert "already holds something" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["flower", str(run)])
    assert f"Say where to write: jaxfl flower {run} --out FOLDER." in capsys.readouterr().err
