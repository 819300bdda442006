"""The server, which sends the run's shared weights and averages what comes back."""

from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from jaxfl.deployed.device import sent_first

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run rounds of Flower's own FedAvg, and at the end write the mean where `out` says."""
    config = context.run_config
    after, rounds = int(config["after"]), int(config["num-server-rounds"])
    strategy = FedAvg(
        fraction_train=float(config["fraction-train"]),
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=int(config["clients"]),
        evaluate_metrics_aggr_fn=mean_of_clients,
    )
    clock = {"after": after, "rounds": max(int(config["length"]), after + rounds)}  # rates depend on it
    first = sent_first(Path(str(config["run"])), after)
    result = strategy.start(
        grid,
        ArrayRecord({name: Array(array) for name, array in first.items()}),
        num_rounds=rounds,
        train_config=ConfigRecord(clock),
        evaluate_config=ConfigRecord(clock),
    )
    np.savez(str(config["out"]), **{name: array.numpy() for name, array in result.arrays.items()})


def mean_of_clients(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Return the score as jaxfl reports it: the uniform mean over clients that have test rows."""
    scored = [dict(reply["metrics"]) for reply in replies]
    scored = [of_node for of_node in scored if of_node.pop("num-examples")]
    return MetricRecord(
        {name: float(np.mean([one[name] for one in scored])) for name in scored[0]} if scored else {}
    )
