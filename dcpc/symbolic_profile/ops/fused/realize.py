"""Decides as Inductor does which values of a list of calls get memory; others are inlined.

Follows torch 2.13, `_inductor/graph.py` (`run_node`) and `ir.py` (`StorageBox`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from dcpc.symbolic_profile.ops.facts import op_name
from dcpc.symbolic_profile.ops.fused.loops import Aliases, KernelDraft, Loops, is_call, is_pointwise

# Source: torch 2.13, _inductor/config.py: realize_reads_threshold, realize_cpu_acc_reads_threshold,
# realize_cpu_opcount_threshold; ir.py: the ops that make a value heavy on the CPU.
READS_OF_REUSED = 4
MOST_READS = 12
MOST_OPS = 50
HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})

_RESHAPES = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape"})


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


class Realization:
    """A walk over a list of calls that gives values memory where Inductor does.

    Args:
        nodes: the calls.
        outputs: nodes that must have memory in the end.
        aliases: memory that values lie in; views that are copies are added.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], aliases: Aliases
    ) -> None:
        self._aliases, self._facts, self._loops = aliases, aliases.facts, Loops(aliases)
        self._nodes, self._outputs, self._returned = nodes, outputs, set(outputs)
        self._uses = Counter((*self._returned, *(i for n in nodes for i in n.all_input_nodes)))
        self._lazy: dict[fx.Node, _Lazy] = {}
        self._source: dict[fx.Node, fx.Node] = {}  # view -> what it is a view of

    def run(self) -> list[fx.Node | KernelDraft]:
        """Returns library calls, views, and kernels of the values that get memory."""
        for node in self._nodes:
            self._visit(node)
        for node in self._outputs:
            self._store(node)
        return self._loops.steps

    def _visit(self, node: fx.Node) -> None:
        if not self._facts.of(node):
            self._loops.steps.append(node)  # an integer
        elif not self._facts.fresh(node):
            self._view(node)
        elif is_call(node, self._facts):
            self._store_all(node)
            self._loops.call(node)
        elif is_pointwise(node):
            self._pointwise(node)
        else:
            reads, _, _ = self._inputs(node)
            self._loops.add(node, reads)

    def _view(self, node: fx.Node) -> None:
        source = next(i for i in node.all_input_nodes if self._facts.of(i))
        if source not in self._lazy:
            self._loops.steps.append(node)
        else:
            self._lazy[node] = self._lazy[source]
            self._source[node] = source
            self._reuse(node)

    def _pointwise(self, node: fx.Node) -> None:
        reads, ops, heavy = self._inputs(node)
        name = op_name(node).split("::")[1]
        self._lazy[node] = _Lazy(reads, ops + 1, heavy or name in HEAVY)
        self._reuse(node)

    def _reuse(self, node: fx.Node) -> None:
        """Gives memory to a value that is long or heavy and read twice, or that reads very much.

        A value of positions and constants alone never gets any here: Inductor gives it memory, but
        its readers compute it again all the same (`ComputedBuffer.make_loader`).
        """
        lazy = self._lazy[node]
        if not lazy.reads:
            return
        many = self._uses[node] > 1
        returned = many and node in self._returned
        costly = lazy.heavy or lazy.ops > MOST_OPS or len(lazy.reads) > READS_OF_REUSED
        if returned or (many and costly) or len(lazy.reads) > MOST_READS or lazy.ops > MOST_OPS:
            self._store(node)

    def _inputs(self, node: fx.Node) -> tuple[dict[fx.Node, None], int, bool]:
        """Returns the nodes read when pointwise inputs are inlined, and their ops and weight."""
        reads: dict[fx.Node, None] = {}
        ops, heavy = 0, False
        for i in node.all_input_nodes:
            lazy = self._lazy.get(i)
            if lazy is not None:
                reads |= lazy.reads
                ops, heavy = ops + lazy.ops, heavy or lazy.heavy
            elif self._facts.of(i):
                reads[i] = None
                ops += 1
        return reads, ops, heavy

    def _store_all(self, node: fx.Node) -> None:
        """Gives memory to the inputs of a call.

        Our ops' operands lie as in the graph (`codegen/variant/backends.py`), which Inductor brings
        about by a copy for the one call. Of a pointwise value computed from one other that is all
        the memory there is: it is made again for the next such call (`StorageBox.realize_hint`,
        `ExternKernel.require_strides`). Not followed of views of one.
        """
        ours = not op_name(node).startswith(("aten::", "prims::"))
        for i in node.all_input_nodes:
            again = ours and i not in self._source and self._uses[i] > 1
            lazy = self._lazy.get(i) if again else None
            if lazy is not None and len(lazy.reads) <= 1:
                self._loops.add(i, lazy.reads)
            else:
                self._store(i)

    def _store(self, node: fx.Node) -> None:
        """Gives a value memory from here on; a view of it needs none of its own."""
        lazy = self._lazy.pop(node, None)
        if lazy is None:
            return
        source = self._source.get(node)
        if source is not None:
            self._store(source)
            if self._reshapes(node) > 1:
                # Inductor cannot say how such a view lies in memory, and copies it.
                self._aliases.copied.add(node)
                self._loops.add(node, {source: None})
            else:
                self._loops.steps.append(node)
        else:
            self._loops.add(node, lazy.reads)

    def _reshapes(self, node: fx.Node) -> int:
        """Returns how many reshapes lie between a view and the pointwise value it is a view of."""
        count = 0
        while node in self._source:
            count += op_name(node) in _RESHAPES and node not in self._aliases.copied
            node = self._source[node]
        return count
