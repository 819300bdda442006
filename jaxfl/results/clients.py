"""The table of a run's clients: their data, accuracies and costs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxfl.data.federation import Federation, PerGroup
from jaxfl.folder.records import Round
from jaxfl.machine import texts
from jaxfl.machine.clock import Device
from jaxfl.tasks import task_of

SPENT = ("bytes_up", "bytes_down", "flops")


def as_csv(
    metrics: list[Round],
    federation: Federation,
    names: Sequence[str] = (),
    client_devices: PerGroup | None = None,
) -> str:
    """Return a CSV table with a row per client, in the order of ids.

    Scores are those of the last round. Names are those of the clients in the data, see `Partition`, and their
    devices are known if speeds are, see `jaxfl.runs.architectures.client_devices`.

    Returns:
      Name, if clients have names, architecture, whether it is a newcomer, and, if there are any, an attacker,
      whose scores are left out; training and test rows; accuracy,
      accuracy as received and macro F1 at the end, as fractions (for a newcomer the accuracies after and
      before joining); the number of rounds in which the client took part, and in which its answer was lost,
      and what it sent, received and computed in them; how fast it is, if that is known. What happens before
      the first round is in no row.
    """
    last = metrics[-1]
    newcomers: Any = last.get("newcomers", {"clients": []})
    task = task_of(last["accuracy"])
    further = [metric.key for metric in task.metrics if "per_client" in metric.recorded]
    known: list = [last[name]["per_client"] for name in ("accuracy", "received")]
    known += [last["accuracy"][f"{name}_per_client"] for name in further]
    place = {client: i for i, client in enumerate(newcomers["clients"])}
    rounds, lost, spent = Counter(), Counter(), {name: Counter() for name in SPENT}
    for record in metrics:
        rounds.update(record["clients"])
        lost.update(record.get("lost", ()))
        for name, of_clients in spent.items():
            for client, amount in zip(record["clients"], record[f"client_{name}"], strict=True):
                of_clients[client] += amount
    attacks = federation.attackers.any()
    table: list[list] = [
        ["client", *(["name"] if names else []), "architecture", "newcomer"]
        + [*(["attacker"] if attacks else []), "train_rows", "test_rows"]
        + [task.title.lower(), "received", *further, "rounds", "lost", *SPENT]
        + ([*Device._fields] if client_devices else [])
    ]
    for g, group in enumerate(federation.groups):
        columns = [group.id, group.size, group.test_size, *(client_devices[g] if client_devices else ())]
        for client, *rows_and_device in zip(*(np.asarray(one).tolist() for one in columns), strict=True):
            new = place.get(client)
            scored = (
                [of_clients[client] for of_clients in known]
                if new is None
                else [newcomers[moment]["per_client"][new] for moment in ("personal", "received")]
                + [None] * len(further)
            )
            table.append(
                [client, *names[client : client + 1], group.model.name, int(new is not None)]
                + [*([int(federation.attackers[client])] if attacks else []), *rows_and_device[:2], *scored]
                + [rounds[client], lost[client], *(of_clients[client] for of_clients in spent.values())]
                + rows_and_device[2:]
            )
    return texts.as_csv(table)
