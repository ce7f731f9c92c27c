"""Compiles forward and backward graphs with a backend: plain Python calls, or Inductor.

Inductor is imported when it is first asked for: it takes 1.3 s, and `eager` never needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import sympy
from torch import fx
from torch._subclasses import FakeTensorMode

from dcpc.codegen.variant.boxed import Boxed, boxed_python
from dcpc.errors import check_choice

BACKENDS = ("eager", "inductor")


def decompositions(backend: str) -> Mapping[Any, Any]:
    """Returns op -> decomposition for a backend; empty for eager, which runs ATen's ops."""
    check_choice("got backend=", backend, BACKENDS)
    if backend == "eager":
        return {}
    from dcpc.codegen.variant import inductor

    return inductor.decompositions()


def compile_graphs(
    graphs: Sequence[fx.GraphModule],
    backend: str,
    mode: FakeTensorMode,
    present: Set[sympy.Symbol] = frozenset(),
) -> list[tuple[Boxed, tuple[sympy.Basic, ...]]]:
    """Returns the result of `compile_graph` for each graph, faster than one by one."""
    if backend == "eager":
        return [compile_graph(gm, backend, mode, present) for gm in graphs]
    from dcpc.codegen.variant import inductor

    with inductor.together():
        return [compile_graph(gm, backend, mode, present) for gm in graphs]


def compile_graph(
    gm: fx.GraphModule, backend: str, mode: FakeTensorMode, present: Set[sympy.Symbol] = frozenset()
) -> tuple[Boxed, tuple[sympy.Basic, ...]]:
    """Returns a boxed callable, and the backend's assumptions about sizes.

    Args:
        gm: graph to compile; not changed.
        backend: name in `BACKENDS`.
        mode: fake mode of the graph's values.
        present: torch's symbols of sizes that are never 0.
    """
    if backend == "eager":
        return boxed_python(gm), ()
    from dcpc.codegen.variant import inductor

    return inductor.compile_graph(gm, mode, present)
