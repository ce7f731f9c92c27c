"""A loss that depends on how samples are divided into micro-batches, or on padding, is refused."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import dcpc
from dcpc.errors import DataError
from dcpc.verify.points import Point
from dcpc.verify.reference import Asked
from models.gpt import GPT, GPTConfig

VECTORS = {"x": "float32[batch, seq, 4]"}
TOKENS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
PAD = {"input_ids": 0, "labels": -100}
DIVIDED, PADDED = "of their halves by weight=", "which changes the loss"


@torch.library.custom_op("dcpc_tests::float_mean", mutates_args=())
def float_mean(x: Tensor) -> Tensor:
    """Returns the mean, computed in float32 whatever it is given."""
    return x.new_tensor(x.detach().numpy().astype("float32").mean())


float_mean.register_fake(lambda x: x.new_empty(()))
float_mean.register_autograd(
    lambda ctx, g: g.expand(ctx.shape) / ctx.shape.numel(),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
)


class Regression(nn.Module):
    """A loss of each kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.kind == "sum":
            return y.square().sum()
        if self.kind == "rounding alone":
            return F.layer_norm(y, (4,)).mean()
        if self.kind == "a difference":
            return (1000 + y).mean() - 1000
        if self.kind == "float32 inside":
            return float_mean(y.square())
        y = y.mean(1)
        if self.kind == "batch norm":
            y = F.batch_norm(y, None, None, training=True).pow(3) + y
        if self.kind == "contrast":
            y = (y @ y.transpose(0, 1)).softmax(-1)
        return F.dropout(y, 0.2, self.training).square().mean()


class Narrow(nn.Module):
    """A mean over samples, or a sum, of a model that knows no float64."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 4))
        self.scale, self.sums = scale, False

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no kernel")
        y = self.layers(x).square().mean((1, 2)) * self.scale
        return y.sum() if self.sums else y.mean()


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=11, dim=16, n_layers=1, n_heads=2))


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def said(model: nn.Module, inputs: dict[str, str], verify: str = "auto", **options) -> str:
    buckets = dcpc.Buckets(inputs=inputs, sizes=[{"seq": 8}, {"seq": 16}])
    compiled = dcpc.compile(model, buckets, backend="eager", memory=1e9, verify=verify)
    integers = {n: torch.ones(8, dtype=torch.int64) for n in inputs}
    vectors = {n: torch.ones(8, 4, dtype=spec.dtype) for n, spec in buckets.inputs.items()}
    sample = vectors if "x" in inputs else integers
    try:
        dcpc.DataLoader([sample], compiled, tokens_per_step=64, **options)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["sum", "batch norm", "contrast"])
def test_a_loss_that_is_no_mean_over_samples_is_refused(kind):
    text = said(Regression(kind), VECTORS)
    assert DIVIDED in text
    assert re.search(r"loss of [\d.]+ .* and [\d.]+ as .*difference [\d.]+e-0", text)
    assert "is trained as it is with loss_depends_on='micro_batch'" in text
    assert said(Regression(kind), VECTORS, loss_depends_on="micro_batch") == ""


@pytest.mark.parametrize("kind", ["mean", "rounding alone", "a difference", "float32 inside"])
def test_a_mean_over_samples_is_taken(kind):
    assert said(Regression(kind), VECTORS) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_where_the_model_is_never_in_float64_its_own_rounding_is_no_difference(dtype, scale):
    torch.manual_seed(0)
    model = Narrow(scale).to(dtype)
    inputs = {"x": f"{str(dtype).removeprefix('torch.')}[batch, seq, 4]"}
    assert said(model, inputs) == ""
    model.sums = True
    tiny = scale < 1e-3 and dtype != torch.float32  # below what such a loss is rounded by
    assert (DIVIDED in said(model, inputs)) != tiny


@pytest.mark.parametrize(
    ("losses", "eps", "apart"),
    [
        ((2.0, 1.0, 1.0), None, 0.5),
        ((1.0, 1.0 + 3e-6, 1.0), None, 1.5e-6),
        ((1.0, 1.0 + 1e-6, 1.0), None, 0.0),
        ((1e30, 1.1e30, 1e30), None, 0.0455),
        ((1e-7, 2e-7, 1e-7), None, 0.25),
        ((1e-17, 3e-17, -2e-17), None, 0.0),
        ((1e-5, 1e3, -1e3), None, 0.0),
        ((1.0, 1.006, 1.0), 2**-23, 0.003),
        ((1.0, 1.0016, 1.0), 2**-23, 0.0),
        ((1e-7, 3e-7, 1e-7), 2**-23, 0.0),
        ((1e-4, 3e-4, 1e-4), 2**-23, 0.33),
        ((1.0, 1.05, 1.0), 2**-7, 0.0),
        ((1.0, 1.1, 1.0), 2**-7, 0.0455),
        ((1e-3, 3e-3, 1e-3), 2**-7, 0.0),
    ],
)
def test_two_losses_differ_by_more_than_they_are_rounded(losses, eps, apart):
    whole, *halves = losses
    asked = Asked(Point({}), losses, (), eps)
    assert asked.apart(whole, sum(halves) / 2) == pytest.approx(apart, rel=0.05)


def test_nothing_is_looked_at_without_verification():
    assert said(Regression("sum"), VECTORS, verify="off") == ""


@pytest.mark.parametrize(
    ("make", "weight", "right"),
    [
        (gpt, "samples", "weight='labels'"),
        (gpt, "labels", ""),
        (llama, "labels", "weight=dcpc.CountLabels('labels', shift=1)"),
        (llama, dcpc.CountLabels("labels", shift=1), ""),
        (lambda: Regression("mean"), lambda x: x["x"].square().sum(), "weight='samples'"),
    ],
)
def test_a_weight_is_what_the_loss_is_a_mean_over(make, weight, right):
    given = (VECTORS, None) if make not in (gpt, llama) else (TOKENS, PAD)
    text = said(make(), given[0], pad=given[1], weight=weight)
    assert (DIVIDED in text, f"; pass {right}," in text) == ((bool(right),) * 2)


def test_samples_without_padding_may_count_alike():
    assert said(gpt(), TOKENS) == ""


def test_padding_that_changes_a_loss_is_refused():
    text = said(Regression("mean"), VECTORS, pad={"x": 0})
    assert PADDED in text
    assert "relative difference" in text
    allowed = {"pad": {"x": 0}, "loss_depends_on": {"padding"}}
    assert said(Regression("mean"), VECTORS, **allowed) == ""
    assert DIVIDED in said(Regression("sum"), VECTORS, **allowed), "of the other it says nothing"
