"""Per-round records and the result of a run: accuracies, bytes, operations, seconds."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jaxfl.core.engine import Chunk
from jaxfl.core.protocol import BYTES_PER_SCALAR, Cohort, messages
from jaxfl.core.rounds import Report
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.folder.code import history
from jaxfl.folder.records import CohortScores, Config, Newcomers, Result, Round, Spent
from jaxfl.machine import clock
from jaxfl.machine.clock import Device
from jaxfl.results.scores import accuracy, client_accuracies, cohort_accuracy, success, teacher_accuracy
from jaxfl.results.target import by_target, gains, stops
from jaxfl.tasks import task_of

MOMENTS = ("received", "trained", "personal")  # of a round, at which clients' models can be scored


def records(
    chunk: Chunk,
    federation: Federation,
    cohorts,
    compile_seconds: float,
    client_devices: PerGroup | None = None,
    together: int = 1,
    deadline: float | None = None,
    show: Collection[str] = (),
) -> list[Round]:
    """Return a chunk as one record per round; the last one holds the scores and the chunk's seconds.

    `show` asks for further scores, and a late client has spent what it could by the `deadline`, in simulated
    seconds.
    """
    lines = [
        _line(report, t, cohorts, federation, client_devices, deadline)
        for t, report in enumerate(chunk.reports, chunk.first)
    ]
    if chunk.preparation is not None:
        before, first = _preparation(chunk.preparation, client_devices), cast(dict[str, Any], lines[0])
        first |= {name: first[name] + amount for name, amount in before.items()}
        first["preparation"] = before
    if chunk.scores is not None:
        likely = chunk.scores.get("likely", ())
        lines[-1]["accuracy"] = accuracy(chunk.scores["personal"], federation, show, likely)
        lines[-1]["received"] = accuracy(chunk.scores["received"], federation)
        if attacked := chunk.scores.get("attacked"):
            lines[-1]["attack_success"] = success(attacked, federation)
    lines[-1]["seconds"] = {
        "compile": compile_seconds,
        "train": chunk.train_seconds,
        "evaluate": chunk.evaluate_seconds,
    }
    if together > 1:
        lines[-1]["together"] = together
    return lines


def _line(report: Report, t: int, cohorts, federation: Federation, client_devices, deadline) -> Round:
    """Return the record of round `t`, see `records`."""
    whole = sorted(_members(report, t, cohorts, federation, client_devices), key=lambda one: one.id)
    members = [_until(deadline, one) if deadline and one.device and one.lost else one for one in whole]
    lost = [one.id for one in members if one.lost]
    losses = [None if one.idle or one.lost else one.loss for one in members]
    told = zip(losses, federation.attackers[[one.id for one in members]], strict=True)
    known = [loss for loss, lies in told if loss is not None and not lies]
    line: Round = {
        "round": t + 1,
        "loss": _finite(float(np.mean(known))) if known else None,
        "bytes_up": sum(one.up for one in members),
        "bytes_down": sum(one.down for one in members),
        "flops": report.flops.total
        + sum(now.flops - then.flops for now, then in zip(members, whole, strict=True)),
        "clients": [one.id for one in members],
        "client_loss": [None if loss is None else _finite(loss) for loss in losses],
        "client_bytes_up": [one.up for one in members],
        "client_bytes_down": [one.down for one in members],
        "client_flops": [one.flops for one in members],
    }
    if report.lost:
        line["lost"] = lost
    if client_devices:
        busy = [clock.seconds(one.device, one.flops, one.up + one.down) for one in members if one.device]
        line["simulated_seconds"] = deadline if deadline and lost else max(busy, default=0.0)
    if report.info.findings:
        line["findings"] = jax.tree.map(_plain, report.info.findings)
    if report.scores and any(not one.lost and not federation.attackers[one.id] for one in members):
        gone = report.lost or [False] * len(cohorts)
        counts = np.append(~federation.attackers, False)  # an empty place is nobody's
        present = [
            counts[np.append(group.id, federation.clients)[slots.index[t]]] & ~np.asarray(is_lost)
            for group, slots, is_lost in zip(federation.groups, cohorts, gone, strict=True)
        ]
        scored = [name for name in MOMENTS if name in report.scores]
        of_all, task = report.scores, federation.task
        found = {name: cohort_accuracy(task, of_all[name], present) for name in scored}
        if teacher := of_all.get("teacher"):
            found |= teacher_accuracy(task, teacher, of_all.get("trained"), present)
        line["cohort"] = cast(CohortScores, found)
    return line


class _Member(NamedTuple):
    """A client in a round's cohort."""

    id: int  # its number in the federation
    device: Device | None  # how fast it is, if known
    loss: float  # its training loss
    idle: bool  # whether it had nothing to train on
    lost: bool  # whether its answer did not reach the server
    up: int  # bytes sent
    down: int  # bytes received
    flops: float  # floating-point operations


def _members(report: Report, t: int, cohorts, federation: Federation, client_devices) -> Iterator[_Member]:
    """Yield the cohort of round `t`, in the order of places."""
    info = report.info
    for g, (slots, group) in enumerate(zip(cohorts, federation.groups, strict=True)):
        taken = slots.mask[t]
        own = slots.index[t][taken]
        flops = report.flops.clients[g][own]
        # Such as a single row under BatchNorm: `fit` reports 0. Operations of own code may not be counted.
        idle = (flops == 0) & (info.loss[g][taken] == 0)
        if info.idle:
            idle = idle | info.idle[g][taken]
        lost = report.lost[g][taken] if report.lost else np.zeros(len(own), bool)
        columns = np.asarray(group.id)[own], info.loss[g][taken], idle, lost, flops
        sent = _bytes(info.up[g], taken), _bytes(info.down[g], taken)
        devices = [None] * len(own)
        if client_devices:
            devices = map(Device, *(speeds[own].tolist() for speeds in client_devices[g]))
        rows = zip(devices, *(column.tolist() for column in columns), *sent, strict=True)
        for device, number, loss, idles, gone, operations, up, down in rows:
            yield _Member(number, device, loss, idles, gone, up, down, operations)


def _until(deadline: float, late: _Member) -> _Member:
    """Return a client that missed the deadline, with what it could spend by then."""
    assert late.device
    flops, up, down = clock.until(deadline, late.device, late.flops, late.up, late.down)
    return late._replace(flops=flops, up=up, down=down)


def joined(report: Report, cohort: Cohort, federation: Federation) -> Newcomers:
    """Return what newcomers got in the round in which they joined, see `jaxfl.core.engine.join`."""
    present = [slots.mask for slots in cohort.groups]
    ids = [
        np.asarray(group.id)[slots.index[slots.mask]].tolist()
        for slots, group in zip(cohort.groups, federation.groups, strict=True)
    ]
    up, down = (
        sum(sum(_bytes(counts, taken)) for counts, taken in zip(of_groups, present, strict=True))
        for of_groups in (report.info.up, report.info.down)
    )
    task = federation.task
    scores = {
        name: {
            **cohort_accuracy(task, of_moment, present),
            "per_client": client_accuracies(task, of_moment, present),
        }
        for name, of_moment in report.scores.items()
        if name in MOMENTS
    }
    return cast(Newcomers, {"clients": sum(ids, []), "bytes_up": up, "bytes_down": down} | scores)


def _preparation(report: Report, client_devices: PerGroup | None) -> Spent:
    """Return what all clients sent, received and computed before the first round."""
    up, down = (
        [_bytes(of_group, slice(None)) for of_group in counts]
        for counts in (report.info.up, report.info.down)
    )
    spent: Spent = {
        "bytes_up": sum(map(sum, up)),
        "bytes_down": sum(map(sum, down)),
        "flops": report.flops.total,
    }
    if client_devices:
        spent["simulated_seconds"] = max(
            float(clock.seconds(devices, flops, np.add(sent, received)).max())
            for devices, flops, sent, received in zip(
                client_devices, report.flops.clients, up, down, strict=True
            )
        )
    return spent


def _bytes(counts, places) -> list[int]:
    """Return bytes of clients in some places, see `Info.up`: Python integers, which may exceed 32 bits."""
    of_sizes = [
        [size * int(count) for count in of_size[places]] for size, of_size in messages(counts).items()
    ]
    return [BYTES_PER_SCALAR * sum(of_client) for of_client in zip(*of_sizes, strict=True)]


def _plain(leaf):
    if isinstance(leaf, (np.ndarray, np.generic)):
        return _finite(float(leaf)) if leaf.dtype.kind == "f" and leaf.ndim == 0 else leaf.tolist()
    return leaf


def _finite(loss: float) -> float | None:
    """Return a loss for JSON, None if it is not finite."""
    return float(loss) if np.isfinite(loss) else None


NO_VALIDATION = "clients have no validation rows to choose by; runs with a validation_fraction have some."


def selected(result: Result, metrics: list[Round], select: str) -> Result:
    """Return a run's result with the scores of another evaluation; its costs stay those of the whole run.

    It is the last one, or for "validation" the first with the best accuracy on validation rows.

    Raises:
      JaxflError: if clients have no validation rows.
    """
    if select == "last":
        return result
    record = best(result["method"], metrics)
    chosen: Any = {
        name: record[name] for name in record if name in ("accuracy", "received", "attack_success")
    }
    return cast(Result, {**result, **chosen})


def best(label: str, metrics: list[Round]) -> Round:
    """Return the record of the first evaluation with the best accuracy on validation rows.

    Raises:
      JaxflError: naming the run's label, if clients have no validation rows.
    """
    values = gains(metrics)
    if values is None:
        raise JaxflError(f"{label}: {NO_VALIDATION}")
    return [record for record in metrics if "accuracy" in record][int(np.argmax(values))]


def result(config: Config, metrics: list[Round], compilations: int) -> Result:
    """Return the summary of a run from its metrics and the number of programs compiled for it."""
    scored = [record for record in metrics if "accuracy" in record]
    means, values = [record["accuracy"]["mean"] for record in scored], gains(metrics)
    summary = {
        "last": means[-1],
        "mean_last_10_evaluations": float(np.mean(means[-10:])),
        "best_validation": None if values is None else means[int(np.argmax(values))],
        "best_test": task_of(scored[-1]["accuracy"]).better(means),
    }
    timed = [record["seconds"] for record in metrics if "seconds" in record]
    made: Result = {
        "method": config["label"],
        "seed": config["options"]["seed"],
        "rounds": metrics[-1]["round"],
        "class_names": config["data"].get("class_names", []),
        "accuracy": scored[-1]["accuracy"],
        "received": scored[-1]["received"],
        "summary": summary,
        "bytes_up": sum(record["bytes_up"] for record in metrics),
        "bytes_down": sum(record["bytes_down"] for record in metrics),
        "flops": sum(record["flops"] for record in metrics),
        "simulated_seconds": sum(record["simulated_seconds"] for record in metrics)
        if "simulated_seconds" in metrics[0]
        else None,
        "lost_answers": sum(len(record["lost"]) for record in metrics) if "lost" in metrics[0] else None,
        "targets": by_target(metrics, config["options"].get("target", ())),
        "stopped": stops(config, metrics) if metrics[-1]["round"] < config["options"]["rounds"] else None,
        "findings": next((r["findings"] for r in reversed(metrics) if r.get("findings")), None),
        "seconds": {key: sum(part.get(key, 0.0) for part in timed) for key in timed[-1]},
        "compilations": compilations,
        "code": history(config, metrics),
    }
    if cohorts := [record["cohort"] for record in metrics if "cohort" in record][-10:]:
        made["cohort"] = _over_rounds(cohorts)
        summary["cohort_received_pooled_mean_last_10"] = made["cohort"]["received"]["pooled"]
    if "attack_success" in scored[-1]:
        made["attack_success"] = scored[-1]["attack_success"]
    if "privacy" in scored[-1]:
        made["privacy"] = scored[-1]["privacy"]
    if "newcomers" in metrics[-1]:
        made["newcomers"] = metrics[-1]["newcomers"]
    return made


def _over_rounds(cohorts: list[CohortScores]) -> CohortScores:
    moments: dict[str, list[dict]] = {}
    for of_round in cohorts:
        for moment, scores in cast(dict[str, Any], of_round).items():
            moments.setdefault(moment, []).append(scores)
    means = {
        moment: {name: float(np.mean([scores[name] for scores in known])) for name in known[0]}
        for moment, known in moments.items()
    }
    return cast(CohortScores, means)


def findings(metrics: list[Round]) -> dict[str, dict[str, np.ndarray] | list]:
    """Return the findings of a method over the rounds of a run, by name.

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
