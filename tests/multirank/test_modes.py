"""Real steps of every mode: gradients of one device, equal loss curves, a planner that dies."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import dcpc
from dcpc.errors import GroupError, PlanError
from dcpc.ir import PlanRow
from dcpc.runtime.data import cuts
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.step.step import train_step
from models.gpt import GPT, GPTConfig
from tests.cases.exactness import SPLITTING, gradient_error
from tests.cases.fakes import LONG, Ragged, Tiny, compiled_for
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank

PAD = {"input_ids": 0, "labels": -100}
MODES = ("intra", "inter", "auto")
LENGTHS = [4, 2, 16, 7, 5, 3, 16, 12, 4, 4, 3, 7, 9, 6, 6, 7, 1, 2, 15, 8, 4]
SETTINGS = {4: (1, 3), 7: (2, 2), 16: (2, 1)}
# seq -> rows: 16 is fastest on 3 ranks, which are no aligned block of 4.
ROWS = {
    4: [PlanRow(1, 1, 0, 4.0), PlanRow(1, 3, 0, 9.0)],
    7: [PlanRow(1, 2, 0, 15.0), PlanRow(2, 1, 1, 4.0)],
    16: [PlanRow(1, 1, 2, 60.0), PlanRow(2, 1, 0, 50.0), PlanRow(3, 1, 0, 12.0)],
}


def tiny_errors(rank: int, world: int) -> dict[str, float]:
    """Largest error of loss and gradients over an epoch of each mode."""
    groups = Groups.default(timeout_s=60, device="cpu")
    data, found, ranges = Ragged(LENGTHS), {}, set()
    for name in (*MODES, "padded"):
        mode = "auto" if name == "padded" else name
        compiled = compiled_for(groups, SETTINGS)
        compiled.other_tables = {b: ROWS[b["seq"]] for b in compiled.buckets}
        loader = DataLoader(
            data, compiled, tokens_per_step=60, pad=PAD, weight="labels", mode=mode, window=7,
            pad_to_longer=name == "padded",
        )  # fmt: skip
        model, seen, worst = Tiny(), [], 0.0
        for step in loader:
            model.zero_grad()
            result = train_step(model.on(groups), step)
            alone, total, count = Tiny(), torch.zeros((), dtype=torch.float64), 0
            for mb in step.plan.micro_batches:
                seen += mb.sample_ids
                for i in mb.sample_ids:
                    x = {k: v[None] for k, v in data[i].items()}
                    total = total + alone.total(**x, long=mb.bucket["seq"] > LONG)
                    count += int((x["labels"] != -100).sum())
            (total / count).backward()
            worst = max(worst, abs(float(result.loss) / float(total.detach() / count) - 1))
            gradients = {n: p.grad for n, p in alone.named_parameters()}
            worst = max(worst, gradient_error(model, gradients))
            if mode == "intra":
                assert len({mb.bucket for mb in step.plan.micro_batches}) == 1
            if mode == "auto":
                ranges |= set(step.plan.ranges)
        assert sorted(seen) == list(range(len(LENGTHS))), name
        found[name] = worst
    assert any(degree == 3 for _, degree in ranges) == (world > 2), ranges
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_gradient_of_every_mode_equals_one_device(world):
    for found in run_ranks(tiny_errors, world, world, timeout_s=200):
        assert found.keys() == {*MODES, "padded"}
        assert max(found.values()) < 1e-12


class Runs(torch.utils.data.Dataset):
    """Runs of samples of one length, as long as a step: batches are alike in every mode."""

    def __init__(self, steps: int) -> None:
        # The last sample of a run is shorter, and padded.
        self.lengths = [n - 2 * (k == 64 // n - 1) for s in range(steps)
                        for n in [(8, 32, 16)[s % 3]] for k in range(64 // n)]  # fmt: skip

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        ids, labels = torch.randint(32, (2, self.lengths[i]), generator=generator)
        labels[torch.rand(self.lengths[i], generator=generator) < 0.3] = -100
        labels[-1] = 1
        return {"input_ids": ids, "labels": labels}


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=32, dim=16, n_layers=1, n_heads=2, tie_embeddings=True))


def compiled_gpt(model: GPT) -> dcpc.CompiledModel:
    buckets = dcpc.Buckets(
        inputs=dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]"),
        sizes=[{"seq": 8}, {"seq": 16}, {"seq": 32}],
    )
    degrees = range(1, dist.get_world_size() + 1)
    return dcpc.compile(model, buckets, backend="eager", device=SPLITTING, sp=degrees)


def loss_of(model: GPT, data: Runs, ids: list[int]) -> torch.Tensor:
    total, count = 0.0, 0
    for i in ids:
        x = data[i]
        logits = model.logits(x["input_ids"][None])[0]
        total = total + F.cross_entropy(logits, x["labels"], reduction="sum")
        count += int((x["labels"] != -100).sum())
    return total / count


def gpt_errors(rank: int, steps: int) -> dict[str, tuple[float, set[int]]]:
    """Largest error of a mode's gradients, and the degrees it used."""
    warnings.simplefilter("ignore")
    model, alone, data = gpt().double(), gpt().double(), Runs(steps)
    compiled, found = compiled_gpt(model), {}
    for mode in MODES:
        loader = DataLoader(
            data, compiled, tokens_per_step=40, pad=PAD, weight="labels", mode=mode, window=20
        )
        worst, degrees, seen = 0.0, set(), []
        for step in loader:
            model.zero_grad()
            alone.zero_grad()
            result = compiled.train_step(step)
            ids = sorted({i for mb in step.plan.micro_batches for i in mb.sample_ids})
            loss = loss_of(alone, data, ids)
            loss.backward()
            gradients = {n: p.grad for n, p in alone.named_parameters()}
            worst = max(worst, gradient_error(model, gradients))
            worst = max(worst, abs(float(result.loss) / float(loss.detach()) - 1))
            degrees |= {mb.sp for mb in step.plan.micro_batches}
            seen += ids
        assert sorted(seen) == list(range(len(data)))
        found[mode] = (worst, degrees)
    return found


def check_errors(found: dict[str, tuple[float, set[int]]]) -> None:
    assert found.keys() == set(MODES)
    assert max(worst for worst, _ in found.values()) < 1e-10
    assert max(found["auto"][1]) > 1


@pytest.mark.slow
def test_compiled_gradient_of_every_mode_on_four_ranks():
    for found in run_ranks(gpt_errors, 4, 9, timeout_s=280):
        check_errors(found)


def curves(rank: int, steps: int) -> dict[str, list[float]]:
    """float32 loss of each step, by mode; "plain": of the model alone."""
    warnings.simplefilter("ignore")
    data, found = Runs(steps), {}
    model = gpt()
    compiled, start = compiled_gpt(model), {k: v.clone() for k, v in model.state_dict().items()}
    batches = []
    for mode in MODES:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        loader = DataLoader(
            data, compiled, tokens_per_step=62, pad=PAD, weight="labels", mode=mode, shuffle=False
        )
        found[mode], batches = [], []
        for step in loader:
            found[mode].append(float(compiled.train_step(step).loss))
            optimizer.step()
            optimizer.zero_grad()
            batches.append(sorted({i for mb in step.plan.micro_batches for i in mb.sample_ids}))
    plain = gpt()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    found["plain"] = []
    for ids in batches:
        loss = loss_of(plain, data, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["plain"].append(float(loss.detach()))
    return found


def check_curves(found: dict[str, list[float]], steps: int, limit: float) -> None:
    plain = torch.tensor(found.pop("plain"))
    assert len(plain) == steps
    assert plain[-3:].mean() < plain[:3].mean()
    for mode, losses in found.items():
        error = (torch.tensor(losses) / plain - 1).abs().max()
        assert error < limit, mode


def errors_and_curves(rank: int):
    return gpt_errors(rank, 6), curves(rank, 21)


@pytest.mark.slow
def test_compiled_steps_of_every_mode_equal_one_device():
    for errors, found in run_ranks(errors_and_curves, 2, timeout_s=280):
        check_errors(errors)
        check_curves(found, 21, 1e-5)


@pytest.mark.slow
def test_loss_curves_of_200_steps_are_equal():
    for found in run_ranks(curves, 2, 201, timeout_s=280):
        check_curves(found, 201, 1e-3)


def outcome(loader: DataLoader) -> str:
    done = 0
    try:
        for _ in loader:
            done += 1
    except (PlanError, GroupError, RuntimeError) as e:
        return f"{done} steps, then {type(e).__name__}: {e}"
    return "no error"


def planner_fails(rank: int) -> list[str]:
    """Rank 0's planner raises at its third plan, and ends its process at the third after that."""
    groups = Groups.default(timeout_s=60, device="cpu")
    compiled = compiled_for(groups, {4: (1, 3), 7: (1, 2), 16: (2, 1)})
    plan, calls = cuts.plan_step, 0

    def failing(*arguments):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("injected")
        if calls == 6:
            os._exit(7)
        return plan(*arguments)

    if rank == 0:
        cuts.plan_step = failing
    loader = DataLoader(Ragged(LENGTHS), compiled, tokens_per_step=30, pad=PAD, plan_timeout_s=3.0)
    found = outcome(loader)
    return [found, outcome(loader)]


def test_planner_that_raises_or_dies_is_named_on_every_rank():
    _, (raised, died) = run_ranks(planner_fails, 2, may_die=(0,), timeout_s=90)
    assert raised.startswith("2 steps, then PlanError: planner of rank 0: got RuntimeError: inject")
    assert "then GroupError: rank 0 is lost: got the end of its process" in died
