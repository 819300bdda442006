"""Feature shift: what clients see matches NumPy and stays the same; without a shift nothing changes."""

import colorsys

import jax
import numpy as np
import pytest
from conftest import SIZES, tiny_models, tiny_partition, tiny_source

import jaxfl
from jaxfl.data.federate import federate
from jaxfl.data.shift import SHIFTS, Drawn, require, seen
from jaxfl.errors import JaxflError

SOURCE = tiny_source()
PARTITION = tiny_partition(SOURCE)


def drawn(**amounts):
    return Drawn(tuple(amounts), tuple(np.asarray(of_clients, float) for of_clients in amounts.values()), 3)


def views(federation):
    """Return all rows as their clients see them, before images are normalised: (V, H, W, C)."""
    inputs = jax.jit(lambda rows: federation.inputs(rows))(np.arange(len(federation.labels)))
    return np.asarray(inputs) * np.asarray(federation.std) + np.asarray(federation.mean)


def clients(federation):
    """Yield each client's training and test rows, in the order of ids, without padding."""
    for group in jax.device_get(federation.groups):
        for i in range(len(group.id)):
            yield group.rows[i, : group.size[i]], group.test_rows[i, : group.test_size[i]]


def test_every_client_sees_its_own_rotation_and_public_images_unchanged():
    quarters = [0, 1, 2, 3, 0]
    federation = federate(SOURCE, PARTITION, tiny_models(), drawn=drawn(rotate=np.multiply(90, quarters)))
    found, labels = views(federation), np.asarray(federation.labels)
    of_clients = zip(clients(federation), PARTITION.train, PARTITION.test, quarters, strict=True)
    for numbers, train, test, turns in of_clients:
        for number, own in zip(numbers, (train, test), strict=True):
            expected = np.rot90(SOURCE.images[own], turns, (1, 2))
            np.testing.assert_allclose(found[number], expected, atol=0.01)
            assert (labels[number] == SOURCE.labels[own]).all()
    assert len(list(clients(federation))) == len(SIZES)
    np.testing.assert_allclose(
        found[np.asarray(federation.public)], SOURCE.images[PARTITION.public], atol=1e-3
    )
    assert federation.images.shape == SOURCE.images.shape  # stored once
    plain = federate(SOURCE, PARTITION, tiny_models())
    assert plain.shift is None
    assert (federation.groups[0].class_counts == plain.groups[0].class_counts).all()


def test_noise_belongs_to_a_client_and_a_row_and_stays_the_same():
    amounts = drawn(noise=[0, 2, 2, 0, 0])
    federation = federate(SOURCE, PARTITION, tiny_models(), drawn=amounts)
    std, found = np.asarray(federation.std), views(federation)
    (_, first), (_, second), (_, third), *_ = clients(federation)
    rows = PARTITION.test[2]  # the first two clients are tested on these as well
    noise = [(found[number[-len(rows) :]] - SOURCE.images[rows]) / std for number in (first, second, third)]
    assert abs(noise[0]).max() < 1e-3
    assert abs(noise[1].std() - 2) < 0.1 and abs(noise[2].std() - 2) < 0.1
    assert abs(np.corrcoef(noise[1].ravel(), noise[2].ravel())[0, 1]) < 0.1
    # Files for other programs hold the same noise, made for one client.
    alone = seen(amounts, SOURCE.images, std, 2, rows[3:])
    np.testing.assert_allclose(alone, found[third[3:]], atol=1e-2)


def test_a_second_noise_is_independent_of_the_first():
    twice = Drawn(("noise", "noise"), (np.full(5, 2.0), np.full(5, 2.0)), 3)
    ones = np.ones((1, 1, 1, 1))
    first, both = (
        seen(shift, np.zeros((40, 8, 8, 1)), ones, 0, np.arange(40))
        for shift in (drawn(noise=[2] * 5), twice)
    )
    assert abs(both.std() - 2 * 2**0.5) < 0.1  # and not 4, as of the same noise twice
    assert abs(np.corrcoef(first.ravel(), (both - first).ravel())[0, 1]) < 0.1


def test_colour_moves_the_hue():
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 3, 3), dtype=np.uint8)
    found = seen(drawn(colour=[0.2, 0.0]), images, np.ones((1, 1, 1, 3)), 0, np.arange(2))
    for place in np.ndindex(2, 3, 3):
        hue, saturation, value = colorsys.rgb_to_hsv(*images[place] / 255)
        expected = 255 * np.array(colorsys.hsv_to_rgb((hue + 0.2) % 1, saturation, value))
        np.testing.assert_allclose(found[place], expected, atol=0.01)


def test_amounts_are_drawn_within_their_ranges():
    rng = np.random.default_rng(0)
    assert abs(SHIFTS["rotate"](1000, rng, degrees=30.0)).max() == pytest.approx(30, rel=0.01)
    assert sorted(SHIFTS["rotate"](8, rng, angles=4)) == [0, 0, 90, 90, 180, 180, 270, 270]
    assert sorted(SHIFTS["noise"](4, rng, std=1.0)) == [0.25, 0.5, 0.75, 1.0]
    assert abs(SHIFTS["colour"](1000, rng, hue=0.1)).max() == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("rotate", {"degrees": 200.0}, "degrees is 200.0; it must be from 0 to 180"),
        ("rotate", {"angles": 0}, "angles is 0"),
        ("rotate", {"angles": 4, "degrees": 10.0}, "degrees and angles exclude each other"),
        ("colour", {"hue": 0.6}, "hue is 0.6"),
        ("noise", {"std": -1.0}, "std is -1.0"),
    ],
)
def test_amounts_out_of_range_are_refused(name, options, sentence):
    with pytest.raises(JaxflError, match=sentence):
        SHIFTS[name](3, np.random.default_rng(0), **options)


def test_shifts_that_do_not_fit_the_data_are_refused():
    with pytest.raises(JaxflError, match="the number of channels of grey is 1; take rotate or noise"):
        require("grey", ["colour"], (8, 8, 1))
    with pytest.raises(JaxflError, match="sensors holds vectors; take noise"):
        require("sensors", ["rotate"], (1, 1, 9))
    with pytest.raises(JaxflError, match="holds windows of 50 steps"):
        require("sensors", ["rotate"], (1, 50, 3))


def test_without_a_shift_the_program_has_no_part_of_one():
    federation = federate(SOURCE, PARTITION, tiny_models())
    program = str(jax.make_jaxpr(federation.inputs)(np.arange(4)))
    assert "random" not in program and program.count("gather") == 1


def test_a_run_with_a_shift_predicts_images_as_its_clients_see_them(tmp_path):
    """The run's picture of classes per client counts its rows, pairs of images and owners."""
    options = {"models": ["mlp,hidden=3"], "clients": 4, "rounds": 1, "eval_every": 1, "epochs": 1}
    run = jaxfl.run(
        "local", run_dir=tmp_path / "run", shift=["rotate,degrees=60", "noise"], quiet=True, **options
    )
    assert (run.folder / "partition.png").is_file()
    for client in range(4):
        rows, model = run.partition.test[client], run.models[client]
        right = model.predict(run.seen(client, rows)) == run.source.labels[rows]
        assert right.mean() == model.accuracy
    with pytest.raises(JaxflError, match=r"sees images of its own .*run.seen\(3, rows\) makes them"):
        model.predict(run.source.images[rows])
    card = run.export(tmp_path / "export", clients=3)[-1].read_text()
    assert "of float32, as the client sees them;" in card and "as the data set has them" not in card
    assert f'`jaxfl.load("{run.folder}").seen(CLIENT, rows)` makes them' in card


def test_colours_of_windows_and_vectors_are_not_shifted():
    """Three channels of an accelerometer are no red, green and blue."""
    for shape in (1, 50, 3), (1, 1, 3):
        with pytest.raises(JaxflError, match="--shift colour moves the hue of images, but x holds"):
            require("x", ["colour"], shape)
    require("x", ["colour"], (8, 8, 3))
