"""Parameters and buffers are the same on every rank: each takes the gradient for its own.

At compile all are compared, and where they differ every rank gets rank 0's, with a warning, as
DistributedDataParallel does. After that a step compares a share of them, another one each time, so
that all have had their turn after `SHARE` to twice as many steps; after `load_state_dict` it
compares all. A difference is then an error: the ranks have trained apart, and their optimizers too.

Compared are checksums, integers of all bytes and their order: equal bits are equal checksums, and
one bit that differs is always another checksum.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.errors import GroupError
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups

# A step compares one part in so many: a thousandth of a step of a model that reads each parameter
# for many tokens, and ranks that went apart are found within a few steps, as most tensors differ.
SHARE = 64

_CHUNK = 1 << 16  # words at once: their products stay in a cache
# Odd, so that each word has a weight of its own. Source: the golden ratio, 2**64 / phi, as of
# Fibonacci hashing; and a weight of the first word that is no small number.
_STEP, _FIRST = -7046029254386353131, 0x51ED270B27B4F3CF


def checksum(tensor: Tensor) -> int:
    """Returns an integer of 64 bits that tells the bytes of a tensor and their order.

    Words are multiplied by odd weights of their place and added, modulo 2**64: another word at one
    place is always another sum.
    """
    with torch.no_grad():
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.storage_offset() * flat.itemsize % 8 or flat.stride() != (1,):
            # Words begin at a multiple of 8 bytes; one element may have any stride.
            flat = flat.clone(memory_format=torch.contiguous_format)
        raw = flat.view(torch.uint8)
        whole = raw.numel() // 8 * 8
        rest = raw[whole:].tolist()
        total = int.from_bytes(bytes(rest), "little")
        weights = _weights(raw.device)
        sums = [
            (part * weights[: part.numel()]).sum()
            for part in raw[:whole].view(torch.int64).split(_CHUNK)
        ]
        for found in torch.stack(sums).tolist() if sums else []:
            total = (total * _STEP + found) % (1 << 64)
        return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    places = torch.arange(_CHUNK, device=device)
    return (places * _STEP + _FIRST).bitwise_or_(1)


def share_state(tensors: Mapping[str, Tensor], groups: Groups) -> list[str]:
    """Gives every rank rank 0's tensors where any rank has others; returns their names.

    Collective over all ranks.

    Args:
        tensors: name -> tensor, tensors of one memory once; written to.
        groups: the process groups.

    Raises:
        GroupError: the ranks have other names, shapes or dtypes, or one did not arrive.
    """
    names = differing(tensors, groups)
    for name in names:
        _take_from_first(name, tensors[name], groups)
    if names and groups.rank == 0:
        warnings.warn(
            f"ranks started from different values of {_shown(names)} ({len(names)} of "
            f"{len(tensors)} parameters and buffers); all have rank 0's now, as with "
            "DistributedDataParallel; seed every rank alike (torch.manual_seed) before the model "
            "is made, or load the same file on each",
            stacklevel=4,
        )
    return names


def refuse_different(tensors: Mapping[str, Tensor], groups: Groups) -> None:
    """Raises unless all ranks have the same tensors; collective over all ranks.

    Raises:
        GroupError: they have not; on every rank.
    """
    names = differing(tensors, groups)
    if names:
        raise GroupError(
            f"ranks have different values of {_shown(names)} ({len(names)} of {len(tensors)} "
            f"parameters and buffers) after load_state_dict; expected the same on all of "
            f"{groups.world} ranks; load the same file on every rank, or before dcpc.compile, "
            "which gives all ranks those of rank 0"
        )


def differing(tensors: Mapping[str, Tensor], groups: Groups) -> list[str]:
    """Returns the names whose values are not the same on all ranks; alone: none.

    Collective over all ranks.

    Raises:
        GroupError: the ranks have other names, shapes or dtypes, or one did not arrive.
    """
    pg = groups.control(groups.world)
    dense = {n: t for n, t in tensors.items() if t.layout is torch.strided}
    if pg is None or not dense:
        return []
    kinds = repr([(n, tuple(t.shape), str(t.dtype)) for n, t in dense.items()])
    digest = hashlib.sha256(kinds.encode()).hexdigest()[:16]
    agree(groups, groups.world, "names and kinds of parameters and buffers", digest)
    sums = [checksum(t) for t in dense.values()]
    mine = torch.tensor([n - (1 << 64) if n >> 63 else n for n in sums])
    first = mine.clone()
    dist.broadcast(first, group=pg, group_src=0)
    differs = (first != mine).to(torch.uint8)
    dist.all_reduce(differs, dist.ReduceOp.MAX, group=pg)
    return [n for n, found in zip(dense, differs.tolist(), strict=True) if found]


def share_of(tensors: Mapping[str, Tensor], start: int, share: int = SHARE) -> tuple[str, int]:
    """Returns checksums of some tensors as text, and the position of the tensor after them.

    Args:
        tensors: name -> tensor, as for `share_state`.
        start: position of the first.
        share: divisor of all bytes: the tensors have at least one byte in so many.
    """
    dense = [(n, t) for n, t in tensors.items() if t.layout is torch.strided]
    wanted_bytes = sum(t.nbytes for _, t in dense) / share
    texts: list[str] = []
    taken_bytes = 0
    while dense and taken_bytes < wanted_bytes and len(texts) < len(dense):
        name, tensor = dense[(start + len(texts)) % len(dense)]
        texts.append(f"{name} {checksum(tensor):016x}")
        taken_bytes += tensor.nbytes
    return ", ".join(texts), (start + len(texts)) % max(len(dense), 1)


def _take_from_first(name: str, tensor: Tensor, groups: Groups) -> None:
    on_cpu = tensor.device.type == "cpu"
    pg = groups.control(groups.world) if on_cpu else groups.of(groups.world)
    dense = tensor.detach().contiguous()
    dist.broadcast(dense.reshape(-1).view(torch.uint8), group=pg, group_src=0)
    if dense.data_ptr() == tensor.data_ptr():
        return
    try:
        with torch.no_grad():
            tensor.copy_(dense)
    except RuntimeError as e:
        raise GroupError(
            f"ranks have different values of {name}, and rank 0's cannot be written to it "
            f"({str(e).splitlines()[0]}); expected the same on every rank; seed every rank alike"
        ) from e


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
