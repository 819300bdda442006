"""FedRoD: a generic head on balanced softmax, a personal head on the rest.

Chen and Chao 2022, arXiv:2107.00778, section 4 (linear personal head). f is the extractor, G the generic
and P_i the personal head, n_i the number of client i's training rows and n_ic that of class c. For each
batch, z = f(x):

    L_G = CE(G(z) + gamma log n_ic, y)             gradient to f and G
    L_P = CE(stop(G(z)) + P_i(stop(z)), y)         gradient to P_i alone
    f, G <- sum_i n_i (f_i, G_i) / sum_i n_i

Deployed and received predictions are both G(z) + P_i(z), with the newest f and G. P_i starts as a copy of the
initial G. A class that a client lacks has log 0 = -inf, so it drops out of the normaliser. The reported loss
is L_G + L_P.
"""

import jax
import jax.numpy as jnp
import optax

from jaxfl import fl


@fl.options
class FedRoD(fl.Averaging):
    """Options of FedRoD."""

    gamma: float = fl.within("[0, inf)", 1.0)
    """Exponent of the class counts in balanced softmax; 0 is plain cross-entropy."""


def build(config: FedRoD) -> fl.Algorithm:
    """Add to the model a block "personal", the second head, which stays on the client."""
    algorithm = fl.sharing(
        config,
        keep=lambda model: lambda path: path[1] == "personal",
        train=fl.local_training(config, objective=two_heads),
        extend=with_personal_head,
        predict=predict,
    )
    # No "rows": the loss has the counts of a client's classes.
    return algorithm._replace(wire=("messages", "mean", "memory"))


def with_personal_head(key, model, weights, hyper):
    """Add P_i, a copy of G."""
    fl.require_plain_head(model)
    if "personal" in model.names:
        raise fl.JaxflError(
            f"FedRoD adds a block personal, but {model.name} has one; give that another name."
        )
    (head,) = model.head.names
    return weights._replace(params=weights.params | {"personal": weights.params[head]})


def two_heads(participant, blocks):
    """Return the loss L_G + L_P; stopped gradients keep each term to its own parameters."""
    client, model, stop = participant.client, participant.model, jax.lax.stop_gradient
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels

    def loss(weights, batch, key):
        params, stats = weights
        z, new_stats = model.body.apply(params, stats, batch.x, train=True, key=key, mask=batch.mask)
        generic = generic_head(model, params, z, train=True, key=key)
        both = stop(generic) + personal_head(model, params, stop(z), train=True, key=key)
        n = client.class_counts.astype(z.dtype)
        # A large negative number stands for log 0: -inf times gamma = 0 would be NaN.
        log_n = jnp.where(n > 0, jnp.log(jnp.maximum(n, 1)), -1e9)
        balanced = generic + participant.hyper.gamma * log_n[None]
        value = fl.mean(cross_entropy(balanced, batch.y) + cross_entropy(both, batch.y), batch)
        return value, stats | new_stats

    return loss


def generic_head(model, params, z, **training):
    """Return G(z)."""
    return model.head.apply(params, {}, z, **training)[0]


def personal_head(model, params, z, **training):
    """Return P_i(z)."""
    (head,) = model.head.names
    return model.head.apply({head: params["personal"]}, {}, z, **training)[0]


def predict(model, shared, own, x):
    """Return G(z) + P_i(z)."""
    params, stats = fl.tree.combine(shared, own)
    z, _ = model.body.apply(params, stats, x, train=False)
    return generic_head(model, params, z, train=False) + personal_head(model, params, z, train=False)


fedrod = fl.Method("fedrod", build, FedRoD, needs=("classes",))
