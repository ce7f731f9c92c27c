"""Fuses a list of calls as Inductor does: kernels, without the values that stay inside them.

    mm -> sigmoid -> mul -> mm        mm -> Kernel(mul) -> mm

A pointwise value has no memory: whoever reads it computes it again, from values that have. It gets
memory where a library kernel or the caller wants it, or where it is long or heavy and read more
than once. Kernels between two calls of library kernels that run over the same elements are then
one, and values that only their own loop reads are gone (`codegen/variant/backends.py`, `InOrder`,
keeps Inductor from fusing across such calls). An output takes the memory of an input of its size
that it alone reads, and nobody later.

`realize.py` says which values get memory, `loops.py` which of their loops are one kernel, and this
file what each kernel reads and makes.

Follows torch 2.13, `_inductor/graph.py` (`run_node`), `ir.py` (`StorageBox`), `scheduler.py` and
the C++ backend. Not followed: loops that do not match although they have as many elements.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.fused.loops import Aliases, KernelDraft, is_pointwise
from dcpc.symbolic_profile.ops.fused.realize import Realization


@dataclass(eq=False, slots=True)
class Kernel:
    """A fused kernel.

    Attributes:
        name: name of the last value that it makes.
        all_input_nodes: nodes that it reads.
        makes: values that get memory, in order.
        in_place: each value of `makes` in another value's memory -> that value, which nobody reads
            later.
    """

    name: str
    all_input_nodes: list[fx.Node]
    makes: list[fx.Node]
    in_place: Mapping[fx.Node, fx.Node]


def fuse(
    nodes: Sequence[fx.Node], outputs: Iterable[fx.Node], facts: Facts
) -> list[fx.Node | Kernel]:
    """Returns a list of calls as Inductor runs it: library calls, views, and fused kernels."""
    ends, aliases = list(outputs), Aliases(nodes, facts)
    steps = Realization(nodes, ends, aliases).run()
    return _Emission(steps, ends, aliases).run()


class _Emission:
    """Turns drafts into kernels: inputs, values, and the memory these take."""

    def __init__(
        self, steps: Sequence[fx.Node | KernelDraft], outputs: Sequence[fx.Node], aliases: Aliases
    ) -> None:
        self._steps, self._outputs, self._aliases = steps, outputs, aliases
        self._done: dict[fx.Node, None] = {}
        self._result: list[fx.Node | Kernel] = []

    def run(self) -> list[fx.Node | Kernel]:
        readers, last = self._readers()
        for at, step in enumerate(self._steps):
            if isinstance(step, KernelDraft):
                self._finish(step, readers, {n for n, t in last.items() if t == at})
            elif step.target is operator.getitem:
                self._read([step])  # right away: what else the call returned is not kept for it
            elif not self._aliases.is_view(step):
                self._read(step.all_input_nodes)
                self._done[step] = None
                self._result.append(step)
        self._read(self._outputs)
        return self._result

    def _read(self, nodes: Iterable[fx.Node]) -> None:
        """Makes views where they are first read."""
        for node in nodes:
            if node not in self._done and self._aliases.is_view(node):
                self._read(node.all_input_nodes)
                self._done[node] = None
                self._result.append(node)

    def _readers(self) -> tuple[dict[fx.Node, set[Any]], dict[fx.Node, int]]:
        """Value -> kernels and calls that read its memory; and the step of the last of them.

        Of those returned or given there is no last one.
        """
        found: dict[fx.Node, set[Any]] = {}
        last: dict[fx.Node, int] = {}
        for at, step in enumerate(self._steps):
            if isinstance(step, fx.Node) and self._aliases.is_view(step):
                continue
            for r in step.reads if isinstance(step, KernelDraft) else step.all_input_nodes:
                found.setdefault(self._aliases.root(r), set()).add(step)
                last[self._aliases.root(r)] = at
        for r in self._outputs:
            found.setdefault(self._aliases.root(r), set()).add(None)
            last.pop(self._aliases.root(r), None)
        return found, {n: t for n, t in last.items() if n in self._aliases.own}

    def _finish(
        self, draft: KernelDraft, readers: Mapping[fx.Node, set[Any]], dying: set[fx.Node]
    ) -> None:
        """Adds a kernel to the result: its values are those that others or its later loops read."""
        inside: dict[fx.Node, list[fx.Node]] = {}  # what it reads -> the members that do
        for member, reads in draft.members.items():
            for r in dict.fromkeys(map(self._aliases.root, reads)):
                inside.setdefault(r, []).append(member)
        level = draft.level
        makes = [
            n for n in draft.members
            if readers.get(n, set()) - {draft}
            or any(level[m] > level[n] for m in inside.get(n, ()))
        ]  # fmt: skip
        taken = _in_place(self._aliases, makes, {n for n in dying if len(inside[n]) == 1}, inside)
        makes = [n for n in makes if n not in taken.values()]
        given = [r for r in draft.reads if self._aliases.root(r) not in draft.members]
        self._read(given)
        self._done |= dict.fromkeys(draft.members)
        if makes:
            outer = {n: t for n, t in taken.items() if t not in draft.members}
            self._result.append(Kernel(makes[-1].name, given, makes, outer))


def _in_place(
    aliases: Aliases,
    makes: Sequence[fx.Node],
    once: set[fx.Node],
    inside: Mapping[fx.Node, Sequence[fx.Node]],
) -> dict[fx.Node, fx.Node]:
    """Returns value -> the value whose memory it takes: it alone reads it, and nobody later."""
    found: dict[fx.Node, fx.Node] = {}
    for node in makes:
        if not is_pointwise(node):
            continue
        alike = [
            n for n in once
            if inside[n] == [node] and n not in found.values() and aliases.alike(n, node)
        ]  # fmt: skip
        if alike:
            found[node] = min(alike, key=lambda n: n.name)
    return found
