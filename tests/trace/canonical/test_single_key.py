"""Attention over one key: removed, with the plain model's gradients, zeros included."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.trace import trace
from tests.cases.exactness import compiled_error, gradient_error, plain
from tests.cases.launch import run_ranks

INPUTS = {"x": "float64[batch, frames, 8]", "y": "float64[batch, frames, 8]"}


class Attention(nn.Module):
    """One matrix for queries, keys and values; norms on queries and keys, as in video models."""

    def __init__(self, masked: bool = False, layout: str = "three") -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)
        self.masked, self.layout = masked, layout

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, t, _ = x.shape
        if self.layout == "three":
            q, k, v = self.qkv(x).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        else:  # slices of the last dim
            parts = self.qkv(x).chunk(3, -1)
            q, k, v = (p.view(b, t, 2, 4).transpose(1, 2) for p in parts)
        mask = torch.ones(t, t, dtype=torch.bool) if self.masked else None
        h = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask=mask)
        return ((self.out(h.transpose(1, 2).reshape(b, t, 8)) - y) ** 2).mean()


def make(frames: int, **options) -> tuple[nn.Module, dcpc.Buckets]:
    torch.manual_seed(0)
    return Attention(**options).double(), dcpc.Buckets(INPUTS, [{"frames": frames}])


def sample(frames: int, batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(frames)
    shape = (batch, frames, 8)
    return {n: torch.randn(shape, dtype=torch.float64, generator=generator) for n in INPUTS}


def code(frames: int, **options) -> str:
    return str(trace(*make(frames, **options)).gm.code)


@pytest.mark.parametrize("layout", ["three", "chunks"])
def test_one_frame_has_no_scores_and_a_third_of_the_projection(layout):
    found = code(1, layout=layout)
    assert "attention" not in found
    assert "rms_norm" not in found
    program = trace(*make(1, layout=layout))
    slices = [n for n in program.gm.graph.nodes if n.target is torch.ops.aten.slice.Tensor]
    assert {program.info[n.name].shape[0] for n in slices} == {8}
    zero = {program.parameters[n] for n in program.zero_gradients}
    assert zero == {"q_norm.weight", "k_norm.weight"}


@pytest.mark.parametrize(("frames", "options"), [(5, {}), (1, {"masked": True})])
def test_several_keys_or_a_mask_stay(frames, options):
    assert "attention" in code(frames, **options)
    assert not trace(*make(frames, **options)).zero_gradients


@pytest.mark.parametrize("layout", ["three", "chunks"])
def test_gradients_are_the_plain_models_zeros_included(layout):
    model, buckets = make(1, layout=layout)
    compiled = dcpc.compile(model, buckets, backend="eager", verify="off")
    inputs = sample(1, 3)
    assert compiled_error(compiled, model, inputs) < 1e-14
    _, expected = plain(model, inputs)
    compiled(**inputs).backward()
    assert gradient_error(model, expected) < 1e-14
    assert float(model.q_norm.weight.grad.abs().max()) == 0.0


def test_the_model_is_left_as_it_was():
    model, buckets = make(1)
    before = {n: p.clone() for n, p in model.named_parameters()}
    trace(model, buckets)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


PARTS = {
    "from the end": (lambda z: z[..., -4:-1], 3),
    "to the end": (lambda z: z[..., -4:], 4),
    "from before the beginning": (lambda z: z[..., -20:3], 3),
    "to before the end": (lambda z: z[..., :-5], 3),
    "up to beyond the end": (lambda z: z[..., 2:20], 6),
    "narrow": (lambda z: z.narrow(-1, -4, 2), 2),
    "split at places from the end": (lambda z: z.tensor_split((-6, -2), -1)[1], 4),
    "every other one": (lambda z: z[..., -7:-1:2], 8),
    "of a part": (lambda z: z.unflatten(-1, (4, 2))[..., -2, :], 2),
    "one of each part": (lambda z: z.unflatten(-1, (4, 2))[..., -2], 8),
    "one at a size": (lambda z: z.unflatten(-1, (4, 2))[..., z.shape[1] - 4, :], 8),
}


class Part(nn.Module):
    """A part of what one matrix makes."""

    def __init__(self, part) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.part = nn.Linear(8, 8).double(), part

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(self.net(x))
        return (y.cumsum(-1) + y.square()).mean()


@pytest.mark.parametrize("name", PARTS)
def test_part_of_a_projection_is_of_its_own_rows(name):
    part, rows = PARTS[name]
    model, x = Part(part), {"x": sample(5, 3)["x"]}
    buckets = dcpc.Buckets({"x": INPUTS["x"]}, [{"frames": 5}, {"frames": 7}])
    program = trace(model, buckets)
    (linear,) = (n for n in program.gm.graph.nodes if n.target is torch.ops.aten.linear.default)
    assert program.info[linear.name].shape[-1] == rows
    assert (
        compiled_error(dcpc.compile(model, buckets, backend="eager", verify="off"), model, x)
        < 1e-10
    )


def over_ranks(rank: int) -> float:
    model, buckets = make(1)
    return compiled_error(
        dcpc.compile(model, buckets, backend="eager", sp=2, verify="off"), model, sample(1, 3)
    )


@pytest.mark.multirank
def test_over_two_ranks():
    assert max(run_ranks(over_ranks, 2)) < 1e-10
