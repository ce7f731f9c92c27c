"""Compiles graphs with Inductor, keeping the partition's order of calls and ops' layouts."""

from __future__ import annotations

import logging
import math
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor import config, lowering
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.cpp import CppKernel
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError, LoweringException
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from dcpc.codegen.variant.boxed import Boxed
from dcpc.codegen.variant.flash_calls import FLASH, FLASH_BACKWARD, spell_attention
from dcpc.errors import CodegenError
from dcpc.fx.torch_api.torch_inductor import CAN_FUSE, LAYOUTS, LOWERINGS, SUMS, WAIT, settings

log = logging.getLogger(__name__)

PATIENCE_S = 10.0  # compiling that takes longer is told, once a process
TOLD: list[str] = []


def decompositions() -> Mapping[Any, Any]:
    """Returns op -> Inductor's decomposition."""
    return select_decomp_table()


def compile_graph(
    gm: fx.GraphModule, mode: FakeTensorMode, present: Set[sympy.Symbol] = frozenset()
) -> tuple[Boxed, tuple[sympy.Basic, ...]]:
    """Returns a boxed callable, and Inductor's assumptions about sizes; see `backends.py`.

    An op for which Inductor has no kernel at symbolic sizes runs as torch's own.

    Raises:
        CodegenError: Inductor cannot compile the graph.
    """
    env = mode.shape_env
    assert env is not None
    known = len(env.guards)
    own = {op: lowering.fallback_handler(op, add_to_fallback_set=False) for op in AT_ONE_SIZE}
    while True:
        edited = _copied(gm, mode, present)
        try:
            with LOWERINGS.extended(own):
                sizes, all_known = _add_sizes(edited)
                compiled = _Inductor(_compiled(edited, mode, cached=all_known), sizes)
            return compiled, tuple(g.expr for g in env.guards[known:])
        except InductorError as error:
            op = _without_kernel(error, gm)
            if op is None or op in own:
                raise CodegenError(
                    f"Inductor cannot compile a graph of the model: got {_first_line(error)}; "
                    'expected a graph that it compiles; take backend="eager", or replace the op in '
                    "the model's code"
                ) from error
            log.info("%s runs as torch's own kernel: %s", op, _first_line(error))
            own[op] = lowering.fallback_handler(op, add_to_fallback_set=False)


def _copied(gm: fx.GraphModule, mode: FakeTensorMode, present: Set[sympy.Symbol]) -> fx.GraphModule:
    """Returns a copy of the graph for Inductor, which edits it, with attention as kernel calls.

    Inductor's cache key is the module's code, so the copy must be complete before the GraphModule
    is made: a module without code would get another graph's kernels from the cache.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    spell_attention(graph, mode, present)
    _fix_layouts(graph)
    return fx.GraphModule(gm, graph)


def _add_sizes(gm: fx.GraphModule) -> tuple[tuple[tuple[int, int], ...], bool]:
    """Adds an input for each symbol of the tensors' sizes that is not an integer input already.

    Inductor's cache stores assumptions about sizes as a formula of integer inputs alone. An
    assumption about another size, such as that it is 13, is lost there: the graph was reused at any
    size.

    Returns:
        Index of the input and dim for each new size, and whether no symbol is left.
    """
    given = gm.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in given]
    known = {v.node.expr for v in values if isinstance(v, torch.SymInt)}
    found: dict[sympy.Basic, tuple[int, int]] = {}
    used: set[sympy.Basic] = set()
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            used |= getattr(getattr(value, "node", None), "expr", sympy.S.Zero).free_symbols
            continue
        for d, size in enumerate((*value.shape, *value.stride(), value.storage_offset())):
            expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.S.Zero
            used |= expr.free_symbols
            if expr.is_Symbol and d < value.ndim and expr not in known:
                found.setdefault(expr, (i, d))
    with gm.graph.inserting_after(given[-1]) if given else gm.graph.inserting_before(None):
        for number, (i, d) in reversed(list(enumerate(found.values()))):
            node = gm.graph.placeholder(f"size_{number}")
            node.meta["val"] = values[i].shape[d]
    gm.recompile()
    return tuple(found.values()), used <= known | found.keys()


def _compiled(gm: fx.GraphModule, mode: FakeTensorMode, cached: bool) -> Any:
    examples = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    order = dict(IN_ORDER)
    with ExitStack() as stack:
        if CAN_FUSE.usable():
            order["inductor_choices_class"] = InOrder
            stack.enter_context(V.set_choices_handler(InOrder()))
        caching = {"fx_graph_cache": config.fx_graph_cache and cached}
        stack.enter_context(config.patch(settings(order | _width(examples)) | caching))
        stack.enter_context(LAYOUTS.extended(AS_THEY_LIE))
        stack.enter_context(SUMS.put(_sums_in_parts))
        stack.enter_context(mode)
        stack.enter_context(tracing(TracingContext(mode)))
        return compile_fx_inner(gm, examples)


def _width(examples: Sequence[Any]) -> dict[str, Any]:
    """Returns Inductor's setting for the register width of the CPU, in bits.

    Inductor detects that width, but its cache key has the setting alone: code written for another
    processor would be compiled for this one, and give other numbers, or NaN.
    """
    if not any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in examples):
        return {}
    return {"cpp.simdlen": pick_vec_isa().bit_width()}


def _without_kernel(error: InductorError, gm: fx.GraphModule) -> OpOverload | None:
    """Returns the op that Inductor failed to lower; None if it failed elsewhere."""
    if not isinstance(error.inner_exception, LoweringException):
        return None
    calls = (n.target for n in gm.graph.nodes if isinstance(n.target, OpOverload))
    return next((op for op in calls if f"target: {op}\n" in str(error)), None)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _sums_in_parts(kernel: CppKernel, reduction: str, dtype: torch.dtype, _: bool) -> bool:
    """Whether a kernel sums in parts of 4,096 addends and adds these sums, as torch does.

    Inductor decides by the sizes at hand, and guards on it: a model whose calls have some thousand
    tokens was compiled twice. Both kernels are right at any size, and summing in parts is more
    precise: it is taken wherever a call may have more than one part.
    """
    if reduction != "sum" or dtype != torch.float32:
        return bool(reduction == "welford_reduce")
    ranges = kernel.call_ranges
    assert ranges is not None
    addends = math.prod(ranges[kernel.reduction_depth :])
    return not V.graph.sizevars.statically_known_true(sympy.Le(addends, 4096))


@contextmanager
def together() -> Iterator[None]:
    """Delays the wait for kernels of all graphs compiled within its block to the block's end.

    So the kernels of one graph compile while the next is lowered. None of them can run before.
    Rank 0 says once on the log "dcpc" that it takes long.
    """
    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []

    def later(kernels: AsyncCompile, module: dict[str, Any]) -> None:
        waiting.append((kernels, module))

    slow = threading.Timer(PATIENCE_S, _tell_slow)
    slow.daemon = True
    slow.start()
    try:
        with WAIT.put(later):
            yield
        for kernels, module in waiting:
            kernels.wait(module)
    finally:
        slow.cancel()


def _tell_slow() -> None:
    if os.environ.get("RANK", "0") == "0" and not TOLD:
        TOLD.append(cache_dir())
        log.warning(
            "Inductor compiles kernels, which takes from seconds to minutes at a model's first "
            "steps; they stay in %s for later runs; backend='eager' starts at once", *TOLD,
        )  # fmt: skip


def _fix_layouts(graph: fx.Graph) -> None:
    """Makes Inductor pass operands to dcpc's ops with the strides they have in the graph.

    Otherwise operands are contiguous, and so are the results of attention: a copy follows, which
    the graph does not have.
    """
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") == "dcpc":
            given = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["eager_input_vals"] = given


# Inductor copies operands of torch's attention whose last dim is not the innermost one, as that of
# the logsumexp never is. The kernel reads any strides there.
AS_THEY_LIE = dict.fromkeys((FLASH, FLASH_BACKWARD), lowering.constrain_to_fx_strides)

# torch 2.13 looks for a kernel of its own, and fixes the sizes of a graph to those at hand, and
# calls torch's all the same: a model with convolutions was compiled for each length.
AT_ONE_SIZE = (torch.ops.aten.convolution_backward.default,)

_calls: WeakKeyDictionary[Scheduler, list[int]] = WeakKeyDictionary()


def _calls_of(scheduler: Scheduler) -> list[int]:
    """Returns the sorted positions of library kernels' calls in the graph's order."""
    if scheduler not in _calls:
        found = (n for n in scheduler.nodes if isinstance(n, ExternKernelSchedulerNode))
        _calls[scheduler] = sorted(n.min_order for n in found)
    return _calls[scheduler]


class InOrder(InductorChoices):
    """Fuses only kernels between which the graph has no call of a library kernel.

    A fused kernel runs at its first part's place, and all operands of the other parts run before
    it. Across matmuls that would move recomputed values to where other blocks' activations are
    alive, and raise the peak above that of the partition's order.
    """

    @staticmethod
    def can_fuse(
        scheduler: Scheduler,
        node1: BaseSchedulerNode,
        node2: BaseSchedulerNode,
        shared_data_score: int,
    ) -> bool:
        """Whether two kernels may be fused."""
        first = min(node1.min_order, node2.min_order)
        last = max(node1.max_order, node2.max_order)
        calls = _calls_of(scheduler)
        if bisect_left(calls, first) != bisect_right(calls, last):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    def uuid(self) -> str:
        """Returns the text that marks these changes in Inductor's cache key."""
        return "dcpc: in order, layouts fixed, sums in parts, convolutions at any size"


# Turns off Inductor's changes to the order of calls and the lifetimes of values. A buffer kept for
# a later one of its size outlives its last use: a block's activations stay through the others'
# attention, and the peak grew by up to 62% where everything is recomputed.
# Saved activations keep the strides of the forward graph, for which backward is compiled: by itself
# Inductor lays results of convolutions out with channels last, and pads rows on a GPU.
IN_ORDER: Mapping[str, Any] = {
    "allow_buffer_reuse": False,
    "reorder_for_peak_memory": False,
    "layout_optimization": False,
    "comprehensive_padding": False,
}


class _Inductor:
    """Adapts Inductor's boxed callable to a function of one list.

    Args:
        compiled: boxed callable of Inductor.
        sizes: index of the input and dim of each size that is passed after the inputs.
    """

    def __init__(self, compiled: Any, sizes: tuple[tuple[int, int], ...] = ()) -> None:
        self.compiled, self.sizes = compiled, sizes

    def __call__(self, arguments: list[Any]) -> Any:
        arguments.extend([arguments[i].shape[d] for i, d in self.sizes])
        # Each of our ops would ask autograd in Python first.
        with torch._C._AutoDispatchBelowAutograd():
            return self.compiled(arguments)
