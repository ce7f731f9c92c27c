"""Turns a lowered forward graph into one joint forward-and-backward graph with symbolic sizes.

torch differentiates each call (`tape.py`); no code here knows a derivative. The backwards of the
calls follow in reverse order, and the gradients of one value are added in the order of autograd's
engine. Each distinct call is traced once: a deep model, or another placement of the same model,
costs little more than its nodes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from dcpc.codegen.joint.gathers import Gathering, UnitNodes
from dcpc.codegen.joint.library import Library, Renamed
from dcpc.codegen.joint.memories import Ref
from dcpc.codegen.joint.tape import Op, Piece
from dcpc.codegen.lower.integer_inputs import IntegerInput, quotients_in
from dcpc.codegen.lower.lower import Lowered
from dcpc.errors import CodegenError
from dcpc.fx.integers import Emitter
from dcpc.fx.large_graphs import LazyGraphModule, without_unused
from dcpc.fx.leaves import is_symbolic, leaf_key
from dcpc.ir import GatherUnits, Program

aten = torch.ops.aten

# Sizes of pieces in the trace, all different, none of them 0 or 1, which torch would fix in the
# graph. Dims have the sizes of the program's own trace: a model may take no others (a position
# table of 32 rows).
HINTS = (53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127)
MOST_RAISED = 64  # most steps by which dims' sizes in the trace are raised for a quotient
GROUP = "the group"  # name of the collectives' group in pieces


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph. Its placeholders are the lowered graph's, then the gradient of the loss.

    If the program returns more than a loss, the gradient of each output where backward begins.

    A node's `meta["storage"]` names the storages of its tensors; a fake tensor in `meta["val"]` may
    be shared by several nodes.

    Attributes:
        gm: graph module; outputs: the program's, then a gradient (or None) for each of `trainable`.
        primals: names of the placeholders, without those gradients.
        begins: indices of the program's outputs at which backward begins.
        tangents: placeholder names of the gradients of these outputs.
        forward: names of the forward nodes.
        owner: name of a node -> name of the program's node that it computes or, in backward,
            differentiates.
        trainable: placeholder names of the parameters and inputs that require a gradient.
        names: torch symbol -> expression of dims and pieces.
        guards: assumptions of torch about sizes, over the expressions of `names`.
        fake_mode: fake mode of the values in the graph.
        units: units of parameters that the graph gathers; None: parameters are whole.
        gathers: nodes of each unit, in order.
    """

    gm: fx.GraphModule
    primals: tuple[str, ...]
    begins: tuple[int, ...]
    tangents: tuple[str, ...]
    forward: frozenset[str]
    owner: Mapping[str, str]
    trainable: tuple[str, ...]
    names: Mapping[sympy.Symbol, sympy.Expr]
    guards: tuple[sympy.Basic, ...]
    fake_mode: FakeTensorMode
    units: GatherUnits | None = None
    gathers: tuple[UnitNodes, ...] = ()

    def gathered(self, units: GatherUnits) -> Joint:
        """Returns the graph with gathers of parameters, and uses up this one."""
        made = Gathering(self.gm, units, self.fake_mode)
        gathers = made.run(self.forward, self.trainable)
        nodes = (n.name for u in gathers for n in (u.gather, *u.whole))
        return replace(
            self,
            forward=self.forward | frozenset(nodes),
            owner={**self.owner, **made.owner},
            units=units,
            gathers=gathers,
        )


def with_quotients(program: Program, sizes: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    """Returns sizes of dims, raised where a quotient of them would be 0 or 1.

    Torch would fix such a quotient (a third of a length of 3). With 2 in its place, a slice of all
    thirds would be longer than the length from which it is cut.
    """
    found = dict(sizes)
    for quotient in quotients_in(program):
        raised = sorted(quotient.free_symbols & found.keys(), key=str)
        for symbol in itertools.islice(itertools.cycle(raised), MOST_RAISED):
            if quotient.subs(found) >= 2:
                break
            taken = {size for s, size in found.items() if s != symbol}
            size = sympy.nextprime(found[symbol])
            while size in taken:
                size = sympy.nextprime(size)
            found[symbol] = size
    return found


class Tracer:
    """Differentiates lowered graphs of one program, and caches the traces.

    Args:
        program: traced model.
        tensors: placeholder name -> parameter, buffer or constant; its values are not read.
        library: cache of pieces, which other programs may share.
        hints: size of each integer in the trace, if the usual ones break a guard: then the tracer
            is for one lowered graph.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        library: Library,
        hints: tuple[int, ...] = (),
    ) -> None:
        self.program, self.hints = program, hints
        self.library = library
        self.mode = self.library.mode
        self._tensors = tensors
        self._integers: dict[tuple[str, str], tuple[torch.SymInt, int]] = {}
        self._unused = self._unused_hints()
        self._dims = self._dim_hints()
        # A constant of forward may lie on the CPU beside a model on a GPU. Of the meta device: as
        # forward was captured.
        placed = [tensors[name] for name in (*program.parameters, *program.buffers)]
        devices = [t.device for t in placed if not t.is_meta] or _captured_on(program)
        self._device = next(iter(devices), torch.device("cpu"))
        self._fakes: dict[str, Tensor] = {}

    def joint(self, lowered: Lowered) -> Joint:
        """Returns the joint graph of the program as lowered for one rank."""
        return _Assembly(self, lowered).run()

    # ---------------------------------------------------------------------------------- integers

    def integers(self, lowered: Lowered) -> dict[str, torch.SymInt]:
        """Returns placeholder name -> symbolic integer. Integers of equal names are shared."""
        return {i.name: self._integer(i, k) for k, i in enumerate(lowered.integers)}

    def _integer(self, integer: IntegerInput, position: int) -> torch.SymInt:
        key = (integer.name, integer.role)
        if key not in self._integers:
            hint = self.hints[position] if self.hints else self._hint(integer)
            value = self.library.env.integer(f"__dcpc_{integer.name}", hint)
            self._integers[key] = value, hint
        return self._integers[key][0]

    def _hint(self, integer: IntegerInput) -> int:
        """Returns a distinct size for the trace; a dim has its size in the program's trace.

        A quotient is computed from its dims, as rows of patches, for example, must match the rows.
        """
        if integer.role == "quotient":
            symbols = self.program.symbols
            dims = {symbols[n]: h for n, h in self._dims.items()}
            return max(2, int(integer.size.subs(dims)))
        return self._dims[integer.name] if integer.role == "dim" else next(self._unused)

    def _dim_hints(self) -> dict[str, int]:
        """Returns each dim's size: the program's, raised where a quotient would be 0 or 1."""
        symbols, own = self.program.symbols, self.program.hints
        found = {s: own[n] if own.get(n, 0) > 1 else next(self._unused) for n, s in symbols.items()}
        fitting = with_quotients(self.program, found)
        return {n: fitting[s] for n, s in symbols.items()}

    def _unused_hints(self) -> Iterator[int]:
        taken = set(self.program.hints.values())
        return (h + 128 * k for k in count() for h in HINTS if h + 128 * k not in taken)

    # ----------------------------------------------------------------------------------- tensors

    def placeholder(self, name: str, integers: Mapping[str, torch.SymInt]) -> Any:
        """Returns the fake tensor or the symbolic integer of a placeholder."""
        if name in integers:
            return integers[name]
        if name not in self._fakes:
            self._fakes[name] = self._fake(name, integers)
        return self._fakes[name]

    def held(self, name: str) -> object:
        """Returns a key that all placeholders of one tensor share, such as of tied parameters."""
        return id(self._tensors[name]) if name in self._tensors else name

    def _fake(self, name: str, integers: Mapping[str, torch.SymInt]) -> Tensor:
        info = self.program.info[name]
        if name not in self._tensors:
            symbols = {str(s): integers[n] for n, s in self.program.symbols.items()}
            with self.mode:
                shape = [_evaluate(size, symbols) for size in info.shape]
                return torch.empty(shape, dtype=info.dtype, device=self._device)
        held = self._tensors[name].detach()
        if not held.is_meta:
            return self.mode.from_tensor(held, static_shapes=True)
        with self.mode:  # of a model that is planned for and not run
            return torch.empty_strided(
                held.shape, held.stride(), dtype=held.dtype, device=self._device
            )

    def tangent(self, number: int, output: Tensor) -> Tensor:
        """Returns the fake gradient of an output, contiguous."""
        name = f"gradient {number}"
        if name not in self._fakes:
            with self.mode:
                self._fakes[name] = torch.empty(
                    output.shape, dtype=output.dtype, device=self._device
                )
        return self._fakes[name]


@dataclass(frozen=True, slots=True)
class _JointCall:
    """A call of the lowered graph, with the nodes of its piece's tensors in the joint graph."""

    owner: str
    piece: Piece | Renamed
    operands: tuple[fx.Node, ...]
    at: dict[Ref, fx.Node]


class _Assembly:
    """Assembles the pieces of one lowered graph into a joint graph."""

    def __init__(self, tracer: Tracer, lowered: Lowered) -> None:
        self.tracer, self.program, self.lowered = tracer, tracer.program, lowered
        self.graph = fx.Graph()
        self.integers = tracer.integers(lowered)
        self.values: dict[fx.Node, Any] = {}  # of the lowered graph: nodes, integers, tuples
        self.trained: set[fx.Node] = set()
        self.gradients: dict[fx.Node, fx.Node] = {}
        self.owner: dict[str, str] = {}
        self.storages = count()
        self.held: dict[object, int] = {}  # key of a tensor that placeholders share -> its storage
        self.symbols: dict[sympy.Symbol, fx.Node] = {}
        self.emitter = Emitter(self.graph, self.symbols)

    def run(self) -> Joint:
        names = [n.name for n in self.lowered.gm.graph.nodes if n.op == "placeholder"]
        primals = {name: self._placeholder(name) for name in names}
        trainable = self.program.learning if self.program.begins else ()
        self.trained |= {primals[n] for n in trainable}
        last = next(iter(reversed(self.graph.nodes)))
        calls = list(self._forward(primals))
        forward = [n.name for n in self.graph.nodes if n.op != "placeholder"]
        outputs = [self.values[n] for n in _outputs(self.lowered.gm.graph)]
        begins = [outputs[i] for i in self.program.begins]
        tangents = self._tangents(last, begins)
        self._backward(calls, begins, tangents)
        gradients = [self._gradient(name, primals[name]) for name in trainable]
        self.graph.output((*outputs, *gradients))
        without_unused(self.graph)
        alive = {n.name for n in self.graph.nodes}
        symbols = {i.name: i.symbol for i in self.lowered.integers}
        # Not `expr`: where torch took an integer for a number it is that, and the guard is lost.
        translated = {v.node._expr: symbols[n] for n, v in self.integers.items()}
        return Joint(
            gm=LazyGraphModule(torch.nn.Module(), self.graph),
            primals=tuple(n.name for n in primals.values()),
            begins=self.program.begins,
            tangents=tuple(n.name for n in tangents),
            forward=frozenset(n for n in forward if n in alive),
            owner={n: o for n, o in self.owner.items() if n in alive},
            trainable=tuple(primals[n].name for n in trainable),
            names=translated,
            guards=self.tracer.library.guards(translated),
            fake_mode=self.tracer.mode,
        )

    # ----------------------------------------------------------------------------------- forward

    def _placeholder(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        value = self.tracer.placeholder(name, self.integers)
        if isinstance(value, torch.SymInt):
            node.meta["val"] = value
            self.symbols[value.node.expr] = node
            return node
        storage = self.held.setdefault(self.tracer.held(name), next(self.storages))
        return _enter(node, value, storage)

    def _forward(self, primals: Mapping[str, fx.Node]) -> Iterator[_JointCall]:
        """Adds the forward calls, and yields those through which a gradient may flow."""
        for node in self.lowered.gm.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.integers.get(node.name, primals[node.name])
            elif node.op == "call_function":
                owner = node.meta.get("dcpc", node.name)
                read = self.values.__getitem__
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), read)
                if not isinstance(node.target, torch._ops.OpOverload):
                    self.values[node] = node.target(*args, **kwargs)
                    continue
                call, self.values[node] = self._add(owner, node.target, args, kwargs)
                if call.piece.flows:
                    yield call

    def _add(self, owner: str, target: Any, args: Any, kwargs: Any) -> tuple[_JointCall, Any]:
        """Adds a call's piece; returns the joint call and its result."""
        args, kwargs = fx.node.map_aggregate((args, kwargs), self._general)
        piece = self.tracer.library.piece(target, args, kwargs, self.trained)
        operands = tuple(n for n in tree_leaves((args, kwargs)) if isinstance(n, fx.Node))
        call = _JointCall(owner, piece, operands, {Ref(i): n for i, n in enumerate(operands)})
        self._put(owner, piece.ops, call.at)
        self.trained |= {call.at[ref] for ref in piece.flows}
        return call, _placed(piece.result, call.at)

    def _general(self, leaf: Any) -> Any:
        return GROUP if leaf == self.lowered.group and isinstance(leaf, str) else leaf

    def _put(self, owner: str, ops: tuple[Op, ...], at: dict[Ref, fx.Node]) -> None:
        """Adds the ops of a piece to the graph."""
        memory = {ref: node.meta["storage"][0] for ref, node in at.items()}
        for op in ops:
            args, kwargs = fx.node.map_aggregate(
                (op.args, dict(op.kwargs)), lambda leaf: self._argument(leaf, at)
            )
            node = self._node(owner, op.target, args, kwargs, op.value)
            for ref, root in zip(op.made, op.storages, strict=True):
                memory[ref] = memory[root] if root in memory else next(self.storages)
            node.meta["storage"] = tuple(memory[ref] for ref in op.made)
            if isinstance(op.value, Tensor):
                at[op.made[0]] = node
                continue
            refs = iter(op.made)
            for position, value in enumerate(op.value or ()):
                if isinstance(value, Tensor):
                    item = self._node(owner, operator.getitem, (node, position), {}, value)
                    ref = next(refs)
                    item.meta["storage"] = (memory[ref],)
                    at[ref] = item

    def _node(self, owner: str, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        before = node
        while before.op == "call_function" and before.name not in self.owner:
            self.owner[before.name] = owner  # integers that were emitted for it, too
            before = before.prev
        return node

    def _argument(self, leaf: Any, at: Mapping[Ref, fx.Node]) -> Any:
        if isinstance(leaf, Ref):
            return at[leaf]
        if is_symbolic(leaf):
            return self.emitter.emit(leaf.node.expr)
        leaf_key(leaf)  # refuses what it does not know
        return self.lowered.group if isinstance(leaf, str) and leaf == GROUP else leaf

    # ---------------------------------------------------------------------------------- backward

    def _tangents(self, last: fx.Node, begins: list[fx.Node]) -> list[fx.Node]:
        """Adds the placeholders of the gradients with which backward begins."""
        made: list[fx.Node] = []
        for number, output in enumerate(begins):
            with self.graph.inserting_after(made[-1] if made else last):
                name = f"loss_gradient_{number}" if number else "loss_gradient"
                node = self.graph.placeholder(name)
            value = self.tracer.tangent(number, output.meta["val"])
            made.append(_enter(node, value, next(self.storages)))
        return made

    def _backward(
        self, calls: list[_JointCall], begins: list[fx.Node], tangents: list[fx.Node]
    ) -> None:
        """Adds the backward calls, from the last forward call to the first."""
        for output, tangent in zip(begins, tangents, strict=True):
            if output not in self.trained:
                raise CodegenError(
                    "the loss has no gradient: got a loss that depends on no trainable parameter; "
                    "expected one; set requires_grad of what is trained"
                )
            flowing = tangent
            if output in self.gradients:  # it is returned twice
                both = (self.gradients[output], tangent)
                flowing = self._add(output.name, aten.add.Tensor, both, {})[1]
            self.gradients[output] = flowing
        for call in reversed(calls):
            flows = {
                ref: self.gradients[call.at[ref]]
                for ref in call.piece.flows
                if call.at[ref] in self.gradients and call.at[ref] not in call.operands
            }
            if flows:
                self._differentiate(call, flows)

    def _differentiate(self, call: _JointCall, flows: Mapping[Ref, fx.Node]) -> None:
        wanted = [n for n in call.operands if n in self.trained]
        sums = {wanted.index(n): self.gradients[n] for n in wanted if n in self.gradients}
        derivative = self.tracer.library.derivative(
            call.piece,
            {ref: n.meta["val"] for ref, n in flows.items()},
            {i: n.meta["val"] for i, n in sums.items()},
        )
        at = call.at | dict(zip(derivative.tangents, flows.values(), strict=True))
        at |= zip(derivative.sums, sums.values(), strict=True)
        self._put(call.owner, derivative.ops, at)
        for i, (operand, ref) in enumerate(zip(wanted, derivative.gradients, strict=True)):
            if ref is None:
                continue
            gradient = at[ref]
            if operand in wanted[:i] and operand in self.gradients:
                both = (self.gradients[operand], gradient)
                gradient = self._add(call.owner, aten.add.Tensor, both, {})[1]
            self.gradients[operand] = gradient

    def _gradient(self, name: str, primal: fx.Node) -> fx.Node | None:
        """Returns the gradient of a trainable placeholder; zeros for a dropped dependency.

        Zeros are for `zero_gradients`: parameters on which only the plain model's loss depends. A
        parameter's gradient is this rank's share; an input's is all-reduced here.
        """
        gradient = self.gradients.get(primal)
        if gradient is not None and self.lowered.sp > 1 and name in self.program.inputs:
            args = (gradient, self.lowered.group)
            return _detached(self._add(name, torch.ops.dcpc.all_reduce.default, args, {})[1])
        if gradient is not None or name not in self.program.zero_gradients:
            return gradient
        return _detached(self._add(name, aten.zeros_like.default, (primal,), {})[1])


def _captured_on(program: Program) -> list[torch.device]:
    """Returns the devices of the values with which forward was captured, except constants."""
    given = [n for n in program.gm.graph.nodes if n.op == "placeholder"]
    values = [n.meta.get("val") for n in given if n.name not in program.constants]
    return [value.device for value in values if isinstance(value, Tensor)]


def _enter(node: fx.Node, value: Tensor, storage: int) -> fx.Node:
    node.meta |= {"val": value, "storage": (storage,)}
    return node


def _placed(result: Any, at: Mapping[Ref, fx.Node]) -> Any:
    return fx.node.map_aggregate(result, lambda leaf: at[leaf] if isinstance(leaf, Ref) else leaf)


def _detached(node: Any) -> fx.Node:
    assert isinstance(node, fx.Node), f"got {node}; expected a node"
    return node


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, tuple), f"the graph returns {outputs}; expected a tuple"
    return [_detached(node) for node in outputs]


def _evaluate(expr: sympy.Expr, symbols: Mapping[str, torch.SymInt]) -> Any:
    """Returns a size expression as an int or a SymInt."""
    if expr.is_Integer:
        return int(expr)
    function = sympy.lambdify(list(expr.free_symbols), expr, modules=[{"floor": _floor}, "math"])
    return function(*[symbols[str(s)] for s in expr.free_symbols])


def _floor(value: Any) -> Any:
    return value.__floor__()
