"""The findings of a method over the rounds of a run."""

import numpy as np

from jaxfl.folder.records import Round


def over_rounds(metrics: list[Round]) -> dict[str, dict[str, np.ndarray] | list]:
    """Return the findings of a run by name.

    Returns:
      {panel: {line: (R,)}} of numbers, NaN where there is none. A finding of any other form is a list with an
      entry per round, None where there is none.
    """
    rounds = [record.get("findings", {}) for record in metrics]
    panels = dict.fromkeys(name for found in rounds for name in found)
    return {name: _together([found.get(name) for found in rounds]) for name in panels}


def _together(found: list) -> dict[str, np.ndarray] | list:
    if not all(of_round is None or _numbers(of_round) for of_round in found):
        return found
    lines = dict.fromkeys(line for of_round in found for line in of_round or {})
    return {line: np.array([(of_round or {}).get(line) for of_round in found], float) for line in lines}


def _numbers(lines) -> bool:
    return isinstance(lines, dict) and all(isinstance(value, int | float | None) for value in lines.values())
