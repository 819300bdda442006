"""Faults injected into real runs: afterwards nothing is missing, doubled or different.

Short tests kill runs of FedPer. Those of all methods take hundreds of seconds:

    python -m pytest tests/folder/test_faults.py -m ""

This also writes docs/faults.md.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import arrays_of, comparable, long, tiny_source
from killing import MOMENTS, Commands, Moment, environment, press
from methods.cases import short

import jaxfl
from jaxfl import cli
from jaxfl.core import engine
from jaxfl.data import saved_partition
from jaxfl.errors import JaxflError
from jaxfl.folder import checkpoint, owner, several_runs, store
from jaxfl.folder import code as code_of_runs
from jaxfl.folder import config as config_of_runs
from jaxfl.folder.variant import choose
from jaxfl.machine import files
from jaxfl.registry import METHODS
from jaxfl.runs import interrupt
from jaxfl.runs import loop as run_loop
from jaxfl.runs import open as opening
from jaxfl.runs.interrupt import deferred

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
ROUNDS, EVERY, CHECKPOINTS = 16, 2, 4
FEDERATION = (
    "--partition classes,classes_per_client=2,samples_per_client=8 --clients 4 --participation 0.5 "
    f"--epochs 1 --rounds {ROUNDS} --eval-every {EVERY} --checkpoint-every {CHECKPOINTS} --seed 3 --devices 1"
).split()
SMALL = ["--models", "mlp,hidden=3"]  # compiled in a second
UNLIKE = ["--models", "mlp,hidden=3", "mcmahan,width=0.06,padding=same"]  # for methods that look into models
PLAIN = [*FEDERATION, *SMALL, "--keep-checkpoints", "3"]
HOST = ("pfedclub", "pfedclub-plus", "pfedhr")
KILLS = 7  # of each method, in the long test

RESUMED = "`jaxfl resume` continues to the same bits"
REPEATED = "the same command begins again"
FAULTS = {f"killed {moment}": RESUMED for moment in MOMENTS} | {
    "killed making the folder": f"{REPEATED}, or {RESUMED}",
    "Ctrl-C": f"the rounds in progress end and are saved; {RESUMED}",
    "Ctrl-C, and again": RESUMED,
    "Ctrl-C in a comparison": "the rounds in progress end and are saved; the same command continues",
    "SIGTERM": f"the rounds in progress end and are saved; {RESUMED}",
    "SIGTERM, and again": RESUMED,
    "SIGTERM in a comparison": "the rounds in progress end and are saved; the same command continues",
    "--max-seconds": f"no rounds begin that would not end in time; {RESUMED}",
    "two owners at once": "one sentence that names the owner, whose run ends with the same bits",
    "two owners of one comparison": "each run has one; the same bits, and the same command makes the table",
    "code changed": "one sentence that names the file; with --changed-code the result says from which round",
    "newest checkpoint unreadable": f"a warning; {RESUMED} from the one before",
    "metrics cut short": RESUMED,
    "another file of the run cut short": f"one sentence that names the file, or {RESUMED}",
    "data file cut short": "one sentence that names the file; no folder is made",
    "NaN in the data": "one sentence that names the file; no folder is made",
    "disk full, writing the configuration": f"one sentence; {REPEATED}",
    "disk full, writing metrics": f"one sentence; {RESUMED}",
    "disk full, writing matrices": f"one sentence; {RESUMED}",
    "disk full, writing a checkpoint": f"one sentence; {RESUMED}",
    "disk full, drawing pictures": f"one sentence; {RESUMED}",
    "disk full, writing the result": f"one sentence; {RESUMED}",
    "folder read-only": f"one sentence; once it can be written, {RESUMED}",
    "one client has one sample, one class nobody has, cohorts of one": "a result like any other",
    "all clients identical": "a result like any other",
    "one client has only test rows, another none": "the first never trains; a result like any other",
}
INJECTED = {}  # fault -> rounds to compute again, for each injection


def injected(fault, lost=0):
    assert fault in FAULTS
    INJECTED.setdefault(fault, []).append(lost)


@pytest.fixture
def failed_io():
    """Collect the coroutines that Orbax leaves after a failed read or write, which then warn."""
    yield
    gc.collect()


def with_failed_io(test):
    """Mark a test in which Orbax fails to read or to write."""
    ignored = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    return ignored(pytest.mark.usefixtures("failed_io")(test))


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Yield a runner of the real command, in processes that can be killed."""
    folder = tmp_path_factory.mktemp("commands")
    with Commands(folder, environment(folder)) as commands:
        yield commands


@pytest.fixture(scope="module")
def undisturbed(commands, dataset, tmp_path_factory):
    """Return a function that gives what an undisturbed run of these words writes, and runs them once."""
    folder = tmp_path_factory.mktemp("undisturbed")

    @functools.cache
    def written(*words):
        run = folder / str(len(list(folder.iterdir())))
        ended = commands([*words, str(run)])
        assert ended.code == 0, ended.error
        return contents(run)

    return written


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    """Return an undisturbed run; its programs are then compiled for the tests that repeat it."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    cli.main(["run", "fedavg", *dataset, *PLAIN, "--run-dir", str(folder)])
    assert checkpoint.saved(folder) == [8, 12, 16]
    return folder


def unfinished(finished, folder):
    """Return a copy of the run without its result."""
    shutil.copytree(finished, folder)
    (folder / "result.json").unlink()
    return folder


def main(capsys, *words):
    """Run the command in this process; return its exit code and its standard error."""
    capsys.readouterr()
    try:
        cli.main(list(map(str, words)))
    except SystemExit as end:
        return end.code, capsys.readouterr().err
    return 0, capsys.readouterr().err


def refusal(capsys, *words):
    """Return the one sentence with which the command must be refused."""
    code, sentence = main(capsys, *words)
    assert code == 2 and sentence.startswith("jaxfl: ") and sentence.count("\n") == 1, sentence
    if sys.version_info < (3, 11, 5):  # there what Orbax left cannot be reported while Python parses
        gc.collect()
    return sentence


def contents(folder):
    """Return what a finished run has written, by file, as far as two runs of the same bits share it."""
    found = {}
    for path in folder.iterdir():
        match path.suffix:
            case ".jsonl":
                found[path.name] = [comparable(json.loads(line)) for line in path.read_text().splitlines()]
            case ".json":
                found[path.name] = comparable(json.loads(path.read_text()))
            case ".npz":
                found[path.name] = arrays(np.load(path))
            case ".csv" | ".txt":
                found[path.name] = path.read_text()
            case _:
                found[path.name] = path.suffix
    for path in (path for kind in store.ABOUT_CLIENTS for path in (folder / kind).glob("*")):
        found[f"{path.parent.name}/{path.name}"] = arrays(np.load(path))
    for path in (folder / "checkpoints").glob("*"):
        found[f"checkpoints/{path.name}"] = arrays(arrays_of(path))
    return found


def arrays(named):
    return {name: (named[name].shape, named[name].tobytes()) for name in named}


def behind(folder):
    """Return the number of rounds with metrics after the last checkpoint."""
    written = len(store.read_metrics(folder))
    return written - max((rounds for rounds in checkpoint.saved(folder) if rounds <= written), default=0)


# --- kills


def moments(method, rng):
    """Yield moments at which to kill, without end: all kinds in random order, each with a random delay."""
    spans = {  # seconds
        "anywhere": 6.0,
        "making the folder": 0.03,
        "in a chunk of rounds": 0.02,
        "in the server's step": 0.3,
        "in an evaluation": 0.02,
        "writing matrices": 0.01,
        "writing a checkpoint": 0.1,
        "writing pictures and the result": 0.5,
        "cutting back for a resume": 0.01,
    }
    names = [name for name in MOMENTS if name != "in the server's step" or method in HOST]
    algorithm = choose(method).algorithm
    writes = algorithm.matrices or algorithm.embeddings
    names = [name for name in names if name != "writing matrices" or writes]
    while True:
        for name in rng.permutation(names):
            number = 1 if name in ("making the folder", "cutting back for a resume") else rng.integers(1, 3)
            yield Moment(str(name), int(number), float(rng.uniform(0, spans.get(name, 0))))


def killed_and_resumed(commands, undisturbed, dataset, folder, method, planned, kills):
    """Kill runs of a method `kills` times; every run must end like an undisturbed one."""
    models = UNLIKE if method in (*HOST, "draftfed") else SMALL
    start = ["run", short(method), *dataset, *FEDERATION, *models, "--run-dir"]
    expected = undisturbed(*start)
    done, runs = 0, itertools.count()
    while done < kills:
        run = folder / f"run-{next(runs)}"
        while not (run / store.RESULT).exists():
            moment = next(planned) if done < kills else None
            begun = (run / store.CONFIG).exists()
            ended = commands(["resume", str(run)] if begun else [*start, str(run)], moment)
            assert ended.code in (0, -signal.SIGKILL), ended.error
            if ended.code:
                done += 1
                injected(f"killed {moment.name}", behind(run))
        assert contents(run) == expected
        shutil.rmtree(run)


def test_the_functions_in_which_runs_are_killed_exist():
    assert all(hasattr(*place) for place in MOMENTS.values() if place)


@pytest.mark.parametrize("method", ["fedper", long("mnfl"), long("pfedclub")])
def test_a_run_that_is_killed_and_resumed_has_the_same_bits(commands, undisturbed, dataset, tmp_path, method):
    planned = {
        "fedper": [Moment("making the folder", 1, 0.001), Moment("writing a checkpoint", 2, 0.05)],
        "mnfl": [Moment("making the folder", 1, 0.001), Moment("writing a checkpoint", 2, 0.05)],
        "pfedclub": [Moment("in the server's step", 5, 0.1), Moment("in a line of metrics", 4)],
    }
    killed_and_resumed(commands, undisturbed, dataset, tmp_path, method, iter(planned[method]), 2)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_every_method_killed_at_random_moments_has_the_same_bits(
    commands, undisturbed, dataset, tmp_path, method
):
    rng = np.random.default_rng([*method.encode()])
    killed_and_resumed(commands, undisturbed, dataset, tmp_path, method, moments(method, rng), KILLS)


@pytest.mark.long
def test_a_study_that_is_killed_ten_times_ends_with_the_same_table(commands, dataset, tmp_path):
    study = tmp_path / "toy.toml"
    study.write_text(
        f"""
        title = "Toy"
        methods = ["fedavg", "fedper"]
        seeds = 2
        axes = {{ momentum = [0.0, 0.5], batch_size = [2, 3] }}

        [options]
        dataset = "{dataset[1]}"
        partition = "iid"
        models = ["mlp,hidden=3"]
        clients = 4
        rounds = 4
        epochs = 1
        """
    )

    def table(folder):
        return [(folder / f"study.{ending}").read_bytes() for ending in ("csv", "md", "tex")]

    def work(folder, moment=None):
        ended = commands(["study", str(study), "--run-dir", str(tmp_path / folder)], moment)
        assert ended.code in (0, -signal.SIGKILL), ended.error
        return ended.code

    assert work("undisturbed") == 0
    rng, killed = np.random.default_rng(0), 0
    while killed < 10:
        name = str(rng.choice(sorted(MOMENTS.keys() - {"in the server's step", "writing matrices"})))
        delay = rng.uniform(0, 4) if name == "anywhere" else rng.uniform(0, 0.1)
        if work("killed", Moment(name, int(rng.integers(1, 4)), delay)) == 0:  # it ended before the moment
            assert table(tmp_path / "killed") == table(tmp_path / "undisturbed")
            shutil.rmtree(tmp_path / "killed")
        else:
            killed += 1
    assert work("killed") == 0
    assert table(tmp_path / "killed") == table(tmp_path / "undisturbed")


def test_a_start_that_is_interrupted_leaves_its_folder_free(finished, dataset, tmp_path, capsys, monkeypatch):
    run = tmp_path / "method" / "run"
    words = ["run", "fedavg", *dataset, *PLAIN, "--run-dir", run]
    with monkeypatch.context() as patch:
        patch.setattr(saved_partition, "save", lambda *arguments: signal.raise_signal(signal.SIGINT))
        assert main(capsys, *words)[0] == 130
    assert [path.name for path in run.iterdir()] == ["config.part"]
    store.check_free(tmp_path)  # which a comparison in the folder above checks
    assert main(capsys, *words)[0] == 0
    assert contents(run) == contents(finished)


# --- Ctrl-C


def test_ctrl_c_saves_the_rounds_in_progress(finished, dataset, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    press(monkeypatch, times=1)
    code, said = main(capsys, "run", "fedavg", *dataset, *PLAIN, "--run-dir", run)
    assert code == 130
    assert f"fedavg has stopped after round 6 of 16; continue with `jaxfl resume {run}`." in said
    assert checkpoint.saved(run) == [4, 6] and behind(run) == 0
    injected("Ctrl-C", behind(run))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert main(capsys, "resume", run)[0] == 0
    assert contents(run) == contents(finished)


def test_a_second_ctrl_c_ends_at_once(finished, dataset, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    press(monkeypatch, times=2)
    code, said = main(capsys, "run", "fedavg", *dataset, *PLAIN, "--run-dir", run)
    assert code == 130 and said.endswith("jaxfl: Stopped.\n")
    assert checkpoint.saved(run) == [4] and len(store.read_metrics(run)) == 4
    injected("Ctrl-C, and again", behind(run))
    assert main(capsys, "resume", run)[0] == 0
    assert contents(run) == contents(finished)


def test_ctrl_c_stops_a_whole_comparison(finished, dataset, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "compared"
    words = ["compare", "fedavg", "fedavg,lr=0.2", *dataset, *PLAIN, "--run-dir", folder]
    press(monkeypatch, times=1)
    code, said = main(capsys, *words)
    assert code == 130
    assert f"has stopped with 0 of 2 runs finished; continue with `jaxfl resume {folder}`" in said
    (run,), (other,) = folder.glob("fedavg/*"), folder.glob("fedavg-lr=0.2/*")
    assert checkpoint.saved(run) == checkpoint.saved(other) != []  # in one program both stop together
    injected("Ctrl-C in a comparison", behind(run))
    assert main(capsys, *words)[0] == 0
    assert contents(run) == contents(finished)
    assert len(list(folder.glob("*/*/result.json"))) == 2


def test_deferring_ctrl_c_leaves_other_handlers_and_threads_alone():
    def handler():
        with deferred():
            return signal.getsignal(signal.SIGINT)

    seen = []
    thread = threading.Thread(target=lambda: seen.append(handler()))
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert handler() is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# --- SIGTERM and time limits


def test_sigterm_saves_the_rounds_in_progress(finished, dataset, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    press(monkeypatch, times=2, number=signal.SIGTERM)  # within one moment, as schedulers send it
    code, said = main(capsys, "run", "fedavg", *dataset, *PLAIN, "--run-dir", run)
    assert code == 143
    assert f"fedavg has stopped after round 6 of 16; continue with `jaxfl resume {run}`." in said
    assert checkpoint.saved(run) == [4, 6] and behind(run) == 0
    injected("SIGTERM", behind(run))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert main(capsys, "resume", run)[0] == 0
    assert contents(run) == contents(finished)


def test_a_second_sigterm_ends_at_once(finished, dataset, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setattr(interrupt, "ONE_MOMENT", 0.0)
    press(monkeypatch, times=2, number=signal.SIGTERM)
    code, said = main(capsys, "run", "fedavg", *dataset, *PLAIN, "--run-dir", run)
    assert code == 143 and said.endswith("jaxfl: Stopped.\n")
    assert checkpoint.saved(run) == [4] and len(store.read_metrics(run)) == 4
    injected("SIGTERM, and again", behind(run))
    assert main(capsys, "resume", run)[0] == 0
    assert contents(run) == contents(finished)


def test_sigterm_stops_a_whole_comparison(finished, dataset, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "compared"
    words = ["compare", "fedavg", "fedavg,epochs=2", *dataset, *PLAIN, "--run-dir", folder]
    press(monkeypatch, times=1, number=signal.SIGTERM)
    code, said = main(capsys, *words)
    assert code == 143 and "has stopped with 0 of 2 runs finished; continue with" in said
    assert [path.parent.name for path in folder.glob("*/*")] == ["fedavg"]
    injected("SIGTERM in a comparison", behind(folder / "fedavg" / "seed-3"))
    assert main(capsys, "resume", folder)[0] == 0  # the other one begins only now
    assert contents(folder / "fedavg" / "seed-3") == contents(finished)
    assert (folder / "fedavg-epochs=2" / "seed-3" / "result.json").exists()


def test_sigterm_before_the_first_round_ends_at_once(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(saved_partition, "save", lambda *arguments: signal.raise_signal(signal.SIGTERM))
    code, said = main(capsys, "run", "fedavg", *dataset, *PLAIN, "--run-dir", tmp_path / "run")
    assert code == 143 and said == "jaxfl: Stopped.\n"


@pytest.fixture
def slow(monkeypatch):
    """Make every evaluation, with the rounds before it, take ten seconds of a simulated clock."""
    evaluate, now = engine.evaluate, [0.0]

    def evaluated(*arguments):
        now[0] += 10
        return evaluate(*arguments)

    clock = types.SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(engine, "evaluate", evaluated)
    monkeypatch.setattr(interrupt, "time", clock)
    monkeypatch.setattr(run_loop, "time", clock)


def test_a_run_stops_in_time(slow, finished, dataset, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["run", "fedavg", *dataset, *PLAIN, "--max-seconds", "35", "--run-dir", run]
    code, said = main(capsys, *words)
    assert code == 75
    because = "because the next rounds would not end within --max-seconds"
    assert f"fedavg has stopped after round 6 of 16, {because}; continue with `jaxfl resume {run}`." in said
    assert checkpoint.saved(run) == [4, 6] and behind(run) == 0
    injected("--max-seconds", behind(run))
    assert main(capsys, "resume", run, "--max-seconds", "10")[0] == 75
    assert checkpoint.saved(run)[-1] == 8  # however little time there is, two more rounds are run
    assert main(capsys, "resume", run, "--max-seconds", "50")[0] == 0
    assert contents(run) == contents(finished)


def test_a_comparison_stops_in_time(slow, finished, dataset, tmp_path, capsys):
    folder = tmp_path / "compared"
    words = ["compare", "fedavg", "fedavg,epochs=2", *dataset, *PLAIN, "--run-dir", folder]
    code, said = main(capsys, *words, "--max-seconds", "85")  # eight chunks of ten seconds each
    assert code == 75 and "stopped with 1 of 2 runs finished, because the next rounds would not end" in said
    assert contents(folder / "fedavg" / "seed-3") == contents(finished)
    assert "--max-seconds must lie in (0, inf), but is 0" in refusal(capsys, *words, "--max-seconds", "0")
    assert main(capsys, *words)[0] == 0


# --- two owners


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Yield a runner of commands at the same time as `commands`."""
    folder = tmp_path_factory.mktemp("others")
    with Commands(folder, environment(folder)) as commands:
        yield commands


def beside(commands, others, first, second, begun, delay):
    """Run a command, and another one `delay` seconds after `begun` exists; return how both ended."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(commands, list(map(str, first)))
        while begun and not (begun.exists() or running.done()):
            time.sleep(0.001)
        time.sleep(delay)
        ended = others(list(map(str, second)))
        return running.result(), ended


@pytest.mark.parametrize("times", [2, long(20)])
def test_a_run_has_one_owner(commands, others, undisturbed, dataset, tmp_path, times):
    rng, refused = np.random.default_rng(times), 0
    start = ["run", "fedper", *dataset, *FEDERATION, *SMALL, "--run-dir"]
    expected = undisturbed(*start)
    for number in range(times):
        run = tmp_path / f"run-{number}"
        delay = 0.0 if times == 2 else rng.uniform(0, 1.5)
        if number % 2:  # both start the run
            ended = beside(commands, others, [*start, run], [*start, run], None, delay / 10)
        else:
            ended = beside(commands, others, [*start, run], ["resume", run], run / store.CONFIG, delay)
        codes = sorted(process.code for process in ended)
        assert codes in ([0, 2], [0, 0]), ended  # the first one may have ended just before
        if 2 in codes:
            (sentence,) = [process.error for process in ended if process.code]
            assert sentence.count("\n") == 1, sentence
            by_owner = f") works in {run};" in sentence and "end it first" in sentence
            assert by_owner or (number % 2 and f"{run} already holds a run" in sentence), sentence
            refused += 1
        assert contents(run) == expected
        injected("two owners at once")
    assert refused >= times / 2


@pytest.mark.long
def test_the_runs_of_a_comparison_have_one_owner_each(commands, others, dataset, tmp_path):
    folder = tmp_path / "compared"
    words = ["compare", "fedavg", "fedavg,epochs=2", "fedper", *dataset, *PLAIN, "--run-dir", folder]
    begun = folder / "fedavg" / "seed-3" / store.CONFIG
    ended = beside(commands, others, words, words, begun, 0.0)
    assert {process.code for process in ended} <= {0, 2}
    refused = [process.error for process in ended if process.code]  # empty if all runs had finished meanwhile
    assert all("/seed-3; wait for it" in said and said.count("\n") == 1 for said in refused)
    injected("two owners of one comparison")
    again = commands(list(map(str, words)))
    assert (again.code, again.error) == (0, "")
    assert len(list(folder.glob("*/*/result.json"))) == 3 and not list(folder.glob("*/*/owner.*"))
    words[-1] = tmp_path / "undisturbed"
    assert commands(list(map(str, words))).code == 0
    for run in folder.glob("*/seed-3"):
        assert contents(run) == contents(words[-1] / run.relative_to(folder))


@pytest.mark.long
def test_a_comparison_leaves_out_runs_with_another_owner(finished, dataset, tmp_path, capsys):
    folder = tmp_path / "compared"
    words = ["compare", "fedavg", "fedavg,lr=0.2", *dataset, *PLAIN, "--run-dir", folder]
    with owner.owned(folder / "fedavg-lr=0.2" / "seed-3"):
        sentence = refusal(capsys, *words)
    assert "1 of 2 runs have not finished: " in sentence
    assert (
        f"Process {os.getpid()} on " in sentence and f" works in {folder}/fedavg-lr=0.2/seed-3; " in sentence
    )
    assert (folder / "table.csv").exists() and not (folder / "comparison.json").exists()
    assert not (folder / "fedavg-lr=0.2" / "seed-3").exists()
    assert contents(folder / "fedavg" / "seed-3") == contents(finished)
    assert main(capsys, *words) == (0, "")
    end = json.loads((folder / "comparison.json").read_text())
    assert end.pop("select") == "last"
    assert end == {"runs": 2, "finished": 2, "failures": [], "order": ["fedavg", "fedavg-lr=0.2"]}


def test_nothing_is_written_into_a_folder_that_was_made_anew(
    finished, dataset, tmp_path, capsys, monkeypatch
):
    """As by rm -r and the same command in another shell, while the first one goes on."""
    run, evaluate, calls = tmp_path / "run", engine.evaluate, itertools.count(1)

    def replaced(*arguments):
        if next(calls) == 2:
            shutil.rmtree(run)
            shutil.copytree(finished, run)
            (run / "owner.lock").touch()
        return evaluate(*arguments)

    monkeypatch.setattr(engine, "evaluate", replaced)
    sentence = refusal(capsys, "run", "fedavg", *dataset, *PLAIN, "--run-dir", run)
    assert f"{run} has been removed while it was run" in sentence
    (run / "owner.lock").unlink()
    assert contents(run) == contents(finished)


def test_a_run_that_another_command_has_made_meanwhile_is_not_taken_for_ours(
    dataset, tmp_path, capsys, monkeypatch
):
    words = ["compare", "fedavg", *dataset, *PLAIN, "--run-dir", tmp_path / "compared"]
    keep = several_runs.keep_command

    def meanwhile(*arguments):  # after the folder has been checked
        monkeypatch.setattr(several_runs, "keep_command", keep)
        cli.main([*map(str, words), "--lr", "0.2"])
        keep(*arguments)

    monkeypatch.setattr(several_runs, "keep_command", meanwhile)
    sentence = refusal(capsys, *words)
    assert f"meanwhile made {tmp_path}/compared/fedavg/seed-3 with other options" in sentence


# --- damaged files


def cut(path, share):
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


@with_failed_io
def test_unreadable_checkpoints_are_skipped(finished, tmp_path, capsys):
    run = unfinished(finished, tmp_path / "run")
    for path in (run / "checkpoints" / "16").rglob("*"):
        if path.is_file():
            cut(path, 0.5)
    shutil.rmtree(run / "checkpoints" / "12" / "state")
    (run / "matrices").mkdir()
    for rounds in (8, 16):
        np.savez(run / "matrices" / f"{rounds}.npz")
    with pytest.warns(UserWarning, match="cannot be read") as warned:
        assert main(capsys, "resume", run)[0] == 0
    assert [str(warning.message).split()[2][-14:] for warning in warned] == [
        "checkpoints/16",
        "checkpoints/12",
    ]
    injected("newest checkpoint unreadable", 16 - 8)
    assert [path.name for path in (run / "matrices").iterdir()] == ["8.npz"]
    shutil.rmtree(run / "matrices")
    assert contents(run) == contents(finished)


def sums_agree(folder):
    """Return what another program says of the checksums in a folder."""
    words = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    return not subprocess.run(words, cwd=folder, capture_output=True, check=False).returncode


def test_a_changed_byte_of_a_checkpoint_is_noticed(finished, tmp_path, capsys):
    run = unfinished(finished, tmp_path / "run")
    newest = run / "checkpoints" / "16"
    weights = max(filter(Path.is_file, newest.rglob("*")), key=lambda path: path.stat().st_size)
    content = bytearray(weights.read_bytes())
    assert sums_agree(newest)
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert not sums_agree(newest)
    with pytest.warns(UserWarning, match=f"{weights.relative_to(newest)} has changed"):
        assert main(capsys, "resume", run)[0] == 0
    injected("newest checkpoint unreadable", 16 - 12)
    assert contents(run) == contents(finished)


@with_failed_io
def test_without_a_readable_checkpoint_nothing_is_touched(finished, tmp_path, capsys):
    run = unfinished(finished, tmp_path / "run")
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path / "state")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.warns(UserWarning, match="cannot be read"):
        sentence = refusal(capsys, "resume", run)
    assert f"No checkpoint in {run}/checkpoints can be read; delete " in sentence
    assert checkpoint.saved(run) == [8, 12, 16] and (run / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(run / "checkpoints")
    assert main(capsys, "resume", run)[0] == 0
    assert contents(run) == contents(finished)


def test_a_checkpoint_of_other_shapes_is_refused_and_kept(finished, tmp_path, capsys, monkeypatch):
    """Such a checkpoint is from a jaxfl that rounded the widths of its networks differently."""
    run = unfinished(finished, tmp_path / "run")
    monkeypatch.setattr(checkpoint, "_named", wider(checkpoint._named))
    sentence = refusal(capsys, "resume", run)
    assert "checkpoints/16 is from a version of jaxfl whose models or states had other shapes" in sentence
    assert "repeat the run with `jaxfl run --from`" in sentence and checkpoint.saved(run) == [8, 12, 16]


def wider(named):
    """Return a function like `named` that gives the matrices of a state one more column."""

    def of_state(state):
        return {
            name: np.empty((*leaf.shape[:-1], leaf.shape[-1] + 1)) if leaf.ndim > 1 else leaf
            for name, leaf in named(state).items()
        }

    return of_state


@pytest.mark.parametrize("lines", [0, 9, 12, 15])
def test_metrics_cut_short_change_no_bits(finished, tmp_path, capsys, lines):
    run = unfinished(finished, tmp_path / "run")
    written = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(written[:lines]) + written[lines][:30] + b"\xff\n")
    lost = behind(run)
    assert main(capsys, "resume", run)[0] == 0
    assert contents(run) == contents(finished)
    injected("metrics cut short", lost)


@with_failed_io
@pytest.mark.filterwarnings("ignore:The checkpoint")
@pytest.mark.parametrize("share", [long(0.0), 0.4, long(0.99)])
@pytest.mark.parametrize("name", ["config.json", "partition.npz", "checkpoints/16/state/manifest.ocdbt"])
def test_other_files_cut_short_are_refused_or_change_no_bits(finished, tmp_path, capsys, name, share):
    run = unfinished(finished, tmp_path / "run")
    cut(run / name, share)
    lost = behind(run)
    code, said = main(capsys, "resume", run)
    if code == 0:
        assert contents(run) == contents(finished)
    else:
        assert code == 2 and str(run / name) in said and "Traceback" not in said
    injected("another file of the run cut short", lost)


@pytest.mark.parametrize("share", [long(0.0), 0.5, long(0.99)])
def test_data_cut_short_are_refused(dataset, tmp_path, capsys, share):
    path = tmp_path / "cut.npz"
    shutil.copy(dataset[1], path)
    cut(path, share)
    words = ["run", "fedavg", *PLAIN, "--dataset", path, "--run-dir", tmp_path / "run"]
    assert f"{path} is damaged or not an .npz file" in refusal(capsys, *words)
    assert list(tmp_path.iterdir()) == [path]
    injected("data file cut short")


def test_a_single_nan_in_the_data_is_refused(tmp_path, capsys):
    path, source = tmp_path / "nan.npz", tiny_source()
    images = source.images.astype(np.float32)
    images[-1, 0, 0] = np.nan
    np.savez(path, images=images, labels=source.labels)
    words = ["run", "fedavg", *PLAIN, "--dataset", path, "--run-dir", tmp_path / "run"]
    assert f"{path} has NaN" in refusal(capsys, *words)
    assert list(tmp_path.iterdir()) == [path]
    injected("NaN in the data")


# --- folders that cannot be written


def full_disk(monkeypatch, module, name, call=1, room=100):
    """Let no file grow beyond `room` bytes during one call of a function: the system refuses to write."""
    usual, calls = getattr(module, name), itertools.count(1)

    def without_room(*arguments, **options):
        if next(calls) != call:
            return usual(*arguments, **options)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            return usual(*arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(module, name, without_room)


@pytest.mark.parametrize(
    ("what", "where"),
    [
        long("writing the configuration", (saved_partition, "save", 1)),
        long("writing metrics", (store, "append_metrics", 5)),
        ("writing a checkpoint", (checkpoint, "save", 2)),
        ("drawing pictures", (files, "write_pictures", 1)),
        long("writing the result", (files, "write_json", 1)),
    ],
)
@with_failed_io
def test_a_full_disk_changes_no_bits(finished, dataset, tmp_path, capsys, monkeypatch, what, where):
    run = tmp_path / "run"
    words = ["run", "fedavg", *dataset, *PLAIN, "--run-dir", run]
    full_disk(monkeypatch, *where)
    sentence = refusal(capsys, *words)
    assert str(run) in sentence and "cannot be written (" in sentence and "free some space" in sentence
    injected(f"disk full, {what}", behind(run))
    begun = (run / "config.json").exists()
    assert begun == (what != "writing the configuration")
    assert main(capsys, *(["resume", run] if begun else words))[0] == 0
    assert contents(run) == contents(finished)


@pytest.mark.long
def test_a_full_disk_while_writing_matrices_changes_no_bits(dataset, tmp_path, capsys, monkeypatch):
    words = ["run", short("mnfl"), *dataset, *PLAIN, "--run-dir"]
    assert main(capsys, *words, tmp_path / "undisturbed")[0] == 0
    run = tmp_path / "run"
    full_disk(monkeypatch, store, "write_about_clients", 2)
    sentence = refusal(capsys, *words, run)
    assert f"{run}/matrices/8.npz cannot be written (File too large); free some space" in sentence
    injected("disk full, writing matrices", behind(run))
    assert main(capsys, "resume", run)[0] == 0
    assert contents(run) == contents(tmp_path / "undisturbed")


# --- code that changes between a run and its resume

OWN = """
import {helper}
from jaxfl import registry
fedavg = registry.METHODS["fedavg"]
own = fedavg._replace(name="own", build=lambda config: fedavg.build(config))
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Yield the files of a user's own method and of a module that it imports."""
    monkeypatch.syspath_prepend(tmp_path)
    helper = tmp_path / f"helper_of_{tmp_path.name}.py"
    helper.write_text("rate = 1\n")
    (tmp_path / "my.py").write_text(OWN.format(helper=helper.stem))
    yield tmp_path / "my.py", helper
    sys.modules.pop(helper.stem, None)


@pytest.mark.parametrize("which", [long(0), 1])
def test_changed_user_code_is_refused_until_it_is_allowed(own, which, dataset, tmp_path, capsys, monkeypatch):
    run, path = tmp_path / "run", own[which]
    before = path.read_text()
    press(monkeypatch, times=1)
    assert main(capsys, "run", f"{own[0]}:own", *dataset, *PLAIN, "--run-dir", run)[0] == 130
    assert {file.name: file.read_text() for file in (run / "code" / "round-1").iterdir()} == {
        file.name: file.read_text() for file in own
    }
    path.write_text(before + "other = 1\n")
    sentence = refusal(capsys, "resume", run)
    assert f"{path} has changed since {run} was computed" in sentence and "--changed-code" in sentence
    injected("code changed", behind(run))
    path.unlink()
    assert f"{path}, which {run} was computed with, is missing; put it back" in refusal(capsys, "resume", run)
    path.write_text(before)
    press(monkeypatch, times=1, evaluation=1)
    assert main(capsys, "resume", run)[0] == 130  # the restored file counts as unchanged
    path.write_text(before + "other = 1\n")
    assert main(capsys, "resume", run, "--changed-code")[0] == 0
    begun, taken_over = json.loads((run / "result.json").read_text())["code"]
    assert (begun["round"], taken_over["round"]) == (1, 9) and begun["package"] == taken_over["package"]
    assert [name for name in begun["files"] if begun["files"][name] != taken_over["files"][name]] == [
        str(path)
    ]
    assert [line["round"] for line in store.read_metrics(run) if "code" in line] == [9]
    assert (run / "code" / "round-1" / path.name).read_text() == before
    assert (run / "code" / "round-9" / path.name).read_text() == before + "other = 1\n"
    path.write_text(before)
    code, said = main(capsys, "run", "--from", run, "--run-dir", tmp_path / "again")
    assert code == 0 and f"{path} has changed since {run} was computed" in said


def test_files_edited_while_a_run_goes_on_are_not_what_computes_it(
    own, dataset, tmp_path, capsys, monkeypatch
):
    """The process computes with what it has loaded; only a resume asks about the edited file."""
    run, (path, _) = tmp_path / "run", own
    append, before = store.append_metrics, path.read_text()

    def edited(folder, records):
        append(folder, records)
        path.write_text(path.read_text() + "other = 1\n")

    monkeypatch.setattr(store, "append_metrics", edited)
    assert main(capsys, "run", f"{path}:own", *dataset, *PLAIN, "--run-dir", run)[0] == 0
    assert not any("code" in line for line in store.read_metrics(run))
    assert [copy.name for copy in (run / "code").iterdir()] == ["round-1"]
    assert (run / "code" / "round-1" / path.name).read_text() == before
    assert f"{path} has changed since" in refusal(capsys, "resume", run, "--rounds", "20")


def test_other_images_under_the_same_name_are_refused(dataset, tmp_path, capsys):
    """A run is neither resumed nor repeated on other images, even if all labels are the same."""
    path, run = tmp_path / "images.npz", tmp_path / "run"
    arrays = dict(np.load(dataset[1]))
    np.savez(path, **arrays)
    assert main(capsys, "run", "fedavg", "--dataset", path, *PLAIN, "--run-dir", run)[0] == 0
    np.savez(path, **arrays | {"images": 255 - arrays["images"]})
    for words in ("resume", run, "--rounds", "20"), ("run", "--from", run, "--run-dir", tmp_path / "again"):
        sentence = refusal(capsys, *words)
        assert f"{run} was computed on other images than {path} has now, or on" in sentence
    assert not (tmp_path / "again").exists()
    within = np.lexsort((arrays["images"].mean((1, 2, 3)), arrays["split"], arrays["labels"]))
    among = np.lexsort((np.arange(len(within)), arrays["split"], arrays["labels"]))
    images = arrays["images"].copy()
    images[among] = arrays["images"][within]  # in another order within each class
    np.savez(path, **arrays | {"images": images})
    assert f"{run} was computed on other images than {path} has now, or on" in refusal(capsys, *words)
    with pytest.raises(JaxflError, match="or on the same in another order"):
        _ = jaxfl.load(run).source
    np.savez(path, **arrays | {"labels": arrays["labels"][::-1]})
    with pytest.raises(JaxflError, match="it is for other labels"):
        _ = jaxfl.load(run).source
    np.savez(path, **arrays)
    assert np.array_equal(np.sort(jaxfl.load(run).source.labels), np.sort(arrays["labels"]))


def test_another_jaxfl_goes_on_with_a_warning(finished, tmp_path, capsys, monkeypatch):
    run = unfinished(finished, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "16")
    monkeypatch.setattr(code_of_runs, "_package", lambda: "another")
    code, said = main(capsys, "resume", run)
    assert code == 0 and said.count("\n") == 1
    assert said.startswith(f"jaxfl: jaxfl has changed since {run} was computed; its result says")
    history = json.loads((run / "result.json").read_text())["code"]
    assert [(part["round"], part["package"] == "another") for part in history] == [(1, False), (13, True)]
    assert checkpoint.saved(run) == checkpoint.saved(finished)


@pytest.mark.long
def test_a_comparison_is_not_repeated_with_other_code(own, dataset, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "compared"
    words = ["compare", "fedavg", f"{own[0]}:own", *dataset, *PLAIN, "--run-dir", folder]
    assert main(capsys, *words) == (0, "")
    written = {run: contents(run) for run in folder.glob("*/*")}
    assert main(capsys, *words) == (0, "")
    with monkeypatch.context() as patch:
        patch.setattr(code_of_runs, "_package", lambda: "another")
        code, said = main(capsys, *words)
    assert code == 0 and said.count("\n") == 1
    assert f"2 of 2 runs in {folder} have finished with another version of jaxfl, and are kept" in said
    own[0].write_text(own[0].read_text() + "other = 1\n")
    assert f"{own[0]} has changed since" in refusal(capsys, *words)
    code, said = main(capsys, *words, "--changed-code")
    assert code == 0 and said.count("\n") == 1
    assert f"1 of 2 runs in {folder} have finished with another version of your code" in said
    assert {run: contents(run) for run in folder.glob("*/*")} == written


def test_options_newer_than_a_run_have_their_defaults(finished, dataset, tmp_path, capsys, monkeypatch):
    def described(*arguments):
        config = config_of_runs.described(*arguments)
        younger = ("score_cohort", "checkpoint_every", "keep_checkpoints", "convolution", "momentum")
        return config | {"options": {k: v for k, v in config["options"].items() if k not in younger}}

    folder = tmp_path / "compared"
    words = ["compare", "fedavg", *dataset, *PLAIN, "--run-dir", folder]
    with monkeypatch.context() as patch:
        patch.setattr(opening, "described", described)
        press(patch, times=1)
        assert main(capsys, *words)[0] == 130
    run = folder / "fedavg" / "seed-3"
    config = json.loads((run / "config.json").read_text())
    assert "momentum" not in config["options"]
    config["code"]["package"] = "another"
    (run / "config.json").write_text(json.dumps(config))
    code, said = main(capsys, *words, "--seeds", "2")
    assert code == 0 and "were begun with another version of jaxfl" in said
    assert len(json.loads((run / "result.json").read_text())["code"]) == 2
    found, made = (jaxfl.load(path).metrics for path in (run, finished))
    assert [line["loss"] for line in found] == [line["loss"] for line in made]
    table, _, note = (folder / "table.md").read_text().partition("\n\n")
    assert len(table.splitlines()) == 3 and "over 2 seeds" in note  # one row has both runs


CAP_DAC_OVERRIDE = 1 << 1  # Linux's capability to write whatever the modes of files say


@contextlib.contextmanager
def read_only(folder):
    """Make a folder read-only within the block, also for root, which loses the capability to write.

    Root stays the user, because others may not be allowed to read the package.
    """
    root = os.geteuid() == 0
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if root:
        assert libc.capget(header, sets) == 0
        effective, sets[0] = sets[0], sets[0] & ~CAP_DAC_OVERRIDE
        assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        if root:
            sets[0] = effective
            assert libc.capset(header, sets) == 0
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_run_in_a_read_only_folder_is_refused_and_later_resumed(finished, dataset, capsys):
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        data = ["--dataset", str(shutil.copy(dataset[1], place))]
        run = place / "run"
        assert main(capsys, "run", "fedavg", *data, *PLAIN, "--run-dir", run)[0] == 0
        expected = contents(run)
        (run / "result.json").unlink()
        lost = behind(run)
        with read_only(place):
            assert f"{run}/owner.lock cannot be written (Permission" in refusal(capsys, "resume", run)
            words = ["run", "fedavg", *data, *PLAIN, "--run-dir", place / "new"]
            assert f"{place}/new cannot be written (Permission denied)" in refusal(capsys, *words)
        assert main(capsys, "resume", run)[0] == 0
        assert contents(run) == expected
        injected("folder read-only", lost)


# --- extreme federations

AT_THE_EDGE = """
import numpy as np
from jaxfl.data.sources import Source


def source(data_dir):
    labels = np.arange(60) % 3
    images = np.random.default_rng(0).integers(0, 99, (60, 8, 8, 1), dtype=np.uint8)
    train, user = np.arange(60) < 40, np.arange(60) % 3
    user = np.where(train, user, np.array([0, 2, 3])[user])
    return Source("edge", images, labels, train, 4, {"user": user})  # of class 3 there is nothing


def odd(labels, clients, rng):
    return [np.arange(1), *np.array_split(np.arange(1, len(labels)), clients - 1)]


def identical(labels, clients, rng):
    return [np.arange(12)] * clients
"""
EDGES = {
    "odd": "one client has one sample, one class nobody has, cohorts of one",
    "identical": "all clients identical",
    "apart": "one client has only test rows, another none",
}


def at_the_edge(folder, method, edge, **options):
    """Run a method for a few rounds on an extreme federation."""
    (folder / "edge.py").write_text(AT_THE_EDGE)
    return jaxfl.run(
        short(method),
        run_dir=folder / "run",
        dataset=f"{folder}/edge.py:source",
        partition="natural,column=user,min_samples=7" if edge == "apart" else f"{folder}/edge.py:{edge}",
        test="auto" if edge == "apart" else "source",
        participation=0.25 if edge == "odd" else 1.0,
        clients=4,
        models=["mlp,hidden=3", "mlp,hidden=4,features=3"],
        epochs=1,
        rounds=4,
        eval_every=1,
        seed=1,
        **options,
    )


@pytest.mark.parametrize(
    ("method", "edge"),
    [
        (name, edge) if (name, edge) == ("fedcmd", "odd") else long(name, edge)
        for name in METHODS
        for edge in EDGES
    ],
)
def test_extreme_federations_have_a_result(tmp_path, method, edge):
    run = at_the_edge(tmp_path, method, edge)
    present = {"odd": 1, "identical": 4, "apart": 3}[edge]
    assert all(len(line["clients"]) == present for line in run.metrics)
    losses = [line["loss"] for line in run.metrics if line["loss"] is not None]  # None if no client trains
    assert losses and all(0 < loss < np.inf for loss in losses)
    assert any(0 in line["clients"] for line in run.metrics)  # under "odd" it has one sample
    images = [len(rows) for rows in run.partition.test]
    assert images == {"odd": [6, 20, 20, 20], "identical": [20] * 4, "apart": [6, 3, 7, 7]}[edge]
    trains = np.array([len(rows) > 0 for rows in run.partition.train])
    for scores in run.personal, run.received:
        if len(scores.per_client):
            right = (scores.per_client * images)[:, trains]
            np.testing.assert_allclose(right, right.round(), atol=1e-6)  # a number of images, and no NaN
            np.testing.assert_allclose(scores.mean, scores.per_client[:, trains].mean(1))
    if not trains.all():
        joined = run.result["newcomers"]
        right = [joined[moment]["per_client"][0] * images[3] for moment in ("received", "personal")]
        assert joined["clients"] == [3] and np.allclose(right, np.round(right))
    assert len(run.personal.per_client) == 4
    injected(EDGES[edge])


def test_identical_clients_learn_the_same(tmp_path):
    """Clients of one architecture have equal losses, up to the rounding of rows in another order."""
    run = at_the_edge(tmp_path, "fedper", "identical", batch_size=12)
    for line in run.metrics:
        assert line["clients"] == [0, 1, 2, 3]  # two of each architecture
        first, second, third, fourth = line["client_loss"]
        assert second == pytest.approx(first, rel=1e-5) and fourth == pytest.approx(third, rel=1e-5)
        assert first != pytest.approx(third, rel=1e-5)
    of_client = run.result["accuracy"]["per_client"]
    assert of_client[0] == of_client[1] and of_client[2] == of_client[3]
    injected(EDGES["identical"])


# --- the table


HEAD = f"""# Faults

The table lists the faults that the tests inject into real runs, how often, and what is lost: the largest
number of rounds whose metrics were already written and that had to be computed again, in addition to the
rounds in progress. Runs have {ROUNDS} rounds, an evaluation every {EVERY} and a checkpoint every
{CHECKPOINTS}. Nothing else is lost: afterwards metrics, result, matrices and checkpoints are compared, bit
for bit, with those of an undisturbed run.

Kills are `kill -9` at random moments, {KILLS} for each of the {len(METHODS)} methods, of starting and of
resumed runs. This command writes the table:

    python -m pytest tests/folder/test_faults.py -m ""

| fault | times | rounds computed again | what follows |
|---|---|---|---|
"""


@pytest.mark.long
def test_write_the_table(request):
    """Write docs/faults.md, after all other tests of this file, if all of them ran and none failed."""
    if request.config.option.markexpr or request.session.testsfailed:
        pytest.skip("the table takes the short and the long tests, without a failure: -m ''")
    rows = []
    for fault, then in FAULTS.items():
        lost = INJECTED[fault]
        again = f"at most {max(lost)}" if any(lost) else "none"
        rows.append(f"| {fault} | {len(lost)} | {again} | {then} |\n")
    DOCUMENT.write_text(HEAD + "".join(rows))


def test_the_document_lists_these_faults():
    rows = [line.split(" | ") for line in DOCUMENT.read_text().splitlines() if " | " in line][1:]
    assert {row[0].removeprefix("| "): row[3].removesuffix(" |") for row in rows} == FAULTS
    assert sum(int(row[1]) for row in rows if "killed" in row[0]) >= 100
