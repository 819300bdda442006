"""A server's round of re-assembly, step by step; a method takes the steps that it needs.

server = take_apart(...)                         models -> blocks in groups
chains = tuned(server, several)                  blocks -> networks, trained on the public images
logits = logits_of(server, chains)               what they say of them
logits = predictions(server, chain, images)      and of any others
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import NamedTuple

import jax
import numpy as np

from jaxfl.core.client_map import per_group
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.machine.memory_maps import crowded
from jaxfl.mechanisms.reassembly import assembly, grouping, parts, tuning
from jaxfl.mechanisms.reassembly.networks import (
    BlockRef,
    Network,
    Pool,
    look,
    networks,
    on_one_device,
    references,
    taken_places,
)
from jaxfl.mechanisms.reassembly.parts import Chain, Part
from jaxfl.mechanisms.reassembly.reassembly_options import Reassembly
from jaxfl.mechanisms.reassembly.seen import Seen
from jaxfl.mechanisms.reassembly.signatures import signatures, similarity
from jaxfl.tasks import Task


class _Compiled:
    """What this process has compiled.

    Attributes:
      programs: number of programs.
      seconds: time spent on compiling them.
    """

    programs, seconds = 0, 0.0

    def add(self, event: str, duration_secs: float, **_):
        """Count an event of JAX if it is a compilation."""
        if event == "/jax/core/compile/backend_compile_duration":
            self.programs += 1
            self.seconds += duration_secs


compiled = _Compiled()
jax.monitoring.register_event_duration_secs_listener(compiled.add)


class Server(NamedTuple):
    """The server's data in a round."""

    options: Reassembly  # the method's options, with their rates
    networks: dict[int, Network]  # by client id, all networks whose blocks are in the pool
    cohort: tuple[int, ...]  # ids of the clients of the round, ascending
    pool: Pool  # their blocks, grouped
    logits: dict[int, np.ndarray]  # by client of the cohort, (P, C) of its own model on the public images
    classes: int  # number of classes, C
    task: Task  # what labels are
    images: tuning.Images  # the public images
    trains: Callable[[Part], bool]  # which parts of a network learn there, see `parts.train`
    seen: Seen  # the public images after the parts that do not learn
    sample: Seen  # those by which blocks are compared, after any parts
    rng: np.random.Generator  # NumPy's random generator of the round
    key: jax.Array  # JAX's key of the round
    seconds: dict[str, float]  # by step, the time it has taken; see `timed`
    at_once: int  # number of networks that it works on at the same time, each on a core


def take_apart(
    key,
    options: Reassembly,
    trains: Callable[[Part], bool],
    weights: PerGroup,
    known: PerGroup,
    federation: Federation,
    cohort: Cohort,
) -> Server:
    """Run clients' models (n_g, ...) on the public images and group their blocks.

    The server has seen models of the clients `known` (n_g,) bool before. `trains` says which parts of
    assembled networks learn.
    """
    if crowded():
        jax.clear_caches()  # of all rounds so far; what is used again is compiled again
    rng, seconds = np.random.default_rng(np.asarray(jax.random.key_data(key))), {}
    images = tuning.images_of(federation)
    givers = cohort if options.pool == "cohort" else with_known(cohort, known)
    members = networks(weights, federation, givers)
    with timed(seconds, "signatures"):
        some = np.sort(rng.permutation(len(images.x))[: options.signature_images])
        looks = look(weights, federation, givers, some)
        signed = signatures([of_client.activations for of_client in looks.values()])
    with timed(seconds, "grouping"):
        alike = similarity(signed)
        if options.grouping == "kmeans":
            labels = grouping.kmeans(signed, options.groups, rng)
        else:
            labels = grouping.kmedoids(alike, options.groups)
        pool = Pool(references(list(members.values()), labels), alike)
    ids = tuple(client for client, *_ in taken_places(federation, cohort))
    return Server(
        options=options,
        networks=members,
        cohort=ids,
        pool=pool,
        logits={client: looks[client].logits for client in ids},
        classes=federation.models[0].classes,
        task=federation.task,
        images=images,
        trains=trains,
        seen=Seen(images.x, options.server_batch),
        sample=Seen(images.x[some], options.server_batch),
        rng=rng,
        key=key,
        seconds=seconds,
        at_once=federation.devices // jax.process_count(),
    )


def with_known(cohort: Cohort, known: PerGroup) -> Cohort:
    """Return a cohort of all clients that a server knows: those of the given one, and others (n_g,) bool."""

    def of_group(slots, known):
        is_known = np.array(on_one_device(known))
        is_known[np.asarray(slots.index)[np.asarray(slots.mask)]] = True
        return Slots(np.arange(len(is_known), dtype=np.int32), is_known)

    return dataclasses.replace(cohort, groups=per_group(of_group, cohort.groups, known))


def layers(server: Server, blocks: Sequence[BlockRef]) -> list:
    """Return blocks with the stitching layers that they need, see `assembly.layers`."""
    return assembly.layers(blocks, server.images.x.shape[1:], server.classes, server.options.stitch)


def size(server: Server, blocks: Sequence[BlockRef]) -> int:
    """Return |c|, the number of parameters of the network made of some blocks."""
    return assembly.size(layers(server, blocks))


def assembled(server: Server, blocks: Sequence[BlockRef]) -> Chain:
    """Return blocks as a network with untrained stitching layers."""
    sample = server.sample if server.options.stitch_start == "least-squares" else None
    return assembly.assemble(layers(server, blocks), server.networks, server.rng, sample)


def tuned(server: Server, several: Sequence[Sequence[BlockRef]]) -> list[Chain]:
    """Return networks of blocks whose learning parts have been trained on the public images."""

    def drawn(number, blocks):
        network = assembled(server, blocks)
        learns = any(map(server.trains, network))
        batches = tuning.draws(len(server.images.y), server.options, server.rng) if learns else []
        return network, batches, jax.random.fold_in(server.key, number)

    # Random numbers are drawn in order, before the networks learn at the same time.
    return _at_once(server, lambda one: _learnt(server, *one), list(map(drawn, itertools.count(), several)))


def logits_of(server: Server, several: Sequence[Chain]) -> list[np.ndarray]:
    """Return networks' logits (P, C) on the public images, in evaluation mode."""

    def of_network(network):
        images, rest = begun(server, network)
        return predictions(server, rest, images.x)

    return _at_once(server, of_network, several)


def _learnt(server: Server, network: Chain, drawn: Sequence[tuning.Draw], key) -> Chain:
    images, rest = server.images, network
    if server.options.labelled:  # otherwise every epoch has other views
        images, rest = begun(server, network)
    loss, batches = tuning.objective(server.task, images, server.options, drawn)
    learnt = parts.train(rest, batches, loss, server.options.server_lr, trains=server.trains, key=key)
    jax.block_until_ready([part.weights for part in learnt])
    return network[: len(network) - len(rest)] + learnt


def _at_once(server: Server, function: Callable, several: Sequence) -> list:
    """Return ``[function(one) for one in several]``; some run at the same time.

    A part's program is too small for two cores, so each core works on a different network.
    """
    with ThreadPoolExecutor(server.at_once) as threads:
        # In copies of this context, where operations are collected.
        contexts = [copy_context() for _ in several]
        return list(threads.map(lambda context, one: context.run(function, one), contexts, several))


def begun(server: Server, network: Chain) -> tuple[tuning.Images, Chain]:
    """Return the public images after a network's first parts, which do not learn, and the remaining parts."""
    frozen = itertools.takewhile(lambda part: not server.trains(part), network)
    done, x = server.seen.after(tuple(frozen))
    return server.images._replace(x=x), network[done:]


def predictions(server: Server, network: Chain, x) -> np.ndarray:
    """Return logits (n, C) of a network on images (n, H, W, C), in batches of one shape."""
    return parts.run_all(network, x, server.options.server_batch)


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of a ``with`` block to the seconds of its name, and that of compiling to "compilation".

    Threads that compile at the same time are counted separately, up to the time of the block.
    """
    begun, before = time.perf_counter(), compiled.seconds
    yield
    passed = time.perf_counter() - begun
    compiling = min(passed, compiled.seconds - before)
    for of, spent in ((name, passed - compiling), ("compilation", compiling)):
        seconds[of] = seconds.get(of, 0.0) + spent
