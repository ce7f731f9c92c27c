"""The frozen types that cross a phase border: the only thing two phases share.

Data goes one way: `Program` (trace) -> `Placement`, `Recompute`, `Plan` (passes) -> `Partition` and
`Profile` (codegen, symbolic_profile) -> a variant that runs (codegen, runtime). Decisions refer to
nodes of the program's forward graph **by name** and never edit it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from dcpc.buckets import Bucket, Sizes

# ---------------------------------------------------------------------------------------- trace


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a node's value before it runs.

    Attributes:
        shape: size of each dim, as an expression of the bucket's named dims.
        dtype: element type.
        requires_grad: whether a gradient flows through the value.
    """

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def numel(self) -> sympy.Expr:
        """Number of elements."""
        return sympy.Mul(*self.shape)

    @property
    def size_bytes(self) -> sympy.Expr:
        """Bytes of a dense tensor of this shape."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Program:
    """A model captured once: a functional forward graph from inputs to what it returns.

    Of a model that is trained that is one scalar, the loss; a program may return other tensors.

    The graph module's placeholders are, in order: parameters, buffers and constants, inputs. It is
    read-only: a later phase works on a copy.

    Attributes:
        gm: the forward graph; its outputs are `outputs`.
        parameters: placeholder name -> the parameter's name in the user's module.
        buffers: placeholder name -> the buffer's name in the user's module.
        constants: placeholder name -> a tensor the model's code creates.
        inputs: placeholder name -> the name of the user's argument.
        symbols: dim name -> the symbol that stands for it in every expression.
        info: node name -> what is known of its value; nodes without a tensor value are absent.
        scalars: name of a node whose value is an integer size -> its expression.
        outputs: names of the nodes whose values it returns, the loss first.
        begins: positions of those that backward begins at; none: it has no backward.
        hints: dim name -> the size it had in the trace.
        graph_hash: identifies the graph; plans carry it.
        zero_gradients: placeholders of parameters whose gradient is zero: the plain model's loss
            depends on them, what is left of the graph does not.
        notes: what a user should know of it, such as masks that were not recognised, a line each.
        pieces: whether outputs besides the loss stay split over the ranks as they are made.
    """

    gm: fx.GraphModule
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    inputs: Mapping[str, str]
    symbols: Mapping[str, sympy.Symbol]
    info: Mapping[str, TensorInfo]
    scalars: Mapping[str, sympy.Expr]
    outputs: tuple[str, ...]
    begins: tuple[int, ...]
    hints: Mapping[str, int]
    graph_hash: str
    zero_gradients: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    pieces: bool = False

    @property
    def whole_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that each rank returns whole."""
        return self.outputs[:1] if self.pieces else self.outputs

    @property
    def loss(self) -> str:
        """Name of the node whose value is the loss, or whatever is returned first."""
        return self.outputs[0]

    @property
    def learning(self) -> tuple[str, ...]:
        """Placeholders that get a gradient: parameters, then inputs."""
        return tuple(n for n in (*self.parameters, *self.inputs) if self.info[n].requires_grad)

    def dims(self, sizes: Sizes) -> dict[sympy.Symbol, int]:
        """Returns symbol -> length; a model without a batch has no symbol for it."""
        return {self.symbols[n]: size for n, size in sizes.items() if n in self.symbols}


def call_of(node: fx.Node) -> fx.Node:
    """Returns the call that makes a node's tensor: the node, or the call it is one result of.

    `topk` returns a tuple, which is no value of its own: `getitem(topk, 1)` stands for the call and
    has its operands, so that each result is split as suits it.
    """
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    return node


def is_tuple(node: fx.Node, info: Mapping[str, TensorInfo]) -> bool:
    """Returns whether a node is several results of a call, each a tensor with a node of its own."""
    return bool(node.users) and all(
        user.target is operator.getitem and user.name in info for user in node.users
    )


def tensor_operands(node: fx.Node, info: Mapping[str, TensorInfo]) -> list[fx.Node]:
    """Returns the tensor arguments of a call in order, repeats and members of lists included.

    Those of one of several results (`getitem`) are those of the call that makes it.
    """
    call = call_of(node)
    found: list[fx.Node] = []
    fx.node.map_arg((call.args, call.kwargs), found.append)
    return [operand for operand in found if operand.name in info]


# ---------------------------------------------------------------------------------------- masks

# Which keys anybody sees, or which sequence a position is of, as an expression of tensors by
# (sample, key): `("get", name, fixed dims and their positions, dim of the sample or -1, dim of the
# key or -1)`, or an op and its arguments, each another expression or a number.
Recipe = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class MaskDecision:
    """What a mask of an attention says, recognised by the positions it compares.

    Attributes:
        before: keys before its own position that a query sees; None: all.
        after: keys after it; None: all.
        keep: which keys anybody sees; None: all.
        empty: what a query gives that sees no key, see `dcpc.attention`; "" leaves it as it is.
        segment: which sequence of its row a position is of, an integer: queries see only keys of
            their own; None: there is one.
    """

    before: int | None
    after: int | None
    keep: Recipe | None
    empty: str = ""
    segment: Recipe | None = None


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """The masks of a program's attentions.

    Attributes:
        decisions: name of an attention -> what its mask says.
        notes: why others stay as they are, a line each, for the report.
    """

    decisions: Mapping[str, MaskDecision]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Packable:
    """Whether a row of a model's inputs may hold several sequences, and by what it knows them.

    Attributes:
        marks: inputs that its attentions tell the sequences of a row apart by.
        dropped: input -> elements at the beginning of a row that the loss does not depend on.
        reason: why sequences of one row would not be as they are alone; "" where they are.
        by_positions: whether these inputs may hold positions that begin at 0 in each sequence.
        by_numbers: whether they may hold the number of each sequence, from 1.
    """

    marks: tuple[str, ...]
    dropped: Mapping[str, int]
    reason: str = ""
    by_positions: bool = False
    by_numbers: bool = False


# --------------------------------------------------------------------------------------- values


@dataclass(frozen=True, slots=True)
class Extent:
    """The elements of one dim that an op reads; counts below 0 are padding beside the dim.

    Attributes:
        dim: which one.
        first: elements at its beginning that are not read.
        last: elements at its end that are not read.
    """

    dim: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ValueRange:
    """What an op needs of an integer input's elements: torch raises an `IndexError` for others.

    Attributes:
        size: each is from 0 to below this,
        ignored: or this; None: there is no such value.
        reader: what reads them, for an error.
        extents: which elements are read; a dim without one is read whole.
    """

    size: int
    ignored: int | None
    reader: str
    extents: tuple[Extent, ...]


# ------------------------------------------------------------------------------------ placement


@dataclass(frozen=True, slots=True)
class Factor:
    """An atomic part of a dim: `[B, T*S, D]` has dims `(B) (T S) (D)`.

    Attributes:
        key: identity; factors that some op forces to be sharded alike have the same key.
        size: its global size.
        parent: the factor (by key) whose split this one follows, for a slice of a sharded dim; -1:
            none.
        shift: elements of the parent before this factor's first one.
    """

    key: int
    size: sympy.Expr
    parent: int = -1
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Label:
    """Where a value's elements are across the ranks of an SP group.

    `Label()` is replicated; `Label(partial=True)` is a sum that is still spread over the ranks;
    `Label(dim, index)` is sharded along the `index`-th factor of dim `dim`.
    """

    dim: int = -1
    index: int = 0
    partial: bool = False

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only its piece."""
        return self.dim >= 0

    def __str__(self) -> str:
        if self.partial:
            return "partial"
        if not self.sharded:
            return "replicated"
        return f"shard({self.dim}.{self.index})" if self.index else f"shard({self.dim})"


REPLICATED = Label()
PARTIAL = Label(partial=True)


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """The alternative chosen for one node: the label it wants of each tensor operand, and its own.

    Attributes:
        operands: one label for each tensor operand, in the order of `tensor_operands`.
        output: label of the value as the node makes it.
        name: the factor name of the op's sharding rule, or "ring"; "" when replicated.
        across: of a ring: ranks that share its positions, each with some of the heads.
    """

    operands: tuple[Label, ...]
    output: Label
    name: str = ""
    across: int = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """How a forward graph is split over the `sp` ranks of a group.

    Attributes:
        sp: ranks in the group.
        nodes: node name -> its chosen alternative; nodes without a tensor value are absent.
        factors: node name -> the factors of each dim of its value.
        parents: factor key -> factor, for every factor that is the parent of another.
        cost_s: predicted seconds of compute and collectives, forward and backward.
        width: largest number of variables that one table of the elimination had.
        graph_hash: the program it was made for.
        zigzag: factors (none is a slice of another) of which a rank has a chunk from either end.
    """

    sp: int
    nodes: Mapping[str, NodePlacement]
    factors: Mapping[str, tuple[tuple[Factor, ...], ...]]
    parents: Mapping[int, Factor]
    cost_s: float
    width: int
    graph_hash: str
    zigzag: frozenset[int] = frozenset()

    def key(self) -> tuple[object, ...]:
        """A hashable identity: equal keys lower to the same graph."""
        nodes = tuple((n, p) for n, p in sorted(self.nodes.items()))
        return (self.sp, self.graph_hash, nodes, tuple(sorted(self.zigzag)))

    def is_zigzag(self, factor: Factor) -> bool:
        """Returns whether a rank's piece of a factor is two runs, one from either end."""
        return (factor.key if factor.parent < 0 else factor.parent) in self.zigzag


# ---------------------------------------------------------------------------------------- padding


@dataclass(frozen=True, slots=True)
class RowCheck:
    """What must hold of a call's inputs at padded rows, lest the plain model reads padding.

    Attributes:
        node: name of a value that is made of inputs alone, by (sample, position).
        number: what each of its elements at a padded row must be equal to.
    """

    node: str
    number: float


@dataclass(frozen=True, slots=True)
class UnpadPlan:
    """Which values of a program are computed for valid rows alone, a row being (sample, position).

    Attributes:
        keep: name of the value that says which rows are valid, by (sample, position) alone: true,
            or a number that is added to scores, there 0; "": there is none.
        batch: key of the factor that counts samples.
        seq: key of the factor that counts positions.
        factors: node name -> the factors of each dim of its value.
        packed: names of values that are made for valid rows, in graph order.
        attentions: those of them that are attentions: samples are then sequences of one row.
        summed: names of values without rows that are made of valid rows alone: sums.
        checks: what must hold at padded rows.
        positions: positions that must be valid in every sample.
        runs: whether the valid positions of each sample must follow each other.
        nonempty: whether each sample must have a valid position.
        returned: names of what is returned beside the loss and is 0 at padded rows.
        reason: why all stays padded; "" where it need not.
    """

    keep: str
    batch: int
    seq: int
    factors: Mapping[str, tuple[tuple[Factor, ...], ...]]
    packed: tuple[str, ...]
    attentions: frozenset[str]
    summed: frozenset[str]
    checks: frozenset[RowCheck]
    positions: frozenset[int]
    runs: bool
    nonempty: bool
    returned: frozenset[str] = frozenset()
    reason: str = ""


# ------------------------------------------------------------------------- profile and variants


@dataclass(frozen=True, slots=True)
class Partition:
    """The forward and backward graphs one rank runs, as plain ATen calls in execution order.

    Both graphs free a value after its last use. Every node's `meta["val"]` is a FakeTensor (or
    SymInt) whose sizes are expressions of torch's own symbols; `names` translates them.

    Attributes:
        forward: placeholders: parameters, buffers and constants, inputs, integers; outputs: what
            the program returns, the loss first, then the values saved for backward.
        backward: placeholders: the saved values, then the forward's placeholders it needs, then the
            gradients of what it begins at; outputs: one gradient (or None) for each parameter and
            input that learns.
        resident: names of forward placeholders that hold parameters, buffers, constants or inputs.
        saved: names of the forward's nodes that are saved for backward, in output order.
        backward_primals: names of the forward placeholders that backward takes, in order.
        names: torch symbol -> expression of the bucket's dims (a local length is a symbol of its
            own, e.g. `seq_local`).
        returned: how many values the program returns.
        begins: which of them, by position, backward begins at.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    resident: tuple[str, ...]
    saved: tuple[str, ...]
    backward_primals: tuple[str, ...]
    names: Mapping[sympy.Symbol, sympy.Expr]
    returned: int = 1
    begins: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What the graphs of a partition run, as nodes of the joint graph in execution order.

    Attributes:
        primals: forward's placeholders.
        forward: its calls.
        outputs: what the program returns, the loss first.
        begins: positions among them that backward begins at.
        saved: values that forward returns for backward, besides.
        backward_primals: placeholders of forward that backward takes, too.
        tangents: the placeholders of the gradients of what backward begins at.
        backward: its calls; those of forward among them are made again.
        gradients: one (or None) for each parameter and input that learns.
    """

    primals: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    begins: tuple[int, ...]
    saved: tuple[fx.Node, ...]
    backward_primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]


@dataclass(frozen=True, slots=True)
class GatherUnits:
    """Parameters whose rows ranks share out, and which graphs gather, some at once.

    The order in which all ranks gather and sum, whatever shape they run, follows from this alone.

    Attributes:
        units: placeholders of the parameters of each, in the order of their first use.
        again: those that backward may gather again; the others stay from forward on.
        ranks: that share them out.
    """

    units: tuple[tuple[str, ...], ...]
    again: frozenset[int]
    ranks: int

    def events(
        self, summed: Collection[int], again: Collection[int]
    ) -> tuple[tuple[str, int], ...]:
        """Returns what backward does in order: ("gather" or "sum", number of a unit).

        A unit is gathered before the gradients of the one after it are summed: what needs it then
        finds it there.

        Args:
            summed: units of which some parameter has a gradient.
            again: units that are gathered again.
        """
        found: list[tuple[str, int]] = []
        for k in reversed(range(len(self.units))):
            if k - 1 in again:
                found.append(("gather", k - 1))
            if k in summed:
                found.append(("sum", k))
        return tuple(found)

    def within(self, parameters: Collection[str]) -> GatherUnits:
        """Returns the units of a program that has some of the parameters.

        Args:
            parameters: placeholders.
        """
        own = [tuple(n for n in unit if n in parameters) for unit in self.units]
        numbers = [k for k, unit in enumerate(own) if unit]
        again = frozenset(i for i, k in enumerate(numbers) if k in self.again)
        return GatherUnits(tuple(own[k] for k in numbers), again, self.ranks)


OUTSIDE = (-1, -1)  # the run and copy of what is in no copy


@dataclass(frozen=True, slots=True)
class Fold:
    """Repeated blocks of which three copies, first, middle and last, stand for all.

    Attributes:
        copy_of: a graph's node -> number of its run of blocks, and 0, 1 or 2; absent outside.
        others: of each run, the copies like the middle one that are not there; they run between it
            and the last.
        kept: call of a middle copy that gathers parameters again in backward -> how many of the
            others, from the last on, keep theirs from forward instead.
    """

    copy_of: Mapping[str, tuple[int, int]]
    others: tuple[int, ...]
    kept: Mapping[str, int] = field(default_factory=dict)

    def copy(self, name: str) -> tuple[int, int]:
        """Returns the run and copy of a node, `OUTSIDE` of all copies."""
        return self.copy_of.get(name, OUTSIDE)

    def count(self, name: str) -> int:
        """Returns how many calls a node stands for."""
        run, copy = self.copy(name)
        return 1 + self.others[run] if copy == 1 else 1

    def count_again(self, name: str) -> int:
        """Returns how many calls of backward a node stands for."""
        return self.count(name) - self.kept.get(name, 0)


@dataclass(frozen=True, slots=True)
class Work:
    """Calls of one partition that cost the same: what a roofline is evaluated on.

    Attributes:
        op_class: "matmul", "attention", "convolution", "pointwise", "reduction", "copy",
            "collective" or "unpriced".
        forward: whether they are in the forward graph.
        dtype: element type they compute in.
        ranks: ranks of the group, for collectives; else 1.
        count: number of such calls.
        flops: floating-point operations of one call, those of pointwise ops included.
        bytes_moved: bytes one call reads and writes.
        wire_bytes: bytes this rank sends in one call.
        op: which collective, such as "dcpc::all_to_all"; "" for other calls.
        messages: how often it sends and waits for an answer: once, a ring at every step.
    """

    op_class: str
    forward: bool
    dtype: torch.dtype
    ranks: int
    count: int
    flops: sympy.Expr
    bytes_moved: sympy.Expr
    wire_bytes: sympy.Expr
    op: str = ""
    messages: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """What one forward and backward costs one rank, as expressions of the dims, on any device.

    Two profiles are equal only if they are the same object, so that evaluating one can be cached.

    Attributes:
        flops: floating-point operations of matmuls, convolutions and attention, forward + backward
            (multiply and add count as two; causal attention counts the pairs it keeps).
        forward_flops: the forward's part of `flops`.
        bytes_moved: bytes read and written by every node.
        wire_bytes: bytes this rank sends in collectives.
        saved_bytes: activations kept between forward and backward (parameters and inputs excluded).
        peak_terms: live bytes at the program points that can be the peak, undominated ones only;
            parameters, buffers and inputs excluded, gradients included.
        peak_points: for each of `peak_terms` the name of the node at which it holds.
        parameter_bytes: bytes of all residents whose size is fixed: parameters, buffers, constants.
        input_bytes: bytes of the other residents.
        gradient_bytes: bytes of all gradients.
        work: every call, grouped by cost.
        unpriced: names of the ops that no table has: they count one operation an output element.
        symbols: the symbols the expressions are over, by name.
    """

    flops: sympy.Expr
    forward_flops: sympy.Expr
    bytes_moved: sympy.Expr
    wire_bytes: sympy.Expr
    saved_bytes: sympy.Expr
    peak_terms: tuple[sympy.Expr, ...]
    peak_points: tuple[str, ...]
    parameter_bytes: int
    input_bytes: sympy.Expr
    gradient_bytes: int
    work: tuple[Work, ...]
    unpriced: tuple[str, ...]
    symbols: tuple[sympy.Symbol, ...]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A setting of a bucket: how a micro-batch is run, and the seconds it is predicted to take.

    Attributes:
        sp: ranks of the group that shares a micro-batch.
        micro_batch: most samples; the placement is made for so many.
        menu_step: steps of the recompute menu that are taken.
        seconds_s: of a full micro-batch, forward and backward.
        fits: whether it is within a rank's memory.
    """

    sp: int
    micro_batch: int
    menu_step: int
    seconds_s: float
    fits: bool = field(default=True, kw_only=True)

    @property
    def rank_seconds(self) -> float:
        """Seconds of one rank's time that a sample takes."""
        return self.seconds_s * self.sp / self.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan(PlanRow):
    """The row chosen for one bucket.

    Attributes:
        bucket: the shape bucket.
        steps: steps that the recompute menu has.
        peak_bytes: predicted peak of activations and gradients on the fullest rank; parameters and
            optimizer state excluded.
        reason: why this row, in words.
    """

    bucket: Bucket
    steps: int
    peak_bytes: int
    reason: str
