"""Shapes, strides and storages of a graph's values, in the named dims."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from dcpc.errors import ProfileError
from dcpc.fx.integers import of_some
from dcpc.ops.attention import Capability

Shape: TypeAlias = tuple[sympy.Expr, ...]
# Ranks of every group, or group name -> ranks.
GroupSize: TypeAlias = int | Callable[[str], int]
# Losses that are summed up in the memory of those of all elements.
_LOSSES = tuple(
    f"aten::{name}"
    for name in ("binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss")
)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor that a node makes.

    Attributes:
        storage: identity of the memory it lies in; views of one tensor have the same.
        storage_bytes: size of that memory.
        shape: size of each dim.
        strides: elements between neighbours of each dim.
        dtype: element type.
    """

    storage: int
    storage_bytes: sympy.Expr
    shape: Shape
    strides: Shape
    dtype: torch.dtype

    @property
    def numel(self) -> sympy.Expr:
        """Number of elements."""
        return _product(self.shape)

    @property
    def size_bytes(self) -> sympy.Expr:
        """Bytes of a dense tensor of this shape."""
        return _product((self.numel, self.dtype.itemsize))

    @property
    def read_bytes(self) -> sympy.Expr:
        """Bytes that reading it once touches: a broadcast dim (stride 0) counts once."""
        pairs = zip(self.shape, self.strides, strict=True)
        return _product((self.dtype.itemsize, *(n for n, stride in pairs if stride != 0)))

    def contiguous(self, order: tuple[int, ...] | None = None) -> bool:
        """Returns whether the dims, taken in this order, are dense with the last one fastest."""
        expected = sympy.Integer(1)
        for i in reversed(order or range(len(self.shape))):
            if self.shape[i] == 1:
                continue
            if self.strides[i] != expected and sympy.expand(of_some(self.strides[i])) != expected:
                return False
            expected = sympy.expand(expected * self.shape[i])
        return True

    def nested(self, dims: Iterable[int]) -> list[int] | None:
        """Returns dims innermost first if they are one as they lie, without those of size 1.

        None where one does not begin where the one within it ends, so that joining them is a copy.
        """
        wanted = [d for d in dims if self.shape[d] != 1]
        strides = {d: sympy.expand(of_some(self.strides[d])) for d in wanted}
        for innermost in wanted:
            order, apart = [innermost], strides[innermost]
            while len(order) < len(wanted):
                apart = sympy.expand(apart * self.shape[order[-1]])
                found = [d for d in wanted if d not in order and strides[d] == apart]
                if not found:
                    break
                order.append(found[0])
            if len(order) == len(wanted):
                return order
        return None if wanted else []

    @property
    def matrix(self) -> bool:
        """Whether BLAS takes its last two dims as they lie: rows or columns dense, side by side."""

        def dense(outer: int, inner: int) -> bool:
            apart, length = self.strides[outer], self.shape[inner]
            overlap = apart == 0 or (apart.is_Integer and length.is_Integer and apart < length)
            return self.strides[inner] == 1 and not (overlap and self.shape[outer] != 1)

        return dense(-2, -1) or dense(-1, -2)


@functools.lru_cache(maxsize=1 << 14)
def _product(sizes: tuple[sympy.Expr | int, ...]) -> sympy.Expr:
    return sympy.Mul(*sizes)


@functools.lru_cache(maxsize=1 << 14)
def total(sizes: tuple[sympy.Expr, ...], times: int = 1) -> sympy.Expr:
    """Returns the sum of some sizes, multiplied out."""
    return sympy.expand(times * sympy.Add(*sizes))


class Facts:
    """Reads nodes once, with torch's symbols translated to the bucket's.

    Args:
        names: torch symbol -> expression of the bucket's dims.
        like: facts of a graph with the same symbols: values that it has read are shared.
    """

    def __init__(self, names: Mapping[sympy.Symbol, sympy.Expr], like: Facts | None = None) -> None:
        self._names = dict(names)
        self._known = {s for value in names.values() for s in value.free_symbols}
        self._nodes: dict[fx.Node, tuple[TensorFacts, ...]] = {}
        # by id of the fake tensor
        self._like: dict[int, tuple[torch.Tensor, TensorFacts]] = {} if like is None else like._like
        self._sizes: dict[sympy.Expr, sympy.Expr] = {} if like is None else like._sizes
        self._aliases: dict[fx.Node, tuple[tuple[fx.Node | None, int, sympy.Expr], ...]] = {}
        self._reads: dict[fx.Node, tuple[fx.Node, ...]] = {}

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """The bucket's symbols, by name."""
        return tuple(sorted(self._known, key=lambda s: s.name))

    def size(self, value: Any) -> sympy.Expr:
        """Returns an integer, a SymInt or a node that stands for one, in the bucket's symbols.

        Raises:
            ProfileError: the value has a symbol that `names` does not translate.
        """
        if isinstance(value, fx.Node):
            value = value.meta["val"]
        if not isinstance(value, torch.SymInt):
            return sympy.Integer(value)
        traced = value.node.expr
        named = self._sizes.get(traced)
        if named is None:
            named = sympy.expand(traced.xreplace(self._names))
            unknown = named.free_symbols - self._known
            if unknown:
                raise ProfileError(
                    f"size {traced}: got the symbols {unknown}; expected only those that the "
                    f"partition names, {set(self._names)}; add them to its `names`"
                )
            self._sizes[traced] = named
        return named

    def of(self, node: fx.Node) -> tuple[TensorFacts, ...]:
        """Returns the tensors of a node's value: none for an integer, several for a tuple."""
        facts = self._nodes.get(node)
        if facts is None:
            found = list(tensors(node.meta.get("val")))
            storages = node.meta.get("storage") or [t.untyped_storage()._cdata for t in found]
            facts = self._as_allocated(node, tuple(map(self._tensor, found, storages)))
            self._nodes[node] = facts
        return facts

    def _as_allocated(
        self, node: fx.Node, found: tuple[TensorFacts, ...]
    ) -> tuple[TensorFacts, ...]:
        """Returns a value's tensors with the memory of kernels that make a larger one and cut it.

        Of `col2im` (`F.fold`, and the gradient of `F.unfold`) that is all windows; of a bag of
        embeddings one more bag number an index; of some losses that of every element.
        """
        name = op_name(node)
        if name in _LOSSES and argument(node, "reduction", 1) != 0:
            elements = self.of(argument(node, "self"))[0]
            return (replace(found[0], storage_bytes=elements.size_bytes),)
        if name == "aten::col2im":
            windows = self.of(argument(node, "self"))[0]
            return (replace(found[0], storage_bytes=windows.size_bytes),)
        if name == "aten::_embedding_bag" and found[1].numel != 0:
            numbers = found[1]
            more = replace(numbers, storage_bytes=numbers.size_bytes + numbers.dtype.itemsize)
            return (found[0], more, *found[2:])
        return found

    def reads(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Returns a node's distinct input nodes, in order."""
        found = self._reads.get(node)
        if found is None:
            found = self._reads[node] = tuple(node.all_input_nodes)
        return found

    def aliases(self, node: fx.Node) -> tuple[tuple[fx.Node | None, int, sympy.Expr], ...]:
        """Returns where each tensor of a node's value lies, and the bytes of that memory.

        (input, number, bytes): in the memory of that tensor of an input; (None, number, bytes): in
        that of the first tensor of its own in new memory, which may be itself.
        """
        found = self._aliases.get(node)
        if found is None:
            own = [t.storage for t in self.of(node)]
            given: dict[int, tuple[fx.Node | None, int]] = {}
            for i in self.reads(node) if own else ():
                given |= {t.storage: (i, n) for n, t in enumerate(self.of(i))}
            found = tuple(
                (*given.get(t.storage, (None, own.index(t.storage))), t.storage_bytes)
                for t in self.of(node)
            )
            self._aliases[node] = found
        return found

    def inputs(self, node: fx.Node) -> tuple[TensorFacts, ...]:
        """Returns the tensors of a node's distinct input nodes, in order."""
        return tuple(t for i in self.reads(node) for t in self.of(i))

    def fresh(self, node: fx.Node) -> tuple[TensorFacts, ...]:
        """Returns the tensors of a node's value that no input shares its memory with, once each."""
        shared = {t.storage for t in self.inputs(node)}
        found = {t.storage: t for t in self.of(node) if t.storage not in shared}
        return tuple(found.values())

    def _tensor(self, tensor: torch.Tensor, storage: int) -> TensorFacts:
        known = self._like.get(id(tensor))
        if known is None:
            found = TensorFacts(
                storage=storage,
                storage_bytes=self.size(tensor.untyped_storage().nbytes()),
                shape=tuple(map(self.size, tensor.shape)),
                strides=tuple(map(self.size, tensor.stride())),
                dtype=tensor.dtype,
            )
            self._like[id(tensor)] = tensor, found
            return found
        return replace(known[1], storage=storage)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a node's value, which may be a tensor, a tuple, an integer or None."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for v in value:
            yield from tensors(v)


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """Returns the argument of an ATen call by its name in the op's schema."""
    if name in node.kwargs:
        return node.kwargs[name]
    assert isinstance(node.target, torch._ops.OpOverload), f"{node}: {node.target} has no schema"
    for i, a in enumerate(node.target._schema.arguments):
        if a.name == name:
            return node.args[i] if i < len(node.args) else default
    return default


def op_name(node: fx.Node) -> str:
    """Returns a call's op without its overload: `aten::mm`, `dcpc::all_to_all`, `mul`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name
    return getattr(node.target, "__name__", str(node.target))


@dataclass(frozen=True, slots=True)
class CallFacts:
    """One call and the facts of its arguments and results.

    Attributes:
        node: an ATen or collective call.
        facts: reader of its values.
        threads: threads an op runs on; some ops have a buffer for each.
        gpu: capability of the GPU whose kernels ops run; None: they run the CPU's.
    """

    node: fx.Node
    facts: Facts
    threads: int
    gpu: Capability | None = None

    def tensor(self, name: str) -> TensorFacts:
        """Returns the tensor argument of this name."""
        return self.facts.of(argument(self.node, name))[0]

    def given(self, name: str) -> TensorFacts | None:
        """Returns the tensor argument of this name, None where there is none."""
        return None if argument(self.node, name) is None else self.tensor(name)

    @property
    def inputs_bytes(self) -> sympy.Expr:
        """Bytes of all tensor inputs, dense."""
        return sympy.Add(*(t.size_bytes for t in self.facts.inputs(self.node)))

    @property
    def output_bytes(self) -> sympy.Expr:
        """Bytes of all fresh outputs."""
        return sympy.Add(*(t.storage_bytes for t in self.facts.fresh(self.node)))


def ranks_of(group: str) -> sympy.Symbol:
    """Returns the symbol for the number of ranks of a group whose degree is not known yet."""
    return sympy.Symbol(f"{_RANKS}{group}", integer=True, positive=True)


_RANKS = "ranks of "


def at_ranks(size: sympy.Expr, sp: GroupSize) -> sympy.Expr:
    """Returns a size with the number of each group's ranks put in."""
    groups = {s: s.name.removeprefix(_RANKS) for s in groups_in(size)}
    ranks = {s: sp if isinstance(sp, int) else sp(name) for s, name in groups.items()}
    return sympy.expand(size.xreplace(ranks)) if ranks else size


def groups_in(size: sympy.Expr) -> set[sympy.Basic]:
    """Returns the symbols of a size that stand for numbers of ranks."""
    return {s for s in size.free_symbols if str(s).startswith(_RANKS)}
