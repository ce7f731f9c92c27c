"""A module that another system has wrapped is refused with what to pass instead."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import dcpc
from tests.cases.launch import run_ranks

BUCKETS = dcpc.Buckets({"x": "float64[batch, n, 3]"}, [{"n": 2}])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 3).double()

    def forward(self, x):
        return self.inner(x).square().mean()


def said(model):
    try:
        dcpc.compile(model, BUCKETS, backend="eager")
    except dcpc.DcpcError as e:
        return f"{type(e).__name__}: {e}"
    return "compiled"


def with_inner(wrap):
    net = Net()
    net.inner = wrap(net.inner)
    return net


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.DataParallel(Net()), r"got a DataParallel; .*pass model.module$"),
        (lambda: torch.compile(Net()), r"got a OptimizedModule; .*pass model._orig_mod$"),
        (lambda: torch.jit.script(nn.Linear(3, 3)), r"got a ScriptModule; .*that was scripted"),
        (
            lambda: with_inner(nn.DataParallel),
            r"model.inner: got a DataParallel; .*pass model.inner.module in its place$",
        ),
    ],
    ids=["data parallel", "compiled", "scripted", "a part"],
)
def test_wrapper_is_refused(make, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make()
    with pytest.raises(dcpc.TraceError, match=message):
        dcpc.compile(model, BUCKETS, backend="eager")


def wrapped_of_ranks(rank):
    warnings.simplefilter("ignore")
    mesh = dist.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    return [
        said(nn.parallel.DistributedDataParallel(Net())),
        said(FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))),
        said(fully_shard(Net(), mesh=mesh)),
    ]


def test_wrapper_over_ranks_is_refused():
    for ddp, fsdp, fsdp2 in run_ranks(wrapped_of_ranks, 2):
        assert "got a DistributedDataParallel" in ddp
        assert ddp.endswith("pass model.module")
        assert "got a FullyShardedDataParallel" in fsdp
        assert "before it was wrapped" in fsdp
        assert "got a FSDPModule" in fsdp2
        assert "before fully_shard" in fsdp2


@pytest.mark.parametrize("wrap", [torch.compile, lambda m: m.compile() or m])
def test_part_that_torch_compiles_is_captured_itself(wrap):
    net, plain = with_inner(wrap), Net()
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    compiled = dcpc.compile(net, BUCKETS, backend="eager", verify="off")
    compiled(x=x).backward()
    plain(x).backward()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    assert max(float((p.grad - q.grad).abs().max()) for p, q in pairs) < 1e-12
