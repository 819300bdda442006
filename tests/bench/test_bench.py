"""The benchmark: its command, its counts, and that the PyTorch loop trains what jaxfl trains."""

import dataclasses
import importlib.util
import json
import sys

import jax
import numpy as np
import pytest
from conftest import tiny_partition, tiny_source

from jaxfl import registry
from jaxfl.bench import bench, count, measure, workloads
from jaxfl.bench.count import PHASES, Phase, require_counted
from jaxfl.bench.measure import matmul_flops
from jaxfl.bench.workloads import Workload
from jaxfl.cli import main
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.core.initial_weights import initial_weights
from jaxfl.core.job import traced
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Cohort, Info
from jaxfl.data.federate import federate
from jaxfl.data.sources import from_arrays
from jaxfl.errors import JaxflError
from jaxfl.folder.variant import choose
from jaxfl.models import zoo
from jaxfl.runs.prepare import divide

TINY = Workload(
    "six clients of ten digits, three a round",
    1200,
    {"dataset": "digits", "models": ("mlp,hidden=4",), "clients": 6, "participation": 0.5}
    | {"partition": "classes,classes_per_client=10,samples_per_client=10"},
    ("fedavg", "fedrep"),
    {"epochs": 2, "batch_size": 4},
)

OF_TOKENS = {"shape": (6,), "classes": 3, "vocabulary": 3, "every_token": True}
PRODUCT = {"full": 1e9, "bfloat16": 4e9}  # FLOP/s of a device


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Add a tiny workload, and pretend to have two devices of known speed."""
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", TINY)
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    monkeypatch.setattr(measure, "matmul_flops", lambda precision, devices: PRODUCT[precision] * devices)


def test_the_command_measures_and_records(drawn, tmp_path, capsys):
    out = tmp_path / "new" / "tiny.json"
    command = f"bench tiny --repetitions 2 --rounds-per-repetition 3 --no-torch --strategies auto --out {out}"
    main(command.split())
    assert "six clients of ten digits" in capsys.readouterr().out
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    records = json.loads(out.read_text())
    assert [record["method"] for record in records] == ["fedavg", "fedrep"]
    for record in records:
        assert record["workload"] == "tiny" and record["strategy"] == "auto" and record["data"] == "real"
        assert len(record["repetitions"]) == 2 and record["rounds_per_repetition"] == 3
        rates = [turn["samples"] / turn["seconds"] for turn in record["repetitions"]]
        assert record["samples_per_s"] == pytest.approx(np.median(rates))
        assert record["steps_per_s"] == pytest.approx(record["samples_per_s"] * 3 / 10)  # ceil(10 / 4)
        assert record["ratio_to_torch"] is None
        assert record["compile_s"] > 0 and record["peak_bytes"] > 0 and record["mfu"] > 0
        assert record["command"] == f"jaxfl {command}"
        assert {"cpu", "cores", "device"} <= record["machine"].keys()
        assert {"jaxfl", "jax", "git"} <= record["versions"].keys()
    plain, turns = (record["flops_per_sample"] for record in records)
    # The products of 64-4-10: two with the first layer, three with the head, of which FedRep's head phase
    # (one epoch of three) leaves out the first layer's gradient, the body phase (two) the head's.
    assert plain == 2 * (2 * 256 + 3 * 40)
    assert turns == pytest.approx(2 * ((256 + 2 * 40) + 2 * (2 * 256 + 2 * 40)) / 3)


@pytest.mark.long
def test_methods_take_turns_with_a_rival(tmp_path, monkeypatch):
    """The time of a step on the host is the method's, and patience ends the timing early."""
    hosted, fedavg = [], registry.METHODS["fedavg"]

    def with_a_server(config):
        def host(key, state, federation, cohort):
            hosted.append(int(cohort.round))
            nothing = tuple(np.zeros(len(slots.mask), np.int32) for slots in cohort.groups)
            return state, Info((), nothing, nothing)

        return fedavg.build(config)._replace(host=host)

    served = fedavg._replace(name="served", build=with_a_server)
    methods = {method.name: method for method in (fedavg, served, registry.METHODS["mnfl"])}
    monkeypatch.setattr(registry, "METHODS", methods)
    beside = TINY._replace(methods=(), rival="fedavg", patience_s=0.0)
    monkeypatch.setitem(workloads.VARIANTS, "beside", beside)
    out = tmp_path / "beside.json"
    main(f"bench beside --repetitions 3 --rounds-per-repetition 2 --out {out}".split())
    assert out.with_suffix(".png").exists()
    records = {record["method"]: record for record in json.loads(out.read_text())}
    assert list(records) == ["fedavg", "served", "mnfl"]
    rows = 3 * 10 * 2  # three clients, two epochs
    assert records["fedavg"]["flops_per_round"] == rows * 2 * (2 * 256 + 3 * 40)
    assert records["fedavg"]["samples_per_s"] > 0 and records["mnfl"]["samples_per_s"] is None
    assert records["mnfl"]["flops_per_round"] > records["served"]["flops_per_round"]
    for record in records.values():
        (turn,) = record["repetitions"]
        assert turn["seconds"] == 2 * record["seconds_per_round"] and record["rival"] == "fedavg"
        per_flop, of_rival = turn["seconds"] / turn["flops"], turn["rival_seconds"] / turn["rival_flops"]
        assert record["ratio_to_rival"] == pytest.approx(per_flop / of_rival)
        assert record["flops_per_s"] == pytest.approx(1 / per_flop)
        assert (0 < turn["host_s"] < turn["seconds"]) == (record["method"] == "served")
    assert hosted == [42, 43, 44, 45]  # of 50: two rounds warm up, two count, patience ends before four more
    with pytest.raises(SystemExit):
        main(["bench", "beside", "--methods", "served", "--strategies", "5 seeds"])


def test_every_strategy_has_a_record_of_its_own(tmp_path):
    out = tmp_path / "tiny.json"
    names = ["rows", "devices 1..all", "bfloat16", "5 seeds"]
    main(
        ["bench", "tiny", "--methods", "fedavg", "--repetitions", "1", "--no-torch", "--out", str(out)]
        + ["--checksum", "--strategies", *names]
    )
    records = {record["strategy"]: record for record in json.loads(out.read_text())}
    used = {name: (record["devices"], record["matmul_flops_per_s"]) for name, record in records.items()}
    assert used == {  # mfu is a share of this: the devices that were used, in their precision
        "rows": (2, 2e9),
        "devices 1": (1, 1e9),
        "devices 2": (2, 2e9),
        "bfloat16": (2, 8e9),
        "5 seeds in turn": (2, 2e9),
        "5 seeds": (2, 2e9),
    }
    first = records["rows"]
    for record in records.values():
        flops_per_s = record["samples_per_s"] * record["flops_per_sample"]
        assert record["mfu"] == pytest.approx(flops_per_s / record["matmul_flops_per_s"])
        assert record["ratio_to_first"] == pytest.approx(record["samples_per_s"] / first["samples_per_s"])
    bits = {name: record["checksum"] for name, record in records.items()}
    assert bits["rows"] == bits["devices 2"] != bits["bfloat16"]  # an MLP has no convolution


def test_a_benchmark_that_was_cut_short_continues(tmp_path, monkeypatch, capsys):
    """A benchmark continues after its records if command, code and machine are the same."""
    asked, out = [], tmp_path / "tiny.json"

    def one_then_the_end(workload, choice, *args, **options):
        asked.append(choice)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [{"method": choice}]

    monkeypatch.setattr(bench, "measure", one_then_the_end)
    command = ["bench", "tiny", "--no-torch", "--out", str(out)]
    monkeypatch.setattr("jaxfl.bench.output.table", lambda records: f"{len(records)} in all")
    monkeypatch.setattr("jaxfl.bench.output.draw", lambda records, path: None)
    with pytest.raises(SystemExit):
        main(command)
    assert not out.exists()
    main(command)
    assert asked == ["fedavg", "fedrep", "fedrep"]
    assert [record["method"] for record in json.loads(out.read_text())] == ["fedavg", "fedrep"]
    main(command)
    assert asked[3:] == ["fedavg", "fedrep"]
    assert "1 records of this command exist already; it continues" in capsys.readouterr().out
    for another in ({"devices": 9}, None):
        records = json.loads(out.read_text())
        record = records[0] | {"machine": records[0]["machine"] | another} if another else {}
        out.with_suffix(".unfinished.json").write_text(json.dumps([record]))
        main(command)
        assert "version or machine, or damaged; all is measured again" in capsys.readouterr().out
    assert asked[5:] == ["fedavg", "fedrep"] * 2
    for nowhere, words in ((tmp_path, "not a file for"), (tmp_path / "x.png", "not a file for")):
        with pytest.raises(SystemExit):
            main([*command[:-1], str(nowhere)])
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command[:-1], "/dev/null/x.json"])
    assert "/dev/null/x.json cannot be written" in capsys.readouterr().err
    assert len(asked) == 9  # the refused commands measured nothing


def test_clients_grow_until_memory_runs_out_and_fewer_train_afterwards(tmp_path, monkeypatch):
    out, call, held = tmp_path / "tiny.json", Program.__call__, []
    before = jax.live_arrays()  # of other tests
    theirs = set(map(id, before))

    def of_eight_too_few(program, key, state, federation, cohorts):
        ours = [leaf for leaf in jax.live_arrays() if id(leaf) not in theirs]
        held.append(sum(leaf.shape[:1] == (8,) for leaf in ours))
        if federation.clients >= 8:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.")
        return call(program, key, state, federation, cohorts)

    monkeypatch.setattr(Program, "__call__", of_eight_too_few)
    options = "--methods fedavg --no-torch --repetitions 1 --out"
    main([*f"bench tiny --grow 2 64 {options}".split(), str(out)])
    records = json.loads(out.read_text())
    names = ["tiny-2", "tiny-4", "tiny-4, after a refusal"]
    assert [(record["workload"], record["clients"]) for record in records] == list(
        zip(names, (2, 4, 4), strict=True)
    )
    assert held[-3] and held[-2:] == [0, 0]  # the arrays of the refused run are freed
    (refused,) = [record["refused"] for record in records if "refused" in record]
    assert refused["clients"] == 8 and "memory ran out with --clients-at-once 1;" in refused["sentence"]
    with pytest.raises(SystemExit):
        main([*f"bench tiny --grow 8 64 {options}".split(), str(tmp_path / "none.json")])


def test_flops_of_products_are_measured_in_the_precision_on_all_devices_together(monkeypatch):
    """Every product is made to take half a second, so two devices have twice the FLOP/s of one."""
    seen = []

    def half_a_second(function, number, repeat):
        function()
        return [0.5] * repeat

    monkeypatch.setattr("timeit.repeat", half_a_second)
    monkeypatch.setattr(
        jax.random, "normal", lambda key, shape, dtype: seen.append((shape, dtype)) or np.ones(shape, dtype)
    )
    one, two = (matmul_flops.__wrapped__("bfloat16", devices) for devices in (1, 2))
    assert two == 2 * one == 2 * 2 * 1024**3 / 0.5
    assert seen == [((devices, 1024, 1024), np.dtype("bfloat16")) for devices in (1, 2)]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench tinny", "no workload 'tinny'; did you mean 'tiny'?"),
        ("bench tiny --strategies atuo", "no strategy 'atuo'; did you mean 'auto'?"),
        ("bench tiny --methods fedpr", "no method 'fedpr'; did you mean 'fedper'?"),
        ("bench tiny --repetitions 0", "--repetitions must lie in [1, inf), but is 0"),
        ("bench tiny --repeat 3", "no option --repeat; did you mean '--repetitions'?"),
        ("bench tiny --grow 5", "--grow takes two numbers of clients"),
    ],
)
def test_invalid_commands_are_refused(command, words, capsys):
    with pytest.raises(SystemExit) as end:
        main(command.split())
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_without_pytorch_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "jaxfl.bench.torch_loop", raising=False)
    with pytest.raises(SystemExit):
        main(["bench", "tiny"])
    assert "pip install '.[bench]' in a clone of jaxfl, or add --no-torch" in capsys.readouterr().err


def test_workloads_use_random_images_if_the_data_set_is_missing(tmp_path):
    for name in ("W1", "W2", "W3", "W4", "W5"):
        workload, said = workloads.WORKLOADS[name], []
        setup = workloads.setup_of(workload).replace(data_dir=tmp_path)
        source, data = workloads.source_of(workload, setup, said.append)
        assert data == "random" and "is not prepared" in said[0]
        clients = divide(setup, source).train
        assert sum(map(len, clients)) == {"W5": 200}.get(name, workload.images)  # of W5 a CPU runs a part


def test_small_workloads_and_grown_ones_can_be_divided(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    said = []
    for workload in (workloads.WORKLOADS | workloads.VARIANTS).values():
        small = workloads.small(workload)
        for clients in (4, 16):
            sized = workloads.grown(small, clients)
            setup = workloads.setup_of(sized).replace(data_dir=tmp_path)
            source, _ = workloads.source_of(sized, setup, said.append)
            assert len(divide(setup, source).train) == clients
    assert "is a set of tensorflow-datasets, which cannot be imported here" in said[0]


@pytest.mark.parametrize("own", workloads.OWN_NETWORKS.values(), ids=workloads.OWN_NETWORKS)
def test_a_workload_own_has_one_network_from_the_zoo_and_in_flax(own):
    choices = own.setup["models"] + own.ways["in Flax"].setup["models"]
    models = [zoo.build(choice, shape=(32, 32, 3), classes=10) for choice in choices]
    drawn = [jax.eval_shape(model.init, jax.random.key(0)) for model in models]
    sizes, in_flax = (sorted(leaf.size for leaf in jax.tree.leaves(weights)) for weights in drawn)
    assert sizes == in_flax


def test_images_come_from_an_npz_file_if_it_has_enough(tmp_path):
    images, labels = np.zeros((60, 28, 28), np.uint8), np.arange(60) % 10
    np.savez(tmp_path / "mnist.npz", images=images, labels=labels, split=np.arange(60) < 50)
    few = workloads.WORKLOADS["W4"]._replace(images=40)
    for wanted, data in ((few, "real"), (few._replace(images=51), "random")):
        setup = workloads.setup_of(wanted).replace(data_dir=tmp_path)
        source, found = workloads.source_of(wanted, setup, lambda sentence: None)
        assert found == data and source.train.sum() == wanted.images


@pytest.mark.long
def test_a_profiled_run_writes_a_trace(tmp_path):
    main(
        "run fedavg --clients 2 --models mlp,hidden=4 --rounds 3 --eval-every 2 "
        f"--run-dir {tmp_path / 'run'} --profile {tmp_path / 'trace'}".split()
    )
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_work_counts_real_rows_and_steps(federation):
    cohorts = draw_cohorts([3, 2], 1.0, 2, 0)  # sizes 7, 4, 5 and 1, 6
    parts = tuple((Phase(model.names, 3),) for model in federation.models)
    samples, steps = count.work(federation, cohorts, parts, 4)
    assert samples == 2 * 3 * 23
    assert steps == 2 * 3 * ((2 + 1 + 2) + (1 + 2))


@pytest.mark.parametrize(
    "option", ["steps=20", "epochs=0.5", "optimizer=adam", "augment=flip", "clip_norm=1"]
)
def test_options_that_the_counts_of_samples_do_not_know_are_refused(option):
    variant = choose(f"fedavg,{option}", {})
    with pytest.raises(JaxflError, match=f"whole epochs of plain SGD .* leave {option.split('=')[0]} out"):
        require_counted(variant.label, variant.config)
    plain = choose("ditto,personal_epochs=2", {})
    require_counted(plain.label, plain.config)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is an extra")
@pytest.mark.parametrize(
    ("choice", "model"),
    [
        ("fedavg", zoo.lenet5(shape=(16, 16, 1), classes=3, width=0.3)),
        ("fedavg", zoo.resnet9(shape=(8, 8, 1), classes=3, width=0.05)),
        ("fedavg", zoo.resnet18(shape=(16, 16, 1), classes=3, width=0.05, norm="none", stem="imagenet")),
        ("fedavg", zoo.vit(shape=(8, 8, 1), classes=3, width=0.05, depth=2, heads=2)),
        ("fedper", zoo.mlp(shape=(8, 8, 1), classes=3, hidden=5)),
        ("fedrep", zoo.mcmahan(shape=(8, 8, 1), classes=3, width=0.1, padding="same")),
        ("ditto,personal_epochs=2,lam=0.5", zoo.mlp(shape=(8, 8, 1), classes=3, hidden=5)),
        ("fedavg", zoo.build("gru,embedding=4,hidden=5", **OF_TOKENS)),
        ("fedavg", zoo.build("transformer,width=0.125,heads=2,depth=2", **OF_TOKENS)),
    ],
)
def test_the_pytorch_loop_has_the_same_losses(choice, model):
    """A batch holds all rows of a client, so that their order does not matter."""
    from jaxfl.bench import torch_loop

    source = tiny_source()
    if model.tokens:
        tokens = np.random.default_rng(0).integers(0, 3, (60, 6), dtype=np.int32)
        source = from_arrays("tokens", tokens, None, source.train, 0, vocabulary=3)
        model = dataclasses.replace(model, task=source.task)
    else:
        times = model.shape[0] // 8
        source = source._replace(images=source.images.repeat(times, 1).repeat(times, 2))
    federation = federate(source, tiny_partition(source, (7, 4, 5)), [(model, 3)])
    method, options = registry.method(choice)
    config = method.config(**({"epochs": 2, "batch_size": 16} | options))
    algorithm, key = method.build(config), jax.random.key(0)
    cohorts = draw_cohorts([3], 0.7, 3, 0)  # two of three clients, three rounds
    parts = PHASES[method.name](config, model)
    one_round = torch_loop.prepare(
        federation, method.name, config, parts, initial_weights(key, federation)[0]
    )

    state, step = algorithm.init(key, federation, traced(config)), jax.jit(algorithm.step)
    for t in range(3):
        slots = jax.tree.map(lambda leaf, t=t: leaf[t], cohorts)
        state, info = step(key, state, federation, Cohort(np.int32(t), slots, rounds=3))
        assert np.allclose(one_round(slots[0].index.tolist()), info.loss[0], atol=1e-4)
