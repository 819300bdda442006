"""Methods whose server assembles a teacher for every client: everything except the assembly.

w_m is client m's model, w*_m its teacher, D_p the public images. In a round

    w_m <- SGD over CE(w_m) + lam KL(softmax w*_m || softmax w_m)        E epochs (pFedClub, eq. 5)
    w*_m <- assembled by the server from blocks of all w_m               a method's own

and w*_m teaches client m when it takes part again; before its first teacher a client learns alone. A client
deploys w_m; nothing replaces it before a round.

The server's step is irregular and runs between rounds. As a teacher is frozen, only its logits on the
client's own training images are kept: the client would compute the same. The ledger counts the teacher
itself. Where `augment` changes the student's images, the teacher has seen them unchanged.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import flops, tree
from jaxfl.core.client_map import gather, map_clients, per_group, scatter
from jaxfl.core.examples import own_rows
from jaxfl.core.protocol import Algorithm, Info
from jaxfl.core.traffic import sent_down, sent_up
from jaxfl.core.training import descend, forward, mean
from jaxfl.data.federation import PerGroup
from jaxfl.errors import JaxflError
from jaxfl.mechanisms import own_models, public_images
from jaxfl.mechanisms.reassembly.networks import on_one_device, require_flattening
from jaxfl.mechanisms.reassembly.parts import Chain, Part
from jaxfl.mechanisms.reassembly.reassembly_options import Reassembly
from jaxfl.mechanisms.reassembly.server import Server, compiled, predictions, take_apart, timed


class Teacher(NamedTuple):
    """The teacher that a method has assembled for a client."""

    network: Chain  # w*_m
    parameters: int  # |w*_m|, the number of its parameters
    own: list[dict]  # the blocks of the client's own model, see `blocks.describe`
    blocks: list[dict]  # the blocks of the teacher; a method may add entries to each
    alpha: np.ndarray  # (S,), the similarity of each of S candidates to the client's model


class State(NamedTuple):
    """The state of such a method, per group."""

    hyper: Reassembly
    weights: PerGroup  # the clients' models (n_g, ...)
    teacher_logits: PerGroup  # logits of the clients' teachers on their training rows (n_g, m, outputs)
    has_teacher: PerGroup  # (n_g,) bool; a client has one from its first round on
    teacher_size: PerGroup  # (n_g,) int32, parameters and BatchNorm statistics of the teachers


def learning_from_teachers(
    config: Reassembly,
    assemble: Callable[[Server], Mapping[int, Teacher]],
    trains: Callable[[Part], bool],
) -> Algorithm:
    """Build a method from its server's way of assembling teachers.

    Args:
      config: the method's options.
      assemble: ``server -> {client id: Teacher}`` for all clients of ``server.cohort``; it runs between
        rounds, outside of jit.
      trains: which parts of assembled networks learn on the public images, see `parts.train`.
    """
    programs = 0

    def init(key, federation, hyper):
        public_images.require_for_server(federation, federation.models, config.bn_stats)
        if tokens := [model.name for model in federation.models if model.tokens]:
            raise JaxflError(
                f"Networks are re-assembled of blocks for images or vectors, but {tokens[0]} takes tokens; "
                "choose another method."
            )
        flat = [model.name for model in federation.models if 1 in model.shape[:2]]
        if flat and not config.labelled:
            raise JaxflError(
                f"labelled=false compares changed views of images, but {flat[0]} takes vectors or windows; "
                "use the labels of public rows."
            )
        if config.labelled and not federation.labelled:
            raise JaxflError(
                "The server uses the labels of public images, but those of --public are missing or may mean "
                "other classes than the clients'; add labelled=false, or labels=true to --public if they fit."
            )
        if config.stitch != "dense":
            for model in federation.models:
                require_flattening(model)
        clients = [len(group.id) for group in federation.groups]
        dtype = federation.mean.dtype
        return State(
            hyper,
            own_models.start(key, federation),
            per_group(lambda g: jnp.zeros((*g.rows.shape, *g.model.output), dtype), federation.groups),
            per_group(lambda n: jnp.zeros(n, bool), clients),
            per_group(lambda n: jnp.zeros(n, jnp.int32), clients),
        )

    def step(key, state, federation, cohort):
        def client(key, client, nothing, own):
            w, teacher_logits, has_teacher = own
            loss = from_teacher(client.model, teacher_logits, state.hyper.lam * has_teacher)
            trained = descend(loss, w, key, own_rows(client, state.hyper), state.hyper)
            return trained.weights, trained.loss

        has_teacher = per_group(lambda has: has.astype(federation.mean.dtype), state.has_teacher)
        own = gather(tuple(zip(state.weights, state.teacher_logits, has_teacher, strict=True)), cohort)
        trained, loss = zip(*map_clients(client, key, federation, cohort, own=own), strict=True)
        up = sent_up(cohort, per_group(tree.one, trained))
        down = sent_down(cohort, gather(state.teacher_size, cohort))
        state = state._replace(weights=scatter(state.weights, cohort, trained))
        return state, Info(loss, up, down, trained=own_models.predictors(trained))

    def host(key, state, federation, cohort):
        nonlocal programs
        before = compiled.programs
        hyper = jax.device_get(state.hyper)
        server = take_apart(key, hyper, trains, state.weights, state.has_teacher, federation, cohort)
        teachers = assemble(server)
        with timed(server.seconds, "teacher logits"):
            state = with_teachers(server, state, federation, teachers)
        programs += compiled.programs - before
        nobody = per_group(lambda slots: np.zeros(len(slots.mask), np.int32), cohort.groups)
        return state, Info(
            (),
            up=nobody,
            down=nobody,
            findings=findings(server, teachers, programs),
            teacher={
                client: partial(predictions, server, teacher.network) for client, teacher in teachers.items()
            },
        )

    return Algorithm(init, own_models.personal, step, own_models.personal, host)


def from_teacher(model, teacher_logits, lam):
    """Return the loss CE + lam KL(softmax teacher || softmax student), or the task's in their place.

    The teacher's logits (m, outputs) are on the client's training rows; lam () is 0 without a teacher.
    """
    task = model.task

    def loss(w, batch, key):
        logits, stats = forward(model, w, batch, key)
        away = task.apart(logits, task.soft(teacher_logits[batch.position]))
        return mean(task.losses(logits, batch.y) + lam * away, batch), stats

    return loss


def with_teachers(server: Server, state: State, federation, teachers: Mapping[int, Teacher]) -> State:
    """Return the state with some clients' new teachers: logits on their own rows, and sizes."""
    logits, has, sizes = (
        list(of_groups) for of_groups in (state.teacher_logits, state.has_teacher, state.teacher_size)
    )
    for client, teacher in teachers.items():
        g, i = server.networks[client].group, server.networks[client].position
        group = federation.groups[g]
        # All rows, also padding, so that all clients have the same number of batches.
        x = on_one_device(federation.inputs(group.rows[i]))
        said, operations = flops.on_host(predictions, server, teacher.network, x)
        flops.add(operations * int(group.size[i]) / len(x))
        logits[g] = logits[g].at[i].set(said)
        has[g] = has[g].at[i].set(True)
        sizes[g] = sizes[g].at[i].set(sum(tree.scalars(part.weights) for part in teacher.network))
    return state._replace(teacher_logits=tuple(logits), has_teacher=tuple(has), teacher_size=tuple(sizes))


def findings(server: Server, teachers: Mapping[int, Teacher], programs: int) -> dict:
    """Return what was assembled, and how long it took."""
    assembled = [
        {
            "client": client,
            "model": server.networks[client].size,
            "teacher": teacher.parameters,
            "phi": teacher.parameters / server.networks[client].size - 1,
            "candidates": len(teacher.alpha),
            "alpha": teacher.alpha.tolist(),
            "own": teacher.own,
            "blocks": teacher.blocks,
        }
        for client, teacher in teachers.items()
    ]
    phis = [found["phi"] for found in assembled]
    return {
        "assembled": assembled,
        "teacher size (phi)": {"mean": float(np.mean(phis)), "largest": float(np.max(phis))},
        "candidates": {"mean": float(np.mean([found["candidates"] for found in assembled]))},
        "compiled parts": {"programs": programs},
        "server seconds": server.seconds,
    }
