"""Compares the calls of a captured graph with forward's at given sizes, on fake tensors.

    forward(sizes)   ->  view, mm, constant_pad_nd(.., [0, 0]), mul, ...
    graph(sizes)     ->  view, mm, mul, ...                               the same

Sizes are numbers here, so a branch of forward goes where it goes at these sizes, and a graph that
was traced along another branch shows other calls, arguments or shapes. No number is computed and no
memory used, so this may be asked of any model at any size.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves

from dcpc.buckets import Buckets
from dcpc.errors import users_line
from dcpc.fx.torch_api.tracing import COMPILING, EXPORTING
from dcpc.trace.capture.autocast import casting
from dcpc.trace.capture.capturable import Capturable
from dcpc.trace.capture.dims import example_inputs
from dcpc.trace.capture.module_state import holding, untouched
from dcpc.trace.value_branches import Branching

aten = torch.ops.aten

# Ops whose result is their operand, or a copy of it, if shape and dtype are equal.
_ALIASES = {
    *(aten.alias.default, aten.detach.default, aten.detach_.default, aten.lift_fresh.default),
    *(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.slice.Tensor),
    aten.reshape.default,
}
_COPIES = {
    *(aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default),
    *(aten.constant_pad_nd.default, aten.cat.default, aten.repeat.default),
}
# Interpolations, which copy if the size stays the same and no factor is given.
_RESIZES = {
    *(aten.upsample_nearest1d.default, aten.upsample_nearest2d.default),
    *(aten.upsample_linear1d.default, aten.upsample_bilinear2d.default),
}
_TURNS = {aten.transpose.int, aten.permute.default, aten.t.default}
# Ops with different names and the same meaning. Torch fills with a number's tensor by fill_, and a
# batch of 1 may turn one number a sample into such a tensor.
_SHAPED = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}  # their results' sizes say how
_SPELLED = {
    **dict.fromkeys(_SHAPED, aten.view.default),
    **dict.fromkeys(_SPLITS, aten.split.Tensor),
    aten.fill_.Tensor: aten.copy_.default,
}
_SMALL_BYTES = 1 << 16
TAKEN = "the graph takes it for"  # says that a tensor is not as long as in the trace


class UnknownPathError(Exception):
    """Raised where forward does not run on fake tensors at some sizes."""


@dataclass(frozen=True, slots=True)
class _DispatchedCall:
    """A call of an op below autograd.

    Attributes:
        op: op that is called.
        args: arguments of the call, with tensors replaced by their keys.
        outputs: keys of the result tensors.
        text: op and shapes of its results, for messages.
        memory: storages of operands and results.
        same: key of the operand that the only result equals; None if the call computes something.
        turned: order of the operand's dims in the result, without dims of size 1; None if the call
            is more than a transpose.
    """

    op: Any
    args: tuple[Any, ...]
    outputs: tuple[Any, ...]
    text: str
    memory: frozenset[int]
    same: Any = None
    turned: tuple[int, ...] | None = None


class _Turned(NamedTuple):
    """The key of a tensor that is another one with permuted dims, without dims of size 1."""

    base: Any
    order: tuple[int, ...]

    @staticmethod
    def of(source: Any, order: tuple[int, ...]) -> Any:
        """Returns the key after one more permutation; the base tensor's key if they cancel."""
        if isinstance(source, _Turned):
            source, order = source.base, tuple(source.order[d] for d in order)
        return source if list(order) == sorted(order) else _Turned(source, order)


def _base(key: Any) -> Any:
    return key.base if isinstance(key, _Turned) else key


def _numbered(key: Any, numbers: Mapping[Any, int]) -> Any:
    """Returns a key with the number of its tensor; an argument that is no tensor as it is."""
    if not isinstance(key, tuple):
        return key
    base = numbers.get(_base(key), _base(key))
    return (base, key.order) if isinstance(key, _Turned) else base


def _turned(func: Any, x: Any = None, *dims: Any) -> tuple[int, ...] | None:
    """Returns the permutation of the operand's dims that a call makes, or None for other calls."""
    if func not in _TURNS:
        return None
    order = list(range(x.ndim))
    if func is aten.permute.default:
        order = [d % x.ndim for d in dims[0]]
    elif x.ndim:
        a, b = dims or (0, -1)
        order[a], order[b] = order[b], order[a]
    wide = [d for d in range(x.ndim) if x.shape[d] != 1]
    return tuple(wide.index(d) for d in order if d in wide)


def _scaled(func: Any, flat: list[Any]) -> bool:
    """Whether a call interpolates by a factor, which may differ from the ratio of the sizes."""
    return func in _RESIZES and any(isinstance(x, float) for x in flat)


class _CallRecorder(TorchDispatchMode):
    """Dispatch mode that records the calls in its block."""

    def __init__(self, names: Mapping[int, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_DispatchedCall] = []
        self.keys: dict[int, Any] = dict(names)
        self.written: dict[int, int] = {}  # memory -> the last call that wrote to it
        self._kept: list[Tensor] = []  # as long as these live, so do their ids

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Makes the call and records it."""
        kwargs = kwargs or {}
        flat, tree = tree_flatten((args, kwargs))
        if func is aten.slice.Tensor:
            flat, tree = tree_flatten(_bounds(*args))
        given = tuple(self.key(x) if isinstance(x, Tensor) else _plain(x) for x in flat)
        operands = [x for x in flat if isinstance(x, Tensor)]
        out = func(*args, **kwargs)
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if func in _SPLITS:
            given = (given[0], str([tuple(x.shape) for x in results]))
        if func._schema.name.endswith("_") and len(results) == 1:  # it returns its target
            self.keys[id(results[0])] = self.key(operands[0])
        fresh = [x for x in results if id(x) not in self.keys]
        for i, x in enumerate(fresh):
            self.keys[id(x)] = (len(self.calls), i)
        self._kept += [*operands, *results]
        if func._schema.is_mutable and func is not aten.detach_.default:
            for a, x in zip(func._schema.arguments, args, strict=False):
                if isinstance(x, Tensor) and a.alias_info is not None and a.alias_info.is_write:
                    self.written[_memory(x)] = len(self.calls)
        spelled = _SPELLED.get(func, func)
        self.calls.append(
            _DispatchedCall(
                spelled,
                (given, "" if func in _SPLITS else str(tree)),
                tuple(self.keys[id(x)] for x in results),
                f"{spelled}, {', '.join(str(list(x.shape)) for x in results)}",
                frozenset(map(_memory, [*operands, *results])),
                self._same(func, operands, results) if not _scaled(func, flat) else None,
                _turned(func, *args),
            )
        )
        return out

    def key(self, x: Tensor) -> Any:
        """Returns the key of a tensor: its name, the call that made it, or its contents."""
        if id(x) not in self.keys:
            self._kept.append(x)
            with _disable_current_modes():
                storage = x.untyped_storage()
                where = x.data_ptr() if storage.nbytes() > _SMALL_BYTES else bytes(storage)
            self.keys[id(x)] = ("constant", x.dtype, tuple(x.shape), x.stride(), where)
        return self.keys[id(x)]

    def _same(self, func: Any, operands: list[Tensor], results: list[Tensor]) -> Any:
        """Returns the key of the operand that the result equals, if nothing is cut off or added."""
        if func not in _ALIASES | _COPIES | _RESIZES or len(results) != 1:
            return None
        (out,) = results
        full = [x for x in operands if x.numel() or not out.numel()]
        if len(full) != 1 or full[0].dtype != out.dtype:
            return None
        # Of one sample torch's `x[i] = y` drops y's dims of 1 in front: broadcasting adds them.
        if _without_ones(full[0].shape) != _without_ones(out.shape):
            return None
        return self.key(full[0])

    def path(self, outputs: Sequence[Tensor]) -> Iterator[tuple[Any, ...]]:
        """Yields the calls that outputs depend on, in order, with tensors numbered by appearance.

        A copy that changes nothing at these sizes (a padding by zero) is left out, unless its
        memory or its operand's is written to later.
        """
        equal: dict[Any, Any] = {}
        kept: list[_DispatchedCall] = []
        for i, call in enumerate(self.calls):
            free = call.op in _ALIASES or all(self.written.get(m, -1) < i for m in call.memory)
            if call.turned is not None:
                source = equal.get(call.args[0][0], call.args[0][0])
                equal[call.outputs[0]] = _Turned.of(source, call.turned)
            elif call.same is not None and free:
                equal[call.outputs[0]] = equal.get(call.same, call.same)
            else:
                kept.append(call)
        returned = [equal.get(k := self.key(x), k) for x in outputs]
        needed = {_base(k) for k in returned}
        used: list[_DispatchedCall] = []
        for call in reversed(kept):
            if call.op._schema.is_mutable or needed & {*call.outputs}:
                used.append(call)
                needed |= {_base(equal.get(a, a)) for a in call.args[0] if isinstance(a, tuple)}
        numbers: dict[Any, int] = {}
        for call in reversed(used):
            given = tuple(equal.get(a, a) if isinstance(a, tuple) else a for a in call.args[0])
            named = tuple(_numbered(a, numbers) for a in given)
            for key in call.outputs:
                numbers.setdefault(_base(equal.get(key, key)), len(numbers))
            yield call.text, call.op, named, call.args[1]
        yield "what it returns", None, tuple(_numbered(k, numbers) for k in returned), ""


@contextmanager
def _exporting() -> Iterator[None]:
    """Tells forward that it is exported (`is_compiling`), and silences torch's log of failures."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with COMPILING.put(True), EXPORTING.put(True):
            yield
    finally:
        logger.disabled = before


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Returns a shape without its leading dims of size 1."""
    return [*dropwhile(lambda size: size == 1, shape)]


def _bounds(
    x: Tensor, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> tuple[Any, ...]:
    """Returns a slice's arguments with bounds within the dim: a graph may say 2**63 - 1."""
    return x, dim % x.ndim, *slice(start, stop, step).indices(x.shape[dim])


def _plain(x: Any) -> Any:
    """Returns an argument that is no tensor as text: 1 differs from 1.0, and NaN equals itself."""
    return f"{type(x).__name__} {x!r}"


class _Graph(fx.Interpreter):
    """Runs an exported graph without its assertions about sizes.

    Args:
        graph: graph module to run.
        symbols: value of each symbol of the trace at these sizes.
        wrong: list that receives a message if a tensor has another length than in the trace.
    """

    def __init__(
        self, graph: fx.GraphModule, symbols: Mapping[sympy.Symbol, int], wrong: list[str]
    ) -> None:
        super().__init__(graph)
        self._symbols, self._wrong = symbols, wrong

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node, and compares the size of its result with the trace's."""
        result, traced = super().run_node(n), n.meta.get("val")
        if isinstance(result, Tensor) and isinstance(traced, Tensor) and not self._wrong:
            every = [_at(size, self._symbols) for size in traced.shape]
            shape = [size for size in every if size is not None]
            if len(shape) == len(every) and math.prod(shape) != result.numel():
                what = f"{n.target} makes {list(result.shape)}"
                self._wrong.append(f"{what}, {TAKEN} {shape}")
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Returns None: such a module only checks the inputs."""
        return None

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Makes a call, or runs a nested graph; skips assertions."""
        name = str(getattr(target, "__name__", target))
        if name.startswith(("_assert", "sym_constrain")):
            return None
        if name == "wrap_with_set_grad_enabled":
            with torch.set_grad_enabled(args[0]):
                return self._inner(args[1]).run(*args[2:])
        if name == "wrap_with_autocast":
            device, dtype, enabled, cached, inner, *operands = args
            with torch.autocast(device, dtype, enabled, cached):
                return self._inner(inner).run(*operands)
        return super().call_function(target, args, kwargs)

    def _inner(self, graph: fx.GraphModule) -> _Graph:
        return _Graph(graph, self._symbols, self._wrong)


def _at(size: Any, symbols: Mapping[sympy.Symbol, int]) -> int | None:
    """Returns a size of the trace as a number, or None if it has unknown symbols."""
    if isinstance(size, int):
        return size
    found = size.node.expr.xreplace(symbols)
    return int(found) if found.is_Integer else None


def _symbols_at(graph: fx.Graph, values: Mapping[str, Any]) -> dict[sympy.Symbol, int]:
    """Returns the values of a graph's size symbols, solved from the shapes of its inputs.

    A dim may be a multiple of one and more: 4*s + 1 is 21 where s is 5.
    """
    found: dict[sympy.Symbol, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        traced, value = node.meta.get("val"), values.get(node.name)
        if not isinstance(traced, Tensor) or not isinstance(value, Tensor):
            continue
        for size, real in zip(traced.shape, value.shape, strict=True):
            if isinstance(size, torch.SymInt) and len(size.node.expr.free_symbols) == 1:
                (symbol,) = size.node.expr.free_symbols
                solved = sympy.solve(size.node.expr - real, symbol)
                if len(solved) == 1 and solved[0].is_Integer:
                    found[symbol] = sympy.Integer(solved[0])
    return found


class Paths:
    """Forward and the graph captured from it, to be compared at given sizes."""

    def __init__(
        self,
        model: nn.Module,
        exported: ExportedProgram,
        buckets: Buckets,
        device: torch.device,
        autocast: torch.dtype | None,
        sides: Branching | None = None,
    ) -> None:
        self._sides = sides
        self._model, self._buckets, self._device = model, buckets, device
        self._raw = copy.deepcopy(exported.graph_module)
        self._signature, self._constants = exported.graph_signature, exported.constants
        self._autocast = autocast

    def difference(self, sizes: Mapping[str, int]) -> str:
        """Returns the first difference of the graph from forward at these sizes, or "".

        Raises:
            UnknownPathError: forward does not run on fake tensors at these sizes.
        """
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            made = example_inputs(self._buckets, sizes, self._device)
            inputs = dict(zip(self._buckets.inputs, made, strict=True))
            state = self._state()
        keys = {id(t): ("state", n) for n, t in reversed(state.items())}
        keys |= {id(t): ("input", n) for n, t in inputs.items()}
        fakes = {id(x): state[n] for n, x in self._held()}
        forward, graph = _CallRecorder(keys), _CallRecorder(keys)
        try:
            with (
                untouched(self._model),
                holding(self._model, fakes),
                _exporting(),
                mode,
                self._casting(),
                Capturable(self._sides),
                forward,
            ):
                expected = self._model(*inputs.values())
        except Exception as error:
            said = f"{type(error).__name__}: {error}{users_line(error)}"
            if isinstance(error, DataDependentOutputException):
                said += "; what forward does with that value, such as to log it, is done no more"
            raise UnknownPathError(said) from error
        signature = self._signature
        given = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        values = {n: state[t] for n, t in given.items()}
        lifted = signature.inputs_to_lifted_tensor_constants
        values |= {n: self._constants[t] for n, t in lifted.items()}
        values |= dict(zip(map(str, signature.user_inputs), inputs.values(), strict=True))
        names = [n.name for n in self._raw.graph.find_nodes(op="placeholder")]
        wrong: list[str] = []
        try:
            symbols = _symbols_at(self._raw.graph, values)
            with _exporting(), mode, self._casting(), Capturable(), graph:
                ran = _Graph(self._raw, symbols, wrong)
                got = ran.run(*(values[n] for n in names))
        except NotImplementedError as error:  # a kernel that fake tensors have none of
            raise UnknownPathError(f"the graph: {str(error).splitlines()[0]}") from error
        except Exception as error:
            return f"the graph fails there: {type(error).__name__}: {error}"
        paths = [*forward.path(expected)], [*graph.path(got)]
        return wrong[0] if wrong else _first_difference(*paths)

    def _casting(self) -> AbstractContextManager[object]:
        return casting(self._device.type, self._autocast)

    def _held(self) -> list[tuple[str, Tensor]]:
        """Returns parameters and buffers under each of their names."""
        named = self._model.named_parameters(remove_duplicate=False)
        return [*named, *self._model.named_buffers(remove_duplicate=False)]

    def _state(self) -> dict[str, Tensor]:
        """Returns parameters and buffers as fake tensors; a tensor with two names is made once."""
        made: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, x in self._held():
            if id(x) not in made:
                device = self._device if x.is_meta else x.device
                fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
                made[id(x)] = fake.requires_grad_(x.requires_grad)
            state[name] = made[id(x)]
        return state


def _first_difference(expected: list[tuple[Any, ...]], got: list[tuple[Any, ...]]) -> str:
    for a, b in zip(expected, got, strict=False):
        if a[1:] != b[1:]:
            if a[0] != b[0]:
                return f"forward calls {a[0]}, the graph {b[0]}"
            return f"they call {a[0]} with other arguments: {a[2]}, the graph's {b[2]}"
    if len(expected) != len(got):
        return f"forward makes {len(expected)} calls, the graph {len(got)}"
    return ""
