"""What README and notebook show is run as it stands; pages that are made are what they are made from."""

import ast
import doctest
import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest

from jaxfl import registry
from jaxfl.cli import main
from jaxfl.runs import store, study

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ROOT / "experiments"


@pytest.mark.long
def test_notebook_runs(tmp_path, monkeypatch):
    """Cell after cell, with fewer rounds."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    notebook = nbformat.read(ROOT / "notebooks" / "walkthrough.ipynb", as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert sum("rounds=10, eval_every=2" in cell for cell in cells) == 1
    names = {}
    for number, cell in enumerate(cells):
        code = cell.replace("rounds=10, eval_every=2", "rounds=2, eval_every=1")
        exec(compile(code, f"cell {number}", "exec"), names)
    plt.close("all")
    assert all(run.personal.per_client.shape == (2, 20) for run in names["runs"].values())


def test_notebook_is_stored_with_what_it_shows():
    notebook = nbformat.read(ROOT / "notebooks" / "walkthrough.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    assert not any(output.output_type == "error" for output in outputs)


def test_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    """With fewer rounds, which are the notebook's."""
    (code,) = [block for block in python_blocks("README.md") if "jaxfl.run(" in block]
    assert code.count("rounds=30") == 1
    monkeypatch.chdir(tmp_path)
    exec(code.replace("rounds=30", "rounds=2, eval_every=1"), {})
    assert "\nTrue\n" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "deployed").iterdir()} == {"client-3.safetensors", "README.md"}


@pytest.mark.parametrize("mu", ["0.1", "0"])
def test_method_of_the_readme_runs_and_is_fedavg_without_its_pull(mu, tmp_path):
    """It sees the batches that built-in methods see: with mu = 0 it has the bits of FedAvg."""
    (code,) = [block for block in python_blocks("README.md") if "fedprox = Method" in block]
    (tmp_path / "my.py").write_text(code)
    federation = (
        "--rounds 2 --eval-every 1 --clients 4 --participation 0.5 --models mlp,hidden=4 mlp,hidden=5"
    )
    for choice, folder in ((f"{tmp_path}/my.py:fedprox,mu={mu}", "own"), ("fedavg", "built-in")):
        main(["run", choice, *federation.split(), "--run-dir", str(tmp_path / folder)])
    own, fedavg = (store.read_metrics(tmp_path / folder) for folder in ("own", "built-in"))
    told = ("client_loss", "accuracy", "bytes_up", "bytes_down")
    same = [[record[name] for name in told] for record in own] == [
        [record[name] for name in told] for record in fedavg
    ]
    assert same == (mu == "0")


def test_method_of_the_guide_runs(tmp_path):
    """Its median, from the ground up."""
    (code,) = python_blocks("docs/own-method.md")
    (tmp_path / "median.py").write_text(code)
    options = "--rounds 2 --eval-every 1 --clients 5 --participation 0.8 --models mlp,hidden=4 --epochs 1"
    folder = tmp_path / "run"
    main(["run", f"{tmp_path}/median.py:median", *options.split(), "--run-dir", str(folder)])
    assert store.read_metrics(folder)[-1]["bytes_up"] == 4 * 4 * (65 * 4 + 5 * 10)


def test_the_site_is_built_without_a_warning(tmp_path):
    """Every link leads to a page, every method has one, and its equations are typeset."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for name in registry.METHODS:
        assert (tmp_path / "methods" / name / "index.html").is_file()
    page = (tmp_path / "methods" / "fedprox" / "index.html").read_text()
    assert "w<sub>i</sub> ← LocalSGD over CE(w) + μ/2 ‖w - w<sup>t</sup>‖<sup>2</sup>" in page


def test_examples_of_docstrings_are_true():
    examples = 0
    for path in (ROOT / "jaxfl").rglob("*.py"):
        if ">>>" in path.read_text():
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            failed, tried = doctest.testmod(importlib.import_module(name))
            assert not failed
            examples += tried
    assert examples


def python_blocks(document):
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_the_guide_shows_code_as_it_is():
    """Each block of CONTRIBUTING.md names a file, which has these very lines; its case tests it."""
    blocks = python_blocks("CONTRIBUTING.md")
    assert len(blocks) >= 4
    for block in blocks:
        where, code = block.split("\n", 1)
        assert code in (ROOT / where.removeprefix("# ")).read_text(), code


def test_nothing_is_unpickled_but_what_processes_of_one_run_tell_each_other():
    imported, allowed = {}, []
    for path in (ROOT / "jaxfl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names):
                    imported.setdefault(path.name, set()).update(name.name for name in names)
                case ast.ImportFrom("pickle", [ast.alias("dumps")]):
                    pass  # who writes for other programs reads nothing
                case ast.ImportFrom(module):
                    imported.setdefault(path.name, set()).add(module)
                case ast.keyword("allow_pickle", value):
                    allowed.append(ast.unparse(value))
    unpickling = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    assert {name for name, modules in imported.items() if modules & unpickling} == {"processes.py"}
    assert set(allowed) == {"False"}


def test_the_guide_says_what_the_command_loads_at_once():
    """Extras aside; so that it starts where little is installed."""
    extras, called = {"equinox", "flwr"}, {"PIL": "pillow", "sklearn": "scikit-learn"}
    loaded = set()
    for path in (ROOT / "jaxfl").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.Import(names):
                    loaded |= {name.name.partition(".")[0] for name in names}
                case ast.ImportFrom(module):
                    loaded.add(module.partition(".")[0])
    loaded -= {*sys.stdlib_module_names, "jaxfl", *extras}
    guide = " ".join((ROOT / "docs" / "accelerators.md").read_text().split())
    named = guide.partition("Loaded at once are ")[2].partition(";")[0].split(", ")
    assert {called.get(name, name.replace("_", "-")) for name in loaded} == set(named)


def test_readme_lists_every_method():
    readme = (ROOT / "README.md").read_text()
    for name, method in registry.METHODS.items():
        row = f"| `{name}` | {method.summary} |"
        assert row in readme, f"README.md's table of methods lacks a row that begins with\n{row}"
    listed = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", readme, re.MULTILINE)
    assert len(listed) == len(registry.METHODS), "README.md's table has a row of no method"


@pytest.mark.parametrize("kind", ["run", "test"])
def test_readme_has_a_block_for_newcomers(kind):
    readme = (ROOT / "README.md").read_text()
    assert re.search(rf"<!-- newcomer: {kind} -->\n```bash\n.+\n```", readme)


@pytest.fixture(scope="module")
def overview():
    """The script that makes the pages of verdicts."""
    spec = importlib.util.spec_from_file_location("overview", EXPERIMENTS / "overview.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_of_verdicts_are_what_is_kept(overview):
    made = overview.pages()
    assert len(made) == 7
    for path, text in made.items():
        assert path.read_text() == text, f"{path} is not what is kept; run python experiments/overview.py"


def test_every_study_belongs_to_a_table_or_figure(overview):
    items = {path.parent.name: overview.read(path.parent).items for path in EXPERIMENTS.glob("*/items.toml")}
    named = {f"{folder}/{item.study}" for folder, its in items.items() for item in its if item.study}
    assert named == set(study.found_below(EXPERIMENTS))
    for path in (path for folder in items for path in (EXPERIMENTS / folder).glob("*.args")):
        assert any(path.name in item.setups for item in items[path.parent.name]), path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verdict": "likely"}, "'likely' is no verdict"),
        ({"seeds": 2}, "has 1 seeds of fedavg, and items.toml says 2"),
        ({"commit": ""}, "what has run, and nothing else, has figures, seeds and a commit"),
        ({"verdict": "not run"}, "what has run, and nothing else"),
        ({"study": "table-99"}, "there is no .*table-99.toml"),
        (
            {"figures": [{"title": "a", "file": "small.csv", "column": "accuracy %", "rows": ["fedcmd"]}]},
            "no one",
        ),
        (
            {"figures": [{"title": "a", "file": "README.md", "column": "trained", "rows": ["fedcmd"]}]},
            "no one",
        ),
    ],
)
def test_verdicts_on_what_is_not_there_are_refused(overview, change, words):
    folder = EXPERIMENTS / "fedcmd"
    (item,) = (item for item in overview.read(folder).items if item.name == "Figure 8")
    figures = [overview.figures_of(its) for its in change.get("figures", [])] or item.figures
    changed = item._replace(**change | {"figures": figures})
    with pytest.raises(SystemExit, match=words):
        overview.check(folder, changed)
        overview.gather(folder, changed)
