"""A rank that runs out of memory in a step: all plan again with less, and numbers stay exact."""

import logging
import random
import warnings
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import dcpc
from dcpc.runtime.step.on_group import OnGroup
from models.gpt import GPT, GPTConfig
from tests.cases.exactness import SPLITTING
from tests.cases.launch import RanksError, run_ranks
from tests.cases.ragged import LENGTHS, Ragged, gpt
from tests.cases.steps import compared
from tests.fuzz.memory_limit import MemoryLimit

INPUTS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
PAD = {"input_ids": 0, "labels": -100}


class Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "got padding" not in record.getMessage():
            self.lines.append(record.getMessage())


def cpu_error(text: str) -> RuntimeError:
    """As torch says it on the CPU."""
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
    )


def train(
    rank: int,
    parameters: str = "whole",
    sp: object = "auto",
    share: float = 1.0,
    failing: int = 1,
    at: tuple[int, ...] = (),
    mode: str = "auto",
    kind: Any = torch.OutOfMemoryError,
    epochs: int = 2,
) -> dict[str, Any]:
    """Epochs on ranks, of which one has less memory from the second step on, or at some ops."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = gpt()
    model.zero_grad()
    buckets = dcpc.Buckets(INPUTS, [{"seq": 9}, {"seq": 24}])
    compiled = dcpc.compile(
        model, buckets, backend="eager", verify="off", sp=sp, parameters=parameters,
        device="auto" if sp == 1 else SPLITTING,
    )  # fmt: skip
    loader = dcpc.DataLoader(
        Ragged(), compiled, tokens_per_step=120, pad=PAD, weight="labels", mode=mode
    )
    logged = Logged()
    logging.getLogger("dcpc").addHandler(logged)
    calls = iter(at)
    first = next(calls, 0)
    limit = MemoryLimit(at=lambda call: rank == failing and call == limit_at[0], kind=kind)
    limit_at = [first]
    errors, samples = [], []
    with ExitStack() as stack:
        stack.enter_context(limit.around(OnGroup, "run_turns"))
        for _ in range(epochs):
            for step in loader:
                before = limit.raised
                errors.append(compared(compiled, step, Ragged()))
                samples += [i for mb in step.plan.micro_batches for i in mb.sample_ids]
                if limit.raised > before:
                    limit_at[0] = limit.calls + next(calls, 1 << 40)
                if rank == failing and share < 1 and limit.limit_bytes == float("inf"):
                    limit.limit_bytes = share * limit.most_bytes
    stats = compiled.stats()
    return {
        "errors": errors, "samples": sorted(samples), "raised": limit.raised,
        "counts": {b["seq"]: n for b, n in stats.out_of_memory.items()},
        "plans": {b["seq"]: (p.sp, p.micro_batch, p.menu_step)
                  for b, p in compiled.plans.items()},
        "lines": logged.lines, "report": compiled.report(), "replans": compiled.replans,
    }  # fmt: skip


def check(found: list[dict[str, Any]], failing: int = 1, epochs: int = 2) -> None:
    for each in found:
        assert max(each["errors"]) < 1e-10
        assert each["samples"] == sorted([*range(len(LENGTHS))] * epochs)
        assert each["counts"] == found[0]["counts"]
        assert each["plans"] == found[0]["plans"]
    assert found[failing]["raised"] > 0
    assert len(found[0]["lines"]) == sum(found[0]["counts"].values()) > 0
    assert found[0]["replans"] == sum("; now sp" in line for line in found[0]["lines"])
    assert f"rank {failing} ran out of memory" in found[0]["lines"][0]
    assert "the step runs again (1 of at most 8)" in found[0]["lines"][0]
    assert "ran out of memory" in found[0]["report"]
    assert all(each["lines"] == [] for each in found[1:])


@pytest.mark.multirank
@pytest.mark.parametrize(
    "parameters",
    ["whole", pytest.param("step", marks=pytest.mark.slow),
     pytest.param("pull", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_rank_with_less_memory_gets_smaller_plans_and_the_step_is_exact(parameters):
    check(run_ranks(train, 2, parameters, 1, 0.6, timeout_s=280))


@pytest.mark.multirank
def test_a_rank_that_fails_within_a_group_wakes_the_others_in_it():
    # The first is in a forward, the second in a backward: others wait for this rank then.
    found = run_ranks(train, 2, "whole", 2, 1.0, 1, (120, 900), "inter", cpu_error, timeout_s=280)
    check(found)
    assert found[1]["raised"] == 2
    assert "(an allocation of 4.10 kB failed)" in found[0]["lines"][0]


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_fail_anywhere_in_mixed_degrees(seed):
    rng = random.Random(seed)
    at = tuple(rng.randint(1, 900) for _ in range(5))
    failing = rng.randrange(4)
    for found in [run_ranks(train, 4, "whole", "auto", 1.0, failing, at, timeout_s=280)]:
        check(found, failing)


@pytest.mark.multirank
@pytest.mark.slow
def test_ranks_that_gather_parameters_are_refused_on_the_rank_that_failed():
    with pytest.raises(RanksError, match=r"PlanError: rank 1 ran out of memory .*='rounds'"):
        run_ranks(train, 2, "rounds", 1, 1.0, 1, (100,), timeout_s=60)


VOCABULARY, LONGEST = 512, 1024


class Long:
    """Texts whose logits are most of what a step needs."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(i)
        ids, labels = torch.randint(VOCABULARY, (2, LONGEST - i), generator=draw)
        return {"input_ids": ids, "labels": labels}


def short_of_logits(rank: int, tile: str, places: dict[str, str]) -> dict[str, Any]:
    """Steps on ranks, of which one has from the second on half of the memory that one took."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=VOCABULARY, dim=16, n_layers=1, n_heads=2)
    compiled = dcpc.compile(
        GPT(config).double(), dcpc.Buckets(INPUTS, [{"seq": LONGEST}]), backend="eager",
        verify="auto", memory=1e9, tile=tile, **places,
    )  # fmt: skip
    loader = dcpc.DataLoader(Long(), compiled, samples_per_step=2, pad=PAD, weight="labels")
    limit, errors = MemoryLimit(), []
    with limit.around(OnGroup, "run_turns"):
        for _ in range(2):
            for step in loader:
                errors.append(compared(compiled, step, Long()))
                if rank == 1:
                    limit.limit_bytes = min(limit.limit_bytes, 0.5 * limit.most_bytes)
    (plan,) = compiled.plans.values()
    return {"worst": max(errors), "raised": limit.raised, "sp": plan.sp, "reason": plan.reason,
            "steps": len(errors)}  # fmt: skip


@pytest.mark.multirank
def test_logits_go_in_tiles_before_a_group_gets_wider():
    found = run_ranks(short_of_logits, 2, "auto", {}, timeout_s=280)
    for each in found:
        assert each["worst"] < 1e-10
        assert each["steps"] == 4
        assert each["sp"] == 1
        assert "rows at a time" in each["reason"]
    assert found[1]["raised"] > 0
