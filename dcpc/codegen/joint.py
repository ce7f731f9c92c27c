"""A lowered forward graph becomes one joint forward-and-backward graph with symbolic sizes.

torch differentiates it; no code here knows a derivative. Torch's private tracing API is wrapped in
this file alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
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
from dcpc.errors import CodegenError
from dcpc.ir import Program

# Sizes of pieces in the trace, all different, none of them 0 or 1, which torch would fix in the
# graph. Dims have the sizes of the program's own trace: a model may take no others (a position
# table of 32 rows).
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
    hints: tuple[int, ...] = (),
) -> Joint:
    """Returns the joint graph of a lowered program.

    Args:
        program: the traced model.
        lowered: its graph for one rank.
        tensors: placeholder name -> parameter, buffer or constant (its values are not read).
        decompositions: op -> decomposition, for a backend that wants smaller ops.
        hints: size of each integer in the trace, where the usual ones break a guard.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    integers, names = _symbolic_integers(env, lowered, hints or _hints(program, lowered))
    trainable = tuple(n for n in program.parameters if program.info[n].requires_grad)
    placeholders = [n.name for n in lowered.gm.graph.nodes if n.op == "placeholder"]
    device = next((t.device for t in tensors.values() if not t.is_meta), torch.device("cpu"))
    arguments = [_fake(n, program, tensors, mode, integers, device) for n in placeholders]
    with mode:
        loss_info = program.info[program.loss]
        tangent = torch.empty((), dtype=loss_info.dtype, device=device)
    tagging = _Tagging(lowered.gm)
    where = [placeholders.index(n) for n in trainable]

    def joint(*args: Any) -> list[Any]:
        *primals, tangent = args
        with torch.enable_grad():
            loss = tagging.run(*primals)
        wanted = [primals[i] for i in where]
        grads = torch.autograd.grad([loss], wanted, [tangent], allow_unused=True)
        # The plain model's loss depends on these, and ours does not any more.
        filled = [
            torch.zeros_like(primal) if grad is None and name in program.zero_gradients else grad
            for name, primal, grad in zip(trainable, wanted, grads, strict=True)
        ]
        return [loss, *filled]

    with mode, enable_python_dispatcher():
        gm = make_fx(
            joint,
            decomposition_table=dict(decompositions or {}),
            tracing_mode="real",
            _allow_non_fake_inputs=True,
        )(*arguments, tangent)
    _functionalise(gm.graph)
    gm.graph.eliminate_dead_code()
    graph, renamed = _named_placeholders(gm.graph, [*placeholders, "loss_gradient"])
    owner = {renamed[n]: o for n, o in tagging.owner.items() if n in renamed}
    guards = tuple(g.expr.subs(names) for g in env.guards)
    fixed = tuple(
        sympy.Eq(names[s], e.subs(names)) for s, e in env.replacements.items() if s in names
    )
    primals = tuple(n.name for n in graph.nodes if n.op == "placeholder")
    return Joint(
        gm=fx.GraphModule(gm, graph),
        primals=primals[:-1],
        tangent=primals[-1],
        forward=frozenset(owner),
        owner=owner,
        trainable=tuple(primals[i] for i in where),
        names=names,
        guards=(*guards, *fixed),
        fake_mode=mode,
    )


def _hints(program: Program, lowered: Lowered) -> tuple[int, ...]:
    """Returns a size for each integer: of dims that of the program's trace, all different.

    A quotient has what follows from its dims, lest one such as rows of patches do not fit the rows.
    """
    taken = set(program.hints.values())
    unused = (h + 128 * k for k in count() for h in HINTS if h + 128 * k not in taken)
    dims = {i.name: program.hints.get(i.name, 0) for i in lowered.integers if i.role == "dim"}
    hints: dict[sympy.Symbol, int] = {}
    for i in lowered.integers:
        if i.role == "quotient":
            hints[i.symbol] = int(i.size.subs(hints))
        else:
            hints[i.symbol] = h if (h := dims.get(i.name, 0)) > 1 else next(unused)
    return tuple(hints.values())


def _symbolic_integers(
    env: ShapeEnv, lowered: Lowered, hints: tuple[int, ...]
) -> tuple[dict[str, torch.SymInt], dict[sympy.Symbol, sympy.Expr]]:
    integers: dict[str, torch.SymInt] = {}
    names: dict[sympy.Symbol, sympy.Expr] = {}
    for integer, hint in zip(lowered.integers, hints, strict=True):
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
    device: torch.device,
) -> Any:
    if name in integers:
        return integers[name]
    info = program.info[name]
    if name in tensors:
        held = tensors[name].detach()
        if held.is_meta:  # of a model that is planned for and not run
            with mode:
                fake = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype)
        else:
            fake = mode.from_tensor(held, static_shapes=True)
        return fake.requires_grad_(info.requires_grad)
    symbols = {str(program.symbols[n]): integers[n] for n in program.symbols}
    shape = [_evaluate(size, symbols) for size in info.shape]
    with mode:
        return torch.empty(shape, dtype=info.dtype, device=device)


def _evaluate(expr: sympy.Expr, symbols: Mapping[str, torch.SymInt]) -> Any:
    """Returns a size expression as a SymInt."""
    if expr.is_Integer:
        return int(expr)
    function = sympy.lambdify(list(expr.free_symbols), expr, modules=[{"floor": _floor}, "math"])
    return function(*[symbols[str(s)] for s in expr.free_symbols])


def _floor(value: Any) -> Any:
    return value.__floor__()


def _named_placeholders(graph: fx.Graph, names: list[str]) -> tuple[fx.Graph, dict[str, str]]:
    """Returns a copy with the program's names for placeholders, and old -> new names."""
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    wanted = iter(names)
    for node in graph.nodes:
        if node.op == "placeholder":
            made[node] = copy.placeholder(next(wanted))
            made[node].meta = dict(node.meta)
        else:
            made[node] = copy.node_copy(node, lambda n: made[n])
    return copy, {old.name: new.name for old, new in made.items()}


def _functionalise(graph: fx.Graph) -> None:
    """Replaces `x.add_(y)` by `z = x.add(y)`, and x by z in all that comes after.

    torch's own composite ops (rms_norm) leave such calls; a graph that is cut in two and partly run
    again must have none.
    """
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        packet = getattr(torch.ops.aten, schema.name.split("::")[1].rstrip("_"), None)
        functional = getattr(packet, node.target._overloadname, None)
        target = node.args[0]
        if functional is None or target.op == "placeholder" or _is_view(target):
            raise CodegenError(
                f"node {node.name} writes to its input by {node.target}; expected an op that "
                "returns a new tensor; replace it in the model's code"
            )
        node.target = functional
        target.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: user > node)


def _is_view(node: fx.Node) -> bool:
    """Whether a node's memory is that of one of its operands."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return False
    storage = value.untyped_storage()._cdata
    sources = [s.meta.get("val") for s in node.all_input_nodes]
    return any(isinstance(s, Tensor) and s.untyped_storage()._cdata == storage for s in sources)
