"""A summary of a device's records, as Markdown: aims, what `auto` should choose, what fits, equal bits."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxfl.bench.contestants import TORCH
from jaxfl.bench.report import cells
from jaxfl.machine import markdown

Record = dict[str, Any]

TIMES_TORCH = {"W2": 50, "W3": 10}  # what an accelerator should reach
MFU = {"resnet18": 0.3}
# Samples/s of the PyTorch loop on a CPU of two cores, from experiments/bench/epyc-2-cores.json: they are
# used where there is no PyTorch.
ON_A_CPU = {
    ("W2", "fedavg"): 1530,
    ("W2", "fedrep"): 2352,
    ("W2", "ditto,personal_epochs=1"): 1503,
    ("W3", "fedavg"): 1054,
}
CHOICES = {"convolution": "convolution", "clients at once": "clients_at_once", "precision": "precision"}
NOISE = 1.05  # what is faster by less than this counts as equally fast


def summary(ends: Mapping[str, dict], parts: Mapping[str, list[Record]]) -> str:
    """Return the whole summary.

    Args:
      ends: by part, how it has ended, see `jaxfl.bench.device`.
      parts: by part, its records.
    """
    records = [record for of_part in parts.values() for record in of_part]
    sections = {
        "Parts": _table(
            ("part", "what it asks", "s", "how it ended"),
            [(name, end["asks"], f"{end['seconds']:.0f}", end["ended"]) for name, end in ends.items()],
        ),
        "Aims": _table(("", "reached", "aim", "measured against"), [*_times_torch(records), *_mfu(records)]),
        "What `auto` should choose": _table(
            ("network, images a step", "where", "choice of", "auto takes", "times as fast", "auto is right"),
            _choices(records),
        ),
        "Clients that fit": _table(
            ("network", "most clients", "at once", "GB held", "refused", "afterwards"), _growth(records)
        ),
        "Two processes, equal bits": _table(("", "equal", "samples/s", "times the default's"), _bits(parts)),
        "Records": _table(*cells(records)) if records else "",
    }
    lines = [f"# {_device(records)}", ""]
    for title, body in sections.items():
        lines += [f"## {title}", "", body or "Not measured yet.", ""]
    return "\n".join(lines)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, or nothing without rows."""
    body = list(rows)
    return markdown.table(titles, body) if body else ""


def _device(records: list[Record]) -> str:
    if not records:
        return "Nothing has been measured yet"
    first = records[0]
    of_packages = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if version)
    small = ", a rehearsal in small: no figure is worth reading" if "--small" in first["command"] else ""
    return f"{first['machine']['device']}, {first['machine']['devices']} of them{small} ({of_packages})"


def _times_torch(records: list[Record]):
    """Yield for each method with an aim the record beside PyTorch if there is one, else the first."""
    ours = [one for one in records if one["workload"] in TIMES_TORCH and one["strategy"] == "auto"]
    chosen = {}
    for one in sorted(ours, key=lambda one: one["ratio_to_torch"] is None):
        chosen.setdefault((one["workload"], one["method"]), one)
    for (workload, method), one in chosen.items():
        ratio, against = one["ratio_to_torch"], "a PyTorch loop in turn on the same device"
        if ratio is None and (workload, method) in ON_A_CPU:
            ratio = one["samples_per_s"] / ON_A_CPU[workload, method]
            against = "the PyTorch loop's kept figure of two CPU cores, not of this device"
        if ratio:
            yield f"{workload} {method}", f"{ratio:.1f} x", f"{TIMES_TORCH[workload]} x", against


def _mfu(records: list[Record]):
    for one in records:
        if one["workload"] in MFU:
            share, aim = f"{100 * one['mfu']:.0f} %", f"{100 * MFU[one['workload']]:.0f} %"
            product = f"{one['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s of a large product, {one['precision']}"
            yield f"{one['workload']}, {one['strategy']}", share, aim, product


def _choices(records: list[Record]):
    """Yield for each choice of `auto` what else the same command tried, all else equal."""
    ours = [one for one in records if one["seeds"] == 1 and one["strategy"] != TORCH]
    for auto in ours:
        if auto["strategy"] != "auto":
            continue
        for what, key in CHOICES.items():
            alike = ["workload", "method", "command", "devices", *CHOICES.values()]
            alike.remove(key)
            tried = {
                one["strategy"]: one["ratio_to_first"] / auto["ratio_to_first"]
                for one in ours
                if one[key] != auto[key] and all(one[name] == auto[name] for name in alike)
            }
            if tried:
                best = max(tried, key=tried.__getitem__)
                right = "yes" if tried[best] <= NOISE else f"no: {best}"
                others = ", ".join(f"{name} {pace:.2f}" for name, pace in tried.items())
                network = f"{' and '.join(auto['models'])}, {auto['batch_size']}"
                yield network, f"{auto['workload']} {auto['method']}", what, str(auto[key]), others, right


def _growth(records: list[Record]):
    """Yield for each network the most clients that were trained, and the refusal of more."""
    grown = [one for one in records if "-own-" in one["workload"]]
    for network in dict.fromkeys(" ".join(one["models"]) for one in grown):
        its_own = [one for one in grown if " ".join(one["models"]) == network]
        most, refusal = max(its_own, key=lambda one: one["clients"]), ("none", "-")
        for again in its_own:
            if "refused" in again:
                sentence = "{clients:,}: {sentence}".format(**again["refused"])
                refusal = sentence, f"{again['clients']:,} train again"
        held = most["device_peak_bytes"] or most["peak_bytes"]
        fits = f"{most['clients']:,}", str(most["clients_at_once"]), f"{held / 1e9:.3g}"
        yield network, *fits, *refusal


def _bits(parts: Mapping[str, list[Record]]):
    """Yield the comparison of two processes each, with and without XLA's flag."""
    default = None
    for kind in ("default", "deterministic"):
        both = [record for i in (1, 2) for record in parts.get(f"{kind}-{i}", [])]
        if len(both) == 2:
            speed = sum(record["samples_per_s"] for record in both) / 2
            default = speed if kind == "default" else default
            equal = "yes" if both[0]["checksum"] == both[1]["checksum"] else "no"
            yield kind, equal, f"{speed:,.0f}", f"{speed / default:.2f}" if default else "-"
