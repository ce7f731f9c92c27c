"""Checksums of parameters and buffers, and which of them a step compares."""

import pytest
import torch

from dcpc.runtime.groups.same_state import checksum, share_of


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3),
        torch.randn(7, 3).t(),
        torch.randn(9).bfloat16()[1:],
        torch.randn(2, dtype=torch.complex64),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.arange(11, dtype=torch.uint8),
        torch.tensor(True),
        torch.ones(1).expand(4),
        torch.arange(6)[::2][1:2],  # one element, two apart from the next
        torch.randn(70_000, dtype=torch.float64),  # more than a chunk
    ],
)
def test_checksum_is_another_one_where_a_bit_is(tensor):
    assert checksum(tensor) == checksum(tensor.clone(memory_format=torch.contiguous_format))
    other = tensor.clone(memory_format=torch.contiguous_format).resolve_conj()
    raw = other.reshape(-1).view(torch.uint8)
    for place in {0, raw.numel() // 2, raw.numel() - 1}:
        raw[place] ^= 1
        assert checksum(other) != checksum(tensor)
        raw[place] ^= 1


def test_checksum_tells_the_order():
    x = torch.randn(1000)
    assert checksum(x) != checksum(x.flip(0))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_all_tensors_have_their_turn():
    sizes = [3, 1, 400, 2, 50]
    tensors = {f"t{i}": torch.ones(n) for i, n in enumerate(sizes)}
    start, seen = 0, []
    for _ in range(8):
        text, start = share_of(tensors, start, share=8)
        seen += [part.split()[0] for part in text.split(", ")]
    assert seen[:5] == ["t0", "t1", "t2", "t3", "t4"]
    assert share_of({}, 0) == ("", 0)
