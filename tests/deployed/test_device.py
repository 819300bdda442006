"""Single clients and a server that averages compute a run's rounds; other methods are refused."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import long

from jaxfl import cli, registry
from jaxfl.core.node import kept_by, sent_to_all
from jaxfl.data.one_client import Own
from jaxfl.deployed import device as nodes
from jaxfl.errors import JaxflError
from jaxfl.folder.variant import choose

ROUNDS = 3
OPTIONS = (
    "--partition dirichlet,alpha=0.5 --clients 3 --models mlp,hidden=3 --devices 1 --epochs 2 --batch-size 4 "
    f"--lr 0.1 --eval-every 1 --rounds {ROUNDS}"
)
# All other methods need more than a server that averages.
AVERAGED = "fedavg fedavg-ft fedbabu fedbn fedper fedprox fedrep fedrod lg-fedavg local per-fedavg"


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """Return a function that gives the folder of a method's run with options, which is run once."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def run(method, *options):
        if (method, options) not in made:
            made[method, options] = where = folder / str(len(made))
            cli.main(["run", method, *dataset, *OPTIONS.split(), *options, "--run-dir", str(where)])
        return made[method, options]

    return run


def federated(folder, after, rounds):
    """Return what the server and the nodes have after further rounds, and the nodes' accuracies."""
    clients = [nodes.node(folder, client, after) for client in range(3)]
    sent, kept = nodes.sent_first(folder, after), [client.kept for client in clients]
    for t in range(after, after + rounds):
        trained = [me.train(sent, own, t, after + rounds) for me, own in zip(clients, kept, strict=True)]
        weights, kept = [me.weight for me in clients], [one.kept for one in trained]
        sent = {
            name: np.average([one.sent[name] for one in trained], axis=0, weights=weights) for name in sent
        }
    scores = [me.score(sent, own, t, t + 1) for me, own in zip(clients, kept, strict=True)]
    return sent, kept, [score.value for score in scores]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedper", ("--schedule", "cosine,warmup=1", "--ft-epochs", "1")),
        long("fedavg", ("--task", "regression", "--lr", "0.01")),  # of the numbers of classes
        long("fedavg-ft", ("--dataset", "digits", "--batch-size", "20")),  # its batches make the difference
        long("per-fedavg", ()),  # its mean is uniform
        long("fedbn", ("--models", "cnn4,width=0.1")),  # BatchNorm's statistics
        long("fedrod", ("--labels", "independent", "--partition", "classes,classes_per_client=2")),
    ],
)
def test_nodes_and_a_mean_compute_the_rounds_of_a_run(run, method, options):
    """From a run's first weights or a checkpoint, nodes and a mean reach its leaves and scores."""
    folder = run(method, *options)
    for after in (ROUNDS - 1, 0):
        reaches_the_run(folder, method, *federated(folder, after, ROUNDS - after))


def reaches_the_run(folder, method, sent, kept, scores):
    """Assert that these shared leaves, personal leaves and scores are those after the run's last round."""
    opened, averaged = nodes.opened_at(folder)
    unequal = len({len(rows) for rows in opened.partition.train}) > 1  # otherwise weights do not matter
    assert unequal == (method != "fedrod")
    expected = sent_to_all(averaged, opened.state), [kept_by(averaged, opened.state, i) for i in range(3)]
    assert sent.keys() == expected[0].keys() and kept[0].keys() == expected[1][0].keys()
    for ours, theirs in zip(jax.tree.leaves((sent, kept)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert scores == pytest.approx(opened.record["accuracy"]["per_client"])


@pytest.mark.long
def test_nodes_go_on_with_a_run_as_its_resume_does(run):
    """From a run's last round, nodes compute the same further rounds as its resume."""
    folder = run("fedrep")
    sent, _, scores = federated(folder, ROUNDS, 2)
    cli.main(["resume", str(folder), "--rounds", str(ROUNDS + 2)])
    opened, averaged = nodes.opened_at(folder)
    for name, leaf in sent_to_all(averaged, opened.state).items():
        np.testing.assert_allclose(sent[name], leaf, rtol=1e-4, atol=1e-5)
    assert scores == pytest.approx(opened.record["accuracy"]["per_client"])


def test_methods_say_whether_their_server_only_averages():
    def averaged(name, **options):
        return choose(name, **options).algorithm.averaged

    assert [name for name in registry.METHODS if averaged(name)] == AVERAGED.split()
    assert averaged("fedavg").by_rows and not averaged("per-fedavg").by_rows
    assert averaged("fedavg", server_optimizer="sgd") is averaged("fedper", share="prefix") is None


def test_what_nodes_cannot_do_is_refused_in_a_sentence(run, monkeypatch):
    folder = run("fedper")
    with pytest.raises(JaxflError, match="has no checkpoint of round 1, only of 2, 3; a run keeps"):
        nodes.opened_at(folder, 1)
    with pytest.raises(JaxflError, match="There is no client 3; .* has clients 0 to 2"):
        nodes.node(folder, 3, 0)
    images, labels = np.zeros((4, 8, 8, 1), np.uint8), np.zeros(4, np.int32)
    with pytest.raises(JaxflError, match=r"Client 1 has images \(4, 8, 8\) of uint8; those of"):
        nodes.node(folder, 1, 0, Own(images[..., 0], labels, images, labels))
    with pytest.raises(JaxflError, match="Client 1 has 4 training images and 4 labels, 0 of them of classes"):
        nodes.node(folder, 1, 0, Own(images, labels + 7, images, labels))
    with pytest.raises(JaxflError, match="Client 1 has no training images"):
        nodes.node(folder, 1, 0, Own(images[:0], labels[:0], images, labels))
    with pytest.raises(JaxflError, match=r"1 has training labels of float32 and shape \(4, 1\); give whole"):
        nodes.node(folder, 1, 0, Own(images, labels.astype("f4")[:, None], images, labels))
    with pytest.raises(JaxflError, match=r"Client 1 has images \(4, 8, 8, 1\) of int64; those of"):
        nodes.node(folder, 1, 0, Own(images.tolist(), labels, images, labels))
    assert nodes.node(folder, 1, 0, Own(images, [0] * 4, images, [0] * 4)).weight == 4
    unscored = nodes.node(folder, 1, 0, Own(images, labels, images[:0], labels[:0]))
    assert unscored.score(nodes.sent_first(folder, 0), unscored.kept, 0, 1).rows == 0
    me = nodes.node(folder, 1, 0)
    with pytest.raises(JaxflError, match="arrays of a round are not those of the run: params/classifier"):
        me.train(me.kept, me.kept, 0, 1)
    opened, _ = nodes.opened_at(folder)
    two = dataclasses.replace(opened.federation, groups=opened.federation.groups * 2)
    for other, sentence in (
        (opened._replace(variant=choose("scaffold")), "scaffold needs more than a server that averages what"),
        (opened._replace(state=opened.state._replace(shared=(None,))), "fedper sends nothing"),
        (
            opened._replace(federation=two),
            r"has 2 architectures \(mlp, mlp\).*repeat the run with --models mlp",
        ),
    ):
        monkeypatch.setattr(nodes, "opened", lambda *_, other=other, **__: other)
        with pytest.raises(JaxflError, match=sentence):
            nodes.opened_at(folder)
