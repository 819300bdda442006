"""The commands of `jaxfl`: words in, tables out. The work in between is in the package."""

import itertools
import shlex
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.table import Table as RichTable

from jaxfl import registry
from jaxfl.cli.words import names_and_flags, parse
from jaxfl.config.asked import Asked, make
from jaxfl.config.command_options import (
    ChangedCode,
    Columns,
    Continuation,
    Data,
    Evaluation,
    Export,
    Flower,
    Formats,
    Limit,
    Logs,
    Output,
    Part,
    Profile,
    Repetition,
    RunFolder,
    Seeds,
    StudyFolders,
    View,
)
from jaxfl.config.setup import Setup
from jaxfl.config.values import as_path
from jaxfl.core.training import Training
from jaxfl.data import partition_formats
from jaxfl.deployed.load import load
from jaxfl.errors import JaxflError
from jaxfl.folder import several_runs, store
from jaxfl.folder.config import restore_setup, training_of
from jaxfl.folder.partition_files import save_partition
from jaxfl.folder.variant import choose
from jaxfl.grid import compare as comparisons
from jaxfl.grid import run as runs
from jaxfl.grid import study as studies
from jaxfl.grid import study_file
from jaxfl.grid.comparison import Comparison
from jaxfl.grid.plan import labels_to_train
from jaxfl.grid.resolve import resolve, resolve_run, setup_of
from jaxfl.machine.processes import Processes, connect, is_first
from jaxfl.machine.texts import few
from jaxfl.results import report as reports
from jaxfl.results.table import as_text
from jaxfl.results.watch import watch
from jaxfl.runs.observer import Terms
from jaxfl.runs.prepare import divide, draw_shift, load_source, moments_of
from jaxfl.runs.recorded_data import recorded_moments
from jaxfl.terminal import OUT, describe, print_result, print_table, shown

HELP = (["-h"], ["--help"])


class Command(NamedTuple):
    """A word after `jaxfl`."""

    usage: str  # how to call it: NAME, [NAME] where it can be left out, and ... where there may be several
    does: str  # what it does
    function: Callable[..., None]  # called with the names and an instance of each section, or with all words
    sections: tuple[type, ...] | None = None  # classes of its options; None if the function reads its words


def call(word: str, words: list[str]) -> None:
    """Call a command with the words after it."""
    command = COMMANDS[word]
    if command.sections is None:
        command.function(words)
    elif words in HELP and not command.sections:
        OUT.print(f"jaxfl {command.usage}: {command.does}")
    else:
        names, *made = _names_and_options(word, words, *command.sections)
        command.function(names, *made)


def _names_and_options(word: str, words: list[str], *sections: type) -> list[Any]:
    """Return the names after a command, and an instance of each class of its options.

    Raises:
      JaxflError: if a name is missing, one is too many, or a word is no option.
    """
    usage = COMMANDS[word].usage
    what, (names, flags) = usage.split()[1], names_and_flags(words)
    if flags not in HELP:
        if not what.startswith("["):
            _require(names, word, what)
        if len(names) > 1 and "..." not in usage:
            raise JaxflError(f"jaxfl {word} takes no {names[1]!r}: jaxfl {usage}.")
    return [names, *parse(usage.partition(" | ")[0], flags, [], *sections)[1:]]


def _from(arguments: list[str], command: str) -> tuple[str | None, list[str]]:
    """Return the run after --from, None without one, and the other words."""
    apart = [word.split("=", 1) if word.startswith("--from=") else [word] for word in arguments]
    arguments = list(itertools.chain(*apart))
    if "--from" not in arguments:
        return None, arguments
    place = arguments.index("--from")
    _require(arguments[place + 1 :], command, "RUN")
    return arguments[place + 1], arguments[:place] + arguments[place + 2 :]


def _require(words: list[str], command: str, what: str) -> None:
    if not words or words[0].startswith("-"):
        raise JaxflError(f"jaxfl {command} needs a {what} first: jaxfl {COMMANDS[command].usage}.")


def _run(arguments: list[str]) -> None:
    old, arguments = _from(arguments, "run")
    if old is not None:
        return _run_from(as_path(old), arguments)
    if arguments in HELP:
        parse(COMMANDS["run"].usage, arguments, [Setup(), Training()], *BESIDE)
    _require(arguments, "run", "METHOD")
    choice, *arguments = arguments
    asked, *others = parse(f"run {choice}", arguments, [_defaults(choice), Setup()], *BESIDE)
    _begin(lambda **how: runs.run(*resolve_run(choice, asked), **how), *others)


def _run_from(old: Path, arguments: list[str]) -> None:
    named, flags = names_and_flags(arguments)
    if not named:
        _, again, *others = parse("run --from RUN", flags, [], Repetition, *BESIDE)
        return _begin(lambda **how: runs.repeat(old, seed=again.seed, **how), *others)
    choice, *flags = arguments
    training = training_of(store.read_config(old))
    sections = [_defaults(choice, training)]
    asked, again, *others = parse(f"run {choice} --from RUN", flags, sections, Repetition, *BESIDE)
    variant = choose(choice, {name: training[name] for name in training if name not in asked}, **asked)
    _begin(lambda **how: runs.repeat(old, seed=again.seed, variant=variant, **how), *others)


BESIDE = (RunFolder, Logs, Profile, Limit, Processes)  # options of a run that are not part of what it tries


def _defaults(choice: str, training: Asked | None = None) -> Any:
    method, chosen = registry.method(choice)
    return make(method.config, method.name, {**(training or {}), **chosen})


def _begin(
    run: Callable, where: RunFolder, logs: Logs, profile: Profile, limit: Limit, processes: Processes
) -> None:
    _join(processes)
    with shown(False) as observer:
        terms = Terms(logs.log, False, limit.max_seconds, observer)
        folder, result = run(folder=where.run_dir, terms=terms, profile=profile.profile)
    print_result(result, folder)


def _compare(arguments: list[str]) -> None:
    named, arguments = names_and_flags(arguments)
    own = [_defaults(choice) for choice in named]
    subjects = (Seeds, Columns, Part, RunFolder, Logs, ChangedCode, Limit, Processes)
    asked, seeds, columns, part, where, logs, code, limit, processes = parse(
        "compare METHOD ...", arguments, [Setup(), Training(), *own], *subjects, compared=named
    )
    if not named:
        raise JaxflError("Name the methods to compare: jaxfl compare fedavg fedper ...")
    _join(processes)
    variants, setup = resolve("jaxfl compare", named, asked)
    only = labels_to_train(variants, part.part, where.run_dir)
    with shown(False) as observer:
        terms = Terms(logs.log, code.changed_code, limit.max_seconds, observer)
        made = comparisons.compare(variants, setup, seeds, columns, where.run_dir, terms, only=only)
    _print_comparison(made, only, seeds.seeds * seeds.partition_seeds)


def _print_comparison(made: Comparison, labels: Collection[str], each: int) -> None:
    """Print the table of a comparison, and refuse to call it complete if runs with these labels are not."""
    if made.table:
        print_table(made.table, made.folder, ", and a folder per run")
    if made.failures:
        total = len(labels) * each
        left = total - sum(run.result is not None for (of, *_), run in made.runs.items() if of in labels)
        raise JaxflError(f"{left} of {total} runs have not finished: {' '.join(made.failures)}")


def _study(words: list[str]) -> None:
    if words == ["--list"]:
        from jaxfl.cli import catalogue  # here: see `_list`

        return OUT.print(catalogue.studies_in(study_file.STUDIES))
    sections = (Part, StudyFolders, ChangedCode, Limit)
    (name,), part, where, code, limit = _names_and_options("study", words, *sections)
    file = study_file.file_of(name)
    study, folder = study_file.read(file), where.run_dir or study_file.usual_folder(file)
    with shown(False) as observer:
        terms = Terms((), code.changed_code, limit.max_seconds, observer)
        how = {"data_dir": where.data_dir, "pictures": where.pictures, "terms": terms}
        table, failures = studies.run(study, folder, part=part.part, **how)
    if table:
        OUT.print(as_text(table, OUT.width))
        picture = f"study.{where.pictures}"
        drawn = f"{picture}, " if store.holds(Path(folder), picture) else ""
        OUT.print(f"{folder}: study.csv, study.md, study.tex, {drawn}runs.csv, and a folder per setting")
    if failures:
        raise JaxflError(f"Not all runs of the study have finished: {' '.join(failures)}")


def _resume(
    names: list[str],
    continuation: Continuation,
    logs: Logs,
    code: ChangedCode,
    limit: Limit,
    processes: Processes,
) -> None:
    _join(processes)
    folder, terms = as_path(*names), Terms(logs.log, code.changed_code, limit.max_seconds)
    if store.holds(folder, store.COMMAND):
        asked = several_runs.read_command(folder)
        with shown(False) as observer:
            made = comparisons.resume(folder, continuation, terms._replace(observer=observer))
        labels = [method["label"] for method in asked["methods"]]
        return _print_comparison(made, labels, asked["seeds"] * asked["partition_seeds"])
    had_finished = store.holds(folder, store.RESULT)
    with shown(False) as observer:
        result = runs.resume(folder, continuation, terms._replace(observer=observer))
    print_result(result, folder)
    if had_finished and continuation.rounds is None:
        least = max(result["rounds"] + 1, store.read_config(folder)["options"]["rounds"])
        OUT.print(f"It had finished before; --rounds {least} or more makes it longer.")


def _export(names: list[str], wanted: Export, evaluation: Evaluation, code: ChangedCode) -> None:
    (name,) = names
    if wanted.out is None:
        raise JaxflError(f"Say where to write: jaxfl export {name} --out FOLDER.")
    run = load(Path(name), code.changed_code, evaluation.round)
    *models, card = run.export(wanted.out, wanted.client or None)
    number = f"{len(models)} model{'s' if len(models) > 1 else ''}"
    OUT.print(
        f"{card.parent}: {number} ({few(path.name for path in models)}), and what they are in {card.name}"
    )


def _flower(names: list[str], app: Flower) -> None:
    from jaxfl.flower import app as flower  # here: no other command deploys a run

    (name,) = names
    if app.out is None:
        raise JaxflError(f"Say where to write: jaxfl flower {name} --out FOLDER.")
    files = flower.write(Path(name), app.out, app.after)
    named = ", ".join(path.name for path in files)
    OUT.print(f"{files[0].parent}: {named}; README.md says how to run it")


def _watch(names: list[str]) -> None:
    watch([*map(as_path, names)], OUT)


def _report(names: list[str], view: View, output: Output) -> None:
    folders = [*map(as_path, names)]
    out = output.out or several_runs.report_folder(folders)
    print_table(reports.report(folders, out, view, pictures=output.pictures), out)


def _partition(arguments: list[str]) -> None:
    name, arguments = _from(arguments, "partition")
    if name is not None:
        _, data, where, formats = parse("partition --from RUN", arguments, [], Data, RunFolder, Formats)
        config = store.read_config(Path(name))
        saved, setup = Path(name) / store.PARTITION, restore_setup(Path(name), config)
        setup = setup if data.data_dir is None else setup.replace(data_dir=data.data_dir)
        moments = recorded_moments(config["data"])
    else:
        asked, where, formats = parse(COMMANDS["partition"].usage, arguments, [Setup()], RunFolder, Formats)
        saved, setup, moments = None, setup_of(asked), None
    folder = where.run_dir or store.free_folder("partition", setup.data.dataset)
    store.check_free(folder)
    source = load_source(setup)
    partition = divide(setup, source, saved)
    drawn = draw_shift(setup, source, len(partition.train))
    partition_formats.require(formats.format, partition, source)
    store.check_free(folder)  # still, after the data have been read
    moments = moments or moments_of(setup, source, partition)
    written = save_partition(folder, setup, source, partition, drawn, moments, formats.format)
    OUT.print(describe(setup, partition, source))
    OUT.print(f"{folder}: {', '.join(written)}")


def _bench(words: list[str]) -> None:
    from jaxfl.bench import output as speed  # here: no other command waits for its imports
    from jaxfl.bench.bench import Bench, bench

    named, options = _names_and_options("bench", words, Bench)
    command = shlex.join(["jaxfl", "bench", *words])
    measured = bench(named, options, command, OUT.print)
    if measured.records:
        OUT.print(speed.table(measured.records))
        if options.out:
            OUT.print(f"{options.out}, {speed.save(measured.records, options.out)}")
    if measured.failures:
        raise JaxflError(" ".join(measured.failures))


def _list(names: list[str]) -> None:
    from jaxfl.cli import catalogue  # here: no other command needs all that can be named

    for name in names or catalogue.NAMED:
        OUT.print(catalogue.table_of(name))
    if not names:
        OUT.print(
            f"jaxfl list NAME shows one of these tables ({', '.join(catalogue.NAMED)}), or the options of a "
            "method, model, partition, topology, shift or schedule."
        )


def _check(names: list[str]) -> None:
    from jaxfl.runs import promises  # here: no other command needs the networks that it makes

    (choice,) = names
    jax.config.update("jax_disable_most_optimizations", True)  # the rounds are few: a quarter less to wait
    broken, table = 0, RichTable("promise", "kept", "seen")
    for promise, seen, is_broken in promises.tried(choose(choice, promises.OPTIONS)):
        broken += is_broken
        table.add_row(promise, "no" if is_broken else "perhaps" if seen else "yes", seen)
    OUT.print(table)
    if broken:
        raise JaxflError(f"{choice} does not keep {broken} of {table.row_count} promises.")


def _cite(names: list[str]) -> None:
    method, _ = registry.method(*names)
    if not method.bibtex:
        raise JaxflError(f"{method.name} has no paper to cite: its Method has no bibtex.")
    OUT.print(method.bibtex, markup=False, highlight=False, soft_wrap=True)


COMMANDS = {
    "run": Command(
        "run METHOD | [METHOD] --from RUN",
        "train one method, perhaps on a run's federation, or repeat a run; options: jaxfl run METHOD --help",
        _run,
    ),
    "compare": Command(
        "compare METHOD ...",
        "train several methods on one federation; an ablation is compfl,kd=false; options: --help",
        _compare,
    ),
    "study": Command(
        "study FILE | --list", "methods under several settings, given in a TOML file; options: --help", _study
    ),
    "report": Command(
        "report RUN ...", "table and plot of finished runs; options: --help", _report, (View, Output)
    ),
    "check": Command("check METHOD", "whether a method keeps what every method promises", _check, ()),
    "resume": Command(
        "resume RUN",
        "continue a run, or a comparison, from its last checkpoints",
        _resume,
        (Continuation, Logs, ChangedCode, Limit, Processes),
    ),
    "export": Command(
        "export RUN",
        "clients' models as safetensors, with a card; options: --help",
        _export,
        (Export, Evaluation, ChangedCode),
    ),
    "flower": Command(
        "flower RUN",
        "an app for Flower whose nodes train as the run's clients do; options: --help",
        _flower,
        (Flower,),
    ),
    "watch": Command("watch RUN ...", "runs and comparisons in the terminal, while they run", _watch, ()),
    "partition": Command(
        "partition [--from RUN]",
        "draw and save a partition, or that of a run, also for other programs; options: --help",
        _partition,
    ),
    "bench": Command(
        "bench [WORKLOAD ...]", "speed, beside a PyTorch loop; options: jaxfl bench --help", _bench
    ),
    "list": Command(
        "list [NAME ...]", "methods, models, data sets, partitions; the options of each named", _list, ()
    ),
    "cite": Command("cite METHOD", "BibTeX", _cite, ()),
}


def _join(processes: Processes) -> None:
    """Connect to the other processes, of which only the first one prints."""
    connect(processes)
    OUT.quiet = not is_first()
