"""Steps in rounds, in which graphs gather parameters, against the plain model."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dcpc
from dcpc.codegen import ROWS_GROUP, bind_group, wire_log
from dcpc.plan.planning import Planned
from examples.allocator import measured_peak_bytes
from models.gpt import GPT, GPTConfig
from tests.cases.launch import run_prepared, run_ranks
from tests.cases.ready import Ready, traced_once

CONFIG = GPTConfig(vocab_size=51, dim=16, n_layers=3, n_heads=2, n_kv_heads=1, hidden=24)
BUCKETS = dcpc.Buckets(dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]"),
                       sizes=[{"seq": 4}, {"seq": 48}])  # fmt: skip


class Texts:
    """Of 1 to 48 tokens; in some no token counts."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        length = 1 + i % 4 if i % 3 else 5 + i * 7 % 44
        ids = torch.randint(51, (length,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids * 0 - 100 if i == 4 else (ids + 1) % 51}


def made(tied: bool = False) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(
        **{n: getattr(CONFIG, n) for n in CONFIG.__slots__} | {"tie_embeddings": tied}
    )
    return GPT(config).double()


def gathered_again(planned: Planned) -> list[frozenset[int]]:
    """Units that each bucket gathers again, the short one's first."""
    return [
        planned.by_bucket[b].priced.gathered_again(planned.placement(b), p.menu_step)
        for b, p in planned.plans.items()
    ]


def memory_of_some() -> float:
    """Bytes of a rank at which the long bucket gathers some units again and the short one none."""
    plan = partial(dcpc.api.plan, world=2, backend="eager", device="cpu", parameters="rounds", sp=1)
    torch.set_num_threads(1)  # as on a rank: some scratch has a part for each thread
    model = made()
    with warnings.catch_warnings(), traced_once():
        warnings.simplefilter("ignore")
        for memory in range(300_000, 260_000, -4_000):
            if gathered_again(plan(model, BUCKETS, memory=memory)) == [set(), {1, 2}]:
                return memory
    raise AssertionError("at no memory two of three units are gathered again")


def ready(world: int, tied: bool, options: dict[str, Any]) -> tuple[bool, Ready]:
    warnings.simplefilter("ignore")
    options = {"verify": "off", **options}
    return tied, Ready(made(tied), BUCKETS, world, parameters="rounds", **options)


def trained(rank: int, prepared: tuple[bool, Ready]) -> dict[str, Any]:
    """An epoch with SGD; how far loss, gradients and parameters are off, and what ran."""
    warnings.simplefilter("ignore")
    tied, compiled = prepared[0], prepared[1].compile()
    loader = dcpc.DataLoader(
        Texts(), compiled, tokens_per_step=60, pad={"input_ids": 0, "labels": -100},
        weight="labels", seed=3,
    )  # fmt: skip
    alone, worst = made(tied), 0.0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (compiled, alone)]
    idle = 0
    for step in loader:
        every = [Texts()[i] for mb in step.plan.micro_batches for i in mb.sample_ids]
        total = sum(int((x["labels"] >= 0).sum()) for x in every)
        loss = 0.0
        for x in every:
            weight = int((x["labels"] >= 0).sum())
            if weight:
                part = alone(x["input_ids"][None], x["labels"][None]) * (weight / total)
                part.backward()
                loss += float(part)
        got = float(compiled.train_step(step).loss)
        worst = max(worst, abs(got - loss) / abs(loss))
        idle += step.plan.accumulation > len(step.micro_batches)
        for (name, p), q in zip(compiled.named_parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            far = (p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max()
            worst = max(worst, float(far))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {
        "worst": worst,
        "idle": idle,
        "again": gathered_again(compiled.planned),
        "ran": {key[-1] for key in compiled._core.dispatch.variants},
        "degrees": {key[3].sp for key in compiled._core.dispatch.variants},
    }


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("world", "tied", "options"),
    [
        pytest.param(2, False, {"backend": "eager"}, marks=pytest.mark.slow),
        (2, True, {"backend": "eager", "recompute": "all"}),
        (2, True, {"backend": "eager", "host": "64MB", "away": "parameters"}),
        pytest.param(4, False, {"backend": "eager", "recompute": "all"}, marks=pytest.mark.slow),
        pytest.param(3, True, {"backend": "eager", "recompute": "none"}, marks=pytest.mark.slow),
        pytest.param(2, True, {"backend": "inductor", "recompute": "all"}, marks=pytest.mark.slow),
    ],
)
def test_steps_in_rounds_are_the_plain_models(world, tied, options):
    for found in run_prepared(ready, trained, world, world, tied, options, timeout_s=240):
        assert found["worst"] < 1e-10


@pytest.mark.multirank
def test_a_round_gathers_again_what_one_of_it_does():
    options = {"backend": "eager", "sp": 1, "memory": memory_of_some()}
    ranks = run_prepared(ready, trained, 2, 2, False, options, timeout_s=120)
    for found in ranks:
        assert found["worst"] < 1e-10
        assert found["again"] == [set(), {1, 2}]
    assert set().union(*(found["ran"] for found in ranks)) == {frozenset(), frozenset({1, 2})}
    assert any(found["idle"] for found in ranks)  # some rank had nothing to run in some round


def sent(rank: int, recompute: str) -> tuple[int, float]:
    """Bytes that a rank puts on the wire in a step, and those of the formula."""
    warnings.simplefilter("ignore")
    compiled = dcpc.compile(made(), BUCKETS, parameters="rounds", backend="eager", sp=1,
                            recompute=recompute, verify="off")  # fmt: skip
    loader = dcpc.DataLoader(Texts(), compiled, tokens_per_step=90,
                             pad={"input_ids": 0, "labels": -100}, mode="inter")  # fmt: skip
    step = next(iter(loader))
    wire_log.clear()
    compiled.train_step(step)
    rounds = step.plan.accumulation
    (each,) = {float(compiled.profile(b).wire_bytes) for b in compiled.buckets}
    return wire_log.total_bytes(), rounds * each


@pytest.mark.multirank
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_every_rank_sends_what_the_formula_says_whatever_it_runs(recompute):
    for counted, formula in run_ranks(sent, 2, recompute, timeout_s=60):
        assert counted == formula > 0


def by_hand(rank: int) -> list[float]:
    """Losses of a call of every rank, each with a bucket of its own."""
    warnings.simplefilter("ignore")
    compiled = dcpc.compile(made(), BUCKETS, parameters="rounds", backend="eager", sp=1,
                            verify="off")  # fmt: skip
    x = torch.arange(4 if rank else 48)[None]
    with torch.no_grad():
        return [float(compiled(input_ids=x, labels=x)), float(made()(x, x))]


@pytest.mark.multirank
def test_ranks_call_at_once_each_with_inputs_of_its_own():
    for got, expected in run_ranks(by_hand, 2, timeout_s=60):
        assert got == pytest.approx(expected, rel=1e-12)


def gathered_peak(rank: int) -> int:
    """Bytes that a gather of 8 MB takes at the most."""
    bind_group(ROWS_GROUP, dist.group.WORLD)
    rows = [torch.full((500, 1000), float(rank)), torch.full((500, 1000), float(rank))]

    def gather() -> None:
        for whole in torch.ops.dcpc.gather_rows(rows, 2, ROWS_GROUP)[:-1]:
            assert [whole[0, 0].item(), whole[-1, -1].item()] == [0.0, 1.0]

    return measured_peak_bytes(gather)


@pytest.mark.multirank
def test_a_gather_takes_what_it_makes():
    for peak in run_ranks(gathered_peak, 2):
        assert 8_000_000 <= peak < 8_001_000  # gloo's own gather would take as much again
