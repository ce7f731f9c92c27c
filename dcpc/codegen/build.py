"""Program + placement + recompute -> variant: the phase in order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dcpc.codegen.backends import compile_graph, decompositions
from dcpc.codegen.joint import Joint, make_joint
from dcpc.codegen.lower import Lowered, lower
from dcpc.codegen.partition import partition
from dcpc.codegen.variant import Variant, handing_over
from dcpc.ir import Partition, Placement, Program

log = logging.getLogger(__name__)


class Lowering:
    """One placement of a program, lowered and differentiated once; partitions and variants of it.

    Attributes:
        lowered: the forward graph of one rank.
        joint: forward and backward in one graph.
    """

    def __init__(
        self,
        program: Program,
        placement: Placement,
        tensors: Mapping[str, Tensor],
        group: str,
        backend: str,
        hints: tuple[int, ...] = (),
    ) -> None:
        """Lowers and differentiates.

        Args:
            program: the traced model.
            placement: how it is split.
            tensors: placeholder name -> parameter, buffer or constant.
            group: name of the process group of the collectives.
            backend: "eager" or "inductor"; decides how small the ops are.
            hints: size of each integer in the trace; () for the usual ones.
        """
        self.program, self.placement, self.backend = program, placement, backend
        self.lowered: Lowered = lower(program, placement, group)
        self.joint: Joint = make_joint(
            program, self.lowered, tensors, decompositions(backend), hints
        )

    def partition(self, segments: Mapping[str, int], recompute: frozenset[int]) -> Partition:
        """Returns the forward and backward graphs in which these segments recompute."""
        return partition(self.program, self.joint, segments, recompute)

    def variant(self, parts: Partition) -> Variant:
        """Returns a runnable variant of a partition."""
        placeholders = [n for n in parts.forward.graph.nodes if n.op == "placeholder"]
        tensors = tuple(n.name for n in placeholders if isinstance(n.meta["val"], Tensor))
        trainable = tuple(tensors.index(n) for n in self.joint.trainable)
        forward, more = compile_graph(parts.forward, self.backend, self.joint.fake_mode)
        backward, even_more = compile_graph(parts.backward, self.backend, self.joint.fake_mode)
        found: list[Any] = [*more, *even_more]
        names = self.joint.names
        return Variant(
            partition=parts,
            integers=self.lowered.integers,
            placeholders=tensors,
            trainable=trainable,
            sp=self.placement.sp,
            guards=(*self.joint.guards, *(g.subs(names) for g in found)),
            run_forward=forward,
            run_backward=backward,
            run_handing_over=handing_over(parts.backward) if self.backend == "eager" else None,
            backend=self.backend,
        )
