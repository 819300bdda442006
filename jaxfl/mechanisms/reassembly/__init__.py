"""Re-assembly: a server takes clients' networks apart and builds each client a teacher from the blocks.

Wang et al. 2023, "Towards Personalized Federated Learning via Heterogeneous Model Reassembly",
NeurIPS (pFedHR);
Wang et al. 2024, "Controllable Heterogeneous Model Aggregation for Personalized Federated Learning", NeurIPS
(pFedClub). A round on the server, and the module of each step:

    clients' models -> blocks, and what they do on public images        `networks`
    activations before and after blocks -> similarity                   `signatures`
    similarity -> groups of blocks                                      `grouping`
    groups -> candidates, sequences of blocks                           each method's own
    blocks -> layers with stitches between them -> a network            `assembly`, `stitching`
    public images -> a network's stitches, or all of it, trained        `tuning`, `parts`, `seen`
    logits of a client's model and of candidates -> which one           `matching`, or a method's own
    the chosen one's logits -> the client's state -> local training     `teachers`

`server` holds what these steps share in a round. `signatures`, `grouping` and `matching` are plain NumPy.
"""

from jaxfl.mechanisms.reassembly.matching import match
from jaxfl.mechanisms.reassembly.networks import BlockRef, Pool, describe
from jaxfl.mechanisms.reassembly.parts import every_part, is_stitch
from jaxfl.mechanisms.reassembly.picture import draw_assembled
from jaxfl.mechanisms.reassembly.reassembly_options import Reassembly
from jaxfl.mechanisms.reassembly.server import Server, logits_of, size, timed, tuned
from jaxfl.mechanisms.reassembly.teachers import Teacher, learning_from_teachers
