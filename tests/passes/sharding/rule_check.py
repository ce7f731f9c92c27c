"""Runs one call whole and in pieces, lowered as `codegen` lowers it, and compares."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from dcpc.codegen.lower.lower import lower
from dcpc.ir import REPLICATED, NodePlacement, Placement, Program, TensorInfo
from dcpc.ops.pieces import runs
from dcpc.passes.sharding.rule_types import OpSharding
from dcpc.passes.sharding.sharding import Alternative, Sharding, analyse


@dataclass(frozen=True)
class Case:
    """One call. `symbolic` gives (operand, dim) a size in symbols (operand -1: the output)."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    symbolic: Mapping[tuple[int, int], sympy.Expr] = field(default_factory=dict)
    dims: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    has_values: bool = True  # False: the result is memory that nobody wrote
    result: int | None = None  # which of several results

    def run(self, *replaced: tuple[int, Tensor]) -> Tensor:
        """The call's value, with some of its tensors (counted in order) replaced."""
        leaves, tree = tree_flatten((self.args, dict(self.kwargs)))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for position, value in replaced:
            leaves[at[position]] = value
        args, kwargs = tree_unflatten(leaves, tree)
        value = self.op(*args, **kwargs)
        return value if self.result is None else value[self.result]

    def results(self) -> list["Case"]:
        """This call, or one case for each tensor among its several results."""
        value = self.run()
        if isinstance(value, Tensor):
            return [self]
        return [replace(self, result=i) for i, v in enumerate(value) if isinstance(v, Tensor)]

    def recast(self, dtype: torch.dtype) -> "Case | None":
        """The same call on numbers of another dtype; None where the op does not take them."""
        floats = [(i, x) for i, x in enumerate(self.tensors) if x.dtype == torch.float64]
        leaves, tree = tree_flatten((self.args, dict(self.kwargs)))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for i, x in floats:
            numbers = (3 * x).round().to(dtype)  # never 0, so that they may divide
            leaves[at[i]] = x > 0 if dtype == torch.bool else numbers.where(numbers != 0, 1)
        args, kwargs = tree_unflatten(leaves, tree)
        case = replace(self, args=args, kwargs=kwargs)
        try:
            case.run()
        except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
            return None
        return case if floats else None

    @property
    def tensors(self) -> list[Tensor]:
        leaves = tree_flatten((self.args, dict(self.kwargs)))[0]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def program_of(case: Case) -> Program:
    """A graph of one call whose placeholders are its tensors."""
    graph = fx.Graph()
    info: dict[str, TensorInfo] = {}

    def describe(node: fx.Node, value: Tensor, position: int) -> None:
        node.meta["val"] = value
        sizes = [case.symbolic.get((position, d), n) for d, n in enumerate(value.shape)]
        info[node.name] = TensorInfo(tuple(map(sympy.sympify, sizes)), value.dtype, False)

    leaves, tree = tree_flatten((case.args, dict(case.kwargs)))
    made = 0
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[i] = graph.placeholder(f"operand{made}")
            describe(leaves[i], leaf, made)
            made += 1
    args, kwargs = tree_unflatten(leaves, tree)
    node = graph.call_function(case.op, args, kwargs)
    if case.result is not None:
        node.meta["val"] = replace(case, result=None).run()
        node = graph.call_function(operator.getitem, (node, case.result))
    describe(node, case.run(), -1)
    graph.output((node,))
    return Program(
        gm=SimpleNamespace(graph=graph), parameters={}, buffers={}, constants={}, inputs={},
        symbols={s.name: s for s in case.dims}, info=info, scalars={}, outputs=(node.name,),
        begins=(0,), hints={}, graph_hash="one call",
    )  # fmt: skip


def free_names(rule: OpSharding) -> set[str]:
    """Names a rank may have a piece of."""
    output = {name for dim in rule.output for name in dim}
    sources = {source for source, _ in rule.slices.values()}
    return (output | rule.summed) - rule.whole - sources


def check_call(case: Case, p: int) -> int:
    """Asserts that every alternative gives the call's own values; returns how many were run."""
    return sum(check_result(one, p) for one in case.results())


def check_result(case: Case, p: int) -> int:
    """The same of one of its results."""
    program = program_of(case)
    sharding = analyse(program)
    rule = sharding.rules[program.loss]
    assert not rule.reason, rule.reason
    alternatives = sharding.alternatives[program.loss]
    # Not the op on pieces alone: rings (test_ring.py), rows of neighbours (test_windows.py).
    apart = {*rule.windows, *rule.averages}
    split = [a for a in alternatives if a.factor >= 0 and not a.across and a.name not in apart]
    assert {a.name for a in split} == free_names(rule), "a name has no alternative"
    whole, count = case.run(), 0
    for alternative in split:
        size = int(rule.sizes[alternative.name].subs(case.dims))
        assert alternative.nonempty == (alternative.name in rule.nonempty)
        if not alternative.nonempty or size >= p:
            check_pieces(case, program, sharding, alternative, p, whole)
            if p == 2:  # a rank's piece may be two runs of elements, one from either end
                check_pieces(case, program, sharding, alternative, p, whole, zigzag=True)
            count += 1
    for alternative in alternatives:
        if any(label.partial for label in alternative.operands):
            check_partial(case, alternative, whole)
    return count


def read_by_another(program: Program) -> Program:
    """The program with a call that reads its result as it is made: the whole is not asked for."""
    graph = fx.Graph()
    graph.graph_copy(program.gm.graph, {})
    made = next(n for n in graph.nodes if n.name == program.loss)
    for node, source in zip(graph.nodes, program.gm.graph.nodes, strict=False):
        node.meta = dict(source.meta)
    reader = graph.call_function(torch.ops.aten.clone.default, (made,))
    reader.meta = dict(made.meta)
    graph.output((reader,))
    info = {**program.info, reader.name: program.info[program.loss]}
    return replace(program, gm=SimpleNamespace(graph=graph), info=info, outputs=(reader.name,))


def check_pieces(
    case: Case,
    program: Program,
    sharding: Sharding,
    chosen: Alternative,
    p: int,
    whole: Tensor,
    zigzag: bool = False,
) -> None:
    nodes = {n: NodePlacement((), REPLICATED) for n in sharding.factors}
    nodes[program.loss] = NodePlacement(chosen.operands, chosen.output, chosen.name)
    reader = read_by_another(program)
    nodes[reader.loss] = NodePlacement((chosen.output,), chosen.output, "reader")
    factors = {**sharding.factors, reader.loss: sharding.factors[program.loss]}
    every = {f.key: f for of in factors.values() for dim in of for f in dim}
    split = every[chosen.factor]
    root = split.key if split.parent < 0 else split.parent
    ends = frozenset({root}) if zigzag else frozenset()
    placement = Placement(p, nodes, factors, sharding.parents, 0.0, 0, "one call", ends)
    lowered = lower(reader, placement, "no group")
    local = next(n for n in lowered.gm.graph.nodes if n.meta.get("dcpc") == reader.loss)
    for node in [n for n in reversed(lowered.gm.graph.nodes) if n > local]:
        lowered.gm.graph.erase_node(node)
    lowered.gm.graph.output(local)
    lowered.gm.graph.eliminate_dead_code()
    results = []
    for rank in range(p):
        values = [case.tensors, [i.value(case.dims, p, rank) for i in lowered.integers]]
        results.append(fx.Interpreter(lowered.gm).run(*values[0], *values[1]))
    where = f"{case.op} sharded along {chosen.name} by {p}" + " zigzag" * zigzag
    if chosen.output.partial:
        same(sum(results[1:], results[0]), whole, where)
        return
    for rank, result in enumerate(results):
        factors = sharding.factors[program.loss]
        want = cut(whole, factors, sharding, chosen, (p, rank), case.dims, zigzag)
        same(result, want, f"{where}, rank {rank}", case.has_values)


def cut(
    whole: Tensor, factors: Any, sharding: Sharding, chosen: Alternative, at: tuple[int, int],
    dims: Mapping[sympy.Symbol, int], zigzag: bool,
) -> Tensor:  # fmt: skip
    """One rank's piece of a value: its dim is a product of factors, one of which is cut."""
    dim, index = chosen.output.dim, chosen.output.index
    sizes = [int(f.size.subs(dims)) for f in factors[dim]]
    factor = factors[dim][index]
    parent = sharding.parents[factor.parent].size if factor.parent >= 0 else factor.size
    mine = runs(sizes[index], int(parent.subs(dims)), factor.shift, *at, zigzag)
    taken = whole.unflatten(dim, sizes)
    taken = torch.cat([taken.narrow(dim + index, *run) for run in mine], dim + index)
    sizes[index] = taken.shape[dim + index]
    return taken.reshape(*whole.shape[:dim], prod(sizes), *whole.shape[dim + 1 :])


def check_partial(case: Case, chosen: Alternative, whole: Tensor) -> None:
    """f(x1 + x2) = f(x1) + f(x2) where x1 + x2 are the operands that may be partial sums."""
    terms: list[list[tuple[int, Tensor]]] = [[], []]
    generator = torch.Generator().manual_seed(5)
    for position, label in enumerate(chosen.operands):
        if label.partial:
            x = case.tensors[position]
            assert x.dtype != torch.bool, "truth values do not add up"
            one = torch.randint(-4, 5, x.shape, generator=generator).to(x.dtype)
            terms[0].append((position, one))
            terms[1].append((position, x - one))
    same(case.run(*terms[0]) + case.run(*terms[1]), whole, f"{case.op} of partial sums")


def same(got: Tensor, want: Tensor, where: str, has_values: bool = True) -> None:
    """Asserts equality: exact for integers, 1e-12 for numbers."""
    assert got.shape == want.shape, f"{where}: {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{where}: {got.dtype}, expected {want.dtype}"
    if not has_values or torch.equal(got, want):
        return
    tolerance = 1e-5 if got.dtype in (torch.float32, torch.complex64) else 1e-12
    torch.testing.assert_close(
        got, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{where}: {m}"
    )
