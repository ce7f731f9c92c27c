"""Groups loops into kernels as Inductor does, and tracks the memory that values lie in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dcpc.fx.torch_api import tags
from dcpc.symbolic_profile.ops.facts import Facts, argument, op_name

# Library kernels and ops that Inductor does not generate code for; those of dcpc are too, and what
# reads or makes complex numbers.
_CALLS = frozenset(
    {
        "mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "sort", "topk",
        "_fft_c2c", "_fft_c2r", "_fft_r2c",
    }
)  # fmt: skip
# Kernels of their own: they write into a copy, or into parts of their output.
_ALONE = frozenset(
    {"_unsafe_masked_index_put_accumulate", "cat", "index_put", "scatter", "scatter_add"}
)
# Data movement that Inductor writes as a pointwise loop.
_LAZY = frozenset(
    {
        "_to_copy", "arange", "clone", "constant_pad_nd", "convert_element_type", "copy",
        "embedding", "empty", "flip", "full", "full_like", "gather", "index", "iota",
        "lift_fresh_copy", "new_full", "new_zeros", "ones", "ones_like", "repeat", "roll",
        "scalar_tensor", "select_scatter", "slice_scatter", "tril", "triu", "where", "zeros",
        "zeros_like",
    }
)  # fmt: skip


class Aliases:
    """Memory that the values of a list of calls lie in.

    Attributes:
        own: the calls.
        copied: views that are copies all the same.
    """

    def __init__(self, nodes: Iterable[fx.Node], facts: Facts) -> None:
        self.facts = facts
        self.own = set(nodes)
        self.copied: set[fx.Node] = set()

    def is_view(self, node: fx.Node) -> bool:
        """Returns whether a value lies in the memory of another."""
        if node not in self.own or node in self.copied or not self.facts.of(node):
            return False
        return not self.facts.fresh(node)

    def root(self, node: fx.Node) -> fx.Node:
        """Returns the node whose memory a value lies in."""
        while self.is_view(node):
            inputs = [i for i in node.all_input_nodes if self.facts.of(i)]
            if not inputs:
                break
            node = inputs[0]
        return node

    def alike(self, node: fx.Node, other: fx.Node) -> bool:
        """Returns whether a value may take the memory of another: dtype and size are the same."""
        (x, *more), (y, *_) = self.facts.of(node), self.facts.of(other)
        return not more and x.dtype == y.dtype and x.storage_bytes == y.storage_bytes


@dataclass(eq=False, slots=True)
class KernelDraft:
    """A fused kernel while values are added to it.

    Attributes:
        over: key of its loops, see `_over`.
        members: values it makes -> nodes that each reads.
        level: value -> number of the loop that makes it: a reduction ends before it is read.
    """

    over: Any
    members: dict[fx.Node, dict[fx.Node, None]] = field(default_factory=dict)
    level: dict[fx.Node, int] = field(default_factory=dict)

    @property
    def reads(self) -> dict[fx.Node, None]:
        """Returns all nodes that its values are computed from."""
        return {r: None for reads in self.members.values() for r in reads}


class Loops:
    """Puts loops into kernels: those between two library calls that run over the same elements.

    Attributes:
        steps: library calls, views and drafts of kernels, in order.
    """

    def __init__(self, aliases: Aliases) -> None:
        self.steps: list[fx.Node | KernelDraft] = []
        self._aliases = aliases
        self._region: list[KernelDraft] = []  # kernels since the last library call
        self._kernel: dict[fx.Node, KernelDraft] = {}

    def call(self, node: fx.Node) -> None:
        """Adds a library call."""
        self._region = []
        self.steps.append(node)

    def add(self, node: fx.Node, reads: dict[fx.Node, None]) -> None:
        """Adds a value to a kernel since the last library call, or begins one."""
        over = _over(node, self._aliases)
        after = max((self._region.index(k) for k in self._made_in_region(reads)), default=0)
        for kernel in self._region[after:]:
            if kernel.over == over and self._shares(kernel, reads):
                break
        else:
            kernel = KernelDraft(over)
            self._region.append(kernel)
            self.steps.append(kernel)
        inner = [r for r in map(self._aliases.root, reads) if r in kernel.members]
        levels = (kernel.level[r] + self._ends_a_loop(r) for r in inner)
        kernel.level[node] = max(levels, default=0)
        kernel.members[node] = reads
        self._kernel[node] = kernel

    def _ends_a_loop(self, node: fx.Node) -> bool:
        return node not in self._aliases.copied and not is_pointwise(node)

    def _made_in_region(self, reads: Iterable[fx.Node]) -> list[KernelDraft]:
        found = (self._kernel.get(self._aliases.root(r)) for r in reads)
        return [k for k in found if k is not None and k in self._region]

    def _shares(self, kernel: KernelDraft, reads: Iterable[fx.Node]) -> bool:
        known = {self._aliases.root(r) for r in (*kernel.reads, *kernel.members)}
        return any(self._aliases.root(r) in known for r in reads)


def _over(node: fx.Node, aliases: Aliases) -> Any:
    """Returns a key that tells loops apart: elements, and whether leading dims are summed."""
    out = aliases.facts.of(node)[0]
    name = op_name(node).split("::")[1]
    if name in _ALONE:
        return name, node
    inputs = [t for i in node.all_input_nodes for t in aliases.facts.of(i)]
    if node in aliases.copied or is_pointwise(node) or not inputs:
        return out.numel.expand(), False
    x = inputs[0]
    dims = argument(node, "dim")
    ndim = len(x.shape)
    summed = {d % ndim for d in ([dims] if isinstance(dims, int) else dims or range(ndim))}
    kept = [d for d in range(ndim) if d not in summed and x.shape[d] != 1]
    leading = bool(kept) and any(d < max(kept) and x.shape[d] != 1 for d in summed)
    return x.numel.expand(), leading


def is_call(node: fx.Node, facts: Facts) -> bool:
    """Returns whether a call is one of a library kernel."""
    name = op_name(node)
    short = name.split("::")[1]
    if not name.startswith(("aten::", "prims::")) or short in _CALLS:
        return True
    return any(t.dtype.is_complex for t in (*facts.of(node), *facts.inputs(node)))


def is_pointwise(node: fx.Node) -> bool:
    """Returns whether each element is computed by itself."""
    assert isinstance(node.target, torch._ops.OpOverload)
    name = op_name(node).split("::")[1]
    return tags.is_pointwise(node.target) or name in _LAZY
