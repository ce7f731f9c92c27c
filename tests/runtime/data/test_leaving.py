"""A loop over the loader that is left early leaves no thread, and the process ends as it should."""

import subprocess
import sys
import threading
from pathlib import Path

import torch

from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.data.reading.ahead import ahead
from dcpc.runtime.groups.groups import Groups
from tests.cases.fakes import RaggedWithDims, compiled_for

ROOT = Path(__file__).parents[3]
PAD = {"input_ids": 0, "labels": -100}


class InTorch(RaggedWithDims):
    """Samples that are nearly always within torch's C++."""

    def __getitem__(self, i):
        x = torch.ones(300, 300)
        for _ in range(100):
            x @ x
        return super().__getitem__(i)


def loader_in_torch() -> DataLoader:
    compiled = compiled_for(Groups(1, 0), {4: (1, 1)})
    return DataLoader(InTorch([4] * 60), compiled, tokens_per_step=4, pad=PAD, lookahead=4)


def leave(how: str) -> None:
    if how == "break":
        for _ in loader_in_torch():
            break
    elif how == "hold":
        kept = iter(loader_in_torch())
        next(kept)
        sys.modules["__main__"].kept = kept  # alive when Python ends
    else:
        for _ in loader_in_torch():
            raise SystemExit(0)


# Imports once, which is most of such a process; each fork then goes on to the end of the code, as
# a script does.
FORKS = """
import os
from tests.runtime.data.test_leaving import leave

codes = {}
for how in ("break", "hold", "exit") * 2:
    process = os.fork()
    if not process:
        leave(how)
        break
    codes.setdefault(how, []).append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
else:
    print(codes)
"""


def test_process_that_leaves_the_loop_early_does_not_abort():
    ran = subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{ {'break': [0, 0], 'hold': [0, 0], 'exit': [0, 0]} }\n", ran.stderr
    assert "Exception ignored" not in ran.stderr, ran.stderr


def test_thread_has_ended_when_the_loop_was_left():
    begun, ended = threading.Event(), threading.Event()

    def items():
        yield 0
        begun.set()
        threading.Event().wait(0.2)  # what it makes when the loop is left
        yield 1
        ended.set()

    steps = ahead(items(), 2)
    next(steps)
    begun.wait(10)
    steps.close()
    assert not ended.is_set()
    assert "dcpc-loader" not in {t.name for t in threading.enumerate()}


def test_thread_that_waits_for_a_peer_is_told_to_stop():
    told = threading.Event()

    def items():
        yield 0
        told.wait(60)

    steps = ahead(items(), 2, told.set)
    next(steps)
    steps.close()
    assert told.is_set()
