"""Two real processes on this machine, each with one device: one run, one writer, and what if one is lost."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import tiny_source
from orbax.checkpoint import v1 as ocp

from jaxfl import cli
from jaxfl.runs import run

METHODS = ("fedavg", "pfedclub")  # the second one has a server step between rounds
ROUNDS = 4
FEDERATION = (
    "--partition classes,classes_per_client=2,samples_per_client=10 --clients 4 --public held-out "
    f"--models mlp,hidden=3 --epochs 1 --rounds {ROUNDS} --eval-every 2"
).split()

# Process 1 cannot write to any file.
COMMAND = """
import os, resource, signal, sys
from jaxfl.cli import entry
from jaxfl.runs import run

second = sys.argv[-1] == "1"
if second:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
{}
entry()
"""

# Every process turns chunks into records: at the second one, after round 4, process 1 is killed.
KILL = """
records, chunks = run.records, []

def killed(*arguments, **options):
    chunks.append(arguments)
    if second and len(chunks) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return records(*arguments, **options)

run.records = killed
"""


def together(folder, arguments, amendment=""):
    """Run a command in two processes; how each of them ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or str(folder / "cache"),
    }
    meet = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process"]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND.format(amendment), *arguments, *meet, str(number)],
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [process.communicate(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *words) for process, words in zip(running, said, strict=True)]


def state(folder):
    """The arrays of the last checkpoint, by name."""
    path = folder.absolute() / "checkpoints" / str(ROUNDS)
    found = ocp.metadata(path).metadata
    return ocp.load(path, {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in found.items()})


def lines(folder):
    """The metrics without times, and without what the server found out, which has times in it."""
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: line[name] for name in line if name not in ("seconds", "findings")} for line in found]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """The options that name a tiny data set."""
    path, source = tmp_path_factory.mktemp("data") / "tiny.npz", tiny_source()
    np.savez(path, images=source.images, labels=source.labels, split=source.train)
    return ["--dataset", str(path)]


@pytest.fixture(scope="module")
def compared(dataset, tmp_path_factory):
    """The folder of a comparison that two processes have made."""
    folder = tmp_path_factory.mktemp("processes")
    arguments = ["compare", *METHODS, *dataset, *FEDERATION, "--run-dir", str(folder / "compared")]
    first, second = together(folder, arguments)
    assert first[0] == 0, first[2]
    assert second[0] == 0, second[2]
    assert "on 2 x cpu" in first[1] and "compared: table.csv" in first[1]
    assert "fedavg" not in second[1]  # one speaks for both
    return folder / "compared"


def test_two_processes_are_two_devices(compared, dataset, tmp_path):
    """Up to the order of sums; here there is but one order of two summands."""
    run._programs_without_rates.cache_clear()  # other modules' programs are optimised, and round otherwise
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        cli.main(
            ["compare", *METHODS, *dataset, *FEDERATION, "--devices", "2", "--run-dir", str(tmp_path / "one")]
        )
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        run._programs_without_rates.cache_clear()
    for method in METHODS:
        one, two = (folder / method / "seed-0" for folder in (tmp_path / "one", compared))
        assert lines(two) == lines(one)
        assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
        jax.tree.map(np.testing.assert_array_equal, state(two), state(one))


def test_a_lost_process_ends_the_run_and_both_resume_it(compared, dataset, tmp_path):
    folder = tmp_path / "run"
    arguments = ["run", "fedavg", *dataset, *FEDERATION, "--run-dir", str(folder)]
    first, second = together(tmp_path, arguments, KILL)
    assert first[0] == second[0] == 2
    for _, _, said in (first, second):
        assert said.splitlines()[-1].startswith("jaxfl: The processes of this run are no longer complete")
        assert "Traceback" not in said
    assert not (folder / "result.json").exists()

    for code, _, said in together(tmp_path, ["resume", str(folder)]):
        assert code == 0, said
    undisturbed = compared / "fedavg" / "seed-0"
    assert lines(folder) == lines(undisturbed)
    jax.tree.map(np.testing.assert_array_equal, state(folder), state(undisturbed))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--processes 2 --process 0", "--processes 2 needs --coordinator HOST:PORT"),
        ("--processes 2 --process 2 --coordinator localhost:1", "a number from 0 to 1 for each"),
        ("--processes auto --process 1", "finds --process and --coordinator by itself"),
    ],
)
def test_processes_that_cannot_meet_are_refused(capsys, options, words):
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "fedavg", *options.split()])
    sentence = capsys.readouterr().err
    assert end.value.code == 2
    assert sentence.startswith("jaxfl: ") and words in sentence and sentence.count("\n") == 1
