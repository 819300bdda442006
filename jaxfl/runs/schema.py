"""What the files of JSON in a run folder hold, as far as jaxfl reads them. They may come from somebody else.

A form is a type, or {name: form of the entry}: `name?` stands for an entry that may be missing, `*` for all.
"""

from typing import Any

NUMBER = int | float
ACCURACY = {"mean": NUMBER, "per_group": {"*": NUMBER}}
CONFIG = {
    "method": str | None,
    "label": str,
    "options": {"rounds": int, "seed": int},
    "environment": dict,
}
ROUND = {
    "round": int,
    "loss": NUMBER | None,
    "bytes_up": int,
    "bytes_down": int,
    "flops": NUMBER,
    "simulated_seconds?": NUMBER,
    "findings?": dict,
    "cohort?": {"received": {"pooled": NUMBER}},
    "accuracy?": ACCURACY | {"validation": NUMBER | None},
    "received?": ACCURACY,
    "seconds?": {"compile": NUMBER, "train": NUMBER, "evaluate": NUMBER},
    "together?": int,
}
RESULT = {
    "seed": int,
    "rounds": int,
    "accuracy": ACCURACY,
    "received": ACCURACY,
    "bytes_up": int,
    "bytes_down": int,
    "simulated_seconds": NUMBER | None,
    "seconds": {"*": NUMBER},
}


def fits(value: Any, form: Any) -> bool:
    """Whether a value of JSON has a form."""
    if not isinstance(form, dict):
        return isinstance(value, form)
    if not isinstance(value, dict):
        return False
    if "*" in form:
        return all(fits(entry, form["*"]) for entry in value.values())
    return all(
        fits(value[name.rstrip("?")], of_entry) if name.rstrip("?") in value else name.endswith("?")
        for name, of_entry in form.items()
    )
