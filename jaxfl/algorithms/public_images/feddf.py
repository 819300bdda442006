"""FedDF: averaged models, distilled on the server from the ensemble of all clients' models.

Lin et al. 2020, "Ensemble Distillation for Robust Model Fusion in Federated Learning", arXiv:2006.07242,
Algorithm 3. w_a is the model of architecture a, D_r the round's public images, S_t the cohort:

    w_i <- LocalSGD(w_a)
    w_a <- sum_i n_i w_i / sum_i n_i                       over the clients of the architecture
    t    = softmax(mean_i f(w_i, D_r) / T)                 over all of S_t, whatever their architectures
    w_a <- Adam over T^2 KL(t || softmax(f(w_a, D_r) / T))

The server passes over D_r once; the paper takes up to 10,000 steps and stops early (`server_epochs`,
`public_size`). Mini-batches have the paper's 128 images; ``public_batch=256`` gives as many steps as MNFL's
exchange of predictions. The authors' code averages clients uniformly and clips the server's gradients at
norm 5; here averages are weighted by n_i, and the server clips nothing. Teachers are in evaluation mode,
students in training mode. An architecture without a client in the round is not distilled. The server has the
images, so traffic is FedAvg's.

pFedDF (MNFL, section 5.1): the same, but each client fine-tunes a copy of all layers before use.
"""

import jax
import jax.numpy as jnp

from jaxfl.authoring import (
    Algorithm,
    FineTuned,
    Method,
    cohort_rows,
    fine_tuning,
    options,
    per_group,
    public_images,
    sharing,
    tree,
)
from jaxfl.mechanisms import ensembles
from jaxfl.mechanisms.server_distillation import ServerDistillation, client_logits, distil


@options
class FedDF(ServerDistillation):
    """Options of FedDF."""


@options
class PFedDF(ServerDistillation, FineTuned):
    """Options of pFedDF."""


def build(config: FedDF) -> Algorithm:
    """Build FedAvg with distillation after it."""
    return distilled(config, sharing(config))


def build_tuned(config: PFedDF) -> Algorithm:
    """Build FedDF with fine-tuning before use."""
    return distilled(config, sharing(config, tune=fine_tuning(config)))


def distilled(config: ServerDistillation, fedavg: Algorithm) -> Algorithm:
    """Build FedAvg whose averages are students."""

    def init(key, federation, hyper):
        public_images.require_for_server(federation, federation.models, config.bn_stats)
        return fedavg.init(key, federation, hyper)

    def step(key, state, federation, cohort):
        averaged, info = fedavg.step(key, state, federation, cohort)
        rows = public_images.subset(key, federation, config.public_size)
        trained = per_group(lambda predictor: predictor.stacked, info.trained)
        logits = client_logits(trained, federation, cohort, rows, key)
        n = cohort_rows(federation, cohort)
        share = tree.shares((jnp.concatenate(n) > 0).astype(logits.dtype))
        teacher = jax.nn.softmax(mean(logits, share) / state.hyper.temperature)

        def student(model, w, n):
            return distil(model, w, teacher, rows, key, federation, state.hyper, (n > 0).any())

        shared = per_group(student, federation.models, averaged.shared, n)
        ensemble = ensembles.teachers(federation.models, trained, mean, (share,))
        return averaged._replace(shared=shared), info._replace(teacher=ensemble)

    def mean(logits, share):
        return tree.weighted_sum(share, logits)

    return fedavg._replace(init=init, step=step)


BIBTEX = """@inproceedings{lin2020ensemble,
  title={Ensemble Distillation for Robust Model Fusion in Federated Learning},
  author={Lin, Tao and Kong, Lingjing and Stich, Sebastian U. and Jaggi, Martin},
  booktitle={NeurIPS}, year={2020}}"""

feddf = Method(
    "feddf",
    build,
    FedDF,
    "averages per architecture, distilled on the server from the ensemble of all clients",
    "Lin et al. 2020, arXiv:2006.07242",
    BIBTEX,
    needs=("public",),
)

pfeddf = Method(
    "pfeddf",
    build_tuned,
    PFedDF,
    "FedDF, fine-tuned by each client before use",
    "Lin et al. 2020, arXiv:2006.07242; Beikmohammadi et al.",
    BIBTEX,
    needs=("public",),
)
