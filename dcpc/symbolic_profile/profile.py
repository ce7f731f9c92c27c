"""One partition in, one profile out."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace

import sympy
import torch
from torch import fx

from dcpc.errors import ProfileError
from dcpc.ir import Partition, Profile, Work
from dcpc.symbolic_profile.facts import Facts, TensorFacts
from dcpc.symbolic_profile.flops import ZERO, GroupSize, cost_of
from dcpc.symbolic_profile.memory import profile_memory
from dcpc.symbolic_profile.polynomials import Basis

_COUNTED = frozenset({"matmul", "attention", "convolution"})


def profile_partition(
    partition: Partition, sp: GroupSize = 1, threads: int | None = None
) -> Profile:
    """Returns what a partition costs the rank that runs it, as expressions of the dims.

    The device comes in only when a profile is evaluated.

    Args:
        partition: forward and backward graphs; only read.
        sp: ranks of the group of every collective, or group name -> ranks.
        threads: threads an op runs on, which the CPU's attention has buffers for; default: torch's.

    Raises:
        ProfileError: a size has a symbol that `partition.names` does not translate, or a gradient's
            size is not fixed.

    Warns:
        UserWarning: ops that no table has, by name; they count one operation an output element.
    """
    facts = Facts(partition.names)
    memory = profile_memory(partition, facts, threads or torch.get_num_threads())
    work, unpriced = _work(partition, facts, sp)
    if unpriced:
        warnings.warn(
            f"profile: got ops without a cost, {', '.join(unpriced)}; they count one operation for "
            "each element of their largest operand; if one is a matmul, register a formula with "
            "torch.utils.flop_counter.register_flop_formula",
            stacklevel=2,
        )
    fixed, inputs = _residents(partition, facts)
    matmuls = [w for w in work if w.op_class in _COUNTED]
    return Profile(
        flops=_total([(w.flops, w.count) for w in matmuls]),
        forward_flops=_total([(w.flops, w.count) for w in matmuls if w.forward]),
        bytes_moved=_total([(w.bytes_moved, w.count) for w in work]),
        wire_bytes=_total([(w.wire_bytes, w.count) for w in work]),
        saved_bytes=memory.saved_bytes,
        peak_terms=memory.peak_terms,
        peak_points=memory.peak_points,
        parameter_bytes=fixed,
        input_bytes=inputs,
        gradient_bytes=_fixed(memory.gradient_bytes),
        work=work,
        unpriced=unpriced,
        symbols=facts.symbols,
    )


def _work(
    partition: Partition, facts: Facts, sp: GroupSize
) -> tuple[tuple[Work, ...], tuple[str, ...]]:
    """Returns the calls grouped by cost, and the ops without a table entry."""
    groups: Counter[Work] = Counter()
    unpriced: dict[str, None] = {}
    for gm in (partition.forward, partition.backward):
        for n in gm.graph.nodes:
            call = work_of(n, facts, sp, forward=gm is partition.forward)
            if call is None:
                continue
            if call.op_class == "unpriced":
                unpriced[str(n.target)] = None
            groups[call] += 1
    return tuple(replace(w, count=n) for w, n in groups.items()), tuple(unpriced)


def work_of(node: fx.Node, facts: Facts, sp: GroupSize, *, forward: bool) -> Work | None:
    """Returns the cost of one node as a call of its own, None for what costs nothing (a view).

    Args:
        node: a node of a forward, backward or joint graph.
        facts: reads its values.
        sp: ranks of the group of every collective, or group name -> ranks.
        forward: whether it counts as forward.
    """
    cost = cost_of(node, facts, sp) if node.op == "call_function" else None
    if cost is None:
        return None
    return Work(
        op_class=cost.op_class,
        forward=forward,
        dtype=_dtype(node, facts),
        ranks=cost.ranks,
        count=1,
        flops=cost.flops,
        bytes_moved=cost.bytes_moved,
        wire_bytes=cost.wire_bytes,
        op=cost.op,
    )


def _dtype(node: fx.Node, facts: Facts) -> torch.dtype:
    """Returns the dtype of the first floating-point operand, or of the result."""
    operands = [*facts.inputs(node), *facts.of(node)]
    floating = [t.dtype for t in operands if t.dtype.is_floating_point]
    return (floating or [operands[0].dtype])[0]


def _residents(partition: Partition, facts: Facts) -> tuple[int, sympy.Expr]:
    """Returns the bytes of the residents of fixed size and of the others, each storage once."""
    wanted = set(partition.resident)
    nodes = [n for n in partition.forward.graph.nodes if n.name in wanted]
    found: dict[int, TensorFacts] = {t.storage: t for n in nodes for t in facts.of(n)}
    sizes = [t.storage_bytes for t in found.values()]
    fixed = sum(int(size) for size in sizes if size.is_Integer)
    return fixed, sympy.Add(*(size for size in sizes if not size.is_Integer))


def _total(terms: list[tuple[sympy.Expr, int]]) -> sympy.Expr:
    basis = Basis(size for size, _ in terms)
    rows = basis.matrix([size for size, _ in terms])
    counts = [float(count) for _, count in terms]
    return basis.expression(counts @ rows) if terms else ZERO


def _fixed(size: sympy.Expr) -> int:
    if not size.is_Integer:
        raise ProfileError(
            f"gradients: got {size} bytes; expected a fixed number; a gradient is a view of an "
            "activation: clone it in the graph"
        )
    return int(size)
