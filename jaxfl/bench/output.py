"""The output of a benchmark: a table, a JSON list of records, and a picture of it."""

import json
import os
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from jaxfl.bench.contestants import TORCH
from jaxfl.errors import JaxflError
from jaxfl.machine import files
from jaxfl.machine.environment import environment

UNFINISHED = ".unfinished.json"  # in place of .json
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "": lambda record: record["workload"],
    "method": lambda record: record["method"],
    "strategy": lambda record: record["strategy"],
    "samples/s": lambda record: _or_dash(record["samples_per_s"], _rate),
    "steps/s": lambda record: _or_dash(record["steps_per_s"], _rate),
    "s/round": lambda record: f"{record['seconds_per_round']:.3g}",
    "host s": lambda record: _or_dash(record["host_s_per_round"] or None, "{:.3g}".format),
    "GFLOP/round": lambda record: _rate(record["flops_per_round"] / 1e9),
    "x first": lambda record: _or_dash(_beside_first(record), "{:.2f}".format),
    "x torch": lambda record: _or_dash(record["ratio_to_torch"], "{:.2f}".format),
    "x rival": lambda record: _or_dash(record["ratio_to_rival"], "{:.2f}".format),
    "compile s": lambda record: _or_dash(record["compile_s"], "{:.1f}".format),
    "peak MB": lambda record: _or_dash(record["peak_bytes"], lambda value: f"{value / 1e6:,.0f}"),
    "MFU %": lambda record: f"{100 * record['mfu']:.1f}",
}


def table(records: list[dict[str, Any]]) -> Table:
    """Return a table of the medians, one row per record; columns that say nothing are left out."""
    drawn = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    columns = {name: [cell(record) for record in records] for name, cell in COLUMNS.items()}
    columns = {name: column for name, column in columns.items() if set(column) not in ({"-"}, {"auto"})}
    for name in columns:
        justify = "left" if name in ("", "method", "strategy") else "right"
        drawn.add_column(name, justify=justify, no_wrap=name != "method", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        drawn.add_row(*row)
    return drawn


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _beside_first(record: dict[str, Any]) -> float | None:
    """Return the ratio to the first; None for the first itself, and the PyTorch loop, which has a column."""
    itself = record["ratio_to_first"] == 1 or record["strategy"] == TORCH
    return None if itself else record["ratio_to_first"]


def _or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def machine() -> dict[str, Any]:
    """Return processor, device, and "load", the processes that want to run, over the last minute."""
    info, name = Path("/proc/cpuinfo"), platform.processor()
    if info.exists():
        models = [line.partition(":")[2] for line in info.read_text().splitlines() if "model name" in line]
        name = models[0].strip() if models else name
    device = jax.devices()[0]
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "device": f"{device.platform} {device.device_kind}",
        "devices": jax.device_count(),
    }


def versions(torch: bool) -> dict[str, str | None]:
    """Return the versions of jaxfl and what it computes with."""
    found = environment()
    shown = ("jaxfl", "git", "jax", "jaxlib", "flax", "optax", "numpy", "python")
    return {name: found[name] for name in shown} | ({"torch": version("torch")} if torch else {})


def keep(records: list[dict[str, Any]], path: Path | None) -> None:
    """Write the records so far, for `unfinished` to find."""
    if path:
        files.write_json(path.with_suffix(UNFINISHED), records)


def check_writable(path: Path | None) -> None:
    """Refuse a file for records that cannot be written, before anything is measured.

    Raises:
      JaxflError: saying why.
    """
    if path is None:
        return
    if path.is_dir() or path.suffix == ".png":
        raise JaxflError(
            f"--out {path} is not a file for records; name one like records.json, and a picture "
            "goes beside it."
        )
    probe = path.with_suffix(f"{UNFINISHED}.probe")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise files.unwritable(path, error) from error


def unfinished(path: Path | None, facts: dict[str, Any], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the records of a command that was cut short, if `facts` are the same, and tell the user."""
    kept = path and path.with_suffix(UNFINISHED)
    if not (kept and kept.is_file()):
        return []

    def fixed(record):
        machine = {name: value for name, value in record["machine"].items() if name != "load"}
        return record["command"], record["versions"], machine

    try:
        records = json.loads(kept.read_text())
        same = all(fixed(record) == fixed(facts) for record in records)
    except (ValueError, TypeError, KeyError, AttributeError):  # somebody has changed it
        records, same = [], False
    if not same:
        say(f"{kept} is from another command, version or machine, or damaged; all is measured again.")
        return []
    say(f"{len(records)} records of this command exist already; it continues after them.")
    return records


def save(records: list[dict[str, Any]], path: Path) -> Path:
    """Write the records to `path` and their picture beside it; return the picture's path."""
    picture = path.with_suffix(".png")
    draw(records, picture)
    files.write_json(path, records)
    path.with_suffix(UNFINISHED).unlink(missing_ok=True)
    return picture


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG: the cost of an operation in each method if all have a rival, else rates."""
    beside_rival = all(record["ratio_to_rival"] for record in records)
    files.write_pictures(path.parent, {path.name: partial(_dearness if beside_rival else _rates, records)})


def _dearness(records: list[dict[str, Any]]) -> Figure:
    """Draw seconds per operation as multiples of the rival's, a bar per record, host steps paler."""
    figure = Figure((7, 1.2 + 0.3 * len(records)), layout="constrained", dpi=150)
    axes, several = figure.subplots(), len({record["strategy"] for record in records}) > 1
    names = [record["method"] + (f", {record['strategy']}" if several else "") for record in records]
    ratios = np.array([record["ratio_to_rival"] for record in records])
    host = np.array([record["host_s_per_round"] / record["seconds_per_round"] for record in records])
    places = range(len(records))
    bars = axes.barh(places, ratios, color="C0", alpha=0.4, label="and between rounds, on the host")
    axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], fontsize="x-small", padding=2)
    axes.barh(places, ratios * (1 - host), color="C0", label="in compiled programs")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(places, names, fontsize="small")
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set(xscale="log", xlim=(0.5 * min(1, ratios.min()), 2 * ratios.max()))
    low, high = np.log2(axes.get_xlim())
    axes.set_xticks(2.0 ** np.arange(np.ceil(low), high))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel(f"seconds per counted operation, as multiples of {records[0]['rival']}'s in turn")
    if host.any():
        axes.legend(fontsize="small", loc="lower right")
    return figure


def _rates(records: list[dict[str, Any]]) -> Figure:
    """Draw rates by workload and method, a bar per strategy; a whisker spans the repetitions."""
    counted = all(record["samples_per_s"] for record in records)
    what, label = ("samples", "training samples") if counted else ("flops", "floating-point operations")
    places = list(dict.fromkeys((record["workload"], record["method"]) for record in records))
    strategies = list(dict.fromkeys(record["strategy"] for record in records))
    strategies.sort(key=lambda name: name == TORCH)  # last
    figure = Figure((max(6, 1.4 * len(places)), 4.2), layout="constrained", dpi=150)
    axes, width = figure.subplots(), 0.8 / len(strategies)
    for i, strategy in enumerate(strategies):
        own = [record for record in records if record["strategy"] == strategy]
        x = [places.index((record["workload"], record["method"])) for record in own]
        x = np.array(x) + (i - (len(strategies) - 1) / 2) * width
        height = np.array([record[f"{what}_per_s"] for record in own])
        rates = [[turn[what] / turn["seconds"] for turn in record["repetitions"]] for record in own]
        low, high = (np.array([end(of_record) for of_record in rates]) for end in (min, max))
        name = "PyTorch loop" if strategy == TORCH else f"jaxfl, {strategy}"
        bars = axes.bar(x, height, width, yerr=(height - low, high - height), label=name, capsize=2)
        ratios = [_or_dash(record["ratio_to_torch"], "{:.3g}x".format) for record in own]
        axes.bar_label(bars, ratios, fontsize="x-small", padding=1)
    axes.set_xticks(range(len(places)), [f"{workload}\n{method}" for workload, method in places])
    axes.tick_params(axis="x", labelsize="small")
    slowest = min(record[f"{what}_per_s"] for record in records)
    axes.set(yscale="log", ylabel=f"{label} per second")
    axes.set_ylim(bottom=10 ** np.floor(np.log10(slowest / 2)))  # no bar vanishes
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(fontsize="small", loc="outside upper center", ncols=len(strategies))  # hides no bar
    return figure
