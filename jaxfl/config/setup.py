"""Options that mean the same for every method, by subject. Flags and keyword arguments are flat."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, Self

from jaxfl.config.asked import read_options
from jaxfl.config.options import declared, within


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """The images."""

    dataset: str = "digits"
    """digits, a tensorflow-datasets name (cifar10, cifar100:coarse_label, emnist/byclass, ...), hf: with a
    name or a folder of a Hugging Face data set (hf:uoft-cs/cifar100,label=fine_label; further options image
    and config), an .npz file of images, features, windows or tokens, a table (homes.csv,target=price, with
    options client, without and missing), a folder with one sub-folder of images per class, or
    my.py:source. Each may end in ,classes=0-4+8: only these classes, numbered anew. docs/data.md"""
    task: Literal["auto", "classes", "labels", "regression", "next-token"] = "auto"
    """What labels are: classes, labels (some of several, 0 or 1 for each), regression (one or several
    numbers) or next-token (what follows in a row of tokens). auto takes it from their type: words and
    integers are classes, other numbers are of a regression, rows of 0 and 1 are labels, and tokens without
    labels say what follows. docs/tasks.md"""
    normalise: Literal["auto", "channel", "feature", "none"] = "auto"
    """By which mean and deviation, over the rows that clients train on, inputs are normalised: of each
    channel, of each value on its own (feature), or not at all. auto: of each channel, which in vectors is
    each feature; tokens are not normalised."""
    public: str = "auto"
    """Images that everybody sees: none, held-out (with share=0.1: of every class, taken from the clients), or
    another data set with size=NUMBER and labels=true where these mean the same: mnist,size=3000. auto:
    held-out where a method needs some, or what a saved partition holds."""
    shift: tuple[str, ...] = ()
    """How the images of clients differ, drawn for each by partition_seed and then fixed:
    rotate,degrees=45.0,angles=none; colour,hue=0.5; noise,std=0.5; or several of them. `jaxfl list
    rotate` says what options mean."""


@dataclasses.dataclass(frozen=True)
class PartitionOptions:
    """The division of the images among clients."""

    partition: str = "classes"
    """How rows are divided, with options and their defaults: iid;
    classes,classes_per_client=none,samples_per_client=none (five, as many as there are, on digits 20);
    shards,shards_per_client=2; dirichlet,alpha=0.1,min_samples=10;
    dirichlet-flbench,alpha=0.1,min_samples=10; quantity,sigma=1.0,min_samples=10;
    power-law,classes_per_client=2,base=10,least=none,most=none,sigma=2.0;
    natural,column=client,min_samples=10 (every value of a column of the data is a client);
    listed,file=none,column=row (a list of rows per client, in JSON). `jaxfl list
    dirichlet` says what they mean. Or a saved partition (.npz, .json, or .pkl of FL-bench, docs/data.md);
    or my.py:partitioner."""
    clients: int | None = within("[1, inf)", None)
    """Number of clients; by default 20, with natural all there are, or those of a saved partition."""
    partition_seed: int = within("[0, 18446744073709551616)", 0)
    """Seed of the partition, which is part of the data: fixed, whatever the seed of the run."""
    labels: Literal["unified", "independent", "permuted"] = "unified"
    """Whether a label means the same on all clients (unified), or each client numbers classes in its own
    order: all of the data (permuted), or with test rows of the source only its own (independent)."""
    test: Literal["auto", "own", "source", "split", "all"] = "auto"
    """Test rows: cut from the client's own rows (own), the source's test rows of its classes (source), all of
    the source's test rows (all), or those among its own rows (split: a client without any has some cut, one
    with nothing else never trains). auto: source for the partition `classes`, split for `natural` and
    `listed`, own for all others. The rule that is used is kept with the run."""
    test_fraction: float = within("(0, 1)", 0.25)
    """Share of a client's rows that are test rows, if they are cut from its own."""
    validation_fraction: float | None = within("[0, 1)", None)
    """Share of a client's training rows that are set aside for validation; by default 0.2 if a method
    needs such rows, else 0."""
    max_train: int | None = within("[1, inf)", None)
    """Largest number of training rows per client, drawn from its own, validation rows included: for quick
    trials on large data."""
    max_test: int | None = within("[1, inf)", None)
    """Largest number of test rows per client; from the source, equally many of each class."""
    disjoint_from: Path | None = None
    """A saved partition (.npz, .json, .pkl) of the same data: no client trains on any of its rows or holds
    one out. For experts that are trained on rows that the clients of another run do not have."""


def is_saved(partition: str) -> bool:
    """Return whether a choice of a partition names a saved one; an option of another may name a file, too."""
    choice = partition.startswith("listed,") or ".py:" in partition
    return partition.endswith((".npz", ".json", ".pkl")) and not choice


def is_edges(topology: str) -> bool:
    """Return whether a choice of links names a file of edges."""
    return topology.endswith(".txt") and ".py:" not in topology


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What clients compute, and when."""

    models: tuple[str, ...] = ()
    """Architectures, each with options (resnet18,width=0.5; `jaxfl list resnet18` shows them) and perhaps a
    number of clients (mlp,clients=5); by default clients are divided equally. All take features=NUMBER, the
    number of features that the classifier gets. default: lenet5 mcmahan, on images smaller than 16 pixels mlp
    mcmahan,padding=same; default,features=50 where a method needs equally many features."""
    topology: str = "none"
    """Links between clients, for methods without a server: complete, ring, star, er,p=0.6 (every pair
    with probability p, drawn by partition_seed until all are connected); a file of edges (.txt, two client
    ids a line); or my.py:graph. By default complete where a method needs links."""
    init_from: tuple[str, ...] = ()
    """Initial weights: folders of runs (what their clients deploy, by architecture and client id), or .npz
    files of arrays such as lenet5/params/conv1/conv/kernel. What does not fit starts anew and is named."""
    initial: Literal["shared", "own"] = "shared"
    """Initial weights that clients keep, such as own models or heads: the same for all of an architecture, or
    drawn for each client (own). What a server hands out has one beginning in both."""
    rounds: int = within("[1, 1000000]", 50)
    """Communication rounds."""
    participation: float = within("(0, 1]", 1.0)
    """Share of clients that take part in a round."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """How clients are drawn for a round: always as many, or each by itself with the probability
    `participation`, as the accountant of --privacy has it; then a round may have none."""
    newcomers: float = within("[0, 1)", 0.0)
    """Share of each architecture's clients, drawn by partition_seed, that take part in no round and are not
    counted in accuracies. At the end they join: all of them take part in one more round, and are scored
    before and after it."""
    dropout: float = within("[0, 1)", 0.0)
    """Probability that a client of a round drops out before it answers: it has received and computed for
    nothing, and keeps nothing of the round. All methods lose the same answers."""
    deadline: float | None = within("(0, inf)", None)
    """Simulated seconds that the server waits in a round for clients with their device_profile: a client that
    would need longer is lost like one that drops out."""
    schedule: str = "constant"
    """Factor on the clients' learning rates over the rounds: constant, cosine or step, with options:
    cosine,warmup=5,final=0.01; `jaxfl list cosine` shows them. Or my.py:schedule."""
    eval_every: int = within("[1, inf)", 5)
    """Rounds between evaluations; they run as one program."""
    target: tuple[float, ...] = ()
    """Accuracies, such as 0.6 0.7: results say at which round the clients' mean first reached each, and what
    was sent, computed and waited for until then."""
    stop_at_target: bool = False
    """End the run at the evaluation at which all targets are reached."""
    patience: int | None = within("[1, inf)", None)
    """End the run after so many evaluations in a row that are no better than the best one before: by accuracy
    on validation rows, or without any by training loss. The models of the best one can be had (--round best)
    if --keep-checkpoints is larger."""
    device_profile: tuple[str, ...] = ()
    """Speed of clients' devices, for a simulated wall clock: architecture=FLOPS:BYTES for each, operations
    and bytes per second, such as lenet5=1e9:1e6."""
    device_spread: float = within("[0, 5]", 0.0)
    """How much the speeds of clients with one architecture differ: the standard deviation of their natural
    logarithms around the device_profile, drawn for each client by partition_seed."""
    score_cohort: bool = False
    """Score the clients of every round on their test rows before local training (received), right after it
    (trained, if the method tells) and at the end of the round (personal); and what teaches them (teacher)."""
    precision: Literal["full", "tf32", "bfloat16"] = "full"
    """Arithmetic of networks: float32; tf32, float32 whose products have fewer digits where this is faster
    (on a CPU the same); or bfloat16, for accelerators. Parameters stay as they are."""
    seed: int = within("[0, 4294967295]", 0)
    """Seed of initial weights, client sampling and mini-batches."""


@dataclasses.dataclass(frozen=True)
class WireOptions:
    """What happens to clients' messages before the server has made something of them (docs/wire.md)."""

    privacy: str = "none"
    """Differential privacy: of clients, gaussian,clip=1,noise=1.0,where=server,delta=1e-5; or of their rows,
    rows,clip=1,noise=1.0,delta=1e-5 (DP-SGD). `jaxfl list gaussian rows` says what options mean."""
    target_epsilon: float | None = within("(0, inf)", None)
    """Choose the noise of --privacy such that epsilon is at most this after the last round."""
    compress: str = "none"
    """How clients send fewer bits: quantize,bits=8; top-k,share=0.01; sign; low-rank,rank=4; or
    my.py:transform. With feedback=true each client sends later what has been lost."""
    attack: str = "none"
    """What attackers do, share=0.2 of the clients, drawn by partition_seed: sign-flip,factor=1; random,std=1;
    scale,factor=10; label-flip; backdoor,target=0,rows=0.5; or my.py:transform. Scores are of the others."""
    aggregate: str = "mean"
    """What the server takes: mean; median; trimmed-mean,share=0.1; krum,m=1; geometric-median;
    norm-bound,bound=1; or my.py:aggregate. `jaxfl list krum` says what options mean."""


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """How this machine computes: runs that differ only in these options try the same."""

    data_dir: Path | None = None
    """Where tensorflow-datasets keeps its data; its own default if not given."""
    show: tuple[str, ...] = ()
    """Further scores, in tables, logs and pictures: lowest, macro-f1, per-class, auc, loss, confusion, ...;
    `jaxfl list scores` has all. Those of every row's answer, such as auc, are computed only if asked for."""
    checkpoint_every: int | None = within("[1, inf)", None)
    """Rounds between checkpoints, a multiple of eval_every; by default every evaluation."""
    keep_checkpoints: int = within("[1, inf)", 2)
    """Number of newest checkpoints that are kept: if one is damaged, a resume takes the one before, and the
    models of each can be loaded and exported (--round)."""
    clients_at_once: int | None = within("[1, inf)", None)
    """Clients of a group that train side by side on a device; by default 1 on a CPU, all elsewhere."""
    devices: int | None = within("[1, inf)", None)
    """Devices that share the clients of a round; by default all that JAX has (the command line starts one
    per CPU core), but no more than a group has clients in a round on average. Each accelerator holds the
    data set."""
    client_state: Literal["device", "host"] = "device"
    """Where clients' own models, heads, memories and images are between rounds: on the devices, or in host
    memory, from which a round gets those of its clients. Methods that use all clients need the devices.
    docs/devices.md"""
    convolution: Literal["auto", "rows", "patches", "plain"] = "auto"
    """How convolutions are computed, those of your own networks as well: auto depends on backend and shapes;
    plain is XLA's."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """The federation and the run."""

    data: DataOptions = DataOptions()
    partition: PartitionOptions = PartitionOptions()
    run: RunOptions = RunOptions()
    wire: WireOptions = WireOptions()
    machine: MachineOptions = MachineOptions()

    @classmethod
    def of(cls, **options) -> Self:
        """Make a setup from flat options: ``Setup.of(dataset="cifar10", rounds=10)``, see `replace`."""
        return cls().replace(**options)

    def replace(self, **options) -> Self:
        """Return the same setup with other flat options.

        Raises:
          JaxflError: if there is no such option, or it has another type or is out of range.
        """
        values = read_options("the run", declared(type(self)), options)
        parts = {
            name: dataclasses.replace(part, **{key: values[key] for key in vars(part) if key in values})
            for name, part in vars(self).items()
        }
        return type(self)(**parts)

    def flat(self) -> dict[str, Any]:
        """Return all options by name."""
        return {name: value for part in vars(self).values() for name, value in vars(part).items()}
