"""A lowered forward graph becomes one joint forward-and-backward graph with symbolic sizes.

torch differentiates it; no code here knows a derivative. Torch's private tracing API is wrapped in this
file alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from dcpc.codegen.lower import Lowered
from dcpc.ir import Program

# Sizes in the trace, all different, none of them 0 or 1, which torch would fix in the graph.
HINTS = (53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127)


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph: placeholders as the lowered graph's, then the loss's gradient.

    Attributes:
        gm: the graph; outputs: the loss, then a gradient (or None) for each trainable parameter.
        primals: names of the placeholders, without the loss's gradient.
        tangent: name of the placeholder of the loss's gradient.
        forward: names of the nodes that the forward pass made.
        owner: name of a forward node -> name of the program's node it was made for.
        trainable: names of the parameters' placeholders that outputs 1.. are gradients of.
        names: torch symbol -> expression of dims and pieces.
        guards: what torch assumed of sizes while tracing, over `names`' expressions.
        fake_mode: of the values in the graph.
    """

    gm: fx.GraphModule
    primals: tuple[str, ...]
    tangent: str
    forward: frozenset[str]
    owner: Mapping[str, str]
    trainable: tuple[str, ...]
    names: Mapping[sympy.Symbol, sympy.Expr]
    guards: tuple[sympy.Basic, ...]
    fake_mode: FakeTensorMode


class _Tagging(fx.Interpreter):
    """Notes which nodes of the traced graph each node of the lowered graph made."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.owner: dict[str, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        mode = get_proxy_mode()
        assert mode is not None, "not under make_fx"
        for made in reversed(mode.tracer.graph.nodes):
            if made.op == "placeholder" or made.name in self.owner:
                break
            self.owner[made.name] = n.meta.get("dcpc", n.name)
        return result


def make_joint(
    program: Program,
    lowered: Lowered,
    tensors: Mapping[str, Tensor],
    decompositions: Mapping[Any, Any] | None = None,
) -> Joint:
    """Returns the joint graph of a lowered program.

    Args:
        program: the traced model.
        lowered: its graph for one rank.
        tensors: placeholder name -> parameter, buffer or constant (its values are not read).
        decompositions: op -> decomposition, for a backend that wants smaller ops.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    integers, names = _symbolic_integers(env, lowered)
    trainable = tuple(n for n in program.parameters if program.info[n].requires_grad)
    placeholders = [n.name for n in lowered.gm.graph.nodes if n.op == "placeholder"]
    arguments = [_fake(n, program, tensors, mode, integers) for n in placeholders]
    with mode:
        loss_info = program.info[program.loss]
        device = next((a.device for a in arguments if isinstance(a, Tensor)), torch.device("cpu"))
        tangent = torch.empty((), dtype=loss_info.dtype, device=device)
    tagging = _Tagging(lowered.gm)
    where = [placeholders.index(n) for n in trainable]

    def joint(*args: Any) -> list[Any]:
        *primals, tangent = args
        with torch.enable_grad():
            loss = tagging.run(*primals)
        wanted = [primals[i] for i in where]
        grads = torch.autograd.grad([loss], wanted, [tangent], allow_unused=True)
        return [loss, *grads]

    with mode, enable_python_dispatcher():
        gm = make_fx(
            joint,
            decomposition_table=dict(decompositions or {}),
            tracing_mode="real",
            _allow_non_fake_inputs=True,
        )(*arguments, tangent)
    made = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    gm.graph.eliminate_dead_code()
    gm.recompile()
    rename = dict(zip(placeholders, made, strict=False))
    guards = tuple(g.expr.subs(names) for g in env.guards)
    fixed = tuple(sympy.Eq(names[s], e.subs(names)) for s, e in env.replacements.items() if s in names)
    return Joint(
        gm=gm,
        primals=tuple(made[:-1]),
        tangent=made[-1],
        forward=frozenset(tagging.owner),
        owner=tagging.owner,
        trainable=tuple(rename[n] for n in trainable),
        names=names,
        guards=(*guards, *fixed),
        fake_mode=mode,
    )


def _symbolic_integers(
    env: ShapeEnv, lowered: Lowered
) -> tuple[dict[str, torch.SymInt], dict[sympy.Symbol, sympy.Expr]]:
    integers: dict[str, torch.SymInt] = {}
    names: dict[sympy.Symbol, sympy.Expr] = {}
    for position, integer in enumerate(lowered.integers):
        hint = HINTS[position % len(HINTS)] + 128 * (position // len(HINTS))
        source = ConstantSource(f"__dcpc_{integer.name}")
        symbol = env.create_symbol(
            hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        value = env.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(value, torch.SymInt), f"{integer.name} was fixed"
        integers[integer.name] = value
        names[symbol] = integer.symbol
    return integers, names


def _fake(
    name: str,
    program: Program,
    tensors: Mapping[str, Tensor],
    mode: FakeTensorMode,
    integers: Mapping[str, torch.SymInt],
) -> Any:
    if name in integers:
        return integers[name]
    info = program.info[name]
    if name in tensors:
        fake = mode.from_tensor(tensors[name].detach(), static_shapes=True)
        return fake.requires_grad_(info.requires_grad)
    symbols = {str(program.symbols[n]): integers[n] for n in program.symbols}
    shape = [_evaluate(size, symbols) for size in info.shape]
    with mode:
        return torch.empty(shape, dtype=info.dtype)


def _evaluate(expr: sympy.Expr, symbols: Mapping[str, torch.SymInt]) -> Any:
    """Returns a size expression as a SymInt."""
    if expr.is_Integer:
        return int(expr)
    function = sympy.lambdify(list(expr.free_symbols), expr, modules=[{"floor": _floor}, "math"])
    return function(*[symbols[str(s)] for s in expr.free_symbols])


def _floor(value: Any) -> Any:
    return value.__floor__()
