"""The types of a run folder's files say all that jaxfl writes there."""

import json
import types
import typing

import jaxfl
from jaxfl.folder import records, store


def named(kind, value, where):
    """Check that the types name every entry of a value, at any depth."""
    kind = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.NotRequired else kind
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        for name, entry in value.items():
            assert name in hints or kind is records.Options, f"{where}.{name}"
            named(hints.get(name), entry, f"{where}.{name}")
    elif isinstance(kind, types.UnionType) and value is not None:
        named(typing.get_args(kind)[0], value, where)
    elif typing.get_origin(kind) in (list, dict):
        entries = value if isinstance(value, list) else value.values()
        for entry in entries:
            named(typing.get_args(kind)[-1], entry, where)


def test_every_entry_of_a_run_has_a_type(dataset, tmp_path):
    jaxfl.run(
        "fedavg",
        dataset=dataset[1],
        models=["mlp,hidden=3"],
        device_profile=["mlp=1e6:1e6"],
        clients=4,
        rounds=2,
        eval_every=1,
        dropout=0.5,
        newcomers=0.5,
        target=[0.9],
        show=["auc", "confusion"],
        score_cohort=True,
        run_dir=tmp_path / "run",
        quiet=True,
    )
    files = {store.CONFIG: records.Config, store.RESULT: records.Result}
    for name, kind in files.items():
        named(kind, json.loads((tmp_path / "run" / name).read_text()), name)
    for line in (tmp_path / "run" / store.METRICS).read_text().splitlines():
        named(records.Round, json.loads(line), store.METRICS)
