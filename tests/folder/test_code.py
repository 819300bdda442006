"""Changes of the user's own files, and files that move together with the folders of their runs."""

import shutil

import pytest

import jaxfl
from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.folder.config import moved

NET = """
import flax.linen as nn
from jaxfl.models.own import from_linen

class Net(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(nn.relu(nn.Dense(3)(x.reshape(len(x), -1))))

def net(shape, classes):
    return from_linen("net", Net(classes), shape, classes)
"""


@pytest.fixture
def project(tmp_path, dataset):
    """Return a folder with data, a network and a finished run of both."""
    home = tmp_path / "home" / "project"
    home.mkdir(parents=True)
    shutil.copy(dataset[1], home / "mine.npz")
    (home / "my.py").write_text(NET)
    jaxfl.run(
        "fedavg",
        dataset=str(home / "mine.npz"),
        models=f"{home}/my.py:net",
        partition="iid",
        clients=2,
        rounds=1,
        eval_every=1,
        run_dir=home / "runs" / "own",
        quiet=True,
    )
    return home


def test_a_run_goes_on_where_its_project_has_moved(project, tmp_path):
    """Data beside the run are found; code is executed only on request, as it may be somebody else's."""
    elsewhere = shutil.move(project, tmp_path / "project")
    own = elsewhere / "runs" / "own"
    assert len(jaxfl.load(own, changed_code=True).source.labels)
    for ask in (lambda: jaxfl.resume(own, rounds=2, quiet=True), lambda: jaxfl.load(own).models[0]):
        with pytest.raises(JaxflError, match=f"my.py, which .* is missing, and there is {elsewhere}/my.py"):
            ask()
    done = jaxfl.resume(own, rounds=2, changed_code=True, quiet=True)
    assert done.result["rounds"] == 2 and "code" not in done.metrics[-1]  # no new version of it
    assert done.models[0].model.name == "net"


def test_models_of_changed_code_are_refused(project):
    file, own = project / "my.py", project / "runs" / "own"
    assert jaxfl.load(own).models[0].model.name == "net"
    file.write_text(NET.replace("nn.Dense(3)", "nn.Dense(4)"))
    with pytest.raises(JaxflError, match="my.py has changed since"):
        _ = jaxfl.load(own).models[0]
    assert store.read_config(own)["environment"]["folder"] == str(own)


def test_paths_are_new_only_where_the_old_ones_are_gone(tmp_path):
    (tmp_path / "new" / "runs" / "x").mkdir(parents=True)
    for name in ("a.npz", "b.py", "a.json"):
        (tmp_path / "new" / name).write_text("")
    (tmp_path / "kept.npz").write_text("")
    old, new = f"{tmp_path}/old", f"{tmp_path}/new"
    options = {
        "dataset": f"{old}/a.npz",
        "public": f"{tmp_path}/kept.npz,size=3",
        "other": f"hf:{old}/a.npz,label=fine",
        "partition": f"listed,file={old}/a.json",
        "models": [f"{old}/b.py:net,width=2", "mlp"],
        "init_from": [f"{old}/none.npz"],
        "rounds": 3,
    }
    config = {"method": "fedavg", "options": options, "environment": {"folder": f"{old}/runs/x"}}
    data = options | {"dataset": f"{new}/a.npz", "partition": f"listed,file={new}/a.json"}
    data |= {"other": f"hf:{new}/a.npz,label=fine"}
    assert moved(tmp_path / "new" / "runs" / "x", config)["options"] == data
    code = data | {"models": [f"{new}/b.py:net,width=2", "mlp"]}
    assert moved(tmp_path / "new" / "runs" / "x", config, code=True)["options"] == code
    assert moved(tmp_path / "old" / "runs" / "x", config) == config
