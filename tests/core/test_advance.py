"""Rounds with a part on the host: what both parts sent."""

from typing import Any

import numpy as np
import pytest

from jaxfl.core.advance import with_host_info
from jaxfl.core.protocol import Info, messages


@pytest.mark.parametrize(
    ("counts", "others", "together"),
    [
        ([3, 4], [1, 0], {1: [4, 4]}),
        ({7: [1, 2]}, [1, 0], {7: [1, 2], 1: [1, 0]}),
        ({7: [1, 2]}, {7: [1, 0], 9: [0, 1]}, {7: [2, 2], 9: [0, 1]}),
    ],
)
def test_messages_of_both_parts_are_added_in_either_form(counts, others, together):
    def info(of_group: Any, **more) -> Info:
        of_group = (
            {k: np.array(n) for k, n in of_group.items()}
            if isinstance(of_group, dict)
            else np.array(of_group)
        )
        return Info((), (of_group,), (of_group,), **more)

    found = with_host_info(info(counts, findings={"a": 1}), info(others, findings={"b": 2}))
    assert found.findings == {"a": 1, "b": 2}
    for (of_group,) in (found.up, found.down):
        assert {size: n.tolist() for size, n in messages(of_group).items()} == together
    assert isinstance(found.up[0], dict) == (isinstance(counts, dict) or isinstance(others, dict))
