"""Schemas of the JSON files in a run folder, which may come from somebody else, as far as jaxfl reads them.

A schema is a type, [schema of all entries], or {name: schema of the entry}. `name?` stands for an entry that
may be missing, `*` for all entries.
"""

from typing import Any

NUMBER = int | float
ACCURACY = {
    "task?": str,
    "mean": NUMBER,
    "std": NUMBER,
    "lowest?": NUMBER,
    "worst?": NUMBER,
    "worst_tenth": NUMBER,
    "pooled": NUMBER,
    "macro_f1?": NUMBER,
    "mae?": NUMBER,
    "r2?": NUMBER | None,
    "per_client": [NUMBER | None],
    "macro_f1_per_client?": [NUMBER | None],
    "r2_per_client?": [NUMBER | None],
    "per_class?": [NUMBER | None],
    "per_group": {"*": NUMBER},
    "validation": NUMBER | None,
    "scores?": {"*": {"mean": NUMBER | None, "per_client": [NUMBER | None]}},
    "confusion?": [[int]],
}
CODE = {"package": str, "files": {"*": str}}
CONFIG = {
    "method": str | None,
    "label": str,
    "options": {"rounds": int, "seed": int, "partition_seed": int},
    "begun_for?": int,
    "begun_on?": int | None,
    "begun_in?": str | None,
    "models": [{"name": str, "clients": int}],
    "data": {
        "shape": [int],
        "dtype": str,
        "mean": [NUMBER],
        "std": [NUMBER],
        "public": int,
        "sample?": [NUMBER],
        "class_names?": [str],
        "task?": str,
        "vocabulary?": int,
        "target?": {"mean": [NUMBER], "std": [NUMBER]},
    },
    "beyond_target?": bool,
    "environment": dict,
    "code": CODE,
}
OF_NEWCOMERS = {"mean": NUMBER, "pooled": NUMBER, "per_client": [NUMBER]}
NEWCOMERS = {
    "clients": [int],
    "bytes_up": int,
    "bytes_down": int,
    "received": OF_NEWCOMERS,
    "trained?": OF_NEWCOMERS,
    "personal": OF_NEWCOMERS,
}
OF_COHORT = {"mean": NUMBER, "pooled": NUMBER}
COHORT = {
    "received": OF_COHORT,
    "trained?": OF_COHORT,
    "teacher?": OF_COHORT | {"lead?": NUMBER},
    "personal?": OF_COHORT,
}
ROUND = {
    "round": int,
    "clients": [int],
    "loss": NUMBER | None,
    "bytes_up": int,
    "bytes_down": int,
    "flops": NUMBER,
    "client_bytes_up": [int],
    "client_bytes_down": [int],
    "client_flops": [NUMBER],
    "simulated_seconds?": NUMBER,
    "lost?": [int],
    "findings?": dict,
    "cohort?": COHORT,
    "accuracy?": ACCURACY,
    "received?": ACCURACY,
    "newcomers?": NEWCOMERS,
    "seconds?": {"compile": NUMBER, "train": NUMBER, "evaluate": NUMBER, "write?": NUMBER},
    "together?": int,
    "code?": CODE,
    "devices?": int,
}
TARGET = {
    "round": int | None,
    "bytes_up": int | None,
    "bytes_down": int | None,
    "flops": NUMBER | None,
    "simulated_seconds": NUMBER | None,
}
RESULT = {
    "method": str,
    "seed": int,
    "rounds": int,
    "accuracy": ACCURACY,
    "received": ACCURACY,
    "cohort?": COHORT,
    "bytes_up": int,
    "bytes_down": int,
    "flops": NUMBER,
    "simulated_seconds": NUMBER | None,
    "newcomers?": NEWCOMERS,
    "lost_answers?": int | None,
    "class_names?": [str],
    "targets?": {"*": TARGET},
    "stopped?": str | None,
    "seconds": {"*": NUMBER},
    "code": [CODE],
}
COMMAND = {
    "environment": dict,
    "methods": [{"method": str | None, "label": str, "options": {"rounds": int, "seed": int}}],
    "seeds": int,
    "partition_seeds": int,
    "hide": [str],
    "tune": [str],
    "select": str,
    "against": str | None,
    "beside": bool,
}
END = {"failures": [str], "order?": [str], "select?": str, "tune?": [str]}


def fits(value: Any, schema: Any) -> bool:
    """Return whether a JSON value fits a schema."""
    if isinstance(schema, list):
        return isinstance(value, list) and all(fits(entry, schema[0]) for entry in value)
    if not isinstance(schema, dict):
        return isinstance(value, schema)
    if not isinstance(value, dict):
        return False
    if "*" in schema:
        return all(fits(entry, schema["*"]) for entry in value.values())
    return all(
        fits(value[name.rstrip("?")], of_entry) if name.rstrip("?") in value else name.endswith("?")
        for name, of_entry in schema.items()
    )
