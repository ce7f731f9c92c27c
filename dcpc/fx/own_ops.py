"""Costs of ops outside of torch: their kernels' calls of torch's are counted at small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import sympy
import torch
from sympy.polys.polyfuncs import interpolate
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Lengths of each dim: three for a polynomial of degree 2, and one more that it has to be right at.
_LENGTHS, _TOLD = (8, 16, 24), 40
_MOST_DIMS = 3

Shape = tuple[sympy.Expr, ...]
Counts = tuple[sympy.Expr, sympy.Expr, tuple[sympy.Expr, ...]]
_FOUND: dict[str, Counts | None] = {}
# Ops of these have tables by name; `mine::mm` is not torch's `mm`.
_KNOWN = ("aten", "prims", "dcpc", "dcpc_function", "dcpc_tile", "transformers")


def is_own(op: object) -> bool:
    """Returns whether an op is one of a library outside of torch and of dcpc."""
    return isinstance(op, torch._ops.OpOverload) and op.namespace not in _KNOWN


def counted(op: Any, args: Any, kwargs: Any) -> list[int]:
    """Returns FLOPs of one run's products, bytes moved, and bytes beside results at each call.

    The kernel's own calls are counted: none of a kernel that is not made of torch's ops.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    key = "CUDA" if any(x.is_cuda for x in tensors) else "CPU"
    seen = _Calls(tensors)
    with torch.no_grad(), torch.random.fork_rng(), seen:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        made = op.redispatch(keys, *args, **kwargs)
    kept = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tree_leaves(made)}
    held = (live_bytes - sum(kept.values()) for live_bytes in seen.live_bytes)
    return [seen.flops, seen.moved_bytes, *held]


class _Calls(TorchDispatchMode):
    """Adds up the calls within its block."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.moved_bytes = 0
        self.live_bytes: list[int] = []
        self._given = {x.untyped_storage()._cdata for x in given}
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not func.is_view:
            self.moved_bytes += sum(x.numel() * x.element_size() for x in (*read, *made))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        for storage in (x.untyped_storage() for x in made):
            if storage._cdata not in self._given:
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        live = (size for kept, size in self._held.values() if not kept.expired())
        self.live_bytes.append(sum(live))
        return out


def counted_costs(node: fx.Node, shapes: Mapping[fx.Node, Shape]) -> Counts | None:
    """Returns FLOPs of products, bytes moved and bytes held beside results at each inner call.

    `shapes` has those of its inputs, and of a number that number alone. None where its kernel is
    not made of torch's ops, does not run at small sizes, or takes no polynomial of the dims.
    """
    arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"{shapes[n]} {_kind(n)}")
    key = f"{node.target} {arguments}"
    if key not in _FOUND:
        symbols = sorted(sympy.Tuple(*shapes.values()).free_symbols, key=str)
        try:
            _FOUND[key] = _fitted(node, shapes, symbols) if len(symbols) <= _MOST_DIMS else None
        except Exception:  # of a user's kernel, of any kind
            _FOUND[key] = None
    return _FOUND[key]


def _kind(n: fx.Node) -> Any:
    value = n.meta["val"]
    return (value.dtype, value.device) if isinstance(value, torch.Tensor) else "number"


def _fitted(node: fx.Node, shapes: Mapping[fx.Node, Shape], symbols: list[sympy.Symbol]) -> Any:
    def at(lengths: tuple[int, ...]) -> list[int]:
        sizes = dict(zip(symbols, lengths, strict=True))

        def drawn(n: fx.Node) -> Any:
            value, shape = n.meta["val"], [int(s.subs(sizes)) for s in shapes[n]]
            if not isinstance(value, torch.Tensor):
                return shape[0]
            one = int(value.dtype.is_floating_point)  # 0: an index that is always there
            return torch.full(shape, one, dtype=value.dtype, device=value.device)

        return counted(node.target, *fx.map_arg((node.args, node.kwargs), drawn))

    runs = {p: at(p) for p in product(_LENGTHS, repeat=len(symbols))}
    right = at((_TOLD,) * len(symbols))
    columns = zip(*runs.values(), strict=True)
    fits = [_fit(dict(zip(runs, column, strict=True)), symbols) for column in columns]
    there = dict.fromkeys(symbols, _TOLD)
    if [e.subs(there) for e in fits] != right or not right[1]:
        return None
    return fits[0], fits[1], tuple(fits[2:])


def _fit(runs: dict[tuple[int, ...], int], symbols: list[sympy.Symbol]) -> sympy.Expr:
    """Returns the polynomial of degree 2 in each symbol that is right at all runs."""
    if not symbols:
        return sympy.Integer(runs[()])
    rest = [{p[1:]: v for p, v in runs.items() if p[0] == n} for n in _LENGTHS]
    points = [(n, _fit(own, symbols[1:])) for n, own in zip(_LENGTHS, rest, strict=True)]
    return sympy.expand(interpolate(points, symbols[0]))
