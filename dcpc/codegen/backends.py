"""What runs a forward or backward graph: plain Python calls, or Inductor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode

from dcpc.codegen.variant import Boxed, boxed_python
from dcpc.errors import CodegenError

BACKENDS = ("eager", "inductor")


def decompositions(backend: str) -> Mapping[Any, Any]:
    """Returns op -> decomposition for a backend; eager runs ATen's own ops."""
    if backend not in BACKENDS:
        raise CodegenError(
            f"got backend={backend!r}; expected one of {', '.join(BACKENDS)}; choose one"
        )
    return select_decomp_table() if backend == "inductor" else {}


def compile_graph(
    gm: fx.GraphModule, backend: str, mode: FakeTensorMode
) -> tuple[Boxed, tuple[sympy.Basic, ...]]:
    """Returns a boxed callable, and what the backend assumed of sizes."""
    if backend == "eager":
        return boxed_python(gm), ()
    examples = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    env = mode.shape_env
    assert env is not None
    known = len(env.guards)
    # Inductor edits what it compiles. Its cache key is the module's code, so the copy must be
    # complete before the GraphModule is made: one without code gets another graph's kernels from
    # the cache.
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    with mode, tracing(TracingContext(mode)):
        compiled = compile_fx_inner(copy, examples)
    guards = tuple(g.expr for g in env.guards[known:])
    return _Inductor(compiled), guards


class _Inductor:
    """Adapts Inductor's boxed callable to a function of one list."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def __call__(self, arguments: list[Any]) -> Any:
        with torch.no_grad():
            return self.compiled(arguments)
