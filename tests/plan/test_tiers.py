"""Parameters in the host's memory or on a disk: the same bits, in the memory that was promised."""

import gc
import itertools
import random
from functools import partial

import pytest
import torch

import dcpc
from dcpc.api import plan
from dcpc.codegen import fetched, kept_after, store_of
from dcpc.compiled.dispatch import Dispatch
from dcpc.errors import PlanError, StoreError
from examples.allocator import measured_peak_bytes
from models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("one_trace")
INPUTS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
SLACK_BYTES = 64
LENGTHS = (4, 48)
HOST = {"host": "64MB", "away": "parameters"}
DISK = {"disk": "/tmp:64MB", "away": "parameters"}


def gpt(layers=3):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=96, dim=32, n_layers=layers, n_heads=4))


def compiled(layers=3, dtype=torch.float64, lengths=LENGTHS, **options):
    given = {"memory": 1e8, "backend": "eager", "verify": "off", "tile": "none", **options}
    spec = dcpc.Buckets(INPUTS, [{"seq": n, "batch": 1} for n in lengths])
    return dcpc.compile(gpt(layers).to(dtype), spec, **given)


def steps_of(model):
    """Three steps of four samples, one of them as long as the longest bucket."""
    longest = max(b.sizes["seq"] for b in model.buckets)
    draw = torch.Generator().manual_seed(0)
    lengths = [1 + i * 7 % 47 if i % 4 else longest for i in range(12)]
    ids = [torch.randint(96, (n,), generator=draw) for n in lengths]
    loader = dcpc.DataLoader(
        [dict.fromkeys(INPUTS, x) for x in ids], model, samples_per_step=4, weight="labels",
        pad={"input_ids": 0, "labels": -100}, lookahead=0, shuffle=False,
    )  # fmt: skip
    return [*loader]


def trained(make, *, keeps=False, closure=False, **options):
    """Losses and parameters after steps, each of the gradients of one step or (keeps) of all."""
    model = compiled(**options)
    optimizer, losses = make(model.parameters()), []
    for step in steps_of(model):
        losses.append(model.train_step(step, clip=0.5).loss)
        optimizer.step(*([lambda: None] if closure else []))
        assert all(p.grad is not None for p in model.parameters())
        if not keeps:
            optimizer.zero_grad()
    return model, optimizer, [torch.tensor(losses), *(p.detach() for p in model.parameters())]


SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Own(torch.optim.Optimizer):
    """A user's, with a state for each parameter."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            p -= 0.01 * mean.lerp_(p.grad, 0.1)


@pytest.mark.parametrize(
    ("make", "how", "place"),
    [
        (ADAMW, {}, HOST),
        pytest.param(ADAMW, {"keeps": True, "recompute": "all"}, DISK, marks=pytest.mark.slow),
        pytest.param(SGD, {"closure": True}, HOST, marks=pytest.mark.slow),
        (Own, {}, DISK),
    ],
)
def test_bits_are_those_of_whole_parameters(make, how, place):
    *_, expected = trained(make, **how)
    model, optimizer, got = trained(make, **how, **place)
    assert all(map(torch.equal, expected, got))
    lies = store_of(model.planned.request.held_away).has
    for p in model.parameters():
        state = [t for t in optimizer.state[p].values() if t.dim()] if p in optimizer.state else []
        assert all(map(lies, [p, *state, *([] if p.grad is None else [p.grad])]))
    assert all(p.is_meta for p in model.model.parameters())


def test_a_state_alone_lies_away():
    _, _, expected = trained(ADAMW)
    model, optimizer, got = trained(ADAMW, host="64MB", away="optimizer")
    assert all(map(torch.equal, expected, got))
    lies = store_of(model.planned.request.state_away).has
    state = [t for p in model.parameters() for t in optimizer.state[p].values() if t.dim()]
    assert state
    assert all(map(lies, state))
    assert not any(map(lies, model.parameters()))
    assert model.planned.request.resident_bytes == 2 * sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "all"])
def test_peak_is_the_predicted_one(monkeypatch, recompute):
    monkeypatch.setattr(Dispatch, "begin_step", lambda *_: None)  # none stays
    model = compiled(6, torch.float32, recompute=recompute, optimizer_bytes=0, **HOST)
    (long,) = (p for b, p in model.planned.plans.items() if b.sizes["seq"] == max(LENGTHS))
    samples = [{n: torch.arange(max(LENGTHS)) for n in INPUTS}] * 2
    one, two = dcpc.DataLoader(samples, model, samples_per_step=1, weight="labels", lookahead=0)
    model.train_step(one)
    model.zero_grad()
    gc.collect()
    assert abs(measured_peak_bytes(lambda: model.train_step(two)) - long.peak_bytes) <= SLACK_BYTES


def test_units_stay_where_there_is_room_and_no_further():
    given = {"layers": 6, "dtype": torch.float32, "lengths": (48, 200), "recompute": "none"}
    roomy = compiled(**given, **HOST)
    row = max(p.peak_bytes for p in roomy.planned.plans.values())
    assert row > roomy.planned.request.step_bytes
    tight = compiled(**given, memory=row + 80_000, **HOST)
    share = []
    for model in (roomy, tight):
        for step in steps_of(model):
            fetched.read_bytes = fetched.copied_bytes = 0
            peak = measured_peak_bytes(partial(model.train_step, step))
            model.zero_grad()
            assert peak <= model.planned.memory_bytes + SLACK_BYTES
        share.append(fetched.copied_bytes / fetched.read_bytes)
    assert 1 / 4 == share[0] < share[1] < 1  # of four micro-batches the first copies


def saved(uses, stays, room):
    """Copies that a choice saves of units of one size; 0 where it has no room."""
    ends = {i: uses.index(u, i + 1) for i, u in enumerate(uses) if u in uses[i + 1 :]}
    full = any(sum(i < t < ends[i] for i in ends if stays[i]) > r for t, r in enumerate(room))
    return 0 if full else sum(map(bool, stays))


def test_no_choice_copies_less():
    draw = random.Random(1)
    for _ in range(30):
        uses = [draw.randrange(3) for _ in range(9)]
        room = [draw.randint(0, 3) for _ in uses]
        later = [u in uses[i + 1 :] for i, u in enumerate(uses)]
        every = itertools.product(*((False, True) if more else (False,) for more in later))
        found = kept_after(uses, room, [1] * 3)
        assert saved(uses, found, room) == sum(found) == max(saved(uses, s, room) for s in every)


def test_parameters_leave_where_nothing_else_fits():
    model, spec = gpt().double(), dcpc.Buckets(INPUTS, [{"seq": 48, "batch": 1}])
    given = {"backend": "eager", "device": "cpu", "parameters": "auto"}
    whole = plan(model, spec, memory=1e9, host="64MB", **given)
    assert whole.request.parameters == "whole"
    memory = 1.2 * next(iter(whole.plans.values())).peak_bytes
    found = plan(model, spec, memory=memory, host="64MB", **given)
    assert found.request.held_away
    assert "are away, in host= and disk=" in found.report()
    with pytest.raises(PlanError):
        plan(model, spec, memory=memory, **given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"away": "parameters"}, "may fill 0 B.*raise host="),
        ({"away": "optimizer", "host": "1GB", "device": "h200", "world": 2}, "lies where its"),
        ({"away": ("parameters", "none"), "host": "1GB"}, "got away="),
        ({**HOST, "parameters": "step"}, "none gathers"),
        ({**HOST, "host": "10kB"}, "raise host= or disk="),
        ({**HOST, "block": 2}, "leave it out"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, said):
    spec = dcpc.Buckets(INPUTS, [{"seq": 4}])
    with pytest.raises(PlanError, match=said):
        plan(gpt(), spec, **options)


def test_a_full_disk_is_an_error_by_name(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(StoreError, match="disk='/tmp'"):
        compiled(disk="/tmp:65MB", away="parameters")
