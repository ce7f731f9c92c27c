"""Random numbers from a seed: equal on every rank of a group, and when recomputed.

torch's own random ops draw from a hidden stream, which differs by rank and moves on at every call.
In a captured graph they become these, whose numbers depend on their arguments alone: the call's
seed, the op's index in the graph, and the position of a rank's piece (0 where a value is whole).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 63) - 1


def mix(*numbers: int) -> int:
    """Returns a well-spread 63-bit number from a sequence of integers.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied after each number.
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK


def _generator(device: torch.device, seed: int, index: int, salt: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(mix(seed, index, salt))


@torch.library.custom_op("dcpc::uniform", mutates_args=())
def uniform(
    size: Sequence[int], seed: int, salt: int, index: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns uniform random numbers in [0, 1)."""
    generator = _generator(device, seed, index, salt)
    return torch.rand(size, generator=generator, dtype=dtype, device=device)


@torch.library.custom_op("dcpc::normal", mutates_args=())
def normal(
    size: Sequence[int], seed: int, salt: int, index: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns standard normal random numbers."""
    generator = _generator(device, seed, index, salt)
    return torch.randn(size, generator=generator, dtype=dtype, device=device)


DRAWS = (torch.ops.dcpc.uniform.default, torch.ops.dcpc.normal.default)
INDEX = 3  # position of the argument that differs between the draws of one graph


@uniform.register_fake
@normal.register_fake
def _(
    size: Sequence[int], seed: int, salt: int, index: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)
