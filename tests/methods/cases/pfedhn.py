"""pFedHN (Shamsian et al. 2021, arXiv:2103.04628, Algorithm 1): h(v_i) trains, the server follows.

The hypernetwork starts from numbers that both sides compute by one formula instead of drawing them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from reference import nets, sharing
from reference.training import average, clipped, descend, plain_loss

from methods import recording
from methods.cases import Case, Comparison, local_statistics
from methods.rounds import federated, initial, mlp

D, HIDDEN, DEPTH = 2, 3, 1


def wave(shape, seed):
    """Return numbers that are not drawn."""
    return 0.5 * np.sin(seed + 1.7 * np.arange(np.prod(shape))).reshape(shape)


def start(clients, initial, options):
    """Start with embeddings and psi by the formula, and velocities of 0."""
    psi = {g: generator(weights) for g, weights in enumerate(initial)}
    v = {i: wave(D, i) for i in range(len(clients))}
    statistics = [{name: w for name, w in of.items() if nets.is_statistic(name)} for of in initial]
    return sharing.begun(clients, statistics, lambda name: False, options) | {
        "psi": psi,
        "v": v,
        "velocity": {g: {name: 0 * value for name, value in of_one.items()} for g, of_one in psi.items()},
        "velocity_v": {i: 0 * value for i, value in v.items()},
    }


def generator(weights):
    """Return psi for a model of these weights: two layers, and a linear map to each of its parameters."""
    shapes = {"first": (D, HIDDEN), "hidden1": (HIDDEN, HIDDEN)}
    shapes |= {name: (HIDDEN, *w.shape) for name, w in weights.items() if not nets.is_statistic(name)}
    return {
        f"{layer}/{leaf}": wave(shape if leaf == "kernel" else shape[1:], len(layer) + len(leaf))
        for layer, shape in shapes.items()
        for leaf in ("kernel", "bias")
    }


def generated(psi, v):
    """Return h(v), {name: parameter}, and a function from their gradients to those of psi and v."""
    h, through_layers = nets.chain(psi, v[None], nets.dense("first"), nets.relu, nets.dense("hidden1"))
    targets = {name.rpartition("/")[0] for name in psi} - {"first", "hidden1"}

    def back(gradients):
        dh = sum((gradients[name] * psi[f"{name}/kernel"]).reshape(HIDDEN, -1).sum(1) for name in targets)
        dv, of_layers = through_layers(dh[None])
        of_targets = {f"{name}/kernel": np.multiply.outer(h[0], gradients[name]) for name in targets}
        return of_layers | of_targets | {f"{name}/bias": gradients[name] for name in targets}, dv[0]

    return {
        name: np.tensordot(h[0], psi[f"{name}/kernel"], 1) + psi[f"{name}/bias"] for name in targets
    }, back


def model(state, clients, i):
    """Return client i's model before training, and the function for its gradients."""
    parameters, back = generated(state["psi"][clients[i].group], state["v"][i])
    return parameters | sharing.model(state, clients, i), back


def step(state, clients, cohort, options):
    """dw_i <- h(v_i) - SGD(h(v_i)); psi and the cohort's v step along the mean of the pulled-back dw_i."""
    after = {name: dict(of_all) for name, of_all in state.items()}
    pulled, losses, sent = {}, {}, []
    for i, draw in cohort.draws.items():
        w, back = model(state, clients, i)
        trained, losses[i] = descend(w, plain_loss(clients[i]), draw["train"], options)
        pulled[i] = back({name: w[name] - trained[name] for name in w})
        statistics = {name: value for name, value in trained.items() if nets.is_statistic(name)}
        after["personal"][i], shared = sharing.divide(statistics, lambda name: False, options)
        sent.append((clients[i].group, clients[i].size, shared))
    after["shared"] = average(state["shared"], sent)

    for g in {clients[i].group for i in pulled}:
        present = [i for i in pulled if clients[i].group == g]
        n = sum(clients[i].size for i in present)
        share = {i: clients[i].size / n for i in present}
        slopes = {name: sum(share[i] * pulled[i][0][name] for i in present) for name in state["psi"][g]}
        slopes = clipped(slopes | {i: share[i] * pulled[i][1] for i in present}, options.server_clip_norm)
        of_psi = {name: slopes[name] for name in state["psi"][g]}
        after["psi"][g], after["velocity"][g] = stepped(
            state["psi"][g], of_psi, state["velocity"][g], options
        )
        of_v = {i: slopes[i] for i in present}
        v, velocity = stepped(state["v"], of_v, state["velocity_v"], options)
        after["v"], after["velocity_v"] = after["v"] | v, after["velocity_v"] | velocity
    return after, losses


def stepped(at, slopes, velocities, options):
    """Take a step of SGD with momentum and weight decay for everything that has a slope."""
    velocities = {
        name: options.server_momentum * velocities[name] + slope + options.server_weight_decay * at[name]
        for name, slope in slopes.items()
    }
    return {name: at[name] - options.server_lr * v for name, v in velocities.items()}, velocities


def scores(state, clients, draws, options, x):
    """Score h(v_i), received and deployed."""
    newest = [nets.logits(client.net, model(state, clients, i)[0], x) for i, client in enumerate(clients)]
    return {"received": newest, "deployed": newest}


# ---- jaxfl's side


def given(state, federation):
    """Return the state with the numbers of the formula."""

    def of_group(group, server):
        psi = {
            layer: {
                leaf: jnp.asarray(wave(old.shape, len(layer) + len(leaf))) for leaf, old in leaves.items()
            }
            for layer, leaves in server.psi.items()
        }
        return server._replace(psi=psi, v=jnp.stack([jnp.asarray(wave(D, int(i))) for i in group.id]))

    return state._replace(server=tuple(map(of_group, federation.groups, state.server)))


def view(state, federation, t):
    """Return the whole state, with every map of the hypernetwork in the shape of what it generates."""

    def named(model, psi):
        shapes = jax.eval_shape(model.init, jax.random.key(0)).params
        targets = {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
            for path, leaf in jax.tree.leaves_with_path(shapes)
        }
        return {
            layer.replace(".", "/"): {
                name: value.reshape(value.shape[:-1] + targets.get(layer, value.shape[-1:]))
                for name, value in leaves.items()
            }
            for layer, leaves in psi.items()
        }

    def velocity(opt_state):
        (found,) = [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=is_trace) if is_trace(leaf)]
        return found.trace

    def is_trace(node):
        return hasattr(node, "trace") and hasattr(node, "_fields")

    servers = list(zip(federation.models, state.server, strict=True))
    return {
        "shared": recording.by_group([w._replace(params={}) for w in state.stats]),
        "personal": recording.by_client(state.own_stats, federation),
        "psi": recording.by_group([named(model, server.psi) for model, server in servers]),
        "v": recording.by_client([server.v for _, server in servers], federation),
        "velocity": recording.by_group([named(m, velocity(server.opt_state[0])) for m, server in servers]),
        "velocity_v": recording.by_client([velocity(s.opt_state[1]) for _, s in servers], federation),
    }


def the_default_embedding_size_is_a_quarter_of_the_clients_plus_one():
    for clients, size in (3, 1), (5, 2), (9, 3):
        federation = federated((mlp(), clients), sizes=(2,) * clients)
        state = jax.eval_shape(lambda: initial("pfedhn", federation))  # noqa: B023
        assert state.server[0].v.shape == (clients, size)


OPTIONS = {"embedding": D, "hidden": HIDDEN, "depth": DEPTH}

pfedhn = Case(
    "pfedhn",
    start,
    step,
    scores,
    given=given,
    view=view,
    traffic=lambda model, models, t: model.size,
    returns=False,
    short=OPTIONS,
    idle_rates={"server_clip_norm"},  # gradients this long are rare
    comparisons={
        "": Comparison(
            OPTIONS | {"server_lr": 0.3, "server_weight_decay": 0.01},
            [("server_momentum", 0.91), ("server_clip_norm", 0.1)],
        ),
        "local statistics": local_statistics(
            ("server_weight_decay", 0.0), server_lr=0.3, server_clip_norm=0.2, **OPTIONS
        ),
    },
    reductions=(the_default_embedding_size_is_a_quarter_of_the_clients_plus_one,),
)
