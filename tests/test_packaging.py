"""The content of the built packages, and their installation."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.long
def test_wheel_and_sdist_hold_the_package_and_the_command_runs(tmp_path):
    """The wheel is built from the sdist; it is installed beside the dependencies of this Python."""
    pytest.importorskip("build", reason="pip install --group packaging")
    subprocess.run([sys.executable, "-m", "build", "--outdir", tmp_path, ROOT], check=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    paths = [path for path in (ROOT / "jaxfl").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.startswith("jaxfl/")} == files
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert files | {"README.md", "LICENSE", "pyproject.toml"} <= inside
    assert not any(name.startswith((".venv", "runs/")) for name in inside)

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    dependencies = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    found = subprocess.run(
        [python, "-c", "import jaxfl; print(jaxfl.__file__)"], capture_output=True, text=True, cwd=tmp_path
    )
    assert Path(found.stdout.strip()).is_relative_to(tmp_path)
    run = [tmp_path / "venv" / "bin" / "jaxfl", "run", "fedavg", "--rounds", "1", "--models", "mlp"]
    subprocess.run(run, check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": dependencies})
    assert (tmp_path / "runs" / "fedavg-digits" / "result.json").is_file()
