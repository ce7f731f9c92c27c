"""The options of each node under sequence parallelism: its factors and alternatives.

Independent of the bucket and of the degree; `placement.py` prices it and chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dcpc.ir import (
    PARTIAL,
    REPLICATED,
    WHOLE_GRADIENT,
    Factor,
    Label,
    NodePlacement,
    Program,
    tensor_operands,
)
from dcpc.passes.sharding.derive import DerivedRules
from dcpc.passes.sharding.factors import FactorTable
from dcpc.passes.sharding.rule_types import OpSharding
from dcpc.passes.sharding.rules import op_sharding


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to run a node: labels of its operands and output, and the factor that is split.

    Attributes:
        operands: wanted label of each tensor operand.
        output: label of the value.
        factor: key of the factor of which each rank has a piece, -1 if each does all the work.
        name: name of that factor in the op's rule, "" if there is none.
        nonempty: whether every rank needs an element of the factor.
        across: number of ranks that share one piece of the rows in a ring, each with some heads; 0:
            no ring.
    """

    operands: tuple[Label, ...]
    output: Label
    factor: int
    name: str = ""
    nonempty: bool = False
    across: int = 0

    @property
    def placed(self) -> NodePlacement:
        """The node's entry in a placement that chooses this alternative."""
        return NodePlacement(self.operands, self.output, self.name, max(self.across, 1))


@dataclass(frozen=True, slots=True)
class Sharding:
    """Factors and alternatives of every node with a tensor value, in graph order.

    Attributes:
        factors: node name -> the factors of each dim of its value.
        alternatives: node name -> its alternatives; the first is "replicated".
        rules: node name -> its sharding rule; absent for placeholders.
        parents: factors, by key, of which other factors are slices.
        replicated: reason -> names of the nodes without a usable rule.
        derived: op without a line -> derived line -> names of the nodes that use it.
        attention: the only lowering that attention may have, "auto" for all.
    """

    factors: Mapping[str, tuple[tuple[Factor, ...], ...]]
    alternatives: Mapping[str, tuple[Alternative, ...]]
    rules: Mapping[str, OpSharding]
    parents: Mapping[int, Factor]
    replicated: Mapping[str, list[str]]
    derived: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)
    attention: str = "auto"


def analyse(program: Program, derive_rules: bool = True) -> Sharding:
    """Returns the factors of every dim in the graph, and the alternatives of every node."""
    derived = DerivedRules(program.scalars)
    table = FactorTable()
    dims: dict[str, list[list[int]]] = {}
    rules: dict[str, OpSharding] = {}
    names: dict[str, dict[str, int]] = {}
    replicated: dict[str, list[str]] = {}
    for node in program.gm.graph.nodes:
        if node.name not in program.info:
            continue
        shape = program.info[node.name].shape
        dims[node.name] = [[table.new(s)] if s != 1 else [] for s in shape]
        if node.op != "call_function":
            continue
        rule = op_sharding(node, program.info, derived if derive_rules else None)
        rules[node.name] = rule
        if rule.reason and not rule.deliberate:
            replicated.setdefault(rule.reason, []).append(node.name)
        names[node.name] = {n: table.new(s) for n, s in rule.sizes.items()}
        tensors = [n.name for n in tensor_operands(node, program.info)] + [node.name]
        for tensor, tensor_names in zip(tensors, (*rule.operands, rule.output), strict=True):
            for keys, members in zip(dims[tensor], tensor_names, strict=True):
                if members:
                    table.unify(keys, [names[node.name][m] for m in members])
    slices = _slices(program, table, rules, names)
    factors = {
        n: tuple(tuple(_factor(table, k, slices) for k in table.atoms(d)) for d in node_dims)
        for n, node_dims in dims.items()
    }
    alternatives = _alternatives(program, table, factors, rules, names, slices)
    parents = {p: _factor(table, p, slices) for p, _ in slices.values()}
    return Sharding(factors, alternatives, rules, parents, replicated, derived.nodes)


def _factor(table: FactorTable, key: int, slices: Mapping[int, tuple[int, int]]) -> Factor:
    parent, shift = slices.get(key, (-1, 0))
    return Factor(key, table.size(key), parent, shift)


def _slices(
    program: Program,
    table: FactorTable,
    rules: Mapping[str, OpSharding],
    names: Mapping[str, Mapping[str, int]],
) -> dict[int, tuple[int, int]]:
    """Returns factor -> (parent, shift) for factors whose split follows that of a longer one.

    `x[:, :-1]` of a sharded x is free if the result's pieces are x's, cut. Where several slices
    make the same factor (shifted logits and labels), the largest value that carries a gradient
    decides.
    """
    found: dict[int, tuple[int, int]] = {}
    candidates = []
    inputs = {
        key
        for node in program.gm.graph.nodes
        if node.name in program.inputs
        for key in program.info[node.name].shape
    }
    for name, rule in rules.items():
        for cut, (source, start) in rule.slices.items():
            child = table.atoms([names[name][cut]])
            parent = table.atoms([names[name][source]])
            if len(child) == 1 and len(parent) == 1 and table.size(child[0]) not in inputs:
                info = program.info[name]
                order = (not info.requires_grad, -len(info.shape), name)
                candidates.append((order, child[0], parent[0], start))
    for _, short, long, start in sorted(candidates):
        ancestors = [long]
        while ancestors[-1] in found:
            ancestors.append(found[ancestors[-1]][0])
        if short not in found and short not in ancestors:
            found[short] = (long, start)
    # One level is enough for what models do (shift by one); a slice of a slice keeps its own split.
    return {c: (p, s) for c, (p, s) in found.items() if p not in found}


def _alternatives(
    program: Program,
    table: FactorTable,
    factors: Mapping[str, tuple[tuple[Factor, ...], ...]],
    rules: Mapping[str, OpSharding],
    names: Mapping[str, Mapping[str, int]],
    slices: Mapping[int, tuple[int, int]],
) -> dict[str, tuple[Alternative, ...]]:
    result: dict[str, tuple[Alternative, ...]] = {}
    for node in program.gm.graph.nodes:
        if node.name not in factors:
            continue
        if node.name not in rules:
            result[node.name] = (Alternative((), REPLICATED, -1),)
            continue
        operands = [n.name for n in tensor_operands(node, program.info)]
        rule = rules[node.name]
        name = WHOLE_GRADIENT if rule.whole_gradient else ""
        found = [Alternative((REPLICATED,) * len(operands), REPLICATED, -1, name)]
        tensors = [factors[n] for n in operands]
        known = zip((*tensors, factors[node.name]), (*rule.operands, rule.output), strict=True)
        where = [_positions(table, t, n, names[node.name]) for t, n in known]
        for name in rule.sizes:
            found += _shard(table, rule, name, names[node.name], where, slices)
        found += _rings(table, rule, names[node.name], where)
        found += _nearby(rule, factors[operands[0]], factors[node.name], where) if operands else []
        found += _partial(rule, len(operands))
        result[node.name] = tuple(dict.fromkeys(found))
    return result


def _positions(
    table: FactorTable,
    dims: tuple[tuple[Factor, ...], ...],
    tensor_names: tuple[tuple[str, ...], ...],
    keys: Mapping[str, int],
) -> dict[str, tuple[int, int]]:
    """Returns name -> (dim, index of its first factor); none for a dim that was not refined."""
    found: dict[str, tuple[int, int]] = {}
    for d, (dim, members) in enumerate(zip(dims, tensor_names, strict=True)):
        atoms = [table.atoms([keys[m]]) for m in members]
        if [f.key for f in dim] != [key for part in atoms for key in part]:
            continue
        index = 0
        for member, part in zip(members, atoms, strict=True):
            found[member] = (d, index)
            index += len(part)
    return found


def _shard(
    table: FactorTable,
    rule: OpSharding,
    name: str,
    keys: Mapping[str, int],
    where: list[dict[str, tuple[int, int]]],
    slices: Mapping[int, tuple[int, int]],
) -> list[Alternative]:
    """Returns the alternatives in which each rank has a piece of one factor of this name."""
    if name in rule.whole or name in {source for source, _ in rule.slices.values()}:
        return []
    tensors = (*rule.operands, rule.output)
    in_output = any(name in dim for dim in rule.output)
    if not in_output and name not in rule.summed:
        return []
    for positions, tensor in zip(where, tensors, strict=True):
        if any(name in dim for dim in tensor) and name not in positions:
            return []
    found = []
    for i, key in enumerate(table.atoms([keys[name]])):
        labels = [Label(p[name][0], p[name][1] + i) if name in p else REPLICATED for p in where]
        if name in rule.slices:
            source, start = rule.slices[name]
            if slices.get(key) != (table.atoms([keys[source]])[0], start):
                return []
            labels[0] = Label(*where[0][source])
        output = labels[-1] if in_output else PARTIAL
        nonempty = name in rule.nonempty
        found.append(Alternative(tuple(labels[:-1]), output, key, name, nonempty))
    return found


def _rings(
    table: FactorTable,
    rule: OpSharding,
    keys: Mapping[str, int],
    where: list[dict[str, tuple[int, int]]],
) -> list[Alternative]:
    """Returns the ring alternatives, split along the outer factor of the rows."""
    if rule.ring is None:
        return []
    split = (*rule.ring.operands, rule.ring.output)
    if any(name and name not in of for name, of in zip(split, where, strict=True)):
        return []
    labels = [
        Label(*of[name]) if name else REPLICATED for name, of in zip(split, where, strict=True)
    ]
    factor = table.atoms([keys[rule.ring.output]])[0]
    return [
        Alternative(tuple(labels[:-1]), labels[-1], factor, "ring", across=across)
        for across in rule.ring.across
    ]


def _nearby(
    rule: OpSharding,
    source: tuple[tuple[Factor, ...], ...],
    made: tuple[tuple[Factor, ...], ...],
    where: list[dict[str, tuple[int, int]]],
) -> list[Alternative]:
    """Returns the alternatives in which ranks get neighbours' rows, or sum over their pieces."""
    pairs = {name: window.source for name, window in rule.windows.items()}
    pairs |= {name: name for name in rule.averages}
    found = []
    for name, read in pairs.items():
        if name not in where[-1] or read not in where[0]:
            continue
        dims = where[0][read][0], where[-1][name][0]
        if len(source[dims[0]]) != 1 or len(made[dims[1]]) != 1:
            continue  # a window over a part of a dim, such as every second row of it
        wanted = (Label(dims[0], 0), *(REPLICATED,) * (len(where) - 2))
        found.append(Alternative(wanted, Label(dims[1], 0), made[dims[1]][0].key, name))
    return found


def _partial(rule: OpSharding, operands: int) -> list[Alternative]:
    """Returns the alternatives that pass a partial sum on."""
    if not operands or rule.linear == "none":
        return []
    if rule.linear == "all":
        return [Alternative((PARTIAL,) * operands, PARTIAL, -1)]
    positions = range(operands) if rule.linear == "one" else range(1)
    return [
        Alternative(tuple(PARTIAL if i == p else REPLICATED for i in range(operands)), PARTIAL, -1)
        for p in positions
    ]
