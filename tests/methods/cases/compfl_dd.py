"""CompFL device by device (Xu et al. 2024, appendix E): experts walk over the graph of the clients.

On a visit a client does what it does in a round of `compfl`, from which the functions are imported.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EDGES, SIZES, assert_same, differ
from reference import nets
from reference.sharing import divide
from reference.training import descend

from jaxfl.algorithms.experts.compfl_client import runnable
from jaxfl.data.federate import set_apart
from methods.cases import NORMALISED, SMALL, Case, Comparison, local_statistics
from methods.cases.compfl import SMALLEST, adapt, by_size, draws_before_use, objective, soft_labels
from methods.recording import by_client, by_group, orders
from methods.rounds import TRAINING, convolving, federated, initial, one_round, run

STARTS = (3, 0, 4)  # where the experts are before the first round


def start(clients, initial, options):
    """Start every expert at a client, and every client with unseen copies of all experts that it can run."""
    order = by_size(initial)
    parts = [divide(weights, nets.in_head, options) for weights in initial]
    can_run = {i: order[: order.index(client.group) + 1] for i, client in enumerate(clients)}
    return {
        "walkers": {j: theta for j, (_, theta) in enumerate(parts)},
        "at": {j: STARTS[j] for j in range(len(initial))},
        "copies": {i: {j: parts[j][1] for j in js} for i, js in can_run.items()},
        "heads": {i: {j: parts[j][0] for j in js} for i, js in can_run.items()},
        "heard": {i: dict.fromkeys(js, False) for i, js in can_run.items()},
    }


def step(state, clients, cohort, options):
    """Move every walker in turn: on until a client accepts it, training there, and one hop further."""
    walkers, at = dict(state["walkers"]), dict(state["at"])
    copies, heads, heard = (
        {i: dict(own) for i, own in state[name].items()} for name in ("copies", "heads", "heard")
    )
    net = {client.group: client.net for client in clients}
    warm = cohort.t >= options.warmup * cohort.rounds
    losses = dict.fromkeys(cohort.draws, 0.0)
    for v in range(max(len(cohort.draws) // len(walkers), 1)):
        for j in walkers:
            draw = cohort.server(v, j)
            chance = {i: acceptance(j, i, clients, heads, options) for i in cohort.draws}
            path, accepted = walk(at[j], chance, draw, options.max_hops)
            for i in set(path) & cohort.draws.keys():
                if j in copies[i]:
                    copies[i][j], heard[i][j] = walkers[j], True
            at[j] = path[-1]
            if not accepted:
                continue
            i = at[j]
            client, places, drawn = clients[i], list(heads[i]), draw.orders(i, len(heads[i]), clients[i].size)
            others = [k for k in places if k != j and heard[i][k]] if options.kd else []
            teachers = [j, *others] if options.kd and options.teachers == "all" else others
            adapted = {
                k: adapt(
                    client,
                    net[k],
                    copies[i][k] | heads[i][k],
                    drawn["adapt"][places.index(k)],
                    options,
                    k == client.group,
                    k == j,
                )
                for k in [j, *others]
            }
            targets = None
            if warm and teachers:
                targets = soft_labels(client.y, [adapted[k] for k in teachers], options.tau)
            loss = objective(client, net[j], adapted[j].anchors, targets, options)
            model, losses[i] = descend(adapted[j].weights, loss, drawn["train"], options)
            parts = {k: divide(one.weights, nets.in_head, options) for k, one in adapted.items()}
            parts[j] = divide(model, nets.in_head, options)
            heads[i] |= {k: head for k, (head, _) in parts.items()}
            copies[i][j] = walkers[j] = parts[j][1]
            at[j] = leave(at[j], chance, draw)
    return {
        "walkers": walkers,
        "at": at,
        "copies": copies,
        "heads": heads,
        "heard": heard,
    }, losses


def acceptance(j, i, clients, heads, options):
    """Return the probability that client i accepts expert j."""
    if clients[i].group == j:
        return 1.0
    return options.eps if j in heads[i] and options.greedy else 0.0


def walk(at, chance, draw, most):
    """Return the clients that a walker visits, the last of which has it, and whether that one accepts."""
    path = [at]
    if not any(chance.get(i) for i in reachable(at, chance)):
        return path, False
    for hop in range(most + 1):
        if hop:
            path.append(leave(path[-1], chance, draw, hop))
        if path[-1] in chance and draw.accepts(hop, chance[path[-1]]):
            return path, True
    return path, False


def reachable(at, present):
    """Return the clients that can get what a client has: itself, and along links those that are present."""
    found = [at]
    for i in found:
        found += [k for k in neighbours(i, present) if k not in found]
    return found


def neighbours(at, present):
    """Return a client's neighbours that are present."""
    return [k for k in range(len(SIZES)) if {(at, k), (k, at)} & set(EDGES) and k in present]


def leave(at, chance, draw, hop=None):
    """Return a neighbour that is present, or the client itself if it has none."""
    linked = neighbours(at, chance)
    return draw.neighbour(hop, linked) if linked else at


def scores(state, clients, draws, options, x):
    """Score the walker under an adapted head; deployed may be the own copy under its own head."""
    received = []
    for i, client in enumerate(clients):
        newest = state["walkers"][client.group] | state["heads"][i][client.group]
        newest = adapt(client, client.net, newest, draws[i]["adapt"], options).weights
        received.append(nets.logits(client.net, newest, x))
    if options.deploy == "walker":
        return {"received": received, "deployed": received}
    own = [
        state["copies"][i][client.group] | state["heads"][i][client.group] for i, client in enumerate(clients)
    ]
    left = [nets.logits(client.net, model, x) for client, model in zip(clients, own, strict=True)]
    return {"received": received, "deployed": left}


# ---- what connects it with jaxfl


def draws_of_server(key, options):
    """Return what is drawn on a visit: ``(v, j) -> accepts, neighbour, orders``."""

    def of_visit(v, j):
        visit_key = jax.random.fold_in(jax.random.fold_in(key, v), j)
        walk_key, train_key, leave_key = jax.random.split(visit_key, 3)

        def keys(hop):
            to, accept = jax.random.split(jax.random.fold_in(walk_key, hop))
            return (to, accept) if hop else (None, jax.random.fold_in(walk_key, 0))

        def neighbour(hop, linked):
            share = np.isin(np.arange(len(SIZES)), linked) / len(linked)
            return int(jax.random.choice(leave_key if hop is None else keys(hop)[0], len(SIZES), p=share))

        def drawn(i, experts, size):
            adapt_key, epochs_key = jax.random.split(jax.random.fold_in(train_key, i))
            return {
                "adapt": [orders(jax.random.fold_in(adapt_key, e), size, 1)[0] for e in range(experts)],
                "train": orders(epochs_key, size, options.epochs),
            }

        return SimpleNamespace(
            accepts=lambda hop, chance: bool(jax.random.bernoulli(keys(hop)[1], chance)),
            neighbour=neighbour,
            orders=drawn,
        )

    return of_visit


def given(state, federation):
    """Let the experts start where the reference has them."""
    return state._replace(at=jnp.asarray(STARTS[: len(state.at)], jnp.int32))


def view(state, federation, t):
    """Return the whole state, by client and expert."""
    experts = runnable(federation.models)
    known = [
        {
            "copies": dict(zip(js, own.copies, strict=True)),
            "heads": dict(zip(js, own.heads, strict=True)),
            "heard": {j: own.heard[:, e] for e, j in enumerate(js)},
        }
        for js, own in zip(experts, state.known, strict=True)
    ]
    of_clients = by_client(known, federation)
    return {
        "walkers": by_group(state.walkers),
        "at": dict(enumerate(state.at)),
    } | {name: {i: own[name] for i, own in of_clients.items()} for name in known[0]}


@pytest.mark.long
def every_hop_is_counted_as_sent():
    """The messages of a round are the hops that it reports."""
    federation, total = convolving(), 0
    for _, info in run("compfl-dd", federation, **TRAINING):
        hops = info.findings["hops in a round"]
        for model in federation.models:
            sent = sum(int(up[model.body.size].sum()) for up in info.up)
            assert sent == int(hops[model.name])
            total += sent
    assert total


WALKS = TRAINING | {"greedy": False, "kd": False, "align": False, "head_init": "keep"}  # compiles quickly


def two_sizes():
    """Return three clients of a smaller architecture and two of a larger one."""
    return federated((dataclasses.replace(SMALLEST, name="smallest"), 3), (SMALL, 2))


def a_walker_is_sent_on_until_a_client_accepts_it_and_once_more():
    """Of clients 2 and 3, who are linked and alone present, each accepts one of the experts."""
    federation = two_sizes()
    small, large = (model.body.size for model in federation.models)
    before = initial("compfl-dd", federation, **WALKS)
    for at, of_2, of_3 in (
        ((2, 3), {small: 1, large: 0}, {small: 0, large: 1}),  # both are accepted where they are
        ((3, 2), {small: 1, large: 1}, {small: 1, large: 1}),
    ):
        begun = before._replace(at=jnp.asarray(at, jnp.int32))
        after, info = one_round("compfl-dd", begun, federation, 0, (2, 3), **WALKS)
        assert [{size: n[0] for size, n in sent.items()} for sent in info.up] == [of_2, of_3]
        hops = info.findings["hops in a round"]
        assert [hops[model.name] for model in federation.models] == [of_2[n] + of_3[n] for n in of_2]
        assert after.at.tolist() == [3, 2]


def a_walker_that_no_client_accepts_rests():
    """The larger expert rests among clients 0, 1 and 2 of the smaller architecture."""
    federation = two_sizes()
    before = given(initial("compfl-dd", federation, **WALKS), federation)
    before = before._replace(at=jnp.asarray([0, 1], jnp.int32))
    after, info = one_round("compfl-dd", before, federation, 0, (0, 1, 2), **WALKS)
    assert_same(after.walkers[1], before.walkers[1])
    assert differ(after.walkers[0], before.walkers[0])
    assert after.at[1] == 1 and not info.findings["hops in a round"][federation.models[1].name]
    assert info.idle[0].tolist().count(False) == 1


def no_walker_begins_at_a_newcomer():
    federation = federated((SMALLEST, 3), (SMALL, 2))
    federation = set_apart(federation, [np.array([True, False, True]), np.array([True, False])])
    at = initial("compfl-dd", federation, **TRAINING).at
    assert sorted(np.asarray(at)) == [1, 4]


OPTIONS = {"eps": 0.6, "warmup": 0.25, "lam": 0.7, "mu": 0.8, "tau": 0.3, "head_lr": 0.2}

compfl_dd = Case(
    "compfl-dd",
    start,
    step,
    scores,
    draws_of_server=draws_of_server,
    draws=lambda key, client, models, options: None,
    draws_before_use=draws_before_use,
    given=given,
    view=view,
    traffic=None,  # depends on chance, see `every_hop_is_counted_as_sent`
    short={"deploy": "visit", "eps": 0.02},  # so small that another eps matters within a few visits
    idle_rates={"tau"},  # with two architectures one is the only teacher: its weight is 1 at any temperature
    comparisons={
        "": Comparison(
            OPTIONS,
            [("mu", 0.81), ("eps", 0.1), ("warmup", 1.0), ("deploy", "visit"), ("kd", False)],
            ((SMALL, 3), (SMALLEST, 2)),
        ),
        "three experts, all teach, heads as in Algorithm 1": Comparison(
            OPTIONS | {"teachers": "all", "head_init": "keep-chosen+ft"},
            [("tau", 0.31), ("lam", 0.71), ("teachers", "others"), ("head_init", "keep+ft")],
            ((SMALL, 2), (NORMALISED, 2), (SMALLEST, 1)),  # not in the order of their sizes
        ),
        "few hops, local statistics": local_statistics(
            ("deploy", "walker"),
            ("greedy", True),
            models=((NORMALISED, 3), (SMALLEST, 2)),
            max_hops=1,
            greedy=False,
            deploy="visit",
        ),
    },
    reductions=(
        every_hop_is_counted_as_sent,
        a_walker_is_sent_on_until_a_client_accepts_it_and_once_more,
        a_walker_that_no_client_accepts_rests,
        no_walker_begins_at_a_newcomer,
    ),
)
