"""FedCMD: clients vote for the layer that is personal; those after it are mixed by its similarity.

Chen et al. 2024, "Towards optimal customized architecture for heterogeneous federated learning with
contrastive cloud-edge model decoupling", IEEE Transactions on Computers; Algorithms 1-3. w_i is client i's
model, phi_i its personal layer l*, n_i the number of its training rows, K_p = `selection_rounds`.

Rounds 1..K_p: FedAvg. After its training a client votes for the layer with the least score over its own rows
(eq. 6, see `fedcmd_score`). The round's choice and finally l* are majorities. Then all clients start from the
global model, and in a round with the cohort S_t client i trains (eqs. 2, 7 and 8)

    layers before l*   sum_j n_j w_j / sum_j n_j                 over the last round's participants
    layer l*           phi_i
    layers after l*    sum_j Phi_ij w_j / sum_j Phi_ij           over j in S_t
                       Phi_ij = max(0, cos(phi_i, phi_j)),  Phi_ii = 1

If every answer of round K_p is lost, one more round of FedAvg follows, in which nobody votes. The personal
layer is a traced value, so both phases are one compiled program. Each architecture votes separately. A client
receives the model assembled as above and deploys its own w_i after training, which in rounds 1..K_p is the
initial one until it takes part. Ties go to the earlier layer; an architecture for which nobody has voted thus
gets its first candidate. When all clients are scored, models are mixed over all of them.

Candidates. The paper scores "each layer output", its figures and the code only the dense layers, and so do
we. Then networks whose only dense layer is the classifier (ResNets, DenseNets, MobileNets) have nothing to
vote on: there it is K_p rounds of FedAvg and then FedPer's split. In ``vit``, which the paper does not have,
the embedding and every encoder are candidates as well.

Paper and code. Where they differ we follow the paper; the other values of options are the code's.
Algorithm 3 mixes at upload, but by its indices eq. 7 mixes at download, and so do we.

The authors' program hands its clients' models out as live parameters, without a copy. Once a client has
taken part, what is stored for it is whatever was trained last, and nothing is averaged. That is
``base="last"``: within an architecture the clients of a round train one after another, in the order of ids.
Each takes all layers but its own phi_i from the one before, the first one those of the round before, and
whoever is scored those trained last. `tail` and `similarity` have no effect then. Voting rounds follow
`selection`: with "fedavg" they are plain FedAvg, whose last mean is the first base; with "personal", as in
the program, they are sequential too. (The program goes in the order in which clients are drawn, and blends
the initial model in as long as clients have not taken part.) Simulated seconds assume that clients work in
parallel.

`personal` fixes one or several layers (``fc1+classifier``) instead of voting, after the same K_p rounds. Phi
then compares all of them, and "before" means before the first. With ``fc2/classifier`` clients differ
(Section III-C): l_i replaces l* in the equations, client 0 has fc2, client 1 the classifier, client 2 fc2,
and Phi_ij compares layers l_i. The paper gives the classifier to the clients that do badly with fc2. The
authors' results keep BatchNorm's statistics on the clients (``bn_stats="local"``).
"""

import itertools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl
from jaxfl.algorithms.mixing.fedcmd_layers import (
    assemble,
    cosine,
    cosine_of_outputs,
    each_by_its_layers,
    mixing_weights,
    with_personal,
)
from jaxfl.algorithms.mixing.fedcmd_score import candidates, train_and_vote


@fl.options
class FedCMD(fl.Training):
    """Options of FedCMD."""

    selection_rounds: int = fl.within("[0, inf)", 20)
    """K_p, rounds of FedAvg in which clients vote for the layer."""
    personal: str = "vote"
    """The personal layer: vote, a name (fc2), or several names (fc1+classifier); with fc2/classifier clients
    differ and get these in turn."""
    candidates: Literal["dense", "all"] = "dense"
    """Layers to vote for: the dense ones, or all that have weights."""
    vote_on: Literal["rows", "batches", "pooled"] = "rows"
    """What a client votes on: once, after training, all its rows; or as it trains every mini-batch, whose
    majority is its vote, or (pooled) each of which counts in the round."""
    score_scale: Literal["none", "min-max"] = "none"
    """Tensors are scored as they are, or scaled to [0, 1]."""
    distance: Literal["wasserstein", "mean"] = "wasserstein"
    """Distance of two distributions: by means and deviations, or by means only."""
    score: Literal["signed", "absolute"] = "signed"
    """Whether a layer's two differences keep their sign (eq. 6) or not."""
    ties: Literal["earlier", "fc2"] = "earlier"
    """Layer that gets a vote if several have the least score: the earlier one, or fc2."""
    selection: Literal["fedavg", "personal"] = "fedavg"
    """Voting rounds: plain FedAvg, or with the layer that leads so far already personal."""
    base: Literal["participants", "stored", "last"] = "participants"
    """Layers before l*: mean over the last round's participants, uniform mean over all stored models, or as
    the client before has trained them, those after l* too (the last two not in voting rounds of plain
    FedAvg)."""
    tail: Literal["cosine", "softmax", "uniform"] = "cosine"
    """Weights after l*: Phi over the cohort, softmax of Phi over all clients, or equal weights."""
    similarity: Literal["parameters", "updates"] = "parameters"
    """Phi compares personal layers, or their changes in the last common round (mean over outputs)."""


class State(NamedTuple):
    """FedCMD's state, per group except for `hyper` and `phi`.

    Args:
      hyper: the options.
      shared: the global model, or the one trained last.
      weights: the clients' models w_i (n_g, ...).
      personal_layers: (blocks,) bool, (n_g, blocks) if clients differ; none in the first phase.
      won: (candidates,) int32, number of rounds that each candidate has won.
      scores: (candidates,), mean over the last cohort with votes of the group.
      phi: (N, N), Phi of the pairs that have met, under the options of the authors' code; or None.
    """

    hyper: FedCMD
    shared: fl.PerGroup
    weights: fl.PerGroup
    personal_layers: fl.PerGroup
    won: fl.PerGroup
    scores: fl.PerGroup
    phi: jax.Array | None


def build(config: FedCMD) -> fl.Algorithm:
    """Assemble, train and vote, average, and elect."""
    voting, K_p = config.personal == "vote", config.selection_rounds
    in_turn = config.base == "last"
    stores_similarity = not in_turn and (config.tail == "softmax" or config.similarity == "updates")
    similar = cosine_of_outputs if config.similarity == "updates" else cosine
    differ = "/" in config.personal
    if voting and K_p == 0:
        raise fl.JaxflError(
            "fedcmd cannot vote in 0 rounds; raise --selection-rounds, or fix the layer by --personal LAYER."
        )

    def names_of(model):
        return candidates(model, config.candidates)

    def init(key, federation, hyper):
        if config.similarity == "updates":  # compares units, the last axis of every layer
            for model in federation.models:
                fl.class_means.require_classes_last(model, "FedCMD with similarity=updates")
        dtype, clients = federation.mean.dtype, federation.clients
        shared = fl.initial_weights(key, federation)
        own = fl.each_client(key, shared, federation)
        won = fl.per_group(lambda model: jnp.zeros(len(names_of(model)), jnp.int32), federation.models)
        return State(
            hyper,
            shared,
            own,
            fl.per_group(lambda group, won: elected(group, won) & (K_p == 0), federation.groups, won),
            won,
            fl.per_group(lambda won: won.astype(dtype), won),
            jnp.zeros((clients, clients), dtype) if stores_similarity else None,
        )

    def elected(group, won):
        """Return the personal layers, see `State`: the fixed ones, or the one that has won most rounds."""
        model = group.model
        if voting:
            places = jnp.asarray([model.names.index(name) for name in names_of(model)], jnp.int32)
            return jnp.arange(len(model.names), dtype=jnp.int32) == places[won.argmax()]
        choices = [choice.split("+") for choice in config.personal.split("/")]
        for name in itertools.chain(*choices):
            if name not in model.names:
                raise fl.JaxflError(f"{model.name} has no layer {name!r}; {fl.nearest(name, model.names)}")
        layers = jnp.asarray([[name in chosen for name in model.names] for chosen in choices])
        return layers[group.id % len(choices)] if differ else layers[0]

    def layers_of(state, cohort):
        """Return the personal layers of a cohort's clients, (blocks,) or (k_g, blocks)."""
        if differ:
            return fl.gather(state.personal_layers, cohort)
        if not in_turn:
            return state.personal_layers
        return fl.per_group(
            lambda layers, slots: fl.tree.repeat(layers, len(slots.mask)),
            state.personal_layers,
            cohort.groups,
        )

    def assembled(state, federation, cohort):
        """Return the models that a cohort's clients start from, per group (k_g, ...)."""
        pool = (
            fl.everyone(federation, cohort)
            if config.tail == "softmax"
            else fl.mixing.among(federation, cohort)
        )

        def of_group(model, shared, own, others, layers, i, j):
            def of_clients(layers, own, i):
                if in_turn:
                    w = with_personal(model, fl.tree.repeat(shared, len(i)), own, layers)
                    return fl.own_models.with_own_stats(w, own, config.bn_stats)
                if config.tail == "uniform":
                    phi = jnp.ones((len(i), len(j)), federation.mean.dtype)
                elif stores_similarity:
                    phi = fl.mixing.pairs(state.phi, i, j)
                else:
                    phi = jnp.maximum(cosine(model, own, others, layers), 0)
                weights = mixing_weights(phi, i, j, federation.clients, config.tail)
                w = assemble(model, shared, own, others, layers, weights)
                return fl.own_models.with_own_stats(w, own, config.bn_stats)

            return each_by_its_layers(of_clients, layers, own, i)

        return fl.per_group(
            of_group,
            federation.models,
            state.shared,
            fl.gather(state.weights, cohort),
            fl.gather(state.weights, pool),
            layers_of(state, cohort),
            fl.mixing.ids(federation, cohort),
            fl.mixing.ids(federation, pool),
        )

    def receive(key, state, federation, cohort):
        return fl.own_models.predictors(assembled(state, federation, cohort))

    def winner(slots, tally):
        """Return the layer that wins a round: the cohort's tallies (k, ...) -> (candidates,) int32."""
        votes = tally.votes
        if config.vote_on != "pooled":
            votes = jax.nn.one_hot(votes.argmax(1), votes.shape[1], dtype=jnp.int32)
        total = jnp.where(voters(slots, tally)[:, None], votes, 0).sum(0, dtype=jnp.int32)
        anybody = (total.sum() > 0).astype(jnp.int32)
        return anybody * jax.nn.one_hot(total.argmax(), len(total), dtype=jnp.int32)

    def step(key, state, federation, cohort):
        if K_p >= cohort.rounds:
            raise fl.JaxflError(
                f"fedcmd's first phase has {K_p} rounds and needs a longer run than {cohort.rounds}; lower "
                "--selection-rounds or raise --rounds."
            )
        t, selecting = cohort.round, cohort.round < K_p
        fedavg = selecting & (config.selection == "fedavg")

        def client(key, client, nothing, w):
            done = train_and_vote(key, client, w, federation, state.hyper, selecting)
            return done.weights, done.tally, done.loss

        def visit(key, who, last, own):
            w, layers = own
            begun = fl.own_models.with_own_stats(
                with_personal(who.model, last, w, layers), w, config.bn_stats
            )
            outputs = client(key, who, None, begun)
            return fl.tree.where(fedavg, last, outputs[0]), outputs

        start = assembled(state, federation, cohort)
        if in_turn:
            own = tuple(zip(start, layers_of(state, cohort), strict=True))
            base, outputs = fl.visit_clients(visit, state.shared, key, federation, cohort, own)
        else:
            base, outputs = None, fl.map_clients(client, key, federation, cohort, own=start)
        trained, tallies, loss = zip(*outputs, strict=True)

        weights = fl.scatter(state.weights, cohort, trained)
        shared = fl.per_group(
            fl.tree.weighted_mean, trained, fl.cohort_rows(federation, cohort), state.shared
        )
        if config.base == "stored":
            members = fl.per_group(
                lambda group: (~group.newcomer).astype(federation.mean.dtype), federation.groups
            )
            base = fl.per_group(fl.tree.weighted_mean, weights, members, shared)
        if config.base != "participants":
            shared = fl.tree.where(fedavg, shared, base)
        won = fl.per_group(
            lambda slots, won, tally: won + winner(slots, tally), cohort.groups, state.won, tallies
        )
        leading = fl.per_group(elected, federation.groups, won)
        if config.selection == "fedavg":
            leading = fl.per_group(lambda layers: layers & (t + 1 >= K_p), leading)
            first = fl.per_group(
                lambda now, before: now.any() & ~before.any(), leading, state.personal_layers
            )
            weights = fl.per_group(restart, weights, shared, first)
        scores = fl.per_group(mean_scores, cohort.groups, tallies, state.scores)
        phi = update_similarity(state, federation, cohort, start, trained) if stores_similarity else None
        up, down = traffic(state, federation, cohort)
        state = State(state.hyper, shared, weights, leading, won, scores, phi)
        return state, fl.Info(loss, up, down, findings(state, federation), fl.own_models.predictors(trained))

    def restart(own, shared, now):
        """Return all clients' models (n, ...), reset to the global one if the second phase begins."""
        clients = len(jax.tree.leaves(own)[0])
        begun = fl.tree.where(now, fl.tree.repeat(shared, clients), own)
        return fl.own_models.with_own_stats(begun, own, config.bn_stats)

    def update_similarity(state, federation, cohort, start, trained):
        """Return Phi (N, N) with new entries for the pairs of the cohort."""

        def of_group(model, before, after, layers):
            if config.similarity == "updates":
                after = jax.tree.map(jnp.subtract, after, before)

            def of_clients(layers, own):
                return jnp.maximum(similar(model, own, after, layers), 0)

            return each_by_its_layers(of_clients, layers, after)

        new = fl.per_group(of_group, federation.models, start, trained, layers_of(state, cohort))
        phi = state.phi
        for of_pairs, i in zip(new, fl.mixing.ids(federation, cohort), strict=True):
            phi = fl.mixing.put_pairs(phi, i, i, of_pairs)
        return phi

    def traffic(state, federation, cohort):
        """Return scalars sent up (model and, while voting, a layer's index) and down (no personal layers).

        Algorithm 2 broadcasts the last global model of the first phase to all clients, so everybody has l*;
        that broadcast does not count.
        """

        def scalars(model, w):
            stats = {} if config.bn_stats == "local" else w.stats
            sizes = [fl.tree.scalars((w.params[name], stats.get(name))) for name in model.names]
            return jnp.asarray(sizes, jnp.int32)

        of_blocks = fl.per_group(scalars, federation.models, state.shared)
        present = fl.per_group(lambda slots: slots.mask.astype(jnp.int32), cohort.groups)
        voted = ((cohort.round < K_p) & voting).astype(jnp.int32)
        up = fl.per_group(lambda mask, sizes: mask * (sizes.sum(dtype=jnp.int32) + voted), present, of_blocks)

        def received(mask, sizes, layers):
            sizes = jnp.broadcast_to(sizes, layers.shape)
            return mask * jnp.where(layers, 0, sizes).sum(-1, dtype=jnp.int32)

        return up, fl.per_group(received, present, of_blocks, layers_of(state, cohort))

    return fl.Algorithm(init, receive, step, fl.own_models.personal)


def voters(slots, tally):
    """Mark the voters, (k,) bool: the clients present, except those without a mini-batch to vote on."""
    return slots.mask & (tally.votes.sum(1) > 0)


def mean_scores(slots, tally, before):
    """Return the layers' scores, means over a round's voters; `before` if nobody votes."""
    return fl.tree.weighted_mean(tally.scores, voters(slots, tally).astype(before.dtype), before)


def findings(state, federation):
    """Return scores, rounds won and the choice (a count if clients differ), by layer and architecture."""
    found = {}
    of_groups = zip(federation.models, state.scores, state.won, state.personal_layers, strict=True)
    for model, scores, won, layers in of_groups:
        suffix = f", {model.name}" if len(federation.models) > 1 else ""
        names = candidates(model, state.hyper.candidates)
        found["score" + suffix] = dict(zip(names, scores, strict=True))
        found["rounds won" + suffix] = dict(zip(names, won, strict=True))
        chosen = layers.reshape(-1, len(model.names)).sum(0, dtype=jnp.int32)
        found["personal" + suffix] = dict(zip(model.names, chosen, strict=True))
    return found


fedcmd = fl.Method("fedcmd", build, FedCMD)
