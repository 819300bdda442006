"""Mistakes in user code: one sentence with file and line, and for errors inside that code their traceback.

The mistakes are those of `tests/own/wrong.py`, which imports a module in its folder.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxfl
from jaxfl.cli import main
from jaxfl.config import own_code
from jaxfl.core.protocol_check import checked
from jaxfl.folder.variant import choose
from jaxfl.registry import METHODS

OWN = Path(__file__).parents[1] / "own"
WRONG = (OWN / "wrong.py").read_text().splitlines()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(OWN, tmp_path / "work", ignore=shutil.ignore_patterns("__pycache__")))
    return Path.cwd()


def line(text):
    """Return the number of the only line of wrong.py that has a text."""
    (number,) = (number for number, line in enumerate(WRONG, 1) if text in line)
    return number


RUN = "run fedavg @own.args"
OPTION = "from jaxfl.fl import *\n\n@options\nclass Own(Training):\n   "
REFUSED = [
    (
        "run wrong.py:adds_to_the_state",
        "def step(key, state, federation, cohort):  # altered",
        "step makes state[2] ",
        "which was nothing; the state must keep its form",
    ),
    (
        "run wrong.py:changes_a_shape",
        "def step(key, state, federation, cohort):  # altered",
        "float32[1], which was float32[]; the state must",
    ),
    (
        "run wrong.py:changes_a_container",
        "def step(key, state, federation, cohort):  # altered",
        "a state whose containers differ from those of init",
    ),
    (
        "run wrong.py:reports_nothing",
        "def step(key, state, federation, cohort):  # altered",
        "step returns a tuple of a FedProx,",
        "not (state, Info)",
    ),
    (
        "run wrong.py:reports_a_mean",
        "def step(key, state, federation, cohort):  # altered",
        "Info.loss as an array ()",
        "a float array (k,) for each",
    ),
    (
        "run wrong.py:reports_floats",
        "def step(key, state, federation, cohort):  # altered",
        "Info.up as a tuple of an array",
        "an int32 array (k,)",
    ),
    (
        "run wrong.py:reports_text",
        "def step(key, state, federation, cohort):  # altered",
        "what step returns is not made of arrays",
    ),
    (
        "run wrong.py:forgets_the_others",
        "def step(key, state, federation, cohort):  # without scatter",
        "step makes state.weights",
        "the state must keep its form",
    ),
    (
        "run wrong.py:finds_an_array",
        "def step(key, state, federation, cohort):  # altered",
        "Info.findings['lost']['loss'] as an array (",
        "not as a number ()",
    ),
    (
        "run wrong.py:host_reports_nothing",
        "def host(key, state, federation, cohort)",
        "host returns a tuple of a FedProx,",
        "not (state, Info)",
    ),
    (
        "check wrong.py:host_counts_once",
        "def host(key, state, federation, cohort)",
        "host reports Info.up as an array ()",
        "an int32 array (k,) for each",
    ),
    (
        "check wrong.py:host_changes_a_dtype",
        "def host(key, state, federation, cohort)",
        "host makes state",
        "float64[], which was float32[]; the state must",
    ),
    (
        "check wrong.py:host_finds_a_set",
        "def host(key, state, federation, cohort)",
        "host reports Info.findings that JSON cannot hold (TypeError: a set)",
    ),
    (
        "check wrong.py:host_keeps_a_number",
        "def host(key, state, federation, cohort)",
        "host makes state",
        " float, which was float32[]; the state must",
    ),
    (
        "run wrong.py:predicts_a_tuple",
        "predicts_a_tuple =",
        "predict returns a tuple of an array (3, 2) of float32, a dict",
    ),
    (
        "run wrong.py:predicts_labels",
        "lambda model, shared, own, x: model.apply(*shared, x, train=False)[0].argmax(1)",
        "an array (3,) of int32 for 3 images, not scores (3, 2)",
    ),
    (
        "run wrong.py:predicts_whole_numbers",
        "lambda model, shared, own, x: model.apply(*shared, x, train=False)[0].astype(int)",
        "an array (3, 2) of int32 for 3 images, not scores (3, 2): an array (B, outputs) of floats",
    ),
    (
        "run wrong.py:trains_a_number",
        "def step(key, state, federation, cohort):  # altered",
        "Info.trained of step gives an array () of int32, not a tuple with a Predictor",
    ),
    ("run wrong.py:predicts_otherwise", "predicts_otherwise =", "is called with (model, shared, own, x)"),
    (
        "run wrong.py:few_arguments",
        "few_arguments =",
        "personal has the parameters (key, state), but is called",
    ),
    (
        "run wrong.py:returns_a_value_alone",
        "def value_alone",
        "must return (value, statistics) and nothing else",
    ),
    (
        "run wrong.py:returns_a_value_of_rows",
        "def value_of_rows",
        "a mean over rows such as mean(losses, batch)",
    ),
    ("run wrong.py:returns_no_statistics", "def no_statistics", "the statistics of all blocks"),
    ("run wrong.py:builds_nothing", "builds_nothing =", "build returns a NoneType, not a jaxfl.Algorithm"),
    (
        "run wrong.py:takes_a_name",
        "@jaxfl.options",
        "has its own option 'rounds'",
        "of every run (--rounds)",
    ),
    (
        "run wrong.py:a_key_in_the_state",
        "init=lambda key, federation, hyper",
        "init puts a random key into state[1]; nothing random belongs there",
    ),
    ("run wrong.py:takes_no_key", "def keyless", "loss has the parameters (weights, batch), but is called"),
    (
        "run wrong.py:updates_alone",
        "def forgetful",
        "Memory.update has the parameters (participant), but is called with (participant, trained)",
    ),
    ("run wrong.py:remembers_once", "def first_memory", "Memory has client but no update"),
    ("run wrong.py:aggregates_alone", "def alone", "Memory.aggregate returns a Weights, not a pair"),
    ("run wrong.py:trains_nothing", "def speechless", "train returns a NoneType, not a Trained"),
    ("run wrong.py:trains_half", "def halved", "float16[", "which was float32["),
    ("run wrong.py:trains_unknown", "def unknown_blocks", "a phase trains ('head',), not a tuple of some of"),
    ("run wrong.py:other_pairs", "def of_five", "matrices must return {name: array (4, 4)}"),
    ("run wrong.py:outside", "", "give it a word such as 'mine', not '../outside'"),
    ("run wrong.py:aggregates_parameters", "def parameters", "a dict as the model, not Weights"),
    (
        "run wrong.py:remembers_more",
        "def hoarding",
        "float32[3], which was nothing; it must",
    ),
    (
        "run wrong.py:keeps_a_word",
        "keeps_a_word =",
        "keep returns 'classifier', not a function of a leaf's path",
    ),
    ("run wrong.py:forgets_to_return", "def undecided", "gives None for ('params', "),
    ("run wrong.py:sends_integers", "def counting", "a message of int32, but the server takes the mean"),
    ("run wrong.py:needs_a_word", "needs_a_word =", "it must have some of public, validation, links"),
    ("run wrong.py:undecorated", "", "a subclass of jaxfl.Training, decorated by jaxfl.options"),
    ("run wrong.py:a_dataclass", "", "a subclass of jaxfl.Training, decorated by jaxfl.options"),
    ("run wrong.py:no_options", "", "config must be a subclass of jaxfl.Training"),
    ("run wrong.py:already_built", "", "build must be a function that makes an Algorithm from a config"),
    (
        f"{RUN} --partition wrong.py:two_arguments",
        "def two_arguments",
        "(labels, clients), but is called with",
    ),
    (f"{RUN} --partition wrong.py:three_entries,classes=2", "", "an array of different positions from 0 to"),
    (
        f"{RUN} --partition wrong.py:beyond_the_data",
        "",
        "4 arrays, of which that of client 3 is none such",
    ),
    (
        f"{RUN} --schedule wrong.py:no_schedule",
        "",
        "a schedule is 0.5; give a function of (rounds)",
    ),
    (f"{RUN} --dataset wrong.py:source_of_nothing", "def source_of_nothing", "is called with (data_dir)"),
    (
        f"{RUN} --models wrong.py:maskless",
        "@nn.compact  # maskless",
        "Maskless.__call__ has the parameters (self, x, train)",
    ),
    (f"{RUN} --models wrong.py:outputs", "", "returns (3,) for an example, not (2,): a score for each class"),
    (
        f"{RUN} --models wrong.py:listed",
        "",
        "the block 'body' of wrong.py:listed has a field that can change",
    ),
    (f"{RUN} --models wrong.py:blocks", "", "the block 'body' is a int, not a flax.linen.Module"),
    (
        f"{RUN} --models wrong.py:positional",
        "def positional",
        "(shape), but is called with (shape=, classes=)",
    ),
]


def contents():
    """Return the bytes of all files here, except what Python itself keeps of a module that it loads."""
    paths = (path for path in Path.cwd().rglob("*") if "__pycache__" not in path.parts)
    return {path: path.is_file() and path.read_bytes() for path in paths}


def refused(capsys, command):
    """Return the standard error of a command, which must end with code 2 and leave all files as they were."""
    before = contents()
    with pytest.raises(SystemExit) as end:
        main(command.split())
    assert end.value.code == 2 and contents() == before
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "at", "words"), [(command, at, words) for command, at, *words in REFUSED]
)
def test_what_does_not_fit_is_refused_with_its_line(capsys, command, at, words):
    whole = RUN in command or command.startswith("check")
    sentence = refused(capsys, command if whole else f"{command} @own.args")
    assert sentence.startswith("jaxfl: ") and sentence.count("\n") == 1
    assert all(word in sentence for word in words), sentence
    if at:
        assert f"wrong.py, line {line(at)}: " in sentence, sentence


@pytest.mark.parametrize("name", ["loops_outside", "keeps_a_loss"])
def test_a_traced_value_that_outlives_its_trace_is_refused(capsys, name):
    sentence = refused(capsys, f"run wrong.py:{name} @own.args")
    assert "of jaxfl.fl, which count operations, not vmap" in sentence and "wrong.py, line" in sentence


@pytest.mark.parametrize(
    ("command", "at", "error"),
    [
        ("run wrong.py:breaks @own.args", 'state["weights"]', "TypeError: tuple indices must be"),
        (
            "run wrong.py:reads_a_rate @own.args",
            "reads_a_rate =",
            "TypeError: build computes with a float option",
        ),
        (
            "run wrong.py:reads_a_rate_in_jax @own.args",
            "reads_a_rate_in_jax =",
            "TypeError: build computes with a float option",
        ),
        (
            "run wrong.py:half_epochs @own.args",
            "half_epochs =",
            "TypeError: epochs that may differ by client must be integers, not float32",
        ),
        (
            "run wrong.py:one_architecture @own.args",
            "one_architecture =",
            "ValueError: expected tuples with an entry for each architecture, but they have 1 and 2",
        ),
        (
            "run wrong.py:unsplit @own.args",
            "scatter((0.0, 0.0), cohort, 0.0)",
            "ValueError: expected a tuple with an entry for each architecture, not a float",
        ),
        (
            "run wrong.py:ungathered @own.args",
            "own=everyones",
            "ValueError: a leaf of own or weights has the",
        ),
        (
            "run wrong.py:no_parts @own.args",
            "client.size, key, federation",
            "ValueError: a client of map_and_sum returns (outputs, parts)",
        ),
        (
            "run wrong.py:integers @own.args",
            "(None, client.size)",
            "ValueError: a sum over clients takes floats, but a part of it is int32; convert it",
        ),
        (
            "run wrong.py:predicts_by_params @own.args",
            "predicts_by_params =",
            "AttributeError: 'Weights' object has no attribute 'parms'",
        ),
        ("run wrong.py:lacks_up @own.args", "lacks_up =", "TypeError: Info.__new__() missing 1 required"),
        (f"{RUN} --partition wrong.py:divides_by_zero", "1 // 0", "ZeroDivisionError: "),
        (f"{RUN} --dataset wrong.py:source_breaks", "open(data_dir)", "TypeError: expected str"),
        (f"{RUN} --models wrong.py:breaking", "reshape(7, -1)", "TypeError: "),
        (
            "compare fedavg wrong.py:breaks @own.args --run-dir compared",
            'state["weights"]',
            "TypeError: tuple",
        ),
    ],
)
def test_an_error_in_user_code_keeps_its_traceback_without_that_of_jaxfl(capsys, command, at, error):
    if command.startswith("compare"):  # the other runs go on
        with pytest.raises(SystemExit):
            main(command.split())
        assert Path("compared/fedavg/seed-0/result.json").exists()
        printed = capsys.readouterr().err
    else:
        printed = refused(capsys, command)
        files = set(re.findall(r'^  File "(.*)", line', printed, re.MULTILINE))
        assert {Path(file).name for file in files} <= {"wrong.py", "own.py"} and printed.count(
            "Traceback"
        ) == 1
        assert printed.splitlines()[-2].startswith(error.partition(":")[0])
    last = printed.splitlines()[-1]
    assert last.startswith("jaxfl: ") and f"wrong.py, line {line(at)}, in " in last
    assert error.partition(": ")[2] in last and "which jaxfl" not in last


def test_python_gets_the_users_frames_as_the_cause():
    with pytest.raises(jaxfl.JaxflError) as caught:
        jaxfl.run("wrong.py:breaks", models="mlp,hidden=3", rounds=1, epochs=1)
    trace, names = caught.value.__cause__.__traceback__, []
    while trace:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names == ["step", "broken"]


def test_a_grid_over_a_users_method_is_one_program(capsys):
    """However often its file is named, it is loaded once; a file that has changed is loaded again."""
    compare = ["compare", "own.py:fedprox,mu=0.1", "own.py:fedprox,mu=1", "@own.args", "--seeds", "2"]
    compare += ["--run-dir", "compared"]
    main(compare)
    assert "fedprox,mu=0.1 fedprox,mu=1.0: 4 runs as one program" in capsys.readouterr().out
    before = own_code.load(Path("own.py"), "fedprox")
    assert own_code.load(Path("own.py"), "fedprox") is before
    Path("own.py").write_text(Path("own.py").read_text() + "\nCHANGED = True\n")
    assert own_code.load(Path("own.py"), "fedprox") is not before
    with pytest.raises(SystemExit):
        main(compare)
    assert "to train again, or add --changed-code" in capsys.readouterr().err
    main([*compare, "--changed-code"])
    assert "4 of 4 runs in compared have finished with another version of your" in capsys.readouterr().err


def test_only_methods_of_the_users_own_are_checked_before_they_run():
    assert all(choose(name).built_in for name in METHODS)
    assert not choose(METHODS["fedavg"]._replace(build=METHODS["fedprox"].build)).built_in


def test_an_algorithm_with_a_users_step_does_not_only_average():
    """A user's step may do something else than `jaxfl.core.protocol.Averaged` describes."""
    method = METHODS["fedavg"]
    right = method.build(method.config())
    altered = right._replace(step=lambda key, state, federation, cohort: None)
    assert checked(right, method.build).averaged and not checked(altered, method.build).averaged


@pytest.mark.parametrize("place", ["beside.py", "beside/__init__.py", "beside/inner.py"])
def test_modules_of_one_name_in_two_folders_are_kept_apart(tmp_path, place):
    """They are both found, belong to the files that import them, and are loaded again after an edit."""
    before, module = list(sys.path), place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def load(folder):
        return own_code.load(folder / "my.py", "NAME")

    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        file = folder / place
        file.parent.mkdir(parents=True)
        file.write_text(f"NAME = {folder.name!r}\n")
        (folder / "my.py").write_text(f"from {module} import NAME\n")
    assert [load(folder) for folder in folders] == ["one", "two"]
    for folder in folders:
        assert own_code.helpers([folder]) == {folder / place}
    (folders[0] / place).write_text("NAME = 'edited'\n")
    assert [load(folder) for folder in folders] == ["edited", "two"]
    assert sys.path == before


def test_an_edited_module_is_loaded_again_however_its_folder_was_spelt(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("./src")
    Path("src/my.py").write_text("import aside\nNUMBER = aside.NUMBER\n")
    found = []
    for number in (1, 22):
        Path("src/aside.py").write_text(f"NUMBER = {number}\n")
        if not found:
            importlib.import_module("aside")  # up to Python 3.12 its file is ./src/aside.py
        found.append(own_code.load(Path("src/my.py"), "NUMBER"))
    assert found == [1, 22]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import jaxfl\nx = (\n", "broken.py, line 2: '(' was never closed"),
        ("import jaxfl\n\nx = y\n", "broken.py, line 3)"),
        ("import jaxfl\nimport nowhere_at_all\n", "No module named 'nowhere_at_all' ("),
        ("import sys\nsys.exit()\n", "broken.py does not load: SystemExit"),
        (
            f"{OPTION} mu: float = within('[0 inf)', 0.1)\n",
            "'mu' of Own lies in '[0 inf)', which is not an interval",
        ),
        (
            f"{OPTION} epochs: str = '5'\n",
            "'epochs' of Own is a text, but a whole number or a number in Training",
        ),
        (f"{OPTION} mu: float\n", "The options of Own need defaults, each a number"),
        (f"{OPTION} mu: list = []\n", "The options of Own need defaults, each a number"),
        (f"{OPTION} mu: 'flaot' = 0.1\n", "the type of an option cannot be read: name 'flaot'"),
    ],
)
def test_a_file_that_does_not_load_is_refused(folder, capsys, text, words):
    (folder / "broken.py").write_text(text)
    sentence = refused(capsys, "run broken.py:x")
    assert sentence.count("\n") == 1 and words in sentence


@pytest.mark.parametrize("module", ["optax", "my"])
def test_ctrl_c_during_an_import_ends_the_command(folder, module):
    """Ctrl-C while a library or the user's file is imported ends the command in one sentence."""
    (folder / f"{module}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-m", "jaxfl", "run", "my.py:method"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "jaxfl: Stopped.\n")
