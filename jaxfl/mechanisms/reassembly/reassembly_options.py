"""Options of methods whose server assembles teachers from blocks."""

from typing import Literal

from jaxfl.config.options import options, within
from jaxfl.core.training import Training


@options
class Reassembly(Training):
    """Options of methods whose server assembles teachers."""

    lam: float = within("[0, inf)", 0.2)
    """lambda, weight of the teacher's predictions."""
    groups: int = within("[1, inf)", 4)
    """K, number of groups of blocks."""
    grouping: Literal["kmeans", "kmedoids"] = "kmeans"
    """How blocks are grouped: K-means on their activations, or medoids by their similarity."""
    pool: Literal["cohort", "known"] = "cohort"
    """Blocks in use: those of the round's clients, or the latest of all clients that ever took part."""
    candidates: int = within("[1, inf)", 4)
    """Largest number of networks among which a teacher is chosen."""
    stitch: Literal["joint", "shape", "dense"] = "joint"
    """Stitching layers: small ones where origins or shapes of blocks differ, or dense ones before all."""
    stitch_start: Literal["least-squares", "random"] = "least-squares"
    """How small stitching layers start: nearest to what the next block is used to, or at random."""
    labelled: bool = True
    """Whether the labels of public images are used; otherwise two random views of each are compared."""
    server_epochs: int = within("[0, inf)", 3)
    """Passes over the public images when the server trains."""
    server_batch: int = within("[1, inf)", 64)
    """Public images per mini-batch."""
    server_lr: float = within("(0, inf)", 1e-3)
    """Learning rate of the server's Adam."""
    tau: float = within("(0, inf)", 0.07)
    """Temperature when two views of images are compared."""
    signature_images: int = within("[2, inf)", 1000)
    """Largest number of public images by which blocks are compared, and stitching layers start."""
