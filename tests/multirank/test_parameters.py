"""Parameters that ranks share out, against the plain model: rows, the same memory, checkpoints."""

import gc
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dcpc
from dcpc.errors import DispatchError, GroupError, PlanError
from dcpc.plan.planning import Planned
from dcpc.runtime.parameters.rows import RowLayout, SharedRows
from tests.cases.launch import run_prepared, run_ranks
from tests.cases.ready import Ready, traced_once

DIM, VOCABULARY = 6, 10


class Odd(nn.Module):
    """Parameters of every kind: tied, frozen, a scalar, one row, strided, unused, empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.up = nn.Linear(DIM, 7)
        self.down = nn.Parameter(torch.randn(7, DIM).t().contiguous().t())
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, DIM))
        self.unused = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("shift", torch.randn(DIM))
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.frozen(self.embed(ids)) * self.gain + self.row + self.shift
        x = x + F.gelu(self.up(x)) @ self.down
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Samples:
    """Twelve of one to eight tokens."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(
            VOCABULARY, (1 + i * 5 % 8,), generator=torch.Generator().manual_seed(i)
        )
        return {"ids": ids, "labels": (ids + 1) % VOCABULARY}


BUCKETS = dcpc.Buckets(
    dict.fromkeys(("ids", "labels"), "int64[batch, seq]"), sizes=[{"seq": 3}, {"seq": 8}]
)
MODES = ("step", "pull", "rounds")


def ready_in(modes: Sequence[str], world: int) -> dict[str, Ready]:
    """A model to be compiled in each of some modes."""
    warnings.simplefilter("ignore")
    options = {"backend": "eager", "verify": "off"}
    return {mode: Ready(Odd(), BUCKETS, world, parameters=mode, **options) for mode in modes}


def compiled_odd(
    mode: str, planned: str = "auto", model: nn.Module | None = None, **options: Any
) -> tuple[dcpc.CompiledModel, dcpc.DataLoader]:
    warnings.simplefilter("ignore")
    options = {"backend": "eager", "verify": "off", "parameters": mode, **options}
    return loaded_odd(dcpc.compile(model or Odd(), BUCKETS, **options), planned)


def loaded_odd(
    compiled: dcpc.CompiledModel, planned: str = "auto"
) -> tuple[dcpc.CompiledModel, dcpc.DataLoader]:
    compiled.comm_bucket_bytes = 500  # several, and parameters larger than one
    pad = {"ids": 0, "labels": -100}
    loader = dcpc.DataLoader(
        Samples(), compiled, tokens_per_step=20, pad=pad, weight="labels", seed=3, mode=planned
    )
    return compiled, loader


def plain_step(model: nn.Module, step: Any) -> float:
    """Adds the gradients of a step, a sample at a time; returns its loss."""
    every = [Samples()[i] for i in sorted({i for mb in step.plan.micro_batches
                                           for i in mb.sample_ids})]  # fmt: skip
    total = sum(len(x["ids"]) for x in every)
    loss = 0.0
    for x in every:
        part = model(x["ids"][None], x["labels"][None]) * (len(x["ids"]) / total)
        part.backward()
        loss += float(part)
    return loss


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def far(got: Any, expected: Tensor) -> float:
    difference = (whole(got).detach() - expected.detach()).abs()
    return float(difference.max() / expected.abs().max()) if expected.numel() else 0.0


def trained(rank: int, made: dict[str, Ready]) -> dict[str, dict[str, Any]]:
    return {mode: trained_in(ready) for mode, ready in made.items()}


def trained_in(ready: Ready) -> dict[str, Any]:
    """Two epochs with AdamW; gradients of two steps are added; one parameter is frozen half way."""
    warnings.simplefilter("ignore")
    compiled, loader = loaded_odd(ready.compile())
    alone = Odd()
    made = {"lr": 1e-2, "eps": 1e-6}
    optimizer = torch.optim.AdamW(compiled.parameters(), **made)
    other = torch.optim.AdamW(alone.parameters(), **made)
    errors: dict[str, float] = {"loss": 0.0}
    for n, step in enumerate([*loader, *loader]):
        if n == 4:
            for model in (compiled.model, alone):
                model.up.requires_grad_(False)
        errors["loss"] = max(errors["loss"], abs(float(compiled.train_step(step).loss)
                                                 - plain_step(alone, step)))  # fmt: skip
        pairs = zip(compiled.named_parameters(), alone.parameters(), strict=True)
        for (name, p), q in pairs:
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                errors[f"gradient of {name}"] = far(p.grad, q.grad)
        if n % 2:
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
            for name, q in alone.named_parameters():
                errors[name] = far(dict(compiled.named_parameters())[name], q)
                own = compiled.model.get_parameter(name)
                if not own.is_meta:
                    errors[f"model's {name}"] = far(own, q)
        with torch.no_grad():
            x = {"ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
            errors["call"] = abs(float(compiled(**x)) - float(alone(**x)))
    kept = sum(
        x.numel() * x.itemsize
        for state in optimizer.state.values()
        for x in (getattr(t, "to_local", lambda t=t: t)() for t in state.values())
        if x.ndim
    )
    return {
        "errors": errors,
        "kept": kept,
        "grads": [p.grad is None for p in compiled.model.parameters()],
    }


@pytest.mark.multirank
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shared_out_parameters_train_as_the_plain_model(world):
    every = run_prepared(ready_in, trained, world, MODES, world, timeout_s=120)
    sizes = [p.numel() * 8 for p in Odd().parameters() if p.requires_grad]
    used = sum(sizes) - 3 * 8  # a parameter that no loss uses has no state
    spare = 2 * 8 * DIM * len(sizes)  # a row each, twice
    for mode in MODES:
        ranks = [of_modes[mode] for of_modes in every]
        for found in ranks:
            worst = max(found["errors"], key=found["errors"].__getitem__)
            assert found["errors"][worst] < 1e-11, (mode, worst)
            assert all(found["grads"]), mode  # no rank keeps a whole gradient
        assert max(found["kept"] for found in ranks) <= 2 * used / world + spare, mode


def used_alone(compiled: dcpc.CompiledModel) -> torch.optim.Optimizer:
    """AdamW of what has a gradient: torch saves no state of the rest, and asks for it."""
    params = [p for n, p in compiled.named_parameters() if n not in ("unused", "empty")]
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-6)


def saved(rank: int, mode: str, folder: str) -> list[float]:
    """Trains an epoch, saves, and returns the losses of the next one."""
    compiled, loader = compiled_odd(mode)
    optimizer = used_alone(compiled)
    for step in loader:
        compiled.train_step(step)
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": get_model_state_dict(compiled),
             "optimizer": get_optimizer_state_dict(compiled, optimizer)}  # fmt: skip
    dcp.save(state, checkpoint_id=folder)
    return epoch(compiled, loader, optimizer)


def loaded(rank: int, mode: str, folder: str) -> list[float]:
    """Loads what `saved` has saved, and returns the losses of the next epoch."""
    compiled, loader = compiled_odd(mode)
    with torch.no_grad():
        for p in compiled.parameters():
            p.add_(1.0)
    optimizer = used_alone(compiled)
    list(loader)  # the epoch that was trained
    state = {"model": get_model_state_dict(compiled),
             "optimizer": get_optimizer_state_dict(compiled, optimizer)}  # fmt: skip
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(compiled, state["model"])
    set_optimizer_state_dict(compiled, optimizer, state["optimizer"])
    return epoch(compiled, loader, optimizer)


def epoch(compiled: Any, loader: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in loader:
        losses.append(float(compiled.train_step(step).loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, "step"), (2, "pull")), pytest.param((2, "rounds"), (2, "whole"), marks=pytest.mark.slow),
     pytest.param((4, "step"), (3, "rounds"), marks=pytest.mark.slow),
     pytest.param((3, "pull"), (2, "step"), marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_checkpoint_goes_on_in_another_mode_and_world(before, after, tmp_path):
    world, mode = before
    expected = run_ranks(saved, world, mode, str(tmp_path / "c"), timeout_s=120)[0]
    world, mode = after
    found = run_ranks(loaded, world, mode, str(tmp_path / "c"), timeout_s=120)[0]
    assert found == pytest.approx(expected, rel=1e-10)
    assert len(found) > 1


def refused(rank: int, made: dict[str, Ready]) -> dict[str, list[str]]:
    return {mode: refused_in(mode, ready) for mode, ready in made.items()}


def refused_in(mode: str, ready: Ready) -> list[str]:
    warnings.simplefilter("ignore")
    compiled, loader = loaded_odd(ready.compile())
    x = {"ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    (step, *_) = loader
    texts = []

    def fails(kind: type[Exception], run: Any) -> None:
        with pytest.raises(kind) as told:
            run()
        texts.append(str(told.value))

    fails(DispatchError, lambda: compiled(**x))
    fails(DispatchError, compiled.reduce_gradients)
    own = torch.optim.SGD(compiled.model.parameters(), lr=0.1)
    compiled.train_step(step)
    fails(DispatchError, own.step)
    handle = next(compiled.parameters()).register_hook(lambda g: g)
    fails(DispatchError, lambda: compiled.train_step(step))
    handle.remove()
    compiled.train_step(step)
    with torch.no_grad():
        next(compiled.parameters()).mul_(0.5)
    compiled.train_step(step)
    if mode == "pull":
        saved = compiled.state_dict()
        with torch.no_grad():
            compiled.model.row.mul_(0.5)
        fails(DispatchError, lambda: compiled.train_step(step))
        compiled.load_state_dict(saved)
        compiled.train_step(step)
    # Compiled again it is the same store; in another mode it is none.
    again = ready.compile()
    assert all(p is q for p, q in zip(again.parameters(), compiled.parameters(), strict=True))
    fails(DispatchError, lambda: compiled_odd("whole", model=compiled.model))
    compiled.model.row = nn.Parameter(compiled.model.row.detach().clone())
    fails(DispatchError, lambda: compiled.train_step(step))
    return texts


@pytest.mark.multirank
def test_what_would_be_wrong_is_refused():
    for found in run_prepared(ready_in, refused, 2, MODES, 2, timeout_s=100):
        for mode, texts in found.items():
            own = ["1 whole parameters were written to"] * (mode == "pull")
            wanted = ["expected train_step", "expected train_step",
                      "make the optimizer of compiled.param", "got a hook", *own,
                      "delete what was compiled first", "was replaced"]  # fmt: skip
            assert len(texts) == len(wanted)
            assert all(w in text for text, w in zip(texts, wanted, strict=True)), mode


class Refusing(TorchDispatchMode):
    """Takes no op."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} in a trace")


def forgets(rank: int) -> list[list[float]]:
    """What was compiled is deleted: the parameters keep their values, and are each rank's own."""
    compiled, _ = compiled_odd("pull")
    model = compiled.model
    before = [p.detach().clone() for p in model.parameters()]
    del compiled, _
    with Refusing():  # as of a trace on its way
        gc.collect()
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(rank)
    dist.barrier()
    values = {float(x) for p in model.parameters() for x in p.detach().flatten()}
    compiled_odd("whole", model=model)
    return [[float(same)], sorted(values)]


@pytest.mark.multirank
def test_parameters_are_a_ranks_own_again_once_nobody_shares_them_out():
    assert run_ranks(forgets, 2, timeout_s=60) == [[[1.0], [0.0]], [[1.0], [1.0]]]


def dies(rank: int, mode: str) -> str:
    """Rank 1 dies in backward of its second step; the others say so."""
    compiled, loader = compiled_odd(mode, "inter", sp=1)
    first = next(iter(loader))  # of the few that both ranks have samples of
    compiled.train_step(first)
    if rank == 1 and mode == "rounds":
        mock.patch(
            "torch.distributed.all_to_all_single", side_effect=lambda *_, **__: os._exit(3)
        ).start()
    elif rank == 1:
        compiled.model.gain.register_hook(lambda g: os._exit(3))
    with pytest.raises(GroupError) as told:
        compiled.train_step(first)
    return str(told.value)


@pytest.mark.multirank
@pytest.mark.parametrize("mode", ["step", "pull", "rounds"])
def test_a_rank_that_dies_in_a_step_is_an_error_and_leaves_no_file(mode):
    before = set(Path("/dev/shm").iterdir())
    found = run_ranks(dies, 2, mode, timeout_s=100, may_die={1})[0]
    assert found.startswith("rank 1 is lost: got the end of its process (killed, or a crash)")
    assert not [p for p in set(Path("/dev/shm").iterdir()) - before if "dcpc" in p.name]


def test_modes_that_cannot_be():
    with pytest.raises(PlanError, match="expected one of whole, step, pull, rounds, auto"):
        dcpc.api.plan(Odd(), BUCKETS, world=2, parameters="zero")
    with pytest.raises(PlanError, match="expected a CPU"):
        dcpc.api.plan(Odd(), BUCKETS, world=2, device="h200", parameters="pull")


def test_auto_takes_the_first_mode_that_fits():
    inputs = dict.fromkeys(("ids", "labels"), "int64[batch, seq]")
    buckets = dcpc.Buckets(inputs, sizes=[{"seq": 8, "batch": 1}])
    with torch.device("meta"):
        wide = Odd()
        wide.head.weight = wide.embed.weight = nn.Parameter(torch.empty(10**6, DIM).double())

    def planned(mode: str, memory: float) -> Planned:
        return dcpc.api.plan(wide, buckets, world=4, memory=memory, backend="eager", sp=1,
                             device="cpu", parameters=mode)  # fmt: skip

    (bucket,) = buckets
    modes = ("whole", "step", "pull")
    with traced_once():
        needed = [planned(m, 1e12).tables[bucket][0].needed_bytes for m in modes]
        assert needed == sorted(needed, reverse=True)
        for memory, mode in zip(needed, modes, strict=True):
            assert planned("auto", memory).request.parameters == mode
        with pytest.raises(PlanError, match="too little"):
            planned("auto", needed[-1] / 2)


@pytest.mark.parametrize("shape", [(), (0, 4), (1, 3), (5,), (6, 2), (7, 2, 3)])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 9])
def test_rows_are_those_of_chunk_and_come_back(shape, world):
    x = torch.randn(shape)
    rows = SharedRows(x.shape, world)
    parts = [rows.of(rank, x) for rank in range(world)]
    if shape:
        chunks = list(x.chunk(world)) if shape[0] else []
        chunks += [x[:0]] * (world - len(chunks))
        assert all(torch.equal(a, b) for a, b in zip(parts, chunks, strict=True))
    layout = RowLayout.of([x, x.mT if x.dim() == 2 else x], world)
    flat = torch.full((world * layout.part_numel,), float("nan"))
    pieces = layout.split(flat)
    layout.splits[0].write(pieces[0], x)
    for rank in range(world):
        own = layout.own(flat.view(world, -1)[rank], rank)[0]
        assert torch.equal(own, parts[rank])
    back = torch.zeros_like(x)
    layout.splits[0].read(pieces[0], back)
    assert torch.equal(back, x)
    assert not dist.is_initialized()
