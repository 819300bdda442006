"""Methods that must coincide: what one computes under some options is what another one computes."""

import pytest

from methods.cases import CASES

REDUCTIONS = {
    f"{name}: {reduction.__name__}": reduction
    for name, case in CASES.items()
    for reduction in case.reductions
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=getattr(of, "pytestmark", ())) for name, of in REDUCTIONS.items()]
)
def test_reduction(name):
    REDUCTIONS[name]()
