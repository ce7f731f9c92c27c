"""Faults of layouts, of one sample, of groups and of constants, and the models they matter on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.mutants import models as mutants_models
from tests.mutants.models import DIM, MARKED, RING, SHORT, SPLIT, TOKENS, Setting
from tests.mutants.plant import Mutant, edited


class Pixels(nn.Module):
    """A convolution, each sample normed alone, and one query that sees all pixels."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.near, self.norm = nn.Conv2d(4, DIM, 3, padding=1), nn.InstanceNorm2d(DIM)
        self.key, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, mutants_models.VOCABULARY)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        """Returns the loss."""
        y = self.norm(self.near(x)).flatten(2).transpose(1, 2)
        seen = (y[:, :1] @ self.key(y).transpose(1, 2)).softmax(-1)
        return F.cross_entropy(self.out(seen @ y)[:, 0], label)


class Groups(nn.Module):
    """Channels normed in 4 groups, and taken apart in 2: of groups a rank has a piece."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, 64), nn.GroupNorm(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        z = self.norm(F.interpolate(self.linear(x).mT, scale_factor=2))
        return z.unflatten(1, (2, 32)).softmax(2).flatten(1, 2).square().mean()


class Rows(nn.Module):
    """Groups of channels over positions, of which a rank has a piece."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.GroupNorm(2, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        y = self.linear(x).sin()
        return (self.norm(y.mT).mT * y).tanh().sum()


class Kernels(nn.Module):
    """A norm in groups within each sample."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.near, self.norm = nn.Conv1d(DIM, DIM, 3, padding=1), nn.GroupNorm(2, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        return self.norm(self.near(x.mT)).tanh().square().mean()


class Constants(nn.Module):
    """Ones and zeros of computed sizes, added up and beside other rows."""

    def __init__(self) -> None:
        """Makes the layer."""
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        b, n, _ = x.shape
        y = self.linear(x).sin()
        ones = torch.ones(b * n, DIM, dtype=x.dtype).view(b, n, DIM)
        count = (ones * 0.5).sum(1)
        full = y.new_full((1, n, DIM), 0.25)
        return (y.sum(1) / count).square().sum() + (y * y).sum() / (full * y.detach()).sum()


ROWS = {"x": "float64[1, seq, 8]"}  # of one sample, which no rank takes alone
SETTINGS: dict[str, Setting] = {
    **mutants_models.SETTINGS,
    "pixels": Setting(
        Pixels,
        {"x": "float64[batch, 4, h, w]", "label": "int64[batch]"},
        ({"h": 5, "w": 6},),
        samples=1,
    ),
    "one": Setting(mutants_models.Tokens, TOKENS, SHORT, samples=1),
    "one padded": Setting(
        mutants_models.Padded, {k: v for k, v in MARKED.items() if k != "segment"}, SHORT, samples=1
    ),
    "one ring 2": Setting(mutants_models.Tokens, TOKENS, SHORT, RING, samples=1),
    "one gathered 2": Setting(
        mutants_models.Tokens, TOKENS, SHORT, {**SPLIT, "attention": "gathered"}, samples=1
    ),
    "kernels": Setting(Kernels, ROWS, SHORT),
    "groups 2": Setting(Groups, ROWS, ({"seq": 12},), SPLIT),
    "rows 2": Setting(Rows, ROWS, ({"seq": 33},), SPLIT),
    "constants 2": Setting(Constants, ROWS, ({"seq": 33},), SPLIT),
}


def _strided(name: str, stride: int) -> Callable[[], AbstractContextManager[Any]]:
    """Returns what gives a dim of size 1 a stride, where the channels are last."""
    dense = f"{name}.contiguous(memory_format=torch.channels_last)"
    return edited(
        "codegen.variant.empty:_batch_norm_backward",
        f"plain_strides({name})",
        f"{dense}.as_strided({name}.shape, ({stride}, *{dense}.stride()[1:]))",
    )


_layout = partial(Mutant, phase="derivatives", setting="pixels")
_one = partial(Mutant, phase="attention")
_group = partial(Mutant, phase="lowering")

LAYERS = [
    _layout("a gradient's dim of size 1 has the stride of a channel", quick=True,
        plant=_strided("g", 1)),
    _layout("a gradient's dim of size 1 has the stride of a row", plant=_strided("g", 4)),
    _layout("an input's dim of size 1 has the stride of a channel", plant=_strided("x", 1)),
    _layout("an input's dim of size 1 has the stride of a row", plant=_strided("x", 4)),
    _layout("statistics of one sample are those before", plant=edited(
        "codegen.variant.empty:_batch_norm_backward", "*map(dense, args))",
        "*(a.roll(1) if x.shape[0] == 1 and i == 3 else a for i, a in enumerate(args)))")),
    _one("backward of one sample has another scale", setting="one", quick=True, plant=edited(
        "ops.attention.flash:_call_backward", "scale=scale)",
        "scale=scale * (1.1 if given.q.shape[0] == 1 else 1.0))")),
    _one("one sample sees later keys", setting="one", plant=edited(
        "ops.attention.flash:_call", "0.0, causal,", "0.0, causal and q.shape[0] > 1,")),
    _one("padding of one sample is a key later", setting="one padded", plant=edited(
        "ops.attention.flash:_added", "keep[:, None, None, :]",
        "keep.roll(int(keep.shape[0] == 1), 1)[:, None, None, :]")),
    _one("parts of one sample merged by the larger logsumexp", setting="one ring 2", plant=edited(
        "ops.attention.partial:_merge", "torch.logaddexp(lse, more_lse)",
        "(torch.logaddexp if lse.shape[0] > 1 else torch.maximum)(lse, more_lse)")),
    _one("one sample's keys before the queries are left out", setting="one gathered 2",
        plant=edited("ops.attention.flash:_split",
        "min(sight.start, k.shape[2])", "min(sight.start, k.shape[2]) * (k.shape[0] > 1)")),
    _one("one sample's norm in groups has the deviation of another", setting="kernels",
        plant=edited("codegen.variant.boxed:_group_norm_backward", "*map(dense, args))",
        "*(a.roll(1, 1) if args[0].shape[0] == 1 and i == 3 else dense(a) "
        "for i, a in enumerate(args)))")),
    _group("groups are as many as the factor that is split is long", setting="groups 2", quick=True,
        plant=edited("codegen.lower.local_ops:_grouped",
        "sympy.sympify(groups) * on.integers.length(kept) / kept.size",
        "on.integers.length(kept)")),
    _group("a rank's groups are one of all", setting="groups 2", plant=edited(
        "codegen.lower.local_ops:_grouped",
        "sympy.sympify(groups) * on.integers.length(kept) / kept.size", "sympy.Integer(1)")),
    _group("a rank's groups are twice as many", setting="groups 2", plant=edited(
        "codegen.lower.local_ops:_grouped",
        "on.integers.length(kept) / kept.size", "on.integers.length(kept) * 2 / kept.size")),
    _group("a group's mean is over all channels", setting="rows 2", plant=edited(
        "codegen.lower.local_windows:local_group_norm",
        "emit(sympy.Mul(*info.shape[1:]) / groups)", "emit(sympy.Mul(*info.shape[1:]))")),
    _group("a group's sums are a rank's own", setting="rows 2", plant=edited(
        "codegen.lower.local_windows:local_group_norm",
        "torch.ops.dcpc.all_reduce.default, (added, on.group)", "aten.mul.Scalar, (added, 2)")),
    _group("a norm in pieces forgets its bias and weight", setting="rows 2", plant=edited(
        "codegen.lower.local_windows:local_group_norm",
        "isinstance(learnt, fx.Node)", "False")),
    _group("a constant of ones is of twos", setting="constants 2", plant=edited(
        "codegen.lower.local_ops:_fill", "return copied",
        "return on.graph.call_function(aten.mul.Scalar, (copied, 2))")),
    _group("a constant is a piece of a piece", setting="constants 2", quick=True, plant=edited(
        "codegen.lower.local_ops:_fill", "return copied",
        "return on.graph.call_function(aten.cumsum.default, (copied, len(shape) - 2))")),
]  # fmt: skip
