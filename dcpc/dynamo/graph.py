"""Wraps Dynamo's graph as a module that dcpc can trace: named dims, parameters, all outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from dcpc.dynamo.arguments import Arguments, named
from dcpc.dynamo.numbers import value_of, with_numbers
from dcpc.errors import TraceError
from dcpc.trace.loss import AllOutputs


class Captured(nn.Module):
    """The captured graph as a module with parameters, whose forward returns all tensors.

    Args:
        gm: graph module from Dynamo.
        arguments: arguments of the graph.
        examples: arguments of the first call.
        learns: whether a backward may follow.

    Attributes:
        count: number of arguments.
        checked: positions of the arguments whose layout may differ from call to call.
    """

    def __init__(
        self, gm: fx.GraphModule, arguments: Arguments, examples: Sequence[Any], learns: bool
    ) -> None:
        super().__init__()
        self.arguments = arguments
        placeholders = gm.graph.find_nodes(op="placeholder")
        made = with_numbers(gm, {i: value_of(examples[i]) for i in arguments.constants})
        for node in made.graph.find_nodes(op="get_attr"):
            name = str(node.target).partition(".")[0]
            setattr(self, name, getattr(made, name))
        # Its code alone: a GraphModule changes while it runs, and a trace would tell.
        self.code = type(made).forward
        self.count = len(placeholders)
        (returned,) = gm.graph.output_node().args
        assert isinstance(returned, tuple | list), "Dynamo returns a tuple"
        values: list[Any] = [
            n.meta["example_value"] if isinstance(n, fx.Node) else n for n in returned
        ]
        numbers = [placeholders[i] for i in arguments.constants]
        self.fixed = {
            named(n.meta["example_value"].node.expr): int(value_of(examples[i]))
            for i, n in zip(arguments.constants, numbers, strict=True)
            if isinstance(n.meta["example_value"], torch.SymInt)
        }
        self.tensors = tuple(i for i, x in enumerate(values) if isinstance(x, Tensor))
        self.numbers = tuple(None if isinstance(x, Tensor) else _number(x) for x in values)
        self._strides = [[_number(n) for n in values[i].stride()] for i in self.tensors]
        for position, name in arguments.parameters.items():
            p = examples[position].detach()
            learning = learns and examples[position].requires_grad
            self.register_parameter(name, nn.Parameter(p, requires_grad=learning))
        # Dynamo guards on a parameter's strides and conj bits, so it is passed without a check.
        bits = {i for i in arguments.parameters if examples[i].is_conj() or examples[i].is_neg()}
        self.checked = frozenset(range(self.count)) - {*arguments.parameters} | bits

    def forward(self, **inputs: Tensor) -> AllOutputs:
        """Returns all tensors that the graph returns."""
        given: list[Any] = [None] * self.count
        for position, name in self.arguments.parameters.items():
            given[position] = getattr(self, name)
        for position, name in self.arguments.inputs.items():
            given[position] = inputs[name]
        sizes = dict(zip(self.arguments.sizes, self.arguments.shape(given), strict=True))
        for position, name in self.arguments.integers.items():
            given[position] = sizes[name]
        returned = self.code(self, *given)
        return AllOutputs(returned[i] for i in self.tensors)

    def numbers_at(self, shape: Sequence[int]) -> tuple[Any, ...]:
        """Returns the graph's outputs with numbers at their places, and None for tensors."""
        sizes = {**dict(zip(self.arguments.sizes, shape, strict=True)), **self.fixed}
        return tuple(None if number is None else number(sizes) for number in self.numbers)

    def strides_at(self, shape: Sequence[int]) -> tuple[tuple[int, ...] | None, ...]:
        """Returns the strides of each tensor that the graph returns; None: unknown."""
        sizes = {**dict(zip(self.arguments.sizes, shape, strict=True)), **self.fixed}
        found: list[tuple[int, ...] | None] = []
        for strides in self._strides:
            try:
                found.append(tuple(stride(sizes) for stride in strides))
            except KeyError:  # a stride of an argument that no dim's length says
                found.append(None)
        return tuple(found)

    def returned(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the captured graph's outputs, tensors and numbers, in its order."""
        found = [*numbers]
        for position, tensor in zip(self.tensors, tensors, strict=True):
            found[position] = tensor
        return tuple(found)


# Calls that read a tensor's strides. Dynamo answers some of them itself.
_OF_MEMORY = {"stride", "storage_offset", "as_strided", "as_strided_", torch.as_strided}


def refuse_reads_of_memory(gm: fx.GraphModule) -> None:
    """Refuses a graph that reads strides of values, if its arguments are not contiguous.

    Compiled graphs get contiguous inputs.

    Raises:
        TraceError: the graph reads strides, and an argument is not contiguous.
    """
    reads = [n for n in gm.graph.nodes if n.op.startswith("call_") and n.target in _OF_MEMORY]
    values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    if reads and not all(x.is_contiguous() for x in values if isinstance(x, Tensor)):
        raise TraceError(
            f"the captured graph: got {reads[0].format_node()}, and an argument that is not "
            "contiguous; expected contiguous ones where a graph reads strides; pass x.contiguous()"
        )


def _number(value: Any) -> Callable[[Mapping[str, int]], Any]:
    """Returns a function of the dims' sizes that computes a number of the graph."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return lambda lengths: value
    expr = value.node.expr
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    symbols = {named(s): s for s in expr.free_symbols}

    def of(sizes: Mapping[str, int]) -> Any:
        return kind(expr.xreplace({s: sympy.Integer(sizes[n]) for n, s in symbols.items()}))

    return of
