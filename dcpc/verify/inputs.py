"""Draws inputs to compare at, valid for the model's own graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dcpc.buckets import Buckets, Sizes
from dcpc.errors import BucketError
from dcpc.ir import Program

aten = torch.ops.aten

Example = Callable[[Sizes], Mapping[str, Tensor]]

# "wide": indices up to the length of what they index, values the graph compares with, masks with
# holes, a sample that is masked but for its first element. "ignored": of those values only labels
# that a loss ignores, and no such sample; where the model refuses the first or makes no numbers of
# it. "narrow": 0 and 1, numbers in (0, 1), masks of ones; where that does not do, either.
KINDS = ("wide", "ignored", "narrow")

# Ops whose result has the elements of their first operand.
_MOVES = {
    *("view", "reshape", "transpose", "permute", "slice", "select", "unsqueeze", "squeeze", "t"),
    *("expand", "clone", "contiguous", "_to_copy", "flatten", "alias", "detach", "narrow", "to"),
    *("constant_pad_nd", "_unsafe_view", "unflatten", "pad", "where", "masked_fill", "clamp"),
}
_COMPARES = ("eq", "ne")
SPECIAL_SHARE = 4  # one element in so many has a value that the model treats apart


@dataclass(frozen=True, slots=True)
class _Range:
    """Valid values of an integer input.

    Attributes:
        count: upper bound: values are below it.
        special: values that the graph compares it with, such as a loss's ignored label.
        ignored: values among these that losses ignore.
    """

    count: int
    special: tuple[int, ...]
    ignored: tuple[int, ...]


def _range(source: fx.Node, program: Program) -> _Range:
    """Returns the values of an integer placeholder that a graph can take."""
    lengths: list[int] = []
    special: list[int] = []
    ignored: list[int] = []
    todo, seen = [source], {source}
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.op != "call_function" or user in seen:
                continue
            length = _length(user, node, program)
            lengths += [] if length is None else [length]
            special += _compared(user, node)
            ignored += _ignored(user, node)
            if _op(user) in _MOVES:
                seen.add(user)
                todo.append(user)
    every, labels = (tuple(dict.fromkeys(n)) for n in ([*ignored, *special], ignored))
    return _Range(min(lengths, default=2), every, labels)


def _op(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _compared(user: fx.Node, value: fx.Node) -> list[int]:
    """Returns the numbers that a call compares a value with."""
    compares = _op(user) in _COMPARES and user.args[0] is value
    return [user.args[1]] if compares and type(user.args[1]) is int else []


def _ignored(user: fx.Node, value: fx.Node) -> list[int]:
    """Returns the label that a loss ignores."""
    losses = _op(user) in ("nll_loss_nd", "cross_entropy_loss") and user.args[1] is value
    return [user.args[4]] if losses and len(user.args) > 4 and type(user.args[4]) is int else []


def _length(user: fx.Node, index: fx.Node, program: Program) -> int | None:
    """Returns the number of values that an index may have for this call, None if unknown."""
    args: Any = user.args
    of: Any = None
    dim = 0
    if user.target is aten.embedding.default and args[1] is index:
        of = args[0]
    elif user.target in (aten.index_select.default, aten.gather.default) and args[2] is index:
        of, dim = args[0], args[1]
    elif user.target is aten.index.Tensor and index in args[1]:
        of, dim = args[0], args[1].index(index)
    elif _op(user) in ("nll_loss_nd", "cross_entropy_loss") and args[1] is index:
        of, dim = args[0], min(1, len(program.info[args[0].name].shape) - 1)
    if of is None or of.name not in program.info:
        return None
    size = program.info[of.name].shape[dim]
    return int(size) if size.is_Integer and size > 1 else None


def counts(inputs: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the weight of a micro-batch by each `weight=` that can be named, by its text."""
    found = {}
    for name, x in inputs.items():
        if x.ndim > 1 and not x.is_floating_point() and x.dtype != torch.bool:
            labels = x.long() != -100
            found[repr(name)] = float(labels.sum())
            found[f"dcpc.CountLabels({name!r}, shift=1)"] = float(labels[..., 1:].sum())
    return found


def draw(
    program: Program, buckets: Buckets, sizes: Mapping[str, int], kind: str, device: torch.device
) -> dict[str, Tensor]:
    """Returns inputs of one shape, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    nodes = {n.name: n for n in program.gm.graph.nodes}
    ranges = {n: _range(nodes[p], program) for p, n in program.inputs.items() if p in nodes}
    wide = kind != "narrow"
    found: dict[str, Tensor] = {}
    for name, spec in buckets.inputs.items():
        shape = spec.shape(sizes)
        value = torch.rand(shape, generator=generator, dtype=torch.float64)
        if "mask" in name or spec.dtype == torch.bool:
            value = value < 0.8 if wide else torch.ones(shape, dtype=torch.bool)
            if kind == "wide" and value.ndim > 1:
                if len(value) > 1:
                    value[-1] = False
                else:  # of a lone sample so few are drawn that by chance none is hidden
                    value[..., value.shape[-1] // 2] = False
            if value.ndim:
                value[..., 0] = True
        elif spec.dtype.is_floating_point or spec.dtype.is_complex:
            if wide:
                value = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            own = ranges.get(name, _Range(2, (), ()))
            value = (value * (own.count if wide else 2)).long()
            if wide and value.ndim > 1:  # in order, as the numbers of packed sequences are
                value[0] = value[0].sort(-1).values
            special = {"wide": own.special, "ignored": own.ignored}.get(kind, ())
            for place, number in enumerate(special):
                value.view(-1)[1 + place :: SPECIAL_SHARE + place] = number
        found[name] = value.to(spec.dtype).to(device)
    return found


def lowest(program: Program) -> torch.dtype:
    """Returns the floating dtype of a program that rounds most."""
    found = {i.dtype for i in program.info.values() if i.dtype.is_floating_point}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def float64_specs(buckets: Buckets) -> Buckets:
    """Returns the same buckets with every floating input in float64."""
    inputs = {}
    for name, spec in buckets.inputs.items():
        text = str(spec)
        if spec.dtype.is_floating_point:
            text = "float64" + text[text.index("[") :]
        inputs[name] = text
    return Buckets(inputs, [b.sizes for b in buckets.buckets])


def example_inputs(
    buckets: Buckets, sizes: Sizes, example: Example | None = None
) -> dict[str, Tensor]:
    """Returns inputs of one shape, the same on every rank.

    Args:
        buckets: specs of the inputs.
        sizes: length of every dim, batch included.
        example: function that returns some of the inputs for a shape; others are drawn: normal
            numbers, integers 0 and 1, ones where a name has "mask" in it.

    Raises:
        BucketError: `example` returns an input that there is not, or one of another shape.
    """
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, spec in buckets.inputs.items():
        shape = spec.shape(sizes)
        if "mask" in name:
            found[name] = torch.ones(shape, dtype=spec.dtype)
        elif spec.dtype.is_floating_point or spec.dtype.is_complex:
            found[name] = torch.randn(shape, generator=generator, dtype=spec.dtype)
        else:
            found[name] = torch.randint(0, 2, shape, generator=generator).to(spec.dtype)
    if example is not None:
        torch.manual_seed(0)
        for name, value in example(sizes).items():
            found[name] = _checked(name, value, buckets, sizes)
    return found


def _checked(name: str, value: Tensor, buckets: Buckets, sizes: Sizes) -> Tensor:
    spec = buckets.inputs.get(name)
    if spec is None or tuple(value.shape) != spec.shape(sizes):
        got = f"'{name}' of shape {tuple(value.shape)}"
        want = f"one of {', '.join(buckets.inputs)}" if spec is None else str(spec.shape(sizes))
        raise BucketError(
            f"the example at {dict(sizes)} returned {got}; expected {want}; correct the function"
        )
    return value.to(spec.dtype)
