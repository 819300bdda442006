"""DraftFed (Liao et al. 2023, Algorithm 1 and eqs. 4-7): drafts on images that everybody has.

The round's `cohort.public` is the global set G, the same in every round.
"""

import math
from typing import NamedTuple

import numpy as np

from reference import nets
from reference.training import log_softmax, plain_loss, sgd, softmax


class Draft(NamedTuple):
    """What a network makes of images, or what it should make of them.

    Args:
      depth: l, its convolutions.
      taps: {k: (n, H, W, C)}, the output of convolution k = 1..l, of targets that of 1 and l.
      logits: (n, classes).
    """

    depth: int
    taps: dict
    logits: np.ndarray


def start(clients, initial):
    """Everybody has a model of its own."""
    return {"own": {i: initial[client.group] for i, client in enumerate(clients)}}


def step(state, clients, cohort, options):
    """Draft, learn from the targets, learn alone. The loss is that of the latter."""
    own, losses = dict(state["own"]), {}
    drafts = {i: draft(clients[i].net, own[i], cohort.public)[0] for i in cohort.draws}
    for i, draw in cohort.draws.items():
        client = clients[i]
        loss = distance(client.net, cohort.public, target(i, drafts), options)
        w, _ = sgd(own[i], loss, draw["draft"], options, batch_size=options.draft_batch)
        own[i], losses[i] = sgd(w, plain_loss(client), draw["train"], options)
    return {"own": own}, losses


def draft(net, weights, x):
    """All taps and the logits; and `back`, from gradients (taps, logits) to those with respect to weights."""
    taps, backs = {}, []
    for name, layers in nets.BLOCKS[net].items():
        for place, layer in enumerate(layers):
            x, back = layer(weights, x)
            backs.append((None, back))
            if name.startswith("conv") and place == 0:
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
    """T1_i, T2_i and T3_i: means over the clients that have such a draft, {client: Draft}."""
    own, taps = drafts[i], {}
    for depth in {1, own.depth} if own.depth else ():
        shape = own.taps[depth].shape[1:]
        taps[depth] = np.mean([match(d.taps[depth], shape) for d in drafts.values() if d.depth >= depth], 0)
    return Draft(own.depth, taps, np.mean([d.logits for d in drafts.values()], 0))


def match(maps, shape):
    """Eq. 7: maps (n, H, W, C) in another height and width, with the first channels or zeros at the end."""
    height, width, channels = shape
    maps = resized(resized(maps, 1, height), 2, width)[..., :channels]
    missing = np.zeros((*maps.shape[:3], channels - maps.shape[3]))
    return np.concatenate([maps, missing], 3)


def resized(maps, axis, new):
    """One axis by PyTorch's `adaptive_avg_pool2d` or bilinear `interpolate` (align_corners=False)."""
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
    """Eq. 4: lam1 MSE(D1, T1) + lam2 MSE(D2, T2) + lam3 CE(softmax T3, D3), as `sgd` takes it."""

    def loss(weights, rows):
        found, back = draft(net, weights, x[rows])
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


def scores(state, clients, draws, options, x):
    """A client deploys its own model and receives no other."""
    own = [nets.logits(client.net, state["own"][i], x) for i, client in enumerate(clients)]
    return {"received": own, "deployed": own}
