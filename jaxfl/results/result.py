"""Per-round records and the result of a run: accuracies, bytes, operations, seconds."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import jax
import numpy as np

from jaxfl.core.engine import Chunk
from jaxfl.core.protocol import BYTES_PER_SCALAR, Cohort, messages
from jaxfl.core.rounds import Report
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.folder.code import history
from jaxfl.machine import clock
from jaxfl.machine.clock import Device
from jaxfl.results.scores import accuracy, client_accuracies, cohort_accuracy, teacher_accuracy
from jaxfl.results.target import by_target, stops
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
) -> list[dict]:
    """Return a chunk as one record per round; the last one holds the scores and the chunk's seconds.

    They are the lines of metrics.jsonl:

        round              from 1 on
        clients            ids of the round's cohort, ascending; losses, bytes and the like are in their order
        client_loss        None where it is not finite, the client has not trained, or its answer was lost
        loss               mean over the clients that trained and answered
        client_bytes_up, client_bytes_down
                           and their sums, bytes_up and bytes_down
        client_flops       operations of training; flops is their sum and the server's part, see
                           `jaxfl.core.flops`
        lost               ids of clients whose answers were lost, if some can be; a late client has spent
                           what it could by the `deadline`, in simulated seconds
        simulated_seconds  of the slowest client, or the deadline if the server waits for one in vain; only
                           if it is known how fast clients are
        cohort             scores of the round's cohort, if asked for
        findings           of methods that have some
        preparation        costs of a method before round 1, which count for that round
        accuracy, received
                           scores of all clients except newcomers, if evaluated, see
                           `jaxfl.results.scores.accuracy`; `accuracy` with those that `show` asks for
        seconds            of the chunk
        together           number of runs in one program; the seconds of training are one run's part
    """
    lines = [
        _line(report, t, cohorts, federation, client_devices, deadline)
        for t, report in enumerate(chunk.reports, chunk.first)
    ]
    if chunk.preparation is not None:
        before = _preparation(chunk.preparation, client_devices)
        lines[0] |= {name: lines[0][name] + amount for name, amount in before.items()}
        lines[0]["preparation"] = before
    if chunk.scores is not None:
        likely = chunk.scores.get("likely", ())
        lines[-1]["accuracy"] = accuracy(chunk.scores["personal"], federation, show, likely)
        lines[-1]["received"] = accuracy(chunk.scores["received"], federation)
    lines[-1]["seconds"] = {
        "compile": compile_seconds,
        "train": chunk.train_seconds,
        "evaluate": chunk.evaluate_seconds,
    }
    if together > 1:
        lines[-1]["together"] = together
    return lines


def _line(report: Report, t: int, cohorts, federation: Federation, client_devices, deadline) -> dict:
    """Return the record of round `t`, see `records`."""
    whole = sorted(_members(report, t, cohorts, federation, client_devices), key=lambda one: one.id)
    members = [_until(deadline, one) if deadline and one.device and one.lost else one for one in whole]
    lost = [one.id for one in members if one.lost]
    losses = [None if one.idle or one.lost else one.loss for one in members]
    known = [loss for loss in losses if loss is not None]
    line = {
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
    if busy := [clock.seconds(one.device, one.flops, one.up + one.down) for one in members if one.device]:
        line["simulated_seconds"] = deadline if deadline and lost else max(busy)
    if report.info.findings:
        line["findings"] = jax.tree.map(_plain, report.info.findings)
    if report.scores and len(lost) < len(members):
        gone = report.lost or [False] * len(cohorts)
        present = [slots.mask[t] & ~np.asarray(is_lost) for slots, is_lost in zip(cohorts, gone, strict=True)]
        scored = [name for name in MOMENTS if name in report.scores]
        of_all, task = report.scores, federation.task
        line["cohort"] = {name: cohort_accuracy(task, of_all[name], present) for name in scored}
        if teacher := of_all.get("teacher"):
            line["cohort"] |= teacher_accuracy(task, teacher, of_all.get("trained"), present)
    return line


class _Member(NamedTuple):
    """A client in a round's cohort.

    Args:
      id: its number in the federation.
      device: how fast it is, if known.
      loss: its training loss.
      idle: whether it had nothing to train on.
      lost: whether its answer did not reach the server.
      up, down: bytes sent and received.
      flops: floating-point operations.
    """

    id: int
    device: Device | None
    loss: float
    idle: bool
    lost: bool
    up: int
    down: int
    flops: float


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


def joined(report: Report, cohort: Cohort, federation: Federation) -> dict:
    """Return what newcomers got in the round in which they joined, see `jaxfl.core.engine.join`.

    Returns:
      clients: their ids; bytes_up, bytes_down; and the accuracy on their test rows before their training
      (received), right after it (trained, if the method gives it) and at the end of the round (personal):
      mean over them, pooled, and per_client in the order of `clients`.
    """
    present = [slots.mask for slots in cohort.groups]
    ids = [
        np.asarray(group.id)[slots.index[slots.mask]].tolist()
        for slots, group in zip(cohort.groups, federation.groups, strict=True)
    ]
    up, down = (
        sum(sum(_bytes(counts, taken)) for counts, taken in zip(of_groups, present, strict=True))
        for of_groups in (report.info.up, report.info.down)
    )
    return {"clients": sum(ids, []), "bytes_up": up, "bytes_down": down} | {
        name: cohort_accuracy(federation.task, report.scores[name], present)
        | {"per_client": client_accuracies(federation.task, report.scores[name], present)}
        for name in MOMENTS
        if name in report.scores
    }


def _preparation(report: Report, client_devices: PerGroup | None) -> dict:
    """Return what all clients sent, received and computed before the first round."""
    up, down = (
        [_bytes(of_group, slice(None)) for of_group in counts]
        for counts in (report.info.up, report.info.down)
    )
    spent = {
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
    """Convert a finding to JSON values."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return _finite(float(leaf)) if leaf.dtype.kind == "f" and leaf.ndim == 0 else leaf.tolist()
    return leaf


def _finite(loss: float) -> float | None:
    """Return a loss for JSON, None if it is not finite."""
    return float(loss) if np.isfinite(loss) else None


NO_VALIDATION = "clients have no validation rows to choose by; runs with a validation_fraction have some."


def selected(result: dict, metrics: list[dict], select: str) -> dict:
    """Return a run's result with the accuracies of another evaluation; its costs stay those of the whole run.

    Args:
      result: the content of result.json.
      metrics: that of metrics.jsonl.
      select: "last", or "validation": the first evaluation with the best accuracy on validation rows.

    Raises:
      JaxflError: if clients have no validation rows.
    """
    if select == "last":
        return result
    record = best(result["method"], metrics)
    return result | {name: record[name] for name in ("accuracy", "received")}


def best(label: str, metrics: list[dict]) -> dict:
    """Return the record of the first evaluation with the best accuracy on validation rows.

    Raises:
      JaxflError: naming the run's label, if clients have no validation rows.
    """
    scored = [record for record in metrics if "accuracy" in record]
    if any(record["accuracy"]["validation"] is None for record in scored):
        raise JaxflError(f"{label}: {NO_VALIDATION}")
    return _best(scored)


def _best(scored: list[dict]) -> dict:
    """Return the first of some records with the best score on validation rows."""
    task = task_of(scored[0]["accuracy"])
    return max(scored, key=lambda record: task.gain(record["accuracy"]["validation"]))


def result(config: dict, metrics: list[dict], compilations: int) -> dict:
    """Return the summary of a run from its metrics and the number of programs compiled for it.

    summary: accuracy (mean over clients) at the end, the mean of the last ten evaluations, the best by
    validation accuracy, and the best on test data (for comparison with papers that report that). If cohorts
    are scored, also their pooled accuracy before local training, mean of the last ten rounds (FedCMD's
    figure). cohort: all scores of cohorts, if any, means of these rounds. lost_answers: their number, None if
    none can be lost. targets: see `jaxfl.results.target.by_target`. stopped: why the run ended early, see
    `jaxfl.results.target.stops`; None if it did not. code: every code of the run with its first round, see
    `jaxfl.folder.code`.
    """
    scored = [record for record in metrics if "accuracy" in record]
    means = [record["accuracy"]["mean"] for record in scored]
    validated = all(record["accuracy"]["validation"] is not None for record in scored)
    best = _best(scored)["accuracy"]["mean"] if validated else None
    cohort = _over_rounds([record["cohort"] for record in metrics if "cohort" in record][-10:])
    timed = [record["seconds"] for record in metrics if "seconds" in record]
    return {
        "method": config["label"],
        "seed": config["options"]["seed"],
        "rounds": metrics[-1]["round"],
        "class_names": config.get("data", {}).get("class_names", []),
        "accuracy": scored[-1]["accuracy"],
        "received": scored[-1]["received"],
        "summary": {
            "last": means[-1],
            "mean_last_10_evaluations": float(np.mean(means[-10:])),
            "best_validation": best,
            "best_test": task_of(scored[-1]["accuracy"]).better(means),
        }
        | ({"cohort_received_pooled_mean_last_10": cohort["received"]["pooled"]} if cohort else {}),
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
    } | {
        name: scores
        for name, scores in (("cohort", cohort), ("newcomers", metrics[-1].get("newcomers")))
        if scores
    }


def _over_rounds(cohorts: list[dict]) -> dict:
    """Return the scores of rounds' cohorts as means over the rounds that have them."""
    moments: dict[str, list[dict]] = {}
    for of_round in cohorts:
        for moment, scores in of_round.items():
            moments.setdefault(moment, []).append(scores)
    return {
        moment: {name: float(np.mean([scores[name] for scores in known])) for name in known[0]}
        for moment, known in moments.items()
    }
