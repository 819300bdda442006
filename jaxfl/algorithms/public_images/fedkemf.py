"""FedKEMF: a small network travels, and learns from and teaches every client's own.

Yu et al. 2022, "Resource-aware Federated Learning using Knowledge Extraction and Multi-model Fusion",
arXiv:2208.07978. g is the knowledge network, the same for all clients, w_i client i's own model of any
architecture; p_i and q_i are the soft predictions of w_i and g_i, D_r the round's public images, S_t the
cohort:

    (w_i, g_i) <- LocalSGD from g_i = g, both at once:
                  w_i over CE + KL(q_i || p_i), in which q_i is held constant,
                  g_i over CE + KL(p_i || q_i), in which p_i is
    t           = softmax(e / T),   e the mean over S_t of the logits g_i(D_r), or their maximum; or the share
                  of S_t that says each class (a vote)
    g          <- Adam over T^2 KL(t || softmax(g(D_r) / T)), from sum_i n_i g_i / sum_i n_i

What we know of the paper does not say where the server's training starts. Here it starts from the mean, as in
FedDF, because from the server's previous g (`server_start="previous"`) a pass over few images teaches it
little. The authors' code does start there, towards the mean of the clients' probabilities, and its clients
step w_i before g_i learns from it. It also compares logits by their squared distance and uses labels on the
server; we follow the paper, and public images need no labels. The learning rate of local training is constant
within a round, the authors' falls as a cosine. The server passes over D_r once, in pFedClub three times
(`server_epochs`). The reported local loss is the sum over both networks. A client deploys w_i and never sends
it; g travels both ways.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl
from jaxfl.models import zoo


@fl.options
class FedKEMF(fl.ServerDistillation):
    """Options of FedKEMF."""

    knowledge: str = "smallest"
    """The knowledge network: a model with its options (mlp,hidden=16; after a comma in brackets:
    fedkemf,knowledge=[mlp,hidden=16]), or the federation's smallest."""
    ensemble: Literal["mean", "max", "vote"] = "mean"
    """Combination of clients' logits into one teacher; vote takes each class's share of clients."""
    server_start: Literal["mean", "previous"] = "mean"
    """Start of the server's training: the mean of the clients' knowledge networks, or its previous one."""
    temperature: float = fl.within("(0, inf)", 3.0)
    """T of the server's distillation."""


class State(NamedTuple):
    """The clients' own models per group (n_g, ...), and the knowledge network."""

    hyper: FedKEMF
    weights: fl.PerGroup
    knowledge: fl.Weights


def network(config: FedKEMF, federation) -> fl.Model:
    """Return the knowledge network."""
    if config.knowledge == "smallest":
        return min(federation.models, key=lambda model: model.size)
    first = federation.models[0]
    model = zoo.build(
        config.knowledge,
        shape=first.shape,
        classes=first.classes,
        vocabulary=federation.vocabulary,
        every_token=first.task.every_token,
    )
    return dataclasses.replace(
        model, convolution=first.convolution, precision=first.precision, task=first.task
    )


def side_by_side(own: fl.Weights, knowledge: fl.Weights) -> fl.Weights:
    """Join both networks in one."""
    return fl.Weights(*({"own": w, "knowledge": g} for w, g in zip(own, knowledge, strict=True)))


def apart(both: fl.Weights, whose: str) -> fl.Weights:
    """Return one of the two networks, "own" or "knowledge"."""
    return fl.Weights(both.params[whose], both.stats[whose])


def mutual(model: fl.Model, knowledge: fl.Model):
    """Return the loss of deep mutual learning of both networks."""
    task = model.task

    def loss(both, batch, key):
        logits, stats = [], {}
        for number, (network, whose) in enumerate(((model, "own"), (knowledge, "knowledge"))):
            of_network = jax.random.fold_in(key, number)  # separate dropout
            scores, stats[whose] = fl.forward(network, apart(both, whose), batch, of_network)
            logits.append(scores)
        value = jnp.zeros(())
        for student, teacher in (logits, logits[::-1]):
            apart_by = task.apart(student, task.soft(jax.lax.stop_gradient(teacher)))
            value = value + fl.mean(task.losses(student, batch.y) + apart_by, batch)
        return value, stats

    return loss


def build(config: FedKEMF) -> fl.Algorithm:
    """Learn from each other, then fuse on the server."""

    def init(key, federation, hyper):
        model = network(config, federation)
        fl.public_images.require_for_server(federation, [model], config.bn_stats)
        knowledge = model.init(jax.random.fold_in(key, len(federation.groups)))
        return State(hyper, fl.own_models.start(key, federation), knowledge)

    def step(key, state, federation, cohort):
        hyper, knowledge = state.hyper, network(config, federation)
        rows = fl.public_images.subset(key, federation, config.public_size)

        def client(key, client, g, w):
            loss, both = mutual(client.model, knowledge), side_by_side(w, g)
            trained = fl.descend(loss, both, key, fl.own_rows(client, hyper), hyper)
            return *(apart(trained.weights, whose) for whose in ("own", "knowledge")), trained.loss

        everywhere = (state.knowledge,) * len(federation.groups)
        own = fl.gather(state.weights, cohort)
        outputs = fl.map_clients(client, key, federation, cohort, everywhere, own)
        weights, networks, loss = zip(*outputs, strict=True)
        n, g = jnp.concatenate(fl.cohort_rows(federation, cohort)), state.knowledge
        logits = fl.client_logits(networks, federation, cohort, rows, key, knowledge)
        teacher = ensemble(knowledge.task, logits, n > 0, hyper.temperature)
        if config.server_start == "mean":
            g = fl.tree.weighted_mean(jax.tree.map(lambda *groups: jnp.concatenate(groups), *networks), n, g)
        g = fl.distil(knowledge, g, teacher, rows, key, federation, hyper, (n > 0).any())
        up, down = fl.sent_up(cohort, everywhere), fl.sent_down(cohort, everywhere)
        state = State(hyper, fl.scatter(state.weights, cohort, weights), g)
        models = (knowledge,) * len(networks)
        together = fl.ensembles.teachers(models, networks, ensemble, (n > 0, hyper.temperature))
        return state, fl.Info(loss, up, down, trained=fl.own_models.predictors(weights), teacher=together)

    def ensemble(task, logits, present, temperature):
        """Return the teacher t (R, outputs) from logits (k, R, outputs) of the clients present (k,)."""
        present = present.reshape(-1, *[1] * (logits.ndim - 1))
        if config.ensemble == "vote":
            votes = jax.nn.one_hot(logits.argmax(-1), logits.shape[-1], dtype=logits.dtype)
            return jnp.mean(votes, 0, where=present)
        if config.ensemble == "max":
            e = jnp.max(logits, 0, where=present, initial=-jnp.inf)
        else:
            e = jnp.mean(logits, 0, where=present)
        return task.soft(e, temperature)

    return fl.Algorithm(init, fl.own_models.personal, step, fl.own_models.personal, wire=("rows",))


def needs(config: FedKEMF) -> tuple[str, ...]:
    """Return the requirements; votes are for classes."""
    return ("public", "classes") if config.ensemble == "vote" else ("public",)


fedkemf = fl.Method("fedkemf", build, FedKEMF, needs=needs)
