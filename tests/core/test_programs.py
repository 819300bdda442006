"""Compiled programs: their counts, and which are dropped when a process holds too many."""

import numpy as np
import pytest

from jaxfl.core import programs
from jaxfl.core.programs import Program
from jaxfl.machine import memory_maps


def test_a_program_counts_its_compilations():
    program = Program(lambda x: x + 1)
    assert program.compilations == 0
    for argument in np.zeros(2), np.ones(2), np.zeros(3), np.zeros(2, np.int32):
        np.testing.assert_array_equal(program(argument), argument + 1)
    assert program.compilations == 3
    assert program.seconds > 0


def test_a_compilation_in_another_thread_happens_once_and_its_error_is_raised_at_the_call():
    program, argument = Program(lambda x: x + 1), np.zeros(2)
    for _ in range(2):
        program.begin(argument)
    np.testing.assert_array_equal(program(argument), argument + 1)
    assert program.compilations == 1

    def fail():
        raise ZeroDivisionError

    program._begun[programs._signature((np.zeros(3),))] = programs.compilers.submit(fail)
    with pytest.raises(ZeroDivisionError):
        program(np.zeros(3))
    np.testing.assert_array_equal(program(np.zeros(3)), np.ones(3))  # the next call compiles it


def test_executables_of_the_least_recently_used_programs_are_dropped_when_there_are_too_many(monkeypatch):
    old, young, new = (Program(lambda x, i=i: x + i) for i in range(3))
    monkeypatch.setattr(programs, "_programs", [young, old, new])
    argument = np.zeros(2)
    for program in old, young:
        program(argument)
    monkeypatch.setattr(programs, "crowded", lambda: True)
    new(argument)
    monkeypatch.setattr(programs, "crowded", lambda: False)
    for i, program in enumerate((old, young, new)):
        np.testing.assert_array_equal(program(argument), argument + i)
    assert [program.compilations for program in (old, young, new)] == [2, 1, 1]


def test_a_process_is_crowded_beyond_half_of_its_memory_maps(monkeypatch, tmp_path):
    taken, granted = tmp_path / "maps", tmp_path / "max_map_count"
    monkeypatch.setattr(memory_maps, "TAKEN", taken)
    monkeypatch.setattr(memory_maps, "GRANTED", granted)
    assert not memory_maps.crowded()  # no file says so
    granted.write_text("8\n")
    for lines, expected in [(4, False), (5, True)]:
        taken.write_text("00400000-0040b000 r--p\n" * lines)
        assert memory_maps.crowded() == expected
