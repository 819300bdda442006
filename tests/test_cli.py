"""The command: what it prints, what it refuses and in which words, and how it takes own code."""

import json
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import pytest
from conftest import tiny_source
from orbax.checkpoint import v1 as ocp

import jaxfl
from jaxfl import registry
from jaxfl.cli import COMMANDS, main

OWN_CODE = '''
"""FedProx (Li et al. 2020, arXiv:1812.06127), and a model, a partition and a data set of one's own."""

from typing import Literal

import flax.linen as nn
import jax
import numpy as np
import optax

import jaxfl
from jaxfl import tree
from jaxfl.clientmap import map_clients, per_group, sent, sizes
from jaxfl.data.sources import Source
from jaxfl.models import Block, Model
from jaxfl.training import cross_entropy, descend, initial_weights


@jaxfl.options
class FedProx(jaxfl.Training):
    mu: float = jaxfl.within("[0, inf)", 0.1)


def build(config):
    def init(key, federation, hyper):
        return hyper, initial_weights(key, federation)

    def receive(key, state, federation, cohort):
        return per_group(lambda weights: jaxfl.Predictor(weights, None, predict), state[1])

    def step(key, state, federation, cohort):
        hyper, received = state

        def client(key, client, start, own):
            plain = cross_entropy(client.model, client.model.names)

            def loss(weights, batch, key):
                value, stats = plain(weights, batch, key)
                distance = optax.tree.norm(optax.tree.sub(weights.params, start.params), squared=True)
                return value + hyper.mu / 2 * distance, stats

            key, blocks = jax.random.fold_in(key, 0), client.model.names
            return descend(
                loss, start, key, client, federation, hyper, blocks=blocks, epochs=config.epochs
            )

        nothing = (None,) * len(received)
        outputs = map_clients(client, key, federation, cohort, received, nothing)
        trained, loss = zip(*outputs, strict=True)
        means = per_group(tree.weighted_mean, trained, sizes(federation, cohort), received)
        traffic = sent(cohort, received)
        return (hyper, means), jaxfl.Info(loss, up=traffic, down=traffic)

    return jaxfl.Algorithm(init, receive, step, personal=receive)


def predict(model, shared, own, x):
    return model.apply(shared.params, shared.stats, x, train=False)[0]


fedprox = jaxfl.Method("fedprox", build, FedProx, "FedAvg with a proximal term")


class Dense(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, *, train, mask):
        return nn.Dense(self.features)(x.reshape(len(x), -1))


def linear(*, shape, classes, features: int = 2, bits: Literal[16, 32] = 32, sizes: tuple[int, ...] = ()):
    blocks = (Block("body", Dense(features)), Block("classifier", Dense(classes)))
    return Model("linear", blocks, shape, classes)


def unequal(labels, clients, rng, *, most: int = 8):
    parts = np.array_split(rng.permutation(len(labels)), clients)
    return [part[: most - i] for i, part in enumerate(parts)]


def stripes(data_dir):
    labels = np.arange(48) % 2
    images = np.random.default_rng(0).integers(0, 99, (48, 8, 8, 1), dtype=np.uint8)
    images[labels == 1, ::2] += 100
    return Source("stripes", images, labels, np.arange(48) < 36, 2)


def nothing(*arguments, **options):
    return None
'''

OWN_ARGUMENTS = """
--dataset own.py:stripes --partition own.py:unequal,most=11  # of twelve rows each
--models own.py:linear,features=3 mlp,hidden=4

--clients 4 --participation 0.5 --rounds 4 --eval-every 2
"""


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs are compiled for a few rounds of milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def folder(quick_compilation, tmp_path_factory):
    """The current folder of all tests: code, arguments, a partition, a finished run and broken data."""
    folder, source = tmp_path_factory.mktemp("work"), tiny_source()
    (folder / "own.py").write_text(OWN_CODE)
    (folder / "own.args").write_text(OWN_ARGUMENTS)
    (folder / "broken.py").write_text("fedprox = Method()\n")
    np.savez(folder / "flat.npz", images=source.images[0, 0], labels=source.labels)
    np.savez(folder / "nan.npz", images=np.full(source.images.shape, np.nan), labels=source.labels)
    np.savez(folder / "unlabelled.npz", images=source.images)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        call("partition @own.args --run-dir divided")
        call("run fedavg @own.args")
        yield folder


def call(command):
    """The words after `jaxfl`, in this process."""
    main(command.split())


def metrics(run):
    """Without the times, which no two runs share."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def weights(run, within):
    """The bytes of the weights in the last checkpoint, by name."""
    path = run / "checkpoints" / "4"
    found = ocp.metadata(path).metadata
    leaves = ocp.load(path, {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in found.items()})
    own = {name: leaf for name, leaf in leaves.items() if name.startswith(within)}
    return {name.removeprefix(within): leaf.tobytes() for name, leaf in own.items()}


# --- what it prints


def printed(capsys, command):
    """The words of a command's output, without the lines of tables and boxes."""
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


@pytest.mark.parametrize("command", [word for word, command in COMMANDS.items() if not command.flags])
def test_commands_without_options_explain_themselves(capsys, command):
    usage, does, *_ = COMMANDS[command]
    assert printed(capsys, f"{command} --help") == f"jaxfl {usage}: {does}"


@pytest.mark.parametrize(
    ("command", "sentences"),
    [
        ("run --help", ["--lr FLOAT Learning rate. (default: 0.05)"]),
        ("run compfl,eps=0.1 --help", ["--eps FLOAT epsilon, how", "own. (default: 0.1)", "--no-kd"]),
        ("compare --help", ["--lr FLOAT Learning rate.", "--seeds INT Repeat with seed"]),
        ("partition --help", ["--run-dir"]),
    ],
)
def test_help_of_options(capsys, command, sentences):
    out = printed(capsys, command)
    for sentence in [*sentences, "--rounds INT Communication rounds. (default: 50)"]:
        assert sentence in out


def test_list_has_every_name(capsys):
    out = printed(capsys, "list")
    for name in [*registry.METHODS, *registry.MODELS, *registry.PARTITIONS, "digits"]:
        assert f" {name} " in out
    assert "head_init" in out and "min_samples" in out


def test_cite(capsys):
    out = printed(capsys, "cite fedper")
    assert out.startswith("@article{") and "arXiv:1912.00818" in out and out.count("{") == out.count("}")


def test_partition_is_drawn_and_used_again(folder):
    assert (folder / "divided" / "partition.png").read_bytes().startswith(b"\x89PNG")
    with np.load(folder / "divided" / "partition.npz") as saved:
        assert (saved["train_sizes"] + saved["test_sizes"]).tolist() == [11, 10, 9, 8]
        call("partition @own.args --partition divided/partition.npz --run-dir again")
        with np.load(folder / "again" / "partition.npz") as used:
            assert all((saved[key] == used[key]).all() for key in saved.files)


# --- what it refuses

REFUSED = [
    ("frobnicate", "no command 'frobnicate'; known are run, compare,"),
    ("rnu fedavg", "no command 'rnu'; did you mean 'run'?"),
    ("broken.py:fedprox", "no command 'broken.py:fedprox'"),  # a file that is not even loaded
    ("run", "needs a METHOD first: jaxfl run METHOD"),
    ("run fedpr", "no method 'fedpr'; did you mean 'fedper'?"),
    ("run fedavg,lr", "'lr' in 'fedavg,lr' is not an option; write it as option=value"),
    ("run fedavg,lrr=1", "fedavg has no option 'lrr'; did you mean 'lr'?"),
    ("run fedavg,lr=much", "fedavg: lr must be a number, not 'much'"),
    ("run compfl,kd=maybe", "compfl: kd must be true or false, not 'maybe'"),
    ("run fedavg @own.args --round 3", "no option --round; did you mean '--rounds'?"),
    (
        "run fedavg @own.args --lam 1",
        "--lam is an option of ditto, compfl, mnfl, mnfl-homogeneous, pfedclub, pfedclub-plus, not",
    ),
    ("run fedavg @own.args astray", "does not know what to do with 'astray'"),
    ("run fedavg @nowhere.args", "no file nowhere.args"),
    ("compare", "Name the methods to compare"),
    ("compare fedavg fedavg @own.args", "named twice"),
    ("compare fedavg @own.args --seeds 0", "--seeds must be at least 1, not 0"),
    ("compare ditto @own.args --lam 1", "not of jaxfl compare METHOD ...; write ditto,lam=VALUE"),
    ("report", "Name the run folders"),
    ("report runs divided", "no finished run in divided"),
    ("resume", "needs a RUN first"),
    ("resume divided", "divided is not a run folder: it has no config.json"),
    ("list everything", "takes no 'everything'"),
    ("cite local", "local has no paper to cite"),
    # numbers out of their range
    ("run fedavg @own.args --lr 0", "--lr must lie in (0, inf), but is 0.0"),
    ("run fedavg @own.args --lr -1", "--lr must lie in (0, inf), but is -1.0"),
    ("run fedavg @own.args --lr nan", "--lr must lie in (0, inf), but is nan"),
    ("run fedavg @own.args --momentum 1", "--momentum must lie in [0, 1), but is 1.0"),
    ("run fedavg @own.args --epochs 0", "--epochs must lie in [1, inf), but is 0"),
    ("run fedavg @own.args --rounds 0", "--rounds must lie in [1, inf), but is 0"),
    ("run fedavg @own.args --clients 0", "--clients must lie in [1, inf), but is 0"),
    ("run fedavg @own.args --participation 0", "--participation must lie in (0, 1], but is 0.0"),
    ("run fedavg @own.args --participation 2", "--participation must lie in (0, 1], but is 2.0"),
    ("run fedavg @own.args --checkpoint-every 3", "3 is not a multiple of --eval-every 2"),
    ("run fedavg @own.args --device-profile mpl=1e9:1e6", "no architecture 'mpl'; did you mean 'mlp'?"),
    ("run fedavg @own.args --device-profile mlp=1e9", "is not architecture=FLOPS:BYTES"),
    ("run fedavg @own.args --device-profile mlp=0:1", "with two positive numbers"),
    ("run fedavg @own.args --devices 99", "to be shared by 99 devices, but JAX has 4"),
    ("run compfl @own.args --eps 2", "--eps must lie in [0, 1], but is 2.0"),
    # data
    ("run fedavg @own.args --dataset digit", "'digit' is neither a file, a folder nor", "mean 'digits'?"),
    ("run fedavg @own.args --dataset mnist --data-dir .", "mnist is not prepared", "[tfds-prepare]"),
    ("run fedavg @own.args --dataset nowhere.npz", "no file nowhere.npz"),
    ("run fedavg @own.args --dataset flat.npz", "flat.npz: images have shape (8, 1), not (N, H, W)"),
    ("run fedavg @own.args --dataset nan.npz", "nan.npz: images hold NaN"),
    ("run fedavg @own.args --dataset unlabelled.npz", "unlabelled.npz lacks labels; it holds images"),
    ("run mnfl @own.args --public mnst", "'mnst' is neither a file, a folder nor", "mean 'mnist'?"),
    ("run mnfl @own.args --public none", "needs public images and the federation has none; add --public"),
    ("run pfedclub @own.args --public none", "needs public images and the federation has none"),
    ("run mnfl @own.args --labels independent", "mean other classes on every client"),
    ("run mnfl @own.args --public held-out,share=0", "share must lie in (0, 1), but is 0.0"),
    (
        "run mnfl @own.args --public held-out --partition divided/partition.npz",
        "divided/partition.npz holds out no public images",
    ),
    # partitions
    ("run fedavg @own.args --partition clases", "no partition 'clases'; did you mean 'classes'?"),
    ("run fedavg @own.args --partition iid,alpha=1", "iid has no option 'alpha'; there are none"),
    ("run fedavg @own.args --partition classes,classes_per_client=3", "3, but the data have 2 classes"),
    ("run fedavg @own.args --partition dirichlet,min_samples=13", "need 52 rows, but there are 48"),
    ("run fedavg @own.args --test-fraction 0.1", "Client 2 is left without test rows; raise"),
    ("run fedavg @own.args --partition nan.npz", "nan.npz lacks train"),
    ("run fedavg @own.args --partition divided/partition.npz --clients 3", "has 4 clients, not 3"),
    ("run fedavg @own.args --partition divided/partition.npz --dataset digits", "2 classes, not 10"),
    *(
        (f"run fedavg @own.args --partition divided/partition.npz {option}", f"{option.split()[0]} does not")
        for option in (
            "--labels independent",
            "--test source",
            "--test-fraction 0.3",
            "--validation-fraction 0.1",
            "--max-test 2",
            "--partition-seed 1",
        )
    ),
    # models
    ("run fedavg @own.args --models mpl", "no model 'mpl'; did you mean 'mlp'?"),
    ("run fedavg @own.args --models mlp,classes=2", "mlp has no option 'classes'; known are width"),
    ("run fedavg @own.args --models mlp mlp", "names one architecture twice"),
    ("run fedavg @own.args --models mlp,clients=3", "cannot be given to 4 clients"),
    ("run fedavg @own.args --models mlp,clients=4 lenet5", "cannot be given to 4 clients"),
    ("run fedavg @own.args --models mlp,clients=0 lenet5", "clients= takes a whole number from 1 up"),
    ("run fedavg @own.args --models own.py:linear,bits=8", "own.py:linear: bits must be 16 or 32, not '8'"),
    ("run fedavg @own.args --models own.py:linear,sizes=8", "sizes is annotated as tuple[int, ...]"),
    ("run fedcmd @own.args --personal classifier", "fedcmd votes in 20 rounds and the run has 4"),
    ("run fedcmd @own.args --selection-rounds 4", "votes in 4 rounds and the run has 4; lower --selection"),
    ("run fedcmd @own.args --selection-rounds 0", "cannot vote in 0 rounds; raise --selection-rounds"),
    ("run fedcmd @own.args --personal boddy", "linear has no layer 'boddy'; did you mean 'body'?"),
    ("run fedcmd @own.args --personal classifier+body", "mlp has no layer 'body'; known are fc1, classifier"),
    # code of one's own
    ("run nowhere.py:fedprox", "no file nowhere.py to take 'fedprox' from"),
    ("run broken.py:fedprox", "broken.py does not load: NameError: name 'Method' is not defined"),
    ("run own.py", "own.py is a file; add which method in it you mean: own.py:NAME"),
    ("run own.py:fedprx", "own.py has no 'fedprx'; did you mean 'fedprox'?"),
    ("run own.py:linear", "own.py:linear is a function, not a jaxfl.Method"),
    ("run own.py:fedprox @own.args --mu -1", "fedprox: --mu must lie in [0, inf), but is -1.0"),
    ("run fedavg @own.args --models own.py:fedprox", "is a Method; name a function that makes a model"),
    ("run fedavg @own.args --models own.py:nothing", "returns a NoneType, not a jaxfl.models.Model"),
    ("run fedavg @own.args --dataset own.py:nothing", "returns a NoneType, not a jaxfl.data.sou"),
    # where to write
    ("run fedavg @own.args --run-dir runs/fedavg-own", "already holds a run", "`jaxfl resume runs/"),
    ("compare fedavg @own.args --run-dir divided", "divided already holds something else"),
    ("run fedavg --dataset nowhere.npz --run-dir divided", "divided already holds"),  # before data are read
    ("compare fedavg --dataset nowhere.npz --run-dir divided", "divided already holds"),
    ("partition --dataset nowhere.npz --run-dir divided", "divided already holds"),
    ("partition @own.args --run-dir own.py/divided", "cannot be written (Not a directory)"),
    ("run fedavg @own.args --run-dir " + 300 * "x", "cannot be written (File name too long)"),
]


@pytest.mark.parametrize(("command", "words"), [(command, words) for command, *words in REFUSED])
def test_refused_in_one_sentence(folder, capsys, command, words):
    def files():  # but for what Python itself keeps of a module that it loads
        return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)

    before = files()
    with pytest.raises(SystemExit) as end:
        call(command)
    sentence = capsys.readouterr().err
    assert end.value.code == 2
    assert sentence.startswith("jaxfl: ") and sentence.count("\n") == 1
    assert all(word in sentence for word in words), sentence
    assert files() == before


def test_a_value_of_the_wrong_type_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        call("run fedavg --lr much")
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert "--lr: could not convert string to float: 'much'" in " ".join((out + err).split())


def test_the_installed_command_refuses(folder):
    command = Path(sysconfig.get_path("scripts")) / "jaxfl"
    ended = subprocess.run([command, "run", "fedpr"], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == "jaxfl: There is no method 'fedpr'; did you mean 'fedper'?\n"


# --- code of one's own, and the same from Python


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
    ],
)
def test_options_have_their_annotated_type(annotation, text, value):
    converted = registry.convert("own", {"option": annotation}, {"option": text})["option"]
    assert converted == value and isinstance(converted, type(value))


def test_everything_of_ones_own(folder, tmp_path, monkeypatch):
    """The finished run has an own model, partition and data set; FedProx with mu = 0 is FedAvg."""
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
    monkeypatch.chdir(tmp_path)  # own code is found from everywhere
    call(f"resume {stopped}")
    assert metrics(stopped) == metrics(folder / "fedprox") and weights(stopped, "1.") == own


def test_the_same_from_python(folder):
    result = jaxfl.run(
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
    assert result == json.loads((folder / "python" / "result.json").read_text())
    assert metrics(folder / "python") == metrics(folder / "runs" / "fedavg-own")


def test_a_run_of_a_method_object_is_not_resumed_as_another(folder, tmp_path, capsys):
    shutil.copytree(folder / "python", tmp_path / "python")
    (tmp_path / "python" / "result.json").unlink()
    with pytest.raises(SystemExit) as end:
        call(f"resume {tmp_path / 'python'}")
    assert end.value.code == 2
    sentence = capsys.readouterr().err
    assert "made from Python with a method of its own (fedavg); name it as path/to/file.py:obj" in sentence


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("fedpr", {}, "no method 'fedpr'; did you mean 'fedper'?"),
        ("fedper", {"epoch": 3}, "fedper has no option 'epoch'; did you mean 'epochs'?"),
        ("fedper", {"lam": 1.0}, "fedper has no option 'lam'; "),
        ("fedper", {"lr": 0.0}, "--lr must lie in"),
        ("fedper", {"rounds": 0}, "--rounds must lie in"),
        ("fedper", {"rounds": "3"}, "the run: --rounds must be a whole number, but is '3'"),
        ("fedper", {"rounds": True}, "--rounds must be a whole number, but is True"),
        ("fedper", {"max_test": 1.5}, "--max-test must be a whole number or none, but is 1.5"),
        ("fedper", {"models": 3}, "--models must be a tuple of texts, but is 3"),
        ("fedper", {"models": "mpl"}, "no model 'mpl'; did you mean 'mlp'?"),
        ("fedper", {"labels": "both"}, "--labels must be unified or independent, but is 'both'"),
        ("fedper", {"epochs": 1.5}, "fedper: --epochs must be a whole number, but is 1.5"),
        ("fedper", {"lr": None}, "--lr must be a number, but is None"),
        ("fedper", {"optimizer": "sgdd"}, "--optimizer must be sgd or adam or adamw, but is 'sgdd'"),
        ("compfl", {"head_init": "bogus"}, "compfl: --head-init must be proto+ft or"),
        ("compfl", {"kd": 1}, "compfl: --kd must be true or false, but is 1"),
    ],
)
def test_python_refuses_the_same(folder, method, options, sentence):
    before = sorted(folder.rglob("*"))
    with pytest.raises(jaxfl.JaxflError) as error:
        jaxfl.run(method, **options)
    assert sentence in str(error.value)
    assert sorted(folder.rglob("*")) == before
