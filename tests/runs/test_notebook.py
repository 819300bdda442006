"""What notebooks rely on: edited code counts, Ctrl-C ends loops, runs can be pickled."""

import os
import pickle
import signal
import sys

import jax
import numpy as np
import pytest

import jaxfl
from jaxfl.errors import JaxflError
from jaxfl.fl import Method, Training, local_training, proximal, sharing
from jaxfl.runs.interrupt import Interrupted

METHOD = """
from factor import FACTOR
from jaxfl.fl import Method, Training, local_training, proximal, sharing

def build(config):
    def objective(participant, blocks):
        return proximal(participant.model, participant.received, FACTOR, blocks)

    return sharing(config, train=local_training(config, objective=objective))

mine = Method("mine", build, Training, "FedProx", "here", "")
"""


@pytest.fixture
def options(dataset, tmp_path, monkeypatch):
    """Return the options of a short run; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    federation = {"clients": 2, "models": "mlp,hidden=3", "partition": "iid", "rounds": 1, "eval_every": 1}
    return {"dataset": dataset[1], "quiet": True, "epochs": 2} | federation


def test_an_edited_module_beside_an_own_file_is_loaded_again(options, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "my.py").write_text(METHOD)
    losses = []
    for factor in (0.0, 5.0, 0.0):
        (tmp_path / "factor.py").write_text(f"FACTOR = {factor}")
        os.utime(tmp_path / "factor.py", (1e9, 1e9))  # as if all edits had been made in one second
        losses += jaxfl.run("my.py:mine", **options).loss.tolist()
    assert losses[0] == losses[2] < losses[1]


def test_a_function_that_is_redefined_in_a_notebook_counts(options):
    """The method is the same object: only a function that its `build` calls is another one."""
    factor = 0.0

    def build(config):
        def objective(participant, blocks):
            return proximal(participant.model, participant.received, factor, blocks)

        return sharing(config, train=local_training(config, objective=objective))

    mine, losses = Method("mine", build, Training, "FedProx", "here", ""), []
    for factor in (0.0, 5.0):  # noqa: B007
        losses += jaxfl.run(mine, **options).loss.tolist()
    assert losses[0] < losses[1]


def test_ctrl_c_in_the_last_rounds_ends_a_loop_over_runs(options, tmp_path):
    def press(folder, record):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="All rounds were done and saved"):
        jaxfl.run("fedavg", run_dir="run", log=press, **options)
    assert jaxfl.load("run").result["rounds"] == 1
    with pytest.raises(
        JaxflError, match=r"holds a run; .*jaxfl.load\('run'\) opens it, jaxfl.resume\('run'\)"
    ):
        jaxfl.run("fedavg", run_dir="run", **options)


def test_a_run_is_used_from_elsewhere(options, tmp_path, monkeypatch):
    run = jaxfl.run("fedavg", run_dir="run", **options)
    accuracy = run.models[1].accuracy  # which loads what a pickle lacks
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(pickle.dumps(run)).models[1].accuracy == run.models[1].accuracy == accuracy
    assert str(tmp_path) in repr(run)
    assert (run.seen(-1, [3]) == run.source.images[[3]]).all()
    for rows in ([], [0.5], "a", None, slice(3), np.array([True, False])):
        with pytest.raises(JaxflError, match="rows must be a list of whole numbers"):
            run.seen(0, rows)
    predict = run.models[0].predict
    for wrong in (lambda: predict([[1], [1, 2]]), lambda: jax.jit(predict)(run.source.images[:2])):
        with pytest.raises(JaxflError, match="must be one array of numbers that are known"):
            wrong()


def test_options_may_be_arrays(options):
    run = jaxfl.run("fedavg", target=np.array([0.1, 0.9]), lr=np.array(0.1), **options)
    assert run.config["options"]["target"] == [0.1, 0.9] and run.config["options"]["lr"] == 0.1
    with pytest.raises(JaxflError, match="--dataset must be a text, not a list"):
        jaxfl.run("fedavg", **options | {"dataset": np.zeros((10, 8, 8))})
    with pytest.raises(JaxflError, match="--init-from must not be empty"):
        jaxfl.run("fedavg", init_from="", **options)
    with pytest.raises(JaxflError, match="lr=0.1 gives lr, which is given once more"):
        jaxfl.run("fedavg,lr=0.1", lr=0.2, **options)
