"""Defaults of the methods: the constants of their papers, as the specification of methods states them.

Options of local training that a setup decides (rate, epochs, batch) are not among them.
"""

import pytest

from jaxfl.registry import METHODS

# 4.1: (e), and the bold choices of (c) and (f)
COMPFL = {"lam": 1.0, "mu": 1.0, "tau": 0.1, "head_lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4}
COMPFL |= {"head_init": "keep+ft", "kd_direction": "forward", "anchor_reduction": "mean"}
COMPFL |= {"accuracy_on": "train", "align": True, "kd": True, "teachers": "others"}
GREEDY = {"eps": 0.3, "warmup": 0.1, "greedy": True}
# 5.5: (e); its public set, passes and temperature serve 5.1 and 5.4 too
PUBLIC = {"public_size": 3000, "public_batch": 256, "distill_epochs": 1}
PUBLIC |= {"temperature": 1.0, "kl_weight": 1.0}
MATRIX = {"lam": 1.0, "rho": 0.7, "row_norm": "simplex", "matrix_lr": None}  # None: eta_3 is eta_1
FEDDF = {"server_epochs": 1, "server_lr": 1e-3, "temperature": 1.0}
# 7.0 and 7.2 (e)
REASSEMBLY = {"lam": 0.2, "groups": 4, "candidates": 4, "server_epochs": 3, "server_lr": 1e-3, "tau": 0.07}
REASSEMBLY |= {"grouping": "kmeans", "signature_images": 1000, "pool": "cohort"}
REASSEMBLY |= {"stitch_start": "least-squares"}  # 14
CMSR = {"stitch": "joint", "anchor": "random", "order": True, "completion": True}

CONSTANTS = {
    "fedavg-ft": {"ft_epochs": None, "ft_part": "head"},  # 1.3; None: E
    "fedprox": {"mu": 0.01},  # 1.4, as for pFedClub; FedCMD has 1
    "feddyn": {"alpha": 0.01, "clip_norm": 10.0},  # 1.5
    "fedrep": {"head_epochs": 1},  # 2.3
    "fedbabu": {"ft_epochs": None, "ft_part": "all"},  # 2.4; None: E
    "fedrod": {"gamma": 1.0},  # 2.5
    "fedap": {"mu": 0.5, "held_out": 0.3, "pretraining": "sequential", "layers": "all"},  # 2.7
    "pfedsim": {"generalization": 0.5},  # 2.8
    "fedcmd": {"selection_rounds": 20, "personal": "vote"}  # 2.9: (e), and the bold choices of (f); 14
    | {"candidates": "dense", "vote_on": "rows", "score_scale": "none"}
    | {"distance": "wasserstein", "score": "signed", "ties": "earlier"}
    | {"selection": "fedavg", "base": "participants", "tail": "cosine", "similarity": "parameters"},
    "ditto": {"lam": 1.0, "personal_epochs": None},  # 3.1; None: E
    "per-fedavg": {"variant": "fo", "alpha": None, "delta": 1e-3, "adapt": "step"},  # 3.2; None: the rate
    "pfedme": {"lam": 15.0, "inner_steps": 5, "eta": 0.005, "beta": 1.0},  # 3.3
    "pfedbayes": {"zeta": 10.0, "repeats": 5, "rho_0": -3.0, "eps_scale": 1.0, "samples": 0}  # 3.4
    | {"optimizer": "adam", "lr": 1e-3},
    "fedamp": {"lam": 1.0, "sigma": None, "alpha": None},  # 3.5; None: the median, and sigma / N
    "fedfomo": {"downloads": 5, "epsilon": 0.0, "epsilon_decay": 0.05, "base": "received"},  # 3.6, 14
    "pfedhn": {"embedding": None, "hidden": 100, "depth": 3, "server_lr": 0.01}  # 3.7; None: int(1 + N / 4)
    | {"server_momentum": 0.9, "server_weight_decay": 1e-3, "server_clip_norm": 50.0},
    "compfl": COMPFL | GREEDY | {"deploy": "own"},
    "compfl-dd": COMPFL | GREEDY | {"deploy": "walker"},  # 4.2 (d)
    "compfl-mm": COMPFL | {"relay": True},  # 4.3 (c)
    "heterofl": {"clip_norm": 1.0, "scaler": True, "masked": True, "static_bn": True},  # 4.4
    "flexifed": {"strategy": "max-common"},  # 4.5
    "hermes": {"prune": 0.2, "threshold": 0.5},  # 4.6
    "fedmd": PUBLIC | {"signal": "prob"},  # 5.1
    "feddf": FEDDF,  # 5.2
    "pfeddf": FEDDF | {"ft_epochs": None, "ft_part": "all"},  # 5.3; None: E
    "sim-pfd": PUBLIC | {"weights": "min-max"},  # 5.4
    "topk-pfd": PUBLIC | {"neighbours": 5},  # 5.4
    "mnfl": PUBLIC | MATRIX | {"matrix_loss": "kl", "matrix_predictions": "after"},  # 5.5
    "mnfl-homogeneous": MATRIX | {"transfer": "replace", "transfer_steps": 1, "transfer_lr": 0.005},  # 5.6
    "fccl": {"lam": 0.0051, "public_batch": 256, "public_epochs": 1, "public_lr": 1e-3}  # 5.7
    | {"pretraining_epochs": None, "remember": 1.0},  # None: E
    "fedkemf": {"temperature": 3.0, "ensemble": "mean", "knowledge": "smallest", "server_lr": 1e-3},  # 5.8
    "draftfed": {"lam1": 1.0, "lam2": 1.0, "lam3": 1.0, "global_size": 512}  # 5.9
    | {"draft_epochs": 1, "draft_batch": 128},
    "fedproto": {"lam": 1.0, "uniform": False, "predict": "head"},  # 6.1
    "fedgh": {"server_epochs": 100, "server_lr": 0.01},  # 6.2
    "pfedhr": REASSEMBLY | {"stitch": "dense", "shortest": 4, "longest": 6},  # 7.1
    "pfedclub": REASSEMBLY | CMSR,  # 7.2
    "pfedclub-plus": REASSEMBLY | CMSR | {"eta": 0.1},  # 7.2
    "scaffold": {"server_lr": 1.0},  # its paper, section 7 (eta_g); the specification has no SCAFFOLD
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_defaults_are_the_papers_constants(name):
    config = METHODS[name].config()
    assert {option: getattr(config, option) for option in CONSTANTS[name]} == CONSTANTS[name]
