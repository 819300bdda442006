"""What the README and the notebook show is run as it stands."""

import ast
import re
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest

from jaxfl import registry
from jaxfl.cli import main

ROOT = Path(__file__).parent.parent


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
    assert all(len(result["accuracy"]["per_client"]) == 20 for result in names["results"].values())


def test_method_of_the_readme_runs(tmp_path, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "fedprox = Method" in block]
    assert len(code.splitlines()) <= 60
    (tmp_path / "my.py").write_text(code)
    main(
        f"run {tmp_path}/my.py:fedprox --mu 0.1 --rounds 2 --eval-every 1 --clients 4 --participation 0.5 "
        f"--models mlp,hidden=4 mlp,hidden=5 --run-dir {tmp_path}/run".split()
    )
    assert "fedprox,mu=0.1" in capsys.readouterr().out


def test_nothing_is_unpickled_but_what_processes_of_one_run_tell_each_other():
    imported, allowed = {}, []
    for path in (ROOT / "jaxfl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names):
                    imported.setdefault(path.name, set()).update(name.name for name in names)
                case ast.ImportFrom(module):
                    imported.setdefault(path.name, set()).add(module)
                case ast.keyword("allow_pickle", value):
                    allowed.append(ast.unparse(value))
    unpickling = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    assert {name for name, modules in imported.items() if modules & unpickling} == {"processes.py"}
    assert set(allowed) == {"False"}


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
