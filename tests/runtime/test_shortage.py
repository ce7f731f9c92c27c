"""Errors of allocators are recognised by what torch really raises."""

import pytest
import torch

from dcpc.runtime.step.shortage import is_out_of_memory, wanted_bytes


def test_torchs_own_errors_are_recognised_with_the_bytes_that_were_wanted():
    with pytest.raises(RuntimeError) as told:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(told.value)
    assert wanted_bytes(told.value) == 1 << 50
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ...")
    assert is_out_of_memory(gpu)
    assert wanted_bytes(gpu) == 3 << 29


def test_causes_count_and_other_errors_do_not():
    for error in (RuntimeError("Connection closed by peer"), ValueError("memory"), KeyError(1)):
        assert not is_out_of_memory(error)
        error.__cause__ = MemoryError()
        assert is_out_of_memory(error)
        assert wanted_bytes(error) == 0
