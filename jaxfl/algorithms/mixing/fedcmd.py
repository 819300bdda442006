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
    """FedCMD's state."""

    hyper: FedCMD  # the options
    shared: fl.Weights  # the global model, or the one trained last
    weights: fl.Weights  # the clients' models w_i (n, ...)
    personal_layers: jax.Array  # (blocks,) bool, (n, blocks) if clients differ; none in the first phase
    won: jax.Array  # (candidates,) int32, number of rounds that each candidate has won
    scores: jax.Array  # (candidates,), mean over the last cohort with votes
    phi: jax.Array | None  # (n, n), Phi of the pairs that have met, under options of the authors' code


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
        group, n, dtype = federation.group, len(federation.group.id), federation.mean.dtype
        if config.similarity == "updates":  # compares units, the last axis of every layer
            fl.class_means.require_classes_last(group.model, "FedCMD with similarity=updates")
        shared = fl.initial_weights(key, federation)
        won = jnp.zeros(len(names_of(group.model)), jnp.int32)
        return State(
            hyper,
            shared,
            fl.each_client(key, shared, federation),
            elected(group, won) & (K_p == 0),
            won,
            won.astype(dtype),
            jnp.zeros((n, n), dtype) if stores_similarity else None,
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
        """Return the personal layers of a cohort's clients, (blocks,) or (k, blocks)."""
        if differ:
            return fl.gather(state.personal_layers, cohort)
        layers = state.personal_layers
        return fl.tree.repeat(layers, len(cohort.slots.mask)) if in_turn else layers

    def assembled(state, federation, cohort):
        """Return the models that a cohort's clients start from (k, ...)."""
        everybody = config.tail == "softmax"
        pool = fl.everyone(federation, cohort) if everybody else fl.mixing.among(federation, cohort)
        model, shared, others = federation.group.model, state.shared, fl.gather(state.weights, pool)
        j = fl.mixing.places(pool.slots)

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
            w = assemble(model, shared, own, others, layers, mixing_weights(phi, i, j, config.tail))
            return fl.own_models.with_own_stats(w, own, config.bn_stats)

        own, i = fl.gather(state.weights, cohort), fl.mixing.places(cohort.slots)
        return each_by_its_layers(of_clients, layers_of(state, cohort), own, i)

    def receive(key, state, federation, cohort):
        return fl.own_models.predictor(assembled(state, federation, cohort))

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
            done = train_and_vote(key, client, w, state.hyper, selecting)
            return done.weights, done.tally, done.loss, done.steps == 0

        def visit(key, who, last, own):
            w, layers = own
            begun = fl.own_models.with_own_stats(
                with_personal(who.model, last, w, layers), w, config.bn_stats
            )
            outputs = client(key, who, None, begun)
            return fl.tree.where(fedavg, last, outputs[0]), outputs

        start = assembled(state, federation, cohort)
        if in_turn:
            own = start, layers_of(state, cohort)
            base, outputs = fl.visit_clients(visit, state.shared, key, federation, cohort, own)
        else:
            base, outputs = None, fl.map_clients(client, key, federation, cohort, own=start)
        trained, tally, loss, idle = outputs

        weights = fl.scatter(state.weights, cohort, trained)
        shared = fl.tree.weighted_mean(trained, fl.cohort_rows(federation, cohort), state.shared)
        if config.base == "stored":
            members = (~federation.group.newcomer).astype(federation.mean.dtype)
            base = fl.tree.weighted_mean(weights, members, shared)
        if config.base != "participants":
            shared = fl.tree.where(fedavg, shared, base)
        won = state.won + winner(cohort.slots, tally)
        leading = elected(federation.group, won)
        if config.selection == "fedavg":
            leading = leading & (t + 1 >= K_p)
            weights = restart(weights, shared, leading.any() & ~state.personal_layers.any())
        scores = mean_scores(cohort.slots, tally, state.scores)
        phi = update_similarity(state, federation, cohort, start, trained) if stores_similarity else None
        up, down = traffic(state, federation, cohort)
        state = State(state.hyper, shared, weights, leading, won, scores, phi)
        model, trained = federation.group.model, fl.own_models.predictor(trained)
        return state, fl.Info(loss, up, down, findings(state, model), trained, idle=idle)

    def restart(own, shared, now):
        """Return all clients' models (n, ...), reset to the global one if the second phase begins."""
        clients = len(jax.tree.leaves(own)[0])
        begun = fl.tree.where(now, fl.tree.repeat(shared, clients), own)
        return fl.own_models.with_own_stats(begun, own, config.bn_stats)

    def update_similarity(state, federation, cohort, start, trained):
        """Return Phi (n, n) with new entries for the pairs of the cohort."""
        i, model = fl.mixing.places(cohort.slots), federation.group.model
        after = jax.tree.map(jnp.subtract, trained, start) if config.similarity == "updates" else trained

        def of_clients(layers, own):
            return jnp.maximum(similar(model, own, after, layers), 0)

        new = each_by_its_layers(of_clients, layers_of(state, cohort), after)
        return fl.mixing.put_pairs(state.phi, i, i, new)

    def traffic(state, federation, cohort):
        """Return scalars sent up (model and, while voting, a layer's index) and down (no personal layers).

        Algorithm 2 broadcasts the last global model of the first phase to all clients, so everybody has l*;
        that broadcast does not count.
        """
        w, layers = fl.own_models.sent(state.shared, config.bn_stats), layers_of(state, cohort)
        names, present = federation.group.model.names, cohort.slots.mask.astype(jnp.int32)
        sizes = jnp.asarray([fl.tree.scalars((w.params[b], w.stats.get(b))) for b in names], jnp.int32)
        voted = ((cohort.round < K_p) & voting).astype(jnp.int32)
        received = jnp.where(layers, 0, jnp.broadcast_to(sizes, layers.shape)).sum(-1, dtype=jnp.int32)
        return present * (sizes.sum(dtype=jnp.int32) + voted), present * received

    return fl.each_architecture(fl.Algorithm(init, receive, step, fl.own_models.personal))


def voters(slots, tally):
    """Mark the voters, (k,) bool: the clients present, except those without a mini-batch to vote on."""
    return slots.mask & (tally.votes.sum(1) > 0)


def mean_scores(slots, tally, before):
    """Return the layers' scores, means over a round's voters; `before` if nobody votes."""
    return fl.tree.weighted_mean(tally.scores, voters(slots, tally).astype(before.dtype), before)


def findings(state, model):
    """Return scores, rounds won and the choice (a count if clients differ), by layer."""
    names = candidates(model, state.hyper.candidates)
    chosen = state.personal_layers.reshape(-1, len(model.names)).sum(0, dtype=jnp.int32)
    return {
        "score": dict(zip(names, state.scores, strict=True)),
        "rounds won": dict(zip(names, state.won, strict=True)),
        "personal": dict(zip(model.names, chosen, strict=True)),
    }


fedcmd = fl.Method("fedcmd", build, FedCMD)
