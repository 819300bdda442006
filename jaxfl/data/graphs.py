"""Topologies: which clients are linked, for methods without a server.

A graph is drawn like the partition, from a stream of the partition's seed, and is then part of the data: the
same for all seeds of a run. It is kept as a file of edges, two client ids per line, which may also be the
user's own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx
import numpy as np

from jaxfl.errors import JaxflError

DRAWS = 1000  # of a random graph, until one is connected


def complete(clients: int, rng) -> networkx.Graph:
    """Link every client with every other."""
    return networkx.complete_graph(clients)


def ring(clients: int, rng) -> networkx.Graph:
    """Link each client with the one before and the one after it, in the order of ids."""
    return networkx.cycle_graph(clients)


def star(clients: int, rng) -> networkx.Graph:
    """Link every client with client 0."""
    return networkx.star_graph(clients - 1)


def er(clients: int, rng: np.random.Generator, *, p: float = 0.6) -> networkx.Graph:
    """Link every pair with probability p (Erdos-Renyi), drawn again until all clients are connected."""
    if not 0 < p <= 1:
        raise JaxflError(f"--topology er: p must lie in (0, 1], but is {p}.")
    for _ in range(DRAWS):
        graph = networkx.gnp_random_graph(clients, p, seed=rng)
        if networkx.is_connected(graph):
            return graph
    raise JaxflError(
        f"--topology er,p={p}: none of {DRAWS:,} graphs of {clients} clients is connected; raise p."
    )


TOPOLOGIES: dict[str, Callable] = {"complete": complete, "ring": ring, "star": star, "er": er}


def read(path: Path, clients: int) -> np.ndarray:
    """Read the links in a file of edges, see `links`.

    Raises:
      JaxflError: if it cannot be read, or its edges do not connect these clients.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise JaxflError(f"The edges of {path} cannot be read ({error}); name a file of edges.") from None
    edges = [line.split() for line in text.splitlines() if line.strip()]
    for ends in edges:
        if len(ends) != 2 or not all(end.isdecimal() and len(end) < 10 for end in ends):
            raise JaxflError(
                f"{path}: {' '.join(ends)!r} is not an edge; write two client ids per line, as in `0 3`."
            )
    graph = networkx.empty_graph(clients)
    graph.add_edges_from((int(one), int(other)) for one, other in edges)
    return links(str(path), graph, clients)


def as_text(matrix: np.ndarray) -> str:
    """Return the file of edges that `read` reads."""
    edges = networkx.generate_edgelist(networkx.from_numpy_array(matrix), data=False)
    return "".join(f"{edge}\n" for edge in edges)


def links(name: str, graph: Any, clients: int) -> np.ndarray:
    """Return which clients a graph of their ids links: (N, N) bool, symmetric; none with itself.

    Raises:
      JaxflError: if it is not a graph, has other nodes, or is not connected.
    """
    if not isinstance(graph, networkx.Graph):
        raise JaxflError(f"{name} returns a {type(graph).__name__}, not a networkx.Graph.")
    strangers = sorted(set(graph) - set(range(clients)), key=str)
    if strangers or len(graph) != clients:
        raise JaxflError(
            f"{name} has {strangers[0] if strangers else f'{len(graph)} clients'}, but the clients are 0 to "
            f"{clients - 1}; link exactly these, or change --clients."
        )
    graph = networkx.Graph(graph)  # links go both ways
    parts = sorted(map(sorted, networkx.connected_components(graph)), key=len)
    if len(parts) > 1:
        raise JaxflError(
            f"{name} is not connected: no path leads from client {parts[0][0]} to client {parts[-1][0]}; add "
            "edges."
        )
    matrix = np.zeros((clients, clients), bool)
    for one, other in graph.edges:
        matrix[one, other] = matrix[other, one] = one != other
    return matrix
