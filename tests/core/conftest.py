"""What tests of the core share: clients with small networks, and the programs of a method."""

import numpy as np
import pytest
from conftest import CLASSES, SHAPE, tiny_partition, tiny_source

from jaxfl.core.rounds import as_programs
from jaxfl.data.federate import federate
from jaxfl.models import zoo
from jaxfl.registry import METHODS

CLIENTS, HIDDEN = (3, 2), (5, 4)  # of each architecture
CONFIG = METHODS["fedper"].config(epochs=1, batch_size=4)


@pytest.fixture(scope="session")
def federation():
    """Return five unequal clients with two MLPs; images are floats."""
    source = tiny_source()
    source = source._replace(images=source.images.astype(np.float32))
    models = [zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=hidden) for hidden in HIDDEN]
    return federate(source, tiny_partition(source), tuple(zip(models, CLIENTS, strict=True)))


@pytest.fixture(scope="module")
def programs():
    """Return the programs of FedPer, which has state on the server and on the clients."""
    return as_programs(METHODS["fedper"].build(CONFIG))
