"""FedDF: averages per architecture, distilled on the server from the ensemble of all clients.

Lin et al. 2020, "Ensemble Distillation for Robust Model Fusion in Federated Learning", arXiv:2006.07242,
Algorithm 3. w_a is the model of architecture a, D_r the round's public images, S_t the cohort:

    w_i <- LocalSGD(w_a)
    w_a <- sum_i n_i w_i / sum_i n_i                       over the clients of the architecture
    t    = softmax(mean_i f(w_i, D_r) / T)                 over all of S_t, whatever their architectures
    w_a <- Adam over T^2 KL(t || softmax(f(w_a, D_r) / T))

The server passes over D_r once; the paper takes up to 10,000 steps and stops early (`server_epochs`,
`public_size`). Mini-batches have the paper's 128 images; ``public_batch=256`` gives as many steps as MNFL's
exchange of predictions. The authors' code averages clients uniformly (``weighting=uniform``) and clips the
server's gradients at norm 5; here averages are weighted by n_i, and the server clips nothing. Teachers are in
evaluation mode, students in training mode. An architecture without a client in the round is not distilled.
The server has the images, so traffic is FedAvg's.
"""

import jax.numpy as jnp

from jaxfl import fl


@fl.options
class FedDF(fl.ServerDistillation, fl.Averaging):
    """Options of FedDF."""


def build(config: FedDF) -> fl.Algorithm:
    """Build FedAvg with distillation after it."""
    return distilled(config, fl.sharing(config))


def distilled(config: fl.ServerDistillation, fedavg: fl.Algorithm) -> fl.Algorithm:
    """Build FedAvg whose averages are students."""

    def init(key, federation, hyper):
        fl.public_images.require_for_server(federation, federation.models, config.bn_stats)
        return fedavg.init(key, federation, hyper)

    def step(key, state, federation, cohort):
        averaged, info = fedavg.step(key, state, federation, cohort)
        rows = fl.public_images.subset(key, federation, config.public_size)
        trained = fl.per_group(lambda predictor: predictor.stacked, info.trained)
        logits = fl.client_logits(trained, federation, cohort, rows, key)
        n = fl.cohort_rows(federation, cohort)
        share = fl.tree.shares((jnp.concatenate(n) > 0).astype(logits.dtype))
        teacher = federation.task.soft(mean(federation.task, logits, share), state.hyper.temperature)

        def student(model, w, n):
            return fl.distil(model, w, teacher, rows, key, federation, state.hyper, (n > 0).any())

        shared = fl.per_group(student, federation.models, averaged.shared, n)
        ensemble = fl.ensembles.teachers(federation.models, trained, mean, (share,))
        return averaged._replace(shared=shared), info._replace(teacher=ensemble)

    def mean(task, logits, share):
        return fl.tree.weighted_sum(share, logits)

    # Clients' own models make the ensemble, so these would have to pass the wire as well.
    return fedavg._replace(init=init, step=step, wire=("rows",))


feddf = fl.Method("feddf", build, FedDF, needs=("public",))
