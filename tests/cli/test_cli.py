"""The command: what it prints, and how it runs user code; the same from Python."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from conftest import arrays_of, drawing

import jaxfl
from jaxfl import registry
from jaxfl.cli import COMMANDS, console, main
from jaxfl.cli.words import expand, parse
from jaxfl.config import choices
from jaxfl.config.asked import make
from jaxfl.config.options import Option, declared, explained
from jaxfl.config.options import described as described_options
from jaxfl.config.setup import Setup
from jaxfl.config.values import text as text_of
from jaxfl.core.training import Training
from jaxfl.data.partitioners import PARTITIONS
from jaxfl.data.readers import READERS
from jaxfl.folder import config, store
from jaxfl.folder.variant import choose, provided
from jaxfl.machine import files
from jaxfl.models.zoo import MODELS, described
from jaxfl.runs import loop as run_loop


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Yield the current folder of all tests: user code, arguments, a partition and a finished run."""
    folder = tmp_path_factory.mktemp("work")
    shutil.copytree(Path(__file__).parents[1] / "own", folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with drawing():
            call("partition @own.args --run-dir divided")
        call("run fedavg @own.args")
        yield folder


def call(command):
    """Run a command, given by the words after `jaxfl`, in this process."""
    main(command.split())


def metrics(run):
    """Return a run's metrics without the times, which no two runs share."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def weights(run, within):
    """Return the bytes of the weights in the last checkpoint, by name."""
    leaves = arrays_of(run / "checkpoints" / "4")
    own = {name: leaf for name, leaf in leaves.items() if name.startswith(within)}
    return {name.removeprefix(within): leaf.tobytes() for name, leaf in own.items()}


# --- what it prints


def printed(capsys, command):
    """Run a command; return the words of its output, without the lines of tables and boxes."""
    try:
        call(command)
    except SystemExit as end:
        assert end.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    return " ".join(out.translate({ord(mark): " " for mark in "│┃|"}).split())


@pytest.mark.parametrize("command", ["", "--help"])
def test_help_names_every_command(capsys, command):
    out = printed(capsys, command)
    for word in COMMANDS:
        assert f"jaxfl {word}" in out


@pytest.mark.parametrize("command", [word for word, command in COMMANDS.items() if command.sections == ()])
def test_commands_without_options_explain_themselves(capsys, command):
    usage, does, *_ = COMMANDS[command]
    assert printed(capsys, f"{command} --help") == f"jaxfl {usage}: {does}"


@pytest.mark.parametrize(
    ("command", "sentences"),
    [
        ("run --help", ["--lr FLOAT Learning rate of clients. (default: 0.05)"]),
        ("run compfl,eps=0.1 --help", ["--eps FLOAT epsilon, how", "own. (default: 0.1)", "--no-kd"]),
        ("compare --help", ["--lr FLOAT Learning rate of clients.", "--seeds INT Repeat with seed"]),
        ("partition --help", ["--run-dir"]),
    ],
)
def test_help_shows_options_with_their_defaults(capsys, command, sentences):
    out = printed(capsys, command)
    for sentence in [*sentences, "--rounds INT Communication rounds. (default: 50)"]:
        assert sentence in out


def test_a_closed_pipe_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "jaxfl", "list"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == 0 and not done.stderr


def test_list_has_every_name(capsys):
    out = printed(capsys, "list")
    for name in [*registry.METHODS, *MODELS, *PARTITIONS, "digits"]:
        assert f" {name} " in out
    assert "head_init" in out and "min_samples" in out
    alone = printed(capsys, "list partitions")
    assert "min_samples" in alone and "head_init" not in alone


def test_names_are_not_taken_for_pictures(folder, capsys):
    (folder / "my.py").write_text(
        "from jaxfl.fl import Method, Training, sharing\n"
        "moon = Method('moon', sharing, Training, 'FedAvg')\n"
        "fire = Method('fire', sharing, int, 'wrong')\n"
    )
    assert "my.py:moon: FedAvg" in printed(capsys, "list my.py:moon")
    with pytest.raises(SystemExit):
        main(["check", "my.py:fire"])
    assert "jaxfl: my.py:fire: config must be" in capsys.readouterr().err


def test_every_option_is_explained(capsys):
    """Every option has an explanation and its default; a method's own options precede those of all."""
    owners = [*PARTITIONS.values(), *(reader.read for reader in READERS)]
    for options in [*map(described_options, owners), *map(described, MODELS.values())]:
        assert all(option.what for option in options)
    for method in registry.METHODS.values():
        assert explained(method.config).keys() >= declared(method.config).keys()
    out = printed(capsys, "list dirichlet ditto lenet5 play.txt sign-flip")
    for part in (
        "alpha 0.1 concentration;",
        "length 80 number of characters",
        "lam 1.0 lambda, the pull",
        "depth 3 number of dense layers",
        "share 0.2 Share of the clients that attack",  # of all attacks
    ):
        assert part in out
    for command in ("list ditto", "run ditto --help"):
        out = printed(capsys, command)
        assert out.index("E_p, epochs of the personal") < out.index("Learning rate of")
    with pytest.raises(SystemExit):
        call("list dirichle")
    assert "did you mean 'dirichlet'?" in capsys.readouterr().err


def test_version_names_jaxfl_and_jax(capsys):
    assert printed(capsys, "--version").startswith(f"jaxfl {version('jaxfl')}, jax {version('jax')}, ")


def test_every_method_of_a_paper_can_be_cited():
    assert [name for name, method in registry.METHODS.items() if method.paper and not method.bibtex] == []


def test_cite_prints_a_bibtex_entry(capsys):
    out = printed(capsys, "cite fedper")
    assert out.startswith("@article{") and "arXiv:1912.00818" in out and out.count("{") == out.count("}")


def test_partition_is_drawn_and_used_again(folder):
    assert (folder / "divided" / "partition.png").read_bytes().startswith(b"\x89PNG")
    with np.load(folder / "divided" / "partition.npz") as saved:
        assert (saved["train_sizes"] + saved["test_sizes"]).tolist() == [11, 10, 9, 8]
        call("partition @own.args --partition divided/partition.npz --run-dir again")
        with np.load(folder / "again" / "partition.npz") as used:
            assert all((saved[key] == used[key]).all() for key in saved.files)


# --- user code, and the same from Python


def test_every_method_can_be_named():
    """No method has an option of the name of one that all runs have."""
    for name, method in registry.METHODS.items():
        assert registry.method(name) == (method, {})


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "3", 3),
        (float, "3", 3.0),
        (bool, "False", False),
        (str, "none", "none"),
        (str | None, "none", None),
        (float | None, "0.5", 0.5),
        (Literal[1, 2], "2", 2),
        (Literal["a", "b"] | None, "b", "b"),
        (Path, "a/b", Path("a/b")),
        (Path, "~/b", Path.home() / "b"),
        (tuple[Literal["crop", "flip"], ...], "crop+flip", ("crop", "flip")),
        (tuple[int, ...], "", ()),
    ],
)
def test_options_have_their_annotated_type(annotation, text, value):
    known = {"option": Option("option", annotation)}
    for words in (text, text_of(value)):
        converted = choices.convert("own", known, {"option": words})["option"]
        assert converted == value and isinstance(converted, type(value))
    assert known["option"].read(value) == value


@dataclasses.dataclass(frozen=True)
class Own:
    """Options as a method may have them."""

    sizes: tuple[int, ...] = (3,)
    """Some."""
    kind: Literal["a", "b"] | None = None
    """Which."""
    on: bool = True
    """Whether."""


@pytest.mark.parametrize(
    ("flags", "choice"),
    [
        ("", "own"),
        ("--sizes 1 2 --kind b --no-on", "own,sizes=1+2,kind=b,on=false"),
        ("--sizes --kind none", "own,sizes=,kind=none"),
    ],
)
def test_flags_and_choices_are_read_alike(flags, choice):
    _, parsed = parse("own", flags.split(), [], Own)
    _, options = choices.split(choice)
    assert parsed == Own(**choices.convert("own", declared(Own), options))
    assert make(Own, "own", vars(parsed)) == parsed


def test_a_flag_counts_as_given_whatever_its_value():
    """A flag that repeats the general default counts, as it replaces a method's own default."""
    (asked,) = parse("own", ["--clip_norm", "none", "--lr=0.05"], [Training()])
    assert make(Training, "own", asked) == Training() and asked.keys() == {"clip_norm", "lr"}


def test_a_wrong_entry_is_refused_in_choices_flags_and_objects():
    words = re.escape("sizes must be a tuple of whole numbers, not ['1', 'x']")
    with pytest.raises(jaxfl.JaxflError, match=words):
        choices.convert("own", declared(Own), {"sizes": "1+x"})
    with pytest.raises(jaxfl.JaxflError, match=words):
        parse("own", ["--sizes", "1", "x"], [], Own)
    with pytest.raises(jaxfl.JaxflError, match=words):
        make(Own, "own", {"sizes": ["1", "x"]})


def test_model_partition_data_and_method_may_be_user_code(folder, tmp_path, monkeypatch):
    """The finished run has a user's model, partition and data set; a user's FedProx with mu = 0 is FedAvg."""
    result = json.loads((folder / "runs" / "fedavg-own" / "result.json").read_text())
    assert result["accuracy"]["per_group"].keys() == {"linear", "mlp"}

    call("run own.py:fedprox @own.args --mu 0 --run-dir fedprox")
    assert metrics(folder / "fedprox") == metrics(folder / "runs" / "fedavg-own")
    own = weights(folder / "fedprox", "1.")
    assert len(own) == 8 and own == weights(folder / "runs" / "fedavg-own", "shared.")

    stopped = folder / "stopped"
    shutil.copytree(folder / "fedprox", stopped)
    (stopped / "result.json").unlink()
    shutil.rmtree(stopped / "checkpoints" / "4")
    monkeypatch.chdir(tmp_path)  # user code is found from any folder
    call(f"resume {stopped}")
    assert metrics(stopped) == metrics(folder / "fedprox") and weights(stopped, "1.") == own


def test_a_users_network_in_an_option_is_found_from_any_folder(folder, tmp_path, monkeypatch):
    written = config.described(choose("fedkemf,knowledge=own.py:linear"), Setup())
    assert written["options"]["knowledge"] == f"{folder}/own.py:linear" and written["method"] == "fedkemf"
    assert config.own_objects(written) == [folder / "own.py"]
    monkeypatch.chdir(tmp_path)
    _, variant = config.restore(tmp_path, written)
    assert variant.config.knowledge == f"{folder}/own.py:linear"
    assert variant.label == "fedkemf,knowledge=own.py:linear"


def test_a_run_folder_is_enough_to_repeat_a_run(folder, tmp_path, monkeypatch):
    """Two files of the old run are enough; its partition is used as saved, for it cannot be drawn again."""
    (tmp_path / "old").mkdir()
    for name in ("config.json", "partition.npz"):
        shutil.copy(folder / "runs" / "fedavg-own" / name, tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    config["options"]["partition"] = "classes,classes_per_client=99"
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    call("run --from old --run-dir new")
    assert metrics(tmp_path / "new") == metrics(folder / "runs" / "fedavg-own")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["options"] == config["options"]
    call("run fedprox --mu 0 --from new --run-dir other")  # FedAvg, by another method with the same training
    assert metrics(tmp_path / "other") == metrics(tmp_path / "new")
    config["options"] |= {"lr": 0.2, "batch_size": 3}
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    call("run fedprox --from=old --batch-size 4 --seed 3 --run-dir another")
    options = json.loads((tmp_path / "another" / "config.json").read_text())["options"]
    assert [options[name] for name in ("lr", "batch_size", "seed", "rounds")] == [0.2, 4, 3, 4]
    (tmp_path / "old" / "partition.npz").unlink()
    call("run --from new --run-dir newer")
    assert metrics(tmp_path / "newer") == metrics(tmp_path / "new")


@pytest.fixture(scope="module")
def from_python(folder):
    """Repeat the run of the folder from Python, with a method object."""
    return jaxfl.run(
        registry.METHODS["fedavg"],
        run_dir=folder / "python",
        dataset="own.py:stripes",
        partition="own.py:unequal,most=11",
        models=["own.py:linear,features=3", "mlp,hidden=4"],
        clients=np.int64(4),
        participation=np.float32(0.5),
        rounds=4,
        eval_every=2,
    )


def test_a_run_from_python_is_that_of_the_command(folder, from_python):
    assert from_python.folder == folder / "python"
    assert from_python.result == json.loads((folder / "python" / "result.json").read_text())
    assert metrics(folder / "python") == metrics(folder / "runs" / "fedavg-own")


def test_models_of_user_code_predict(folder, from_python, monkeypatch):
    """Models need their method: an object while it exists, or a name by which it is found."""
    named = jaxfl.load(folder / "runs" / "fedavg-own")
    source, rows = from_python.source, named.partition.test[1]
    for run in (from_python, named):
        right = run.models[1].predict(source.images[rows]) == source.labels[rows]
        assert right.mean() == run.models[1].accuracy == run.personal.per_client[-1, 1]
        assert list(run.models[1].weights) == ["body", "classifier"] and run.models[1].shared
    *_, card = named.export(folder / "exported", clients=1)
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    assert "networks are made by own.py," in card.read_text() and f"{folder}/own.py:linear" not in code
    monkeypatch.chdir(folder / "exported")
    shutil.copy(folder / "own.py", ".")
    names = {"images": source.images[rows]}
    exec(code, names)
    np.testing.assert_array_equal(names["labels"], named.models[1].predict(source.images[rows]))
    with pytest.raises(jaxfl.JaxflError, match="made from Python with a method of its own"):
        jaxfl.load(folder / "python").models[1]


def test_python_does_what_the_command_does(folder, tmp_path, monkeypatch):
    """Python compares, reports, loads and resumes runs as the command does."""
    chosen = {"dataset": "own.py:stripes", "partition": "own.py:unequal,most=11", "clients": 4, "rounds": 4}
    chosen |= {"models": ["own.py:linear,features=3", "mlp,hidden=4"], "participation": 0.5, "eval_every": 2}
    asked = "--seeds 2 --show std worst-tenth --target 0.01"
    call(f"compare fedavg fedavg,lr=0.2 @own.args {asked} --run-dir {tmp_path}/word")
    chosen |= {"seeds": 2, "show": ["std", "worst-tenth"], "target": 0.01}
    made = jaxfl.compare("fedavg", "fedavg,lr=0.2", run_dir=tmp_path / "python", **chosen)
    assert made.folder == tmp_path / "python" and made.failures == []
    for name in ("table.csv", "table.md", "table.tex"):
        assert (tmp_path / "python" / name).read_text() == (tmp_path / "word" / name).read_text()
    assert str(made.table) == (tmp_path / "word" / "table.md").read_text()

    assert list(made.runs) == [(f"fedavg{lr}", seed) for seed in (0, 1) for lr in ("", ",lr=0.2")]
    assert made.runs["fedavg,lr=2e-1", 1] is made.runs["fedavg,lr=0.2", 1]
    with pytest.raises(jaxfl.JaxflError, match="no run of 'fedav' here; did you mean 'fedavg'?"):
        made.runs["fedav", 0]
    with pytest.raises(jaxfl.JaxflError, match="those of fedavg are 'fedavg', 0; 'fedavg', 1"):
        made.runs["fedavg", 2]
    opened = jaxfl.load(tmp_path / "python")
    assert opened.runs.keys() == made.runs.keys()
    assert (opened.folder, opened.failures) == (made.folder, made.failures)
    assert opened.table == jaxfl.report(tmp_path / "python", target=0.01)
    assert "rounds to 1 %" in opened.table.titles
    runs = {path.parent for path in tmp_path.glob("python/*/*/result.json")}
    assert len(runs) == 4
    for run in runs:
        loaded = jaxfl.load(run)
        assert loaded.config == json.loads((run / "config.json").read_text())
        assert loaded.metrics == [*map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
        assert loaded.result == json.loads((run / "result.json").read_text())
        assert loaded.result == made.runs[loaded.config["label"], loaded.result["seed"]].result
        assert metrics(run) == metrics(tmp_path / "word" / run.relative_to(tmp_path / "python"))
        accuracy = loaded.result["accuracy"]
        assert accuracy["std"] == pytest.approx(np.std(accuracy["per_client"]))
        assert accuracy["worst_tenth"] == min(accuracy["per_client"])  # a tenth of four clients is one

    monkeypatch.chdir(tmp_path)
    again = jaxfl.report("word", show="std")
    call("report python --show std")
    assert (tmp_path / "word" / "table.csv").read_text() == (tmp_path / "python" / "table.csv").read_text()
    assert "std over clients %" in again.titles and "worst tenth %" not in again.titles

    result = loaded.result
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints" / "4")
    unfinished = jaxfl.load(run)
    assert unfinished.result is None and len(unfinished.metrics) == 4
    resumed = jaxfl.resume(run).result
    assert resumed == json.loads((run / "result.json").read_text())
    assert [resumed[key] for key in ("accuracy", "bytes_up")] == [
        result[key] for key in ("accuracy", "bytes_up")
    ]


def test_python_says_why_a_run_of_a_comparison_failed(tmp_path):
    options = {"models": ["mlp,hidden=3"], "clients": 4, "rounds": 2, "eval_every": 1, "epochs": 1}
    asked = {"run_dir": tmp_path / "run", "against": "fedavg,lr=1e30", "seeds": 2}
    made = jaxfl.compare("fedavg", "fedavg,lr=1e30", **asked, **options)
    assert [row[0] for row in made.table.rows] == ["fedavg"]
    assert "Nothing is compared with fedavg,lr=1e+30: not all runs have finished." in made.table.notes
    assert [label for (label, _), run in made.runs.items() if run.result] == ["fedavg"] * 2
    (sentence,) = made.failures
    assert sentence.startswith("fedavg,lr=1e+30: the loss of client")
    with pytest.raises(
        jaxfl.JaxflError, match="jaxfl.compare: lam is an option of compfl, .* of which none is named"
    ):
        jaxfl.compare("fedavg", "local", lam=1.0)
    with pytest.raises(jaxfl.JaxflError, match="no column 'worst-ten'; did you mean 'worst-tenth'?"):
        jaxfl.compare("fedavg", show="worst-ten", run_dir=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(jaxfl.JaxflError, match="Name the methods to compare"):
        jaxfl.compare()
    with pytest.raises(jaxfl.JaxflError, match="\\[.fedavg.\\] is not a method; give the name of one"):
        jaxfl.compare(["fedavg"])


def test_the_command_says_which_data_and_models_are_used(folder, tmp_path, capsys, monkeypatch):
    sharing = printed(capsys, "partition --clients 200 --run-dir sharing")
    assert "4,000 rows: 1,437 of 1,437 images, 1,437 of them on several clients" in sharing

    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(run_loop, "simulate", stopped)
        call(f"run local --rounds 1 --epochs 1 --run-dir {tmp_path}/two")
    said = " ".join(capsys.readouterr().out.split())
    assert "400 rows: 400 of 1,437 images" in said and "on several clients" not in said
    assert "10 clients run mcmahan,padding=same (188,810 parameters)." in said
    assert "a method with a global model has 2, one for each; --models mlp gives all clients the same" in said
    used = printed(capsys, "partition --partition classes,samples_per_client=none --run-dir used")
    assert "900 rows: 900 of 1,437 images" in used


def test_a_saved_partition_sets_the_number_of_clients(folder, tmp_path):
    call(
        "run fedavg --dataset own.py:stripes --partition divided/partition.npz --models mlp,hidden=2 "
        f"--rounds 1 --run-dir {tmp_path}/run"
    )
    assert len(json.loads((tmp_path / "run" / "result.json").read_text())["accuracy"]["per_client"]) == 4


def test_what_a_method_needs_is_provided(folder):
    """Public images and validation rows are provided, unless the user has chosen them."""

    def chosen(choice, **options):
        given = provided(Setup.of(**options), [choose("fedavg"), choose(choice)])
        return given.data.public, given.partition.validation_fraction

    assert provided(Setup(), [choose("fedavg")]).run.models == ()
    assert provided(Setup(), [choose("fedavg"), choose("fedgh")]).run.models == ("default,features=50",)
    assert provided(Setup.of(models=("mlp",)), [choose("fedproto")]).run.models == ("mlp",)
    assert chosen("fedper") == ("none", 0.0)
    assert chosen("mnfl") == ("held-out", 0.0)
    assert chosen("compfl") == ("none", 0.0)
    assert chosen("compfl,accuracy_on=validation") == ("none", 0.2)
    assert chosen("compfl,accuracy_on=validation", validation_fraction=0.0) == ("none", 0.0)
    assert chosen("compfl,accuracy_on=validation", partition="x.npz", public="auto") == ("auto", None)


@pytest.mark.long
def test_a_command_has_as_many_devices_as_asked_for(folder, tmp_path, monkeypatch):
    """A command may have more devices than cores; it has as many when the run goes on."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    }
    devices = len(os.sched_getaffinity(0)) + 1
    words = (
        f"run fedavg --models mlp,hidden=3 --rounds 1 --epochs 1 --clients {devices} --run-dir {tmp_path}/run"
    )
    command = [sys.executable, "-m", "jaxfl", *words.split(), f"--devices={devices}"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert f" on {devices} x cpu" in ended.stdout
    code = "import jaxfl; print(jaxfl.resume('run', quiet=True).config['options']['devices'])"
    (tmp_path / "run" / "result.json").unlink()
    python = [sys.executable, "-W", "error", "-c", code]
    ended = subprocess.run(python, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == f"{devices}\n", ended.stderr  # also from Python, where JAX has not started
    assert console.devices_of(["resume", f"{tmp_path}/run"]) == devices
    assert console.devices_of(["compare", "fedavg", "--run-dir", str(tmp_path)]) == devices
    assert console.devices_of(["run", "--from", f"{tmp_path}/run", "--run-dir", "new"]) == devices
    assert console.devices_of(["run", "fedavg", "--devices", "6", "--processes", "2"]) == 3
    assert console.devices_of(["run", "fedavg", "--devices", "many"]) == devices - 1
    auto = ["run", "fedavg", "--processes", "auto", "--devices", "64"]
    assert console.devices_of(auto) == 64
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert console.devices_of(auto) == 16


def test_a_study_goes_on_with_as_many_devices_as_its_runs(folder, tmp_path, monkeypatch):
    """Also in its usual folder, which the command does not name."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs/my/runs/local/seed-0")
    shutil.copytree(next((folder / "runs").glob("fedavg*")), run)
    config = store.read_config(run)
    config["options"]["devices"] = 7
    (run / store.CONFIG).write_text(json.dumps(config))
    assert console.devices_of(["study", "my.toml"]) == 7
    assert console.devices_of(["study", "other.toml", "--run-dir", "runs/my"]) == 7
    assert console.devices_of(["study", "other.toml"]) == len(os.sched_getaffinity(0))


def test_a_run_of_a_method_object_is_not_resumed_as_another(from_python, tmp_path, capsys):
    shutil.copytree(from_python.folder, tmp_path / "python")
    (tmp_path / "python" / "result.json").unlink()
    with pytest.raises(SystemExit) as end:
        call(f"resume {tmp_path / 'python'}")
    assert end.value.code == 2
    sentence = capsys.readouterr().err
    assert "made from Python with a method of its own (fedavg); name it as path/to/file.py:obj" in sentence


def test_files_of_arguments_are_quoted_as_in_a_shell(tmp_path):
    (tmp_path / "my.args").write_text(
        '# rates\n--lr 0.1  # tried\n--run-dir "runs/my #1" --mlp a#b \'#c\' ""\n'
    )
    words = ["--lr", "0.1", "--run-dir", "runs/my #1", "--mlp", "a#b", "#c", ""]
    assert expand(["run", f"@{tmp_path}/my.args"]) == ["run", *words]


def test_texts_about_a_folder_that_is_no_utf8_are_written(tmp_path):
    files.write_texts(tmp_path, {"note": "left out: n\udcff"})
    assert (tmp_path / "note").read_text() == "left out: n\\udcff"
