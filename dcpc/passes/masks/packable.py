"""Whether rows of a model may hold several sequences, each with the loss it has alone.

Three things have to hold, and each is looked up in the graph:

* every attention along the sequence has a `segment`, made of one input, that tells sequences apart
  as they are: it is computed for a few rows;
* nothing else joins positions: by its sharding rule an op has the sequence free, except for what
  adds up the loss at the end, and nothing counts positions in the row;
* what is computed of one input alone (shifted labels, masks of them) stays at its place, or a fixed
  number of places before it: each element is changed in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from dcpc.buckets import BATCH
from dcpc.fx.graphs import source_line
from dcpc.ir import Packable, Program, call_of, tensor_operands
from dcpc.passes.sharding.attention_ways import attentions
from dcpc.passes.sharding.op_kinds import arguments
from dcpc.passes.sharding.rule_types import OpSharding

# Lengths of the sequences of the rows that segments are computed for.
_ROWS = ((3, 1, 1, 4, 2), (1, 6, 4), (11,), (5, 6), (2, 2, 2, 2, 3), (1,) * 11)
_SIZE, _BATCH = 11, 2
_SPECIAL = 24  # numbers that an input is compared with, looked at for each place
# Ops that join positions by what they hold: no number that is tried shows all of it.
_SCANS = ("cumsum", "cumprod", "cummax", "cummin", "any", "all", "sum", "amax", "amin")
# Types of arguments that are numbers to compute with, as a schema writes them; sizes are `int`.
_NUMBERS = ("Tensor", "number", "float")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_GENERATORS = ("arange", "linspace", "eye", "tril_indices", "triu_indices")


class _MixedError(Exception):
    """What joins the sequences of a row."""


class _FailedError(_MixedError):
    """What could not be computed for an example."""


def packable(program: Program, rules: Mapping[str, OpSharding]) -> Packable:
    """Returns what a model makes of several sequences in one row.

    Args:
        program: the traced model, its masks recognised.
        rules: node name -> its sharding rule.
    """
    names = [name for name in program.symbols if name != BATCH]
    if len(names) != 1:
        return Packable((), {}, "its buckets have not one named dim besides the batch")
    looked = _RowAnalysis(program, rules, names[0])
    found = Packable((), {})
    try:
        found = replace(found, marks=looked.marks())
        looked.check_nodes()
        found = replace(found, dropped=looked.dropped())
        by_positions, by_numbers = looked.kinds()
        return replace(found, by_positions=by_positions, by_numbers=by_numbers)
    except _MixedError as reason:
        return replace(found, reason=str(reason))


class _RowAnalysis:
    def __init__(self, program: Program, rules: Mapping[str, OpSharding], dim: str) -> None:
        self.program, self.rules, self.dim = program, rules, dim
        self.length = program.symbols[dim]
        self.nodes = list(program.gm.graph.nodes)
        self.sources = self._sources()
        self.live = self._live()

    # ------------------------------------------------------------------------------ attention

    @cached_property
    def attentions(self) -> list[fx.Node]:
        """Attentions whose queries or keys are along the sequence."""
        found = []
        for node in attentions(self.program):
            q, k = (self.program.info[x.name].shape[2] for x in node.all_input_nodes[:2])
            if self._along(q) or self._along(k):
                found.append(node)
        return found

    def marks(self) -> tuple[str, ...]:
        """The input that every attention tells sequences apart by."""
        if not self.attentions:
            raise _MixedError(self._without_attention())
        found: set[str] = set()
        for node in self.attentions:
            if _segment(node) is None:
                raise _MixedError(f"{self._where(node)} {self._without_segment(node)}")
            if self.program.info[node.all_input_nodes[0].name].shape[2] != self.length:
                raise _MixedError(f"{self._where(node)} has queries of a part of the row")
            found |= self.sources[_named(_segment(node))]
        inputs = tuple(sorted(self.program.inputs[p] for p in found if p in self.program.inputs))
        if len(inputs) != len(found) or len(inputs) != 1:
            told = ", ".join(sorted(found)) or "nothing that is an input"
            raise _MixedError(f"its attentions tell sequences apart by {told}, not by one input")
        return inputs

    def _without_attention(self) -> str:
        """Why no attention is known: what looks like one is named, with what it may do."""
        for node in self.nodes:
            shape = self.program.info[node.name].shape if node.name in self.program.info else ()
            if "softmax" in _op(node) and sum(map(self._along, shape)) > 1:
                return (
                    f"{self._where(node)} is a softmax over pairs of positions that is no "
                    "attention which dcpc knows: its scores may be scaled and masked, and here "
                    "something else is done with them, such as a bias or tanh; without it, or by "
                    "F.scaled_dot_product_attention with a mask of truth values, rows may be packed"
                )
        return "it has no attention that dcpc knows, and so nothing to keep apart"

    def _without_segment(self, node: fx.Node) -> str:
        """Why an attention tells no sequences apart: it has no mask, or one that is not read."""
        mask = arguments(node)["mask"]
        if not isinstance(mask, fx.Node):
            return "sees all of a row, whatever sequence it is of"
        notes = (n for n in self.program.notes if n.startswith(f"mask {mask.name} of "))
        why = next(notes, "").partition("stays a tensor: ")[2] or "it has other limits as well"
        return (
            f"has a mask of which dcpc cannot tell that it keeps sequences apart: {why}; "
            "make it of truth values, `segment[:, :, None] == segment[:, None]` and comparisons of "
            "positions in the row (torch.arange, not a slice of a buffer)"
        )

    def kinds(self) -> tuple[bool, bool]:
        """Whether the input may hold positions that restart, and the sequences' numbers."""
        (name,) = self.marks()
        placeholder = next(p for p, n in self.program.inputs.items() if n == name)
        by_positions = all(self._tells_apart(placeholder, row, positions_of(row)) for row in _ROWS)
        by_numbers = all(self._tells_apart(placeholder, row, numbers_of(row)) for row in _ROWS)
        # A number says which sequence it is: beside the attentions nothing may depend on it.
        by_numbers = by_numbers and not self._changed(placeholder, (1, 2, 3))
        if not by_positions and not by_numbers:
            raise _MixedError(
                f"neither positions that restart in each sequence nor its number, given as {name}, "
                "make its attentions keep sequences apart"
            )
        return by_positions, by_numbers

    def _tells_apart(self, placeholder: str, lengths: Sequence[int], given: Tensor) -> bool:
        """Whether all segments are equal just where two positions are of one sequence."""
        own = numbers_of(lengths)
        expected = own.unsqueeze(1) == own.unsqueeze(0)
        value = given.to(self.program.info[placeholder].dtype).expand(_BATCH, -1)
        segments = {_named(_segment(node)) for node in self.attentions}
        values = self._values(placeholder, value, segments)
        return all(
            bool(((x.unsqueeze(2) == x.unsqueeze(1)) == expected).all()) for x in values.values()
        )

    # ---------------------------------------------------------------------------- other nodes

    def check_nodes(self) -> None:
        """Looks at every op that the loss depends on, but for what tells sequences apart.

        Raises:
            _MixedError: one joins positions.
        """
        totals: set[str] = set()  # numbers made of all positions
        counts = _Counts(self)
        for node in self.nodes:
            if node.name not in self.live or node.op != "call_function":
                continue
            info = self.program.info.get(node.name)
            if info is None:
                continue
            counts.look_at(node)
            if node in self.attentions:
                continue
            operands = tensor_operands(node, self.program.info)
            if len(self.sources[node.name]) == 1 and self._of_input(node):
                self._check_scan(node, operands)
                continue  # see `dropped`
            shapes = [self.program.info[x.name].shape for x in (*operands, node)]
            along = [any(map(self._along, shape)) for shape in shapes]
            reads = any(x.name in totals for x in operands)
            learned = not self.sources[node.name].isdisjoint(self.program.parameters)
            if reads or (any(along) and not info.shape and learned):
                totals.add(node.name)
            if not any(along):
                continue
            problem = self._problem(node, operands)
            if reads and along[-1]:
                problem = "changes each position by a number that is made of all"
            if problem:
                raise _MixedError(f"{self._where(node)} {problem}")

    def _check_scan(self, node: fx.Node, operands: Sequence[fx.Node]) -> None:
        """Looks at what is made of an input alone: a scan joins positions by what they hold."""
        joins = self._problem(node, operands) == "joins positions"
        if joins and _op(node) in _SCANS:
            raise _MixedError(f"{self._where(node)} joins positions")

    def _problem(self, node: fx.Node, operands: Sequence[fx.Node]) -> str:
        """How a node joins positions, "" where it does not."""
        info = self.program.info[node.name]
        rule = self.rules[node.name]
        if not operands:
            made = _op(call_of(node)) in _GENERATORS
            return "counts positions in the row, not in each sequence" if made else ""
        if not info.shape:
            return ""  # adds up the loss, or what it is divided by
        if rule.reason:
            return f"has no rule by which a position is by itself ({rule.reason})"
        along = {name for name, size in rule.sizes.items() if self._along(size)}
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

    # ------------------------------------------------------------------ what one input becomes

    def dropped(self) -> dict[str, int]:
        """How many elements at the beginning of a row the loss does not depend on, by input.

        Raises:
            _MixedError: what is computed of an input alone joins positions.
        """
        found = {}
        for placeholder, name in self.program.inputs.items():
            if self.length in self.program.info[placeholder].shape:
                found[name] = self._shift(placeholder, name)
        return found

    def _shift(self, placeholder: str, name: str) -> int:
        """By how many places what is used of an input lies before its own place."""
        shifts = set()
        for node in self._frontier(placeholder):
            if not self.program.info[node.name].shape:
                continue  # how many labels count
            moved = self._moved(placeholder, node)
            used = sorted(t for t, places in moved.items() if places)
            k = used[0] if used else 0
            late = range(k, _SIZE)
            if used != list(late) or any(moved[t] != {t - k} for t in late):
                raise _MixedError(
                    f"{self._where(node)} has what it reads of '{name}' at other places"
                )
            shifts.add(k)
        if len(shifts) > 1:
            raise _MixedError(
                f"it reads '{name}' at its own place and {max(shifts)} places on, which in a row "
                "is the next sequence's"
            )
        return shifts.pop() if shifts else 0

    def _moved(self, placeholder: str, node: fx.Node) -> dict[int, set[int]]:
        """Place in the row that is changed -> places at which a node's value changes."""
        found: dict[int, set[int]] = {}
        info = self.program.info[placeholder]
        dim = info.shape.index(self.length)
        special = self._special(placeholder) if info.dtype in (torch.int64, torch.int32) else ()
        numbers = [0, 2, *([-100] if info.dtype.is_signed else ()), *special]
        value = self._filled(placeholder, 1)
        before = self._values(placeholder, value, [node.name])[node.name]
        for t in range(_SIZE):
            found[t] = set()
            for number in numbers:
                changed = value.clone()
                changed.select(dim, t).fill_(number)
                try:
                    after = self._values(placeholder, changed, [node.name])[node.name]
                except _FailedError:
                    if number in (0, 2):
                        raise
                    continue  # it is an index of something
                found[t] |= self._places(node, before != after)
        return found

    def _special(self, placeholder: str) -> list[int]:
        """Numbers that what is made of an input alone compares it with, and their neighbours."""
        mine = frozenset({placeholder})
        nodes = (n for n in self.nodes if n.op == "call_function" and self.sources[n.name] == mine)
        given = {x for n in nodes if _op(n) in _COMPARISONS for x in n.args if isinstance(x, int)}
        return sorted({x + step for x in given for step in (-1, 0, 1)} - {0, 1, 2, -100})[:_SPECIAL]

    def _places(self, node: fx.Node, differs: Tensor) -> set[int]:
        """The places in the row of the elements that are true."""
        shape = self.program.info[node.name].shape
        dims = [d for d, size in enumerate(shape) if self._along(size)]
        if len(dims) != 1:
            return set(range(_SIZE)) if differs.any() else set()
        (dim,) = dims
        rows = sympy.Poly(shape[dim], *shape[dim].free_symbols)
        batch = self.program.symbols.get(BATCH)
        size = differs.shape[dim] // (_BATCH if batch in rows.gens else 1)
        at = differs.nonzero()[:, dim] % size
        return {int(i) for i in at}

    def _changed(self, placeholder: str, numbers: Iterable[int]) -> bool:
        """Whether what is used of an input beside the attentions depends on which number it is."""
        names = {node.name for node in self._frontier(placeholder)}
        seen = [self._values(placeholder, self._filled(placeholder, n), names) for n in numbers]
        return any(not torch.equal(seen[0][n], other[n]) for other in seen[1:] for n in names)

    def _filled(self, placeholder: str, number: int) -> Tensor:
        info = self.program.info[placeholder]
        return torch.full(self._sizes(info.shape), number).to(info.dtype)

    def _frontier(self, placeholder: str) -> list[fx.Node]:
        """The last values that are made of an input alone, as far as the loss depends on them."""
        mine = frozenset({placeholder})
        found = []
        for node in self.nodes:
            own = self.sources.get(node.name) == mine and node.name in self.program.info
            users = [
                u for u in node.users
                if u.name in self.live and u.name not in self.program.scalars
                and not _is_segment(node, u)
            ]  # fmt: skip
            if own and any(self.sources[u.name] != mine for u in users):
                found.append(node)
        return found

    # ---------------------------------------------------------------------------------- graph

    def _of_input(self, node: fx.Node) -> bool:
        return self.sources[node.name] <= self.program.inputs.keys()

    def _sources(self) -> dict[str, frozenset[str]]:
        """Placeholders that each node's value depends on; of a size none."""
        found: dict[str, frozenset[str]] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                found[node.name] = frozenset({node.name})
            elif node.name in self.program.scalars:
                found[node.name] = frozenset()
            else:
                found[node.name] = frozenset().union(*(found[n.name] for n in node.all_input_nodes))
        return found

    def _live(self) -> set[str]:
        """Nodes that the loss depends on other than by telling sequences apart."""
        found = {self.program.loss, "output"}
        for node in reversed(self.nodes):
            if any(u.name in found and not _is_segment(node, u) for u in node.users):
                found.add(node.name)
        return found

    def _values(self, placeholder: str, value: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """The values of nodes that are made of one input alone."""
        mine = frozenset({placeholder})
        known: dict[fx.Node, object] = {}
        for node in self.nodes:
            if node.name == placeholder:
                known[node] = value
            elif node.name in self.program.scalars:
                known[node] = self._sizes((self.program.scalars[node.name],))[0]
            elif (
                node.op == "call_function"
                and self.sources[node.name] <= mine
                and all(n in known for n in node.all_input_nodes)
            ):
                given = (node.args, {**node.kwargs})
                args, kwargs = tree_map(lambda x: known[x] if isinstance(x, fx.Node) else x, given)
                try:
                    known[node] = node.target(*args, **kwargs)
                except (RuntimeError, IndexError, ValueError, TypeError) as e:
                    raise _FailedError(
                        f"{self._where(node)} cannot be looked into: {e}, at {_SIZE} positions"
                    ) from e
        by_name = {node.name: x for node, x in known.items() if isinstance(x, Tensor)}
        return {name: by_name[name] for name in names}

    def _sizes(self, shape: Iterable[sympy.Expr]) -> list[int]:
        sizes = {self.length: _SIZE}
        if BATCH in self.program.symbols:
            sizes[self.program.symbols[BATCH]] = _BATCH
        return [int(sympy.sympify(s).subs(sizes)) for s in shape]

    def of_length(self, number: fx.Node) -> bool:
        """Returns whether a number that is no tensor depends on the row's length."""
        size = self.program.scalars.get(number.name)
        if size is not None:
            return self._along(size)
        return any(map(self.of_length, number.all_input_nodes))

    def _along(self, size: sympy.Expr) -> bool:
        return self.length in sympy.sympify(size).free_symbols

    def _where(self, node: fx.Node) -> str:
        line = source_line(node)
        return f"node {node.name} ({node.target}{f', {line}' if line else ''})"


class _Counts:
    """Numbers that a row has as a whole: its length, how many of an input's elements are something.

    A loss may be divided by one, at its positions or when they are added up. What else is done
    with it differs from what a sequence does alone.
    """

    def __init__(self, rows: _RowAnalysis) -> None:
        self.rows = rows
        self._counts: set[str] = set()
        self._times: dict[str, fx.Node] = {}  # along the row, and where such a number came in

    def look_at(self, node: fx.Node) -> None:
        """Looks at a node after all that it reads.

        Raises:
            _MixedError: positions that are times such a number go into what is not linear.
        """
        rows, info = self.rows, self.rows.program.info
        operands = tensor_operands(node, info)
        given = [i for i, x in enumerate(operands) if x.name in self._times]
        along = any(map(rows._along, info[node.name].shape))
        if given and not _is_linear(rows.rules[node.name].linear, given):
            origin = self._times[operands[given[0]].name]
            raise _MixedError(
                f"{rows._where(origin)} changes each position by a number that is of the whole row"
            )
        counted = _length_as_number(node, rows) or any(x.name in self._counts for x in operands)
        if along and (counted or given):
            self._times[node.name] = node if counted else self._times[operands[given[0]].name]
        learned = not rows.sources[node.name].isdisjoint(rows.program.parameters)
        read = any(rows._along(size) for x in operands for size in info[x.name].shape)
        if not along and (counted or (read and not learned and not info[node.name].shape)):
            self._counts.add(node.name)


def _is_linear(linear: str, operands: Sequence[int]) -> bool:
    """Whether an op is linear in these of its operands."""
    if linear == "first":
        return list(operands) == [0]
    return linear == "all" or (linear == "one" and len(operands) == 1)


def _length_as_number(node: fx.Node, rows: _RowAnalysis) -> bool:
    """Whether an op computes with the row's length, other than as a size."""
    call = call_of(node)
    schema = getattr(call.target, "_schema", None)
    if schema is None or _op(call) in _GENERATORS:
        return False
    kinds = {a.name: str(a.type) for a in schema.arguments}
    return any(
        isinstance(x, fx.Node) and x.name not in rows.program.info and rows.of_length(x)
        for name, x in arguments(call).items()
        if kinds[name].removeprefix("Optional[").rstrip("]") in _NUMBERS
    )


def positions_of(lengths: Iterable[int]) -> Tensor:
    """Returns 0, 1, 2, ... for each sequence, one after the other."""
    return torch.cat([torch.arange(n) for n in lengths])


def numbers_of(lengths: Sequence[int]) -> Tensor:
    """Returns the number of its sequence for each position, from 1."""
    return torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))


def _segment(node: fx.Node) -> fx.Node | None:
    found = arguments(node)["segment"]
    return found if isinstance(found, fx.Node) else None


def _named(node: fx.Node | None) -> str:
    assert node is not None, "an attention without segments is refused before"
    return node.name


def _op(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", ""))


def _is_segment(node: fx.Node, user: fx.Node) -> bool:
    """Whether a node is used to tell sequences apart and for nothing else."""
    if str(user.target) != "dcpc.attention.default":
        return False
    others = [x for x in user.all_input_nodes[:3] if x is node]
    return _segment(user) is node and not others and arguments(user)["keep"] is not node
