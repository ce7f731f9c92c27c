"""Costs of graphs as formulas of the lengths, and the settings chosen by them."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch

from dcpc.buckets import Bucket

# A menu step is a number of recompute steps, and above it, in units of this, the level at which
# saved values leave the device (`plan/prices/away_kinds.py`).
LEAVES = 1 << 16


@dataclass(frozen=True, slots=True)
class Work:
    """Calls of one partition that cost the same: the unit that a roofline prices.

    Attributes:
        op_class: "matmul", "attention", "convolution", "pointwise", "reduction", "copy",
            "collective", "host" (a collective of what is not on the device) or "unpriced".
        forward: whether the calls are in the forward graph.
        dtype: element type in which the calls compute.
        ranks: ranks of the group, for collectives; else 1.
        count: number of equal calls.
        flops: floating-point operations of one call, those of pointwise ops included.
        bytes_moved: bytes one call reads and writes.
        wire_bytes: bytes this rank sends in one call.
        op: name of the collective, such as "dcpc::all_to_all"; "" for other calls.
        messages: number of sends that wait for an answer: 1; for ring attention one a step.
    """

    op_class: str
    forward: bool
    dtype: torch.dtype
    ranks: int
    count: int
    flops: sympy.Expr
    bytes_moved: sympy.Expr
    wire_bytes: sympy.Expr
    op: str = ""
    messages: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Costs of one forward and backward on one rank, as expressions of the dims, for any device.

    Two profiles are equal only if they are the same object, so that evaluating one can be cached.

    Attributes:
        flops: floating-point operations of matmuls, convolutions and attention, forward + backward
            (multiply and add count as two; causal attention counts the pairs it keeps).
        forward_flops: the forward's part of `flops`.
        bytes_moved: bytes read and written by every node.
        wire_bytes: bytes this rank sends in collectives.
        saved_bytes: activations kept between forward and backward (parameters and inputs excluded).
        peak_terms: live bytes at the program points that can be the peak, undominated ones only;
            parameters, buffers and inputs excluded, gradients included.
        peak_points: for each of `peak_terms` the name of the node at which it holds.
        parameter_bytes: bytes of all residents whose size is fixed: parameters, buffers, constants.
        input_bytes: bytes of the other residents.
        gradient_bytes: bytes of all gradients.
        work: every call, grouped by cost.
        unpriced: names of the ops without a formula: they count one operation an output element.
        symbols: symbols of the expressions, by name.
    """

    flops: sympy.Expr
    forward_flops: sympy.Expr
    bytes_moved: sympy.Expr
    wire_bytes: sympy.Expr
    saved_bytes: sympy.Expr
    peak_terms: tuple[sympy.Expr, ...]
    peak_points: tuple[str, ...]
    parameter_bytes: int
    input_bytes: sympy.Expr
    gradient_bytes: int
    work: tuple[Work, ...]
    unpriced: tuple[str, ...]
    symbols: tuple[sympy.Symbol, ...]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A setting of a bucket: how a micro-batch is run, and the seconds it is predicted to take.

    Attributes:
        sp: ranks of the group that shares a micro-batch.
        micro_batch: most samples of a micro-batch; the placement is made for this number.
        menu_step: number of recompute steps taken, and `LEAVES` times the level of what leaves.
        seconds_s: predicted seconds of a full micro-batch, forward and backward.
        fits: whether the setting fits a rank's memory.
        again_bytes: bytes of activations that backward makes again.
        activation_bytes: bytes of activations that are kept where nothing is made again.
        away_bytes: bytes of activations that leave the device between forward and backward.
    """

    sp: int
    micro_batch: int
    menu_step: int
    seconds_s: float
    fits: bool = field(default=True, kw_only=True)
    again_bytes: int = field(default=0, kw_only=True, compare=False)
    activation_bytes: int = field(default=0, kw_only=True, compare=False)
    away_bytes: int = field(default=0, kw_only=True, compare=False)

    @property
    def recompute(self) -> str:
        """Share of the activations' bytes that backward makes again, as text."""
        return f"{self.again_bytes / max(1, self.activation_bytes):.0%}"

    @property
    def rank_seconds(self) -> float:
        """Seconds of one rank's time that a sample takes."""
        return self.seconds_s * self.sp / self.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan(PlanRow):
    """The row chosen for one bucket.

    Attributes:
        bucket: the shape bucket.
        steps: number of steps of the recompute menu.
        peak_bytes: predicted peak of activations and gradients on the fullest rank; parameters and
            optimizer state excluded.
        reason: reason for the choice, in words.
    """

    bucket: Bucket
    steps: int
    peak_bytes: int
    reason: str
