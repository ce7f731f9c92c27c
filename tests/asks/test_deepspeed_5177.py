"""DeepSpeed #5177, verl-omni #635: any length and number of heads on any ranks, with backward."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.codegen import wire_log
from tests.cases.asks import TEXT, Texts, entry, gpt
from tests.cases.exactness import SPLITTING, SplitModel, compiled_error, wrong
from tests.cases.launch import run_prepared, run_ranks
from tests.cases.ready import Ready

pytestmark = pytest.mark.multirank

LENGTHS = (7, 13, 101)
HEADS = ((3, 3), (5, 5), (6, 6), (6, 2), (3, 1))  # of queries, and of keys and values
WAYS = ("heads", "gathered", "ring", "hybrid")


def sample(length: int) -> dict[str, Tensor]:
    return {name: x[None] for name, x in Texts([length])[0].items()}


def models(heads: tuple[tuple[int, int], ...], world: int) -> list[tuple[str, Ready]]:
    warnings.simplefilter("ignore")
    buckets, found = dcpc.Buckets(TEXT, sizes=[{"seq": n} for n in LENGTHS]), []
    for queries, keys in heads:
        model = gpt(queries, keys, width=4, layers=1)
        ready = Ready(
            model, buckets, world, backend="eager", device=SPLITTING, verify="off", sp=world
        )
        found.append((f"{queries} and {keys} heads", ready))
    return found


def errors(rank: int, models: list[tuple[str, Ready]]) -> dict[str, float]:
    """Through `dcpc.compile`, attention split as it costs least."""
    warnings.simplefilter("ignore")
    found = {}
    for name, ready in models:
        compiled = ready.compile()
        for n in LENGTHS:
            ready.model.zero_grad()
            found[f"{name}, {n} tokens"] = compiled_error(compiled, ready.model, sample(n))
    return found


@pytest.mark.slow
def test_two_ranks_share_odd_lengths_and_odd_numbers_of_heads():
    found = run_prepared(models, errors, 2, ((5, 5), (3, 1)), 2, timeout_s=120)
    assert not wrong(found, 1e-10)


@pytest.mark.slow
def test_four_ranks_share_every_length_and_number_of_heads():
    assert not wrong(run_prepared(models, errors, 4, HEADS, 4, timeout_s=240), 1e-10)


def by_ways(world: int) -> list[tuple[str, SplitModel]]:
    """Every model by each way to split its attention."""
    warnings.simplefilter("ignore")
    buckets, found = dcpc.Buckets(TEXT, sizes=[{"seq": n} for n in LENGTHS]), []
    for queries, keys in HEADS:
        model = gpt(queries, keys, width=4, layers=2)
        whole = SplitModel(model, buckets, {"batch": 1, "seq": 101}, sp=world)
        for way in whole.lowerings():
            split = whole.of("eager", world, way)
            for n in LENGTHS:
                split.ready({"batch": 1, "seq": n}, "all")
            found.append((f"{queries}/{keys} {way}", split))
    return found


def by_way(rank: int, models: list[tuple[str, SplitModel]]) -> dict[str, tuple[float, int]]:
    """Of each way to split attention the errors, and the bytes that this rank sends at 101."""
    found = {}
    for name, split in models:
        for n in LENGTHS:
            wire_log.clear()
            worst = split.difference({"batch": 1, "seq": n}, sample(n), "all").worst
            found[f"{name} {n}"] = (worst, wire_log.total_bytes())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_way_to_split_attention_takes_them(world):
    ranks = run_prepared(by_ways, by_way, world, world, timeout_s=400)
    for found in ranks:
        assert {text.split()[1] for text in found} == {*WAYS[: 2 + world // 2]}
        assert not {k: e for k, (e, _) in found.items() if not e < 1e-10}
    if world == 2:
        for way in WAYS[:3]:
            _, sent_bytes = ranks[0][f"5/5 {way} 101"]
            assert f"{sent_bytes:,} ({way})" in entry(__file__)


class Joint(nn.Module):
    """Attention over text, clip and sound in one row, then a head for each, as in MiniMax H3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.ModuleList(nn.Linear(6, 20) for _ in range(3))
        self.qkv, self.out = nn.Linear(20, 60), nn.ModuleList(nn.Linear(20, 6) for _ in range(3))
        self.double()

    def forward(self, text: Tensor, clip: Tensor, sound: Tensor) -> Tensor:
        parts = (text, clip, sound)
        x = torch.cat([into(p) for into, p in zip(self.into, parts, strict=True)], 1)
        q, k, v = (t.unflatten(-1, (5, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        split = y.split([p.shape[1] for p in parts], 1)
        losses = [F.mse_loss(f(s), p) for f, s, p in zip(self.out, split, parts, strict=True)]
        return sum(losses, torch.zeros((), dtype=y.dtype))


JOINT = {n: f"float64[batch, {n}s, 6]" for n in ("text", "clip", "sound")}
ROWS = [{"texts": 5, "clips": 13, "sounds": 3}, {"texts": 2, "clips": 8, "sounds": 7}]


def joint_errors(rank: int) -> dict[str, float]:
    warnings.simplefilter("ignore")
    model = Joint()
    compiled = dcpc.compile(
        model, dcpc.Buckets(JOINT, sizes=ROWS), backend="eager", device=SPLITTING, verify="off",
        sp=torch.distributed.get_world_size(),
    )  # fmt: skip
    found = {}
    for sizes in ROWS:
        draw = torch.Generator().manual_seed(1)
        inputs = {n: torch.randn(1, sizes[n + "s"], 6, generator=draw, dtype=torch.float64)
                  for n in JOINT}  # fmt: skip
        model.zero_grad()
        found[f"{sizes}"] = compiled_error(compiled, model, inputs)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_text_clip_and_sound_of_any_lengths_in_one_attention(world):
    assert not wrong(run_ranks(joint_errors, world, timeout_s=120), 1e-10)
