"""Mixed precision against the plain model under `torch.autocast`: the same casts, the same bits."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dcpc
from dcpc.errors import DispatchError, PlanError
from models.gpt import GPT, GPTConfig
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_prepared
from tests.cases.ready import Ready

BF16 = torch.bfloat16
INPUTS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
BUCKETS = dcpc.Buckets(inputs=INPUTS, sizes=[{"seq": 9, "batch": 3}, {"seq": 24, "batch": 2}])
POINTS = [(3, 9), (1, 9), (2, 24)]


class Shared(nn.Module):
    """One weight read three times, and a part of forward that turns autocast off."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, 16), nn.LayerNorm(16)
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(input_ids))
        h = self.mix(self.mix(h)) + h
        with torch.autocast("cpu", enabled=False):
            h = h.float() @ self.mix.weight
        h = torch.softmax(h, -1) * h.exp()
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=64, dim=32, n_layers=1, n_heads=4, tie_embeddings=True))


def made(make) -> nn.Module:
    torch.manual_seed(0)
    return make()


def inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seq)
    ids, labels = torch.randint(64, (2, batch, seq), generator=generator)
    return {"input_ids": ids, "labels": labels}


def reference(model: nn.Module, x: dict[str, torch.Tensor], dtype: torch.dtype | None):
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(**x)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def error(got, expected) -> float:
    """Largest difference of loss and gradients, each relative to its own largest element."""
    pairs = [(got[0], expected[0]), *((g, expected[1][n]) for n, g in got[1].items())]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def run(compiled, x):
    compiled.zero_grad()
    loss = compiled(**x)
    loss.backward()
    compiled.reduce_gradients()
    return loss.detach(), {n: p.grad for n, p in compiled.named_parameters()}


@pytest.mark.parametrize("make", [Shared, gpt])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_variant_has_the_bits_of_the_plain_model_under_autocast(make, recompute):
    model = made(make)
    compiled = dcpc.compile(
        model, BUCKETS, backend="eager", recompute=recompute, autocast=BF16, verify="off"
    )
    for point in POINTS:
        x = inputs(*point)
        expected = reference(model, x, BF16)
        assert error(expected, reference(model, x, None)) > 1e-4  # autocast does something
        loss, gradients = run(compiled, x)
        assert loss.dtype == expected[0].dtype
        assert torch.equal(loss, expected[0])
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, expected[1][name]), name


def test_autocast_around_compile_and_around_the_call():
    model, x = made(gpt), inputs(2, 24)
    expected = reference(model, x, BF16)
    with torch.autocast("cpu", BF16):
        compiled = dcpc.compile(model, BUCKETS, backend="eager")
        assert compiled.planned.autocast == BF16
        # The whole of it in the region, backward and the variant's compilation included.
        inside = run(compiled, x)
    assert error(inside, expected) == 0.0
    assert error(run(compiled, x), expected) == 0.0
    with torch.autocast("cpu", torch.float16), pytest.raises(DispatchError, match=r"float16\); ex"):
        compiled(**x)
    plain = dcpc.compile(model, BUCKETS, backend="eager")
    with torch.autocast("cpu", BF16), pytest.raises(DispatchError, match=r"expected none.*autoc"):
        plain(**x)
    with torch.autocast("cpu", enabled=False):
        assert error(run(plain, x), reference(model, x, None)) < 1e-5
    with pytest.raises(PlanError, match=r"got autocast=torch\.float64; expected one of torch\.bf"):
        dcpc.compile(model, BUCKETS, autocast=torch.float64)


def test_costs_see_the_low_precision():
    """Fewer bytes are saved, and products run at the rate of the low precision."""
    full, mixed = (
        dcpc.api.plan(made(gpt), BUCKETS, device="h200", backend="eager", autocast=dtype)
        for dtype in (None, BF16)
    )
    bucket = list(BUCKETS)[1]
    for planned in (full, mixed):
        assert planned.profile(bucket) is not None
    saved = [p.study(bucket).predict(0, {"seq": 24, "batch": 2}) for p in (full, mixed)]
    assert saved[1].saved_bytes < 0.95 * saved[0].saved_bytes
    work = [p.profile(bucket).work for p in (full, mixed)]
    dtypes = [{w.dtype for w in each if w.op_class == "matmul"} for each in work]
    assert dtypes == [{torch.float32}, {BF16}]


def ready(world: int) -> tuple[Ready, Ready]:
    """A model under autocast, and one in bfloat16."""
    warnings.simplefilter("ignore")
    options = {"backend": "eager", "device": SPLITTING, "sp": world, "verify": "off"}
    mixed = Ready(made(gpt), BUCKETS, world, autocast=BF16, **options)
    return mixed, Ready(made(gpt).to(BF16), BUCKETS, world, **options)


def over_ranks(mixed: Ready) -> list[tuple[float, float, int]]:
    warnings.simplefilter("ignore")
    alone, exact = copy.deepcopy(mixed.model), copy.deepcopy(mixed.model).double()
    compiled = mixed.compile()
    found = []
    for point in POINTS:
        x = inputs(*point)
        with contextlib.nullcontext() if point[0] % 2 else torch.autocast("cpu", BF16):
            got = run(compiled, x)
        truth = reference(exact, x, None)
        theirs = error(reference(alone, x, BF16), truth)
        found.append((error(got, truth), theirs, compiled.stats().wire_bytes))
    return found


def bfloat16_model(low: Ready) -> list[tuple[float, float]]:
    warnings.simplefilter("ignore")
    alone, exact = copy.deepcopy(low.model), copy.deepcopy(low.model).double()
    compiled = low.compile()
    found = []
    for point in POINTS:
        x = inputs(*point)
        got = run(compiled, x)
        assert {g.dtype for g in got[1].values()} == {BF16}
        truth, theirs = reference(exact, x, None), reference(alone, x, None)
        found.append((error(got, truth), error(theirs, truth)))
        if low.options["sp"] == 1:
            assert error(got, theirs) == 0.0
    return found


def test_a_bfloat16_model_has_the_plain_model_s_bits():
    assert bfloat16_model(ready(1)[1])


def both(
    rank: int, models: tuple[Ready, Ready]
) -> tuple[list[tuple[float, float, int]], list[tuple[float, float]]]:
    mixed, low = models
    return over_ranks(mixed), bfloat16_model(low)


@pytest.mark.multirank
def test_split_over_ranks_the_error_is_that_of_autocast_and_of_a_bfloat16_model():
    """Against the float64 model: sums of pieces round in another order, and no worse."""
    for mixed, low in run_prepared(ready, both, 2, 2, timeout_s=280):
        for ours, theirs, wire_bytes in mixed:
            assert theirs > 1e-3
            assert ours < 1.5 * theirs
            assert wire_bytes > 0
        for ours, theirs in low:
            assert ours < 1.5 * theirs


@pytest.mark.slow
def test_inductor_under_autocast():
    """Fused kernels keep float32 between ops: nearer to the truth, not bit-equal."""
    model = made(gpt)
    exact = copy.deepcopy(model).double()
    batch, seq = POINTS[-1]
    buckets = dcpc.Buckets(inputs=INPUTS, sizes=[{"seq": seq, "batch": batch}])
    compiled = dcpc.compile(model, buckets, backend="inductor", autocast=BF16, verify="off")
    x = inputs(batch, seq)
    truth = reference(exact, x, None)
    theirs = error(reference(model, x, BF16), truth)
    assert error(run(compiled, x), truth) < 1.5 * theirs
