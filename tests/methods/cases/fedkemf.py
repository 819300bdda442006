"""FedKEMF (Yu et al. 2022, arXiv:2208.07978): a knowledge network learns and teaches on every client."""

import jax
import numpy as np
from conftest import CLASSES, SHAPE, differ
from reference import nets, own_models
from reference.distillation import distilled
from reference.training import average, cross_entropy, descend, log_softmax, softmax

from jaxfl.algorithms.public_images import fedkemf as method
from jaxfl.data.federation import Batch
from jaxfl.models import zoo
from methods import recording
from methods.cases import UNLIKE, Case, Comparison, feddf, local_statistics, mnfl
from methods.rounds import convolving, initial


def start(clients, initial, options):
    """Start with own models, and a knowledge network of the first architecture; see `given`."""
    return {"own": {i: initial[client.group] for i, client in enumerate(clients)}, "knowledge": initial[0]}


def given(state, federation):
    """Let the knowledge network start as the first architecture does."""
    return state._replace(knowledge=jax.tree.map(lambda leaf: leaf[0], state.weights[0]))


def step(state, clients, cohort, options):
    """Let both networks learn from each other; the server's learns from the ensemble of the sent ones."""
    own, losses, sent = dict(state["own"]), {}, []
    speaker = clients[0]
    for i, draw in cohort.draws.items():
        both = joined(own[i], state["knowledge"])
        loss = mutual(clients[i], speaker.net)
        trained, losses[i] = descend(both, loss, draw["train"], options)
        own[i], g = part(trained, "own"), part(trained, "knowledge")
        sent.append((0, clients[i].size, g))
    if not sent:
        return state, losses, {}

    def said(x):
        return ensemble(np.array([nets.logits(speaker.net, g, x) for _, _, g in sent]), options)

    knowledge = state["knowledge"]
    if options.server_start == "mean":
        knowledge = average({0: knowledge}, sent)[0]
    knowledge = distilled(speaker, knowledge, said(cohort.public), cohort.public, cohort.server, options)
    return {"own": own, "knowledge": knowledge}, losses, dict.fromkeys(cohort.draws, said(cohort.x))


def joined(own, knowledge):
    """Join both networks' weights; statistics keep their prefix."""

    def named(name, whose):
        return (
            f"{nets.STATISTICS}{whose} {name.removeprefix(nets.STATISTICS)}"
            if nets.is_statistic(name)
            else f"{whose} {name}"
        )

    return {named(name, "own"): w for name, w in own.items()} | {
        named(name, "knowledge"): w for name, w in knowledge.items()
    }


def part(both, whose):
    """Return one network's weights."""
    found = {}
    for name, w in both.items():
        prefix = nets.STATISTICS if nets.is_statistic(name) else ""
        owner, _, rest = name.removeprefix(prefix).partition(" ")
        if owner == whose:
            found[prefix + rest] = w
    return found


def mutual(client, knowledge):
    """Return CE + KL(the other's predictions || own ones), summed over both networks."""

    def loss(both, rows):
        y, value, gradients = client.y[rows], 0.0, []
        ways = []
        for net, whose in ((client.net, "own"), (knowledge, "knowledge")):
            z, through_body = net(part(both, whose), client.x[rows], True)
            logits, through_head = nets.classify(part(both, whose), z)
            ways.append((logits, through_body, through_head))
        for (logits, through_body, through_head), (teacher, _, _) in (ways, ways[::-1]):
            plain, dlogits = cross_entropy(logits, y)
            t = softmax(teacher)
            value += plain + (t * (log_softmax(teacher) - log_softmax(logits))).sum(1).mean()
            dz, of_head = through_head(dlogits + (softmax(logits) - t) / len(y))
            gradients.append(through_body(dz)[1] | of_head)
        return value, joined(*gradients)

    return loss


def ensemble(logits, options):
    """Return the ensemble's predictions (R, classes)."""
    if options.ensemble == "vote":
        return np.eye(logits.shape[-1])[logits.argmax(-1)].mean(0)
    e = logits.max(0) if options.ensemble == "max" else logits.mean(0)
    return softmax(e / options.temperature)


def view(state, federation, t):
    """Return own models and the knowledge network."""
    return recording.own_models(state, federation, t) | {"knowledge": state.knowledge}


def the_knowledge_network_is_the_smallest_unless_another_is_named():
    for name, size in (("smallest", min(model.size for model in convolving().models)), ("mlp,hidden=3", 207)):
        state = initial("fedkemf", convolving(), knowledge=name)
        assert sum(leaf.size for leaf in jax.tree.leaves(state.knowledge.params)) == size


def two_networks_of_one_architecture_drop_out_different_units():
    """With the same units both would predict the same and learn the same."""
    model, key = zoo.cnn1(shape=SHAPE, classes=CLASSES, width=0.1), jax.random.key(0)
    w, rows = model.init(key), np.arange(2)
    batch = Batch(np.ones((2, *SHAPE), np.float32), rows, rows < 2, rows)
    loss = method.mutual(model, model)
    gradient, _ = jax.jit(jax.grad(loss, has_aux=True))(method.side_by_side(w, w), batch, key)
    assert differ(method.apart(gradient, "own"), method.apart(gradient, "knowledge"))


fedkemf = Case(
    "fedkemf",
    start,
    step,
    own_models.scores,
    given=given,
    view=view,
    images=mnfl.drawn_anew,
    draws_of_server=feddf.draws_of_server,
    traffic=lambda model, models, t: min(model.size for model in models),
    short={"public_batch": 4, "server_lr": 1e-4},  # Adam divides by small gradients
    comparisons={
        "": Comparison(feddf.OPTIONS, [("server_start", "previous"), ("ensemble", "max")], UNLIKE),
        "vote, from the server's previous network": Comparison(
            feddf.OPTIONS | {"ensemble": "vote", "server_start": "previous"}, [("ensemble", "mean")], UNLIKE
        ),
        "local statistics": local_statistics(
            ("temperature", 2.1),
            models=UNLIKE,
            ensemble="max",
            **feddf.OPTIONS,
        ),
    },
    reductions=(
        the_knowledge_network_is_the_smallest_unless_another_is_named,
        two_networks_of_one_architecture_drop_out_different_units,
    ),
)
