"""The nodes: every client trains as it does in jaxfl, and keeps what the method does not send."""

from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from jaxfl.deployed.device import Node, Own, node

app = ClientApp()
NODES = {}  # of this process, to which Flower gives the messages of several


def own_data(context: Context) -> Own | None:
    """Return this node's images; None stands for those that client `partition-id` has in the run.

    A real node returns ``Own(images, labels, test_images, test_labels)``: images as the run's data set has
    them (jaxfl normalises them like the run's), and labels in its numbering of the classes.
    """
    return None


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for a round and send what the method shares; besides, only loss and row count leave the node."""
    me, (t, rounds) = this_node(context), clock(message)
    sent, kept, loss = me.train(arrays(message.content["arrays"]), kept_here(me, context), t, rounds)
    context.state["kept"] = record(kept)
    metrics = MetricRecord({"loss": loss, "num-examples": me.weight})
    return Message(RecordDict({"arrays": record(sent), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score what this node deploys on its own test images."""
    me, (t, rounds) = this_node(context), clock(message)
    value, rows = me.score(arrays(message.content["arrays"]), kept_here(me, context), t, rounds)
    metrics = MetricRecord({me.federation.task.title: value, "num-examples": rows})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def this_node(context: Context) -> Node:
    """Return the client that this node is; `--node-config` may say where its copy of the run is."""
    run = str(context.node_config.get("run", context.run_config["run"]))
    who = run, int(context.node_config["partition-id"]), int(context.run_config["after"])
    if who not in NODES:
        folder, client, after = who
        NODES[who] = node(Path(folder), client, after, own_data(context))
    return NODES[who]


def clock(message: Message) -> tuple[int, int]:
    """Return the number of the round, from 0, and how many there are."""
    config = message.content["config"]
    return int(config["after"]) + int(config["server-round"]) - 1, int(config["rounds"])


def kept_here(me: Node, context: Context) -> dict:
    """Return what this node has kept of its last round; before its first one, what the run gives it."""
    return arrays(context.state["kept"]) if "kept" in context.state else me.kept


def arrays(record: ArrayRecord) -> dict:
    """Convert a record to NumPy arrays by name."""
    return {name: array.numpy() for name, array in record.items()}


def record(arrays: dict) -> ArrayRecord:
    """Convert NumPy arrays by name to a record."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})
