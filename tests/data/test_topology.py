"""Graphs of clients: their links, from names and from files of edges."""

import numpy as np
import pytest
from conftest import assert_same

from jaxfl.config.setup import Setup
from jaxfl.data import graphs as topology
from jaxfl.errors import JaxflError
from jaxfl.runs.prepare import link


def links_of(choice, clients, **options):
    """Return the links of a command with these options."""
    return link(Setup.of(topology=choice, **options), clients)


@pytest.mark.parametrize(
    ("choice", "degrees"),
    [
        ("complete", [4, 4, 4, 4, 4]),
        ("ring", [2, 2, 2, 2, 2]),
        ("star", [4, 1, 1, 1, 1]),
        ("er,p=1", [4, 4, 4, 4, 4]),
    ],
)
def test_named_graphs_have_their_degrees(choice, degrees):
    links = links_of(choice, 5)
    assert links.sum(1).tolist() == degrees
    assert (links == links.T).all() and not links.diagonal().any()


@pytest.mark.parametrize("choice", topology.TOPOLOGIES)
@pytest.mark.parametrize("clients", [1, 2])
def test_every_graph_can_have_one_or_two_clients(choice, clients):
    assert links_of(choice, clients).sum() == clients * (clients - 1)


def test_a_random_graph_is_connected_and_depends_only_on_the_partition_seed():
    for seed in range(10):
        links = links_of("er,p=0.2", 12, partition_seed=seed)
        reached = np.linalg.matrix_power(links + np.eye(12, dtype=int), 11)
        assert reached.all()
        assert (links == links_of("er,p=0.2", 12, partition_seed=seed, seed=9)).all()
    assert (links_of("er", 12) != links_of("er", 12, partition_seed=1)).any()


def test_a_file_of_edges_is_read_as_it_was_written(tmp_path):
    links = links_of("er,p=0.3", 9)
    (tmp_path / "edges.txt").write_text(topology.as_text(links))
    assert_same(links_of(str(tmp_path / "edges.txt"), 9), links)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 1\n1 2\n", "is not connected: no path leads from client 3 to client 0"),
        ("0 1\n1 2\n2 3\n3 4\n", "has 4, but the clients are 0 to 3"),
        ("0 one\n", "'0 one' is not an edge; write two client ids per line"),
        ("0,1\n", "'0,1' is not an edge"),
        ("0\n", "'0' is not an edge"),
        ("\x00\ufffd", "is not an edge"),
    ],
)
def test_invalid_edges_are_refused(tmp_path, text, words):
    (tmp_path / "edges.txt").write_text(text)
    with pytest.raises(JaxflError, match=words):
        topology.read(tmp_path / "edges.txt", 4)
