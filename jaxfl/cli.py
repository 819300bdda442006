"""The command `jaxfl`: words in, tables out. What happens in between is in the package."""

import contextlib
import inspect
import itertools
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table as RichTable

from jaxfl import registry
from jaxfl.config import choices
from jaxfl.config.commands import (
    Columns,
    Exported,
    Flower,
    Forms,
    Insist,
    Length,
    Limit,
    Logs,
    Output,
    Profile,
    RunFolder,
    Seeds,
    Studied,
    Targets,
)
from jaxfl.config.flags import parse_flags
from jaxfl.config.options import helps, hints, own_first, text
from jaxfl.config.own_code import OwnCodeError, own_code
from jaxfl.config.setup import Setup
from jaxfl.core.protocol import Method
from jaxfl.core.schedule import SCHEDULES
from jaxfl.core.training import Training
from jaxfl.data import peers
from jaxfl.data.partitioners import PARTITIONS
from jaxfl.data.shift import SHIFTS
from jaxfl.data.sources import DATASETS
from jaxfl.data.topology import TOPOLOGIES
from jaxfl.errors import JaxflError, nearest
from jaxfl.flower import app as flower
from jaxfl.machine.environment import versions
from jaxfl.machine.processes import Processes, connect, explained_loss, is_first, leave
from jaxfl.models.zoo import GIVEN, MODELS, described
from jaxfl.runs import compare as comparisons
from jaxfl.runs import report as reports
from jaxfl.runs import run as runs
from jaxfl.runs import store
from jaxfl.runs import study as studies
from jaxfl.runs.config import restore_setup
from jaxfl.runs.divided import save_partition
from jaxfl.runs.interrupt import CTRL_C, Interrupted, terminable
from jaxfl.runs.load import load
from jaxfl.runs.prepare import cache_folder, check_setup, divide, draw_shift, load_source
from jaxfl.runs.table import as_text
from jaxfl.runs.variant import choose, variant_of
from jaxfl.runs.watch import watch
from jaxfl.terminal import OUT, Bar, describe, print_app, print_exported, print_result, print_table

STUDIES = Path("experiments")  # where those of a checkout stand


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

    After a Ctrl-C it exits with code 130, after a SIGTERM with 143, and where --max-seconds ended it with 75.
    """
    try:
        with explained_loss(), terminable(), own_code():
            _dispatch(_expand(sys.argv[1:] if arguments is None else arguments))
    except JaxflError as error:
        if isinstance(error, OwnCodeError):  # its cause has the frames of the user's files alone
            traceback.print_exception(error.__cause__, chain=False)
        Console(stderr=True, soft_wrap=True).print(f"jaxfl: {error}", style="red", markup=False)
        leave(2)
    except KeyboardInterrupt as stopped:
        Console(stderr=True, soft_wrap=True).print(f"jaxfl: {str(stopped) or 'Stopped.'}", markup=False)
        leave(stopped.code if isinstance(stopped, Interrupted) else CTRL_C)


def _dispatch(arguments: list[str]) -> None:
    word, *rest = arguments or ["--help"]
    if word in ("-h", "--help", "help"):
        OUT.print(_help(), highlight=False)
    elif word == "--version":
        OUT.print(", ".join(f"{name} {version}" for name, version in versions().items()), highlight=False)
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


def _help() -> RichTable:
    table = RichTable.grid(padding=(0, 3))
    for command in COMMANDS.values():
        table.add_row(f"jaxfl {command.usage}", command.does)
    table.add_row("", "")
    table.add_row("jaxfl --version", "of jaxfl and what it stands on")
    table.add_row("@FILE", "stands for the arguments in a file")
    table.add_row("path/my.py:object", "stands for a method, model, data set or partition of your own")
    return table


# Commands -------------------------------------------------------------------------------------


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["--from"]:
        _repeat(arguments[1:])
        return
    others = {"output": RunFolder(), "logs": Logs(), "profile": Profile(), "limit": Limit()}
    others["processes"] = Processes()
    if arguments in (["-h"], ["--help"]):
        _parse("run METHOD", arguments, federation=Setup(), method=Training(), **others)
    choice, arguments = _positional(arguments, "run", "METHOD")
    method, given = registry.method(choice)
    default = method.config(**given)
    parsed = _parse(f"run {choice}", arguments, method=default, federation=Setup(), **others)
    config, setup, where, logs, profile, limit, processes = parsed
    _join(processes)
    variant = variant_of(choice, method, config)
    with Bar() as bar:
        options = {"log": logs.log, "profile": profile.profile, "observer": bar.observer} | vars(limit)
        folder, result = runs.run(variant, setup, where.run_dir, **options)
    print_result(result, folder)


def _repeat(arguments: list[str]) -> None:
    name, arguments = _positional(arguments, "run", "RUN")
    others = {"output": RunFolder(), "logs": Logs(), "profile": Profile(), "limit": Limit()}
    others["processes"] = Processes()
    where, logs, profile, limit, processes = _parse("run --from RUN", arguments, **others)
    _join(processes)
    with Bar() as bar:
        options = {"log": logs.log, "profile": profile.profile, "observer": bar.observer} | vars(limit)
        folder, result = runs.repeat(Path(name), where.run_dir, **options)
    print_result(result, folder)


def _compare(arguments: list[str]) -> None:
    named, arguments = _words_and_flags(arguments)
    setup, training, seeds, columns, where, logs, insist, limit, processes = _parse(
        "compare METHOD ...",
        arguments,
        named,
        federation=Setup(),
        methods=Training(),
        seeds=Seeds(),
        columns=Columns(),
        output=RunFolder(),
        logs=Logs(),
        insist=Insist(),
        limit=Limit(),
        processes=Processes(),
    )
    if not named:
        raise JaxflError("Name the methods to compare: jaxfl compare fedavg fedper ...")
    _join(processes)
    common = {name: value for name, value in vars(training).items() if value != getattr(Training(), name)}
    variants = [choose(choice, common) for choice in named]
    with Bar() as bar:
        options = {"log": logs.log, "observer": bar.observer} | vars(columns) | vars(insist) | vars(limit)
        made = comparisons.compare(
            variants, setup, seeds.seeds, where.run_dir, partition_seeds=seeds.partition_seeds, **options
        )
    if made.table:
        print_table(made.table, made.folder, ", and a folder per run")
    if made.failures:
        total = len(variants) * seeds.seeds * seeds.partition_seeds
        raise JaxflError(_unfinished(f"{total} runs", made.failures))


def _study(arguments: list[str]) -> None:
    others = {"studied": Studied(), "output": RunFolder(), "limit": Limit()}
    if arguments in (["-h"], ["--help"]):
        _parse("study FILE", arguments, **others)
    if arguments == ["--list"]:
        table = RichTable("study", "title", "claim", "runs")
        for name, study in studies.found_below(STUDIES).items():
            runs_of = len(study.methods) * len(studies.settings(study)) * study.seeds * study.partition_seeds
            table.add_row(name, study.title, study.claim, str(runs_of))
        return OUT.print(table)
    name, rest = _positional(arguments, "study", "FILE")
    studied, where, limit = _parse("study FILE", rest, **others)
    file = Path(name) if name.endswith(".toml") else STUDIES / f"{name}.toml"
    study, folder = studies.read(file), where.run_dir or Path("runs") / file.stem
    number, slash, parts = studied.part.partition("/")
    if not (slash and number.isdecimal() and parts.isdecimal()):
        raise JaxflError(f"--part takes two numbers such as 2/8, not {studied.part!r}.")
    with Bar() as bar:
        table, failures = studies.run(
            study,
            folder,
            part=(int(number), int(parts)),
            data_dir=studied.data_dir,
            observer=bar.observer,
            **vars(limit),
        )
    if table:
        OUT.print(as_text(table))
        OUT.print(f"{folder}: study.csv, study.md, study.tex, study.png, and a folder per setting")
    if failures:
        raise JaxflError(_unfinished("the study's runs or settings", failures))


def _unfinished(of: str, failures: list[str]) -> str:
    """Why not all runs have finished; what holds of several seeds is said once."""
    return f"{len(failures)} of {of} have not finished: {' '.join(dict.fromkeys(failures))}"


def _resume(arguments: list[str]) -> None:
    others = {"length": Length(), "logs": Logs(), "insist": Insist(), "limit": Limit()}
    others |= {"processes": Processes()}
    if arguments in (["-h"], ["--help"]):
        _parse("resume RUN", arguments, **others)
    name, rest = _positional(arguments, "resume", "RUN")
    length, logs, insist, limit, processes = _parse("resume RUN", rest, **others)
    _join(processes)
    with Bar() as bar:
        options = {"log": logs.log, "observer": bar.observer} | vars(insist) | vars(limit)
        result = runs.resume(Path(name), rounds=length.rounds, **options)
    print_result(result, Path(name))


def _export(arguments: list[str]) -> None:
    others = {"exported": Exported(), "insist": Insist()}
    if arguments in (["-h"], ["--help"]):
        _parse("export RUN", arguments, **others)
    name, rest = _positional(arguments, "export", "RUN")
    exported, insist = _parse("export RUN", rest, **others)
    if exported.out is None:
        raise JaxflError(f"Say where to: jaxfl export {name} --out FOLDER.")
    print_exported(load(Path(name), insist.changed_code).export(exported.out, exported.client or None))


def _flower(arguments: list[str]) -> None:
    if arguments in (["-h"], ["--help"]):
        _parse("flower RUN", arguments, app=Flower())
    name, rest = _positional(arguments, "flower", "RUN")
    (app,) = _parse("flower RUN", rest, app=Flower())
    if app.out is None:
        raise JaxflError(f"Say where to: jaxfl flower {name} --out FOLDER.")
    print_app(flower.write(Path(name), app.out, app.after))


def _watch(arguments: list[str]) -> None:
    if not arguments:
        raise JaxflError("Name the folders of runs or comparisons: jaxfl watch RUN ...")
    watch([Path(argument) for argument in arguments], OUT)


def _report(arguments: list[str]) -> None:
    named, arguments = _words_and_flags(arguments)
    columns, targets, output = _parse(
        "report RUN ...", arguments, columns=Columns(), targets=Targets(), output=Output()
    )
    if not named:
        raise JaxflError("Name the run folders: jaxfl report RUN ...")
    folders = [Path(word) for word in named]
    out = output.out or store.report_folder(folders)
    print_table(reports.report(folders, out, target=targets.target, **vars(columns)), out)


def _partition(arguments: list[str]) -> None:
    others = {"output": RunFolder(), "forms": Forms()}
    if arguments[:1] == ["--from"]:
        name, arguments = _positional(arguments[1:], "partition", "RUN")
        where, forms = _parse("partition --from RUN", arguments, **others)
        saved, setup = Path(name) / store.PARTITION, restore_setup(Path(name), store.read_config(Path(name)))
    else:
        setup, where, forms = _parse("partition", arguments, federation=Setup(), **others)
        saved = None
    check_setup(setup)
    folder = where.run_dir or store.free_folder("partition", setup.data.dataset)
    store.check_free(folder)
    source = load_source(setup)
    partition = divide(setup, source, saved)
    drawn = draw_shift(setup, source, len(partition.train))
    peers.require(forms.format, partition)
    store.create(folder)
    written = save_partition(folder, setup, source, partition, drawn, forms.format)
    OUT.print(describe(partition, source))
    OUT.print(f"{folder}: {', '.join(written)}")


def _bench(arguments: list[str]) -> None:
    from jaxfl.bench import report as speed  # here: no other command waits for what it needs
    from jaxfl.bench.bench import Bench, bench

    if arguments[:1] == ["device"]:
        return _bench_device(arguments[1:])
    named, flags = _words_and_flags(arguments)
    (options,) = _parse("bench [WORKLOAD ...]", flags, measuring=Bench())
    command = shlex.join(["jaxfl", "bench", *arguments])
    measured = bench(named, options, command, OUT.print)
    if measured.records:
        OUT.print(speed.table(measured.records))
        if options.out:
            OUT.print(f"{options.out}, {speed.save(measured.records, options.out)}")
    if measured.failures:
        raise JaxflError(" ".join(measured.failures))


def _bench_device(arguments: list[str]) -> None:
    from jaxfl.bench.device import Device, measure_device

    (options,) = _parse("bench device", arguments, device=Device())
    OUT.print(measure_device(options, OUT.print))


def _list(arguments: list[str]) -> None:
    for name in arguments:
        OUT.print(_options_of(name))
    if arguments:
        return
    methods = RichTable(
        "method", "what", "paper", "options of its own", title="Methods", title_justify="left"
    )
    common = hints(Training)
    for method in registry.METHODS.values():
        own = [name for name in hints(method.config) if name not in common]
        methods.add_row(method.name, method.summary, method.paper, ", ".join(own))
    OUT.print(methods)
    for title, kind, table, options in (
        ("Models", "model", MODELS, described),
        ("Partitions", "partition", PARTITIONS, choices.described),
        ("Topologies", "topology", TOPOLOGIES, choices.described),
        ("Shifts of clients' images", "shift", SHIFTS, choices.described),
        ("Schedules", "schedule", SCHEDULES, choices.described),
    ):
        drawn = RichTable(kind, "what", "options", title=title, title_justify="left")
        for name, function in table.items():
            own = ", ".join(f"{option.name}={option.default}" for option in options(function))
            drawn.add_row(name, _first_line(function), own)
        OUT.print(drawn)
    sources = RichTable("data set", "what", title="Data sets", title_justify="left")
    for name, what in DATASETS.items():
        sources.add_row(name, what)
    OUT.print(sources)
    OUT.print("jaxfl list NAME shows the options of a method, model, partition, topology, shift or schedule.")


def _options_of(name: str) -> RichTable:
    """The options of a method, model, partition, topology, shift or schedule, with defaults, in words."""
    table = {**registry.METHODS, **MODELS, **PARTITIONS, **TOPOLOGIES, **SHIFTS, **SCHEDULES}
    found = choices.lookup("method, model, partition, topology, shift or schedule", table, name)
    if isinstance(found, Method):
        config = found.config()
        what, said = found.summary, helps(type(config))
        options = [
            choices.Option(option, text(getattr(config, option)), said.get(option, ""))
            for option in own_first(type(config))
        ]
    else:
        builds = set(GIVEN) <= set(inspect.signature(found).parameters)  # a model
        what, options = _first_line(found), (described if builds else choices.described)(found)
    table = RichTable("option", "default", "what", title=f"{name}: {what}", title_justify="left")
    for option in options:
        table.add_row(*option)
    return table


def _first_line(function: Callable) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


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
    "study": Command(
        "study FILE | --list",
        "methods under several settings, stated in a file of TOML; options: --help",
        _study,
        True,
    ),
    "report": Command("report RUN ...", "table and plot of finished runs; options: --help", _report, True),
    "resume": Command("resume RUN", "continue a run from its last checkpoint", _resume, True),
    "export": Command(
        "export RUN", "clients' models as safetensors, with a card; options: --help", _export, True
    ),
    "flower": Command(
        "flower RUN",
        "an app for Flower whose nodes train as the run's clients do; options: --help",
        _flower,
        True,
    ),
    "watch": Command("watch RUN ...", "runs and comparisons in the terminal, while they go on", _watch),
    "partition": Command(
        "partition [--from RUN]",
        "draw and save a partition, or that of a run, also for other programs; options: --help",
        _partition,
        True,
    ),
    "bench": Command(
        "bench [WORKLOAD ... | device]",
        "speed, beside a PyTorch loop; all that a device should tell; options: jaxfl bench --help",
        _bench,
        True,
    ),
    "list": Command(
        "list [NAME ...]", "methods, models, data sets, partitions; of each named the options", _list
    ),
    "cite": Command("cite METHOD", "BibTeX", _cite),
}


# Arguments ------------------------------------------------------------------------------------


def _parse(program: str, arguments: list[str], compared: Sequence[str] = (), **defaults: Any) -> list[Any]:
    """Parse flags into dataclasses like `defaults`; all words must be such flags."""
    parsed, unknown = parse_flags(program, arguments, **defaults)
    if unknown:
        raise JaxflError(_unknown_option(program, unknown[0], compared, defaults.values()))
    return parsed


def _unknown_option(program: str, word: str, compared: Sequence[str], defaults: Iterable[Any]) -> str:
    flag = word.partition("=")[0]
    name = flag.lstrip("-").replace("-", "_")
    owners = [method.name for method in registry.METHODS.values() if name in hints(method.config)]
    if not word.startswith("-"):
        return f"jaxfl {program} does not know what to do with {word!r}; see jaxfl {program} --help."
    if owners:
        meant = [choice for choice in compared if choices.split(choice)[0] in owners] or owners
        advice = f"write {meant[0]},{name}=VALUE" if compared else f"see jaxfl {program} --help"
        return f"{flag} is an option of {', '.join(owners)}, not of jaxfl {program}; {advice}."
    known = ["--" + option.replace("_", "-") for part in defaults for option in hints(type(part))]
    return f"jaxfl {program} has no option {flag}; {nearest(flag, known)}"


def _words_and_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    count = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    return arguments[:count], arguments[count:]


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
    OUT.quiet = not is_first()


def _cpu_devices(arguments: list[str]) -> int:
    """How many devices this process needs on a CPU: its share of --devices, else one per core.

    So clients train on all cores at the same time. A run that is resumed or repeated has as many as before.
    What is wrong with the arguments, `main` says.
    """
    devices, processes = None, 1
    with contextlib.suppress(JaxflError, KeyError, ValueError):
        words = [part for word in _expand(arguments) for part in word.split("=", 1)]
        for word, value in itertools.pairwise(words):
            if word == "--devices":
                devices = int(value)
            elif word == "--processes":
                processes = int(value)
            elif word in ("resume", "--from"):
                devices = store.read_config(Path(value))["options"]["devices"]
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, devices // max(1, processes)) if isinstance(devices, int) else cores


def entry() -> None:
    """The console script: settings of this process, then `main`."""
    # Compiled programs are kept, so that the next run of the same shapes starts at once.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder()))
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    flags = os.environ.get("XLA_FLAGS", "")
    if "JAX_NUM_CPU_DEVICES" not in os.environ and "host_platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", _cpu_devices(sys.argv[1:]))
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
