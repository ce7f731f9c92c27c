"""Repeated blocks by structure."""

from dcpc.fx.repeats import RepeatedBlocks, repeated_runs


def test_runs_are_found_with_their_period():
    calls = [*"xy", *"abcde" * 4, *"z", *"fghijk" * 3, *"w"]
    runs = repeated_runs(calls)
    assert runs == [RepeatedBlocks(2, 5, 22), RepeatedBlocks(23, 6, 41)]


def test_no_block_comes_twice():
    assert repeated_runs(list(range(20))) == []
    assert repeated_runs([]) == []


def test_a_period_is_not_two_blocks():
    (run,) = repeated_runs([*"abcdef"] * 8)
    assert run.period == 6
