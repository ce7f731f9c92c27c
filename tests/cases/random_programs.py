"""Small random programs of the ops that language models are made of, built without a trace."""

from __future__ import annotations

import random
from collections.abc import Sequence

import sympy
import torch
from torch import fx

import dcpc.ops.attention  # noqa: F401 - registers the op
from dcpc.ir import Program, TensorInfo

aten = torch.ops.aten
BATCH, SEQ = sympy.symbols("batch seq", integer=True, positive=True)
HEADS, WIDTH = 4, 16


class ProgramBuilder:
    """Appends calls to a forward graph, with what is known of each value.

    Example:
        b = ProgramBuilder()
        x = b.call(aten.linear.default, (b.given("x", (BATCH, SEQ, 16)), b.weight(16, 16)), ...)
        program = b.program(x)
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.info: dict[str, TensorInfo] = {}
        self.parameters: dict[str, str] = {}
        self.inputs: dict[str, str] = {}
        self.given: list[fx.Node] = []

    def input(self, shape: Sequence[sympy.Expr | int], grad: bool = False) -> fx.Node:
        """Appends a model input, or with `grad` a parameter."""
        names = self.parameters if grad else self.inputs
        name = f"{'w' if grad else 'x'}{len(names)}"
        if self.given:
            with self.graph.inserting_after(self.given[-1]):
                node = self.graph.placeholder(name)
        else:
            node = self.graph.placeholder(name)
        self.given.append(node)
        names[node.name] = name
        return self._known(node, shape, grad)

    def call(
        self, op: object, args: tuple[object, ...], shape: Sequence[sympy.Expr | int]
    ) -> fx.Node:
        """Appends a call whose result has this shape."""
        nodes = [a for a in fx.graph.map_arg(args, lambda n: n) if isinstance(a, fx.Node)]
        assert callable(op)
        node = self.graph.call_function(op, args)
        return self._known(node, shape, any(self.info[n.name].requires_grad for n in nodes))

    def _known(self, node: fx.Node, shape: Sequence[sympy.Expr | int], grad: bool) -> fx.Node:
        sizes = tuple(sympy.sympify(s) for s in shape)
        self.info[node.name] = TensorInfo(sizes, torch.float32, grad)
        return node

    def linear(self, x: fx.Node, width: int) -> fx.Node:
        """Appends x @ w.T of a new parameter."""
        *rows, inner = self.info[x.name].shape
        weight = self.input((width, inner), grad=True)
        return self.call(aten.linear.default, (x, weight), (*rows, width))

    def attention(self, q: fx.Node, k: fx.Node, v: fx.Node) -> fx.Node:
        """Appends causal attention of HEADS heads over `[batch, seq, WIDTH]`."""
        split, head = (BATCH, SEQ, HEADS, WIDTH // HEADS), (BATCH, HEADS, SEQ, WIDTH // HEADS)
        parts = []
        for x in (q, k, v):
            y = self.call(aten.view.default, (x, list(split)), split)
            parts.append(self.call(aten.transpose.int, (y, 1, 2), head))
        o = self.call(torch.ops.dcpc.attention.default, tuple(parts), head)
        o.kwargs = {"scale": head[-1] ** -0.5, "after": 0}
        o = self.call(aten.transpose.int, (o, 1, 2), split)
        return self.call(aten.reshape.default, (o, [BATCH, SEQ, WIDTH]), (BATCH, SEQ, WIDTH))

    def program(self, result: fx.Node) -> Program:
        """Returns the program whose loss is the sum of a value."""
        loss = self.call(aten.sum.default, (result,), ())
        self.graph.output((loss,))
        return Program(
            gm=fx.GraphModule(torch.nn.Module(), self.graph),
            parameters=self.parameters,
            buffers={},
            constants={},
            inputs=self.inputs,
            symbols={"batch": BATCH, "seq": SEQ},
            info=self.info,
            scalars={},
            outputs=(loss.name,),
            begins=(0,) if self.info[loss.name].requires_grad else (),
            hints={"batch": 2, "seq": 8},
            graph_hash=str(self.graph),
        )


def random_program(seed: int, calls: int = 8) -> Program:
    """Returns a random program over values of shape `[batch, seq, WIDTH]`.

    Values are used again often, so that many are wanted in several forms by several consumers.
    """
    rng = random.Random(seed)
    b = ProgramBuilder()
    shape = (BATCH, SEQ, WIDTH)
    values = [b.linear(b.input(shape), WIDTH)]
    for _ in range(calls):
        x, y, z = (rng.choice(values[-4:]) for _ in range(3))
        match rng.choice(["linear", "linear", "add", "mul", "softmax", "attention", "relu"]):
            case "linear":
                new = b.linear(x, WIDTH)
            case "add":
                new = b.call(aten.add.Tensor, (x, y), shape)
            case "mul":
                new = b.call(aten.mul.Tensor, (x, y), shape)
            case "softmax":
                new = b.call(aten.softmax.int, (x, rng.choice([0, 1, 2])), shape)
            case "attention":
                new = b.attention(x, y, z)
            case _:
                new = b.call(aten.relu.default, (x,), shape)
        values.append(new)
    unused = [v for v in values if not v.users]
    total = unused[0]
    for value in unused[1:]:
        total = b.call(aten.add.Tensor, (total, value), shape)
    return b.program(total)
