"""One run in two real processes on this machine, each with one device; also if one of them is lost."""

import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import long
from folders import metrics, state
from killing import environment

from jaxfl import cli
from jaxfl.errors import JaxflError
from jaxfl.machine import processes

SEEDS = ("seed-0", "seed-1")  # one program, except with a server step between rounds
ROUNDS = 4
FEDERATION = (
    "--partition classes,classes_per_client=2,samples_per_client=10 --clients 4 --public held-out "
    f"--models mlp,hidden=3 --epochs 1 --rounds {ROUNDS} --eval-every 2"
).split()

COMMAND = """
import functools, os, resource, signal, sys
import jax
from jaxfl.core import engine
from jaxfl.grid import execute
from jaxfl.cli import entry
from jaxfl.folder import checkpoint

number, may_write = int(sys.argv[-1]), {!r}

def write_no_more():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

def before(module, name, do):
    function = getattr(module, name)

    def amended(*arguments, **options):
        do()
        return function(*arguments, **options)

    setattr(module, name, amended)

if number not in may_write:
    write_no_more()
{}
entry()
"""

# Every process scores after rounds 2 and 4: at the first or second time, one of them gets a signal.
SIGNAL = """
chunks = []

def send():
    chunks.append(number)
    if chunks == {} * [{}]:
        os.kill(os.getpid(), signal.{})

before(engine, "_scored", send)
"""
OTHER_OPTIONS = """
if number == 1:
    sys.argv += ["--clients", "2"]
"""
OTHER_WEIGHTS = """
from jaxfl.mechanisms import sharing

draw = sharing.initial_weights

def moved(key, federation):
    return jax.tree.map(lambda leaf: leaf + number, draw(key, federation))

sharing.initial_weights = moved
"""
OTHER_DATA = """
load = execute.load_source

def darker(setup):
    source = load(setup)
    return source._replace(images=source.images // 2)

if number == 1:
    execute.load_source = darker
"""
FULL_DISK = """
if number == {}:
    before(checkpoint, "_named", write_no_more)
"""
IMPATIENT = """
jax.distributed.initialize = functools.partial(jax.distributed.initialize, initialization_timeout=2)
"""
NOT_COMPLETE = "jaxfl: The processes of this run have not found each other, or some have ended"


def together(folder, arguments, amendment="", numbers=(0, 1), may_write=(0,)):
    """Run a command in two processes, or in one of them; return how each ended.

    Processes that are not in `may_write` cannot write to any file.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meet = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process"]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND.format(may_write, amendment), *arguments, *meet, str(number)],
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in numbers
    ]
    try:
        said = [process.communicate(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *words) for process, words in zip(running, said, strict=True)]


def comparison(method, dataset):
    """Return the command that compares a method's seeds."""
    return ["compare", method, *dataset, *FEDERATION, "--seeds", "2"]


@pytest.fixture(scope="module")
def compared(dataset, tmp_path_factory):
    """Return the folder of a comparison that two processes have made."""
    folder = tmp_path_factory.mktemp("processes")
    arguments = [*comparison("fedavg", dataset), "--run-dir", f"{folder}/compared"]
    first, second = together(folder, arguments)
    assert first[0] == second[0] == 0, f"{first[2]}\n{second[2]}"
    assert "on 2 x cpu" in first[1] and "compared: table.csv" in first[1]
    assert "fedavg: 2 runs as one program" in first[1]
    assert "fedavg" not in second[1]  # only the first process prints
    return folder / "compared"


def test_two_processes_are_two_devices(compared, dataset, tmp_path):
    """Two processes compute the bits of two devices, because two summands have only one order."""
    cli.main([*comparison("fedavg", dataset), "--devices", "2", "--run-dir", str(tmp_path / "one")])
    assert_same_runs(compared / "fedavg", tmp_path / "one" / "fedavg")


@pytest.mark.long
def test_a_server_step_between_rounds_is_taken_in_both_processes(dataset, tmp_path):
    """Clients begin with draws of their own."""
    arguments = [*comparison("pfedclub", dataset), "--initial", "own"]
    cli.main([*arguments, "--devices", "2", "--run-dir", str(tmp_path / "one")])
    command = [*arguments, "--run-dir", str(tmp_path / "two")]
    for code, _, said in together(tmp_path, command, may_write=(0, 1)):
        assert code == 0, said
    assert_same_runs(tmp_path / "two" / "pfedclub", tmp_path / "one" / "pfedclub")


@pytest.mark.long
def test_both_processes_start_from_another_run(compared, dataset, tmp_path):
    arguments = [*comparison("fedper", dataset), "--init-from", str(compared / "fedavg" / "seed-0")]
    cli.main([*arguments, "--devices", "2", "--run-dir", str(tmp_path / "one")])
    command = [*arguments, "--run-dir", str(tmp_path / "two")]
    for code, _, said in together(tmp_path, command, may_write=(0, 1)):
        assert code == 0, said
    assert_same_runs(tmp_path / "two" / "fedper", tmp_path / "one" / "fedper")
    of_both = [np.load(tmp_path / n / "fedper" / "seed-0" / "initial.npz") for n in ("one", "two")]
    jax.tree.map(np.testing.assert_array_equal, *map(dict, of_both))


def assert_same_runs(some, others):
    """Assert that two folders of a method have the same metrics, files and states for every seed."""
    for seed in SEEDS:
        one, two = some / seed, others / seed
        assert metrics(one) == metrics(two)
        assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
        jax.tree.map(np.testing.assert_array_equal, state(one), state(two))


def resumed(folder, compared):
    """Resume a run in two processes; assert that it ends like the undisturbed one."""
    assert not (folder / "result.json").exists()
    for code, _, said in together(folder.parent, ["resume", str(folder)]):
        assert code == 0, said
    undisturbed = compared / "fedavg" / "seed-0"
    assert metrics(folder) == metrics(undisturbed)
    jax.tree.map(np.testing.assert_array_equal, state(folder), state(undisturbed))


@pytest.mark.long
def test_a_divided_state_of_two_processes_is_resumed_by_one(dataset, tmp_path):
    """A run in two processes that divide its state is continued by one with as many devices."""
    arguments = ["run", "local", *dataset, *FEDERATION]
    cli.main([*arguments, "--devices", "2", "--run-dir", str(tmp_path / "one")])
    amendment = SIGNAL.format(1, 1, "SIGINT")
    command = [*arguments, "--run-dir", str(tmp_path / "two")]
    for code, _, said in together(tmp_path, command, amendment, may_write=(0, 1)):
        assert code == 130, said
    cli.main(["resume", str(tmp_path / "two")])
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    jax.tree.map(np.testing.assert_array_equal, state(tmp_path / "one"), state(tmp_path / "two"))


@pytest.mark.parametrize("lost", [long(0), long(1)])
def test_a_lost_process_ends_the_run_and_both_resume_it(lost, compared, dataset, tmp_path):
    arguments = ["run", "fedavg", *dataset, *FEDERATION, "--run-dir", str(tmp_path / "run")]
    for code, _, said in together(tmp_path, arguments, SIGNAL.format(2, lost, "SIGKILL")):
        assert code == 2 and "Traceback" not in said
        assert said.splitlines()[-1].startswith(NOT_COMPLETE)
    resumed(tmp_path / "run", compared)


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "name", "expected"),
    [(0, "SIGINT", 130), (1, "SIGINT", 130), (0, "SIGTERM", 143), (1, "SIGTERM", 143)],
)
def test_all_processes_stop_when_one_is_asked_to(asked, name, expected, compared, dataset, tmp_path):
    arguments = ["run", "fedavg", *dataset, *FEDERATION, "--run-dir", str(tmp_path / "run")]
    amendment = SIGNAL.format(1, asked, name)
    if name == "SIGTERM":  # schedulers send it to the parent, which forwards it, and to all
        amendment = amendment.replace(
            "        os.kill", "        os.kill(os.getppid(), signal.SIGTERM)\n        os.kill"
        )
    for code, _, said in together(tmp_path, arguments, amendment):
        assert code == expected
        assert "stopped after round 2 of 4; continue with `jaxfl resume" in said.splitlines()[-1]
    resumed(tmp_path / "run", compared)


@pytest.mark.long
@pytest.mark.parametrize(("full", "method"), [(0, "fedavg"), (0, "local"), (1, "local")])
def test_a_full_disk_ends_all_processes(full, method, dataset, tmp_path):
    """A full disk of either process ends both; process 1 writes only where the state is divided."""
    arguments = ["run", method, *dataset, *FEDERATION, "--run-dir", str(tmp_path / "run")]
    ended = together(tmp_path, arguments, FULL_DISK.format(full), may_write=(0, 1))
    assert [code for code, _, _ in ended] == [2, 2]
    told = [[line for line in said.splitlines() if line.startswith("jaxfl: ")] for _, _, said in ended]
    assert "cannot be written" in told[full][-1]
    assert told[1 - full][-1].startswith(NOT_COMPLETE)


@pytest.mark.parametrize(
    ("amendment", "what"),
    [long(OTHER_OPTIONS, "options"), (OTHER_DATA, "data"), long(OTHER_WEIGHTS, "initial weights")],
    ids=("options", "data", "weights"),
)
def test_processes_with_different_options_data_or_weights_all_refuse(amendment, what, dataset, tmp_path):
    arguments = ["run", "local", *dataset, *FEDERATION, "--run-dir", str(tmp_path / "run")]
    for code, _, said in together(tmp_path, arguments, amendment):
        assert code == 2
        assert said.splitlines()[-1].startswith(
            f"jaxfl: Process 1 has other {what} than process 0; start all"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_finds_no_other_says_so(number, dataset, tmp_path):
    ((code, _, said),) = together(tmp_path, ["run", "fedavg", *dataset], IMPATIENT, numbers=[number])
    assert code == 2 and said.splitlines()[-1].startswith(NOT_COMPLETE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--processes 2 --process 0", "--processes 2 --process 0 is incomplete or wrong"),
        ("--processes 2 --process 2 --coordinator node:1", "a different number from 0 to N - 1 for each"),
        ("--processes 2 --process 0 --coordinator node", "--coordinator node is incomplete or wrong"),
        ("--processes 2 --process 0 --coordinator :1", "--coordinator HOST:PORT, the same for all"),
        (
            "--processes 0 --process 0 --coordinator node:1",
            "--processes 0 --process 0 --coordinator node:1 is",
        ),
        ("--processes auto --process 1", "finds --process and --coordinator automatically"),
    ],
)
def test_processes_that_cannot_meet_are_refused(capsys, options, words):
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "fedavg", *options.split()])
    sentence = capsys.readouterr().err
    assert end.value.code == 2
    assert sentence.startswith("jaxfl: ") and words in sentence and sentence.count("\n") == 1


def test_a_machine_whose_name_has_no_address_is_named(monkeypatch):
    """On CPUs the processes' collectives listen there; without one JAX has no devices at all."""

    def no_devices():
        raise RuntimeError("Unable to initialize backend 'cpu'")

    monkeypatch.setattr(processes, "_stand_by", lambda: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **known: None)
    monkeypatch.setattr(jax, "device_count", no_devices)
    with pytest.raises(JaxflError, match=f"here {socket.gethostname()}, must have an address"):
        processes.connect(processes.Processes(2, 0, "localhost:1"))
