"""DraftFed (Liao et al. 2023, Algorithm 1 and eqs. 4-7): drafts on images that all clients have.

The round's `cohort.public` is the global set G, the same in every round.
"""

import math
from typing import NamedTuple

import jax
import numpy as np
import pytest
from conftest import CLASSES, PUBLIC, SHAPE, assert_same, tiny_cnn
from reference import nets, own_models
from reference.training import descend, log_softmax, plain_loss, softmax

from jaxfl.algorithms.public_images.draftfed import global_set
from jaxfl.mechanisms.public_images import shuffled
from jaxfl.models import zoo
from methods import recording
from methods.cases import CONVOLVING, SMALL, Case, Comparison, local_statistics
from methods.recording import orders
from methods.rounds import TRAINING, billed, convolving, federated, run


class Draft(NamedTuple):
    """A network's outputs on images, or their targets.

    Args:
      depth: l, the number of its convolutions.
      taps: {k: (n, H, W, C)}, the output of convolution k = 1..l; targets have only 1 and l.
      logits: (n, classes).
    """

    depth: int
    taps: dict
    logits: np.ndarray


def step(state, clients, cohort, options):
    """Draft, learn from the targets, learn alone. The reported loss is that of learning alone."""
    own, losses = dict(state["own"]), {}
    drafts = {i: draft(clients[i].net, own[i], cohort.public)[0] for i in cohort.draws}
    for i, draw in cohort.draws.items():
        client = clients[i]
        loss = distance(client.net, cohort.public, target(i, drafts), options)
        w, _ = descend(own[i], loss, draw["draft"], options, batch_size=options.draft_batch)
        own[i], losses[i] = descend(w, plain_loss(client), draw["train"], options)
    return {"own": own}, losses


def draft(net, weights, x, train=False):
    """Return all taps and the logits; and `back`, from gradients (taps, logits) to those of the weights."""
    taps, backs = {}, []
    for name, layers in nets.BLOCKS[net].items():
        for place, layer in enumerate(layers):
            x, back = layer(weights, x, train)
            backs.append((None, back))
            if name.startswith("conv") and layers[place + 1 :][:1] == (nets.relu,):  # after a norm, if any
                taps[len(taps) + 1] = x
                backs[-1] = len(taps), back

    def back(dtaps, dx):
        gradients = {}
        for depth, of_layer in reversed(backs):
            dx, new = of_layer(dx + dtaps[depth] if depth in dtaps else dx)
            gradients |= new
        return gradients

    return Draft(len(taps), taps, x), back


def target(i, drafts):
    """Return T1_i, T2_i and T3_i: means over the clients that have such a draft, {client: Draft}."""
    own, taps = drafts[i], {}
    for depth in {1, own.depth} if own.depth else ():
        shape = own.taps[depth].shape[1:]
        taps[depth] = np.mean([match(d.taps[depth], shape) for d in drafts.values() if d.depth >= depth], 0)
    return Draft(own.depth, taps, np.mean([d.logits for d in drafts.values()], 0))


def match(maps, shape):
    """Resize maps (n, H, W, C) by eq. 7; keep the first channels, or add zeros at the end."""
    height, width, channels = shape
    maps = resized(resized(maps, 1, height), 2, width)[..., :channels]
    missing = np.zeros((*maps.shape[:3], channels - maps.shape[3]))
    return np.concatenate([maps, missing], 3)


def resized(maps, axis, new):
    """Resize one axis by PyTorch's `adaptive_avg_pool2d` or bilinear `interpolate` (align_corners=False)."""
    x = np.moveaxis(maps, axis, 0)
    old, pixels = len(x), []
    for i in range(new):
        if new <= old:
            pixels.append(x[math.floor(i * old / new) : math.ceil((i + 1) * old / new)].mean(0))
        else:
            place = max((i + 0.5) * old / new - 0.5, 0)
            low = int(place)
            high = min(low + 1, old - 1)
            pixels.append(x[low] + (place - low) * (x[high] - x[low]))
    return np.moveaxis(np.stack(pixels), 0, axis)


def distance(net, x, target, options):
    """Return eq. 3: lam1 MSE(D1, T1) + lam2 MSE(D2, T2) + lam3 CE(softmax T3, D3), as `descend` takes it."""

    def loss(weights, rows):
        found, back = draft(net, weights, x[rows], train=True)
        truth = softmax(target.logits[rows])
        value = -options.lam3 * (truth * log_softmax(found.logits)).sum(1).mean()
        dlogits = options.lam3 * (softmax(found.logits) - truth) / len(rows)
        dtaps = {}
        ends = ((1, options.lam1), (found.depth, options.lam2)) if found.depth else ()
        for depth, lam in ends:
            away = found.taps[depth] - target.taps[depth][rows]
            value += lam * (away**2).mean()
            dtaps[depth] = dtaps.get(depth, 0) + 2 * lam * away / away.size
        return value, back(dtaps, dlogits)

    return loss


# ---- what connects it with jaxfl


def draws(key, client, models, options):
    """Draw orders for the local epochs, and for the epochs of draft learning on the global set."""
    alone, drafting = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
    images = min(options.global_size, PUBLIC)
    return {
        "train": orders(alone, client.size, options.epochs),
        "draft": orders(drafting, images, options.draft_epochs),
    }


def drawn_once(init_key, round_key, federation, options):
    """Return the rows of the global set."""
    return federation.public[global_set(shuffled(init_key, federation), federation, options.global_size)]


def traffic(model, models, t):
    """Count logits and, where the tests' network has a convolution, its maps of 8 x 8 pixels."""
    channels = sum(block.module.features for block in model.blocks[: model.convolution_count])
    return PUBLIC * (CLASSES + 64 * channels)


# Two and three convolutions; maps of one depth have different sizes.
OF_TWO = tiny_cnn("mcmahan", (2, 2), (4, 2))
LATE = tiny_cnn("late", (3, 1), (3, 2), kernel=5)
DEEP = tiny_cnn("deep", (4, 2), (5, 2), (3, 2))
NONE = zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=5)


@pytest.mark.long
def without_draft_learning_it_is_local():
    nothing = {"lam1": 0.0, "lam2": 0.0, "lam3": 0.0, "weight_decay": 0.0}  # decay would still move weights
    for options in TRAINING | {"draft_epochs": 0}, TRAINING | nothing:
        alone = TRAINING | {"weight_decay": options["weight_decay"]}
        for (draftfed, report), (local, expected) in zip(
            run("draftfed", convolving(), **options), run("local", convolving(), **alone), strict=True
        ):
            assert_same(draftfed.weights, local.kept, tolerance=1e-6)
            assert_same(report.loss, expected.loss, tolerance=1e-6)


def supplements_are_sent_up_and_targets_of_the_own_drafts_down():
    """A draft is a convolution's output before pooling; the deeper network supplements its second."""
    federation = federated((OF_TWO, 3), (DEEP, 2))
    up, down, _ = billed("draftfed", federation, global_size=7, **TRAINING)
    of_two = 7 * (8 * 8 * 2 + 4 * 4 * 4 + CLASSES)
    deep, supplement = 7 * (8 * 8 * 4 + 2 * 2 * 3 + CLASSES), 7 * (4 * 4 * 5)
    assert [sent.tolist() for sent in up] == [[of_two] * 3, [deep + supplement] * 2]
    assert [received.tolist() for received in down] == [[of_two] * 3, [deep] * 2]


OPTIONS = {"global_size": 7, "draft_epochs": 2, "draft_batch": 3, "lam1": 0.6, "lam2": 0.9, "lam3": 0.4}

draftfed = Case(
    "draftfed",
    own_models.start,
    step,
    own_models.scores,
    draws=draws,
    view=recording.own_models,
    images=drawn_once,
    traffic=traffic,
    short={"draft_batch": 4},
    comparisons={
        "": Comparison(
            OPTIONS,
            [("lam1", 0.61), ("lam2", 0.91), ("lam3", 0.41), ("draft_batch", 4)],
            ((OF_TWO, 3), (DEEP, 2)),
        ),
        "four architectures": Comparison(
            OPTIONS, [("lam1", 0.61), ("draft_batch", 4)], ((NONE, 1), (OF_TWO, 2), (LATE, 1), (DEEP, 1))
        ),
        "BatchNorm": Comparison(OPTIONS, [("momentum", 0.51)], ((SMALL, 2), (CONVOLVING, 3))),
        "local statistics": local_statistics(**OPTIONS),
    },
    reductions=(
        without_draft_learning_it_is_local,
        supplements_are_sent_up_and_targets_of_the_own_drafts_down,
    ),
)
