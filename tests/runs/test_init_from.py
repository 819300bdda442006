"""Runs that start from the weights of another run or of files: what they start from, keep and report."""

import json
import shutil

import numpy as np
import pytest
from conftest import long
from folders import metrics

import jaxfl
from jaxfl import cli
from jaxfl.folder import store

ROUNDS = 2
FEDERATION = (
    "--partition classes,classes_per_client=2,samples_per_client=10 --clients 4 --epochs 1 "
    f"--rounds {ROUNDS} --eval-every 1 --devices 1"
).split()
MODELS = ["--models", "mlp,hidden=3", "mlp,hidden=4"]
STILL = ["--lr", "1e-30"]  # weights do not move


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """Return a function that runs a method, with options, in a new folder."""
    folder = tmp_path_factory.mktemp("runs")

    def run(method, *options, models=MODELS):
        where = folder / str(len(list(folder.iterdir())))
        cli.main(["run", method, *dataset, *FEDERATION, *models, *options, "--run-dir", str(where)])
        return where

    return run


@pytest.fixture(scope="module")
def source(run):
    """Return a run whose clients have heads of their own."""
    return run("fedper", "--lr", "0.3")


def per_client(folder):
    return store.read_metrics(folder)[-1]["accuracy"]["per_client"]


def arrays(folder):
    """Return a run's final weights: those of the architectures, and those of the clients of each."""
    found = {name: array for name, array in jaxfl.final_weights(folder).items() if name[-3:] != "/id"}
    return [{name: a for name, a in found.items() if ("/clients/" in name) == own} for own in (False, True)]


@pytest.mark.parametrize(
    "method",
    [
        long("fedavg-ft,ft_epochs=2"),  # fine-tuned before use
        "fedper",
        long("fedgh"),  # a body and the header of the server
        long("pfedhn"),  # made by a hypernetwork
        long("pfedbayes"),  # means of distributions
        long("heterofl,masked=false"),  # scaled
    ],
)
def test_clients_go_on_with_the_models_that_they_deployed(run, method):
    """Clients that start from their deployed models and do not move score the same."""
    models = ["--models", "mlp,hidden=3", "mlp,hidden=4,features=3"]
    source = run(method, "--lr", "0.3", models=models)
    alone = run("local", *STILL, "--init-from", str(source), models=models)
    assert per_client(alone) == per_client(source)
    (shared, own), (none, whole) = arrays(source), arrays(alone)
    assert not none and len({name.split("/")[0] for name in whole}) == 2
    for name, array in whole.items():
        expected = own.get(name)
        if expected is None:
            expected = np.broadcast_to(shared[name.replace("/clients/", "/")], array.shape)
        np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-6, err_msg=name)


def test_a_server_starts_from_the_mean_of_its_clients(run, source, capsys):
    started = run("fedavg", *STILL, "--init-from", str(source))
    assert "mlp,hidden=3 starts from" in capsys.readouterr().out
    (shared, own), (of_server, none) = arrays(source), arrays(started)
    assert not none and own
    means = {name.replace("/clients/", "/"): leaf.mean(0) for name, leaf in own.items()}
    for name, array in of_server.items():
        np.testing.assert_allclose(array, (shared | means)[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_blocks_that_do_not_fit_start_fresh_and_are_named(run, source, dataset, capsys):
    models = ["--models", "mlp,hidden=3", "mlp,hidden=5"]
    options = [*STILL, "--labels", "independent", "--init-from", str(source)]  # with two outputs
    started = run("fedavg", *options, models=models)
    assert capsys.readouterr().err.splitlines() == [
        f"jaxfl: mlp,hidden=3 starts from {source}; these start fresh: classifier (bias is 3 there, 2 here).",
        f"jaxfl: mlp,hidden=5 starts fresh: {source} has only mlp,hidden=3, mlp,hidden=4.",
        f"jaxfl: --init-from {source}: its clients number their classes otherwise than these; outputs of "
        "heads that are taken mean other classes.",
    ]
    fresh = arrays(run("fedavg", *options[:-2], models=models))[0]
    taken, (shared, _) = arrays(started)[0], arrays(source)
    for name, array in taken.items():
        was_given = name.startswith("mlp,hidden=3/params/fc1")
        np.testing.assert_allclose(array, (shared if was_given else fresh)[name], rtol=1e-6, err_msg=name)


@pytest.mark.long
def test_an_architecture_alone_in_its_run_is_found_among_several(run, dataset, tmp_path, capsys):
    """An architecture has a name without options where it is alone, and is still matched."""
    narrow, wide = (run("fedavg", models=["--models", f"mlp,hidden={hidden}"]) for hidden in (3, 4))
    places = ["--init-from", str(wide), str(narrow)]
    run("fedavg", *STILL, *places, models=["--models", "mlp,hidden=4"])
    assert f"mlp starts from {wide}" in capsys.readouterr().out
    run("fedavg", *STILL, *places)
    said = capsys.readouterr().out
    assert f"mlp,hidden=4 starts from {wide}" in said and f"mlp,hidden=3 starts from {narrow}" in said
    headless = []
    for place in (wide, narrow):
        named = {key: a for key, a in jaxfl.final_weights(place).items() if "/classifier/" not in key}
        np.savez(tmp_path / f"{place.name}.npz", **named)
        headless.append(str(tmp_path / f"{place.name}.npz"))
    run("fedavg", *STILL, "--init-from", *headless)
    said = capsys.readouterr().err
    assert f"mlp,hidden=4 starts from {headless[0]}; these start fresh: classifier" in said
    assert f"mlp,hidden=3 starts from {headless[1]}; these start fresh: classifier" in said


def test_weights_are_taken_from_files_and_from_the_first_place(run, source, tmp_path, capsys):
    """Weights may be in files and in several places; the first that has an architecture counts."""
    rng = np.random.default_rng(0)
    block = {"kernel": rng.normal(size=(64, 4)), "bias": rng.normal(size=4)}
    np.savez(tmp_path / "one.npz", **{f"mlp,hidden=4/params/fc1/linear/{k}": v for k, v in block.items()})
    places = [str(tmp_path / "one.npz"), str(source)]
    taken, (shared, _) = arrays(run("fedavg", *STILL, "--init-from", *places))[0], arrays(source)
    assert "these start fresh: classifier (not there)" in capsys.readouterr().err
    for kind, array in block.items():
        np.testing.assert_allclose(taken[f"mlp,hidden=4/params/fc1/linear/{kind}"], array, rtol=1e-6)
        name = f"mlp,hidden=3/params/fc1/linear/{kind}"
        np.testing.assert_allclose(taken[name], shared[name], rtol=1e-6)

    np.savez(tmp_path / "all.npz", **jaxfl.final_weights(source))
    file, folder = (run("local", "--init-from", str(place)) for place in (tmp_path / "all.npz", source))
    assert metrics(file) == metrics(folder)


def test_the_only_client_of_an_architecture_keeps_what_it_started_from(run, source, dataset, tmp_path):
    """Its own weights, not the mean over the clients that it started from."""
    alone = ["mlp,hidden=3,clients=1", "mlp,hidden=4,clients=3"]
    begun = run("fedper", *STILL, "--init-from", str(source), models=["--models", *alone])
    cli.main(["run", "--from", str(begun), "--run-dir", str(tmp_path / "again")])
    assert (tmp_path / "again" / "initial.npz").read_bytes() == (begun / "initial.npz").read_bytes()
    assert metrics(tmp_path / "again") == metrics(begun)
    with np.load(begun / "initial.npz") as kept:
        assert kept["mlp,hidden=3/clients/id"].tolist() == [0]


def test_clients_of_a_run_begin_with_draws_of_their_own(run, tmp_path):
    """Wherever their state is, and when the run is repeated."""
    two = [*STILL, "--seed", "1", "--clients", "2"]
    options, models = [*two, "--initial", "own"], ["--models", "mlp,hidden=3"]
    begun = run("local", *options, models=models)
    (_, own), (shared, alike) = arrays(begun), arrays(run("fedavg", *two, models=models))
    assert not alike and store.read_config(begun)["options"]["initial"] == "own"
    for name, (first, second) in own.items():
        if "/bias" not in name:
            assert np.abs(first - second).min() > 0, name
            assert np.abs(first - shared[name.replace("/clients/", "/")]).min() > 0
    on_host, divided = (
        run("local", *options, "--client-state", "host", models=models),
        run("local", *options, "--devices", "2", models=models),
    )
    cli.main(["run", "--from", str(begun), "--run-dir", str(tmp_path / "repeated")])
    for other in (on_host, divided, tmp_path / "repeated"):
        for name, array in arrays(other)[1].items():
            np.testing.assert_allclose(array, own[name], rtol=1e-6, err_msg=name)


def test_a_run_keeps_what_it_started_from(run, source, tmp_path, capsys):
    """A run is resumed and repeated from its initial weights when the other run is gone."""
    elsewhere = shutil.copytree(source, tmp_path / "elsewhere")
    begun = run("fedper", "--init-from", str(elsewhere))
    assert metrics(begun) != metrics(run("fedper"))
    shutil.rmtree(elsewhere)
    stopped = shutil.copytree(begun, tmp_path / "stopped")  # before its first checkpoint
    shutil.rmtree(stopped / "checkpoints")
    for name in ("result.json", "metrics.jsonl"):
        (stopped / name).unlink()
    cli.main(["resume", str(stopped)])
    cli.main(["run", "--from", str(begun), "--run-dir", str(tmp_path / "again")])
    assert metrics(stopped) == metrics(tmp_path / "again") == metrics(begun)
    kept = [(folder / "initial.npz").read_bytes() for folder in (stopped, tmp_path / "again", begun)]
    assert kept[0] == kept[1] == kept[2]
    assert len(json.loads((begun / "config.json").read_text())["starts"]) == 2


@pytest.mark.parametrize("devices", ["1", long("2")])
def test_runs_of_one_program_start_from_another_run(run, source, dataset, tmp_path, capsys, devices):
    options = ["--init-from", str(source), "--devices", devices, "--batch-size", str(4 + int(devices))]
    several = ["--seeds", "2", "--run-dir", str(tmp_path / "both")]
    cli.main(["compare", "fedper", *dataset, *FEDERATION, *MODELS, *options, *several])
    assert "2 runs as one program" in capsys.readouterr().out
    alone = metrics(run("fedper", *options))
    together = metrics(tmp_path / "both" / "fedper" / "seed-0")
    for record, other in zip(together, alone, strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert record["accuracy"]["mean"] == pytest.approx(other["accuracy"]["mean"])
