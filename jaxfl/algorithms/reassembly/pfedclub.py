"""pFedClub: a server that takes clients' networks apart and assembles a teacher for each of them.

Wang et al. 2024, "Controllable Heterogeneous Model Aggregation for Personalized Federated Learning", NeurIPS;
Algorithm 1. Clients have networks of any architecture, w_m; D_p is a set of public images. In a round

    w_m <- SGD over CE(w_m) + lam KL(softmax w*_m || softmax w_m)                          eq. 5, E epochs
    blocks of all w_m into K groups by what they do on D_p (eq. 1);   `grouping`
    candidates c_{m,s} from blocks of the groups of w_m's own;        `cmsr`
    stitching layers between their frozen blocks, trained on D_p (eqs. 2-3);  `chain`
    w*_m <- argmax_s mean over D_p of cos(logits of w_m, logits of c_{m,s})                        eq. 4

and w*_m teaches client m when it takes part again. pFedClub+ keeps to candidates of at most (1 + eta) |w_m|
parameters. A client deploys w_m; nothing replaces it before a round.

The irregular part runs between rounds, on the models of the round's clients. As a teacher is frozen, what
stays of it are its logits on the client's own training images: the client would compute the same. The ledger
counts the teacher itself. Eq. 5 prints the divergence the other way round than its source. Labels of D_p are
used under ``labelled``; otherwise eq. 3 compares two random views of each image.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.config.options import options, within
from jaxfl.core import tree
from jaxfl.core.client_map import gather, map_clients, per_group, scatter, sent
from jaxfl.core.examples import own_rows
from jaxfl.core.protocol import Algorithm, Info, Method, Predictor
from jaxfl.core.training import Training, descend, initial_weights, mean
from jaxfl.data.federation import PerGroup
from jaxfl.errors import JaxflError
from jaxfl.mechanisms import public_images as public
from jaxfl.mechanisms.reassembly import assembly
from jaxfl.mechanisms.reassembly.chain import Workshop
from jaxfl.mechanisms.sharing import predict


@options
class PFedClub(Training):
    """Options of pFedClub."""

    lam: float = within("[0, inf)", 0.2)
    """lambda, weight of the teacher's predictions."""
    groups: int = within("[1, inf)", 4)
    """K, groups of blocks."""
    grouping: Literal["kmeans", "kmedoids"] = "kmeans"
    """How blocks are grouped: K-means on their activations, or medoids by their similarity."""
    candidates: int = within("[1, inf)", 4)
    """S_max, candidates of a client, drawn at random from all that there are."""
    anchor: Literal["random", "max", "min"] = "random"
    """The first block: a random one of its group, the most similar one, or one of the least index."""
    order: bool = True
    """Whether blocks keep the order that they have in their own models (without: "noc")."""
    completion: bool = True
    """Whether the client's own blocks complete a candidate (without: "nbc")."""
    labelled: bool = True
    """Whether the labels of public images are used."""
    server_epochs: int = within("[0, inf)", 3)
    """Passes over the public images when stitching layers are trained."""
    server_batch: int = within("[1, inf)", 64)
    """Public images of a mini-batch."""
    server_lr: float = within("(0, inf)", 1e-3)
    """Learning rate of Adam on stitching layers."""
    tau: float = within("(0, inf)", 0.07)
    """Temperature of eq. 3."""
    signature_images: int = within("[2, inf)", 1000)
    """Public images by which blocks are compared, at most."""


@options
class PFedClubPlus(PFedClub):
    """Options of pFedClub+."""

    eta: float = within("[0, inf)", 0.1)
    """How much larger than the client's model a teacher may be."""


class State(NamedTuple):
    """pFedClub's state, per group.

    Args:
      hyper: the options.
      weights: the clients' models (n_g, ...).
      lessons: the teachers' logits on the clients' training rows (n_g, m, outputs).
      taught: (n_g,) bool, who has a teacher.
      sizes: (n_g,) int32, parameters and BatchNorm statistics of the teachers.
    """

    hyper: PFedClub
    weights: PerGroup
    lessons: PerGroup
    taught: PerGroup
    sizes: PerGroup


def build(config: PFedClub) -> Algorithm:
    """Learn from the teacher; between rounds, assemble teachers."""
    workshop = Workshop()

    def init(key, federation, hyper):
        public.require(federation)
        if config.labelled and not federation.labelled:
            raise JaxflError(
                "pfedclub uses the labels of public images, and those of --public do not mean what the "
                "clients' do; add labelled=false, or labels=true to --public if they do."
            )
        weights = initial_weights(key, federation)
        clients = [len(group.id) for group in federation.groups]
        dtype = federation.mean.dtype
        return State(
            hyper,
            per_group(tree.stack, weights, clients),
            per_group(lambda g: jnp.zeros((*g.rows.shape, g.model.classes), dtype), federation.groups),
            per_group(lambda n: jnp.zeros(n, bool), clients),
            per_group(lambda n: jnp.zeros(n, jnp.int32), clients),
        )

    def personal(key, state, federation, cohort):
        return per_group(lambda w: Predictor(None, w, predict), gather(state.weights, cohort))

    def step(key, state, federation, cohort):
        nothing = (None,) * len(federation.groups)

        def client(key, client, nothing, own):
            w, lessons, taught = own
            loss = from_teacher(client.model, lessons, state.hyper.lam * taught)
            rows = own_rows(client, federation, state.hyper)
            trained = descend(loss, w, key, rows, state.hyper)
            return trained.weights, trained.loss

        taught = per_group(lambda taught: taught.astype(federation.mean.dtype), state.taught)
        own = gather(tuple(zip(state.weights, state.lessons, taught, strict=True)), cohort)
        trained, loss = zip(*map_clients(client, key, federation, cohort, nothing, own), strict=True)
        one = per_group(tree.one, trained)
        down = per_group(
            lambda slots, sizes: jnp.where(slots.mask, sizes, 0), cohort.groups, gather(state.sizes, cohort)
        )
        state = state._replace(weights=scatter(state.weights, cohort, trained))
        return state, Info(loss, sent(cohort, one), down)

    def host(key, state, federation, cohort):
        return assembly.teach(key, state, federation, cohort, config, workshop)

    return Algorithm(init, personal, step, personal, host)


def from_teacher(model, lessons, lam):
    """CE + lam KL(softmax teacher || softmax student); lessons (m, outputs), lam 0 without a teacher."""

    def loss(w, batch, key):
        logits, stats = model.apply(w.params, w.stats, batch.x, train=model.names, key=key, mask=batch.mask)
        teacher = jax.nn.softmax(lessons[batch.position])
        kl = optax.kl_divergence(jax.nn.log_softmax(logits), teacher)
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, batch.y)
        return mean(ce + lam * kl, batch), stats

    return loss


BIBTEX = """@inproceedings{wang2024pfedclub,
  title={p{F}ed{C}lub: Controllable Heterogeneous Model Aggregation for Personalized Federated Learning},
  author={Wang, Jiaqi and Li, Qi and Lyu, Lingjuan and Ma, Fenglong},
  booktitle={NeurIPS}, year={2024}}"""

pfedclub = Method(
    "pfedclub",
    build,
    PFedClub,
    "a server assembles a teacher for every client from blocks of all clients' networks",
    "Wang et al. 2024, NeurIPS",
    BIBTEX,
    needs=lambda config: {"public"},
)

pfedclub_plus = Method(
    "pfedclub-plus",
    build,
    PFedClubPlus,
    "pFedClub with teachers that are hardly larger than the clients' networks",
    "Wang et al. 2024, NeurIPS",
    BIBTEX,
    needs=lambda config: {"public"},
)
