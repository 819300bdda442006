"""Code in README, guides and notebooks runs as shown; generated pages agree with their sources."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import jaxfl
from jaxfl import fl, registry
from jaxfl.cli import main
from jaxfl.config.setup import Setup
from jaxfl.folder import store
from jaxfl.grid import study
from jaxfl.grid.resolve import resolve_run
from jaxfl.models.zoo import MODELS

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ROOT / "experiments"
NOTEBOOKS = sorted(path.relative_to(ROOT) for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_notebooks_run(path, tmp_path, monkeypatch):
    """Notebooks run in a kernel and with optimised programs, as for a reader; stderr stays empty."""
    nbclient = pytest.importorskip("nbclient", reason="pip install '.[notebooks]'")
    if needed := re.findall(r"\w+\.(?:txt|csv)(?=,)", (ROOT / path).read_text()):
        pytest.skip(f"{' and '.join(needed)} are not part of jaxfl")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    notebook = nbformat.read(ROOT / path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=900, resources=where).execute()
    assert not [output.text for output in outputs_of(notebook) if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_notebooks_are_stored_with_their_outputs(path):
    """Notebooks are stored executed in order, without errors and paths, with their pictures, and small."""
    notebook = nbformat.read(ROOT / path, as_version=4)
    cells = code_of(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        drawn = ["image/png" in output.get("data", {}) for output in cell.outputs]
        assert any(drawn) == ("plt." in cell.source or "Image(" in cell.source)
    outputs = outputs_of(notebook)
    said = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs]
    assert not re.findall(r"(?<![\w.])/\w+/\S*", " ".join(said))
    assert not {output.get("name", output.output_type) for output in outputs} & {"error", "stderr"}
    assert (ROOT / path).stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_notebooks_name_methods_and_options_that_exist(path):
    """Literals in calls of `jaxfl.run` and `jaxfl.compare` are methods and options that exist."""
    trees = [ast.parse(cell.source) for cell in code_of(nbformat.read(ROOT / path, as_version=4))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    known = bound(nodes)
    found = []
    for node in nodes:
        match node:
            case ast.Call(ast.Attribute(ast.Name("jaxfl"), "run" | "compare" as name), arguments, keywords):
                options = {}
                for keyword in keywords:
                    value = values(keyword.value, known)[0]
                    options |= {keyword.arg: value} if keyword.arg else value
                for of_command in inspect.signature(getattr(jaxfl, name)).parameters:
                    options.pop(of_command, None)
                choices = [choice for argument in arguments for choice in values(argument, known)]
                found += [(choice, options) for choice in choices if isinstance(choice, str)]
    assert found
    for choice, options in found:
        _, setup = resolve_run(choice, {name: value for name, value in options.items() if value is not ...})
        for model in setup.run.models:
            assert model.partition(",")[0] in MODELS


def bound(nodes) -> dict:
    """Return the values of names in some code, {name: values in order}; `...` for what is no literal."""
    known = {}
    for node in nodes:
        match node:
            case ast.Assign([ast.Name(name)], value):
                known[name] = values(value, known)
            case ast.For(ast.Name(name), ast.Tuple(entries)) | ast.comprehension(
                ast.Name(name), ast.Tuple(entries)
            ):
                known[name] = [value for entry in entries for value in values(entry, known)]
    return known


def values(node, known) -> list:
    """Return the possible values of an expression."""
    match node:
        case ast.Constant(value):
            return [value]
        case ast.Name(name):
            return known.get(name, [...])
        case ast.List(entries) | ast.Tuple(entries):
            return [[values(entry, known)[0] for entry in entries]]
        case ast.Dict(keys, entries):
            return [{key.value: values(entry, known)[0] for key, entry in zip(keys, entries, strict=True)}]
    return [...]


def code_of(notebook) -> list:
    """Return a notebook's code cells."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook) -> list:
    """Return the outputs of a notebook's code cells."""
    return [output for cell in code_of(notebook) for output in cell.outputs]


def test_the_readme_states_the_defaults():
    setup, training = Setup(), registry.METHODS["fedavg"].config()
    stated = (
        f"The defaults are `{setup.data.dataset}` and 20 clients with 20 rows of five classes each. All "
        f"clients train in each of {setup.run.rounds} rounds, for {training.epochs} epochs in batches of "
        f"{training.batch_size}, by SGD with learning rate {training.lr}, momentum {training.momentum} and "
        f"weight decay {training.weight_decay}. There is an evaluation every {setup.run.eval_every} rounds; "
        f"the seed is {setup.run.seed}."
    )
    assert stated in " ".join((ROOT / "README.md").read_text().split())


def test_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    """The README's example runs, here with fewer rounds."""
    (code,) = [block for block in python_blocks("README.md") if "jaxfl.run(" in block]
    assert code.count("rounds=30") == 1
    monkeypatch.chdir(tmp_path)
    exec(code.replace("rounds=30", "rounds=2, eval_every=1"), {})
    assert "\nTrue\n" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "deployed").iterdir()} == {"client-3.safetensors", "README.md"}


@pytest.mark.parametrize("classes", [2, 3])
def test_the_recipe_for_auc_is_that_of_scikit_learn(classes, tmp_path, monkeypatch, capsys):
    """Of two classes too, for which `roc_auc_score` takes other arguments, by one column."""
    (code,) = [block for block in python_blocks("docs/results.md") if "roc_auc_score" in block]
    options = {"dataset": f"digits,classes=0-{classes - 1}", "models": "mlp,hidden=3", "clients": 3}
    monkeypatch.chdir(tmp_path)
    jaxfl.run("fedavg", rounds=1, epochs=1, run_dir="runs/fedper-digits", quiet=True, **options)
    exec(code, names := {})
    truth, scores = names["truth"], names["scores"]
    several = {"multi_class": "ovr"} if classes > 2 else {}
    expected = roc_auc_score(truth, scores if classes > 2 else scores[:, 1], **several)
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(expected)


@pytest.mark.parametrize("mu", ["0.1", "0"])
def test_method_of_the_readme_runs_and_is_fedavg_with_mu_0(mu, tmp_path):
    """The method gets the batches of built-in methods: with mu = 0 it has the bits of FedAvg."""
    (code,) = [block for block in python_blocks("README.md") if "fedprox = fl.Method" in block]
    (tmp_path / "my.py").write_text(code)
    federation = "--rounds 2 --eval-every 1 --clients 4 --participation 0.5 --models mlp,hidden=4"
    for choice, folder in ((f"{tmp_path}/my.py:fedprox,mu={mu}", "own"), ("fedavg", "built-in")):
        main(["run", choice, *federation.split(), "--run-dir", str(tmp_path / folder)])
    own, fedavg = (store.read_metrics(tmp_path / folder) for folder in ("own", "built-in"))
    told = ("client_loss", "accuracy", "bytes_up", "bytes_down")
    same = [[record[name] for name in told] for record in own] == [
        [record[name] for name in told] for record in fedavg
    ]
    assert same == (mu == "0")


@pytest.mark.long
def test_methods_of_the_guide_run(tmp_path):
    """FedAvgM without momentum, FedNova for equally many steps of plain SGD, and no attackers are FedAvg.

    Models that are mixed with near ones are those of Local or DFedAvg, by what is near. A teacher that is not
    sharpened at all says nothing.
    """
    names = ("fedavgm", "fednova", "hurried", "astray", "dsfl", "median", "near")
    for name, code in zip(names, python_blocks("docs/own-method.md"), strict=True):
        (tmp_path / f"{name}.py").write_text(code)
    options = "--rounds 2 --eval-every 1 --clients 5 --participation 0.8 --models mlp,hidden=4"
    metrics = {}
    without_momentum, normalised = "fedavgm.py:fedavgm,beta=0", "fednova.py:fednova"
    none_astray, some = "astray.py:astray,attackers=0", "astray.py:astray,attackers=2"
    one, four = (f"hurried.py:hurried,epochs={epochs}" for epochs in (1, 4))
    plain = "fedavg,momentum=0"
    fedavgs = without_momentum, none_astray, some, "fedavg", normalised, plain
    nearest, all_near = (f"near.py:near,sigma={sigma}" for sigma in (1e-9, 1e9))
    sharp, blunt = "dsfl.py:dsfl", "dsfl.py:dsfl,sharpness=1e9"
    alone = nearest, "local", all_near, "dfedavg", sharp, blunt
    for method in ("median.py:median", one, four, *fedavgs, *alone):
        choice, folder = f"{tmp_path}/{method}" if ".py" in method else method, tmp_path / f"{len(metrics)}"
        epochs = () if "epochs=" in method else ("--epochs", "1")
        main(["run", choice, *options.split(), *epochs, "--run-dir", str(folder)])
        metrics[method] = store.read_metrics(folder)
    assert metrics["median.py:median"][-1]["bytes_up"] == 4 * 4 * (65 * 4 + 5 * 10)
    assert metrics[normalised][-1]["bytes_up"] == 4 * 4 * (65 * 4 + 5 * 10 + 1)
    operations = [sum(record["flops"] for record in metrics[name]) for name in ("fedavg", one, four)]
    assert operations[0] == operations[1] < operations[2] < 4 * operations[1]
    losses = {name: [record["loss"] for record in of_run] for name, of_run in metrics.items()}
    unsure = {name: metrics[name][-1]["findings"]["entropy of teachers"]["mean"] for name in (sharp, blunt)}
    assert unsure[sharp] < unsure[blunt] == pytest.approx(np.log(10), rel=1e-5)
    fedavg = losses["fedavg"]
    assert losses[without_momentum] == pytest.approx(fedavg, rel=1e-5)
    assert losses[none_astray] == pytest.approx(fedavg, rel=1e-5)
    assert losses[normalised] == pytest.approx(losses[plain], rel=1e-5)
    assert losses[some][0] == pytest.approx(fedavg[0], rel=1e-5)
    assert losses[some][1] > fedavg[1]
    assert losses[nearest] == losses["local"] != losses["dfedavg"]
    assert losses[all_near] == pytest.approx(losses["dfedavg"], rel=1e-5)
    assert metrics[all_near][-1]["bytes_up"] == metrics["fedavg"][-1]["bytes_up"]


def test_the_site_is_built_without_a_warning(tmp_path):
    """Every link leads to a page, and every method has a page, with typeset equations."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for name in registry.METHODS:
        assert (tmp_path / "methods" / name / "index.html").is_file()
    page = (tmp_path / "methods" / "fedprox" / "index.html").read_text()
    assert "w<sub>i</sub> ← LocalSGD over CE(w) + μ/2 ‖w - w<sup>t</sup>‖<sup>2</sup>" in page


def test_the_site_documents_every_name_of_fl():
    page = (ROOT / "docs" / "api.md").read_text()
    named = re.findall(r"^::: (\S+)", page, re.MULTILINE)
    imports = [node for node in ast.parse(inspect.getsource(fl)).body if isinstance(node, ast.ImportFrom)]
    modules = {imported.name: node.module for node in imports for imported in node.names}
    for name in modules:
        assert {modules[name], f"{modules[name]}.{name}"} & {*named}, f"{name} is not in docs/api.md"


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


def test_the_guide_shows_code_of_the_package():
    """Each Python block of CONTRIBUTING.md names a file that has the same lines."""
    blocks = python_blocks("CONTRIBUTING.md")
    assert len(blocks) >= 4
    for block in blocks:
        where, code = block.split("\n", 1)
        assert code in (ROOT / where.removeprefix("# ")).read_text(), code


def test_only_messages_between_processes_of_one_run_are_unpickled():
    """Besides, `plain_pickles` reads pickles of other programs, without what they would import."""
    imported, allowed = {}, []
    for path in (ROOT / "jaxfl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names):
                    imported.setdefault(path.name, set()).update(name.name for name in names)
                case ast.ImportFrom("pickle", [ast.alias("dumps")]):
                    pass  # writing for other programs unpickles nothing
                case ast.ImportFrom(module):
                    imported.setdefault(path.name, set()).add(module)
                case ast.keyword("allow_pickle", value):
                    allowed.append(ast.unparse(value))
    unpickling = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    assert {name for name, modules in imported.items() if modules & unpickling} == {
        "processes.py",
        "plain_pickles.py",
    }
    assert set(allowed) == {"False"}


def test_the_page_of_all_methods_lists_every_method():
    page = (ROOT / "docs" / "all-methods.md").read_text()
    for name, method in registry.METHODS.items():
        row = f"| `{name}` | {method.summary} |"
        assert row in page, f"docs/all-methods.md lacks a row that begins with\n{row}"
    listed = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", page, re.MULTILINE)
    assert len(listed) == len(registry.METHODS), "docs/all-methods.md has a row of no method"


@pytest.mark.parametrize("kind", ["run", "test"])
def test_readme_has_a_block_for_newcomers(kind):
    readme = (ROOT / "README.md").read_text()
    assert re.search(rf"<!-- newcomer: {kind} -->\n```bash\n.+\n```", readme)


@pytest.fixture(scope="module")
def overview():
    """Return the script that makes the pages of verdicts."""
    spec = importlib.util.spec_from_file_location("overview", EXPERIMENTS / "overview.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_of_verdicts_agree_with_the_kept_results(overview):
    made = overview.pages()
    assert len(made) == 1 + len([*EXPERIMENTS.glob("*/items.toml")])  # and the overview
    for path, text in made.items():
        assert path.read_text() == text, f"{path} is not what is kept; run python experiments/overview.py"


def test_every_study_belongs_to_a_table_or_figure(overview):
    items = {path.parent.name: overview.read(path.parent).items for path in EXPERIMENTS.glob("*/items.toml")}
    of_items = [(folder, item) for folder, of_folder in items.items() for item in of_folder]
    studies = [(folder, (item.study, *item.at_scale, *item.more)) for folder, item in of_items]
    named = {f"{folder}/{name}" for folder, names in studies for name in names if name}
    assert named == set(study.found_below(EXPERIMENTS))
    for path in (path for folder in items for path in (EXPERIMENTS / folder).glob("*.args")):
        assert any(path.name in item.setups for item in items[path.parent.name]), path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verdict": "likely"}, "'likely' is no verdict"),
        ({"seeds": 9}, "has . seeds of fedavg, and items.toml says 9"),
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
def test_verdicts_without_matching_results_are_refused(overview, change, words):
    folder = EXPERIMENTS / "fedcmd"
    (item,) = (item for item in overview.read(folder).items if item.name == "Figure 8")
    figures = [overview.figures_of(entry) for entry in change.get("figures", [])] or item.figures
    changed = item._replace(**change | {"figures": figures})
    with pytest.raises(SystemExit, match=words):
        overview.check(folder, changed)
        overview.gather(folder, changed)
