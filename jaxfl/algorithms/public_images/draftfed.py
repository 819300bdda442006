"""DraftFed: clients of any depth and width align their feature maps on images that all have.

Liao et al. 2023, "DraftFed: a draft-based personalized federated learning approach for heterogeneous
convolutional neural networks", IEEE Transactions on Mobile Computing, doi:10.1109/TMC.2023.3283557,
Algorithm 1. G is the global set, l_i the number of convolutions of client i's model, tap k the output of its
k-th convolution (see `jaxfl.models.blocks`). In a round

    drafts       D1_i = tap 1,  D2_i = tap l_i,  D3_i = logits, and tap l_j for every l_j < l_i   (eqs. 2, 5)
    targets      T1_i = mean_j match(D1_j)                                                        (eqs. 7, 8)
                 T2_i = mean of match(tap l_i of model j) over the j with l_j >= l_i                   (eq. 6)
                 T3_i = mean_j D3_j                                                                    (eq. 4)
    w_i  <- SGD over lam1 MSE(D1_i, T1_i) + lam2 MSE(D2_i, T2_i) + lam3 CE(softmax T3_i, D3_i) on G  (eq. 3)
    w_i  <- LocalSGD(w_i)

`match` resizes maps to client i's and keeps its number of channels, with zeros for missing ones. It is
linear, so it is applied to the sum over the clients of an architecture. Images of G are drawn once, before
the first round, from the classes whose numbers the clients' own classes also have (for CIFAR-10 the first ten
of CIFAR-100). If fewer than |G| images have such a class, they repeat; if none has, all are used. A client
deploys w_i and receives nothing else before a round.

The paper's eq. 2 takes drafts of local images and its eq. 6 the clients' own shallower layers. Its text means
the equations above. So does Algorithm 1, except that no D2 counts towards a T2 there, which leaves the
deepest clients without one. Its eq. 4 has a cross-entropy of two draft vectors; we take that of the softmax.
The paper does not give optimiser, rates or rounds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl import fl


@fl.options
class DraftFed(fl.Training):
    """Options of DraftFed."""

    lam1: float = fl.within("[0, inf)", 1.0)
    """Weight of the first convolution's draft."""
    lam2: float = fl.within("[0, inf)", 1.0)
    """Weight of the last convolution's draft."""
    lam3: float = fl.within("[0, inf)", 1.0)
    """Weight of the logits' draft."""
    global_size: int = fl.within("[1, inf)", 512)
    """|G|, images of the global set; at most as many as there are public images."""
    draft_epochs: int = fl.within("[0, inf)", 1)
    """Passes over the global set in a round."""
    draft_batch: int = fl.within("[1, inf)", 128)
    """Images per mini-batch of draft learning."""


class State(NamedTuple):
    """The clients' models per group (n_g, ...), and the order (P,) in which public images are drawn for G."""

    hyper: DraftFed
    weights: fl.PerGroup
    order: jax.Array


class Drafts(NamedTuple):
    """A client's drafts on the global set, or its targets; a model without convolutions has only logits."""

    taps: dict[int, jax.Array]  # {depth: (|G|, H, W, C)}, outputs of convolutions
    logits: jax.Array  # (|G|, outputs)


def build(config: DraftFed) -> fl.Algorithm:
    """Compute drafts, aggregate them, learn from them, and train locally."""

    def init(key, federation, hyper):
        return State(hyper, fl.own_models.start(key, federation), fl.public_images.shuffled(key, federation))

    def step(key, state, federation, cohort):
        hyper = state.hyper
        rows = federation.public[global_set(state.order, federation, config.global_size)]

        def compute(key, client, nothing, w):
            depths = supplied(client.model, federation.models)

            def on_batch(x):
                logits, _, taps = client.model.apply_with_taps(w.params, w.stats, x, depths, train=False)
                return Drafts(dict(zip(depths, taps, strict=True)), logits)

            guest = fl.visiting(client, rows)
            return fl.sweep(on_batch, guest.rows, guest.size, federation)

        def learn(key, client, targets, w):
            w = fl.descend(
                draft_loss(client.model, targets, hyper),
                w,
                key,
                fl.public_rows(rows, client),
                hyper,
                epochs=config.draft_epochs,
                batch_size=config.draft_batch,
                phase=1,
            ).weights
            trained = fl.descend(fl.task_loss(client.model), w, key, fl.own_rows(client, hyper), hyper)
            return trained.weights, trained.loss, trained.steps == 0

        own = fl.gather(state.weights, cohort)
        drafts = fl.map_clients(compute, key, federation, cohort, own=own)
        present = fl.per_group(lambda n: n > 0, fl.cohort_rows(federation, cohort))
        targets = aggregate(drafts, federation.models, present)
        outputs = fl.map_clients(learn, key, federation, cohort, targets, own)
        trained, loss, idle = zip(*outputs, strict=True)
        return State(hyper, fl.scatter(state.weights, cohort, trained), state.order), fl.Info(
            loss,
            up=fl.sent_up(cohort, fl.per_group(fl.tree.one, drafts)),
            down=fl.sent_down(cohort, targets),
            trained=fl.own_models.predictors(trained),
            idle=idle,
        )

    return fl.Algorithm(init, fl.own_models.personal, step, fl.own_models.personal, wire=("rows",))


def global_set(order, federation: fl.Federation, size: int):
    """Return G, (|G|,) int32 places in the list of public images: the first ones of `order` (P,) that fit.

    Images fit if their label in their data set is below the clients' number of classes. If fewer than `size`
    fit, these repeat in turn; if none fit, all are used.
    """
    fits = federation.labels[federation.public[order]] < federation.models[0].classes
    count = jnp.where(fits.any(), fits.sum(dtype=jnp.int32), len(order))
    places = jnp.arange(min(size, len(order)), dtype=jnp.int32) % count
    return order[jnp.argsort(~fits)][places]


def ends(model: fl.Model) -> tuple[int, ...]:
    """Return the depths of the taps that a client aligns: its first and its last convolution."""
    return tuple(sorted({1, model.convolution_count})) if model.convolution_count else ()


def supplied(model: fl.Model, models: tuple[fl.Model, ...]) -> tuple[int, ...]:
    """Return the depths of the taps that a client sends: its own two, and the last of shallower models."""
    depths = {other.convolution_count for other in models}
    lasts = {depth for depth in depths if 0 < depth < model.convolution_count}
    return tuple(sorted({*ends(model), *lasts}))


def aggregate(drafts: fl.PerGroup, models: tuple[fl.Model, ...], present: fl.PerGroup) -> fl.PerGroup:
    """Return every group's targets: means over the clients present (k_g,) that have such a draft."""
    counts = [of_group.sum() for of_group in present]
    sums = fl.per_group(fl.tree.weighted_sum, present, drafts)

    def mean_over(groups, of_group):
        total = fl.tree.total(of_group(sums[g]) for g in groups)
        return total / jnp.maximum(fl.tree.total(counts[g] for g in groups), 1).astype(total.dtype)

    def target(model, own):
        taps = {}
        for depth in ends(model):
            shape = own.taps[depth].shape[1:]
            havers = [g for g in range(len(models)) if depth in drafts[g].taps]
            taps[depth] = mean_over(havers, lambda s: fl.maps.match(s.taps[depth], shape))  # noqa: B023
        return Drafts(taps, mean_over(range(len(models)), lambda s: s.logits))

    return fl.per_group(target, models, sums)


def draft_loss(model: fl.Model, targets: Drafts, hyper: DraftFed):
    """Return the loss between a model's drafts and their targets (eq. 3), in the form `descend` takes."""
    terms = ((1, hyper.lam1), (model.convolution_count, hyper.lam2)) if model.convolution_count else ()

    def loss(w, batch, key):
        logits, stats, taps = model.apply_with_taps(
            w.params, w.stats, batch.x, ends(model), train=True, key=key, mask=batch.mask
        )
        towards = jax.nn.softmax(targets.logits[batch.position])
        value = hyper.lam3 * fl.mean(optax.softmax_cross_entropy(logits, towards), batch)
        drafts = dict(zip(ends(model), taps, strict=True))
        for depth, lam in terms:  # a single convolution counts twice
            away = jnp.square(drafts[depth] - targets.taps[depth][batch.position]).mean((1, 2, 3))
            value += lam * fl.mean(away, batch)
        return value, stats

    return loss


draftfed = fl.Method("draftfed", build, DraftFed, needs=("public", "classes"))
