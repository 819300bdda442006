"""CompFL model by model (Xu et al. 2024, appendix E): experts in turn, each averaged by gossip.

Clients hold a copy of every expert; those that cannot run it relay. In a round a client does what it does in
`compfl`, from which the functions are imported.
"""

import jax
from reference import nets
from reference.sharing import divide
from reference.training import descend

from jaxfl.algorithms.experts.compfl_client import runnable
from methods.cases import NORMALISED, SMALL, Case, Comparison, local_statistics
from methods.cases.compfl import SMALLEST, adapt, by_size, draws_before_use, objective, soft_labels
from methods.cases.dfedavg import gossip, neighbours
from methods.recording import by_client, orders


def start(clients, initial, options):
    """Start every client with all extractors, and with heads for all experts that it can run."""
    order = by_size(initial)
    parts = [divide(weights, nets.in_head, options) for weights in initial]
    can_run = {i: order[: order.index(client.group) + 1] for i, client in enumerate(clients)}
    return {
        "copies": {
            i: {j: parts[j][1] for j in (order if options.relay else can_run[i])} for i in range(len(clients))
        },
        "heads": {i: {j: parts[j][0] for j in can_run[i]} for i in range(len(clients))},
        "saved": {i: dict.fromkeys(can_run[i], False) for i in range(len(clients))},
    }


def step(state, clients, cohort, options):
    """Run one expert's round: clients that can run it train it, then all holders average with neighbours."""
    order = max((list(heads) for heads in state["heads"].values()), key=len)[::-1]  # the largest expert first
    j = order[cohort.t * len(order) // cohort.rounds]
    net = {client.group: client.net for client in clients}
    heads, saved = dict(state["heads"]), dict(state["saved"])
    held, losses = {}, {}
    for i, draw in cohort.draws.items():
        mine, client = state["copies"][i], clients[i]
        losses[i] = 0.0
        if j not in heads[i]:
            if options.relay:
                held[i] = mine[j]
            continue
        places = list(heads[i])
        larger = [k for k in places[places.index(j) + 1 :] if saved[i][k]] if options.kd else []
        adapted = {
            k: adapt(
                client,
                net[k],
                mine[k] | heads[i][k],
                draw["adapt"][places.index(k)],
                options,
                k == client.group,
                k == j,
            )
            for k in [j, *larger]
        }
        teachers = [j, *larger] if options.kd and options.teachers == "all" else larger
        targets = soft_labels(client.y, [adapted[k] for k in teachers], options.tau) if teachers else None
        loss = objective(client, net[j], adapted[j].anchors, targets, options)
        model, losses[i] = descend(adapted[j].weights, loss, draw["train"], options)
        parts = {k: divide(one.weights, nets.in_head, options) for k, one in adapted.items()}
        parts[j] = divide(model, nets.in_head, options)
        heads[i] = heads[i] | {k: head for k, (head, _) in parts.items()}
        saved[i] = saved[i] | {j: True}
        held[i] = parts[j][1]
    mixed = gossip(held)
    copies = {i: of_all | ({j: mixed[i]} if i in mixed else {}) for i, of_all in state["copies"].items()}
    return {"copies": copies, "heads": heads, "saved": saved}, losses


def scores(state, clients, draws, options, x):
    """Score the own copy under an adapted head, received and deployed."""
    received = []
    for i, client in enumerate(clients):
        newest = state["copies"][i][client.group] | state["heads"][i][client.group]
        newest = adapt(client, client.net, newest, draws[i]["adapt"], options).weights
        received.append(nets.logits(client.net, newest, x))
    return {"received": received, "deployed": received}


# ---- what connects it with jaxfl


def draws(key, client, models, options):
    """Draw an order for the head of every expert, and orders for the local epochs."""
    experts = len(runnable(models)[client.group])
    adapt_key, train_key = jax.random.split(key)
    return {
        "adapt": [orders(jax.random.fold_in(adapt_key, e), client.size, 1)[0] for e in range(experts)],
        "train": orders(train_key, client.size, options.epochs),
    }


def view(state, federation, t):
    """Return the whole state, by client and expert."""
    experts = runnable(federation.models)

    clients = by_client(
        [
            {
                "copies": {j: theta for j, theta in enumerate(held.copies) if theta is not None},
                "heads": dict(zip(js, held.heads, strict=True)),
                "saved": {j: held.saved[:, e] for e, j in enumerate(js)},
            }
            for js, held in zip(experts, state.clients, strict=True)
        ],
        federation,
    )
    return {name: {i: held[name] for i, held in clients.items()} for name in clients[0]}


def traffic(model, models, t):
    """Count the larger expert in the first rounds, the smaller in the last, for each neighbour present."""
    sizes = sorted(other.body.size for other in models)
    return lambda i: sizes[-1 if t == 0 else 0] * len(neighbours(i, (0, 1, 3))), 0


OPTIONS = {"lam": 0.7, "mu": 0.8, "tau": 0.3, "head_lr": 0.2}

compfl_mm = Case(
    "compfl-mm",
    start,
    step,
    scores,
    draws=draws,
    draws_before_use=draws_before_use,
    view=view,
    traffic=traffic,
    short={"head_init": "keep"},  # a client then deploys the head that it has trained
    idle_rates={"tau"},  # with two architectures one is the only teacher: its weight is 1 at any temperature
    comparisons={
        "": Comparison(
            OPTIONS,
            [("mu", 0.81), ("lam", 0.71), ("relay", False), ("kd", False), ("head_init", "keep")],
            ((SMALL, 3), (SMALLEST, 2)),
        ),
        "three experts, all teach, heads as in Algorithm 1": Comparison(
            OPTIONS | {"teachers": "all", "head_init": "keep-chosen+ft"},
            [("head_lr", 0.21), ("teachers", "others"), ("head_init", "keep+ft")],
            ((SMALL, 2), (NORMALISED, 2), (SMALLEST, 1)),  # not in the order of their sizes
        ),
        "without relays, local statistics": local_statistics(
            ("relay", True),
            models=((NORMALISED, 3), (SMALLEST, 2)),
            relay=False,
        ),
    },
)
