"""A call has the piece of an equal one of other sizes: the graph is that of a trace."""

from functools import cache

import pytest
import sympy
import torch
from torch import Tensor, fx, nn

import dcpc
from dcpc.codegen import LoweredPair
from dcpc.codegen.joint.library import Library, Renamed
from dcpc.commands.check import SplitModel
from dcpc.fx.fakes import layout_of
from dcpc.plan.traced import group_name

GRID = {"x": "float32[batch, rows, columns, 24]", "y": "float32[batch, rows, columns, 24]"}
PLACES = (
    {"batch": 1, "rows": 4096, "columns": 3},
    {"batch": 1, "rows": 3, "columns": 4096},
    {"batch": 64, "rows": 5, "columns": 7},
)


class Axial(nn.Module):
    """Mixes rows, then columns: what is split may be either, or samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.RMSNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)
        self.query, self.key, self.value = (nn.Linear(24, 24, bias=False) for _ in range(3))

    def along(self, x: Tensor) -> Tensor:
        heads = (
            layer(x).unflatten(-1, (4, 6)).transpose(-2, -3)
            for layer in (self.query, self.key, self.value)
        )
        out = nn.functional.scaled_dot_product_attention(*(h.flatten(0, 1) for h in heads))
        return out.unflatten(0, x.shape[:2]).transpose(-2, -3).flatten(-2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.along(self.norm(x))
        x = x + self.along(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.narrow(nn.functional.gelu(self.wide(x)))
        return nn.functional.mse_loss(x, y)


@cache
def split() -> SplitModel:
    torch.manual_seed(0)
    return SplitModel(Axial(), dcpc.Buckets(GRID, [*PLACES]), PLACES[0], sp=2)


def lowerings() -> list[LoweredPair]:
    """Returns the graphs of some placements, all from one tracer."""
    priced = split().priced
    placements = [priced.placement(sizes, sp) for sizes in PLACES for sp in (1, 2)]
    return list(dict.fromkeys(map(priced.traced.lowering, placements)))


def alone(lowering: LoweredPair) -> LoweredPair:
    """Returns the same graph, of which each call is traced."""
    tracer = split().traced.tracer("eager")
    own = type(tracer)(tracer.program, split().traced.tensors(), Library({}))
    return LoweredPair(own, lowering.placement, group_name(lowering.placement.sp), "eager")


def described(lowering: LoweredPair) -> list[tuple[object, ...]]:
    """Returns each node, with its sizes in the symbols of dims and pieces."""
    names, storages, found = lowering.joint.names, {}, []

    def size(value: object) -> sympy.Expr:
        expr = value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)
        return sympy.expand(expr.xreplace(names))

    def tensor(value: object) -> object:
        if isinstance(value, Tensor):
            sizes = (*value.shape, *value.stride(), value.storage_offset())
            memory = value.untyped_storage().nbytes()
            return value.dtype, value.device, *map(size, sizes), size(memory)
        if isinstance(value, tuple | list):
            return tuple(map(tensor, value))
        return size(value) if isinstance(value, torch.SymInt | int) else value

    for node in lowering.joint.gm.graph.nodes:
        plain = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.name)
        memory = [storages.setdefault(s, len(storages)) for s in node.meta.get("storage", ())]
        value = tensor(node.meta["val"]) if "val" in node.meta else None
        found.append((node.name, str(node.target), str(plain), value, memory))
    return found


def test_graphs_are_those_of_a_trace_of_every_call(monkeypatch):
    """And what a trace of a graph alone takes for granted is among its guards."""
    made = lowerings()
    pieces = split().traced.tracer("eager").library.pieces
    assert sum(isinstance(p, Renamed) for p in pieces) > 20, "some are in other names"
    assert len(made) >= 3, "they are split in several ways"
    monkeypatch.setattr(Library, "holds", lambda *_: False)
    for lowering in made:
        other = alone(lowering)
        assert described(lowering) == described(other)
        guards = lowering.joint.guards
        assert set(guards) >= set(other.joint.guards)
        assert all(g.free_symbols <= {i.symbol for i in lowering.lowered.integers} for g in guards)
        for sizes in PLACES:
            dims = {lowering.program.symbols[n]: s for n, s in sizes.items()}
            sp = lowering.placement.sp
            at = {i.symbol: max(2, i.value(dims, sp, 0)) for i in lowering.lowered.integers}
            assert all(g.subs(at) != sympy.false for g in guards), "it runs at these sizes"


def test_a_piece_whose_answers_differ_is_traced_anew():
    """Rows are cut where they are longer than ten: torch looks at the size while it traces."""
    library = Library({})
    short, long, longer = (library.env.integer(f"n{i}", hint) for i, hint in enumerate((7, 59, 83)))

    def cut(x: Tensor) -> Tensor:
        return x[:10] if x.shape[0] > 10 else x * 2

    def piece(rows: torch.SymInt) -> object:
        with library.mode:
            value = torch.empty(rows, 3)
        node = fx.Graph().placeholder("x")
        node.meta["val"] = value
        return library.piece(cut, (node,), {}, {node})

    first, other, same = piece(long), piece(short), piece(longer)
    assert isinstance(same, Renamed)
    assert not isinstance(other, Renamed)
    assert [str(op.target) for op in first.ops] == [str(op.target) for op in same.ops]
    assert [str(op.target) for op in other.ops] == ["aten.mul.Tensor"]
    symbol = longer.node.expr
    guards = library.guards({symbol: sympy.Symbol("n")})
    assert [g for g in guards if g.subs({"n": 9}) == sympy.false], guards


def test_dense_tensors_are_alike_however_torch_spells_their_bytes():
    library = Library({})
    n, m = (library.env.integer(f"n{i}", hint) for i, hint in enumerate((7, 59)))
    with library.mode:
        dense = torch.empty(n, m, 3)
        other = torch.empty_strided((n, m, 3), (m * 3, 3, 1))
    spelled = {t.untyped_storage().nbytes().node.expr for t in (dense, other)}
    assert len(spelled) == 2, "torch spells them otherwise"
    assert layout_of(dense) == layout_of(other)


@pytest.mark.parametrize("answer", [sympy.true, sympy.false])
def test_what_holds_at_any_size_is_no_question(answer):
    library = Library({})
    n = library.env.integer("n", 7)
    with library.env.noting() as asked:
        assert bool(n > 0)
        assert not bool(n == 1)
        assert bool(n > 5 if answer == sympy.true else n <= 5) is (answer == sympy.true)
    assert [*asked.values()] == [answer]
