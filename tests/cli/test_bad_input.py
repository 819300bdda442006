"""Mistakes of users: for each, one sentence says what to correct, and nothing is left behind.

Most cases go through the command. Files may be damaged or malicious: nothing in them is executed, unpickled,
or written outside of the run folder. `tests/folder/test_faults.py` is about faults during a run.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path, PurePath

import jax
import numpy as np
import pytest
from conftest import long, tiny_source

import jaxfl
from jaxfl.cli import main


class Trap:
    """An object that makes a file when it is unpickled."""

    def __reduce__(self):
        """Return the call that pickle makes."""
        return open, ("sprung", "w")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Yield the current folder of all tests: user code, a partition, a finished run, and unusable files."""
    folder, source = tmp_path_factory.mktemp("work"), tiny_source()
    shutil.copytree(Path(__file__).parents[1] / "own", folder, dirs_exist_ok=True)
    (folder / "broken.py").write_text("fedprox = Method()\n")
    (folder / "unclosed.args").write_text("--run-dir 'a b\n")
    (folder / "nested.args").write_text("--rounds 1 # @a.args\n@own.args\n")
    np.savez(folder / "flat.npz", images=source.images[0, 0], labels=source.labels)
    np.savez(folder / "nan.npz", images=np.full(source.images.shape, np.nan), labels=source.labels)
    np.savez(folder / "unlabelled.npz", images=source.images)
    np.savez(folder / "vectors.npz", features=source.images[:, 0, :, 0], labels=source.labels)
    np.savez(folder / "windows.npz", images=source.images[:, :1], labels=source.labels)
    np.savez(folder / "pickled.npz", images=np.array([Trap()]), labels=np.array([Trap()]))
    np.savez(folder / "escaping.npz", **{"../images": source.images, "../labels": source.labels})
    np.savez(folder / "encrypted.npz", images=source.images, labels=source.labels)
    encrypted = bytearray((folder / "encrypted.npz").read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flags of a file in the archive
        encrypted[encrypted.index(mark) + place] |= 1
    (folder / "encrypted.npz").write_bytes(encrypted)
    head = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000000,), }".ljust(117) + b"\n"
    with zipfile.ZipFile(folder / "endless.npz", "w") as file:
        file.writestr("images.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    (folder / "photos" / "cat").mkdir(parents=True)
    (folder / "photos" / "cat" / "0.png").write_bytes(b"GIF89a")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["partition", "@own.args", "--run-dir", "divided"])
        main(["run", "fedavg", "@own.args"])
        shutil.copytree("runs/fedavg-own", "unsaved", ignore=shutil.ignore_patterns("checkpoints"))
        write_weights()
        yield folder


def write_weights():
    """Write files of weights, each of them unusable for another reason."""
    block = {"kernel": np.ones((64, 4), np.float32), "bias": np.ones(4, np.float32)}
    layer = {f"mlp/params/fc1/linear/{name}": array for name, array in block.items()}
    np.savez("torch.npz", **{"fc1.weight": np.ones((4, 64))})
    np.savez("infinite.npz", **layer | {"mlp/params/fc1/linear/bias": np.full(4, np.inf, np.float32)})
    np.savez("words.npz", **{"mlp/params/fc1/linear/bias": np.array(["a"])})
    np.savez("others.npz", **{"mlp/params/fc1/linear/bias": np.ones(5), "cnn/params/a/b": np.ones(1)})
    stacked = {name.replace("params", "clients/params"): array[None] for name, array in layer.items()}
    np.savez("crowd.npz", **layer | stacked | {"mlp/clients/id": np.arange(3)})
    Path("cut.npz").write_bytes(Path("crowd.npz").read_bytes()[:200])


def contents(folder):
    """Return the bytes of all files, except what Python itself keeps of a module that it loads."""
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.is_file() and path.read_bytes() for path in paths}


def assert_refused(capsys, arguments, words):
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    sentence = capsys.readouterr().err
    assert end.value.code == 2
    assert sentence.startswith("jaxfl: ") and sentence.count("\n") == 1
    assert all(word in sentence for word in words), sentence


# --- commands, configuration, data, partitions, models, user code, folders

REFUSED = [
    ("frobnicate", "no command 'frobnicate'; choose from run, compare,"),
    ("rnu fedavg", "no command 'rnu'; did you mean 'run'?"),
    ("broken.py:fedprox", "no command 'broken.py:fedprox'"),  # the file is not even loaded
    ("run", "needs a METHOD first: jaxfl run METHOD"),
    ("run fedpr", "no method 'fedpr'; did you mean 'fedper'?"),
    ("run fedavg --aggregate medain", "no server 'medain'; did you mean 'median'?"),
    ("run fedavg --compress top-k,share=2", "top-k: share must lie in (0, 1], but is 2.0"),
    ("run fedavg --compress quantize,bits=20", "too few digits", "write bits=16 or fewer, or 32."),
    ("run fedavg --attack scale,share=0.01", "none of 20 clients an attacker; raise the share."),
    ("run fedavg --attack backdoor,target=10", "means the same to all clients, one of 10"),
    ("run fedavg --privacy gaussian --aggregate median", "adds noise to a sum", "where=client."),
    ("run fedavg --target-epsilon 3", "chooses the noise of --privacy; add --privacy gaussian,clip=1"),
    ("run fedavg --privacy gaussian,noise=1 --target-epsilon 3", "without noise."),
    ("run fedavg --privacy gaussian --dropout 0.1", "counts on who takes part in a round"),
    ("run fedamp --compress sign", "fedamp: --compress sign changes what clients send, but", "leave it out."),
    ("run heterofl --aggregate median", "for a server that averages clients of one architecture"),
    ("run pfedme --compress sign,feedback=true", "state has no place for it; leave it out."),
    (
        "run fedproto --privacy gaussian,where=client --models mlp",
        "also tells which classes it has; leave it out",
    ),
    ("run fedproto --privacy rows", "but the method learns from rows in other ways, too; leave it out."),
    ("run FEDPER", "no method 'FEDPER'; did you mean 'fedper'?"),
    ("run fedadam", "no method 'fedadam'; here it is fedavg,server_optimizer=adam."),
    ("run fedavg --partition pathological", "no partition 'pathological'; here it is shards."),
    ("run fedavg -jr 0.5", "has no option -jr; here it is --participation."),
    ("run fedavg,lr", "'lr' in 'fedavg,lr' is not an option; write it as option=value"),
    ("run fedavg,lrr=1", "fedavg has no option 'lrr'; did you mean 'lr'?"),
    ("run fedavg,lr=much", "fedavg: lr must be a number, not 'much'"),
    ("run compfl,kd=maybe", "compfl: kd must be true or false, not 'maybe'"),
    ("run fedavg @own.args --seed 4294967296", "--seed must lie in [0, 4294967295], but is 4294967296"),
    ("run fedavg @own.args --public none,share=0.3", "--public none takes no share; write --public held-out"),
    ("run fedavg @own.args --round 3", "no option --round; did you mean '--rounds'?"),
    ("run fedavg @own.args --out runs", "no option --out; here it is --run-dir."),
    ("run fedavg @own.args --quiet", "no option --quiet; none of the"),
    ("run fedavg @own.args --lam 1", "--lam is an option of compfl, compfl-dd, ", "not of jaxfl run fedavg"),
    (
        "run fedavg --partition dirichlet --alpha 0.2",
        "an option of dirichlet, not",
        "write dirichlet,alpha=0.2.",
    ),
    ("compare ditto,lam=1 --lam=0.2", "ditto,lam=1 gives lam, which is given once more beside it"),
    ("compare fedavg local --lam=0.2", "--lam is an option of compfl", "not of jaxfl compare METHOD"),
    ("compare fedavg fedper --lr 0.1 0.2", "value; jaxfl compare fedavg,lr={0.1,0.2} tries several."),
    ("run fedavg --rounds 2 --seed 1 3 --seed 1", "does not know what to do with '3'; --seed takes a single"),
    ("run compfl --lr 0.1 --kd false", "--kd is a switch and takes no value."),
    ("run compfl --kd=false", "--kd is a switch and takes no value."),
    (
        "run fedavg --rounds 2 momentum=0.9",
        "does not know what to do with 'momentum=0.9'; write --momentum 0.9.",
    ),
    ("run fedavg --rounds 2 astray=1", "'astray=1'; --rounds takes a single value."),
    ("run fedavg --partition dirichlet alpha=0.1", "options follow a comma, dirichlet,alpha=0.1."),
    ("run fedavg --dataset own.args", "own.args is a file, but only .npz, .csv"),
    ("run fedavg @own.args --log tensorbord", "There is no log 'tensorbord'; did you mean 'tensorboard'?"),
    ("run fedavg @nowhere.args", "no file nowhere.args"),
    ("compare", "Name the methods to compare"),
    ("compare fedavg fedavg @own.args", "named twice"),
    ("compare ditto lam=0.1 @own.args", "no method 'lam=0.1'; options follow a comma, NAME,lam=0.1."),
    ("compare fedavg @own.args --seeds 0", "jaxfl compare: --seeds must lie in [1, 100000], but is 0"),
    ("compare fedavg @own.args --seeds 100001", "--seeds must lie in [1, 100000], but is 100001"),
    (
        "compare fedavg @own.args --seed 4294967295 --seeds 2",
        "last run: --seed must lie in [0, 4294967295], but is 4294967296",
    ),
    ("report", "jaxfl report needs a RUN first: jaxfl report RUN ..."),
    ("report runs --against fedpr", "--against fedpr: there is no such row in the table; choose from fedavg"),
    ("compare fedavg @own.args --against fedavgg", "no such row in the table; did you mean 'fedavg'?"),
    ("report runs divided", "no finished run in divided"),
    ("resume", "needs a RUN first"),
    ("resume divided", "divided is not a run folder: it has no config.json"),
    ("resume own.args", "own.args is not a run folder: it has no config.json"),
    ("run --from", "needs a RUN first: jaxfl run METHOD | [METHOD] --from RUN"),
    ("run --from divided", "divided is not a run folder: it has no config.json"),
    ("run --from runs/fedavg-own --rounds 3", "jaxfl run --from RUN has no option --rounds"),
    (
        "run fedper --from runs/fedavg-own --rounds 3",
        "--from RUN has no option --rounds; it is that of RUN. For another,",
    ),
    ("run fedprox,mu=1 --mu 0 --from runs/fedavg-own", "fedprox,mu=1 gives mu, which is given once more"),
    ("list everything", "shift, schedule or name of the wire 'everything'"),
    ("cite local", "local has no paper to cite"),
    # numbers outside of their range
    ("run fedavg @own.args --lr much", "fedavg: --lr must be a number, not 'much'"),
    ("run fedavg @own.args --lr", "jaxfl run fedavg: --lr needs a value."),
    ("run fedavg @own.args --lr 0", "--lr must lie in (0, inf), but is 0.0"),
    ("run fedavg @own.args --lr -1", "--lr must lie in (0, inf), but is -1.0"),
    ("run fedavg @own.args --lr nan", "--lr must lie in (0, inf), but is nan"),
    (
        "run fedavg @own.args --server-lr 3",
        "--server-lr is a rate of the server's optimiser, but there is none",
    ),
    ("run fedavg @own.args --momentum 1", "--momentum must lie in [0, 1), but is 1.0"),
    (
        "run fedavg @own.args --epochs 2 --steps 7",
        "--steps 7 and --epochs 2 exclude each other; leave one of them out, or write --steps none",
    ),
    ("run fedavg @own.args --dropout 1", "--dropout must lie in [0, 1), but is 1"),
    (
        "run fedavg @own.args --deadline 5",
        "--deadline 5 needs to know how fast clients are; add --device-profile",
    ),
    ("run fedavg @own.args --schedule linear", "There is no schedule 'linear'; choose from"),
    ("run fedavg @own.args --schedule cosine,rounds=1", "multiplies the rates of round 2 of"),
    ("run fedavg @own.args --schedule step,by=2", "step has no option 'by'"),
    ("run fedavg @own.args --epochs 0", "--epochs must lie in [0.001, inf), but is 0"),
    ("run fedavg @own.args --rounds 0", "--rounds must lie in [1, 1000000], but is 0"),
    ("run fedavg @own.args --steps 3000000000", "--steps must be at most 2147483647, but is 3000000000"),
    ("run fedavg @own.args --weight-decay 1e39", "--weight-decay must be at most 3.4e+38, but is 1e+39"),
    ("run fedavg @own.args --lr 1e-320", "--lr must be at least 1.2e-38 in size, but is 1e-320"),
    ("run fedavg @own.args --schedule step,every=3000000000", "step: every must be at most 2147483647, but"),
    ("run fedavg @own.args --clients 0", "--clients must lie in [1, inf), but is 0"),
    ("run fedavg @own.args --lr 1.5 --steps 1.5", "--steps must be a whole number"),
    ("run fedavg @own.args --steps=abc --batch-size 5", "--steps must be a whole number"),
    ("run fedavg @own.args --learning-rate 0.1", "here it is --lr"),
    ("run fedavg @own.args --participation 0", "--participation must lie in (0, 1], but is 0.0"),
    ("run fedavg @own.args --participation 2", "--participation must lie in (0, 1], but is 2.0"),
    ("run fedavg @own.args --checkpoint-every 3", "3 is not a multiple of --eval-every 2"),
    ("run fedavg @own.args --keep-checkpoints 0", "--keep-checkpoints must lie in [1, inf), but is 0"),
    ("run fedavg @own.args --device-spread 1", "add --device-profile ARCHITECTURE=FLOPS:BYTES for each"),
    ("run fedavg @own.args --device-profile mpl=1e9:1e6", "no architecture 'mpl'; did you mean 'mlp'?"),
    ("run fedavg @own.args --device-profile mlp=1e9", "is not architecture=FLOPS:BYTES"),
    ("run fedavg @own.args --device-profile mlp=0:1", "with two positive numbers"),
    ("run fedavg @own.args --devices 99", "should be shared by 99 devices, but JAX has 4"),
    ("run compfl @own.args --eps 2", "--eps must lie in [0, 1], but is 2.0"),
    # links
    (
        "run fedavg @own.args --topology ring",
        "--topology ring is of no use to fedavg, whose clients are not linked",
    ),
    ("run dfedavg @own.args --topology rnig", "no topology 'rnig'; did you mean 'ring'?"),
    ("run dfedavg @own.args --topology er,p=0", "er: p must lie in (0, 1], but is 0.0"),
    ("run dfedavg @own.args --topology er,p=0.001", "none of 1,000 graphs of", "is connected; raise p"),
    ("run dfedavg @own.args --topology nowhere.txt", "The edges of nowhere.txt cannot be read"),
    (
        "run compfl-mm @own.args --rounds 1 --models mlp,hidden=3 mlp,hidden=4",
        "trains 2 architectures one after another",
        "raise --rounds",
    ),
    (
        "run heterofl @own.args --models mlp,hidden=6,features=3 mlp,hidden=4,features=3",
        "averages other features in each width",
    ),
    ("run compfl @own.args", "the last block of linear has other leaves; end it with a linear layer"),
    # data
    ("run fedavg @own.args --dataset digit", "'digit' is neither a file, a folder nor", "mean 'digits'?"),
    ("run fedavg @own.args --dataset mnist --data-dir .", "mnist is not prepared", "[tfds-prepare]"),
    ("run fedavg @own.args --dataset nowhere.npz", "no file nowhere.npz"),
    ("run fedavg @own.args --dataset flat.npz", "flat.npz: images have shape (8, 1); images are (N, H, W)"),
    ("run fedavg @own.args --dataset nan.npz", "nan.npz has NaN"),
    ("run fedavg @own.args --dataset unlabelled.npz", "unlabelled.npz lacks labels; it holds images"),
    ("run fedavg @own.args --dataset pickled.npz", "pickled.npz is damaged or not an .npz file of plain arr"),
    (
        "run fedavg @own.args --dataset escaping.npz",
        "lacks labels and images, features, windows or tokens; it holds ../im",
    ),
    ("run fedavg @own.args --dataset encrypted.npz", "encrypted.npz is damaged or not an .npz file"),
    ("run fedavg @own.args --dataset endless.npz", "endless.npz holds more than fits in memory"),
    ("run fedavg @own.args --dataset photos", "photos/cat/0.png cannot be read as an image"),
    ("run mnfl @own.args --public pickled.npz", "pickled.npz is damaged or not an .npz file of plain arrays"),
    ("run mnfl @own.args --public mnst", "'mnst' is neither a file, a folder nor", "mean 'mnist'?"),
    ("run mnfl @own.args --public digits,classes=8-12,size=3", "digits: classes=8-12: there is no class 12"),
    (
        "run mnfl --dataset digits,classes=0-4 --public digits,classes=5-9,labels=true",
        "numbers its classes otherwise than digits,classes=0-4; choose the same ones, or leave out labels",
    ),
    (
        "run mnfl --dataset digits,classes=0-4 --public digits,classes=0-3+5,labels=true",
        "numbers its classes otherwise than digits,classes=0-4",
    ),
    ("run mnfl @own.args --public digits,class=8", "digits has no option 'class'; did you mean 'classes'?"),
    (
        "run fedavg --dataset digits,class=8",
        "the only option of a data set is classes, such as digits,classes",
    ),
    ("run scaffold @own.args --optimizer adam", "--optimizer must be sgd, not 'adam'"),
    ("run fedap @own.args --models vit,width=8,depth=1,heads=1", "vit has neither convolutions nor hidden"),
    ("run mnfl @own.args --public none", "needs public images, but the federation has none; add --public"),
    ("run pfedclub @own.args --public none", "needs public images, but the federation has none"),
    ("run mnfl @own.args --labels independent", "every client numbers classes differently"),
    ("run mnfl @own.args --public held-out,share=0", "share must lie in (0, 1), but is 0.0"),
    (
        "run mnfl @own.args --public held-out --partition divided/partition.npz",
        "divided/partition.npz holds out no public images",
    ),
    (
        "run fedavg @own.args --dataset vectors.npz --models lenet5",
        "lenet5 convolves images, but the data are",
    ),
    (
        "run fedavg @own.args --dataset windows.npz --models mlp --augment crop rotate",
        "fedavg: --augment rotate turns images, but windows.npz holds windows of 8 steps; leave it out",
    ),
    (
        "run fedavg @own.args --dataset vectors.npz --models mlp --augment flip",
        "vectors.npz holds vectors; leav",
    ),
    (
        "run mnfl @own.args --public vectors.npz",
        "(1, 1, 8) and the clients' (",
        "vectors with the same features",
    ),
    (
        "run fedavg @own.args --dataset hf:vectors,colour=x",
        "hf:vectors has no option 'colour'; choose from conf",
    ),
    # what models start from
    (
        "run fedavg @own.args --init-from nowhere",
        "--init-from nowhere: it is neither the folder of a ru",
    ),
    ("run fedavg @own.args --initial own --init-from divided", "--initial own draws what --init-from gives;"),
    ("run fedavg @own.args --init-from divided", "divided is not a run folder: it has no config.json"),
    ("run fedavg @own.args --init-from unsaved", "--init-from unsaved: unsaved has no checkpoint yet"),
    ("run fedavg @own.args --init-from nowhere.npz", "There is no file nowhere.npz"),
    ("run fedavg @own.args --init-from cut.npz", "cut.npz is damaged or not an .npz file of plain arrays"),
    ("run fedavg @own.args --init-from pickled.npz", "pickled.npz is damaged or not an .npz file of plain"),
    ("run fedavg @own.args --init-from torch.npz", "'fc1.weight' is not the name of a leaf", "params/conv1"),
    ("run fedavg @own.args --init-from infinite.npz", "mlp/params/fc1/linear/bias has values that are not"),
    ("run fedavg @own.args --init-from words.npz", "mlp/params/fc1/linear/bias has values that are not"),
    ("run fedavg @own.args --init-from crowd.npz", "is of shape (1, ", "but clients/id names 3 clients"),
    (
        "run fedavg @own.args --init-from others.npz",
        "--init-from: nothing fits",
        "linear starts fresh: others.npz has only mlp, cnn",
        "mlp starts fresh: others.npz does not fit in fc1 (linear/bias is 5 there, 4 here), classifier (not",
    ),
    (
        "compare fedavg @own.args --select validation",
        "--select validation: clients have no validation rows to choose",
    ),
    ("run fedavg @own.args --stop-at-target", "--stop-at-target needs an accuracy to stop at; add --target"),
    (
        "run fedavg @own.args --target 0.5 70",
        "--target takes accuracies in (0, 1], such as",
        "but one is 70",
    ),
    ("report runs --target 0", "--target takes accuracies in (0, 1], such as 0.7, but one is 0"),
    # partitions
    ("run fedavg @own.args --disjoint-from nan.npz", "nan.npz lacks train"),
    ("run fedavg @own.args --partition clases", "no partition 'clases'; did you mean 'classes'?"),
    (
        "run fedavg @own.args --partition natural,column=user",
        "no column 'user' of integers or words; there are none",
    ),
    (
        "run fedavg --dataset vectors.npz --partition shards,shards_per_client=4",
        "4, but the data have 3 classes",
        "shards,shards_per_client=3",
    ),
    ("run fedavg @own.args --partition iid,alpha=1", "iid has no option 'alpha'; there are none"),
    ("run fedavg @own.args --partition classes,classes_per_client=3", "3, but the data have 2 classes"),
    ("run fedavg @own.args --partition dirichlet,min_samples=13", "need 52 rows, but there are 48"),
    ("run fedavg @own.args --test-fraction 0.1", "Client 2 is left without test rows; raise"),
    (
        "run fedavg @own.args --partition iid --test source --test-fraction 0.5",
        "with --partition iid they are tested on the data set's own test rows (source); leave it out",
    ),
    ("run fedavg @own.args --partition nan.npz", "nan.npz lacks train"),
    ("run fedavg @own.args --partition pickled.npz", "pickled.npz is damaged or not an .npz file of plain a"),
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
    ("run fedavg @own.args --models mlp,classes=2", "mlp has no option 'classes'; choose from width"),
    ("run fedavg @own.args --models mlp,hidden=0", "hidden is 0; mlp needs at least one hidden feature"),
    ("run fedavg @own.args --models mlp,features=0", "features is 0; mlp needs at least one"),
    ("run fedavg @own.args --models mlp,features=few", "mlp: features must be a whole number, not 'few'"),
    ("run fedproto @own.args", "same number from all models: linear has 3, mlp has 4", "such as features=3"),
    (
        "run fedgh @own.args --models mlp,hidden=3,features=2 mlp,hidden=4",
        "mlp,hidden=3,features=2 has 2, mlp,hidden=4 has 4",
    ),
    (
        "run fedgh @own.args --models own.py:linear mlp,features=2",
        "theirs have different parameters; end your",
    ),
    ("run fedproto @own.args --models mlp --labels independent", "numbers classes differently under"),
    ("run fedgh @own.args --models mlp --labels independent", "numbers classes differently under"),
    (
        "run fedper @own.args --share prefix",
        "but these differ: linear with body (bias 3, kernel 64x3); mlp with fc1 (bias 4,",
        "choose --models that begin alike",
    ),
    ("run flexifed @own.args --strategy basic-common", "but these differ: linear with body"),
    (
        "run heterofl @own.args --models cnn1,width=0.1 fmnist_small,width=0.1",
        "cnn1 is not a part of fmnist_small, though their layers have the same names: its block 'conv1'",
        "such as --models cnn4 cnn4,width=0.5",
    ),
    ("run fedavg @own.args --models mlp,width=nan", "width is nan; give a positive factor"),
    ("run fedavg @own.args --models lenet5,width=inf", "width is inf; give a positive factor"),
    ("run fedavg @own.args --models alexnet,dropout=1", "dropout is 1.0; give a probability"),
    ("run fedavg @own.args --models mlp mlp", "names one architecture twice"),
    ("run fedavg @own.args --models mlp,clients=3", "cannot be given to 4 clients"),
    ("run fedavg @own.args --models mlp,clients=4 lenet5", "cannot be given to 4 clients"),
    ("run fedavg @own.args --models mlp,clients=0 lenet5", "clients= takes a whole number from 1 up"),
    ("run fedavg @own.args --models own.py:linear,bits=8", "own.py:linear: bits must be 16 or 32, not '8'"),
    ("run fedavg @own.args --models own.py:linear,sizes=8", "sizes is annotated as dict[str, int]"),
    ("run fedcmd @own.args --personal classifier", "first phase has 20 rounds and needs a longer run than 4"),
    ("run fedcmd @own.args --selection-rounds 4", "rounds and needs a longer run than 4; lower --selection"),
    ("run fedcmd @own.args --selection-rounds 0", "cannot vote in 0 rounds; raise --selection-rounds"),
    ("run fedcmd @own.args --personal boddy", "linear has no layer 'boddy'; did you mean 'body'?"),
    ("run fedcmd @own.args --personal classifier+body", "mlp has no layer 'body'; choose from fc1"),
    # user code
    ("run nowhere.py:fedprox", "nowhere.py to take 'fedprox' from"),
    ("run broken.py:fedprox", "broken.py does not load: NameError: name 'Method' is not defined"),
    ("run own.py", "own.py is a file; add the name of the method in it: own.py:NAME"),
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
    ("run @" + 300 * "x", "xxx: File name too long; check its name and its permissions"),
    ("run fedavg @own.args @unclosed.args", "unclosed.args, line 1: No closing quotation"),
    ("run fedavg @nested.args", "nested.args, line 2: @own.args is not read from within a file of arguments"),
    ("resume runs/fedavg-own --rounds 1000001", "--rounds must lie in [1, 1000000], but is 1000001"),
    (
        "run fedavg @own.args --device-profile mlp=1:nan",
        "not architecture=FLOPS:BYTES with two positive numbers",
    ),
    ("run fedavg --dataset " + 300 * "x", "xxx: File name too long; check its name and its permissions"),
]


SELDOM = [  # long: a large network is built first
    (
        "run heterofl @own.args --models shufflenet,width=0.1 shufflenet,width=0.05",
        "'stage1_1' interleaves channels",
    ),
]


@pytest.mark.parametrize(
    ("command", "words"),
    [(command, words) for command, *words in REFUSED] + [long(command, words) for command, *words in SELDOM],
)
def test_mistakes_are_refused_in_one_sentence(folder, capsys, command, words):
    before = contents(folder)
    assert_refused(capsys, command.split(), words)
    assert contents(folder) == before


def test_a_folder_without_a_name_is_refused(folder, capsys):
    """As from a variable of the shell that is not set."""
    for command in ("report", "watch"):
        assert_refused(capsys, [command, ""], ["'' is not the name of a folder or file"])


def test_the_installed_command_refuses(folder):
    command = Path(sysconfig.get_path("scripts")) / "jaxfl"
    ended = subprocess.run([command, "run", "fedpr"], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == "jaxfl: There is no method 'fedpr'; did you mean 'fedper'?\n"


def test_an_environment_that_jax_cannot_read_is_refused(folder):
    environment = os.environ | {"JAX_ENABLE_X64": "maybe"}
    command = [sys.executable, "-m", "jaxfl", "list"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("jaxfl: JAX refuses") and "'JAX_ENABLE_X64'; mend" in ended.stderr


def test_an_environment_without_its_device_is_refused(folder, capsys, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    before = contents(folder)
    monkeypatch.setattr(jax, "devices", devices)
    assert_refused(capsys, ["run", "fedavg", "@own.args"], ["JAX finds no device for JAX_PLATFORMS="])
    assert contents(folder) == before


# --- run folders


def edited(**changes):
    """Return a function that gives a run's configuration other entries."""

    def edit(run):
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | changes))

    return edit


def option(without="", **changes):
    """Return a function that gives a run other options, or removes one."""

    def edit(run):
        options = json.loads((run / "config.json").read_text())["options"] | changes
        options.pop(without, None)
        edited(options=options)(run)

    return edit


def partition(**changes):
    """Return a function that gives a run's partition other arrays."""

    def edit(run):
        with np.load(run / "partition.npz") as file:
            arrays = dict(file)
        np.savez(run / "partition.npz", **arrays | {name: f(arrays[name]) for name, f in changes.items()})

    return edit


def file(name, change):
    """Return a function that gives a run's file other bytes."""
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes()))


def code_within(run):
    """Add code to a run's folder that would be executed when the run is resumed."""
    (run / "trap.py").write_text("open('sprung', 'w')\n")
    edited(method=f"{run.resolve()}/trap.py:method")(run)


def code_behind_a_link(run):
    code_within(run)
    (run.parent / "link").symlink_to(run)
    edited(method=f"{run.parent.resolve()}/link/trap.py:method")(run)


def model_within(run):
    code_within(run)
    option(models=[f"{run.resolve()}/trap.py:model,width=2", "mlp"])(run)
    edited(method="fedavg")(run)


def link_out(run):
    """Link checkpoints/ to another folder, where a resume would delete all that is no checkpoint."""
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(run.parent / "divided", target_is_directory=True)


def link_in_a_circle(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to("checkpoints")


def stopped_before_it_began(run):
    (run / "config.json").rename(run / "config.part")


FOREIGN = ["partition.npz is not a partition that jaxfl saved"]
WITHIN = ["names code in the run folder itself", "is not executed"]
DAMAGED = {
    "no configuration": (lambda run: (run / "config.json").unlink(), ["not a run folder", "config.json"]),
    "configuration cut short": (
        file("config.json", lambda t: t[:100]),
        ["config.json is damaged", "restore it"],
    ),
    "configuration of bytes": (file("config.json", lambda t: b"\xff" + t), ["config.json is damaged"]),
    "configuration nested": (file("config.json", lambda t: b"[" * 10**6), ["config.json is damaged"]),
    "configuration empty": (file("config.json", lambda t: b"{}"), ["config.json is damaged", "restore it"]),
    "configuration a list": (file("config.json", lambda t: b"[]"), ["config.json is damaged", "restore it"]),
    "options a list": (edited(options=[]), ["config.json is damaged", "got `array` - at `$.options`"]),
    "method a number": (edited(method=3), ["config.json is damaged", "got `int` - at `$.method`"]),
    "rounds a text": (option(rounds="many"), ["config.json is damaged", "got `str` - at `$.options.rounds`"]),
    "rounds missing": (
        option(without="rounds"),
        ["config.json is damaged", "missing required field `rounds`"],
    ),
    "option missing": (option(without="momentum", momentun=0.5), ["config.json does not fit", "momentun"]),
    "option out of range": (option(lr=-1.0), ["--lr must lie in (0, inf), but is -1.0"]),
    "option of another type": (
        option(clients="four"),
        ["--clients must be a whole number or none, not 'four'"],
    ),
    "unknown method": (edited(method="fedpr"), ["no method 'fedpr'; did you mean 'fedper'?"]),
    "another rate": (option(lr=0.3), ["checkpoints/4 belongs to another configuration", "config.json"]),
    "no partition": (lambda run: (run / "partition.npz").unlink(), ["no file", "partition.npz"]),
    "partition cut short": (file("partition.npz", lambda t: t[:200]), ["partition.npz is damaged"]),
    "partition pickled": (partition(train=lambda a: np.array([Trap()])), ["partition.npz is damaged"]),
    "rows that do not exist": (partition(train=lambda a: a + 48), FOREIGN),
    "public rows that do not exist": (partition(public=lambda a: np.array([48])), FOREIGN),
    "rows of unknown classes": (partition(relabel=lambda a: np.where(a == 1, -1, a)), FOREIGN),
    "more outputs than classes": (partition(outputs=lambda a: a + 10**9), FOREIGN),
    "rows without end": (partition(train_sizes=lambda a: a - a + 2**62), FOREIGN),
    "partition of other labels": (partition(checksum=lambda a: a + 1), ["it is for other labels"]),
    "code within": (code_within, WITHIN),
    "code behind a link": (code_behind_a_link, WITHIN),
    "model within": (model_within, WITHIN),
    "code that is somewhere": (edited(method="trap.py:method"), WITHIN),
    "a link out": (link_out, ["checkpoints is a link that leads out of the run folder"]),
    "a link in a circle": (link_in_a_circle, ["checkpoints is a link that leads", "or nowhere"]),
    "more devices than here": (option(devices=8), ["by 8 devices, but JAX has 4", "JAX_NUM_CPU_DEVICES=8"]),
    "stopped before it began": (stopped_before_it_began, ["was stopped before it began; repeat the command"]),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_runs_are_refused(folder, tmp_path, capsys, monkeypatch, damage):
    damage, words = DAMAGED[damage]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "divided", tmp_path / "divided")
    run = Path(shutil.copytree(folder / "runs" / "fedavg-own", tmp_path / "run"))
    (run / "result.json").unlink()
    damage(run)
    before = contents(tmp_path)
    assert_refused(capsys, ["resume", "run"], words)
    assert contents(tmp_path) == before


def result(**changes):
    """Return a function that gives a run's result other entries."""
    return file("result.json", lambda text: json.dumps(json.loads(text) | changes).encode())


ACCURACY = {"mean": 0.5, "std": 0.1, "worst_tenth": 0.4, "per_group": {"mlp": "high"}}
UNFIT = {
    "result cut short": (file("result.json", lambda text: b"{"), "result.json"),
    "result a list": (file("result.json", lambda text: b"[]"), "result.json"),
    "result empty": (file("result.json", lambda text: b"{}"), "result.json"),
    "accuracy a text": (result(accuracy=ACCURACY), "result.json"),
    "bytes a text": (result(bytes_up="many"), "result.json"),
    "seconds a list": (result(seconds=[1.0]), "result.json"),
    "a round of nothing": (file("metrics.jsonl", lambda text: b'{"round": 1}\n' + text), "metrics.jsonl"),
    "rounds nested": (file("metrics.jsonl", lambda text: b"[" * 10**6), "metrics.jsonl"),
    "no rounds": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl"),
}


@pytest.mark.parametrize("damage", UNFIT)
def test_damaged_results_are_refused(folder, tmp_path, capsys, damage):
    damage, name = UNFIT[damage]
    run = Path(shutil.copytree(folder / "runs" / "fedavg-own", tmp_path / "run"))
    damage(run)
    for command in ("resume", "report"):
        assert_refused(capsys, [command, str(run)], [f"{name} is damaged", "restore it"])
    main(["watch", str(run)])
    assert "finished" in capsys.readouterr().out


def test_the_trap_springs_when_it_is_unpickled(tmp_path, monkeypatch):
    """Unpickling the trap makes a file, so the tests above can fail."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Trap())).close()
    assert Path("sprung").exists()


# --- the same from Python


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("fedpr", {}, "no method 'fedpr'; did you mean 'fedper'?"),
        ("fedper", {"epoch": 3}, "fedper has no option 'epoch'; did you mean 'epochs'?"),
        ("fedper", {"lam": 1.0}, "fedper has no option 'lam'; "),
        ("fedper", {"lr": 0.0}, "--lr must lie in"),
        ("fedper", {"rounds": 0}, "--rounds must lie in"),
        ("fedper", {"rounds": "3.5"}, "the run: --rounds must be a whole number, not '3.5'"),
        ("fedper", {"rounds": True}, "--rounds must be a whole number, not True"),
        ("fedper", {"max_test": 1.5}, "--max-test must be a whole number or none, not 1.5"),
        ("fedper", {"models": 3}, "--models must be a tuple of texts, not 3"),
        ("fedper", {"models": "mpl"}, "no model 'mpl'; did you mean 'mlp'?"),
        ("fedper", {"labels": "both"}, "--labels must be unified or independent or permuted, not"),
        ("fedper", {"batch_size": 1.5}, "fedper: --batch-size must be a whole number, not 1.5"),
        ("fedper", {"lr": None}, "--lr must be a number, not None"),
        ("fedper", {"optimizer": "sgdd"}, "--optimizer must be sgd or adam or adamw, not 'sgdd'"),
        ("compfl", {"head_init": "bogus"}, "compfl: --head-init must be keep+ft or"),
        ("compfl", {"kd": 1}, "compfl: --kd must be true or false, not 1"),
        ("fedper", {"run_dir": 3}, "jaxfl.run: --run-dir must be a path or none, not 3"),
        ("fedper", {"max_seconds": "60s"}, "jaxfl.run: --max-seconds must be a number or none, not '60s'"),
        ("fedper", {"log": 7}, "--log must be one name or function or a list of them, not 7"),
    ],
)
def test_python_refuses_the_same(folder, method, options, sentence):
    before = contents(folder)
    with pytest.raises(jaxfl.JaxflError) as error:
        jaxfl.run(method, **options)
    assert sentence in str(error.value)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: jaxfl.compare("fedper", seeds="three"),
            "jaxfl.compare: --seeds must be a whole number, not 'three'",
        ),
        (lambda: jaxfl.resume(3), "A folder or file must be a path or a string, not 3."),
        (lambda: jaxfl.resume("run", devices=0), "jaxfl.resume: --devices must lie in [1, inf), but is 0"),
        (
            lambda: jaxfl.report("run", target="70%"),
            "jaxfl.report: --target must be a tuple of numbers, not '70%'",
        ),
        (lambda: jaxfl.load("run", changed_code="no"), "jaxfl.load: --changed-code must be true or false"),
        (lambda: jaxfl.compare("fedper", changed_code="no"), "--changed-code must be true or false"),
        (lambda: jaxfl.run("fedper", run_dir="a\0b"), "is not the name of a folder or file"),
        (lambda: jaxfl.run("fedper", run_dir=""), "'' is not the name of a folder or file"),
        (
            lambda: jaxfl.compare("pfedme,lam=0.1", "ditto,lr=0.1", lam=1.0),
            "pfedme,lam=0.1 gives lam, which is given once more beside it",
        ),
        (lambda: jaxfl.load(PurePath("nowhere")), "nowhere"),
        (lambda: jaxfl.load(None), "A folder or file must be a path or a string, not None."),
    ],
)
def test_python_refuses_options_of_other_functions_as_well(call, sentence):
    with pytest.raises(jaxfl.JaxflError) as error:
        call()
    assert sentence in str(error.value)
