"""Runs all ranks of a group in one process: each to its next collective, then all go on.

A lowered graph takes the differences between ranks as integers, so p ranks can run without a
process group, threads or messages: each rank is a generator over its graph's calls that stops at a
collective, which is then computed once from the arguments of all p ranks. A run is deterministic,
no rank waits for another, and an error names its node and rank.

    lowering = runnable.traced.lowering(placement)
    parts = runnable.partition(placement, menu_step)
    integers = integers_of(lowering.lowered, dims)            # one mapping a rank
    ranks = run_in_step([parts] * len(integers), integers, tensors)     # one `Result` a rank
    gradients = summed(ranks)          # one (or None) for each of lowering.joint.trainable

It checks the graphs, their integers, and the arguments of each collective. It does not check how a
collective's messages travel, which `tests/codegen/variant/test_lockstep.py` compares with gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dcpc.codegen.collectives.lockstep_collectives import COLLECTIVES, Call, added_up
from dcpc.codegen.lower.lower import Lowered
from dcpc.codegen.variant.boxed import RUN
from dcpc.errors import CodegenError
from dcpc.ir import Partition

GROUP = ("group", "str")  # (name, type) of the group argument; `groups` of a convolution is an int

# Yields (op, its arguments) where ranks meet, is sent its result, and returns the graph's outputs.
Run = Generator[tuple[Any, Call], Any, Sequence[Any]]
Make = Callable[[Any, Any, Any], Any]
Tangents = Callable[[int, Tensor], Tensor]


def ones(position: int, output: Tensor) -> Tensor:
    """Returns the gradient of a loss."""
    return torch.ones_like(output)


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one rank after forward and backward.

    Attributes:
        outputs: outputs for the whole group's inputs, equal on every rank; the loss first.
        gradients: gradients of this rank's share of the loss, in the order of `Joint.trainable`.
    """

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]

    @property
    def loss(self) -> Tensor:
        """The first output."""
        return self.outputs[0]


def integers_of(
    lowered: Lowered, dims: Mapping[sympy.Symbol, int], seed: int = 0
) -> list[dict[str, int]]:
    """Returns, for each rank of the group, placeholder name -> integer."""
    return [
        {
            i.name: seed if i.role == "seed" else i.value(dims, lowered.sp, rank)
            for i in lowered.integers
        }
        for rank in range(lowered.sp)
    ]


def run_in_step(
    parts: Sequence[Partition],
    integers: Sequence[Mapping[str, int]],
    tensors: Mapping[str, Tensor],
    call: Make | None = None,
    tangents: Tangents = ones,
) -> list[Result]:
    """Returns the outputs and the gradients of each rank, as the eager backend computes them.

    The caller must check that the graphs are valid at these sizes (`Joint.guards`).

    Args:
        parts: forward and backward of each rank, of any placement and recompute; usually the same
            graphs for all, but ranks whose sizes break a guard have others.
        integers: integers of each rank, from `integers_of`.
        tensors: placeholder name -> parameter, buffer, constant or input, whole and equal on every
            rank; only read.
        call: function of (op, arguments, keyword arguments) that runs a call of one rank alone;
            default: as the eager backend does.
        tangents: function of (index, value) of an output that returns its gradient; default: ones.

    Raises:
        CodegenError: ranks call different collectives, or one that is not in `COLLECTIVES`.
    """
    given = [{**tensors, **own} for own in integers]
    kind = next((t.device.type for t in tensors.values()), "cpu")
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        forwards = zip(parts, given, strict=True)
        forward = _together([_run(own.forward, values, call) for own, values in forwards])
        backwards = zip(parts, given, forward, strict=True)
        backward = _together(
            [
                _run(own.backward, _known(own, values, made, len(given), tangents), call)
                for own, values, made in backwards
            ]
        )
    found = zip(forward, backward, strict=True)
    returned = parts[0].returned
    return [Result(tuple(made[:returned]), tuple(gradients)) for made, gradients in found]


def _known(
    parts: Partition, given: Mapping[str, Any], made: Sequence[Any], p: int, tangents: Tangents
) -> Mapping[str, Any]:
    """Returns the arguments of a rank's backward, with 1 / p of each output's gradient."""
    taken = [n.name for n in parts.backward.graph.nodes if n.op == "placeholder"]
    names = taken[len(taken) - len(parts.begins) :]
    shares = [tangents(i, made[i]) / p for i in parts.begins]
    saved = zip(parts.saved, made[parts.returned :], strict=True)
    return {**given, **dict(saved), **dict(zip(names, shares, strict=True))}


def summed(ranks: Sequence[Result]) -> tuple[Tensor | None, ...]:
    """Returns the sum of all ranks' gradients, as `reduce_gradients` computes it."""
    every = zip(*(r.gradients for r in ranks), strict=True)
    return tuple(
        None if any(g is None for g in mine) else added_up([g for g in mine if g is not None])
        for mine in every
    )


def _together(runs: Sequence[Run]) -> list[Sequence[Any]]:
    """Runs all ranks, from collective to collective, and returns each rank's outputs."""
    sent: Sequence[Any] = [None] * len(runs)
    while True:
        met: list[tuple[Any, Call]] = []
        ended: list[Sequence[Any]] = []
        for run, result in zip(runs, sent, strict=True):
            try:
                met.append(run.send(result))
            except StopIteration as end:
                ended.append(end.value)
        if len(ended) == len(runs):
            return ended
        called = {str(op) for op, _ in met} | ({"the end"} if ended else set())
        if len(called) > 1:
            raise CodegenError(
                f"ranks of one group do not meet: some are at {', others at '.join(sorted(called))}"
                "; expected the same collective on all; report this, it is a defect of dcpc"
            )
        sent = COLLECTIVES[met[0][0]]([call for _, call in met])


def _run(gm: fx.GraphModule, given: Mapping[str, Any], call: Make | None) -> Run:
    """Runs one rank's graph; values are freed after their last use."""
    values: dict[fx.Node, Any] = {}
    dying = _last_uses(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = given[node.name]
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], values.__getitem__)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.target in COLLECTIVES:
                values[node] = yield node.target, _by_name(node.target, args, kwargs)
            else:
                values[node] = _called(node, args, kwargs, call)
        for dead in dying.get(node, ()):
            del values[dead]
    raise AssertionError("a graph without an output")


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    dying: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for read in (node, *node.all_input_nodes):
            if read not in seen:
                seen.add(read)
                dying.setdefault(node, []).append(read)
    return dying


def _called(node: fx.Node, args: Any, kwargs: Any, call: Make | None) -> Any:
    """Returns the result of a call that concerns one rank alone."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and any((a.name, str(a.type)) == GROUP for a in schema.arguments):
        raise CodegenError(
            f"node '{node.name}': got {node.target}, which ranks call together; expected one of "
            f"{', '.join(map(str, COLLECTIVES))}; add what it makes of all ranks' operands to "
            "codegen/collectives/lockstep_collectives.py"
        )
    try:
        return (call or _eager)(node.target, args, kwargs)
    except Exception as error:
        error.add_note(f"at node {node.format_node()}")
        raise


def _eager(target: Any, args: Any, kwargs: Any) -> Any:
    function: Any = RUN.get(target, target)
    return function(*args, **kwargs)


def _by_name(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Returns the arguments of a call by the names of the op's schema, defaults included."""
    declared = target._schema.arguments
    found = {a.name: a.default_value for a in declared if a.has_default_value()}
    return {**found, **dict(zip((a.name for a in declared), args, strict=False)), **kwargs}
