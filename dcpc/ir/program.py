"""A traced model: a functional forward graph with symbolic lengths."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from dcpc.buckets import Fixed, Sizes


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of a node's value, known before it runs.

    Attributes:
        shape: size of each dim, as an expression of the bucket's named dims.
        dtype: element type.
        requires_grad: whether a gradient flows through the value.
    """

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def numel(self) -> sympy.Expr:
        """Number of elements."""
        return sympy.Mul(*self.shape)

    @property
    def size_bytes(self) -> sympy.Expr:
        """Bytes of a dense tensor of this shape."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Program:
    """A model captured once: a functional forward graph from its inputs to its outputs.

    For training, the first output is the loss, a scalar; a program may return other tensors.

    The graph module's placeholders are, in order: parameters, buffers and constants, inputs. It is
    read-only: a later phase works on a copy.

    Attributes:
        gm: the forward graph; its outputs are `outputs`.
        parameters: placeholder name -> the parameter's name in the user's module.
        buffers: placeholder name -> the buffer's name in the user's module.
        constants: placeholder name -> tensor that the model's code creates.
        inputs: placeholder name -> the name of the user's argument.
        symbols: dim name -> the symbol that stands for it in every expression.
        info: node name -> shape and dtype of its value; nodes without a tensor value are absent.
        scalars: name of a node whose value is an integer size -> its expression.
        outputs: names of the nodes whose values the program returns, the loss first.
        begins: positions of the outputs at which backward begins; empty: no backward.
        hints: dim name -> the size it had in the trace.
        graph_hash: hash of the graph; plans carry it.
        zero_gradients: placeholders of parameters whose gradient is zero: the plain model's loss
            depends on them, the traced graph does not.
        notes: remarks for the user, such as masks that were not recognised, a line each.
        pieces: whether outputs other than the loss stay sharded over the ranks.
        assumptions: relations between dims that the trace relied on; the graph was verified to be
            right at every bucket.
        least: dim name -> shortest length for which the graph was traced.
        fixed: dims that the graph has as numbers, with their lengths.
        statistics: placeholders of the buffers of which the last outputs are the new values.
    """

    gm: fx.GraphModule
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    inputs: Mapping[str, str]
    symbols: Mapping[str, sympy.Symbol]
    info: Mapping[str, TensorInfo]
    scalars: Mapping[str, sympy.Expr]
    outputs: tuple[str, ...]
    begins: tuple[int, ...]
    hints: Mapping[str, int]
    graph_hash: str
    zero_gradients: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    pieces: bool = False
    assumptions: tuple[sympy.Basic, ...] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    fixed: Fixed = frozenset()
    statistics: tuple[str, ...] = ()

    @property
    def sizes(self) -> set[sympy.Expr]:
        """Every size that occurs in a value's shape, and every integer size that a node makes."""
        return {s for info in self.info.values() for s in info.shape} | {*self.scalars.values()}

    @property
    def whole_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that each rank returns whole."""
        split = self.results[1:] if self.pieces else ()
        return tuple(n for n in self.outputs if n not in split)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the outputs that a caller gets: all but new statistics."""
        return self.outputs[: len(self.outputs) - len(self.statistics)]

    @property
    def loss(self) -> str:
        """Name of the node that computes the loss, or the first output."""
        return self.outputs[0]

    @property
    def learning(self) -> tuple[str, ...]:
        """Placeholders that receive a gradient: parameters, then inputs."""
        return tuple(n for n in (*self.parameters, *self.inputs) if self.info[n].requires_grad)

    def only(self, kept: Set[str], **changed: Any) -> Program:
        """Returns a program that has of its tensors and sizes those of these names.

        Args:
            kept: names of nodes.
            changed: other fields that differ.
        """
        fields = "parameters", "buffers", "constants", "info", "scalars"
        own: dict[str, Any] = {
            f: {n: x for n, x in getattr(self, f).items() if n in kept} for f in fields
        }
        return replace(self, **own, zero_gradients=self.zero_gradients & kept, **changed)

    def dims(self, sizes: Sizes) -> dict[sympy.Symbol, int]:
        """Returns symbol -> length; a model without a batch has no symbol for it."""
        return {self.symbols[n]: size for n, size in sizes.items() if n in self.symbols}

    def holds_at(self, sizes: Sizes) -> bool:
        """Whether the trace's assumptions hold at some lengths, for any batch.

        Args:
            sizes: length of each named dim, in its range: `least` up to the largest bucket's; the
                batch left out.
        """
        dims = {self.symbols[n]: sympy.Integer(s) for n, s in sizes.items() if n in self.symbols}
        return all(each.subs(dims) == sympy.true for each in self.assumptions)


def call_of(node: fx.Node) -> fx.Node:
    """Returns the call that computes a node's tensor: the node, or the source of its `getitem`.

    `topk` returns a tuple, which is not a tensor value: `getitem(topk, 1)` stands for the call and
    has its operands, so that each result is sharded independently.
    """
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    return node


def is_tuple(node: fx.Node, info: Mapping[str, TensorInfo]) -> bool:
    """Returns whether a node is a tuple of results, each a tensor with a node of its own."""
    return bool(node.users) and all(
        user.target is operator.getitem and user.name in info for user in node.users
    )


def tensor_operands(node: fx.Node, info: Mapping[str, TensorInfo]) -> list[fx.Node]:
    """Returns the tensor arguments of a call in order, repeats and members of lists included.

    A `getitem` of a tuple has the operands of the call that computes the tuple.
    """
    call = call_of(node)
    found: list[fx.Node] = []
    fx.node.map_arg((call.args, call.kwargs), found.append)
    return [operand for operand in found if operand.name in info]
