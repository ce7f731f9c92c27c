"""Several ranks on one card, and NCCL: what one GPU can show of them.

    sp2     two gloo ranks on one device take sequences together: `train_step` at degree 2 against
            the plain model in float64
    nccl    one rank: collectives give back what they were given, and the bytes that each
            communicator takes outside of torch's allocator

Not to be seen on one GPU: NCCL between ranks, and rings (gloo sends no CUDA tensors).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dcpc
import dcpc.codegen.collectives.rows  # registers its ops
from benchmarks.gpu_checks.exact import AMPLE, Result, judged
from benchmarks.gpu_checks.rows import Row, Setting, not_run, tried
from benchmarks.gpu_checks.subjects import GPT_COMPARED, TEXT
from dcpc.codegen import bind_group
from dcpc.codegen.collectives.collectives import DimSplit
from examples.launch import launch
from models.gpt import GPT

LENGTHS = (257, 40, 300, 129)
COMMUNICATORS = 8


def sp2(setting: Setting) -> Iterator[Row]:
    """Yields a row for each dtype."""
    try:
        yield from launch(_on_rank, 2, setting)[0]
    except SystemExit as e:  # the launcher printed the rank's traceback
        raise RuntimeError("a rank failed; its traceback is in the step's log") from e


def _on_rank(setting: Setting) -> list[Row]:
    os.environ["LOCAL_RANK"] = "0"  # both ranks take the one card
    setting.choose_kernels()
    rows: list[Row] = []
    for dtype in (torch.float64, *setting.dtypes):
        check = f"train_step, sp 2 over gloo, {str(dtype).removeprefix('torch.')}"
        rows += tried(check, partial(_stepped, setting, dtype, check))
    return rows


def _stepped(setting: Setting, dtype: torch.dtype, check: str) -> Iterator[Row]:
    torch.manual_seed(0)
    with setting.device:
        model = GPT(GPT_COMPARED).to(dtype)
    data = [dict.fromkeys(TEXT, torch.randint(258, (n,))) for n in LENGTHS]
    plain = _whole(model, data, setting.device)
    wanted = _whole(copy.deepcopy(model).double(), data, setting.device)
    buckets = dcpc.Buckets(dict(TEXT), [{"seq": 129}, {"seq": 257}, {"seq": 300}])
    compiled = dcpc.compile(
        model, buckets, sp=2, memory=AMPLE, backend="eager", verify="off",
        device="auto" if setting.device.type == "cuda" else "cpu",
    )  # fmt: skip
    pad = {"input_ids": 0, "labels": -100}
    loader = dcpc.DataLoader(data, compiled, samples_per_step=len(data), pad=pad, weight="labels")
    loss = compiled.train_step(next(iter(loader))).loss
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    yield judged(setting, check, dtype, (loss.to(setting.device), gradients), wanted, plain)


def _whole(model: nn.Module, data: list[dict[str, Tensor]], device: torch.device) -> Result:
    """Returns the mean loss over all labels, and its gradients, sample by sample."""
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for sample in data:
        share = len(sample["labels"]) / sum(LENGTHS)
        loss = share * model(**{n: x.to(device)[None] for n, x in sample.items()})
        loss.backward()
        total += loss.detach()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return total, gradients


def nccl(setting: Setting) -> Iterator[Row]:
    """Yields the bytes of communicators, and a row for the collectives of each dtype."""
    backend = "cpu:gloo,cuda:nccl" if setting.card else "gloo"
    if not setting.card:
        yield not_run("NCCL: communicators and collectives; the same ran over gloo")
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=40)
    )
    groups = [dist.new_group([0]) for _ in range(COMMUNICATORS)]
    for i, group in enumerate(groups):
        bind_group(f"g{i}", group)
    if setting.card:
        yield from tried("bytes of communicators", partial(_bytes, setting, groups))
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        check = f"collectives of one rank, {str(dtype).removeprefix('torch.')}"
        yield from tried(check, partial(_collectives, setting, dtype, check))
    dist.destroy_process_group()


def _bytes(setting: Setting, groups: list[Any]) -> Iterator[Row]:
    """Yields what a first collective of each group takes of the card's memory."""
    x = torch.ones(8, 4, device=setting.device)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for i, group in enumerate(groups):
        dist.all_reduce(x, group=group)
        torch.cuda.synchronize()
        taken = free - torch.cuda.mem_get_info()[0]
        yield setting.measured(f"{i + 1} communicators of NCCL", total_bytes=taken)


def _collectives(setting: Setting, dtype: torch.dtype, check: str) -> Iterator[Row]:
    drawn = 3 * torch.randn(6, 4, device=setting.device)
    x = drawn > 0 if dtype == torch.bool else drawn.to(dtype)
    rows, columns = DimSplit(0, 6, 6, 0, False), DimSplit(1, 4, 4, 0, False)
    ops = torch.ops.dcpc
    found = {
        "all_gather": ops.all_gather(x, *rows, "g0"),
        "all_to_all": ops.all_to_all(x, *rows, *columns, "g0"),
    }
    if dtype != torch.bool:
        found |= {
            "reduce_scatter": ops.reduce_scatter(x, *rows, "g0"),
            "all_reduce": ops.all_reduce(x, "g0"), "gather_rows": ops.gather_rows([x], 1, "g0")[0],
            "sum_rows": ops.sum_rows([x], 1, "g0")[0],
        }  # fmt: skip
    for name, got in found.items():
        assert got.device == x.device, f"{name}: got {got.device}, expected {x.device}"
    wrong = [name for name, got in found.items() if setting.numbers and not torch.equal(got, x)]
    yield setting.judged(check, not wrong, wrong=wrong, collectives=list(found))
