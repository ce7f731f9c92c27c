"""FLOPs, bytes moved and bytes sent of each call of a graph.

A multiply and an add count as two FLOPs. Attention counts the pairs of query and key it keeps: a
causal one over `s` tokens `s*(s + 1)/2` of the `s**2`, since the kernels skip the rest (torch's own
formulas count all of them). Its backward recomputes the scores: five matmuls to forward's two.
Matmuls, convolutions and attention are the FLOPs of `Profile.flops`; other ops' elements matter to
time only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from dcpc.fx.own_ops import Counts, counted_costs, is_own
from dcpc.ir import Work
from dcpc.ops.bundles import messages
from dcpc.symbolic_profile.ops import attention
from dcpc.symbolic_profile.ops.elements import LOOKUPS, elementwise
from dcpc.symbolic_profile.ops.facts import Facts, GroupSize, TensorFacts, argument, op_name, total

ZERO = sympy.Integer(0)


def cost_of(node: fx.Node, facts: Facts, sp: GroupSize = 1, *, forward: bool = True) -> Work | None:
    """Returns a node as one call; None for a view, an integer, a placeholder: they cost nothing."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    fresh = facts.fresh(node)
    if not fresh:
        return None
    name = op_name(node)
    if name in AWAY:
        return None
    bytes_moved, dtype = _bytes_moved(node, facts, fresh), _dtype(node, facts)
    if name in WIRE:
        ranks = sp if isinstance(sp, int) else sp(str(argument(node, "group", node.args[-1])))
        if name == "dcpc::swap":
            ranks = argument(node, "across")  # neighbours
        given = facts.inputs(node)[0].size_bytes
        sent = WIRE[name](halo_bytes(node, facts) if name in HALOS else given, ranks)
        return Work("collective", forward, dtype, ranks, 1, ZERO, bytes_moved, sent, name)
    if name in ROWS:
        ranks = argument(node, "ranks")
        gathers = name == "dcpc::gather_rows"
        own = [facts.of(n)[0] for n in argument(node, "rows")] if gathers else fresh[:-1]
        sent = (ranks - 1) * total(tuple(t.size_bytes for t in own))
        count = len(row_messages(own, ranks, scalars=not gathers))
        op = ROWS[name]
        if argument(node, "to") is not None:  # rows that are not on the device
            own_bytes = total(tuple(t.size_bytes for t in own))
            return Work("host", forward, dtype, ranks, 1, ZERO, own_bytes, sent, op, count)
        return Work("collective", forward, dtype, ranks, 1, ZERO, bytes_moved, sent, op, count)
    if name in RINGS:
        ranks = sp if isinstance(sp, int) else sp(str(argument(node, "group")))
        flops, moved, sent, count = _ring(node, facts, ranks, bytes_moved)
        return Work("attention", forward, dtype, ranks, 1, flops, moved, sent, name, count)
    op_class, flops = _flops(node, facts, name.split("::")[1], fresh)
    counting = op_class == "unpriced" and is_own(node.target)
    if counting and (counts := own_counts(node, facts)) is not None:
        op_class, flops = ("matmul", counts[0]) if counts[0] != 0 else ("reduction", flops)
        bytes_moved = counts[1]
    return Work(op_class, forward, dtype, 1, 1, flops, bytes_moved, ZERO)


def own_counts(node: fx.Node, facts: Facts) -> Counts | None:
    """Returns `counted_costs` of a call; None where its kernel says nothing."""
    found = {n: facts.of(n) for n in node.all_input_nodes}
    shapes = {n: own[0].shape if own else (facts.size(n),) for n, own in found.items()}
    return counted_costs(node, shapes)


def _dtype(node: fx.Node, facts: Facts) -> torch.dtype:
    """Returns the dtype of the first floating-point operand, or of the result."""
    operands = [*facts.inputs(node), *facts.of(node)]
    floating = [t.dtype for t in operands if t.dtype.is_floating_point]
    return (floating or [operands[0].dtype])[0]


def _flops(
    node: fx.Node, facts: Facts, name: str, fresh: tuple[TensorFacts, ...]
) -> tuple[str, sympy.Expr]:
    if is_own(node.target):
        registered = _registered(node, facts)
        elements = total((_largest(*fresh, *facts.inputs(node)),))
        return ("unpriced", elements) if registered is None else ("matmul", registered)
    if name.startswith("attention_"):
        return "attention", _widths(node, facts, attention.pairs(node, facts))
    if name.startswith("_scaled_dot_product_"):
        return "attention", _attention(node, facts, name.endswith("_backward"))
    if name in MATMULS:
        a = facts.of(argument(node, MATMULS[name]))[0]
        return "matmul", sympy.expand(2 * fresh[0].numel * a.shape[-1])
    if name in GROUPED:
        return "matmul", _grouped(node, facts, *GROUPED[name])
    registered = _registered(node, facts)
    if registered is not None:
        return "convolution" if "conv" in name else "matmul", registered
    assert isinstance(node.target, torch._ops.OpOverload)
    op_class, flops = elementwise(node.target)
    if op_class == "pointwise":
        return op_class, total(tuple(t.numel for t in fresh))
    return op_class, total((_largest(*fresh, *facts.inputs(node)),), flops) if flops else ZERO


# op -> its left matrix.
MATMULS = {
    "mm": "self", "bmm": "self", "addmm": "mat1", "baddbmm": "batch1", "_int_mm": "self",
    "mv": "self", "addmv": "mat", "dot": "self",
}  # fmt: skip


# Products of rows in groups, each with a matrix of its own -> their operands, and how many of them.
GROUPED = {
    "_grouped_mm": ("self", "mat2", 1), "grouped_mm_fallback": ("input", "weight", 1),
    "grouped_mm_fallback_backward": ("input", "weight", 2),
}  # fmt: skip


def _grouped(node: fx.Node, facts: Facts, left: str, right: str, products: int) -> sympy.Expr:
    """Returns the FLOPs wherever groups end: each row, or addend of a sum, is in one of them."""
    a, b = (facts.of(argument(node, name))[0].shape for name in (left, right))
    groups = a[0] if len(a) > len(b) else 1  # columns in groups: each has one of the left matrices
    return sympy.expand(2 * products * sympy.Mul(*a) * b[-1] / groups)


def _attention(node: fx.Node, facts: Facts, backward: bool) -> sympy.Expr:
    """(b, h, q, d) x (b, h, k, d): two matmuls forward (q k, p v), five backward."""
    query, key, value = (facts.of(argument(node, n))[0] for n in ("query", "key", "value"))
    b, h, queries, width = query.shape
    keys, value_width = key.shape[2], value.shape[3]
    pairs = queries * keys
    if argument(node, "is_causal", False):
        short = queries if queries == keys else sympy.Min(queries, keys)
        pairs = short * (short + 1) / 2 + (queries - short) * keys
    widths = 3 * width + 2 * value_width if backward else width + value_width
    return sympy.expand(2 * b * h * pairs * widths)


def _widths(node: fx.Node, facts: Facts, pairs: sympy.Expr) -> sympy.Expr:
    """dcpc::attention: two matmuls forward, five backward, over pairs of query and key."""
    query, value = (facts.of(argument(node, n))[0] for n in ("query", "value"))
    b, h, _, width = query.shape
    backward = op_name(node).endswith("_backward")
    widths = 3 * width + 2 * value.shape[3] if backward else width + value.shape[3]
    return sympy.expand(2 * b * h * pairs * widths)


def _registered(node: fx.Node, facts: Facts) -> sympy.Expr | None:
    """Returns torch's own FLOP formula over symbolic shapes, None where none works."""
    assert isinstance(node.target, torch._ops.OpOverload)
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None:
        return None

    def shape(n: fx.Node) -> Any:
        found = facts.of(n)
        return found[0].shape if found else facts.size(n)

    args, kwargs = fx.map_arg((node.args, node.kwargs), shape)
    out = [t.shape for t in facts.of(node)]
    if len(out) < len(node.target._schema.returns):  # an output that is not asked for is None
        left = iter(out)
        out = [next(left) if wanted else () for wanted in argument(node, "output_mask")]
    try:
        return sympy.expand(formula(*args, **kwargs, out_val=out if len(out) > 1 else out[0]))
    except (AttributeError, AssertionError, TypeError, ValueError):
        return None


def _largest(*operands: TensorFacts) -> sympy.Expr:
    """Returns the largest number of elements; of undecidable ones that with the most dims."""

    def key(t: TensorFacts) -> tuple[int, float]:
        at_hint = t.numel.xreplace({s: sympy.Integer(64) for s in t.numel.free_symbols})
        return len(t.numel.free_symbols), float(at_hint) if at_hint.is_number else 0.0

    return max(operands, key=key).numel


def _bytes_moved(node: fx.Node, facts: Facts, fresh: tuple[TensorFacts, ...]) -> sympy.Expr:
    """Returns the bytes of the inputs as read and of the fresh outputs as written."""
    written = [t.size_bytes for t in fresh]
    inputs = facts.inputs(node)
    if op_name(node).split("::")[1] in LOOKUPS and inputs and not is_own(node.target):
        _, *indices = inputs
        return total((*written, *written, *(t.size_bytes for t in indices)))
    return total((*written, *(t.read_bytes for t in inputs)))


# ------------------------------------------------------------------------------- collectives


def _pieces(input_bytes: Any, ranks: Any) -> Any:
    """Every rank's piece but its own: (p - 1)/p of the input."""
    return (ranks - 1) * input_bytes / ranks


def _whole(input_bytes: Any, ranks: Any) -> Any:
    """The whole input, passed on p - 1 times around a ring."""
    return (ranks - 1) * input_bytes


def _twice(input_bytes: Any, ranks: Any) -> Any:
    """A reduce-scatter and an all-gather of the pieces."""
    return 2 * _pieces(input_bytes, ranks)


def _rows(input_bytes: Any, ranks: Any) -> Any:
    """Returns the bytes that an inner rank sends to both neighbours: rows of windows."""
    return input_bytes


# op -> bytes one rank sends, by ring or pairwise exchange, of the bytes that it puts in and the
# ranks that take part: expressions, numbers or arrays.
WIRE: dict[str, Callable[[Any, Any], Any]] = {
    "dcpc::all_to_all": _pieces,
    "dcpc::all_gather": _whole,
    "dcpc::reduce_scatter": _pieces,
    "dcpc::all_reduce": _twice,
    "dcpc::swap": _pieces,
    "dcpc::halo": _rows,
    "dcpc::halo_sum": _rows,
    "_c10d_functional::all_to_all_single": _pieces,
    "_c10d_functional::all_gather_into_tensor": _whole,
    "_c10d_functional::reduce_scatter_tensor": _pieces,
    "_c10d_functional::all_reduce": _twice,
}
# All ranks' rows of parameters, and sums of their gradients -> the collective that it runs as.
ROWS = {"dcpc::gather_rows": "dcpc::all_gather", "dcpc::sum_rows": "dcpc::reduce_scatter"}
# Calls by which a value leaves the device and comes back: their seconds are waits.
AWAY = frozenset({"dcpc::leave", "dcpc::gone", "dcpc::ask", "dcpc::arrive"})
HALOS = frozenset({"dcpc::halo", "dcpc::halo_sum"})
RINGS = frozenset({"dcpc::ring_attention_forward", "dcpc::ring_attention_backward"})


def halo_rows(stride: int, reach: int, longer: sympy.Expr) -> int:
    """Returns how many rows of neighbours a rank between two of them gets, or gives, together."""
    return max(0, reach - stride, int(longer) if longer.is_Integer else 0)


def halo_bytes(node: fx.Node, facts: Facts) -> sympy.Expr:
    """Returns the bytes of those rows, of a call of `dcpc::halo` or its transpose."""
    stride, reach, dim = (argument(node, name) for name in ("stride", "reach", "dim"))
    size, out_size = (facts.size(argument(node, name)) for name in ("size", "out_size"))
    given = facts.inputs(node)[0]
    rows = halo_rows(stride, reach, sympy.expand(sympy.sympify(out_size) - sympy.sympify(size)))
    return rows * given.dtype.itemsize * sympy.Mul(*given.shape[:dim], *given.shape[dim + 1 :])


def row_messages(rows: Sequence[TensorFacts], ranks: int, *, scalars: bool) -> list[list[int]]:
    """Returns which parameters travel together, by their position."""
    sizes = {i: (t.dtype, ranks * int(t.size_bytes)) for i, t in enumerate(rows)}
    return messages({i: s for i, s in sizes.items() if s[1] and (scalars or rows[i].shape)})


def ring_sent(passed: Any, home: Any, wider: int, backward: bool) -> Any:
    """Returns the bytes that a rank of a ring sends: an expression, a number or an array.

    Args:
        passed: bytes of keys and values that it passes on.
        home: bytes of the gradients of one piece of them, which go one step further.
        wider: bytes of an element of a gradient, in those of a key's.
        backward: whether the gradients go round, too.
    """
    return passed + passed * wider + home if backward else passed


def ring_messages(steps: int, backward: bool) -> int:
    """Returns how often a rank of a ring sends and waits."""
    return (2 * steps - 1 if backward else steps - 1) or 1


def _ring(
    node: fx.Node, facts: Facts, ranks: int, bytes_moved: sympy.Expr
) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr, int]:
    """Returns FLOPs, bytes moved and sent, and messages where keys and values go round.

    These go once, and their gradients once and home.

    Source of the bytes: `sent_bytes` of ops/ring_route.py, of even pieces. Where
    only so many keys before a query are seen, and pieces are in order, keys go no further than
    that.
    """
    query, key, value = (facts.of(argument(node, n))[0] for n in ("query", "key", "value"))
    steps = ranks // argument(node, "across")
    keys = facts.size(argument(node, "key_size")) * facts.size(argument(node, "key_rows"))
    before, after = argument(node, "before"), argument(node, "after")
    rows = key.shape[2]
    turned = (steps - 1) * rows
    if before is not None and after is not None and not argument(node, "key_zigzag"):
        turned = sympy.Min(turned, rows + before + after)
    seen = keys if after is None else (keys + 1) / 2
    if before is not None and after is not None:
        seen = sympy.Min(keys, before + after + 1)
    backward = op_name(node).endswith("_backward")
    flops = _widths(node, facts, query.shape[2] * seen)
    row_bytes = key.shape[0] * key.shape[1] * (key.shape[3] + value.shape[3])
    wider = max(4, key.dtype.itemsize)
    passed = turned * row_bytes * key.dtype.itemsize
    wire = ring_sent(passed, rows * row_bytes * wider, wider // key.dtype.itemsize, backward)
    # each step's result is added to those before it, and each step's gradient of the queries
    wide = query.shape[0] * query.shape[1] * query.shape[2] * wider
    added = 3 * (steps - 1) * wide * (query.shape[3] if backward else value.shape[3])
    wire, moved = sympy.expand(wire) if steps > 1 else ZERO, sympy.expand(bytes_moved + added)
    return flops, moved, wire, ring_messages(steps, backward)
