"""Methods that must coincide: under some options one computes the same as another."""

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
