"""What a benchmark leaves: a table, a JSON list of records, and a picture of it."""

import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from jaxfl.bench.contestants import TORCH
from jaxfl.errors import writing
from jaxfl.machine.environment import environment
from jaxfl.runs import store

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "": lambda record: record["workload"],
    "method": lambda record: record["method"],
    "strategy": lambda record: record["strategy"],
    "samples/s": lambda record: _rate(record["samples_per_s"]),
    "steps/s": lambda record: _rate(record["steps_per_s"]),
    "x first": lambda record: _or_dash(_beside_first(record), "{:.2f}"),
    "x torch": lambda record: _or_dash(record["ratio_to_torch"], "{:.2f}"),
    "compile s": lambda record: _or_dash(record["compile_s"], "{:.1f}"),
    "peak MB": lambda record: _or_dash(record["peak_bytes"] and record["peak_bytes"] / 1e6, "{:,.0f}"),
    "MFU %": lambda record: f"{100 * record['mfu']:.1f}",
}


def table(records: list[dict[str, Any]]) -> Table:
    """The medians, one row a record; strategies are compared with the first where there are several."""
    drawn = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    several = any(_beside_first(record) for record in records)
    columns = {name: cell for name, cell in COLUMNS.items() if several or name != "x first"}
    for i, name in enumerate(columns):
        drawn.add_column(
            name, justify="left" if i < 3 else "right", no_wrap=name != "method", overflow="fold"
        )
    for record in records:
        drawn.add_row(*(cell(record) for cell in columns.values()))
    return drawn


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _beside_first(record: dict[str, Any]) -> float | None:
    """None for the first strategy itself, and for the PyTorch loop, which has a column of its own."""
    itself = record["ratio_to_first"] == 1 or record["strategy"] == TORCH
    return None if itself else record["ratio_to_first"]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def machine() -> dict[str, Any]:
    """Processor, device, and how busy it is: "load", processes that want to run, over the last minute."""
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
    """Of jaxfl and what it computes with."""
    told = environment()
    known = ("jaxfl", "git", "jax", "jaxlib", "flax", "optax", "numpy", "python")
    return {name: told[name] for name in known} | ({"torch": version("torch")} if torch else {})


def save(records: list[dict[str, Any]], path: Path) -> Path:
    """Write the records to `path`, and their picture beside it, whose path is returned."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    store.write_json(path, records)
    picture = path.with_suffix(".png")
    draw(records, picture)
    return picture


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG: samples/s by workload and method, a bar per strategy; a whisker spans the repetitions."""
    places = list(dict.fromkeys((record["workload"], record["method"]) for record in records))
    strategies = list(dict.fromkeys(record["strategy"] for record in records))
    strategies.sort(key=lambda name: name == TORCH)  # last
    figure = Figure((max(6, 1.4 * len(places)), 4.2), layout="constrained", dpi=150)
    axes, width = figure.subplots(), 0.8 / len(strategies)
    for i, strategy in enumerate(strategies):
        own = [record for record in records if record["strategy"] == strategy]
        x = [places.index((record["workload"], record["method"])) for record in own]
        x = np.array(x) + (i - (len(strategies) - 1) / 2) * width
        height = np.array([record["samples_per_s"] for record in own])
        low, high = (np.array([end(record["repetitions"]) for record in own]) for end in (min, max))
        label = "PyTorch loop" if strategy == TORCH else f"jaxfl, {strategy}"
        bars = axes.bar(x, height, width, yerr=(height - low, high - height), label=label, capsize=2)
        ratios = [_or_dash(record["ratio_to_torch"], "{:.2f}x") for record in own]
        axes.bar_label(bars, ratios, fontsize="x-small", padding=1)
    axes.set_xticks(range(len(places)), [f"{workload}\n{method}" for workload, method in places])
    axes.tick_params(axis="x", labelsize="small")
    slowest = min(record["samples_per_s"] for record in records)
    axes.set(yscale="log", ylabel="training samples per second")
    axes.set_ylim(bottom=10 ** np.floor(np.log10(slowest / 2)))  # no bar vanishes
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small")
    with writing(path):
        figure.savefig(path, format="png")
