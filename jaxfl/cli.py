"""The command `jaxfl`: words in, tables out. What happens in between is in the package."""

import dataclasses
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jaxfl import registry
from jaxfl.bench import report as speed
from jaxfl.bench.bench import Bench, bench
from jaxfl.config import choices
from jaxfl.core.training import Training
from jaxfl.data import partition as partitions
from jaxfl.data.draw import draw
from jaxfl.data.partitioners import PARTITIONS
from jaxfl.data.sources import DATASETS
from jaxfl.errors import JaxflError, nearest
from jaxfl.machine.processes import Processes, connect, explained_loss, leave
from jaxfl.models.zoo import MODELS
from jaxfl.runs import compare as comparison
from jaxfl.runs import store
from jaxfl.runs.log import Log
from jaxfl.runs.prepare import (
    Data,
    Setup,
    cache_folder,
    check_setup,
    divide,
    for_methods,
    load_source,
    prepare,
)
from jaxfl.runs.run import Chosen, choose, restore, resume, start
from jaxfl.runs.table import as_text, tabulate
from jaxfl.runs.watch import watch

# Into a file or a pipe tables are wider than the 80 columns that rich assumes there.
OUT = Console(markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


class Command(NamedTuple):
    """A word after `jaxfl`.

    Args:
      usage: how it is called.
      does: what it does.
      function: of the arguments that are left.
      flags: whether it takes --options.
    """

    usage: str
    does: str
    function: Callable[[list[str]], None]
    flags: bool = False


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with code 2 and one sentence where the user has to mend something.

    After a Ctrl-C it exits with code 130.
    """
    try:
        with explained_loss():
            _dispatch(_expand(sys.argv[1:] if arguments is None else arguments))
    except JaxflError as error:
        Console(stderr=True, soft_wrap=True).print(f"jaxfl: {error}", style="red", markup=False)
        leave(2)
    except KeyboardInterrupt as stopped:
        Console(stderr=True, soft_wrap=True).print(f"jaxfl: {str(stopped) or 'Stopped.'}", markup=False)
        leave(130)


def _dispatch(arguments: list[str]) -> None:
    word, *rest = arguments or ["--help"]
    if word in ("-h", "--help", "help"):
        OUT.print(_help(), highlight=False)
    elif word not in COMMANDS:
        raise JaxflError(f"There is no command {word!r}; {nearest(word, COMMANDS)}")
    else:
        command = COMMANDS[word]
        if rest in (["-h"], ["--help"]) and not command.flags:
            OUT.print(f"jaxfl {command.usage}: {command.does}")
        else:
            command.function(rest)


def _expand(arguments: list[str]) -> list[str]:
    """Replace @FILE by the arguments in it, one or several a line, # to the end of line a comment."""
    expanded = []
    for argument in arguments:
        if not argument.startswith("@"):
            expanded.append(argument)
            continue
        path = Path(argument[1:])
        if not path.is_file():
            raise JaxflError(f"There is no file {path} of arguments; check the path after @.")
        for line in path.read_text().splitlines():
            expanded += line.partition("#")[0].split()
    return expanded


def _help() -> Table:
    table = Table.grid(padding=(0, 3))
    for command in COMMANDS.values():
        table.add_row(f"jaxfl {command.usage}", command.does)
    table.add_row("", "")
    table.add_row("@FILE", "stands for the arguments in a file")
    table.add_row("path/my.py:object", "stands for a method, model, data set or partition of your own")
    return table


# Commands -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where results go."""

    run_dir: Path | None = None
    """A new folder for config, metrics, checkpoints and plots, or that of a comparison to continue; by
    default runs/NAME-DATASET."""


@dataclasses.dataclass(frozen=True)
class Logs:
    """Where else metrics go as they come."""

    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Write event files for TensorBoard, into the run's folder, or to Weights & Biases, or both. With
    WANDB_MODE=offline the latter stays in the run's folder too."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where the time goes."""

    profile: Path | None = None
    """A folder for a trace by jax.profiler of the second eval_every rounds, or of the only ones."""


@dataclasses.dataclass(frozen=True)
class Seeds:
    """How often everything is repeated."""

    seeds: int = 1
    """Repeat with seed, seed + 1, ..."""


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["--from"]:
        _repeat(arguments[1:])
        return
    if arguments in (["-h"], ["--help"]):
        defaults = {"federation": Setup(), "method": Training(), "output": RunFolder()}
        defaults |= {"logs": Logs(), "profile": Profile(), "processes": Processes()}
        _parse("run METHOD", arguments, **defaults)
    choice, arguments = _positional(arguments, "run", "METHOD")
    method, chosen_options = registry.method(choice)
    default = method.config(**chosen_options)
    setup, config, where, logs, profile, processes = _parse(
        f"run {choice}",
        arguments,
        federation=Setup(),
        method=default,
        output=RunFolder(),
        logs=Logs(),
        profile=Profile(),
        processes=Processes(),
    )
    _join(processes)
    log = Log(logs.log)
    chosen, setup = choose(choice, method, config), for_methods(setup, [method])
    _start(chosen, setup, where.run_dir, log, profile.profile)


def _repeat(arguments: list[str]) -> None:
    name, arguments = _positional(arguments, "run", "RUN")
    where, logs, profile, processes = _parse(
        "run --from RUN",
        arguments,
        output=RunFolder(),
        logs=Logs(),
        profile=Profile(),
        processes=Processes(),
    )
    _join(processes)
    old, log = Path(name), Log(logs.log)
    setup, chosen = restore(old, store.read_config(old))
    _start(chosen, setup, where.run_dir, log, profile.profile, old / store.PARTITION)


def _start(
    chosen: Chosen,
    setup: Setup,
    folder: Path | None,
    log: Log,
    profile: Path | None,
    partition: Path | None = None,
) -> None:
    folder = folder or store.free_folder(chosen.method.name, setup.dataset)
    store.check_free(folder)
    data = _announce(setup, partition)
    with log, _Bar(1, setup.rounds) as bar:

        def follow(new):
            bar(chosen.label, setup.seed, new)
            log(folder, new)

        result = start(folder, chosen, setup, data, follow, profile)
    _conclude([(chosen.label, result)], folder)


def _compare(arguments: list[str]) -> None:
    count = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    named, arguments = arguments[:count], arguments[count:]
    setup, training, seeds, where, logs, processes = _parse(
        "compare METHOD ...",
        arguments,
        federation=Setup(),
        methods=Training(),
        seeds=Seeds(),
        output=RunFolder(),
        logs=Logs(),
        processes=Processes(),
    )
    if not named:
        raise JaxflError("Name the methods to compare: jaxfl compare fedavg fedper ...")
    if seeds.seeds < 1:
        raise JaxflError(f"--seeds must be at least 1, not {seeds.seeds}.")
    _join(processes)
    common = {
        field.name: getattr(training, field.name)
        for field in dataclasses.fields(Training)
        if getattr(training, field.name) != field.default
    }
    methods = []
    for choice in named:
        method, options = registry.method(choice)
        methods.append(choose(choice, method, method.config(**(common | options))))
    setup = for_methods(setup, [chosen.method for chosen in methods])
    folder = where.run_dir or store.free_folder("compare", setup.dataset)
    log = Log(logs.log)
    numbers = [setup.seed + i for i in range(seeds.seeds)]
    planned = comparison.plan(folder, methods, setup, numbers)
    begun = comparison.runs_in(folder)
    data = _announce(setup, begun[0] / store.PARTITION if begun else None)
    folders = {(chosen.label, setup.seed): run for run, (chosen, setup) in planned.items()}
    with log, _Bar(len(planned), setup.rounds) as bar:

        def follow(label, seed, new):
            bar(label, seed, new)
            log(folders[label, seed], new)

        made, failures = comparison.compare(folder, planned, data, follow, OUT.print)
    if made:
        OUT.print(as_text(made))
        OUT.print(f"{folder}: table.csv, table.md, table.tex, curves.png, and a folder per run")
    if failures:
        raise JaxflError(f"{len(failures)} of {len(planned)} runs failed: {' '.join(failures)}")


def _resume(arguments: list[str]) -> None:
    if arguments in (["-h"], ["--help"]):
        _parse("resume RUN", arguments, logs=Logs(), processes=Processes())
    name, rest = _positional(arguments, "resume", "RUN")
    logs, processes = _parse("resume RUN", rest, logs=Logs(), processes=Processes())
    _join(processes)
    folder, log = Path(name), Log(logs.log)
    config = store.read_config(folder)
    with log, _Bar(1, config["options"]["rounds"]) as bar:

        def follow(new):
            bar(config["label"], config["options"]["seed"], new)
            log(folder, new)

        result = resume(folder, follow)
    _conclude([(config["label"], result)], folder)


def _watch(arguments: list[str]) -> None:
    if not arguments:
        raise JaxflError("Name the folders of runs or comparisons: jaxfl watch RUN ...")
    watch([Path(argument) for argument in arguments], OUT)


def _report(arguments: list[str]) -> None:
    if not arguments:
        raise JaxflError("Name the run folders: jaxfl report RUN ...")
    folders = [Path(argument) for argument in arguments]
    out = folders[0] if len(folders) == 1 else store.free_folder("report")
    made = comparison.report(folders, out)
    OUT.print(as_text(made))
    OUT.print(f"{out}: table.csv, table.md, table.tex, curves.png")


def _partition(arguments: list[str]) -> None:
    setup, where = _parse("partition", arguments, federation=Setup(), output=RunFolder())
    check_setup(setup)
    folder = where.run_dir or store.free_folder("partition", setup.dataset)
    store.check_free(folder)
    source = load_source(setup)
    partition = divide(setup, source)
    store.create(folder)
    partitions.save(partition, source, folder / store.PARTITION)
    draw(partition, source.labels, folder / "partition.png", f"{setup.dataset}, {setup.partition}")
    OUT.print(_describe(partition))
    OUT.print(f"{folder}: partition.npz, partition.png")


def _bench(arguments: list[str]) -> None:
    count = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    (options,) = _parse("bench [WORKLOAD ...]", arguments[count:], measuring=Bench())
    command = shlex.join(["jaxfl", "bench", *arguments])
    records = bench(arguments[:count], options, command, OUT.print)
    OUT.print(speed.table(records))
    if options.out:
        OUT.print(f"{options.out}, {speed.save(records, options.out)}")


def _list(arguments: list[str]) -> None:
    _nothing_left(arguments, "list")
    methods = Table("method", "what", "paper", "options of its own", title="Methods", title_justify="left")
    common = {field.name for field in dataclasses.fields(Training)}
    for method in registry.METHODS.values():
        own = [field.name for field in dataclasses.fields(method.config) if field.name not in common]
        methods.add_row(method.name, method.summary, method.paper, ", ".join(own))
    OUT.print(methods)
    for title, table in (("Models", MODELS), ("Partitions", PARTITIONS)):
        drawn = Table(title[:-1].lower(), "what", "options", title=title, title_justify="left")
        for name, function in table.items():
            what = (function.__doc__ or "").strip().splitlines()[0]
            drawn.add_row(name, what, ", ".join(choices.keywords(function)))
        OUT.print(drawn)
    sources = Table("data set", "what", title="Data sets", title_justify="left")
    for name, what in DATASETS.items():
        sources.add_row(name, what)
    OUT.print(sources)


def _cite(arguments: list[str]) -> None:
    choice, rest = _positional(arguments, "cite", "METHOD")
    _nothing_left(rest, "cite")
    method, _ = registry.method(choice)
    if not method.bibtex:
        raise JaxflError(f"{method.name} has no paper to cite.")
    OUT.print(method.bibtex, markup=False, highlight=False, soft_wrap=True)


COMMANDS = {
    "run": Command(
        "run METHOD | --from RUN",
        "train one method, or repeat a run; options: jaxfl run METHOD --help",
        _run,
        True,
    ),
    "compare": Command(
        "compare METHOD ...",
        "several on one federation; an ablation is compfl,kd=false; options: --help",
        _compare,
        True,
    ),
    "report": Command("report RUN ...", "table and plot of finished runs", _report),
    "resume": Command("resume RUN", "continue a run from its last checkpoint", _resume, True),
    "watch": Command("watch RUN ...", "runs and comparisons in the terminal, while they go on", _watch),
    "partition": Command("partition", "draw and save a partition; options: --help", _partition, True),
    "bench": Command(
        "bench [WORKLOAD ...]", "speed, beside a PyTorch loop; options: jaxfl bench --help", _bench, True
    ),
    "list": Command("list", "methods, models, data sets and partitions", _list),
    "cite": Command("cite METHOD", "BibTeX", _cite),
}


# Arguments ------------------------------------------------------------------------------------


def _parse(program: str, arguments: list[str], **defaults: Any) -> list[Any]:
    """Parse flags into dataclasses like `defaults`, flat: one flag per field, a section for each."""
    fields = [(name, type(default), dataclasses.field(default=default)) for name, default in defaults.items()]
    parts = dataclasses.make_dataclass("Options", fields, frozen=True)
    parsed, unknown = tyro.cli(
        Annotated[parts, tyro.conf.OmitArgPrefixes],
        prog=f"jaxfl {program}",
        args=arguments,
        return_unknown_args=True,
    )
    if unknown:
        raise JaxflError(_unknown_option(program, unknown[0], defaults.values()))
    return [getattr(parsed, name) for name in defaults]


def _unknown_option(program: str, word: str, defaults: Iterable[Any]) -> str:
    flag = word.partition("=")[0]
    name = flag.lstrip("-").replace("-", "_")
    owners = [
        method.name
        for method in registry.METHODS.values()
        if name in {field.name for field in dataclasses.fields(method.config)}
    ]
    if not word.startswith("-"):
        return f"jaxfl {program} does not know what to do with {word!r}; see jaxfl {program} --help."
    if owners:
        compares = program.startswith("compare")
        advice = f"write {owners[0]},{name}=VALUE" if compares else f"see jaxfl {program} --help"
        return f"{flag} is an option of {', '.join(owners)}, not of jaxfl {program}; {advice}."
    known = ["--" + field.name.replace("_", "-") for part in defaults for field in dataclasses.fields(part)]
    return f"jaxfl {program} has no option {flag}; {nearest(flag, known)}"


def _positional(arguments: list[str], command: str, what: str) -> tuple[str, list[str]]:
    if not arguments or arguments[0].startswith("-"):
        raise JaxflError(f"jaxfl {command} needs a {what} first: jaxfl {COMMANDS[command].usage}.")
    return arguments[0], arguments[1:]


def _nothing_left(arguments: list[str], command: str) -> None:
    if arguments:
        raise JaxflError(f"jaxfl {command} takes no {arguments[0]!r}: jaxfl {COMMANDS[command].usage}.")


# Output ---------------------------------------------------------------------------------------


def _join(processes: Processes) -> None:
    """Meet the other processes, of which the first one speaks for all."""
    connect(processes)
    OUT.quiet = jax.distributed.is_initialized() and jax.process_index() > 0


def _announce(setup: Setup, saved_partition: Path | None = None) -> Data:
    """Prepare the data and say in a few lines what the federation is."""
    data = prepare(setup, saved_partition)
    images = data.source.images
    OUT.print(
        f"{setup.dataset}: {len(images)} images of {'x'.join(map(str, images.shape[1:]))}; "
        f"{setup.partition}: {_describe(data.partition)}"
    )
    if len(data.federation.public):
        OUT.print(f"{len(data.federation.public)} public images ({setup.public})")
    for model, count in data.models:
        OUT.print(f"{count} clients run {model.name} ({model.size:,} parameters). {model.note}".strip())
    device, federation = jax.devices()[0], data.federation
    OUT.print(
        f"jax {jax.__version__} on {federation.devices} x {device.platform} ({device.device_kind}), "
        f"{federation.clients_at_once} at once on each, convolution {data.models[0][0].convolution}"
    )
    return data


def _describe(partition) -> str:
    train, test = (sorted(map(len, part)) for part in (partition.train, partition.test))
    return (
        f"{len(train)} clients with {train[0]} to {train[-1]} training and {test[0]} to {test[-1]} test "
        f"rows, {partition.outputs} outputs"
    )


def _conclude(results: list[tuple[str, dict]], folder: Path) -> None:
    OUT.print(as_text(tabulate(results)))
    seconds = results[-1][1]["seconds"]
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    OUT.print(f"{folder}: result.json, metrics.jsonl, curves.png ({parts})")


class _Bar(Progress):
    """A progress bar over all rounds of all runs, with the newest accuracy."""

    def __init__(self, runs: int, rounds: int):
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds  {task.fields[accuracy]}  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=OUT,
        )
        self.done = {}  # rounds of each run
        self.bar = self.add_task("compiling", total=runs * rounds, accuracy="", speed="")

    def __call__(self, label: str, seed: int, new: list[dict]) -> None:
        """Take a chunk's metrics."""
        last = new[-1]
        if "accuracy" in last:
            seconds = last["seconds"]
            if seconds["compile"] >= 0.1:
                self.console.print(f"{label}, seed {seed}: compiled in {seconds['compile']:.1f} s")
            self.update(
                self.bar,
                accuracy=f"accuracy {100 * last['accuracy']['mean']:.1f} %",
                speed=f"{len(new) / max(seconds['train'], 1e-9):.1f} rounds/s",
            )
        self.done[label, seed] = last["round"]
        completed = sum(self.done.values())
        self.update(self.bar, description=f"{label}, seed {seed}", completed=completed)


def entry() -> None:
    """The console script: settings of this process, then `main`."""
    # Compiled programs are kept, so that the next run of the same shapes starts at once.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder()))
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    flags = os.environ.get("XLA_FLAGS", "")
    if "JAX_NUM_CPU_DEVICES" not in os.environ and "host_platform_device_count" not in flags:
        # One device per core: clients train on all of them at the same time.
        affinity = getattr(os, "sched_getaffinity", None)
        jax.config.update("jax_num_cpu_devices", len(affinity(0)) if affinity else os.cpu_count() or 1)
    if "xla_cpu_collective" not in flags:
        # Devices wait for each other at the end of a round, and so do processes; XLA would end those of one
        # process after 40 seconds, and several processes after 30 minutes.
        waits = ("call_terminate_timeout", "call_warn_stuck_timeout", "timeout")
        days = " ".join(f"--xla_cpu_collective_{wait}_seconds=86400" for wait in waits)
        os.environ["XLA_FLAGS"] = f"{flags} {days}".strip()
    try:
        main()
    except Exception:  # a fault of ours; of several processes, none waits for the others to end
        traceback.print_exc()
        leave(1)
