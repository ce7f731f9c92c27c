"""A rank that fails, ends or is lost: all others raise one error that names it and the cause."""

import ctypes
import os
import re
import signal

import pytest

from dcpc.errors import DcpcError
from tests.cases.launch import RanksError, run_ranks
from tests.cases.resuming import Samples, Training


def ends(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segmentation fault":
        ctypes.string_at(0)
    if how == "interrupt":
        # A shell starts what runs in the background with Ctrl-C ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)
    raise ValueError("injected")


def trains(rank: int, mode: str, how: str, where: str) -> tuple[str, str]:
    """Rank 1 fails in its fourth call of something; returns the error here and what it came of."""
    calls = []

    def before(function):
        def run(*arguments):
            calls.append(arguments)
            if rank == 1 and len(calls) == 4:
                ends(how)
            return function(*arguments)

        return run

    if where == "dataset":
        Samples.__getitem__ = before(Samples.__getitem__)
    made = Training(mode)
    if where == "model":
        dispatch = made.compiled._core.dispatch
        dispatch.run_micro_batch = before(dispatch.run_micro_batch)
    if where == "between":
        made.scheduler.step = before(made.scheduler.step)
    with pytest.raises((DcpcError, ValueError, KeyboardInterrupt)) as told:
        made.run()
    if where == "between" and how == "raise":
        raise told.value  # as a script does, whose process then ends
    return type(told.value).__name__, str(told.value)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("mode", "how", "where", "kind", "cause"),
    [
        ("rounds", "kill", "model", "GroupError", "is lost: got the end of its process"),
        ("whole", "raise", "dataset", "DataError", r"dataset\[\d+\]: got ValueError: injected"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("whole", "raise", "model", "GroupError",
             r"failed: got ValueError: injected in train_step, step \d+ of epoch \d+"),
            ("whole", "interrupt", "model", "GroupError", "failed: got KeyboardInterrupt in train"),
            ("pull", "segmentation fault", "between", "GroupError", "is lost: got the end of its"),
        )),
    ],
)  # fmt: skip
def test_the_others_name_the_rank_and_the_cause(mode, how, where, kind, cause):
    stays = how in ("raise", "interrupt")
    here, there = run_ranks(trains, 2, mode, how, where, timeout_s=90, may_die=() if stays else [1])
    assert here[0] == kind
    assert here[1].startswith(("rank 1 ", "rank 1: "))
    assert re.search(cause, here[1]), here[1]
    if stays:
        own = {"raise": "ValueError", "interrupt": "KeyboardInterrupt"}[how]
        assert there[0] == (kind if where == "dataset" else own)


@pytest.mark.multirank
@pytest.mark.slow
def test_an_error_between_steps_is_told_as_the_process_ends():
    with pytest.raises(RanksError, match=r"(?s)GroupError: rank 1 failed: got ValueError: inje"):
        run_ranks(trains, 2, "whole", "raise", "between", timeout_s=90)
