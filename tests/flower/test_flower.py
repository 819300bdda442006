"""The app for Flower: its files, and Flower's own messages and strategy carried through them."""

import importlib
import tomllib

import numpy as np
import pytest
from conftest import long

from jaxfl import cli
from jaxfl.core.node import sent_to_all
from jaxfl.runs import node as nodes

CLIENTS, ROUNDS = 3, 3
OPTIONS = f"--clients {CLIENTS} --rounds {ROUNDS} --models mlp,hidden=3 --devices 1 --epochs 2 --batch-size 4 --lr 0.1"


@pytest.fixture
def app(dataset, tmp_path):
    """Writes the app of a new run of some method, which begins with the run's first weights."""

    def app(method):
        run, folder = tmp_path / "run", tmp_path / "app"
        cli.main(["run", method, *dataset, *OPTIONS.split(), "--run-dir", str(run)])
        cli.main(["flower", str(run), "--after", "0", "--out", str(folder)])
        return run, folder

    return app


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of Flower's
@pytest.mark.parametrize("method", ["fedavg", "fedper", "per-fedavg"])
def test_flower_makes_the_rounds_of_the_run(app, method, monkeypatch):
    """Its strategy, its messages and the app's files; nothing travels but by a function call."""
    flower = pytest.importorskip("flwr.app")
    run, folder = app(method)
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    monkeypatch.syspath_prepend(folder)
    client_app, server_app = (
        getattr(importlib.import_module(module), name)
        for module, _, name in (
            part.partition(":") for part in project["tool"]["flwr"]["app"]["components"].values()
        )
    )
    print(flower, config, client_app, server_app, run)
