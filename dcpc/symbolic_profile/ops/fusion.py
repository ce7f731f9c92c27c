"""What Inductor keeps of a list of calls: its fused kernels, without the values that stay inside.

    mm -> sigmoid -> mul -> mm        mm -> Kernel(mul) -> mm

A pointwise value has no memory: whoever reads it computes it again, from values that have. It gets
memory where a library kernel or the caller wants it, or where it is long or heavy and read more
than once. Kernels between two calls of library kernels that run over the same elements are then
one, and what only their own loop reads is gone (`codegen/variant/backends.py`, `InOrder`, keeps
Inductor from fusing across such calls). An output takes the memory of an input of its size that it
alone reads, and nobody later.

Follows torch 2.13, `_inductor/graph.py` (`run_node`), `ir.py` (`StorageBox`), `scheduler.py` and
the C++ backend. Not followed: loops that do not match although they have as many elements.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dcpc.symbolic_profile.ops.facts import Facts, argument, op_name

# Source: torch 2.13, _inductor/config.py: realize_reads_threshold, realize_cpu_acc_reads_threshold,
# realize_cpu_opcount_threshold; ir.py: the ops that make a value heavy on the CPU.
READS_OF_REUSED = 4
MOST_READS = 12
MOST_OPS = 50
HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})

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

_RESHAPES = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape"})


@dataclass(eq=False, slots=True)
class Kernel:
    """A fused kernel.

    Attributes:
        name: of the last value that it makes.
        all_input_nodes: what it reads.
        makes: values that get memory.
        in_place: those of them that take the memory of another value, which nobody reads later.
    """

    name: str
    all_input_nodes: list[fx.Node]
    makes: list[fx.Node]
    in_place: Mapping[fx.Node, fx.Node]


@dataclass(eq=False, slots=True)
class _Lazy:
    """A pointwise value that has no memory yet.

    Attributes:
        reads: nodes with memory that it is computed from; a view counts apart from its source.
        ops: operations an element.
        heavy: whether one of them is heavy.
    """

    reads: dict[fx.Node, None]
    ops: int
    heavy: bool


@dataclass(eq=False, slots=True)
class _Draft:
    """A fused kernel.

    Attributes:
        over: what it runs over.
        members: values it makes -> what each reads.
        level: of each value the loop that makes it: a reduction has an end before it is read.
    """

    over: Any
    members: dict[fx.Node, dict[fx.Node, None]] = field(default_factory=dict)
    level: dict[fx.Node, int] = field(default_factory=dict)

    @property
    def reads(self) -> dict[fx.Node, None]:
        """All that its values are computed from."""
        return {r: None for reads in self.members.values() for r in reads}


def fuse(
    nodes: Sequence[fx.Node], outputs: Iterable[fx.Node], facts: Facts
) -> list[fx.Node | Kernel]:
    """Returns what Inductor runs of a list of calls: library calls, views, and fused kernels.

    Args:
        nodes: calls of Inductor's small ops, in order; what they read and is not among them is
            given.
        outputs: what must have memory in the end.
        facts: reads the nodes.
    """
    return _Fusion(nodes, list(outputs), facts).run()


class _Fusion:
    def __init__(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], facts: Facts) -> None:
        self.nodes, self.outputs, self.facts = nodes, outputs, facts
        self.own = set(nodes)
        self.returned = set(outputs)
        self.uses: dict[fx.Node, int] = dict.fromkeys(self.returned, 1)
        for node in nodes:
            for i in node.all_input_nodes:
                self.uses[i] = self.uses.get(i, 0) + 1
        self.lazy: dict[fx.Node, _Lazy] = {}
        self.source: dict[fx.Node, fx.Node] = {}  # view -> what it is a view of
        self.copied: set[fx.Node] = set()  # views that are copies all the same
        self.steps: list[fx.Node | _Draft] = []
        self.region: list[_Draft] = []  # kernels since the last library call
        self.kernel: dict[fx.Node, _Draft] = {}
        self.done: dict[fx.Node, None] = {}
        self.result: list[fx.Node | Kernel] = []

    def run(self) -> list[fx.Node | Kernel]:
        for node in self.nodes:
            self._visit(node)
        for node in self.outputs:
            self._store(node)
        return self._kernels()

    # ------------------------------------------------------- which values get memory, and when

    def _visit(self, node: fx.Node) -> None:
        if not self.facts.of(node):
            self.steps.append(node)  # an integer
        elif not self.facts.fresh(node):
            self._view(node)
        elif self._is_call(node):
            self._store_all(node)
            self.region = []
            self.steps.append(node)
        elif self._is_pointwise(node):
            self._pointwise(node)
        else:
            reads, _, _ = self._inputs(node)
            self._member(node, reads)

    def _view(self, node: fx.Node) -> None:
        source = next(i for i in node.all_input_nodes if self.facts.of(i))
        if source not in self.lazy:
            self.steps.append(node)
        else:
            self.lazy[node] = self.lazy[source]
            self.source[node] = source
            self._reuse(node)

    def _pointwise(self, node: fx.Node) -> None:
        reads, ops, heavy = self._inputs(node)
        name = op_name(node).split("::")[1]
        self.lazy[node] = _Lazy(reads, ops + 1, heavy or name in HEAVY)
        self._reuse(node)

    def _reuse(self, node: fx.Node) -> None:
        """Gives memory to what is read more than once and is long or heavy, or reads very much.

        What is made of positions and constants alone never gets any here: Inductor would, but has
        whoever reads it compute it again all the same (`ComputedBuffer.make_loader`).
        """
        lazy = self.lazy[node]
        if not lazy.reads:
            return
        many = self.uses.get(node, 0) > 1
        returned = many and node in self.returned
        costly = lazy.heavy or lazy.ops > MOST_OPS or len(lazy.reads) > READS_OF_REUSED
        if returned or (many and costly) or len(lazy.reads) > MOST_READS or lazy.ops > MOST_OPS:
            self._store(node)

    def _inputs(self, node: fx.Node) -> tuple[dict[fx.Node, None], int, bool]:
        """Returns what a node reads if pointwise inputs are computed again, and their costs."""
        reads: dict[fx.Node, None] = {}
        ops, heavy = 0, False
        for i in node.all_input_nodes:
            lazy = self.lazy.get(i)
            if lazy is not None:
                reads |= lazy.reads
                ops, heavy = ops + lazy.ops, heavy or lazy.heavy
            elif self.facts.of(i):
                reads[i] = None
                ops += 1
        return reads, ops, heavy

    def _store_all(self, node: fx.Node) -> None:
        """Gives memory to what a call reads.

        Our ops' operands lie as in the graph (`codegen/variant/backends.py`), which Inductor brings
        about by a copy for the one call. Of a pointwise value computed from one other that is all
        the memory there is: it is made again for the next such call (`StorageBox.realize_hint`,
        `ExternKernel.require_strides`). Not followed of views of one.
        """
        ours = not op_name(node).startswith(("aten::", "prims::"))
        for i in node.all_input_nodes:
            lazy = self.lazy.get(i) if ours and i not in self.source and self.uses[i] > 1 else None
            if lazy is not None and len(lazy.reads) <= 1:
                self._member(i, lazy.reads)
            else:
                self._store(i)

    def _store(self, node: fx.Node) -> None:
        """Gives a value memory from here on; a view of it needs none of its own."""
        lazy = self.lazy.pop(node, None)
        if lazy is None:
            return
        source = self.source.get(node)
        if source is not None:
            self._store(source)
            if self._reshapes(node) > 1:
                # Inductor cannot say how such a view lies in memory, and copies it.
                self.copied.add(node)
                self._member(node, {source: None})
            else:
                self.steps.append(node)
        else:
            self._member(node, lazy.reads)

    def _reshapes(self, node: fx.Node) -> int:
        """Returns how many reshapes lie between a view and the pointwise value it is a view of."""
        count = 0
        while node in self.source:
            count += op_name(node) in _RESHAPES and node not in self.copied
            node = self.source[node]
        return count

    # -------------------------------------------------------------------------------------- kernels

    def _member(self, node: fx.Node, reads: dict[fx.Node, None]) -> None:
        """Adds a value to a kernel since the last library call, or begins one."""
        over = self._over(node)
        after = max((self.region.index(k) for k in self._made_in_region(reads)), default=0)
        for kernel in self.region[after:]:
            if kernel.over == over and self._shares(kernel, reads):
                break
        else:
            kernel = _Draft(over)
            self.region.append(kernel)
            self.steps.append(kernel)
        inner = [r for r in map(self._root, reads) if r in kernel.members]
        levels = (kernel.level[r] + self._ends_a_loop(r) for r in inner)
        kernel.level[node] = max(levels, default=0)
        kernel.members[node] = reads
        self.kernel[node] = kernel

    def _ends_a_loop(self, node: fx.Node) -> bool:
        return node not in self.copied and not self._is_pointwise(node)

    def _made_in_region(self, reads: Iterable[fx.Node]) -> list[_Draft]:
        found = (self.kernel.get(self._root(r)) for r in reads)
        return [k for k in found if k is not None and k in self.region]

    def _shares(self, kernel: _Draft, reads: Iterable[fx.Node]) -> bool:
        known = {self._root(r) for r in (*kernel.reads, *kernel.members)}
        return any(self._root(r) in known for r in reads)

    def _root(self, node: fx.Node) -> fx.Node:
        """Returns the node whose memory a value lies in."""
        while self._is_view(node):
            inputs = [i for i in node.all_input_nodes if self.facts.of(i)]
            if not inputs:
                break
            node = inputs[0]
        return node

    def _over(self, node: fx.Node) -> Any:
        """Returns what tells loops apart: elements, and whether leading dims are summed."""
        out = self.facts.of(node)[0]
        name = op_name(node).split("::")[1]
        if name in _ALONE:
            return name, node
        inputs = [t for i in node.all_input_nodes for t in self.facts.of(i)]
        if node in self.copied or self._is_pointwise(node) or not inputs:
            return out.numel.expand(), False
        x = inputs[0]
        dims = argument(node, "dim")
        ndim = len(x.shape)
        summed = {d % ndim for d in ([dims] if isinstance(dims, int) else dims or range(ndim))}
        kept = [d for d in range(ndim) if d not in summed and x.shape[d] != 1]
        leading = bool(kept) and any(d < max(kept) and x.shape[d] != 1 for d in summed)
        return x.numel.expand(), leading

    def _is_call(self, node: fx.Node) -> bool:
        name = op_name(node)
        short = name.split("::")[1]
        if not name.startswith(("aten::", "prims::")) or short in _CALLS:
            return True
        return any(t.dtype.is_complex for t in (*self.facts.of(node), *self.facts.inputs(node)))

    @staticmethod
    def _is_pointwise(node: fx.Node) -> bool:
        assert isinstance(node.target, torch._ops.OpOverload)
        name = op_name(node).split("::")[1]
        return torch.Tag.pointwise in node.target.tags or name in _LAZY

    # ---------------------------------------------------------------------------------- what runs

    def _kernels(self) -> list[fx.Node | Kernel]:
        readers, last = self._readers()
        for at, step in enumerate(self.steps):
            if isinstance(step, _Draft):
                self._finish(step, readers, {n for n, t in last.items() if t == at})
            elif step.target is operator.getitem:
                self._read([step])  # right away: what else the call returned is not kept for it
            elif not self._is_view(step):
                self._read(step.all_input_nodes)
                self.done[step] = None
                self.result.append(step)
        self._read(self.outputs)
        return self.result

    def _is_view(self, node: fx.Node) -> bool:
        if node not in self.own or node in self.copied or not self.facts.of(node):
            return False
        return not self.facts.fresh(node)

    def _read(self, nodes: Iterable[fx.Node]) -> None:
        """Makes views where they are first read."""
        for node in nodes:
            if node not in self.done and self._is_view(node):
                self._read(node.all_input_nodes)
                self.done[node] = None
                self.result.append(node)

    def _readers(self) -> tuple[dict[fx.Node, set[Any]], dict[fx.Node, int]]:
        """Value -> kernels and calls that read its memory; and the step of the last of them.

        Of those returned or given there is no last one.
        """
        found: dict[fx.Node, set[Any]] = {}
        last: dict[fx.Node, int] = {}
        for at, step in enumerate(self.steps):
            if isinstance(step, fx.Node) and self._is_view(step):
                continue
            for r in step.reads if isinstance(step, _Draft) else step.all_input_nodes:
                found.setdefault(self._root(r), set()).add(step)
                last[self._root(r)] = at
        for r in self.outputs:
            found.setdefault(self._root(r), set()).add(None)
            last.pop(self._root(r), None)
        return found, {n: t for n, t in last.items() if n in self.own}

    def _finish(
        self, draft: _Draft, readers: Mapping[fx.Node, set[Any]], dying: set[fx.Node]
    ) -> None:
        """Adds a kernel to the result: it makes what others and later loops of it read."""
        inside: dict[fx.Node, list[fx.Node]] = {}  # what it reads -> the members that do
        for member, reads in draft.members.items():
            for r in dict.fromkeys(map(self._root, reads)):
                inside.setdefault(r, []).append(member)
        level = draft.level
        makes = [
            n for n in draft.members
            if readers.get(n, set()) - {draft}
            or any(level[m] > level[n] for m in inside.get(n, ()))
        ]  # fmt: skip
        taken = self._in_place(makes, {n for n in dying if len(inside[n]) == 1}, inside)
        makes = [n for n in makes if n not in taken.values()]
        given = [r for r in draft.reads if self._root(r) not in draft.members]
        self._read(given)
        self.done |= dict.fromkeys(draft.members)
        if makes:
            outer = {n: t for n, t in taken.items() if t not in draft.members}
            self.result.append(Kernel(makes[-1].name, given, makes, outer))

    def _in_place(
        self,
        makes: Sequence[fx.Node],
        once: set[fx.Node],
        inside: Mapping[fx.Node, Sequence[fx.Node]],
    ) -> dict[fx.Node, fx.Node]:
        """Returns value -> the value whose memory it takes: it alone reads it, and nobody later."""
        found: dict[fx.Node, fx.Node] = {}
        for node in makes:
            if not self._is_pointwise(node):
                continue
            alike = [
                n for n in once
                if inside[n] == [node] and n not in found.values() and self._like(n, node)
            ]  # fmt: skip
            if alike:
                found[node] = min(alike, key=lambda n: n.name)
        return found

    def _like(self, node: fx.Node, other: fx.Node) -> bool:
        (x, *more), (y, *_) = self.facts.of(node), self.facts.of(other)
        return not more and x.dtype == y.dtype and x.storage_bytes == y.storage_bytes
