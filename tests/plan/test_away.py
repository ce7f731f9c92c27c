"""Saved values that leave the device: the same bits, the predicted peak, and what goes wrong."""

import copy
import errno
import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc.api import plan
from dcpc.codegen.away import host_store as stores
from dcpc.codegen.away.host_store import store_of
from dcpc.errors import PlanError, StoreError
from dcpc.ir import LEAVES
from dcpc.symbolic_profile import Away, find
from examples.allocator import measured_peak_bytes
from models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("one_trace")
INPUTS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
SLACK_BYTES = 64


class Mixed(nn.Module):
    """A tied head, dropout, views, several results of a call, half precision on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(input_ids), 0.1, self.training)
        for layer in self.layers:
            a, b = layer(x).chunk(2, -1)
            top, _ = a.transpose(1, 2).sort(dim=1)
            x = x + top.transpose(1, 2).contiguous() * b.half().float().to(b.dtype)
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), labels.flatten())


def gpt(layers: int = 3) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=96, dim=32, n_layers=layers, n_heads=4))


def buckets(*lengths: int, batch: int | None = None) -> dcpc.Buckets:
    more = {} if batch is None else {"batch": batch}
    return dcpc.Buckets(INPUTS, [{"seq": n, **more} for n in lengths])


def batch_of(samples: int, length: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(length)
    return dict(
        zip(INPUTS, torch.randint(0, 50, (2, samples, length), generator=draw), strict=True)
    )


def compiled_with(model: nn.Module, spec: dcpc.Buckets, **options):
    given = {"memory": 1e9, "backend": "eager", "verify": "off", "tile": "none", **options}
    return dcpc.compile(model, spec, **given)


def gradients(compiled, given) -> list[torch.Tensor]:
    compiled.zero_grad()
    torch.manual_seed(3)
    loss = compiled(**given)
    loss.backward()
    return [loss.detach(), *(p.grad for p in compiled.parameters())]


def store_in(compiled):
    (text,) = {v.traced.away.store for v in compiled.planned.by_bucket.values()}
    return store_of(text)


HOST, DISK = {"host": "64MB"}, {"disk": "/tmp:64MB"}
EVERY = [*itertools.product((Mixed, gpt), ("none", "all"), (HOST, DISK))]
QUICK = ((Mixed, "none", HOST), (gpt, "all", DISK))


@pytest.mark.parametrize(
    ("make", "recompute", "place"),
    [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in EVERY],
)
def test_the_same_bits(make, recompute, place):
    model = make().double()
    spec = buckets(24, 64)
    staying = compiled_with(copy.deepcopy(model), spec, recompute=recompute)
    leaving = compiled_with(model, spec, recompute=recompute, away="all", **place)
    before = store_in(leaving).moved_bytes
    for samples, length in ((1, 64), (3, 24), (1, 9), (2, 50)):
        given = batch_of(samples, length)
        pairs = zip(gradients(leaving, given), gradients(staying, given), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert store_in(leaving).moved_bytes > before


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_the_same_bits_by_inductor(recompute):
    model, spec = gpt(), buckets(64)
    how = {"recompute": recompute, "backend": "inductor"}
    staying = compiled_with(copy.deepcopy(model), spec, **how)
    leaving = compiled_with(model, spec, away="all", host="64MB", **how)
    for samples, length in ((1, 64), (2, 40)):
        given = batch_of(samples, length)
        pairs = zip(gradients(leaving, given), gradients(staying, given), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


# With 6 three copies of a block stand for all.
@pytest.mark.parametrize("layers", [pytest.param(3, marks=pytest.mark.slow), 6])
def test_the_predicted_peak(layers):
    spec = buckets(256, batch=2)
    whole = compiled_with(gpt(layers), spec, recompute="none")
    (unlimited,) = whole.planned.plans.values()
    memory = whole.planned.request.resident_bytes + 0.4 * unlimited.peak_bytes
    compiled = compiled_with(gpt(layers), spec, recompute="none", memory=memory, host="64MB")
    (row,) = compiled.planned.plans.values()
    assert row.away_bytes > 0.3 * unlimited.activation_bytes
    assert "leave the device" in row.reason
    check_peak(compiled, row)


def test_the_predicted_peak_beside_recompute():
    compiled = compiled_with(gpt(), buckets(256, batch=2), recompute="all", away="all", host="64MB")
    (row,) = compiled.planned.plans.values()
    assert row.away_bytes
    assert row.again_bytes
    check_peak(compiled, row)


def check_peak(compiled, row):
    given = batch_of(2, 256)
    gradients(compiled, given)
    compiled.zero_grad()
    gc.collect()
    measured = measured_peak_bytes(lambda: compiled(**given).backward())
    assert abs(measured - row.peak_bytes) <= SLACK_BYTES


def test_long_buckets_let_go_of_what_short_ones_keep():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=96, dim=4096, n_layers=6, n_heads=32)).bfloat16()
    given = {"device": "h200", "backend": "eager", "tile": "none", "memory": "44GB"}
    alone = plan(model, buckets(512, 131_072), **given)
    found = plan(model, buckets(512, 131_072), host="32GB", **given)
    short, long = found.plans.values()
    assert short.away_bytes == 0 == short.menu_step < LEAVES < long.menu_step
    assert long.again_bytes < alone.plans[long.bucket].again_bytes
    for bucket, row in found.plans.items():
        assert row.rank_seconds <= alone.plans[bucket].rank_seconds


def test_no_more_than_the_host_has():
    wanted = {"device": "cpu", "backend": "eager", "tile": "none", "recompute": "none"}
    free = plan(gpt(), buckets(256, batch=1), memory=1e9, **wanted)
    memory = free.request.resident_bytes + 0.3 * next(iter(free.plans.values())).peak_bytes
    found = plan(gpt(), buckets(256, batch=1), memory=memory, host="64MB", **wanted)
    (row,) = found.plans.values()
    with pytest.raises(PlanError, match="too little"):
        plan(
            gpt(), buckets(256, batch=1), memory=memory, host=max(2, row.away_bytes // 2), **wanted
        )
    # Two ranks of one host share its memory.
    with pytest.raises(PlanError, match="too little"):
        plan(
            gpt(),
            buckets(256, batch=1),
            memory=memory,
            host=row.away_bytes,
            world=2,
            sp=1,
            **wanted,
        )


def test_slots_come_back():
    compiled = compiled_with(gpt(), buckets(64), away="all", host="64MB")
    store, given = store_in(compiled), batch_of(2, 64)
    gradients(compiled, given)
    (place,) = store.places
    held = place.taken_bytes
    for _ in range(3):
        compiled(**given)  # no backward
        gradients(compiled, given)
    compiled.zero_grad()
    loss = compiled(**given)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in compiled.parameters()]
    compiled.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(once, compiled.parameters(), strict=True))
    del loss
    gc.collect()
    assert place.taken_bytes <= 2 * held
    assert len(place._free) == len({id(s) for s in place._free}) >= 4
    moved = store.moved_bytes
    with torch.no_grad():
        compiled(**given)
    assert store.moved_bytes == moved


def fails(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_named_and_training_goes_on(monkeypatch, tmp_path):
    compiled = compiled_with(gpt(), buckets(64), away="all", disk=f"{tmp_path}:64MB")
    given = batch_of(1, 64)
    expected = gradients(compiled, given)
    compiled.zero_grad()
    with monkeypatch.context() as patched:
        patched.setattr(stores.os, "pwrite", fails)
        with pytest.raises(StoreError, match="No space left on device"):
            compiled(**given)
    with monkeypatch.context() as patched:
        loss = compiled(**given)
        patched.setattr(stores.os, "preadv", fails)
        with pytest.raises(StoreError, match="was to read"):
            loss.backward()
    assert all(p.grad is None for p in compiled.parameters())
    again = gradients(compiled, given)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_a_folder_that_is_not_there(tmp_path):
    compiled = compiled_with(gpt(), buckets(64), away="all", disk=f"{tmp_path}/none:64MB")
    with pytest.raises(StoreError, match="No such file or directory"):
        compiled(**batch_of(1, 64))


GPU = find("h100")
LINK = GPU.host_bytes_per_s


def test_a_copy_is_waited_for_where_the_link_is_busy():
    """Two values of 4 ms each: the second waits for the first, and its end comes too early."""
    size = 4e-3 * LINK
    forward = [(0.0, "start", size), (1e-3, "start", size), (2e-3, "end", 0.0), (6e-3, "end", 0.0)]
    backward = [(0.0, "start", size), (5e-3, "end", 0.0), (0.0, "start", size), (1e-3, "end", 0.0)]
    out_s, back_s = Away("", 10**12, 0, 1e9).waits(forward, backward, GPU)
    assert out_s == pytest.approx(1e-3)
    assert back_s == pytest.approx(3e-3)


def test_what_the_host_has_no_room_for_takes_the_disks_time():
    size = 1e6
    forward = [(0.0, "start", size), (0.0, "start", size), (0.0, "end", 0.0), (0.0, "end", 0.0)]
    backward = forward
    out_s, back_s = Away("", int(size), 10**9, 1e9).waits(forward, backward, GPU)
    assert out_s == pytest.approx(1e-3 + size / LINK)
    # The first to come back waits until the last write has ended.
    assert back_s == pytest.approx(1e-3 + size / LINK)


@pytest.mark.parametrize(
    "options", [{"host": "much"}, {"host": 0}, {"disk": "/tmp"}, {"disk": "/tmp:many"}, {"disk": 3}]
)
def test_impossible_places_are_refused(options):
    with pytest.raises(PlanError, match=f"got {next(iter(options))}="):
        plan(gpt(1), buckets(16), **options)
