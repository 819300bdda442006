"""pFedClub's server between two rounds: networks in, teachers out (Algorithm 1, lines 7-18).

signatures -> grouping -> search -> stitching -> matching
"""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.core import tree
from jaxfl.core.client_map import gather, map_clients, per_group
from jaxfl.core.examples import visiting
from jaxfl.core.protocol import Info
from jaxfl.mechanisms import public_images as public
from jaxfl.mechanisms.reassembly import chain, cmsr, grouping, stitching
from jaxfl.mechanisms.reassembly.blocks import BlockRef, Candidate, Pool, describe, identity
from jaxfl.mechanisms.reassembly.chain import Chain, Frozen, Learnt, Workshop
from jaxfl.mechanisms.reassembly.matching import match
from jaxfl.mechanisms.reassembly.networks import (
    Network,
    activations,
    networks,
    on_one_device,
    references,
    weights_of,
)
from jaxfl.mechanisms.reassembly.signatures import signatures, similarity
from jaxfl.mechanisms.reassembly.stitching import Stitch
from jaxfl.mechanisms.reassembly.views import view


class Images(NamedTuple):
    """The public images D_p on one device.

    Args:
      x: (P, H, W, C), normalised.
      y: (P,) int32.
      mean, std: (1, 1, 1, C), that they were normalised by.
      top: (), the largest value of an image.
    """

    x: jax.Array
    y: jax.Array
    mean: jax.Array
    std: jax.Array
    top: jax.Array


def teach(key, state, federation, cohort, config, workshop: Workshop):
    """Assemble a teacher for every client of the cohort.

    Args:
      key: of this step.
      state: pFedClub's.
      federation: clients and public images.
      cohort: the round's.
      config: pFedClub's options that select a program; its rates are in ``state.hyper``.
      workshop: the programs of the run.

    Returns:
      The state with new lessons, and an `Info` whose findings say what was assembled.
    """
    hyper, seconds = jax.device_get(state.hyper), {}
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    rows = np.asarray(federation.public)
    images = Images(
        *map(
            on_one_device, (federation.inputs(rows), federation.labels[rows], federation.mean, federation.std)
        ),
        top=on_one_device(federation.images.max()).astype(federation.mean.dtype),
    )
    members = networks(state.weights, federation, cohort)

    with timed(seconds, "signatures", workshop):
        chosen = rows[np.sort(rng.permutation(len(rows))[: config.signature_images])]
        acts, logits = looked_at(workshop, state, federation, cohort, jnp.asarray(chosen))
        marks = signatures([acts[network.client] for network in members])
    with timed(seconds, "grouping", workshop):
        alike = similarity(marks)
        labels = (
            grouping.kmeans(marks, config.groups, rng)
            if config.grouping == "kmeans"
            else grouping.kmedoids(alike, config.groups)
        )
        pool = Pool(references(members, labels), alike)
    by_client = {network.client: network for network in members}
    shape, classes = federation.images.shape[1:], federation.models[0].classes

    found, taught = [], {}
    for network in members:
        with timed(seconds, "search", workshop):
            candidates = cmsr.bounded(
                lambda: cmsr.cmsr(
                    network.client,  # noqa: B023
                    pool,
                    rng,
                    anchor=config.anchor,
                    ordered=config.order,
                    complete=config.completion,
                    most=config.candidates,
                ),
                lambda candidate: size(candidate, shape, classes),
                (1 + float(getattr(hyper, "eta", np.inf))) * network.size,
                identity(network.client, pool),
            )
        with timed(seconds, "stitching", workshop):
            chains = [
                stitched(candidate, by_client, shape, classes, images, hyper, config, workshop, rng)
                for candidate in candidates
            ]
            jax.block_until_ready([part.weights for of_candidate in chains for part in of_candidate])
        with timed(seconds, "matching", workshop):
            theirs = [predictions(workshop, of_candidate, images.x, config) for of_candidate in chains]
            best, alpha = match(logits[network.client], theirs)
            taught[network.client] = chains[best]
        teacher = candidates[best]
        found.append(
            {
                "client": network.client,
                "model": network.size,
                "teacher": size(teacher, shape, classes),
                "phi": size(teacher, shape, classes) / network.size - 1,
                "candidates": len(candidates),
                "alpha": alpha.tolist(),
                "own": describe(identity(network.client, pool)),
                "blocks": describe(teacher),
            }
        )

    with timed(seconds, "lessons", workshop):
        state = with_teachers(state, federation, members, taught, config, workshop)
    nobody = per_group(lambda slots: np.zeros(len(slots.mask), np.int32), cohort.groups)
    phis = [of_client["phi"] for of_client in found]
    findings = {
        "assembled": found,
        "teacher size (phi)": {"mean": float(np.mean(phis)), "largest": float(np.max(phis))},
        "candidates": {"mean": float(np.mean([of_client["candidates"] for of_client in found]))},
        "compiled parts": {"programs": workshop.compilations},
        "server seconds": seconds,
    }
    return state, Info(None, up=nobody, down=nobody, findings=findings)


def looked_at(workshop, state, federation, cohort, rows):
    """By client: activations on some public images, (R, d) each, and logits on all, (P, outputs)."""

    def look(weights, federation, cohort, rows):
        def client(key, client, nothing, w):
            guest = visiting(client, rows)
            acts = activations(client.model, w, guest.rows, guest.size, federation)
            return acts, public.logits(w, client, federation, federation.public)

        nothing, key = (None,) * len(federation.groups), jax.random.key(0)
        seen = map_clients(client, key, federation, cohort, nothing, gather(weights, cohort))
        return federation.keep_replicated(seen)

    seen = jax.device_get(workshop.program("look", look)(state.weights, federation, cohort, rows))
    acts, logits = {}, {}
    for group, slots, (of_group, said) in zip(federation.groups, cohort.groups, seen, strict=True):
        for place in np.flatnonzero(slots.mask):
            client = int(group.id[slots.index[place]])
            acts[client] = [leaf[place] for leaf in of_group]
            logits[client] = said[place]
    return acts, logits


def layers(candidate: Candidate, shape: tuple[int, ...], classes: int) -> list[BlockRef | Stitch]:
    """A candidate's blocks with the stitching layers that it needs, from images of some shape to logits."""
    found = []
    for block in candidate.blocks:
        stitch = stitching.between(shape, block.input_shape, dense=block.kind == "fc")
        found += [stitch, block] if stitch else [block]
        shape = block.output_shape
    if shape != (classes,):
        found.append(Stitch(shape, (classes,), relu=False))
    return found


def size(candidate: Candidate, shape: tuple[int, ...], classes: int) -> int:
    """|c|, parameters with those of stitching layers."""
    parts = layers(candidate, shape, classes)
    return sum(part.size if isinstance(part, Stitch) else part.parameters for part in parts)


def stitched(candidate, by_client, shape, classes, images, hyper, config, workshop, rng) -> Chain:
    """A candidate with trained stitching layers (eqs. 2-3)."""

    def part(layer):
        if isinstance(layer, Stitch):
            return Learnt(layer, stitching.initial(jax.random.key(int(rng.integers(2**31))), layer))
        network = by_client[layer.client]
        return Frozen(network.parts[layer.index].block, weights_of(network, layer.index))

    parts = tuple(map(part, layers(candidate, shape, classes)))
    gradient = cross_entropy_gradient if config.labelled else contrast_gradient
    program = workshop.program(gradient.__name__, gradient)
    batches = mini_batches(images, config, workshop, rng)
    return chain.train(
        workshop, parts, batches, lambda logits, other: program(logits, other, hyper.tau), hyper.server_lr
    )


def cross_entropy_gradient(logits, labels, tau):
    """Of eq. 2 with respect to logits (B, C)."""
    del tau

    def loss(logits):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return jax.grad(loss)(logits)


def contrast_gradient(logits, pairs, tau):
    """Of eq. 3 with respect to logits (2B, C); two rows with the same number in `pairs` are of one image."""

    def loss(logits):
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
            return optax.losses.ntxent(logits, pairs, tau)

    return jax.grad(loss)(logits)


def mini_batches(images: Images, config, workshop: Workshop, rng) -> Iterator:
    """Public images for stitching: (batch, labels), or (two views of each, which belong together)."""
    total = len(images.y)
    batch = min(config.server_batch, total)
    for _ in range(config.server_epochs):
        # The last batch is filled up from the start: all have one shape.
        order = np.resize(rng.permutation(total), -(-total // batch) * batch)
        for places in order.reshape(-1, batch):
            if config.labelled:
                yield images.x[places], images.y[places]
            else:
                key = jax.random.key(int(rng.integers(2**31)))
                views = workshop.program("views", two_views)(key, images._replace(x=images.x[places]))
                yield views, jnp.tile(jnp.arange(batch, dtype=jnp.int32), 2)


def two_views(key, images: Images):
    """Two random views of each image (B, H, W, C), one set after the other: (2B, H, W, C), normalised."""
    values = jnp.clip((images.x * images.std + images.mean) / images.top, 0, 1)
    views = jnp.concatenate([view(one, values) for one in jax.random.split(key)])
    return (views * images.top - images.mean) / images.std


def predictions(workshop: Workshop, parts: Chain, x, config) -> np.ndarray:
    """Logits (n, C) of a chain on images (n, H, W, C), in batches of one shape."""
    batch = min(config.server_batch, len(x))
    places = np.resize(np.arange(len(x)), -(-len(x) // batch) * batch).reshape(-1, batch)
    return np.concatenate([np.asarray(chain.run(workshop, parts, x[of_batch])) for of_batch in places])[
        : len(x)
    ]


def with_teachers(state, federation, members: list[Network], taught: dict, config, workshop):
    """The state in which the round's clients have new teachers: logits on their own rows, and sizes."""
    lessons, has, sizes = list(state.lessons), list(state.taught), list(state.sizes)
    for network in members:
        g, i = network.group, network.position
        group = federation.groups[g]
        # All rows, padding as well: one number of batches for all clients.
        x = on_one_device(federation.inputs(group.rows[i]))
        logits = predictions(workshop, taught[network.client], x, config)
        lessons[g] = lessons[g].at[i].set(logits)
        has[g] = has[g].at[i].set(True)
        sizes[g] = sizes[g].at[i].set(sum(tree.scalars(part.weights) for part in taught[network.client]))
    return state._replace(lessons=tuple(lessons), taught=tuple(has), sizes=tuple(sizes))


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str, workshop: Workshop):
    """Adds the time of a block to those of its name, and of its compilations to "compilation"."""
    begun, before = time.perf_counter(), workshop.seconds
    yield
    compiled = workshop.seconds - before
    for of, passed in ((name, time.perf_counter() - begun - compiled), ("compilation", compiled)):
        seconds[of] = seconds.get(of, 0.0) + passed
