"""Checks by their sharding rules that ops other than attention do not join positions of a row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from dcpc.fx.large_graphs import op_name
from dcpc.ir import call_of, tensor_operands
from dcpc.passes.masks.row_graph import MixedError, RowGraph
from dcpc.passes.sharding.op_kinds import arguments

# Ops that join positions depending on their contents: trying a few numbers would not reveal it.
_SCANS = ("cumsum", "cumprod", "cummax", "cummin", "any", "all", "sum", "amax", "amin")
# Types of arguments that are numbers to compute with, as a schema writes them; sizes are `int`.
_NUMBERS = ("Tensor", "number", "float")
_GENERATORS = ("arange", "linspace", "eye", "tril_indices", "triu_indices")


def check_ops(row: RowGraph) -> None:
    """Checks every op that the loss depends on, except those that only make segments.

    Raises:
        MixedError: an op joins positions.
    """
    totals: set[str] = set()  # numbers made of all positions
    counts = _Counts(row)
    for node in row.nodes:
        if node.name not in row.live or node.op != "call_function":
            continue
        info = row.program.info.get(node.name)
        if info is None:
            continue
        counts.look_at(node)
        if node in row.attentions:
            continue
        operands = tensor_operands(node, row.program.info)
        sources = row.sources[node.name]
        if len(sources) == 1 and sources <= row.program.inputs.keys():
            _check_scan(row, node, operands)
            continue  # see `row_inputs.py`
        shapes = [row.program.info[x.name].shape for x in (*operands, node)]
        along = [any(map(row.along, shape)) for shape in shapes]
        reads = any(x.name in totals for x in operands)
        if reads or (any(along) and not info.shape and row.learned(node)):
            totals.add(node.name)
        if not any(along):
            continue
        problem = _problem(row, node, operands)
        if reads and along[-1]:
            problem = "changes each position by a number that is made of all"
        if problem:
            raise MixedError(f"{row.where(node)} {problem}")


def _check_scan(row: RowGraph, node: fx.Node, operands: Sequence[fx.Node]) -> None:
    """Checks a value made of one input alone: a scan joins positions by their contents."""
    joins = _problem(row, node, operands) == "joins positions"
    if joins and op_name(node) in _SCANS:
        raise MixedError(f"{row.where(node)} joins positions")


def _problem(row: RowGraph, node: fx.Node, operands: Sequence[fx.Node]) -> str:
    """Returns how a node joins positions, or "" if it does not."""
    info = row.program.info[node.name]
    rule = row.rules[node.name]
    if not operands:
        made = op_name(call_of(node)) in _GENERATORS
        return "counts positions in the row, not in each sequence" if made else ""
    if not info.shape:
        return ""  # sums up the loss, or its divisor
    if rule.reason:
        return f"has no rule by which a position is by itself ({rule.reason})"
    along = {name for name, size in rule.sizes.items() if row.along(size)}
    if any(rule.slices[cut][1] for cut in rule.slices if cut in along):
        return "moves positions"
    inputs = {name for dims in rule.operands for dim in dims for name in dim}
    output = [name for dim in rule.output for name in dim]
    sliced = {name for pair in rule.slices.items() for name in (pair[0], pair[1][0])}
    if (along & rule.whole) - sliced or (along & inputs) - set(output) - sliced:
        return "joins positions"
    if sum(name in along for name in output) > 1:
        return "pairs positions"
    return ""


class _Counts:
    """Tracks numbers of the whole row: its length, or counts of an input's elements.

    A loss may be divided by such a number, at each position or after it is summed. Any other use
    differs from the result of a sequence alone.
    """

    def __init__(self, rows: RowGraph) -> None:
        self.rows = rows
        self._counts: set[str] = set()
        self._times: dict[str, fx.Node] = {}  # along the row, and where such a number came in

    def look_at(self, node: fx.Node) -> None:
        """Checks a node, after all nodes that it reads.

        Raises:
            MixedError: positions multiplied by such a number enter an op that is not linear.
        """
        rows, info = self.rows, self.rows.program.info
        operands = tensor_operands(node, info)
        given = [i for i, x in enumerate(operands) if x.name in self._times]
        along = any(map(rows.along, info[node.name].shape))
        if given and not _is_linear(rows.rules[node.name].linear, given):
            origin = self._times[operands[given[0]].name]
            raise MixedError(
                f"{rows.where(origin)} changes each position by a number that is of the whole row"
            )
        counted = _length_as_number(node, rows) or any(x.name in self._counts for x in operands)
        if along and (counted or given):
            self._times[node.name] = node if counted else self._times[operands[given[0]].name]
        read = any(rows.along(size) for x in operands for size in info[x.name].shape)
        total = read and not info[node.name].shape and not rows.learned(node)
        if not along and (counted or total):
            self._counts.add(node.name)


def _is_linear(linear: str, operands: Sequence[int]) -> bool:
    """Whether an op is linear in these of its operands."""
    if linear == "first":
        return list(operands) == [0]
    return linear == "all" or (linear == "one" and len(operands) == 1)


def _length_as_number(node: fx.Node, rows: RowGraph) -> bool:
    """Whether an op computes with the row's length, other than as a size."""
    call = call_of(node)
    schema = getattr(call.target, "_schema", None)
    if schema is None or op_name(call) in _GENERATORS:
        return False
    kinds = {a.name: str(a.type) for a in schema.arguments}
    return any(
        isinstance(x, fx.Node) and x.name not in rows.program.info and rows.of_length(x)
        for name, x in arguments(call).items()
        if kinds[name].removeprefix("Optional[").rstrip("]") in _NUMBERS
    )
