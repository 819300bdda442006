"""What the JSON files of a run folder hold, as types, and the one reader that checks a value by its type.

The files may come from somebody else, and from a version of jaxfl with more entries: what no type names is
kept as it is.
"""

from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, TypeVar, cast

import msgspec

T = TypeVar("T")
Known = float | None  # None where there is no value


def as_type(kind: type[T], value: Any) -> T:
    """Return a JSON value, which must fit a type of this module.

    Raises:
      ValueError: naming the first place that does not, and what it should be.
    """
    msgspec.convert(value, kind)
    return cast(T, value)


# ---- the configuration


class Code(TypedDict):
    """Fingerprints of the code that computes a run, see `jaxfl.folder.code`."""

    package: str  # of all files of jaxfl
    files: dict[str, str | None]  # of the user's own files, by path
    round: NotRequired[int]  # in a result: the first round that it computed


if TYPE_CHECKING:
    Options = dict[str, Any]  # every option of `Setup` and of the method by its name
else:

    class Options(TypedDict):
        """The options that are read before the method is known."""

        rounds: int
        seed: int
        partition_seed: int


class Architecture(TypedDict):
    """An architecture, and how many clients have it."""

    name: str
    clients: int
    parameters: NotRequired[int]
    note: NotRequired[str]


class DataSet(TypedDict):
    """The data set of a run, such that its models can be used without it."""

    shape: list[int]  # of one, (H, W, C)
    dtype: str
    mean: list[float]  # of each channel; images are normalised by it
    std: list[float]
    public: int  # number of public images
    class_names: NotRequired[list[str]]
    public_checksum: NotRequired[str]  # of public images of another set and their labels
    checksum: NotRequired[str]  # of all images in their order; runs of earlier versions have none
    task: NotRequired[str]  # runs of earlier versions are of classes
    vocabulary: NotRequired[int]  # number of tokens that there are; 0 of other inputs
    target: NotRequired["Targets"]


class Targets(TypedDict):
    """Moments of the targets (k,) of training rows, by which networks see them."""

    mean: list[float]
    std: list[float]


class Chosen(TypedDict):
    """A method with its options, as `jaxfl.folder.config.described` gives it."""

    method: str | None  # finds it again; None for a Python object
    label: str
    options: Options


class Config(Chosen):
    """A run's choices, and what it was begun with (config.json)."""

    begun_for: NotRequired[int]  # first values of rounds, devices and data_dir, which may change
    begun_on: NotRequired[int | None]
    begun_in: NotRequired[str | None]
    beyond_target: NotRequired[bool]  # it was made longer after it had stopped early
    models: list[Architecture]
    data: DataSet
    starts: NotRequired[list[str]]  # from what weights architectures start, in words
    environment: dict[str, Any]  # versions, device, and where the folder was
    code: Code


# ---- rounds and results


class Score(TypedDict):
    """A score that `--show` asks for: mean over the clients that have it, and per client by id."""

    mean: Known
    per_client: list[Known]


class Accuracy(TypedDict):
    """Scores of all clients except newcomers, shares as fractions, see `jaxfl.results.scores.accuracy`.

    Those of one task alone are not required.
    """

    task: NotRequired[str]
    mean: float  # over clients
    std: float
    lowest: NotRequired[float]
    worst: NotRequired[float]
    worst_tenth: float
    pooled: float  # over all test rows
    macro_f1: NotRequired[float]
    mae: NotRequired[float]
    r2: NotRequired[Known]
    token_accuracy: NotRequired[float]
    validation: Known  # mean over clients, on validation rows
    per_client: list[Known]  # by id; None for newcomers
    macro_f1_per_client: NotRequired[list[Known]]
    r2_per_client: NotRequired[list[Known]]
    token_accuracy_per_client: NotRequired[list[Known]]
    per_class: NotRequired[list[Known]]  # over all rows of each class or label of the data; None without rows
    per_group: dict[str, float | None]  # mean over the clients of each architecture, None if none count
    scores: NotRequired[dict[str, Score]]  # what `--show` asks for
    confusion: NotRequired[list[list[int]]]
    """(C, C + 1), the number of all clients' test rows of a class (row) that their models take for a class
    (column), in the last column for none"""


class OfCohort(TypedDict):
    """Accuracy of some clients: mean over them, and pooled over their rows."""

    mean: float
    pooled: float
    lead: NotRequired[float]  # of a teacher: over the clients' own models


class CohortScores(TypedDict):
    """Scores of a round's cohort as received, after training, as deployed, and of its teachers."""

    received: OfCohort
    trained: NotRequired[OfCohort]
    personal: NotRequired[OfCohort]
    teacher: NotRequired[OfCohort]


class OfNewcomers(OfCohort):
    """Accuracy of newcomers."""

    per_client: list[float]


class Newcomers(TypedDict):
    """What newcomers got in the round in which they joined, see `jaxfl.results.result.joined`."""

    clients: list[int]
    bytes_up: int
    bytes_down: int
    received: OfNewcomers
    trained: NotRequired[OfNewcomers]
    personal: OfNewcomers


class Costs(TypedDict):
    """Bytes that clients sent and received, and operations."""

    bytes_up: int
    bytes_down: int
    flops: float  # of clients' training and of the server's part, see `jaxfl.core.flops`


class Spent(Costs):
    """What a round cost, or what came before the first one."""

    simulated_seconds: NotRequired[float]
    """of the slowest client, or the deadline if the server waits for one in vain; if speeds are known"""


class Privacy(TypedDict):
    """What the accountant guarantees so far, see `jaxfl.mechanisms.wire.accounting`."""

    epsilon: Known  # None: nothing is guaranteed
    delta: float
    noise: float  # the multiplier


class Round(Spent):
    """A line of metrics.jsonl. Whatever is per client has the order of `clients`."""

    round: int  # from 1 on
    loss: Known  # mean over the clients that trained and answered, without attackers
    clients: list[int]  # ids of the round's cohort, ascending
    client_loss: list[Known]
    """None where it is not finite, the client has not trained, or its answer was lost"""
    client_bytes_up: list[int]
    client_bytes_down: list[int]
    client_flops: list[float]
    lost: NotRequired[list[int]]
    """ids of clients whose answers were lost, if some can be; a late client has spent what it could by the
    deadline"""
    cohort: NotRequired[CohortScores]  # if asked for
    findings: NotRequired[dict[str, Any]]  # of methods that have some
    preparation: NotRequired[Spent]  # costs of a method before round 1, which count for that round
    accuracy: NotRequired[Accuracy]
    """of the deployed models, where evaluated; with the scores that `--show` asks for"""
    received: NotRequired[Accuracy]  # of the models that clients receive
    newcomers: NotRequired[Newcomers]  # in the last round
    attack_success: NotRequired[float | None]  # of a backdoor, where evaluated
    privacy: NotRequired["Privacy"]  # where evaluated
    seconds: NotRequired[dict[str, float]]
    """compile, train, evaluate and write of the rounds since the evaluation before"""
    together: NotRequired[int]  # number of runs in one program; the seconds of training are one run's part
    code: NotRequired[Code]  # that took over in this round
    devices: NotRequired[int]  # that share the clients from this round on


class Target(TypedDict):
    """What a run spent until it first reached an accuracy; None if it did not."""

    round: int | None
    bytes_up: int | None
    bytes_down: int | None
    flops: Known
    simulated_seconds: Known


class Result(Costs):
    """The summary of a run (result.json): scores of its last evaluation, and what all rounds cost."""

    method: str
    seed: int
    rounds: int
    class_names: NotRequired[list[str]]
    accuracy: Accuracy
    received: Accuracy
    summary: NotRequired[dict[str, Known]]
    """accuracy (mean over clients): last, mean of the last ten evaluations, best by validation accuracy, and
    best on test data, for comparison with papers that report that; if cohorts are scored, also their pooled
    accuracy before local training, mean of the last ten rounds (FedCMD's figure)"""
    simulated_seconds: Known  # None if clients' speeds are unknown
    lost_answers: NotRequired[int | None]  # None if none can be lost
    targets: NotRequired[dict[str, Target]]  # by the target's text
    stopped: NotRequired[str | None]  # why it ended early; None if it did not
    findings: NotRequired[dict[str, Any] | None]
    seconds: dict[str, float]
    compilations: NotRequired[int]
    code: list[Code]  # every code of the run, each with the first round that it computed
    cohort: NotRequired[CohortScores]  # means over the last ten rounds that have them
    newcomers: NotRequired[Newcomers]
    attack_success: NotRequired[float | None]
    privacy: NotRequired["Privacy"]


# ---- comparisons


class Command(TypedDict):
    """What a comparison was asked for, see `jaxfl.grid.compare.resume` (command.json)."""

    environment: dict[str, Any]
    methods: list[Chosen]
    seeds: int
    partition_seeds: int
    hide: list[str]
    tune: list[str]
    select: Literal["last", "validation"]
    against: str | None
    beside: bool


class End(TypedDict):
    """How a comparison ended (comparison.json)."""

    failures: list[str]
    order: NotRequired[list[str]]
    select: NotRequired[Literal["last", "validation"]]
    tune: NotRequired[list[str]]
