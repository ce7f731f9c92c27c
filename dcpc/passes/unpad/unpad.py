"""Decides which values of a padded batch are computed for its valid rows alone.

    keep [batch, seq]           which rows are valid, as the attentions' masks say
      ├► row-wise ops           made for valid rows, one after the other: [1, rows]
      ├► attention with keep    the same; samples are sequences of one row
      ├► sums of rows           of valid rows, where padded ones surely add 0
      └► all other ops          get values [batch, seq] back, 0 at padded rows

Values made of inputs alone stay padded: they cost little, and random numbers are those of the
padded batch. A value is padded again only if its reader surely reads no padded row, or if it is 0
there in the plain model, too; conditions on the inputs of a call become checks. If one reader may
read padding, everything stays padded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from dcpc.fx.large_graphs import source_line
from dcpc.ir import Program, UnpadPlan, call_of, is_tuple, tensor_operands
from dcpc.ops.attention import hides
from dcpc.passes.sharding.sharding import Sharding
from dcpc.passes.unpad.row_dims import RowDims, RowKind
from dcpc.passes.unpad.zero_rows import Checks, ZeroRows

aten = torch.ops.aten

_ATTENTION = "dcpc.attention.default"
_DRAWS = ("dcpc.uniform.default", "dcpc.normal.default")
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_NO_PLAN = UnpadPlan(
    keep="",
    batch=-1,
    seq=-1,
    factors={},
    packed=(),
    attentions=frozenset(),
    summed=frozenset(),
    checks=frozenset(),
    positions=frozenset(),
    runs=False,
    nonempty=False,
)
MOST_POSITIONS = 16  # largest number of positions that a slice may read from each sample


class _PaddingReadError(Exception):
    """Raised where an op reads padded rows."""


def unpad(program: Program, sharding: Sharding, without: Collection[sympy.Expr] = ()) -> UnpadPlan:
    """Returns the values that are computed for valid rows alone, or why there are none.

    Args:
        program: the traced model, its masks recognised.
        sharding: factors and alternatives of the program.
        without: lengths whose padding is removed already.
    """
    found = _keeps(program, sharding)
    keeps = {n: k for n, k in found.items() if _length(sharding, k.name) not in without}
    if not keeps:
        return replace(_NO_PLAN, reason="no attention has a mask of padded keys that is recognised")
    exact = [k.name for k in keeps.values() if k.exact]
    keep, _ = Counter(exact or [k.name for k in keeps.values()]).most_common(1)[0]
    try:
        return _Plan(program, sharding, keep, keeps).run()
    except _PaddingReadError as why:
        return replace(_NO_PLAN, reason=str(why))


@dataclass(frozen=True, slots=True)
class _Keep:
    """The visible keys of an attention.

    Attributes:
        name: name of the boolean value, `[batch, seq]` or `[batch, 1, queries, seq]`.
        exact: whether the attention's mask consists of this alone: no bias, no dependence on
            queries.
    """

    name: str
    exact: bool


def _keeps(program: Program, sharding: Sharding) -> dict[str, _Keep]:
    """Returns attention -> its visible keys, as the first of all equal values.

    A model may make the same mask again for each attention.
    """
    first: dict[object, str] = {}
    spelled: dict[str, object] = {}
    learned = _learned(program)

    def spell(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        size = program.scalars.get(leaf.name)
        return size if size is not None else spelled[leaf.name]

    found: dict[str, _Keep] = {}
    for node in program.gm.graph.nodes:
        spelled[node.name] = node.name
        if node.op == "call_function" and str(node.target) not in _DRAWS:
            args = fx.node.map_aggregate((node.args, dict(node.kwargs)), spell)
            spelled[node.name] = first.setdefault(repr((node.target, args)), node.name)
        keep, shown = _keep_of(program, node), _shown(program, node)
        if keep is not None and _is_rows(sharding, keep.name):
            found[node.name] = _Keep(str(spelled[keep.name]), exact=True)
        elif shown is not None and shown.name not in learned and _is_pairs(sharding, shown.name):
            found[node.name] = _Keep(str(spelled[shown.name]), exact=False)
    return found


def _keep_of(program: Program, node: fx.Node) -> fx.Node | None:
    """Returns the visible keys of an attention, if they are its only mask beside position limits.

    A mask that is one row for all heads and queries counts as such.
    """
    if str(node.target) != _ATTENTION or len(node.args) < 4:
        return None
    mask, *keep = node.args[3:5]
    if not isinstance(mask, fx.Node):
        return keep[0] if keep and isinstance(keep[0], fx.Node) else None
    one_row = program.info[mask.name].shape[1:3] == (1, 1)
    return mask if one_row and not any(keep) else None


def _shown(program: Program, node: fx.Node) -> fx.Node | None:
    """Returns the visible keys by query, if an attention's mask is these and a bias.

    A hidden key's score is replaced by, or added to, a number that leaves it no weight.
    """
    if str(node.target) != _ATTENTION or len(node.args) != 4 or not set(node.kwargs) <= {"scale"}:
        return None
    mask = node.args[3]
    if not isinstance(mask, fx.Node):
        return None
    if mask.target is aten.where.ScalarOther:
        shown, _, number = mask.args
        dtype = program.info[mask.name].dtype
        hidden = isinstance(number, int | float) and hides(number, dtype)
        return shown if hidden and isinstance(shown, fx.Node) else None
    if mask.target is aten.add.Tensor and not mask.kwargs:
        given = [n for n in mask.args if isinstance(n, fx.Node)]
        return next((n for n in given if not program.info[n.name].requires_grad), None)
    return None


def _length(sharding: Sharding, name: str) -> sympy.Expr:
    """Returns the number of positions of a value of visible keys."""
    *_, positions = (factor for dim in sharding.factors[name] for factor in dim)
    return positions.size


def _is_rows(sharding: Sharding, name: str) -> bool:
    """Whether a value has one dim of samples and one of positions, and no more."""
    dims = [dim for dim in sharding.factors[name] if dim]
    return len(dims) == 2 and all(len(dim) == 1 for dim in dims) and dims[0] != dims[1]


def _is_pairs(sharding: Sharding, name: str) -> bool:
    """Whether a value has dims of samples, 1, queries (or 1) and positions, in this order."""
    dims = sharding.factors[name]
    alone = [len(dim) for dim in dims]
    return alone in ([1, 0, 1, 1], [1, 0, 0, 1]) and dims[0] != dims[3]


class _Plan:
    def __init__(
        self, program: Program, sharding: Sharding, keep: str, keeps: Mapping[str, _Keep]
    ) -> None:
        self.program, self.keep, self.keeps = program, keep, keeps
        batch, *_, seq = (f for dim in sharding.factors[keep] for f in dim)
        self.dims = RowDims(program, sharding, batch, seq)
        self.learned, self.drawn = _learned(program), _drawn(program)
        if keep in self.learned or keep in self.drawn:
            raise _PaddingReadError(f"which keys are seen ({keep}) is not of the inputs alone")
        self.zeros = ZeroRows(program, self.dims, self.learned, self.drawn)
        self.packed: dict[str, None] = {}
        self.attentions: set[str] = set()
        self.biased: set[str] = set()
        self.summed: set[str] = set()
        self.dirty: set[str] = set()  # padded values that are wrong at padded rows
        self.checks: set[Checks] = set()
        self.positions: set[int] = set()
        self.hiding: set[tuple[str, bool]] = set()
        self.returned: set[str] = set()
        self.runs = self.nonempty = False

    def run(self) -> UnpadPlan:
        """Returns the plan.

        Raises:
            _PaddingReadError: an op reads padded rows.
        """
        for node in self.program.gm.graph.nodes:
            if node.name not in self.program.info or node.name not in self.learned:
                continue
            if node.op == "call_function" and not self._pack(node):
                self._padded(node)
        self._outputs()
        if not self.packed:
            raise _PaddingReadError("no op is row by row")
        return UnpadPlan(
            keep=self.keep,
            batch=self.dims.batch,
            seq=self.dims.seq,
            factors=self.dims.sharding.factors,
            packed=tuple(self.packed),
            attentions=frozenset(self.attentions),
            biased=frozenset(self.biased),
            summed=frozenset(self.summed),
            checks=frozenset().union(*self.checks),
            positions=frozenset(self.positions),
            runs=self.runs,
            nonempty=self.nonempty,
            returned=frozenset(self.returned),
            hiding=frozenset(self.hiding),
        )

    def _pack(self, node: fx.Node) -> bool:
        """Returns whether a value is computed for valid rows, and records how."""
        if self._is_packed_attention(node):
            self.attentions.add(node.name)
            after, before = (node.kwargs.get(k) for k in ("after", "before"))
            self.runs |= before is not None or after not in (None, 0)
            self.nonempty |= node.kwargs.get("empty") == "nan"
        elif self._is_biased_attention(node):
            self.attentions.add(node.name)
            self.biased.add(node.name)
            self.hiding.add((self.keep, True))
        elif str(node.target) == _ATTENTION or not self.dims.is_row_wise(node):
            return False
        self.packed[node.name] = None
        return True

    def _is_packed_attention(self, node: fx.Node) -> bool:
        """Whether an attention can run on valid rows as packed sequences of one row.

        Each query then sees itself, so the rule for queries without keys does not matter.
        """
        if self.keeps.get(node.name) != _Keep(self.keep, exact=True):
            return False
        if any(a is not None for a in node.args[5:]):
            return False
        limits = [node.kwargs.get(k) for k in ("before", "after")]
        if not all(x is None or (isinstance(x, int) and x >= 0) for x in limits):
            return False
        if not set(node.kwargs) <= {"scale", "before", "after", "empty"}:
            return False
        return self._attends_rows(node)

    def _is_biased_attention(self, node: fx.Node) -> bool:
        """Whether an attention can run on valid rows with its mask read at their positions.

        Its mask hides all padded keys and shows each valid query a key, which is checked.
        """
        if self.keeps.get(node.name) != _Keep(self.keep, exact=False):
            return False
        mask = node.args[3]
        assert isinstance(mask, fx.Node), "a mask that shows keys"
        batch, positions = (f.size for f in self.dims.rows)
        samples, _, queries, keys = self.program.info[mask.name].shape
        whole = samples in (1, batch) and queries in (1, positions) and keys == positions
        return whole and self._attends_rows(node)

    def _attends_rows(self, node: fx.Node) -> bool:
        """Whether queries, keys, values and the result are rows, laid out as an attention's."""
        dims = self.dims
        tensors = [n.name for n in (*node.args[:3], node) if isinstance(n, fx.Node)]
        return all(
            dims.kind(n) is RowKind.ROWS
            and (dims.dim(n, dims.batch), dims.dim(n, dims.seq)) == (0, 2)
            for n in tensors
        )

    # ------------------------------------------------------------------ what reads values [B, S]

    def _padded(self, node: fx.Node) -> None:
        """Checks that an op on all rows does not read wrong values at padded ones."""
        reads = [n for n in tensor_operands(node, self.program.info) if self._is_unsure(n)]
        if not reads or self._is_sum(node):
            return
        if str(node.target) == _ATTENTION and self._hides(node, reads):
            if node.args[0] in reads:
                self.dirty.add(node.name)
            return
        for source in reads:
            checks = self.zeros.of(source)
            positions = self._read_positions(node, source)
            if checks is not None and source.name in self.packed:
                self.checks.add(checks)
            elif positions is not None:
                self.positions |= positions
            else:
                line = source_line(node)
                raise _PaddingReadError(
                    f"{node.name} ({node.target}) reads padded rows of {source.name}"
                    + (f" ({line})" if line else "")
                )

    def _is_unsure(self, node: fx.Node) -> bool:
        return node.name in self.packed or node.name in self.dirty

    def _is_sum(self, node: fx.Node) -> bool:
        """Whether an op sums over rows, to which padded ones add nothing."""
        if node.target is aten.nll_loss_nd.default:
            found = self._ignored(node)
        elif node.target in _SUMS and self.dims.kind(node.name) is RowKind.NONE:
            (source,) = tensor_operands(node, self.program.info)
            found = self.zeros.of(source) if source.name in self.packed else None
        else:
            return False
        if found is None:
            return False
        self.checks.add(found)
        self.summed.add(node.name)
        return True

    def _ignored(self, node: fx.Node) -> Checks | None:
        """Returns the checks under which a loss ignores padded rows, or None."""
        names, defaults = ("self", "target", "weight", "reduction", "ignore_index"), (1, -100)
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        reduction, ignored = (given.get(n, d) for n, d in zip(names[3:], defaults, strict=True))
        x, target = given["self"], given["target"]
        if not isinstance(x, fx.Node) or not isinstance(target, fx.Node):
            return None
        if x.name not in self.packed or reduction not in (1, 2):
            return None
        if not isinstance(ignored, int) or self.dims.kind(target.name) is not RowKind.ROWS:
            return None
        return self.zeros.checked(target.name, ignored)

    def _hides(self, node: fx.Node, reads: list[fx.Node]) -> bool:
        """Whether an attention hides padded keys; padded queries give padded rows.

        A query that sees no key may read all of them; that valid ones see a key is a check.
        """
        others = [n for n in tensor_operands(node, self.program.info)[3:] if n in reads]
        if others or not all(self._is_of_rows(n) for n in reads):
            return False
        query, key, value, *_ = node.args
        if key not in reads and value not in reads:
            return True
        keep = self.keeps.get(node.name)
        if keep is None or keep.name in self.learned or keep.name in self.drawn:
            return False
        assert isinstance(query, fx.Node)
        own, same = self._is_of_rows(query), keep.name == self.keep
        limited = set(node.kwargs) & {"before", "after"} or any(node.args[5:])
        if keep.exact and limited and not (own and same):
            return False
        batch, *_, seq = self.dims.keys(keep.name)
        if (batch, seq) != (self.dims.batch, self.dims.seq):
            return False
        self.hiding.add((keep.name, own))
        return True

    def _is_of_rows(self, node: fx.Node) -> bool:
        """Whether a value has rows laid out as attention's operands."""
        dims = self.dims
        return (dims.dim(node.name, dims.batch), dims.dim(node.name, dims.seq)) == (0, 2)

    def _read_positions(self, node: fx.Node, source: fx.Node) -> set[int] | None:
        """Returns the positions of every sample that an op reads; None: more than a few."""
        dim = self.dims.dim(source.name, self.dims.seq)
        args = node.args
        if dim is None or len(args) < 3 or args[0] is not source or args[1] != dim:
            return None
        start = args[2]
        if not isinstance(start, int) or start < 0:
            return None
        if node.target is aten.select.int:
            return {start}
        stop = args[3] if len(args) == 4 else None
        if node.target is not aten.slice.Tensor or not isinstance(stop, int):
            return None
        few = start < stop <= start + MOST_POSITIONS
        return set(range(start, stop)) if few else None

    def _outputs(self) -> None:
        """Checks the outputs: the loss must not depend on padding."""
        nodes = {n.name: n for n in self.program.gm.graph.nodes}
        unsure = {name for name in self.program.outputs if self._is_unsure(nodes[name])}
        if self.program.loss in unsure:
            raise _PaddingReadError(f"{self.program.loss} is returned with its padded rows")
        self.returned |= unsure


def _learned(program: Program) -> set[str]:
    """Returns the names of the values that depend on parameters or trainable inputs."""
    learns = {n for n in program.inputs if program.info[n].requires_grad}
    return _made_of(program, {*program.parameters, *learns})


def _drawn(program: Program) -> set[str]:
    """Returns the names of the values that depend on random numbers."""
    nodes = program.gm.graph.nodes
    return _made_of(program, {n.name for n in nodes if str(n.target) in _DRAWS})


def _made_of(program: Program, names: set[str]) -> set[str]:
    found = set(names)
    for node in program.gm.graph.nodes:
        valued = node.name in program.info or is_tuple(node, program.info)
        if node.op == "call_function" and valued and _reads(call_of(node), found):
            found.add(node.name)
    return found


def _reads(node: fx.Node, names: set[str]) -> bool:
    return any(n.name in names for n in node.all_input_nodes)
