"""The optimal placement by integer programming, and any placement's cost: slow, independent.

Prices are worked out one at a time from the definitions. Here every (value, label) has a yes/no
variable of its own, "the value is changed to this label".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import inf, lcm, prod

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from dcpc.ir import (
    REPLICATED,
    Factor,
    Label,
    NodePlacement,
    Program,
    call_of,
    tensor_operands,
)
from dcpc.passes.placement.node_calls import CallPattern, call_patterns
from dcpc.passes.placement.objective import Objective
from dcpc.passes.sharding.sharding import Alternative, Sharding
from dcpc.symbolic_profile import Device, Link


def on_machine(
    flops_per_s: float,
    bytes_per_s: float,
    link_bytes_per_s: float,
    start_s: float,
    launch_s: float,
    held_s_per_byte: float = 0.0,
) -> Objective:
    """Returns what placements minimise on a machine of these rates, one link for all ranks.

    Args:
        flops_per_s: of products and of all else.
        bytes_per_s: of memory.
        link_bytes_per_s: what one rank sends.
        start_s: what the start of a collective counts.
        launch_s: start of one op.
        held_s_per_byte: price of what is kept for backward.
    """
    link = Link(start_s, link_bytes_per_s)
    device = Device(
        name="any", flops_per_s=((torch.float32, flops_per_s),), vector_flops_per_s=flops_per_s,
        memory_bytes_per_s=bytes_per_s, memory_bytes=1 << 40, launch_s=launch_s,
        node_ranks=1 << 20, inside=link, across=link, overlaps=False,
    )  # fmt: skip
    return Objective(device, held_s_per_byte, start_s)


class Oracle:
    """Costs of one program at one bucket's sizes."""

    def __init__(
        self,
        program: Program,
        sharding: Sharding,
        sizes: Mapping[str, int],
        sp: int,
        objective: Objective,
    ) -> None:
        self.program, self.sharding, self.sp = program, sharding, sp
        self.objective, self.device = objective, objective.device
        assert self.device.fits is None, "one roofline for all calls"
        assert not self.device.overlaps, "nothing is hidden"
        assert objective.tie_s is not None, "a collective's start has a price of its own"
        self.tie_s = objective.tie_s
        self.dims = {program.symbols[n]: s for n, s in sizes.items() if n in program.symbols}
        nodes = list(program.gm.graph.nodes)
        self.operands = {n.name: [o.name for o in tensor_operands(n, program.info)] for n in nodes}
        self.cheap: set[str] = set(program.scalars)
        for node in nodes:
            rule = sharding.rules.get(node.name)
            heavy = node.name not in sharding.alternatives or (rule and rule.multiplies)
            given = all(n.name in self.cheap for n in node.all_input_nodes)
            trained = node.name in program.parameters and program.info[node.name].requires_grad
            if given and not heavy and not trained:
                self.cheap.add(node.name)
        self.bytes, self.share = cache(self.bytes), cache(self.share)
        self.change, self.compute = cache(self.change), cache(self.compute)
        # what is wanted whatever is chosen: the loss, and operands of ops with several results
        self.wanted_whole = [program.loss]
        for node in nodes:
            known = node.name in sharding.alternatives or node.name in program.scalars
            if node.op == "call_function" and not known:
                self.wanted_whole += self.operands[node.name]

    def bytes(self, name: str) -> float:
        info = self.program.info[name]
        return prod(float(s.subs(self.dims)) for s in info.shape) * info.dtype.itemsize

    def share(self, factor: Factor) -> float:
        size = int(factor.size.subs(self.dims))
        parent, shift = size, 0
        if factor.parent >= 0:
            parent = int(self.sharding.parents[factor.parent].size.subs(self.dims))
            shift = factor.shift
        owner = [r for r in range(self.sp) for _ in range(-(-(parent - r) // self.sp))]
        counts = [owner[shift : shift + size].count(r) for r in range(self.sp)]
        return max(counts) / size if size else 1.0

    def label_share(self, name: str, label: Label) -> float:
        return self.share(self._factor(name, label)) if label.sharded else 1.0

    def _factor(self, name: str, label: Label) -> Factor:
        return self.sharding.factors[name][label.dim][label.index]

    def usable(self, name: str, alternative: Alternative) -> bool:
        if alternative.factor < 0:
            return True
        tensors = (*self.operands[name], name)
        labels = (*alternative.operands, alternative.output)
        pairs = zip(tensors, labels, strict=True)
        split = [self._factor(t, label) for t, label in pairs if label.sharded]
        size = next(f for f in split if f.key == alternative.factor).size
        if alternative.nonempty and not (size.is_Integer and size >= self.sp):
            return False
        if alternative.across and (self.sp % alternative.across or self.sp == alternative.across):
            return False
        return self.sp > 1 and int(size.subs(self.dims)) > 1

    def change(self, name: str, have: Label, want: Label) -> float:
        """Seconds of one change of label, and of its transpose if there is a gradient."""
        whole_at_hand = name in self.cheap and not (have.sharded or have.partial)
        if have == want or (whole_at_hand and want.sharded):
            return 0.0
        if want.partial or (name in self.cheap and have.sharded):
            return inf
        whole, p = self.bytes(name), self.sp
        grad = self.program.info[name].requires_grad
        before, after = (whole * self.label_share(name, label) for label in (have, want))
        if not have.sharded and not have.partial:
            return self.call_s(2 * after) + grad * self.call_s(whole + after)
        moved_s = (before + after) / self.device.memory_bytes_per_s
        link = self.device.inside.bytes_per_s
        if have.partial and not want.sharded:
            sent, back = 2 * (p - 1) / p * whole, 2 * (p - 1) / p * whole
        elif have.partial:
            sent, back = (p - 1) / p * whole, (p - 1) * after
        elif not want.sharded:
            sent, back = (p - 1) * before, (p - 1) / p * whole
        else:
            sent, back = (p - 1) / p * before, (p - 1) / p * after
        seconds = self.tie_s + moved_s + sent / link
        if grad:
            seconds += self.tie_s + moved_s + back / link
        kept = whole - before if have.sharded and not want.sharded else 0.0
        return seconds + grad * kept * self.objective.held_s_per_byte

    def call_s(self, moved: float, flops: float = 0.0, product: bool = False) -> float:
        """Seconds of one call of so many bytes moved and FLOPs."""
        dev = self.device
        rate = dict(dev.flops_per_s).popitem()[1] if product else dev.vector_flops_per_s
        return max(moved / dev.memory_bytes_per_s, flops / rate) + dev.launch_s

    def calls(self, name: str) -> tuple[CallPattern, ...]:
        """What a node does, forward and backward; () where it has no rule."""
        rule, info = self.sharding.rules.get(name), self.program.info
        if rule is None:
            return ()
        node = next(n for n in self.program.gm.graph.nodes if n.name == name)
        tensors = [info[t] for t in (*self.operands[name], name)]
        readers = [n for n in node.users if n.name in info and info[n.name].requires_grad]
        return call_patterns(call_of(node).target, rule, tensors, len(readers))

    def compute(self, name: str, alternative: Alternative) -> float:
        """Seconds of one node on the fullest rank, and the price of what it keeps."""
        rule = self.sharding.rules.get(name)
        calls = self.calls(name)
        if rule is None or not calls:
            return 0.0
        tensors = list(
            zip((*self.operands[name], name), (*alternative.operands, alternative.output),
                strict=True)
        )  # fmt: skip
        pieces = [self.bytes(t) * self.label_share(t, label) for t, label in tensors]
        numels = [b / self.program.info[t].dtype.itemsize for b, (t, _) in zip(
            pieces, tensors, strict=True)]  # fmt: skip
        product = 2 * prod(float(s.subs(self.dims)) for s in rule.sizes.values())
        product *= rule.work.get(alternative.name, rule.work.get("", 1.0))
        for t, label in tensors:
            if label.sharded and self._factor(t, label).key == alternative.factor:
                product *= self.label_share(t, label)
                break
        total = 0.0
        for c in calls:
            moved = sum(pieces[i] for i in c.moved)
            flops = c.elements * max(numels[i] for i in c.moved) + c.product * product
            if alternative.across and c.op_class == "attention":
                total += self.ring(name, alternative, c.forward, moved, flops)
            else:
                total += self.call_s(moved, flops, bool(c.product))
        if rule.is_view or not self.program.info[name].requires_grad:
            return total
        return total + pieces[-1] * self.objective.held_s_per_byte

    def ring(
        self, name: str, alternative: Alternative, forward: bool, moved: float, flops: float
    ) -> float:
        """Seconds of one direction of a ring, nothing of what it sends hidden behind its work."""
        ring = self.sharding.rules[name].ring
        assert ring is not None
        a, size = alternative.across, self.program.info[name].dtype.itemsize
        wider = max(1, 4 // size)
        tensors = list(zip(self.operands[name], alternative.operands, strict=True))
        repeats = lcm(ring.heads[1], a) // ring.heads[1]
        turned = [tensors[i] for i in ring.rotated] * repeats
        ends = [tensors[0], (name, alternative.output)]
        piece = sum(self.bytes(t) * self.label_share(t, at) for t, at in turned)
        steps = self.sp // a
        t, at = ends[1] if forward else ends[0]
        moved += 3 * (steps - 1) * self.bytes(t) * self.label_share(t, at) * wider
        sent, messages = (steps - 1) * piece, steps - 1
        if not forward:
            sent, messages = sent + sent * wider + piece * wider, 2 * steps - 1
        link = self.device.inside.bytes_per_s
        seconds = self.call_s(moved, flops, True) + sent / link + messages * self.tie_s
        if a > 1:
            for t, at in (*ends, *turned):
                swapped = self.bytes(t) * self.label_share(t, at)
                away = (a - 1) / a / link + 2 / self.device.memory_bytes_per_s
                seconds += self.tie_s + swapped * away
        return seconds

    def cost(self, placement: Mapping[str, NodePlacement | Alternative]) -> float:
        """Returns the seconds of a placement: every changed value paid once."""
        changes = {(name, REPLICATED): None for name in self.wanted_whole}
        total = 0.0
        for name, chosen in placement.items():
            match = [
                a
                for a in self.sharding.alternatives[name]
                if (a.operands, a.output, a.name, max(a.across, 1))
                == (chosen.operands, chosen.output, chosen.name, max(chosen.across, 1))
            ]
            assert any(self.usable(name, a) for a in match), f"{name} cannot be {chosen}"
            total += self.compute(name, match[0])
            changes |= dict.fromkeys(zip(self.operands[name], chosen.operands, strict=False))
        return total + sum(self.change(n, placement[n].output, want) for n, want in changes)

    def minimum(self, time_limit_s: float = 300.0) -> float:
        """Returns the least cost of any placement: that of the solver's, as `cost` counts it.

        Variables: x[node, alternative] is 0/1; y[value, label], "changed to this label", is at
        least every consumer's wish; z[value, have, want] shares y out among the labels it may be
        made in.

        Raises:
            RuntimeError: the solver stopped before it had proved its result.
        """
        problem = _Problem()
        x: dict[str, dict[Alternative, int]] = {}
        made: dict[str, dict[Label, list[int]]] = {}
        for name, alternatives in self.sharding.alternatives.items():
            usable = [a for a in alternatives if self.usable(name, a)]
            x[name] = {a: problem.add(self.compute(name, a), True) for a in usable}
            problem.require(dict.fromkeys(x[name].values(), 1.0), 1, 1)
            made[name] = {}
            for alternative, variable in x[name].items():
                made[name].setdefault(alternative.output, []).append(variable)
        y: dict[tuple[str, Label], int] = {}

        def changed(name: str, want: Label) -> int:
            if (name, want) not in y:
                y[name, want] = problem.add(0.0)
                terms = {y[name, want]: -1.0}
                for have, makers in made[name].items():
                    z = problem.add(self.change(name, have, want))
                    problem.require({z: 1.0, **dict.fromkeys(makers, -1.0)}, -inf, 0)
                    terms[z] = 1.0
                problem.require(terms, 0, 0)
            return y[name, want]

        for name in self.wanted_whole:
            problem.require({changed(name, REPLICATED): 1.0}, 1, 1)
        for name, variables in x.items():
            for position, source in enumerate(self.operands[name]):
                for want in dict.fromkeys(a.operands[position] for a in variables):
                    wishes = {v: 1.0 for a, v in variables.items() if a.operands[position] == want}
                    problem.require({**wishes, changed(source, want): -1.0}, -inf, 0)
        taken = problem.solve(time_limit_s)
        return self.cost({n: a for n, of in x.items() for a, v in of.items() if taken[v]})


class _Problem:
    """A 0/1 minimisation, row by row; a variable of cost inf is 0."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.binary: list[bool] = []
        self.rows: list[dict[int, float]] = []
        self.bounds: list[tuple[float, float]] = []

    def add(self, cost: float, binary: bool = False) -> int:
        self.costs.append(cost)
        self.binary.append(binary)
        return len(self.costs) - 1

    def require(self, terms: Mapping[int, float], least: float, most: float) -> None:
        self.rows.append(dict(terms))
        self.bounds.append((least, most))

    def solve(self, time_limit_s: float) -> list[bool]:
        """Returns which variables are 1; the solver takes for 0 or 1 what is within 1e-6 of it."""
        costs = np.array(self.costs)
        never = np.isinf(costs)
        scale = costs[~never].max()
        triples = [(i, j, c) for i, row in enumerate(self.rows) for j, c in row.items()]
        rows, columns, coefficients = (np.array(part) for part in zip(*triples, strict=True))
        shape = (len(self.rows), len(costs))
        result = milp(
            np.where(never, 0.0, costs) / scale,
            integrality=np.array(self.binary),
            bounds=Bounds(0, np.where(never, 0.0, 1.0)),
            constraints=LinearConstraint(
                coo_array((coefficients, (rows, columns)), shape=shape).tocsr(),
                *np.array(self.bounds).T,
            ),
            options={"mip_rel_gap": 0.0, "time_limit": time_limit_s},
        )
        if result.status != 0:
            raise RuntimeError(f"milp stopped without a proved optimum: {result.message}")
        return [bool(value > 0.5) for value in result.x]
