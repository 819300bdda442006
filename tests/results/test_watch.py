"""Watching a run: its logs, `jaxfl watch`, and curves against simulated time.

Most tests look at one run of six rounds that logged to TensorBoard and to a stand-in for Weights & Biases.
"""

import io
import json
import re
import shutil
import struct
import sys
import time
import types
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_source
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

import jaxfl
from jaxfl import cli
from jaxfl.errors import JaxflError
from jaxfl.folder.owner import owned
from jaxfl.results import curves, watch

ROUNDS = 6
GROUPS = ("mlp,hidden=3", "mlp,hidden=4")
OPTIONS = (
    f"--models {' '.join(GROUPS)} --clients 4 --epochs 1 --rounds {ROUNDS} --eval-every 2 "
    "--partition classes,classes_per_client=2,samples_per_client=10 "
    "--device-profile mlp,hidden=3=1e6:1e3 mlp,hidden=4=1e6:1e4 --log tensorboard wandb"
).split()


class Biases(types.ModuleType):
    """A stand-in for wandb that keeps what its runs log, and refuses a step that a run has already logged.

    Like the real one it leaves a link to its cache in the folder of a run.
    """

    errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))

    def __init__(self, cache):
        super().__init__("wandb")
        self.cache, self.server, self.options, self.ended = cache, defaultdict(dict), [], []

    def login(self):
        """Accept every user."""

    def init(self, **options):
        """Begin or continue a run."""
        name = options["id"] or f"id{len(self.server)}"
        return BiasesRun(self, name, options)


class BiasesRun:
    """A run of the stand-in; when it is begun again, it goes on after its last step."""

    def __init__(self, biases, name, options):
        self.biases, self.name, self.steps = biases, name, biases.server[name]
        self.step = max(self.steps, default=-1) + 1
        logs = Path(options["dir"], "wandb", f"run-20260101_{len(biases.options):06}-{name}", "logs")
        logs.mkdir(parents=True)
        (logs / "debug-core.log").symlink_to(biases.cache)
        biases.options.append(options)

    def log(self, values, step):
        """Keep the values of a step."""
        assert step not in self.steps
        self.steps[step] = values

    def finish(self, exit_code):
        """End the run."""
        self.biases.ended.append((self.name, exit_code))


@pytest.fixture(scope="module", autouse=True)
def biases(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache") / "core-debug.log"
    cache.touch()
    with pytest.MonkeyPatch.context() as patch:
        made = Biases(cache)
        patch.setitem(sys.modules, "wandb", made)
        yield made


@pytest.fixture(scope="module")
def compared(biases, tmp_path_factory):
    """Return the folder of a comparison of one method with one seed."""
    folder, source = tmp_path_factory.mktemp("watched"), tiny_source()
    np.savez(folder / "tiny.npz", images=source.images, labels=source.labels, split=source.train)
    begin = ["compare", "fedavg", "--dataset", str(folder / "tiny.npz")]
    cli.main([*begin, *OPTIONS, "--run-dir", str(folder / "compared")])
    return folder / "compared"


@pytest.fixture
def stopped(compared, tmp_path):
    """Return a copy of its run as if killed after five rounds; it can go on after the fourth."""
    folder = tmp_path / "compared" / "fedavg" / "seed-0"
    shutil.copytree(compared / "fedavg" / "seed-0", folder)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "6")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]))
    return folder


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _tag(name):
    return name.replace(",", "_").replace("=", "_")  # as TensorBoard needs it


def events(folder):
    """Return the (round, number) pairs of all event files, by name."""
    found = defaultdict(list)
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # a length and its checksum, the event and its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            for value in event.summary.value:
                found[value.tag].append((event.step, value.simple_value))
    return found


# --- logs


def test_logs_hold_the_metrics(compared, biases):
    records = metrics(compared / "fedavg" / "seed-0")
    (steps,) = biases.server.values()
    assert list(steps) == [record["round"] for record in records]
    for record, values in zip(records, steps.values(), strict=True):
        assert values["loss"] == record["loss"]
        assert (values["bytes/up"], values["bytes/down"]) == (record["bytes_up"], record["bytes_down"])
        assert values["seconds/simulated"] == record["simulated_seconds"]
        assert ("accuracy/personal" in values) == (record["round"] % 2 == 0)
    for moment, key in (("personal", "accuracy"), ("received", "received")):
        assert values[f"accuracy/{moment}"] == record[key]["mean"]
        assert [values[f"{moment}/{group}"] for group in GROUPS] == list(record[key]["per_group"].values())
    options, (_, code) = biases.options[0], biases.ended[0]
    assert options["name"] == "fedavg, seed 0" and options["config"]["rounds"] == ROUNDS
    assert code == 0


def test_the_log_of_a_run_that_stops_at_its_target_ends_with_success(compared, biases, monkeypatch, tmp_path):
    monkeypatch.setattr(biases, "server", defaultdict(dict))
    begin = ["run", "fedavg", "--dataset", str(compared.parent / "tiny.npz"), "--log", "wandb"]
    cli.main([*begin, *OPTIONS, "--target", "0.01", "--stop-at-target", "--run-dir", str(tmp_path / "run")])
    ((name, steps),) = biases.server.items()
    assert list(steps) == [1, 2] and biases.ended[-1] == (name, 0)


def test_both_logs_hold_the_same(compared, biases):
    drawn, (steps,) = events(compared / "fedavg" / "seed-0"), biases.server.values()
    for name in steps[ROUNDS]:
        expected = [(step, values[name]) for step, values in steps.items() if name in values]
        assert drawn[_tag(name)] == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    options = {"experiment", "session_start_info", "session_end_info"}
    assert drawn.keys() & {f"_hparams_/{tag}" for tag in options} == drawn.keys() - set(
        map(_tag, steps[ROUNDS])
    )


def test_no_round_is_logged_twice(stopped, biases):
    ((name, steps),) = biases.server.items()
    del steps[ROUNDS]
    cli.main(["resume", str(stopped), "--log", "tensorboard", "wandb"])
    assert list(biases.server) == [name]
    assert list(steps) == list(range(1, ROUNDS + 1))
    assert [step for step, _ in events(stopped)["loss"]] == list(range(1, ROUNDS + 1))


@pytest.mark.parametrize(("of", "moment"), [(Biases, "init"), (BiasesRun, "log"), (BiasesRun, "finish")])
def test_a_log_that_fails_does_not_end_the_run(stopped, biases, monkeypatch, of, moment):
    def fail(*arguments, **options):
        raise ConnectionError("The service is gone.")

    monkeypatch.setattr(biases, "server", defaultdict(dict))
    monkeypatch.setattr(of, moment, fail)
    with pytest.warns(UserWarning, match="seed-0 has stopped .The service is gone.") as warned:
        cli.main(["resume", str(stopped), "--log", "wandb", "tensorboard"])
    assert [str(warning.message).split()[:3] for warning in warned] == [["The", "log", "wandb"]]
    assert len(metrics(stopped)) == ROUNDS and (stopped / "result.json").exists()
    assert [step for step, _ in events(stopped)["loss"]] == list(range(1, ROUNDS + 1))


def test_a_users_log_function_gets_every_record(stopped):
    """The function gets records from before a resume, too; one warning names the line of one that fails."""
    seen, losses, failed = [], [], []

    def fails(folder, record):
        failed.append(record["round"])
        raise KeyError("mine")

    def takes(folder, record):
        losses.append(record.pop("loss"))

    line = r"The log fails of .*test_watch.py, line \d+, in fails: KeyError"
    with pytest.warns(UserWarning, match=line) as warned:
        logs = [
            fails,
            takes,
            lambda *arguments: seen.append(arguments),
            lambda folder, record: seen.append((None, record)),
        ]
        jaxfl.resume(stopped, quiet=True, log=logs)
    for folder in (stopped, None):
        assert [record for of, record in seen if of == folder] == metrics(stopped)
    assert losses == [record["loss"] for record in metrics(stopped)]
    assert failed == [record["round"] for record in metrics(stopped)] and len(warned) == 1
    with pytest.raises(JaxflError, match=r"log has the parameters \(folder\), but is called with"):
        jaxfl.resume(stopped, log=lambda folder: None)


def test_a_log_that_is_not_available_is_refused_before_anything_runs(tmp_path, monkeypatch, biases, capsys):
    def refused(name):
        with pytest.raises(SystemExit) as end:
            cli.main(["run", "fedavg", "--log", name, "--run-dir", str(tmp_path / "run")])
        assert end.value.code == 2 and not list(tmp_path.iterdir())
        return capsys.readouterr().err

    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert "pip install '.[tensorboard]' in a clone" in refused("tensorboard")

    def login():
        raise biases.errors.Error("No API key configured.")

    monkeypatch.setattr(biases, "login", login)
    assert "No API key configured; or set WANDB_MODE=offline" in refused("wandb")


# --- jaxfl watch


def shown(folders, now):
    """Return the cells of the only line of the table."""
    out = Console(file=io.StringIO(), width=80)
    watch.watch(folders, out, clock=lambda: now)
    *_, line = filter(str.strip, out.file.getvalue().splitlines())
    return " ".join(line.split())


def test_watch_prints_a_line_for_a_run(compared, stopped, monkeypatch):
    records = metrics(stopped)
    moved = [f"{sum(record[key] for record in records) / 1e6:.2f}" for key in ("bytes_up", "bytes_down")]
    spent = records[3]["seconds"]
    assert spent["write"] > 0  # since the previous evaluation
    busy = 2 / (spent["train"] + spent["evaluate"] + spent["write"])
    score, loss = 100 * records[3]["accuracy"]["mean"], records[4]["loss"]
    so_far = f"fedavg 0 5/6 {score:.1f} {loss:.3f} {moved[0]} {moved[1]} {busy:.3g} 0 s "
    now = max(path.stat().st_mtime for path in stopped.iterdir())
    with owned(stopped):
        assert shown([stopped, stopped.parent], now + 9) == so_far + "running"
        assert shown([stopped], now + 600) == so_far + "silent since 10 min"
    assert shown([stopped], now + 9) == so_far.replace(" 0 s ", " - ") + "stopped"
    assert shown([compared], now).startswith("fedavg 0 6/6") and shown([compared], now).endswith("- finished")
    working = watch.progress(stopped)._replace(owned=True, rounds=(5, 6), speed=0.01, news=now)
    assert working.left(now + 9) == pytest.approx(91)  # of the hundred seconds of the last round
    assert working._replace(owned=False).left(now) is working._replace(speed=None).left(now) is None
    monkeypatch.chdir(stopped.parents[1])
    shutil.copytree(stopped, "other")
    watch.watch([Path()], out := Console(file=io.StringIO(), width=120))
    assert "fedavg in other" in out.file.getvalue() and "in fedavg/seed-0" in out.file.getvalue()
    watch.watch([stopped], out := Console(file=io.StringIO(), width=48))
    assert "fedavg" in out.file.getvalue() and "stopped" in out.file.getvalue()
    with pytest.raises(JaxflError, match="There is no run in"):
        shown([stopped / "checkpoints"], now)
    Path("other/config.json").write_text("{")
    out = Console(file=io.StringIO(), width=120)
    watch.watch([Path()], out)
    assert "stopped" in out.file.getvalue() and "other/config.json" in out.file.getvalue()


def test_watch_shows_first_what_goes_on_where_a_terminal_is_too_low(compared, tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        shutil.copytree(compared / "fedavg" / "seed-0", tmp_path / name)
    monkeypatch.setattr(time, "sleep", lambda seconds: (tmp_path / "comparison.json").touch())
    monkeypatch.setenv("TERM", "xterm")  # a dumb one shows nothing before the end
    out = Console(file=io.StringIO(), width=100, height=9, force_terminal=True)
    with owned(tmp_path / "c"):
        (tmp_path / "c" / "result.json").unlink()
        watch.watch([tmp_path], out)
    shown = re.findall("finished|running", out.file.getvalue())
    assert shown[0] == "running" and sorted(shown[-3:]) == ["finished", "finished", "running"]


def test_watch_follows_a_comparison_to_its_end(compared, stopped, monkeypatch):
    folder, last = stopped.parents[1], compared / "fedavg" / "seed-0"

    def write(name, source):
        return lambda: (stopped / name).write_text((last / source).read_text())

    events = [
        write("metrics.jsonl", "metrics.jsonl"),
        write("result.json", "result.json"),  # another run may follow: only the comparison itself ends it
        lambda: jaxfl.report(folder),
        lambda: shutil.copyfile(compared / "comparison.json", folder / "comparison.json"),
    ]
    monkeypatch.setattr(time, "sleep", lambda seconds: events.pop(0)())
    monkeypatch.setenv("TERM", "xterm")
    out = Console(file=io.StringIO(), width=80, force_terminal=True)
    watch.watch([folder], out)
    assert not events
    printed = out.file.getvalue()
    assert printed.index("5/6") < printed.index("6/6") < printed.index("finished")


# --- simulated time


def test_curves_against_simulated_time(compared):
    records = metrics(compared / "fedavg" / "seed-0")
    timeless = [
        {key: value for key, value in record.items() if key != "simulated_seconds"} for record in records
    ]
    runs = {"timed": [records], "timeless": [timeless]}, {"timeless": [timeless]}
    figures = [curves.draw_curves(of_runs) for of_runs in runs]
    three, two = ([axes.get_xlabel() for axes in figure.axes] for figure in figures)
    assert two == ["round", "megabytes sent and received"] and three == [*two, "simulated seconds"]
    (line,) = figures[0].axes[2].lines
    assert not figures[0].axes[1].collections  # with one seed there is no band
    bands = curves.draw_curves({"twice": [records, records]}).axes
    assert all(len(axes.collections) == 1 for axes in bands)
    clock = np.cumsum([record["simulated_seconds"] for record in records])
    np.testing.assert_allclose(line.get_xdata(), clock[1::2])
    assert "simulated s" in (compared / "table.csv").read_text().splitlines()[0]
